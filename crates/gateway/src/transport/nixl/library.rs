//! NIXL's C functions, loaded at run time.
//!
//! Source of every declaration: `src/bindings/rust/wrapper.h` of ai-dynamo/nixl, which the crate
//! `nixl-sys` 1.5.2 carries as `wrapper.h`, and whose bodies are in `wrapper.cpp` beside it. One of
//! them takes a structure: [`AgentConfig`].

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::Path;

use gpu_ipc::backend::explain;

use super::find;
use crate::error::Result;

/// `nixl_capi_status_t`: `NIXL_CAPI_SUCCESS`.
pub const SUCCESS: c_int = 0;
/// `nixl_capi_status_t`: `NIXL_CAPI_IN_PROG`.
pub const IN_PROGRESS: c_int = 1;

/// `nixl_capi_mem_type_t`: `NIXL_CAPI_MEM_DRAM`.
pub const DRAM: c_int = 0;
/// `nixl_capi_mem_type_t`: `NIXL_CAPI_MEM_VRAM`.
pub const VRAM: c_int = 1;

/// `nixl_capi_xfer_op_t`: `NIXL_CAPI_XFER_OP_READ`.
pub const READ: c_int = 0;
/// `NIXL_CAPI_XFER_OP_WRITE`: what no gateway does, and a rogue.
#[cfg(feature = "faults")]
pub const WRITE: c_int = 1;

/// Says what a status means, by its name in `nixl_capi_status_t`.
pub fn meaning(status: c_int) -> &'static str {
    match status {
        SUCCESS => "success",
        IN_PROGRESS => "in progress",
        -1 => "invalid parameter",
        -2 => "the backend failed",
        -3 => "invalid state",
        -4 => "an exception",
        -5 => "no telemetry",
        -6 => "not found",
        _ => "an unknown status",
    }
}

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        #[repr(C)]
        pub struct $name {
            _private: [u8; 0],
        }
    )*};
}

opaque! {
    /// `nixl_capi_agent_s`
    AgentHandle
    /// `nixl_capi_params_s`
    Params
    /// `nixl_capi_backend_s`
    BackendHandle
    /// `nixl_capi_opt_args_s`
    Options
    /// `nixl_capi_reg_dlist_s`: ranges to register.
    RegionList
    /// `nixl_capi_xfer_dlist_s`: ranges of one side of a transfer.
    RangeList
    /// `nixl_capi_xfer_req_s`
    RequestHandle
}

/// `nixl_capi_agent_config_t`, as from NIXL 1.4.0 to 1.5.2.
///
/// A comment there announces a port of 16 bits. With that, the fields that are not 0 here keep
/// their places, and zeros follow: so a later layout finds the same.
#[repr(C)]
#[derive(Default, Debug)]
pub struct AgentConfig {
    progress_thread: bool,
    listen_thread: bool,
    listen_port: c_int,
    synchronisation: c_int,
    workers: c_uint,
    progress_delay_us: u64,
    listen_delay_us: u64,
    telemetry: bool,
    _zeros: [u64; 8],
}

impl AgentConfig {
    /// Configures an agent whose thread sleeps for at most this many microseconds, rounded up to
    /// milliseconds, when no event wakes it; or an agent that goes on in calls of
    /// `nixl_capi_get_xfer_status` alone.
    pub fn new(thread_sleeps_us: Option<u64>) -> Self {
        let (progress_thread, progress_delay_us) =
            (thread_sleeps_us.is_some(), thread_sleeps_us.unwrap_or(0));
        Self {
            progress_thread,
            progress_delay_us,
            ..Self::default()
        }
    }
}

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*);)*) => {
        /// The functions, each with the name of `nixl_capi_NAME`. All return a status.
        pub struct Library {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($argument: $type),*) -> c_int,)*
        }

        impl Library {
            fn of(library: &libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Self {$(
                    $name: {
                        // SAFETY: `Library::get` asks for the symbol's type: it is that of the
                        // declaration in NIXL's header, an enumeration being an `int`. The pointer
                        // is not used after the library is unloaded, because it never is.
                        *unsafe { library.get(concat!("nixl_capi_", stringify!($name)))? }
                    },
                )*})
            }
        }
    };
}

functions! {
    /// Makes an agent.
    create_configured_agent(name: *const c_char, config: *const AgentConfig, agent: *mut *mut AgentHandle);
    /// Ends it.
    destroy_agent(agent: *mut AgentHandle);
    /// Gives what a peer needs to read from a list's ranges alone, in memory of `malloc`; of an empty
    /// list, to connect.
    get_local_partial_md(
        agent: *mut AgentHandle,
        list: *mut RegionList,
        data: *mut *mut c_void,
        bytes: *mut usize,
        options: *mut Options
    );
    /// Takes a peer's metadata, and gives its name in memory of `malloc`.
    load_remote_md(agent: *mut AgentHandle, data: *const c_void, bytes: usize, name: *mut *mut c_char);
    /// Forgets a peer, and closes the connection.
    invalidate_remote_md(agent: *mut AgentHandle, name: *const c_char);
    /// Makes an empty map of parameters.
    create_params(params: *mut *mut Params);
    /// Adds one, copied.
    params_add(params: *mut Params, key: *const c_char, value: *const c_char);
    /// Frees it.
    destroy_params(params: *mut Params);
    /// Loads a plug-in and starts it.
    create_backend(
        agent: *mut AgentHandle,
        plugin: *const c_char,
        params: *mut Params,
        backend: *mut *mut BackendHandle
    );
    /// Frees the handle: the backend itself ends with the agent.
    destroy_backend(backend: *mut BackendHandle);
    /// Makes options: no backend, no notification.
    create_opt_args(options: *mut *mut Options);
    /// Lets them name a backend.
    opt_args_add_backend(options: *mut Options, backend: *mut BackendHandle);
    /// Frees them.
    destroy_opt_args(options: *mut Options);
    /// Makes an empty list of ranges to register.
    create_reg_dlist(kind: c_int, list: *mut *mut RegionList);
    /// Adds a range, copied.
    reg_dlist_add_desc(
        list: *mut RegionList,
        address: usize,
        bytes: usize,
        device: u64,
        metadata: *const c_void,
        metadata_bytes: usize
    );
    /// Frees it.
    destroy_reg_dlist(list: *mut RegionList);
    /// Registers its ranges.
    register_mem(agent: *mut AgentHandle, list: *mut RegionList, options: *mut Options);
    /// Takes that back.
    deregister_mem(agent: *mut AgentHandle, list: *mut RegionList, options: *mut Options);
    /// Makes an empty list of ranges to transfer.
    create_xfer_dlist(kind: c_int, list: *mut *mut RangeList);
    /// Adds a range, copied.
    xfer_dlist_add_desc(list: *mut RangeList, address: usize, bytes: usize, device: u64);
    /// Frees it.
    destroy_xfer_dlist(list: *mut RangeList);
    /// Prepares a transfer. The lists are copied.
    create_xfer_req(
        agent: *mut AgentHandle,
        operation: c_int,
        local: *mut RangeList,
        remote: *mut RangeList,
        peer: *const c_char,
        request: *mut *mut RequestHandle,
        options: *mut Options
    );
    /// Starts it.
    post_xfer_req(agent: *mut AgentHandle, request: *mut RequestHandle, options: *mut Options);
    /// Says how far it is.
    get_xfer_status(agent: *mut AgentHandle, request: *mut RequestHandle);
    /// Ends NIXL's side of it, whatever its state.
    release_xfer_req(agent: *mut AgentHandle, request: *mut RequestHandle);
    /// Frees the handle of a released request.
    destroy_xfer_req(request: *mut RequestHandle);
}

impl Library {
    /// Loads the first of `candidates` that can be, for the rest of the process.
    ///
    /// It is never unloaded, and its table lives as long: NIXL's threads and what it runs at exit
    /// are its code.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable) with what the loader said of each.
    pub fn load<P: AsRef<Path>>(candidates: &[P]) -> Result<&'static Self> {
        let mut said = Vec::new();
        for candidate in candidates {
            let path = candidate.as_ref();
            // SAFETY: `Library::new` runs the initialisers of the library and of those it needs.
            // They are NIXL's, gRPC's and UCX's, which may run in any thread and ask for nothing
            // before; that the file is NIXL's is what who names it, or installs it, answers for.
            match unsafe { libloading::Library::new(path) } {
                Ok(library) => match Self::of(&library) {
                    Ok(functions) => {
                        std::mem::forget(library);
                        return Ok(Box::leak(Box::new(functions)));
                    }
                    Err(error) => {
                        said.push(format!(
                            "{} lacks a function of NIXL 1.5: {}",
                            path.display(),
                            explain(&error)
                        ));
                        // Its threads may run already.
                        std::mem::forget(library);
                    }
                },
                Err(error) => said.push(explain(&error)),
            }
        }
        Err(find::missing(said.join("; ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_library_is_said_with_the_loaders_words_and_how_to_get_it() {
        let place = tempfile::tempdir().expect("a folder");
        let file = place.path().join("libnixl_capi.so");
        std::fs::write(&file, "no library").expect("a file");
        let error = Library::load(&[file.as_path(), Path::new("no-such-library.so")])
            .err()
            .expect("it is none");
        let text = error.to_string();
        for part in [
            file.to_str().expect("a name"),
            "no-such-library.so",
            "pip install",
            find::VARIABLE,
        ] {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
    }

    #[test]
    fn a_library_without_the_functions_is_named() {
        let error = Library::load(&["libc.so.6"]).err().expect("it is another");
        assert!(
            error
                .to_string()
                .contains("nixl_capi_create_configured_agent"),
            "{error}"
        );
    }
}

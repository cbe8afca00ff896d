//! One NIXL agent with the backend UCX, and the memory registered with it.

use std::ffi::{CString, c_char, c_int, c_void};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::library::{
    AgentConfig, AgentHandle, BackendHandle, DRAM, Library, Options, Params, RegionList, SUCCESS,
    VRAM, meaning,
};
use crate::error::{Error, Result};
use crate::transport::{Place, Span};

/// The longest sleep of an agent's thread. UCX wakes it by events; NIXL's source tells of a bug by
/// which some are lost.
const SLEEP_US: u64 = 1_000;

/// An agent. It ends when the last registration, peer and transfer that uses it has.
pub struct Agent {
    library: &'static Library,
    name: String,
    /// Every call goes through this lock: an agent made with default settings has none of its own
    /// (`NIXL_THREAD_SYNC_NONE` in `nixl_params.h`). UCX's progress thread has its own.
    handles: Mutex<Handles>,
}

/// What the agent is to NIXL. All are valid until [`Agent`] is dropped.
pub struct Handles {
    pub agent: NonNull<AgentHandle>,
    backend: NonNull<BackendHandle>,
    /// The backend UCX, no notification.
    pub options: NonNull<Options>,
}

// SAFETY: NIXL's agent is not bound to a thread: with `NIXL_THREAD_SYNC_NONE` it asks that calls do
// not overlap, which the lock around `Handles` sees to.
unsafe impl Send for Handles {}

impl Agent {
    /// Starts an agent. Its name is how peers call it, and must be unique among them.
    ///
    /// An agent that peers read from needs a thread, which answers them. By default NIXL's thread
    /// never sleeps: an idle gateway took a whole core. With a delay it waits for events. Without
    /// the thread the agent goes on in calls of `poll`.
    ///
    /// `transports` limits UCX as its variable `UCX_TLS` does, which goes before: `tcp`,
    /// `tcp,cuda_copy`.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] when NIXL cannot start it, or has no plug-in UCX.
    pub fn start(
        library: &'static Library,
        name: &str,
        transports: Option<&str>,
        thread: bool,
    ) -> Result<Self> {
        let owned = text("the agent's name", name)?;
        let mut agent = ptr::null_mut();
        let config = AgentConfig::new(thread.then_some(SLEEP_US));
        // SAFETY: `nixl_capi_create_configured_agent` reads a string that ends in zero and a
        // structure of its layout, keeps neither, and writes a handle.
        let status =
            unsafe { (library.create_configured_agent)(owned.as_ptr(), &config, &mut agent) };
        let agent = made(status, agent, "agent")?;
        let backend = match start_backend(library, agent, transports) {
            Ok(backend) => backend,
            Err(error) => {
                // SAFETY: `nixl_capi_destroy_agent` takes an agent that it made and that nothing
                // uses.
                unsafe { (library.destroy_agent)(agent.as_ptr()) };
                return Err(error);
            }
        };
        let mut options = ptr::null_mut();
        // SAFETY: `nixl_capi_create_opt_args` writes a handle.
        let status = unsafe { (library.create_opt_args)(&mut options) };
        let options = made(status, options, "options").and_then(|options| {
            // SAFETY: `nixl_capi_opt_args_add_backend` takes valid handles, which both are.
            match unsafe { (library.opt_args_add_backend)(options.as_ptr(), backend.as_ptr()) } {
                SUCCESS => Ok(options),
                status => {
                    // SAFETY: `nixl_capi_destroy_opt_args` takes options that it made and that
                    // nothing uses.
                    unsafe { (library.destroy_opt_args)(options.as_ptr()) };
                    Err(cannot_start("options", status))
                }
            }
        });
        match options {
            Ok(options) => {
                let handles = Mutex::new(Handles {
                    agent,
                    backend,
                    options,
                });
                Ok(Self {
                    library,
                    name: name.to_owned(),
                    handles,
                })
            }
            Err(error) => {
                // SAFETY: `nixl_capi_destroy_backend` takes the handle it made, which nothing uses.
                unsafe { (library.destroy_backend)(backend.as_ptr()) };
                // SAFETY: `nixl_capi_destroy_agent` takes an agent that it made and that nothing
                // uses.
                unsafe { (library.destroy_agent)(agent.as_ptr()) };
                Err(error)
            }
        }
    }

    /// The name by which peers call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// NIXL's functions.
    pub fn library(&self) -> &'static Library {
        self.library
    }

    /// Takes the lock that keeps calls apart.
    pub fn lock(&self) -> MutexGuard<'_, Handles> {
        // A panic in between leaves no call half done: each is one call of C.
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what a peer needs in order to connect, without a range of memory.
    pub fn connection(&self) -> Result<Vec<u8>> {
        let mut list = ptr::null_mut();
        // SAFETY: `nixl_capi_create_reg_dlist` writes a handle.
        let status = unsafe { (self.library.create_reg_dlist)(DRAM, &mut list) };
        let list = made(status, list, "list of ranges")?;
        let metadata = self.metadata(list);
        // SAFETY: `nixl_capi_destroy_reg_dlist` takes a list that it made and that nothing uses.
        unsafe { (self.library.destroy_reg_dlist)(list.as_ptr()) };
        metadata
    }

    /// Returns what a peer needs in order to read from a list's ranges, which are registered; of an
    /// empty list, in order to connect.
    fn metadata(&self, list: NonNull<RegionList>) -> Result<Vec<u8>> {
        let handles = self.lock();
        let (mut data, mut bytes) = (ptr::null_mut(), 0);
        // SAFETY: `nixl_capi_get_local_partial_md` takes a valid agent, list and options, and writes
        // a pointer and a length.
        let status = unsafe {
            (self.library.get_local_partial_md)(
                handles.agent.as_ptr(),
                list.as_ptr(),
                &mut data,
                &mut bytes,
                handles.options.as_ptr(),
            )
        };
        drop(handles);
        let data = made(status, data, "metadata")?;
        // SAFETY: `from_raw_parts`: NIXL gave a buffer of `bytes` bytes, which it has filled and
        // does not keep.
        let copy =
            unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), bytes) }.to_vec();
        // SAFETY: `free` takes what `malloc` gave, by which `nixl_capi_get_local_partial_md`
        // allocates.
        unsafe { libc::free(data.as_ptr()) };
        Ok(copy)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let handles = self
            .handles
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `nixl_capi_destroy_opt_args` takes options that it made, which are used under the
        // lock alone.
        unsafe { (self.library.destroy_opt_args)(handles.options.as_ptr()) };
        // SAFETY: `nixl_capi_destroy_backend` frees the handle; the backend is the agent's.
        unsafe { (self.library.destroy_backend)(handles.backend.as_ptr()) };
        // SAFETY: `nixl_capi_destroy_agent` takes an agent that it made. Registrations, peers and
        // transfers hold the `Agent`, so none is left; one that never ended keeps it from being
        // dropped.
        let status = unsafe { (self.library.destroy_agent)(handles.agent.as_ptr()) };
        if status != SUCCESS {
            tracing::warn!(agent = self.name, status, "NIXL's agent did not end");
        }
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Ranges that are registered until this is dropped.
pub struct Registered {
    agent: Arc<Agent>,
    spans: Vec<Span>,
    /// One list for each kind of memory.
    lists: Vec<NonNull<RegionList>>,
}

// SAFETY: the lists are plain data of NIXL's, touched here alone, under the agent's lock.
unsafe impl Send for Registered {}
// SAFETY: a shared reference gives access to the spans, which never change, and to the lists, which
// NIXL reads under the agent's lock.
unsafe impl Sync for Registered {}

impl Registered {
    /// Registers memory.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range that is empty or ends beyond the address space,
    /// [`Error::Unavailable`] when NIXL takes it not. Then none is registered.
    ///
    /// # Safety
    ///
    /// The memory is mapped in this process until the registration is dropped.
    pub unsafe fn new(agent: &Arc<Agent>, spans: &[Span]) -> Result<Self> {
        let mut registered = Self {
            agent: Arc::clone(agent),
            spans: Vec::new(),
            lists: Vec::new(),
        };
        for kind in [DRAM, VRAM] {
            let of_kind: Vec<_> = spans
                .iter()
                .copied()
                .filter(|span| kind_and_device(span.place).0 == kind)
                .collect();
            if !of_kind.is_empty() {
                registered.add(kind, &of_kind)?;
            }
        }
        Ok(registered)
    }

    /// Registers ranges of one kind. What was registered before stays, for the caller to drop.
    fn add(&mut self, kind: c_int, spans: &[Span]) -> Result<()> {
        let library = self.agent.library;
        let mut list = ptr::null_mut();
        // SAFETY: `nixl_capi_create_reg_dlist` writes a handle.
        let status = unsafe { (library.create_reg_dlist)(kind, &mut list) };
        let list = made(status, list, "list of ranges")?;
        let filled = spans.iter().try_for_each(|span| {
            let (address, bytes) = range(span.address, span.bytes)?;
            let device = kind_and_device(span.place).1;
            // SAFETY: `nixl_capi_reg_dlist_add_desc` copies numbers into a list it made; no
            // metadata, of no length.
            let status = unsafe {
                (library.reg_dlist_add_desc)(list.as_ptr(), address, bytes, device, ptr::null(), 0)
            };
            if status == SUCCESS {
                Ok(())
            } else {
                Err(refused(spans, status))
            }
        });
        let done = filled.and_then(|()| {
            let handles = self.agent.lock();
            // SAFETY: `nixl_capi_register_mem` takes valid handles; that the ranges are mapped
            // until they are taken back, the caller of `Registered::new` promises.
            let status = unsafe {
                (library.register_mem)(
                    handles.agent.as_ptr(),
                    list.as_ptr(),
                    handles.options.as_ptr(),
                )
            };
            if status == SUCCESS {
                Ok(())
            } else {
                Err(refused(spans, status))
            }
        });
        match done {
            Ok(()) => {
                self.lists.push(list);
                self.spans.extend_from_slice(spans);
            }
            // SAFETY: `nixl_capi_destroy_reg_dlist` takes a list that it made and that nothing
            // uses.
            Err(_) => drop(unsafe { (library.destroy_reg_dlist)(list.as_ptr()) }),
        }
        done
    }

    /// Returns what a peer needs in order to read from these ranges, once it can connect.
    ///
    /// # Errors
    ///
    /// What NIXL says.
    pub fn metadata(&self) -> Result<Vec<Vec<u8>>> {
        let of = |&list: &NonNull<RegionList>| self.agent.metadata(list);
        self.lists.iter().map(of).collect()
    }

    /// The ranges.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Whether a range lies within one that is registered.
    pub fn covers(&self, span: &Span) -> bool {
        self.spans.iter().any(|own| {
            own.place == span.place && within(span.address, span.bytes, own.address, own.bytes)
        })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let library = self.agent.library;
        for list in self.lists.drain(..) {
            let handles = self.agent.lock();
            // SAFETY: `nixl_capi_deregister_mem` takes valid handles and the list that was
            // registered.
            let status = unsafe {
                (library.deregister_mem)(
                    handles.agent.as_ptr(),
                    list.as_ptr(),
                    handles.options.as_ptr(),
                )
            };
            drop(handles);
            if status != SUCCESS {
                tracing::warn!(
                    status,
                    what = meaning(status),
                    "NIXL did not take a registration back"
                );
            }
            // SAFETY: `nixl_capi_destroy_reg_dlist` takes a list that it made and that nothing
            // uses.
            unsafe { (library.destroy_reg_dlist)(list.as_ptr()) };
        }
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("spans", &self.spans)
            .finish_non_exhaustive()
    }
}

/// NIXL's kind of memory and number of device.
pub fn kind_and_device(place: Place) -> (c_int, u64) {
    match place {
        Place::Host => (DRAM, 0),
        Place::Device(ordinal) => (VRAM, u64::from(ordinal)),
    }
}

/// Whether a range lies within another.
pub fn within(address: u64, bytes: u64, outer: u64, outer_bytes: u64) -> bool {
    address >= outer && bytes <= outer_bytes && address - outer <= outer_bytes - bytes
}

/// A range as addresses of this machine.
///
/// # Errors
///
/// [`Error::Invalid`] for one that is empty or ends beyond the address space.
pub fn range(address: u64, bytes: u64) -> Result<(usize, usize)> {
    let fits = (bytes > 0 && address.checked_add(bytes).is_some()).then_some(());
    fits.and_then(|()| Some((usize::try_from(address).ok()?, usize::try_from(bytes).ok()?)))
        .ok_or_else(|| Error::Invalid {
            what: "a range of memory",
            got: format!("{bytes} bytes at {address:#x}"),
            must: "some bytes that end within the address space",
        })
}

/// A string for C.
///
/// # Errors
///
/// [`Error::Invalid`] for one with a zero in it.
pub fn text(what: &'static str, value: &str) -> Result<CString> {
    CString::new(value).map_err(|_| Error::Invalid {
        what,
        got: format!("{value:?}"),
        must: "text without a zero byte",
    })
}

/// What a call made, or why it did not.
fn made<T>(status: c_int, handle: *mut T, what: &'static str) -> Result<NonNull<T>> {
    match NonNull::new(handle) {
        Some(handle) if status == SUCCESS => Ok(handle),
        _ => Err(cannot_start(what, status)),
    }
}

fn cannot_start(what: &'static str, status: c_int) -> Error {
    Error::Unavailable {
        what: format!("NIXL's {what}"),
        why: format!("{} (status {status})", meaning(status)),
        remedy: "NIXL_LOG_LEVEL=debug and UCX_LOG_LEVEL=info say more on standard error; the wheel's folders must lie \
                 together, because the library finds its plug-in UCX by its own place",
    }
}

fn refused(spans: &[Span], status: c_int) -> Error {
    Error::Unavailable {
        what: format!("a registration of {} ranges", spans.len()),
        why: format!("NIXL says: {} (status {status})", meaning(status)),
        remedy: "UCX_LOG_LEVEL=info says more; device memory needs the CUDA libraries that UCX's module libuct_cuda \
                 loads (libcuda.so.1, libnvidia-ml.so.1), and RDMA a limit of locked memory that is high enough",
    }
}

/// Starts the backend UCX.
fn start_backend(
    library: &'static Library,
    agent: NonNull<AgentHandle>,
    transports: Option<&str>,
) -> Result<NonNull<BackendHandle>> {
    let mut params: *mut Params = ptr::null_mut();
    // SAFETY: `nixl_capi_create_params` writes a handle.
    let status = unsafe { (library.create_params)(&mut params) };
    let params = made(status, params, "parameters")?;
    let limited = transports.map_or(Ok(()), |transports| {
        let value = text("UCX's transports", &format!("TLS={transports}"))?;
        // SAFETY: `nixl_capi_params_add` copies two strings that end in zero into a map it made.
        let status = unsafe {
            (library.params_add)(params.as_ptr(), c"engine_config".as_ptr(), value.as_ptr())
        };
        if status == SUCCESS {
            Ok(())
        } else {
            Err(cannot_start("parameters", status))
        }
    });
    let backend = limited.and_then(|()| {
        let mut backend = ptr::null_mut();
        // SAFETY: `nixl_capi_create_backend` takes valid handles and a string that ends in zero,
        // and writes a handle.
        let status = unsafe {
            (library.create_backend)(
                agent.as_ptr(),
                c"UCX".as_ptr(),
                params.as_ptr(),
                &mut backend,
            )
        };
        made(status, backend, "backend UCX")
    });
    // SAFETY: `nixl_capi_destroy_params` takes a map that it made and that nothing uses: the
    // backend has copied it.
    unsafe { (library.destroy_params)(params.as_ptr()) };
    backend
}

/// Loads a peer's metadata and returns the name in it.
///
/// # Errors
///
/// The status that NIXL gave.
pub fn load_remote(agent: &Agent, metadata: &[u8]) -> Result<CString, c_int> {
    let handles = agent.lock();
    let mut name: *mut c_char = ptr::null_mut();
    // SAFETY: `nixl_capi_load_remote_md` takes a valid agent, copies the metadata's bytes, and
    // writes a pointer.
    let status = unsafe {
        (agent.library.load_remote_md)(
            handles.agent.as_ptr(),
            metadata.as_ptr().cast::<c_void>(),
            metadata.len(),
            &mut name,
        )
    };
    drop(handles);
    if status != SUCCESS || name.is_null() {
        return Err(status);
    }
    // SAFETY: `CStr::from_ptr`: NIXL gave a string of `strdup`, which ends in zero and which nobody
    // changes.
    let copy = unsafe { std::ffi::CStr::from_ptr(name) }.to_owned();
    // SAFETY: `free` takes what `strdup` gave.
    unsafe { libc::free(name.cast()) };
    Ok(copy)
}

/// Forgets a peer. No transfer from it may be under way.
pub fn forget_remote(agent: &Agent, name: &std::ffi::CStr) {
    let handles = agent.lock();
    // SAFETY: `nixl_capi_invalidate_remote_md` takes a valid agent and a string that ends in zero.
    let status =
        unsafe { (agent.library.invalidate_remote_md)(handles.agent.as_ptr(), name.as_ptr()) };
    drop(handles);
    // A peer that died has been forgotten by NIXL, which says `not found`.
    tracing::debug!(?name, status, "forgot a peer");
}

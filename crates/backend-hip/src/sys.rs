//! The part of the HIP API that this backend calls, beyond what drivers have in common.
//!
//! One table serves ROCm 5.2 to 10: what changed its number or its layout between versions is chosen
//! by [`Version`](crate::Version). Structures are declared with plain integers; `oracle` lists them
//! for `tests/abi` and `tests/oracle.rs`, which measure them against AMD's headers.

use std::ffi::{c_char, c_int, c_void};

use driver::calls::{Address, Calls, Found, Names, Stream};
use driver::code::Code;
use libloading::os::unix::Library;

/// Memory that another API exported (`hipExternalMemory_t`).
pub(crate) type ExternalMemory = *mut c_void;
/// What `hipStreamAddCallback` calls.
pub(crate) type Callback = unsafe extern "C" fn(Stream, Code, *mut c_void);

/// What the runtime knows of an address (`hipPointerAttribute_t`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PointerAttributes {
    /// A `hipMemoryType`: `Version::memory_type` reads it.
    pub(crate) kind: u32,
    pub(crate) device: c_int,
    pub(crate) device_pointer: Address,
    pub(crate) host_pointer: Address,
    pub(crate) is_managed: c_int,
    pub(crate) flags: u32,
}
const _: () = assert!(size_of::<PointerAttributes>() == 32);

/// Memory to import (`hipExternalMemoryHandleDesc`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ExternalHandle {
    /// [`EXTERNAL_OPAQUE_FD`].
    pub(crate) kind: u32,
    pub(crate) pad: u32,
    /// The descriptor, in the first four bytes; the rest is for Windows.
    pub(crate) fd: [u64; 2],
    pub(crate) size: u64,
    pub(crate) flags: u32,
    /// Younger headers add sixteen reserved integers.
    pub(crate) reserved: [u32; 17],
}

/// A piece of imported memory (`hipExternalMemoryBufferDesc`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ExternalBuffer {
    pub(crate) offset: u64,
    pub(crate) size: u64,
    pub(crate) flags: u32,
    /// Younger headers add sixteen reserved integers.
    pub(crate) reserved: [u32; 17],
}

pub(crate) const RANGE_DMA_BUF: u32 = 1;
pub(crate) const EXTERNAL_OPAQUE_FD: u32 = 1;
/// `hipDeviceAttributeVirtualMemoryManagementSupported`, from ROCm 5.3 on.
pub(crate) const ATTRIBUTE_VIRTUAL_MEMORY: u32 = 89;
/// `hipDeviceAttributeHostNumaId`, from ROCm 7.2 on.
pub(crate) const ATTRIBUTE_HOST_NUMA_NODE: u32 = 92;

/// The rows of [`Calls`] whose names are not `hip` and the common one.
static NAMES: Names = Names::new(
    "hip",
    driver::names! {
        malloc = hipMalloc;
        free = hipFree;
        host_alloc = hipHostMalloc;
        host_free = hipHostFree;
        host_register = hipHostRegister;
        host_unregister = hipHostUnregister;
        host_device_pointer = hipHostGetDevicePointer;
        pool_alloc = hipMallocFromPoolAsync;
        pool_free = hipFreeAsync;
        event_create = hipEventCreateWithFlags;
        stream_create = hipStreamCreateWithFlags;
    },
);

driver::symbols! {
    /// HIP's own functions, by the names of its manual.
    Own;

    hipInit: fn(u32);
    hipRuntimeGetVersion: fn(*mut c_int);
    hipGetLastError: fn();
    hipGetDeviceCount: fn(*mut c_int);
    hipGetDevice: fn(*mut c_int);
    hipSetDevice: fn(c_int);
    hipDeviceGetPCIBusId: fn(*mut c_char, c_int, c_int);
    hipDeviceEnablePeerAccess: fn(c_int, u32);
    hipPointerGetAttributes: fn(*mut PointerAttributes, Address);
    hipMemGetHandleForAddressRange: fn(*mut c_void, Address, usize, u32, u64);
    hipImportExternalMemory: fn(*mut ExternalMemory, *const ExternalHandle);
    hipExternalMemoryGetMappedBuffer: fn(*mut Address, ExternalMemory, *const ExternalBuffer);
    hipDestroyExternalMemory: fn(ExternalMemory);
    hipStreamGetDevice: fn(Stream, *mut c_int);
    hipStreamWriteValue64: fn(Stream, Address, u64, u32);
    hipStreamWaitValue64: fn(Stream, Address, u64, u32, u64);
    hipStreamAddCallback: fn(Stream, Callback, *mut c_void, u32);
}

/// A function without arguments that returns a text.
pub(crate) type Text = unsafe extern "C" fn() -> *const c_char;

/// What a runtime's library has beyond [`Calls`].
#[derive(Debug)]
pub(crate) struct Symbols {
    pub(crate) own: Own,
    /// `hipGetErrorName`: names a code.
    pub(crate) name_of: Option<unsafe extern "C" fn(Code) -> *const c_char>,
    /// Returns what files a library that stands in for the runtime keeps open instead of AMD's;
    /// AMD's own has no such function.
    pub(crate) device_files: Option<Text>,
    /// Returns the folder in which such a library shows whose queues there are, likewise.
    pub(crate) signs_of_life: Option<Text>,
    /// Returns the folder of the nodes that KFD lists, likewise.
    pub(crate) topology: Option<Text>,
}

impl Symbols {
    /// Looks every function up in a library.
    ///
    /// # Safety
    ///
    /// The library is a HIP runtime, and it is never unloaded.
    pub(crate) unsafe fn find(library: &Library) -> (Calls, Symbols) {
        let look = |row: &'static str| -> Found {
            let (manual, name) = NAMES.of(row);
            // SAFETY: `Library::get` asks that the type be the symbol's: any symbol has an address.
            let found = unsafe { library.get::<*mut c_void>(name.as_bytes()) };
            (manual, found.ok().map(|address| *address))
        };
        // SAFETY: `find` asks that what `look` finds have the row's prototype: each is that in
        // hip_runtime_api.h. Our caller vouches for the library.
        let calls = unsafe { Calls::find(&look) };
        let symbols = Symbols {
            // SAFETY: as above.
            own: unsafe { Own::find(&look) },
            // SAFETY: `Library::get`: as above.
            name_of: unsafe { library.get(b"hipGetErrorName\0") }
                .ok()
                .map(|found| *found),
            // SAFETY: `Library::get`: the function is ours, and of that type.
            device_files: unsafe { library.get(b"gpu_ipc_device_files\0") }
                .ok()
                .map(|found| *found),
            // SAFETY: `Library::get`: as above.
            signs_of_life: unsafe { library.get(b"gpu_ipc_signs_of_life\0") }
                .ok()
                .map(|found| *found),
            // SAFETY: `Library::get`: as above.
            topology: unsafe { library.get(b"gpu_ipc_topology\0") }
                .ok()
                .map(|found| *found),
        };
        (calls, symbols)
    }

    /// Lists the functions that the runtime lacks.
    pub(crate) fn missing(&self, calls: &Calls) -> Vec<&'static str> {
        let mut missing = self.own.missing();
        missing.extend(calls.missing());
        if self.name_of.is_none() {
            missing.push("hipGetErrorName");
        }
        missing
    }
}

/// Lists the functions, by the names of AMD's manual, and the sizes of their arguments.
#[cfg(any(test, feature = "oracle"))]
pub(crate) fn signatures() -> Vec<(&'static str, Vec<usize>)> {
    let all = Own::signatures().into_iter().chain(Calls::signatures());
    all.map(|(row, sizes)| (NAMES.of(row).0, sizes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_common_call_has_hips_name() {
        for (name, _) in signatures() {
            assert!(name.starts_with("hip"), "{name}");
        }
    }
}

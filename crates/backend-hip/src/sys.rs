//! The part of the HIP API that this backend calls, as a table of function pointers.
//!
//! One table serves ROCm 5.2 to 7.x: a function that the loaded runtime lacks is `None`, a code is
//! a plain number, and what changed its number or its layout between versions is chosen by
//! [`Version`](crate::Version). Structures are declared here with plain integers; `oracle` lists
//! them for `tests/abi` and `tests/oracle.rs`, which measure them against AMD's headers.

use std::ffi::{c_char, c_int, c_void};
use std::{fmt, ptr};

use gpu_api::vendor::pool::PoolProperties;
use libloading::os::unix::Library;

/// What every function of the runtime returns.
pub(crate) type Code = u32;

/// An address as the runtime takes it (`void *`, `hipDeviceptr_t`).
pub(crate) type Address = u64;

/// The runtime's name for a physical allocation (`hipMemGenericAllocationHandle_t`, a pointer).
pub(crate) type MemoryHandle = *mut c_void;

/// A stream (`hipStream_t`).
pub(crate) type Stream = *mut c_void;

/// An event (`hipEvent_t`).
pub(crate) type Event = *mut c_void;

/// Memory that another API exported (`hipExternalMemory_t`).
pub(crate) type ExternalMemory = *mut c_void;

/// A pool (`hipMemPool_t`).
pub(crate) type PoolHandle = *mut c_void;

/// What `hipLaunchHostFunc` calls.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// What `hipStreamAddCallback` calls.
pub(crate) type Callback = unsafe extern "C" fn(Stream, Code, *mut c_void);

/// A handle of memory or of an event (`hipIpcMemHandle_t`, `hipIpcEventHandle_t`), passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Handle {
    pub(crate) reserved: [c_char; 64],
}
const _: () = assert!(size_of::<Handle>() == 64 && align_of::<Handle>() == 1);

/// The identity of a device (`hipUUID`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Uuid {
    pub(crate) bytes: [c_char; 16],
}

/// Where memory lies (`hipMemLocation`).
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Location {
    /// [`LOCATION_DEVICE`] for device memory.
    pub(crate) kind: u32,
    /// The device.
    pub(crate) id: c_int,
}

/// What to allocate (`hipMemAllocationProp`), as it is from ROCm 5.7 on: before, the fields stood
/// in another order.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AllocationProperties {
    /// [`ALLOCATION_PINNED`]: the only kind of physical memory that devices have.
    pub(crate) kind: u32,
    /// How it can be exported: [`HANDLE_POSIX_FD`].
    pub(crate) handle_types: u32,
    /// Where.
    pub(crate) location: Location,
    /// For Windows.
    pub(crate) win32: *mut c_void,
    /// Compression, RDMA and usage.
    pub(crate) flags: [u16; 4],
}
const _: () = assert!(size_of::<AllocationProperties>() == 32);

impl AllocationProperties {
    /// Describes physical memory on a device that can be exported as a file descriptor.
    pub(crate) fn exportable(ordinal: c_int) -> AllocationProperties {
        AllocationProperties {
            kind: ALLOCATION_PINNED,
            handle_types: HANDLE_POSIX_FD,
            location: Location {
                kind: LOCATION_DEVICE,
                id: ordinal,
            },
            win32: ptr::null_mut(),
            flags: [0; 4],
        }
    }
}

/// Which device may access a mapping, and how (`hipMemAccessDesc`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AccessDescription {
    /// The device.
    pub(crate) location: Location,
    /// [`ACCESS_READ`] or [`ACCESS_READ_WRITE`].
    pub(crate) flags: u32,
}
const _: () = assert!(size_of::<AccessDescription>() == 12);

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

pub(crate) const LOCATION_DEVICE: u32 = 1;
pub(crate) const ALLOCATION_PINNED: u32 = 1;
pub(crate) const HANDLE_POSIX_FD: u32 = 1;
pub(crate) const RANGE_DMA_BUF: u32 = 1;
pub(crate) const EXTERNAL_OPAQUE_FD: u32 = 1;
pub(crate) const GRANULARITY_RECOMMENDED: u32 = 1;
pub(crate) const ACCESS_READ: u32 = 1;
pub(crate) const ACCESS_READ_WRITE: u32 = 3;
pub(crate) const WAIT_GEQ: u32 = 0;
pub(crate) const CAPTURE_RELAXED: u32 = 2;
pub(crate) const EVENT_DISABLE_TIMING: u32 = 2;
pub(crate) const EVENT_INTERPROCESS: u32 = 4;
pub(crate) const STREAM_NON_BLOCKING: u32 = 1;
pub(crate) const HOST_ALLOC_PORTABLE: u32 = 1;
pub(crate) const HOST_REGISTER_PORTABLE: u32 = 1;
pub(crate) const HOST_REGISTER_MAPPED: u32 = 2;
/// `hipDeviceAttributeVirtualMemoryManagementSupported`, from ROCm 5.3 on.
pub(crate) const ATTRIBUTE_VIRTUAL_MEMORY: u32 = 89;
/// `hipDeviceAttributeHostNumaId`, from ROCm 7.2 on.
pub(crate) const ATTRIBUTE_HOST_NUMA_NODE: u32 = 92;

/// One function of the runtime: its name in the manual, and where this runtime has it.
pub(crate) struct Symbol<F> {
    pub(crate) name: &'static str,
    pub(crate) function: Option<F>,
}

/// Declares a table of the runtime's functions, by the names of its manual.
macro_rules! symbols {
    ($table:ident; $($name:ident : fn($($argument:ty),* $(,)?);)*) => {
        /// Functions of the runtime's, by the names of its manual.
        #[allow(non_snake_case, reason = "the manual's names can be looked up, ours could not")]
        pub(crate) struct $table {
            $(pub(crate) $name: Symbol<unsafe extern "C" fn($($argument),*) -> Code>,)*
            /// Names a code.
            pub(crate) hipGetErrorName: Symbol<unsafe extern "C" fn(Code) -> *const c_char>,
            /// Returns what files a library that stands in for the runtime keeps open instead of
            /// AMD's; AMD's own has no such function.
            pub(crate) device_files: Symbol<unsafe extern "C" fn() -> *const c_char>,
            /// Returns the folder in which such a library shows whose queues there are, likewise.
            pub(crate) signs_of_life: Symbol<unsafe extern "C" fn() -> *const c_char>,
        }

        impl $table {
            /// Looks every function up in a library.
            ///
            /// # Safety
            ///
            /// The library is a HIP runtime, and it is never unloaded.
            pub(crate) unsafe fn find(library: &Library) -> $table {
                $table {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: `Library::get` asks that the type be the symbol's: each row of
                        // the table is the prototype in hip_runtime_api.h, with the result as the
                        // integer that C passes it as. Our caller vouches for the library.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> Code>(name.as_bytes())
                        };
                        Symbol { name: stringify!($name), function: found.ok().map(|function| *function) }
                    },)*
                    hipGetErrorName: {
                        // SAFETY: `Library::get`: as above.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn(Code) -> *const c_char>(b"hipGetErrorName\0")
                        };
                        Symbol { name: "hipGetErrorName", function: found.ok().map(|function| *function) }
                    },
                    device_files: {
                        // SAFETY: `Library::get`: the function is ours, and of that type.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn() -> *const c_char>(b"gpu_ipc_device_files\0")
                        };
                        Symbol { name: "gpu_ipc_device_files", function: found.ok().map(|function| *function) }
                    },
                    signs_of_life: {
                        // SAFETY: `Library::get`: the function is ours, and of that type.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn() -> *const c_char>(b"gpu_ipc_signs_of_life\0")
                        };
                        Symbol { name: "gpu_ipc_signs_of_life", function: found.ok().map(|function| *function) }
                    },
                }
            }

            /// Lists the functions and the sizes of their arguments, for a test that has another
            /// opinion.
            pub(crate) fn signatures() -> Vec<(&'static str, Vec<usize>)> {
                vec![$((stringify!($name), vec![$(size_of::<$argument>()),*]),)*]
            }

            /// Lists the functions that the runtime lacks.
            pub(crate) fn missing(&self) -> Vec<&'static str> {
                let mut missing = Vec::new();
                $(if self.$name.function.is_none() { missing.push(self.$name.name); })*
                if self.hipGetErrorName.function.is_none() {
                    missing.push(self.hipGetErrorName.name);
                }
                missing
            }
        }
    };
}

symbols! {
    Symbols;

    hipInit: fn(u32);
    hipRuntimeGetVersion: fn(*mut c_int);
    hipGetLastError: fn();

    hipGetDeviceCount: fn(*mut c_int);
    hipGetDevice: fn(*mut c_int);
    hipSetDevice: fn(c_int);
    hipDeviceGetName: fn(*mut c_char, c_int, c_int);
    hipDeviceGetUuid: fn(*mut Uuid, c_int);
    hipDeviceGetPCIBusId: fn(*mut c_char, c_int, c_int);
    hipDeviceTotalMem: fn(*mut usize, c_int);
    hipDeviceGetAttribute: fn(*mut c_int, u32, c_int);
    hipDeviceCanAccessPeer: fn(*mut c_int, c_int, c_int);
    hipDeviceEnablePeerAccess: fn(c_int, u32);
    hipThreadExchangeStreamCaptureMode: fn(*mut u32);

    hipMemGetInfo: fn(*mut usize, *mut usize);
    hipMalloc: fn(*mut Address, usize);
    hipFree: fn(Address);
    hipMemGetAddressRange: fn(*mut Address, *mut usize, Address);
    hipPointerGetAttributes: fn(*mut PointerAttributes, Address);
    hipHostMalloc: fn(*mut *mut c_void, usize, u32);
    hipHostFree: fn(*mut c_void);
    hipHostRegister: fn(*mut c_void, usize, u32);
    hipHostUnregister: fn(*mut c_void);
    hipHostGetDevicePointer: fn(*mut Address, *mut c_void, u32);

    hipMemGetAllocationGranularity: fn(*mut usize, *const AllocationProperties, u32);
    hipMemCreate: fn(*mut MemoryHandle, usize, *const AllocationProperties, u64);
    hipMemRelease: fn(MemoryHandle);
    hipMemAddressReserve: fn(*mut Address, usize, usize, Address, u64);
    hipMemAddressFree: fn(Address, usize);
    hipMemMap: fn(Address, usize, usize, MemoryHandle, u64);
    hipMemUnmap: fn(Address, usize);
    hipMemSetAccess: fn(Address, usize, *const AccessDescription, usize);
    hipMemExportToShareableHandle: fn(*mut c_void, MemoryHandle, u32, u64);
    hipMemImportFromShareableHandle: fn(*mut MemoryHandle, *mut c_void, u32);
    hipMemRetainAllocationHandle: fn(*mut MemoryHandle, Address);

    hipMemPoolCreate: fn(*mut PoolHandle, *const PoolProperties);
    hipMemPoolDestroy: fn(PoolHandle);
    hipMemPoolSetAttribute: fn(PoolHandle, u32, *mut c_void);
    hipMemPoolGetAttribute: fn(PoolHandle, u32, *mut c_void);
    hipMemPoolTrimTo: fn(PoolHandle, usize);
    hipMallocFromPoolAsync: fn(*mut Address, usize, PoolHandle, Stream);
    hipFreeAsync: fn(Address, Stream);

    hipMemGetHandleForAddressRange: fn(*mut c_void, Address, usize, u32, u64);
    hipImportExternalMemory: fn(*mut ExternalMemory, *const ExternalHandle);
    hipExternalMemoryGetMappedBuffer: fn(*mut Address, ExternalMemory, *const ExternalBuffer);
    hipDestroyExternalMemory: fn(ExternalMemory);

    hipIpcGetMemHandle: fn(*mut Handle, Address);
    hipIpcOpenMemHandle: fn(*mut Address, Handle, u32);
    hipIpcCloseMemHandle: fn(Address);
    hipIpcGetEventHandle: fn(*mut Handle, Event);
    hipIpcOpenEventHandle: fn(*mut Event, Handle);

    hipEventCreateWithFlags: fn(*mut Event, u32);
    hipEventRecord: fn(Event, Stream);
    hipEventQuery: fn(Event);
    hipEventDestroy: fn(Event);

    hipStreamCreateWithFlags: fn(*mut Stream, u32);
    hipStreamDestroy: fn(Stream);
    hipStreamQuery: fn(Stream);
    hipStreamSynchronize: fn(Stream);
    hipStreamWaitEvent: fn(Stream, Event, u32);
    hipStreamGetDevice: fn(Stream, *mut c_int);
    hipStreamGetId: fn(Stream, *mut u64);
    hipStreamIsCapturing: fn(Stream, *mut u32);
    hipStreamWriteValue64: fn(Stream, Address, u64, u32);
    hipStreamWaitValue64: fn(Stream, Address, u64, u32, u64);
    hipLaunchHostFunc: fn(Stream, HostFunction, *mut c_void);
    hipStreamAddCallback: fn(Stream, Callback, *mut c_void, u32);

    hipMemcpyHtoDAsync: fn(Address, *const c_void, usize, Stream);
    hipMemcpyDtoHAsync: fn(*mut c_void, Address, usize, Stream);
    hipMemcpyDtoDAsync: fn(Address, Address, usize, Stream);
    hipMemsetD8Async: fn(Address, u8, usize, Stream);
}

impl fmt::Debug for Symbols {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Symbols")
            .field("missing", &self.missing())
            .finish_non_exhaustive()
    }
}

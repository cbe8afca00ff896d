//! The part of the CUDA driver API that this backend calls, as a table of function pointers.
//!
//! The types and the library come from cudarc, the functions do not: cudarc's panic when the
//! library or a symbol is missing, and return a Rust enum, for which a code that its headers do not
//! list is undefined behaviour. In this table a missing symbol is `None` and a code is a plain
//! number.
//!
//! Structures that hold such enums, or whose fields cudarc names differently from one version of
//! CUDA's headers to the next, are declared here with plain integers and measured against cudarc's.

use std::ffi::{c_char, c_int, c_void};
use std::{fmt, ptr};

use cudarc::driver::sys;
pub(crate) use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUipcEventHandle, CUipcMemHandle, CUstream, CUuuid,
};
use gpu_api::vendor::pool::PoolProperties;

/// What every function of the driver returns.
pub(crate) type Code = u32;

/// The driver's name for a physical allocation (`CUmemGenericAllocationHandle`).
pub(crate) type MemoryHandle = u64;

/// The driver's name for a pool (`CUmemoryPool`).
pub(crate) type PoolHandle = *mut c_void;

/// What `cuLaunchHostFunc` calls.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// Where memory lies (`CUmemLocation`).
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Location {
    /// [`LOCATION_DEVICE`] for device memory.
    pub(crate) kind: u32,
    /// The device's ordinal.
    pub(crate) id: c_int,
}
const _: () = assert!(size_of::<Location>() == size_of::<sys::CUmemLocation>());

/// What to allocate, or what was allocated (`CUmemAllocationProp`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AllocationProperties {
    /// [`ALLOCATION_PINNED`]: the only kind of physical memory that devices have.
    pub(crate) kind: u32,
    /// The ways in which it can be exported: [`HANDLE_POSIX_FD`].
    pub(crate) handle_types: u32,
    /// Where.
    pub(crate) location: Location,
    /// For Windows.
    pub(crate) win32: *mut c_void,
    /// Compression, RDMA and usage.
    pub(crate) flags: [u8; 8],
}
const _: () = assert!(size_of::<AllocationProperties>() == size_of::<sys::CUmemAllocationProp>());

impl AllocationProperties {
    /// Describes physical memory on a device that can be exported as a file descriptor.
    pub(crate) fn exportable(ordinal: CUdevice) -> AllocationProperties {
        AllocationProperties {
            kind: ALLOCATION_PINNED,
            handle_types: HANDLE_POSIX_FD,
            location: Location {
                kind: LOCATION_DEVICE,
                id: ordinal,
            },
            win32: ptr::null_mut(),
            flags: [0; 8],
        }
    }
}

const _: () = assert!(size_of::<PoolProperties>() == size_of::<sys::CUmemPoolProps>());

/// Which device may access a mapping, and how (`CUmemAccessDesc`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AccessDescription {
    /// The device.
    pub(crate) location: Location,
    /// [`ACCESS_READ`] or [`ACCESS_READ_WRITE`].
    pub(crate) flags: u32,
}
const _: () = assert!(size_of::<AccessDescription>() == size_of::<sys::CUmemAccessDesc>());

/// One operation of a batch (`CUstreamBatchMemOpParams`, whose members for waiting and writing have
/// one layout).
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct BatchOperation {
    /// [`WAIT_VALUE_64`] or [`WRITE_VALUE_64`].
    pub(crate) operation: u32,
    /// The word.
    pub(crate) address: CUdeviceptr,
    /// What is stored or awaited.
    pub(crate) value: u64,
    /// [`WAIT_GEQ`], or 0 for a write that orders all work before it, for every observer in the
    /// system.
    pub(crate) flags: u32,
    /// For the driver.
    pub(crate) alias: CUdeviceptr,
    /// For operations with more members.
    pub(crate) pad: u64,
}
const _: () = assert!(size_of::<BatchOperation>() == size_of::<sys::CUstreamBatchMemOpParams>());

pub(crate) const LOCATION_DEVICE: u32 = 1;
pub(crate) const ALLOCATION_PINNED: u32 = 1;
pub(crate) const HANDLE_POSIX_FD: u32 = 1;
pub(crate) const GRANULARITY_MINIMUM: u32 = 0;
pub(crate) const ACCESS_READ: u32 = 1;
pub(crate) const ACCESS_READ_WRITE: u32 = 3;
pub(crate) const WAIT_VALUE_64: u32 = 4;
pub(crate) const WRITE_VALUE_64: u32 = 5;
pub(crate) const WAIT_GEQ: u32 = 0;
pub(crate) const CAPTURE_RELAXED: u32 = 2;
pub(crate) const IPC_LAZY_PEER_ACCESS: u32 = 1;
pub(crate) const EVENT_DISABLE_TIMING: u32 = 2;
pub(crate) const EVENT_INTERPROCESS: u32 = 4;
pub(crate) const STREAM_NON_BLOCKING: u32 = 1;
pub(crate) const HOST_ALLOC_PORTABLE: u32 = 1;
pub(crate) const HOST_REGISTER_PORTABLE: u32 = 1;
pub(crate) const HOST_REGISTER_DEVICEMAP: u32 = 2;
/// Managed memory that any stream may touch (`CU_MEM_ATTACH_GLOBAL`).
pub(crate) const MEMORY_GLOBAL: u32 = 1;
pub(crate) const MEMORY_HOST: u32 = 1;
pub(crate) const MEMORY_DEVICE: u32 = 2;

/// Properties of devices (`CUdevice_attribute`).
pub(crate) mod attribute {
    pub(crate) const PCI_BUS: u32 = 33;
    pub(crate) const PCI_DEVICE: u32 = 34;
    pub(crate) const PCI_DOMAIN: u32 = 50;
    pub(crate) const UNIFIED_ADDRESSING: u32 = 41;
    pub(crate) const CONCURRENT_MANAGED_ACCESS: u32 = 89;
    pub(crate) const VIRTUAL_MEMORY: u32 = 102;
    pub(crate) const HANDLE_POSIX_FD: u32 = 103;
    pub(crate) const MEMORY_POOLS: u32 = 115;
    /// For the operations with the suffix `_v2`; 93 stands for the older ones, which a module
    /// parameter enables.
    pub(crate) const STREAM_MEMORY_OPERATIONS_64: u32 = 122;
    pub(crate) const IPC_EVENTS: u32 = 125;
    pub(crate) const MPS: u32 = 133;
    pub(crate) const HOST_NUMA_NODE: u32 = 134;
}

/// Properties of addresses (`CUpointer_attribute`).
pub(crate) mod pointer {
    pub(crate) const MEMORY_TYPE: u32 = 2;
    pub(crate) const IS_MANAGED: u32 = 8;
    pub(crate) const DEVICE_ORDINAL: u32 = 9;
    pub(crate) const IS_LEGACY_IPC_CAPABLE: u32 = 10;
    pub(crate) const RANGE_START: u32 = 11;
    pub(crate) const RANGE_SIZE: u32 = 12;
    pub(crate) const ALLOWED_HANDLE_TYPES: u32 = 14;
    pub(crate) const POOL: u32 = 17;
}

/// One function of the driver: its name in the manual, and where this driver has it.
pub(crate) struct Symbol<F> {
    pub(crate) name: &'static str,
    pub(crate) function: Option<F>,
}

/// Declares a table of the driver's functions, by the names of its manual.
macro_rules! symbols {
    ($table:ident; $($name:ident $(as $symbol:literal)? : fn($($argument:ty),* $(,)?);)*) => {
        /// Functions of the driver's, by the names of its manual.
        #[allow(non_snake_case, reason = "the manual's names can be looked up, ours could not")]
        pub(crate) struct $table {
            $(pub(crate) $name: $crate::sys::Symbol<unsafe extern "C" fn($($argument),*) -> $crate::sys::Code>,)*
        }

        impl $table {
            /// Looks every function up.
            ///
            /// # Safety
            ///
            /// The driver's library can be loaded: `is_culib_present` said so.
            pub(crate) unsafe fn load() -> $table {
                // SAFETY: `culib` runs the initialisers of the library that it loads: the driver's
                // have no conditions. It panics where no library can be loaded; the caller vouches
                // for that one.
                let library = unsafe { cudarc::driver::sys::culib() };
                $table {
                    $($name: {
                        let symbol = [$($symbol,)? stringify!($name)][0];
                        // SAFETY: `Library::get` asks that the type be the symbol's: each row of
                        // the table is the prototype in cuda.h, with the result as the integer that
                        // C passes it as.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> $crate::sys::Code>(symbol.as_bytes())
                        };
                        $crate::sys::Symbol { name: stringify!($name), function: found.ok().map(|function| *function) }
                    },)*
                }
            }
        }
    };
}

#[cfg(feature = "test-kernels")]
pub(crate) use symbols;

symbols! {
    Symbols;

    cuInit: fn(u32);
    cuDriverGetVersion: fn(*mut c_int);
    cuGetErrorName: fn(Code, *mut *const c_char);

    cuDeviceGetCount: fn(*mut c_int);
    cuDeviceGet: fn(*mut CUdevice, c_int);
    cuDeviceGetName: fn(*mut c_char, c_int, CUdevice);
    cuDeviceGetUuid as "cuDeviceGetUuid_v2": fn(*mut CUuuid, CUdevice);
    cuDeviceGetUuidOld as "cuDeviceGetUuid": fn(*mut CUuuid, CUdevice);
    cuDeviceTotalMem as "cuDeviceTotalMem_v2": fn(*mut usize, CUdevice);
    cuDeviceGetAttribute: fn(*mut c_int, u32, CUdevice);
    cuDeviceCanAccessPeer: fn(*mut c_int, CUdevice, CUdevice);
    cuDevicePrimaryCtxRetain: fn(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease as "cuDevicePrimaryCtxRelease_v2": fn(CUdevice);

    cuCtxGetCurrent: fn(*mut CUcontext);
    cuCtxPushCurrent as "cuCtxPushCurrent_v2": fn(CUcontext);
    cuCtxPopCurrent as "cuCtxPopCurrent_v2": fn(*mut CUcontext);
    cuCtxGetDevice: fn(*mut CUdevice);
    cuCtxEnablePeerAccess: fn(CUcontext, u32);
    cuThreadExchangeStreamCaptureMode: fn(*mut u32);

    cuMemGetInfo as "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
    cuMemAlloc as "cuMemAlloc_v2": fn(*mut CUdeviceptr, usize);
    cuMemFree as "cuMemFree_v2": fn(CUdeviceptr);
    cuMemGetAddressRange as "cuMemGetAddressRange_v2": fn(*mut CUdeviceptr, *mut usize, CUdeviceptr);
    cuPointerGetAttributes: fn(u32, *const u32, *const *mut c_void, CUdeviceptr);
    cuMemHostAlloc: fn(*mut *mut c_void, usize, u32);
    cuMemFreeHost: fn(*mut c_void);
    cuMemHostRegister as "cuMemHostRegister_v2": fn(*mut c_void, usize, u32);
    cuMemHostUnregister: fn(*mut c_void);
    cuMemHostGetDevicePointer as "cuMemHostGetDevicePointer_v2": fn(*mut CUdeviceptr, *mut c_void, u32);

    cuMemPoolCreate: fn(*mut PoolHandle, *const PoolProperties);
    cuMemPoolDestroy: fn(PoolHandle);
    cuMemPoolSetAttribute: fn(PoolHandle, u32, *mut c_void);
    cuMemPoolGetAttribute: fn(PoolHandle, u32, *mut c_void);
    cuMemPoolTrimTo: fn(PoolHandle, usize);
    cuMemAllocFromPoolAsync: fn(*mut CUdeviceptr, usize, PoolHandle, CUstream);
    cuMemFreeAsync: fn(CUdeviceptr, CUstream);
    cuMemAllocManaged: fn(*mut CUdeviceptr, usize, u32);

    cuMemGetAllocationGranularity: fn(*mut usize, *const AllocationProperties, u32);
    cuMemCreate: fn(*mut MemoryHandle, usize, *const AllocationProperties, u64);
    cuMemRelease: fn(MemoryHandle);
    cuMemAddressReserve: fn(*mut CUdeviceptr, usize, usize, CUdeviceptr, u64);
    cuMemAddressFree: fn(CUdeviceptr, usize);
    cuMemMap: fn(CUdeviceptr, usize, usize, MemoryHandle, u64);
    cuMemUnmap: fn(CUdeviceptr, usize);
    cuMemSetAccess: fn(CUdeviceptr, usize, *const AccessDescription, usize);
    cuMemExportToShareableHandle: fn(*mut c_void, MemoryHandle, u32, u64);
    cuMemImportFromShareableHandle: fn(*mut MemoryHandle, *mut c_void, u32);
    cuMemRetainAllocationHandle: fn(*mut MemoryHandle, *mut c_void);
    cuMemGetAllocationPropertiesFromHandle: fn(*mut AllocationProperties, MemoryHandle);

    cuIpcGetMemHandle: fn(*mut CUipcMemHandle, CUdeviceptr);
    cuIpcOpenMemHandle as "cuIpcOpenMemHandle_v2": fn(*mut CUdeviceptr, CUipcMemHandle, u32);
    cuIpcCloseMemHandle: fn(CUdeviceptr);
    cuIpcGetEventHandle: fn(*mut CUipcEventHandle, CUevent);
    cuIpcOpenEventHandle: fn(*mut CUevent, CUipcEventHandle);

    cuEventCreate: fn(*mut CUevent, u32);
    cuEventRecord: fn(CUevent, CUstream);
    cuEventQuery: fn(CUevent);
    cuEventDestroy as "cuEventDestroy_v2": fn(CUevent);

    cuStreamCreate: fn(*mut CUstream, u32);
    cuStreamDestroy as "cuStreamDestroy_v2": fn(CUstream);
    cuStreamQuery: fn(CUstream);
    cuStreamSynchronize: fn(CUstream);
    cuStreamWaitEvent: fn(CUstream, CUevent, u32);
    cuStreamGetCtx: fn(CUstream, *mut CUcontext);
    cuStreamGetId: fn(CUstream, *mut u64);
    cuStreamIsCapturing: fn(CUstream, *mut u32);
    cuStreamBatchMemOp as "cuStreamBatchMemOp_v2": fn(CUstream, u32, *mut BatchOperation, u32);
    cuLaunchHostFunc: fn(CUstream, HostFunction, *mut c_void);

    cuMemcpyHtoDAsync as "cuMemcpyHtoDAsync_v2": fn(CUdeviceptr, *const c_void, usize, CUstream);
    cuMemcpyDtoHAsync as "cuMemcpyDtoHAsync_v2": fn(*mut c_void, CUdeviceptr, usize, CUstream);
    cuMemcpyDtoDAsync as "cuMemcpyDtoDAsync_v2": fn(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuMemsetD8Async: fn(CUdeviceptr, u8, usize, CUstream);
}

impl fmt::Debug for Symbols {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Symbols(..)")
    }
}

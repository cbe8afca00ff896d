//! The part of the CUDA driver API that this backend calls, beyond what drivers have in common.
//!
//! The types and the library come from cudarc, the functions do not: cudarc's panic when the
//! library or a symbol is missing, and return a Rust enum, for which a code that its headers do not
//! list is undefined behaviour.
//!
//! Structures that hold such enums, or whose fields cudarc names differently from one version of
//! CUDA's headers to the next, are declared with plain integers and measured against cudarc's.

use std::ffi::{c_char, c_int, c_void};

use cudarc::driver::sys;
pub(crate) use cudarc::driver::sys::{CUcontext, CUdevice, CUdeviceptr, CUstream};
use driver::calls::{
    AccessDescription, AllocationProperties, Calls, Found, Location, MemoryHandle, Names, Uuid,
};
use driver::code::Code;
use driver::pool::PoolProperties;

const _: () = assert!(size_of::<Location>() == size_of::<sys::CUmemLocation>());
const _: () = assert!(size_of::<AllocationProperties>() == size_of::<sys::CUmemAllocationProp>());
const _: () = assert!(size_of::<PoolProperties>() == size_of::<sys::CUmemPoolProps>());
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
    /// `WAIT_GEQ`, or 0 for a write that orders all work before it, for every observer in the
    /// system.
    pub(crate) flags: u32,
    /// For the driver.
    pub(crate) alias: CUdeviceptr,
    /// For operations with more members.
    pub(crate) pad: u64,
}
const _: () = assert!(size_of::<BatchOperation>() == size_of::<sys::CUstreamBatchMemOpParams>());

pub(crate) const WAIT_VALUE_64: u32 = 4;
pub(crate) const WRITE_VALUE_64: u32 = 5;
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

/// The rows of [`Calls`] and [`Own`] whose names in the library are not `cu` and the common one.
static NAMES: Names = Names::new(
    "cu",
    driver::names! {
        // The older function names the whole device where the younger one names its partition (MIG).
        device_uuid = cuDeviceGetUuid as cuDeviceGetUuid_v2;
        uuid_of_whole = cuDeviceGetUuidOld as cuDeviceGetUuid;
        device_total = cuDeviceTotalMem as cuDeviceTotalMem_v2;
        mem_info = cuMemGetInfo as cuMemGetInfo_v2;
        malloc = cuMemAlloc as cuMemAlloc_v2;
        free = cuMemFree as cuMemFree_v2;
        address_range = cuMemGetAddressRange as cuMemGetAddressRange_v2;
        host_register = cuMemHostRegister as cuMemHostRegister_v2;
        host_device_pointer = cuMemHostGetDevicePointer as cuMemHostGetDevicePointer_v2;
        handle_open = cuIpcOpenMemHandle as cuIpcOpenMemHandle_v2;
        event_destroy = cuEventDestroy as cuEventDestroy_v2;
        stream_destroy = cuStreamDestroy as cuStreamDestroy_v2;
        copy_to_device = cuMemcpyHtoDAsync as cuMemcpyHtoDAsync_v2;
        copy_to_host = cuMemcpyDtoHAsync as cuMemcpyDtoHAsync_v2;
        copy = cuMemcpyDtoDAsync as cuMemcpyDtoDAsync_v2;
        cuDevicePrimaryCtxRelease = cuDevicePrimaryCtxRelease as cuDevicePrimaryCtxRelease_v2;
        cuCtxPushCurrent = cuCtxPushCurrent as cuCtxPushCurrent_v2;
        cuCtxPopCurrent = cuCtxPopCurrent as cuCtxPopCurrent_v2;
        cuStreamBatchMemOp = cuStreamBatchMemOp as cuStreamBatchMemOp_v2;
        cuModuleGetGlobal = cuModuleGetGlobal as cuModuleGetGlobal_v2;
        cuStreamBeginCapture = cuStreamBeginCapture as cuStreamBeginCapture_v2;
    },
);

driver::symbols! {
    /// CUDA's own functions, by the names of its manual.
    Own;

    cuInit: fn(u32);
    cuDriverGetVersion: fn(*mut c_int);
    cuGetErrorName: fn(Code, *mut *const c_char);
    cuDeviceGetCount: fn(*mut c_int);
    cuDeviceGet: fn(*mut CUdevice, c_int);
    uuid_of_whole: fn(*mut Uuid, CUdevice);
    cuDevicePrimaryCtxRetain: fn(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease: fn(CUdevice);
    cuCtxGetCurrent: fn(*mut CUcontext);
    cuCtxPushCurrent: fn(CUcontext);
    cuCtxPopCurrent: fn(*mut CUcontext);
    cuCtxGetDevice: fn(*mut CUdevice);
    cuCtxEnablePeerAccess: fn(CUcontext, u32);
    cuPointerGetAttributes: fn(u32, *const u32, *const *mut c_void, CUdeviceptr);
    cuMemAllocManaged: fn(*mut CUdeviceptr, usize, u32);
    cuMemGetAllocationPropertiesFromHandle: fn(*mut AllocationProperties, MemoryHandle);
    cuStreamGetCtx: fn(CUstream, *mut CUcontext);
    cuStreamBatchMemOp: fn(CUstream, u32, *mut BatchOperation, u32);
}

/// Looks a row up in the driver's library.
///
/// Call it only where that library can be loaded (`is_culib_present`): cudarc panics elsewhere.
pub(crate) fn look(row: &'static str) -> Found {
    let (manual, library) = NAMES.of(row);
    // SAFETY: `culib` runs the initialisers of the library that it loads: the driver's have no
    // conditions.
    let culib = unsafe { sys::culib() };
    // SAFETY: `Library::get` asks that the type be the symbol's: any symbol has an address. The
    // library is never unloaded.
    let found = unsafe { culib.get::<*mut c_void>(library.as_bytes()) };
    (manual, found.ok().map(|address| *address))
}

/// Finds the driver's functions.
///
/// # Safety
///
/// The driver's library can be loaded: `is_culib_present` said so.
pub(crate) unsafe fn find() -> (Calls, Own) {
    // SAFETY: `find` asks that what `look` finds have the row's prototype: each is that in cuda.h.
    let calls = unsafe { Calls::find(&look) };
    // SAFETY: as above.
    let own = unsafe { Own::find(&look) };
    (calls, own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_common_call_has_cudas_name() {
        for (row, _) in Calls::signatures() {
            assert!(NAMES.of(row).0.starts_with("cu"), "{row}");
        }
    }
}

//! Functions of NVIDIA's driver as a table that may have gaps.

use std::ffi::{c_char, c_int, c_void};

use driver::calls::{AccessDescription, AllocationProperties, Handle, HostFunction};
use driver::pool::PoolProperties;
use libloading::os::unix::Library;

use crate::machine::{NOT_SUPPORTED, Outcome, UNKNOWN};

/// Codes of CUDA's that HIP does not have.
const NOT_HIPS: [u32; 43] = [
    34, 36, 46, 47, 102, 220, 221, 222, 223, 224, 225, 226, 227, 402, 703, 714, 715, 716, 717, 718,
    721, 800, 802, 803, 804, 805, 806, 807, 808, 809, 810, 811, 812, 909, 911, 912, 913, 914, 915,
    916, 917, 918, 919,
];

/// Gives HIP's code for one of CUDA's: the same, but for what HIP does not have.
fn hip_code(code: u32) -> u32 {
    match code {
        711 => 217,
        code if NOT_HIPS.contains(&code) => UNKNOWN,
        code => code,
    }
}

macro_rules! driver {
    ($($name:ident as $symbol:literal: fn($($argument:ident: $type:ty),*);)*) => {
        /// Functions of the driver's; what an old one lacks is `None`.
        pub(crate) struct Functions {
            $($name: Option<unsafe extern "C" fn($($type),*) -> u32>,)*
        }

        impl Functions {
            pub(crate) fn find(library: &Library) -> Functions {
                Functions {
                    $($name: {
                        // SAFETY: `Library::get` asks for the symbol's type: each row is the
                        // prototype in cuda.h.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($type),*) -> u32>($symbol.as_bytes())
                        };
                        found.ok().map(|function| *function)
                    },)*
                }
            }

            $(
                pub(crate) fn $name(&self, $($argument: $type),*) -> Outcome {
                    let function = self.$name.ok_or(NOT_SUPPORTED)?;
                    // SAFETY: the driver's function: places to write to are `cuda`'s, and the rest
                    // is as HIP's caller vouches for, whose conditions are the driver's.
                    match unsafe { function($($argument),*) } {
                        0 => Ok(()),
                        code => Err(hip_code(code)),
                    }
                }
            )*
        }
    };
}

driver! {
    init as "cuInit": fn(flags: u32);
    count as "cuDeviceGetCount": fn(count: *mut c_int);
    name as "cuDeviceGetName": fn(name: *mut c_char, len: c_int, device: c_int);
    uuid as "cuDeviceGetUuid_v2": fn(uuid: *mut [u8; 16], device: c_int);
    place as "cuDeviceGetPCIBusId": fn(place: *mut c_char, len: c_int, device: c_int);
    total as "cuDeviceTotalMem_v2": fn(bytes: *mut usize, device: c_int);
    attribute as "cuDeviceGetAttribute": fn(value: *mut c_int, attribute: u32, device: c_int);
    can_access as "cuDeviceCanAccessPeer": fn(can: *mut c_int, device: c_int, peer: c_int);
    retain_context as "cuDevicePrimaryCtxRetain": fn(context: *mut u64, device: c_int);
    set_context as "cuCtxSetCurrent": fn(context: u64);
    get_context as "cuCtxGetCurrent": fn(context: *mut u64);
    context_device as "cuCtxGetDevice": fn(device: *mut c_int);
    synchronize as "cuCtxSynchronize": fn();
    enable_peer as "cuCtxEnablePeerAccess": fn(context: u64, flags: u32);
    exchange_mode as "cuThreadExchangeStreamCaptureMode": fn(mode: *mut u32);
    mem_info as "cuMemGetInfo_v2": fn(free: *mut usize, total: *mut usize);
    alloc as "cuMemAlloc_v2": fn(base: *mut u64, len: usize);
    free as "cuMemFree_v2": fn(base: u64);
    range as "cuMemGetAddressRange_v2": fn(base: *mut u64, len: *mut usize, ptr: u64);
    attributes as "cuPointerGetAttributes": fn(count: u32, asked: *const u32, values: *const *mut c_void, ptr: u64);
    host_alloc as "cuMemHostAlloc": fn(start: *mut u64, len: usize, flags: u32);
    host_free as "cuMemFreeHost": fn(start: u64);
    register as "cuMemHostRegister_v2": fn(start: u64, len: usize, flags: u32);
    unregister as "cuMemHostUnregister": fn(start: u64);
    device_pointer as "cuMemHostGetDevicePointer_v2": fn(ptr: *mut u64, start: u64, flags: u32);
    pool as "cuMemPoolCreate": fn(pool: *mut u64, properties: *const PoolProperties);
    pool_destroy as "cuMemPoolDestroy": fn(pool: u64);
    pool_set as "cuMemPoolSetAttribute": fn(pool: u64, attribute: u32, value: *mut c_void);
    pool_get as "cuMemPoolGetAttribute": fn(pool: u64, attribute: u32, value: *mut c_void);
    pool_trim as "cuMemPoolTrimTo": fn(pool: u64, keep: usize);
    pool_alloc as "cuMemAllocFromPoolAsync": fn(base: *mut u64, len: usize, pool: u64, stream: u64);
    pool_free as "cuMemFreeAsync": fn(base: u64, stream: u64);
    granularity as "cuMemGetAllocationGranularity": fn(size: *mut usize, properties: *const AllocationProperties, option: u32);
    create as "cuMemCreate": fn(handle: *mut u64, len: usize, properties: *const AllocationProperties, flags: u64);
    release as "cuMemRelease": fn(handle: u64);
    reserve as "cuMemAddressReserve": fn(base: *mut u64, len: usize, alignment: usize, hint: u64, flags: u64);
    unreserve as "cuMemAddressFree": fn(base: u64, len: usize);
    map as "cuMemMap": fn(base: u64, len: usize, offset: usize, handle: u64, flags: u64);
    unmap as "cuMemUnmap": fn(base: u64, len: usize);
    grant as "cuMemSetAccess": fn(base: u64, len: usize, accesses: *const AccessDescription, count: usize);
    export as "cuMemExportToShareableHandle": fn(fd: *mut c_int, handle: u64, kind: u32, flags: u64);
    import as "cuMemImportFromShareableHandle": fn(handle: *mut u64, fd: u64, kind: u32);
    retain as "cuMemRetainAllocationHandle": fn(handle: *mut u64, ptr: u64);
    handle as "cuIpcGetMemHandle": fn(handle: *mut Handle, base: u64);
    open as "cuIpcOpenMemHandle_v2": fn(base: *mut u64, handle: Handle, flags: u32);
    close as "cuIpcCloseMemHandle": fn(base: u64);
    event_handle as "cuIpcGetEventHandle": fn(handle: *mut Handle, event: u64);
    event_open as "cuIpcOpenEventHandle": fn(event: *mut u64, handle: Handle);
    event as "cuEventCreate": fn(event: *mut u64, flags: u32);
    event_record as "cuEventRecord": fn(event: u64, stream: u64);
    event_query as "cuEventQuery": fn(event: u64);
    event_destroy as "cuEventDestroy_v2": fn(event: u64);
    stream as "cuStreamCreate": fn(stream: *mut u64, flags: u32);
    stream_destroy as "cuStreamDestroy_v2": fn(stream: u64);
    stream_query as "cuStreamQuery": fn(stream: u64);
    stream_synchronize as "cuStreamSynchronize": fn(stream: u64);
    stream_wait as "cuStreamWaitEvent": fn(stream: u64, event: u64, flags: u32);
    stream_capturing as "cuStreamIsCapturing": fn(stream: u64, status: *mut u32);
    stream_id as "cuStreamGetId": fn(stream: u64, identity: *mut u64);
    stream_context as "cuStreamGetCtx": fn(stream: u64, context: *mut u64);
    write as "cuStreamWriteValue64_v2": fn(stream: u64, word: u64, value: u64, flags: u32);
    wait as "cuStreamWaitValue64_v2": fn(stream: u64, word: u64, value: u64, flags: u32);
    call as "cuLaunchHostFunc": fn(stream: u64, function: HostFunction, data: *mut c_void);
    copy_in as "cuMemcpyHtoDAsync_v2": fn(to: u64, from: *const c_void, len: usize, stream: u64);
    copy_out as "cuMemcpyDtoHAsync_v2": fn(to: *mut c_void, from: u64, len: usize, stream: u64);
    copy as "cuMemcpyDtoDAsync_v2": fn(to: u64, from: u64, len: usize, stream: u64);
    fill as "cuMemsetD8Async": fn(to: u64, byte: u8, len: usize, stream: u64);
}

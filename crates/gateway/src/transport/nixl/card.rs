//! Makes what a network card wrote to a GPU visible there.
//!
//! A card that writes to a GPU by itself (GPUDirect RDMA) may have told of the end before the GPU
//! sees the bytes. CUDA has `cuFlushGPUDirectRDMAWrites` for that (driver API, "Context
//! Management", since 11.3); on devices that order such writes themselves
//! (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`) it does nothing. AMD's driver has no
//! such call. **Never run here: no machine with such a card was at hand.**

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use crate::error::{Error, Result};

const SUCCESS: c_int = 0;
/// `CUDA_ERROR_NOT_SUPPORTED`: no card writes to this device by itself.
const NOT_SUPPORTED: c_int = 801;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`
const CURRENT_CONTEXT: c_uint = 0;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES`
const ALL_DEVICES: c_uint = 200;

/// Waits until each device sees what cards wrote to it.
///
/// Without NVIDIA's driver there is nothing to wait for: then no module of UCX's in the wheel
/// writes to a device.
///
/// # Errors
///
/// [`Error::Transfer`] with the driver's number.
pub fn flush(devices: &[u32]) -> Result<()> {
    if devices.is_empty() {
        return Ok(());
    }
    // SAFETY: `Library::new` runs the driver library's initialisers, which may run in any thread.
    // The gateway has it loaded when it has device memory of CUDA.
    let Ok(driver) = (unsafe { libloading::Library::new("libcuda.so.1") }) else {
        return Ok(());
    };
    devices.iter().try_for_each(|&device| {
        // SAFETY: `flush_device` takes CUDA's driver, which a library of this name is.
        unsafe { flush_device(&driver, device) }.map_err(|error| Error::Transfer {
            why: format!(
                "{error}: what a network card wrote to device {device} may not be visible there"
            ),
        })
    })
}

/// # Safety
///
/// The library is CUDA's driver.
unsafe fn flush_device(driver: &libloading::Library, ordinal: u32) -> Result<(), String> {
    type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
    type Release = unsafe extern "C" fn(c_int) -> c_int;
    type Push = unsafe extern "C" fn(*mut c_void) -> c_int;
    type Pop = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
    type Flush = unsafe extern "C" fn(c_uint, c_uint) -> c_int;
    // A driver before 11.3 has no such call: its devices were flushed by other means, which NIXL's
    // UCX does not have. SAFETY: `Library::get` asks for the symbol's type, as cuda.h declares
    // `cuFlushGPUDirectRDMAWrites`.
    let Ok(flush) = (unsafe { driver.get::<Flush>("cuFlushGPUDirectRDMAWrites") }) else {
        return Ok(());
    };
    // SAFETY: as cuda.h declares `cuDevicePrimaryCtxRetain`.
    let retain = unsafe { driver.get::<Retain>("cuDevicePrimaryCtxRetain") }
        .map_err(|error| error.to_string())?;
    // SAFETY: as cuda.h declares `cuDevicePrimaryCtxRelease_v2`.
    let release = unsafe { driver.get::<Release>("cuDevicePrimaryCtxRelease_v2") }
        .map_err(|error| error.to_string())?;
    // SAFETY: as cuda.h declares `cuCtxPushCurrent_v2`.
    let push =
        unsafe { driver.get::<Push>("cuCtxPushCurrent_v2") }.map_err(|error| error.to_string())?;
    // SAFETY: as cuda.h declares `cuCtxPopCurrent_v2`.
    let pop =
        unsafe { driver.get::<Pop>("cuCtxPopCurrent_v2") }.map_err(|error| error.to_string())?;

    // An ordinal of this driver's is its device.
    let device = c_int::try_from(ordinal).map_err(|error| error.to_string())?;
    let mut context = ptr::null_mut();
    // SAFETY: `cuDevicePrimaryCtxRetain` writes a context, or fails for a device that is none.
    let status = unsafe { retain(&mut context, device) };
    if status != SUCCESS {
        return Err(format!("cuDevicePrimaryCtxRetain gives {status}"));
    }
    // SAFETY: `cuCtxPushCurrent` takes a context that is retained.
    let mut status = unsafe { push(context) };
    if status == SUCCESS {
        // SAFETY: `cuFlushGPUDirectRDMAWrites` takes these two constants, with a context current.
        status = unsafe { flush(CURRENT_CONTEXT, ALL_DEVICES) };
        // SAFETY: `cuCtxPopCurrent` takes back what was pushed above.
        unsafe { pop(&mut context) };
    }
    // SAFETY: `cuDevicePrimaryCtxRelease` answers the retain above.
    unsafe { release(device) };
    match status {
        SUCCESS | NOT_SUPPORTED => Ok(()),
        status => Err(format!("cuFlushGPUDirectRDMAWrites gives {status}")),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn without_devices_there_is_nothing_to_wait_for() {
        super::flush(&[]).expect("nothing to do");
    }
}

//! The state of the calling thread around a call of the runtime: its current device, and its last
//! error.
//!
//! A call of ours must neither change the device that the application made current on its thread,
//! nor leave an error behind that the application finds with `hipGetLastError` and takes for its
//! own.

use std::ffi::c_int;

use driver::code::SUCCESS;
use driver::{Scope, Vendor};
use gpu_api::{DeviceId, Result};

use crate::hip::Hip;

/// The device to put back; `None` while the thread's device was not touched.
#[derive(Debug, Default)]
pub struct Former(Option<c_int>);

impl Hip {
    /// Makes a device current.
    pub(crate) fn enter(&self, device: DeviceId) -> Result<Scope<'_, Hip>> {
        let ordinal = self.ordinal(device)?;
        let mut scope = self.relaxed()?;
        scope.device = Some(device);
        let mut current: c_int = 0;
        scope.call(&self.own().hipGetDevice, |function| {
            // SAFETY: `hipGetDevice` writes one integer: `current` is one.
            unsafe { function(&raw mut current) }
        })?;
        if current != ordinal {
            scope.call(&self.own().hipSetDevice, |function| {
                // SAFETY: `hipSetDevice` refuses what is no device.
                unsafe { function(ordinal) }
            })?;
            scope.thread = Former(Some(current));
        }
        Ok(scope)
    }

    /// Leaves the current device as it is: for calls about addresses, which are the same on all of
    /// them.
    pub(crate) fn relaxed(&self) -> Result<Scope<'_, Hip>> {
        let mut scope = Scope::untouched(self, Some(DeviceId(0)));
        match scope.relax() {
            SUCCESS => Ok(scope),
            code => Err(scope.error(self.driver().calls.exchange_capture_mode.name, code)),
        }
    }

    /// Puts the device back.
    pub(crate) fn put_back(&self, former: &mut Former) {
        if let (Some(former), Some(set)) = (former.0.take(), self.own().hipSetDevice.function) {
            // SAFETY: `hipSetDevice` refuses what is no device; this one the runtime itself named.
            let _ = unsafe { set(former) };
        }
    }

    /// Takes back the error that a call left for `hipGetLastError`.
    pub(crate) fn clear_error(&self) {
        if let Some(clear) = self.own().hipGetLastError.function {
            // SAFETY: `hipGetLastError` has no conditions.
            let _ = unsafe { clear() };
        }
    }
}

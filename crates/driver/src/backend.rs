//! The backend itself: a vendor's driver as a [`GpuBackend`](gpu_api::GpuBackend).

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use gpu_api::{Caps, DeviceId, DevicePtr, Result};

use crate::memory_table::{Entry, Way};
use crate::vendor::Vendor;

/// A backend over a CUDA-shaped driver: [`GpuBackend`](gpu_api::GpuBackend), with what the vendor
/// adds behind [`Deref`].
pub struct Backend<V: Vendor>(Arc<V>);

impl<V: Vendor> Backend<V> {
    /// Loads the vendor's driver and starts it.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](gpu_api::Error::Unavailable) with what is missing and what to do about
    /// it: no library, one that is not the vendor's, no device.
    pub fn load() -> Result<Arc<Backend<V>>> {
        Ok(Arc::new(Backend(V::load()?)))
    }

    /// Takes a driver that runs.
    pub fn new(vendor: Arc<V>) -> Backend<V> {
        Backend(vendor)
    }

    /// Returns the driver, for calls that may outlast the backend.
    pub(crate) fn vendor(&self) -> &Arc<V> {
        &self.0
    }

    /// Says what a device can do.
    ///
    /// # Errors
    ///
    /// As [`Caps::of`].
    pub fn caps(&self, device: DeviceId) -> Result<Caps> {
        Caps::of(self, device)
    }

    /// Takes memory out of the table before the driver is called: it may hand the same address out
    /// again before that call has returned.
    pub(crate) fn take(&self, base: DevicePtr, way: Way) -> Result<Entry> {
        let entry = self.driver().memory.take(base, way)?;
        self.forgotten(base);
        Ok(entry)
    }
}

impl<V: Vendor> Drop for Backend<V> {
    fn drop(&mut self) {
        if !self.closes() {
            return;
        }
        self.forget_marks();
        if self.driver().is_empty() {
            // SAFETY: `release` asks that nothing made with the driver be left, and that nothing
            // call it afterwards: the tables are empty, and the backend is being dropped.
            unsafe { self.release() };
        }
    }
}

impl<V: Vendor> Deref for Backend<V> {
    type Target = V;

    fn deref(&self) -> &V {
        &self.0
    }
}

/// Its tables grow with what is allocated, and are private.
impl<V: Vendor> fmt::Debug for Backend<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(V::NAME).finish_non_exhaustive()
    }
}

//! Faults that tests ask for: what a kernel or a driver does wrong.

use std::sync::atomic::Ordering;
use std::time::Duration;

use gpu_api::{DeviceId, DevicePtr, Result};

use crate::HostBackend;
use crate::late_write::Helper;

impl HostBackend {
    /// Breaks a device's context, as an illegal access of a kernel does: every later call on it
    /// gives code 700, and nothing that is queued runs any more.
    pub fn break_device(&self, device: DeviceId) {
        if let Some(broken) = self.broken.get(device.0 as usize) {
            broken.store(true, Ordering::Release);
        }
    }

    /// Counts the pieces of memory that are registered for streams: for tests that look whether
    /// each is ended.
    pub fn registered_words(&self) -> usize {
        self.tables().words.len()
    }

    /// Arms a write that happens only if this process dies, so long after its death: what a GPU's
    /// unfinished kernel does.
    ///
    /// # Errors
    ///
    /// [`Driver`](gpu_api::Error::Driver) for an address in no allocation,
    /// [`Invalid`](gpu_api::Error::Invalid) for more than 64 bytes,
    /// [`Exhausted`](gpu_api::Error::Exhausted) for more than 32 writes,
    /// [`System`](gpu_api::Error::System) when the helper process cannot be started.
    pub fn arm_late_write(&self, ptr: DevicePtr, bytes: &[u8], delay: Duration) -> Result<()> {
        let mut tables = self.tables();
        let in_range = tables.ranges.file_at(ptr);
        let (file, offset) = in_range.unwrap_or_else(|| tables.memories.file_at(ptr))?;
        let mut helper = match tables.helper.take() {
            Some(helper) => helper,
            None => Helper::start()?,
        };
        let armed = helper.arm(&file, offset, bytes, delay);
        tables.helper = Some(helper);
        armed
    }
}

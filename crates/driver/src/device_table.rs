//! The devices of what a driver hands out without telling.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpu_api::DeviceId;

/// Handles that were not given back, and the device of each.
#[derive(Debug, Default)]
pub struct DeviceTable(Mutex<HashMap<u64, DeviceId>>);

impl DeviceTable {
    /// Notes a handle.
    pub fn insert(&self, handle: u64, device: DeviceId) {
        self.lock().insert(handle, device);
    }

    /// Forgets a handle, and returns its device.
    pub fn remove(&self, handle: u64) -> Option<DeviceId> {
        self.lock().remove(&handle)
    }

    /// Returns a handle's device.
    pub fn device(&self, handle: u64) -> Option<DeviceId> {
        self.lock().get(&handle).copied()
    }

    /// Says whether every handle was given back.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, DeviceId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

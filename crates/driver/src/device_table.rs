//! The devices of what a driver hands out without telling.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use gpu_api::DeviceId;

/// Handles that were not given back, and the device of each.
#[derive(Debug, Default)]
pub struct DeviceTable(RwLock<HashMap<u64, DeviceId>>);

impl DeviceTable {
    /// Notes a handle.
    pub fn insert(&self, handle: u64, device: DeviceId) {
        self.0
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(handle, device);
    }

    /// Forgets a handle, and returns its device.
    pub fn remove(&self, handle: u64) -> Option<DeviceId> {
        self.0
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&handle)
    }

    /// Returns a handle's device.
    pub fn device(&self, handle: u64) -> Option<DeviceId> {
        self.0
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&handle)
            .copied()
    }

    /// Says whether every handle was given back.
    pub fn is_empty(&self) -> bool {
        self.0
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .is_empty()
    }
}

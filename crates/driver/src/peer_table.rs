//! Which device was given a way to the memory of which.

use std::ffi::c_int;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use gpu_api::DeviceId;

/// A device that reaches another's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reach {
    /// The driver's number of the device that reaches.
    pub reaching: c_int,
    /// The device whose memory it reaches.
    pub memory_of: DeviceId,
}

/// Everything that was reached, which is never taken back.
#[derive(Debug, Default)]
pub struct PeerTable(RwLock<Vec<Reach>>);

impl PeerTable {
    /// Lists which device reaches which memory; no entry is added while the list is borrowed.
    pub fn read(&self) -> RwLockReadGuard<'_, Vec<Reach>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Borrows the list to add to it; no mapping is made meanwhile.
    pub fn write(&self) -> RwLockWriteGuard<'_, Vec<Reach>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lists the devices that were given a way to the memory of `device`.
pub fn reaching(peers: &[Reach], device: DeviceId) -> Vec<c_int> {
    peers
        .iter()
        .filter(|reach| reach.memory_of == device)
        .map(|reach| reach.reaching)
        .collect()
}

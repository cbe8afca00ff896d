//! Reaching the memory of another device directly.

use std::ffi::c_int;
use std::sync::{PoisonError, RwLockReadGuard};

use gpu_api::{DeviceId, Error, Result};

use crate::backend::HipBackend;
use crate::error::{PEER_ACCESS_ALREADY_ENABLED, SUCCESS};

/// A device that reaches another's memory: the runtime's number of a device, and the device whose memory it reaches.
pub(crate) type Reach = (c_int, DeviceId);

impl HipBackend {
    /// Lets `device` reach memory of `peer`: plain memory at once, virtual memory mapping by mapping.
    pub(crate) fn enable_peer(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        let (ordinal, peer_ordinal) = (self.driver.ordinal(device)?, self.driver.ordinal(peer)?);
        if device == peer {
            return Ok(());
        }
        let peer_scope = self.driver.on_device(peer)?;
        if !self.driver.can_access(&peer_scope, ordinal, peer_ordinal)? {
            return Err(Error::Unsupported {
                what: "peer access",
                why: format!("{device} has no direct way to the memory of {peer}"),
                remedy: "share within one device, or see `rocm-smi --showtopo`",
            });
        }
        drop(peer_scope);
        let scope = self.driver.on_device(device)?;
        // Exclusive until all that exists is reachable: what is allocated later finds the pair in the list.
        let mut peers = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        let symbol = &self.driver.symbols.hipDeviceEnablePeerAccess;
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipDeviceEnablePeerAccess` refuses what is no device. Its flags are 0.
            unsafe { function(peer_ordinal, 0) }
        })?;
        if !matches!(code, SUCCESS | PEER_ACCESS_ALREADY_ENABLED) {
            return Err(scope.error(symbol.name, code));
        }
        for memory in self.memory.virtual_on(peer) {
            self.grant_virtual(&scope, ordinal, memory)?;
        }
        if !peers.contains(&(ordinal, peer)) {
            peers.push((ordinal, peer));
        }
        Ok(())
    }

    /// Lists which device reaches which memory; no entry is added while the list is borrowed.
    pub(crate) fn peers(&self) -> RwLockReadGuard<'_, Vec<Reach>> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner)
    }
}

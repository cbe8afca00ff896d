//! Reaching the memory of another device directly.

use std::ffi::c_int;

use gpu_api::{DeviceId, Error, GpuPeers, Result};

use crate::backend::Backend;
use crate::code::{PEER_ACCESS_ALREADY_ENABLED, SUCCESS};
use crate::mapping;
use crate::peer_table::Reach;
use crate::vendor::{Scope, Vendor};

/// What is said of memory that was imported as a dma-buf, and of another device.
const ONE_DEVICE: &str = "memory of a dma-buf is mapped for the device that imported it alone (clr, `rocmemory.cpp`: one \
                          agent), and another one's kernel faults on it";

/// Makes the error of a device that would not reach imported memory of a peer.
fn unreached(what: &'static str) -> Error {
    Error::unsupported(
        what,
        ONE_DEVICE,
        "share by handle (`Sharing::Handle`), which maps memory for every device, or use one device a process",
    )
}

// SAFETY: the condition of `GpuPeers`: plain memory is reached at once, virtual memory mapping by
// mapping, and what is reached in neither way is refused.
unsafe impl<V: Vendor> GpuPeers for Backend<V> {
    fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        let (ordinal, peer_ordinal) = (self.ordinal(device)?, self.ordinal(peer)?);
        if device == peer {
            return Ok(());
        }
        if !can_access(&self.on_device(peer)?, ordinal, peer_ordinal)? {
            return Err(Error::unsupported(
                "peer access",
                format!("{device} has no direct way to the memory of {peer}"),
                V::WORDS.topology,
            ));
        }
        // Exclusive until all that exists is reachable: what is allocated later finds the pair in
        // the list.
        let mut peers = self.driver().peers.write();
        if self.driver().memory.has_external(peer) {
            return Err(unreached("peer access while memory of a dma-buf is mapped"));
        }
        let scope = self.on_device(device)?;
        let (call, code) = self.open_way(&scope, peer)?;
        if !matches!(code, SUCCESS | PEER_ACCESS_ALREADY_ENABLED) {
            return Err(scope.error(call, code));
        }
        for (base, len, access) in self.driver().memory.mapped_on(peer) {
            mapping::open(&scope, (base, len as usize), ordinal, access, &[])?;
        }
        let reach = Reach {
            reaching: ordinal,
            memory_of: peer,
        };
        if !peers.contains(&reach) {
            peers.push(reach);
        }
        Ok(())
    }
}

/// Refuses to import a dma-buf for a device whose memory others were promised to reach.
pub(crate) fn refuse_dma_buf(peers: &[Reach], device: DeviceId) -> Result<()> {
    if peers.iter().any(|reach| reach.memory_of == device) {
        return Err(unreached("importing a dma-buf with peer access"));
    }
    Ok(())
}

/// Says whether one device can reach the memory of another.
fn can_access<V: Vendor>(scope: &Scope<'_, V>, device: c_int, peer: c_int) -> Result<bool> {
    let mut can: c_int = 0;
    let symbol = &scope.vendor.driver().calls.device_can_access;
    scope.call(symbol, |function| {
        // SAFETY: `device_can_access` writes one integer: `can` is one. The ordinals are the
        // driver's.
        unsafe { function(&raw mut can, device, peer) }
    })?;
    Ok(can != 0)
}

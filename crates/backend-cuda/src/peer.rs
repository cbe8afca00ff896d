//! Reaching the memory of another device directly.

use gpu_api::vendor::peer_table::Reach;
use gpu_api::{DeviceId, Error, Result};

use crate::backend::CudaBackend;
use crate::error::{PEER_ACCESS_ALREADY_ENABLED, SUCCESS};
use crate::mapping;

impl CudaBackend {
    /// Lets `device` reach memory of `peer`: plain memory by the contexts, virtual memory mapping
    /// by mapping.
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
                remedy: "share within one device, or see `nvidia-smi topo -p2p r`",
            });
        }
        let peer_context = self.driver.primary(&peer_scope, peer)?;
        drop(peer_scope);
        let scope = self.driver.on_device(device)?;
        // Exclusive until all that exists is reachable: what is allocated later finds the pair in
        // the list.
        let mut peers = self.peers.write();
        let symbol = &self.driver.symbols.cuCtxEnablePeerAccess;
        let code = scope.code(symbol, |function| {
            // SAFETY: `cuCtxEnablePeerAccess` asks for a context that is alive: the peer's primary
            // one, retained until the backend is dropped. Its flags are 0.
            unsafe { function(peer_context, 0) }
        })?;
        if !matches!(code, SUCCESS | PEER_ACCESS_ALREADY_ENABLED) {
            return Err(scope.error(symbol.name, code));
        }
        for (base, len, access) in self.memory.mapped_on(peer) {
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

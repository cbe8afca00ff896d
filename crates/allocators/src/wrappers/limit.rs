//! A limit of what is asked for.

use std::sync::Arc;

use gpu_api::{DeviceId, Error, Result};

use crate::allocator::hand_on;
use crate::{Allocator, AllocatorStats, Budget, Placed, Request};

/// Hands out no more than a budget allows, counted in bytes that were asked for.
///
/// Several may share one [`Budget`]. A request that does not fit fails alone: it never makes another's fail.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use allocators::{Allocator, Bfc, BfcOptions, Budget, Limit, Request, Simulated};
///
/// let limit = Limit::new(Bfc::new(BfcOptions::new("bfc"), Simulated::new()), Arc::new(Budget::new(1000)));
/// limit.alloc(Request::new(600))?;
/// assert!(limit.alloc(Request::new(600)).is_err());
/// limit.alloc(Request::new(400))?;
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Debug)]
pub struct Limit<A: Allocator> {
    inner: A,
    budget: Arc<Budget>,
    device: DeviceId,
}

impl<A: Allocator> Limit<A> {
    /// Limits an allocator.
    pub fn new(inner: A, budget: Arc<Budget>) -> Limit<A> {
        Limit { inner, budget, device: DeviceId(0) }
    }

    /// Sets the device that errors name.
    #[must_use]
    pub fn device(mut self, device: DeviceId) -> Limit<A> {
        self.device = device;
        self
    }

    /// Returns the budget.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }
}

// SAFETY: as the allocator beneath, which hands out and takes back.
unsafe impl<A: Allocator> Allocator for Limit<A> {
    fn alloc(&self, request: Request) -> Result<Placed> {
        self.budget.take(request.bytes).map_err(|free| {
            let hint = format!("{} is limited to {} bytes", self.name(), self.budget.limit());
            Error::OutOfMemory { device: self.device, asked: request.bytes, free, hint }
        })?;
        self.inner.alloc(request).inspect_err(|_| self.budget.give_back(request.bytes))
    }

    fn free(&self, address: u64) -> Result<()> {
        self.check_owner()?;
        // Of two who free it at once only one succeeds, and only that one gives back.
        let asked = self.inner.get(address).map_or(0, |placed| placed.asked);
        self.inner.free(address)?;
        self.budget.give_back(asked);
        Ok(())
    }

    fn stats(&self) -> AllocatorStats {
        let stats = self.inner.stats();
        let limit = self.budget.limit();
        AllocatorStats { bytes_limit: Some(stats.bytes_limit.map_or(limit, |inner| inner.min(limit))), ..stats }
    }

    hand_on!(inner: name, get, clear_stats, trim, memory, snapshot, check_owner);
}

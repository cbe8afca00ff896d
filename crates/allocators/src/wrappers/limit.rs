//! A limit of what is asked for.

use std::sync::{Arc, Weak};

use gpu_api::{DeviceId, Error, Result};

use crate::allocator::hand_on;
use crate::{Allocator, AllocatorStats, Budget, Placed, Request, Trim, Work};

/// Hands out no more than a budget allows, counted in bytes that were asked for.
///
/// Several may share one [`Budget`]. A request that does not fit waits as far as it may for any of
/// them to give back, and fails alone: it never makes another's fail.
///
/// # Examples
///
/// ```
/// use std::sync::{Arc, Weak};
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
        Limit {
            inner,
            budget,
            device: DeviceId(0),
        }
    }

    /// Sets the device that errors name.
    #[must_use]
    pub fn device(mut self, device: DeviceId) -> Limit<A> {
        self.device = device;
        self
    }

    fn give_back(&self, address: u64, free: impl FnOnce() -> Result<()>) -> Result<()> {
        self.inner.check_owner()?;
        // Of two who free it at once only one succeeds, and only that one gives back.
        let asked = self.inner.get(address).map_or(0, |placed| placed.asked);
        free()?;
        self.budget.give_back(asked);
        Ok(())
    }

    /// Returns the budget.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }
}

// SAFETY: as the allocator beneath, which hands out and takes back.
unsafe impl<A: Allocator> Allocator for Limit<A> {
    fn alloc(&self, request: Request) -> Result<Placed> {
        self.check_owner()?;
        self.budget
            .take_until(request.bytes, request.until)
            .map_err(|free| {
                let hint = format!(
                    "{} is limited to {} bytes",
                    self.name(),
                    self.budget.limit()
                );
                Error::OutOfMemory {
                    device: self.device,
                    asked: request.bytes,
                    free,
                    hint,
                }
            })?;
        self.inner
            .alloc(request)
            .inspect_err(|_| self.budget.give_back(request.bytes))
    }

    fn free(&self, address: u64) -> Result<()> {
        self.give_back(address, || self.inner.free(address))
    }

    fn free_after(&self, address: u64, work: Vec<Work>) -> Result<()> {
        self.give_back(address, || self.inner.free_after(address, work))
    }

    fn is_wanted(&self) -> bool {
        self.budget.is_wanted() || self.inner.is_wanted()
    }

    fn register_keeper(&self, keeper: Weak<dyn Trim>) {
        self.budget.register_keeper(keeper.clone());
        self.inner.register_keeper(keeper);
    }

    fn stats(&self) -> AllocatorStats {
        let stats = self.inner.stats();
        let limit = self.budget.limit();
        AllocatorStats {
            bytes_limit: Some(stats.bytes_limit.map_or(limit, |inner| inner.min(limit))),
            ..stats
        }
    }

    hand_on!(inner: name, record_work, get, find, clear_stats, trim, memory, snapshot, check_owner);
}

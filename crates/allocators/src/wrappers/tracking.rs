//! Live allocations, and the code that made them.

use std::collections::{BTreeMap, HashMap};
use std::panic::Location;
use std::sync::Mutex;

use gpu_api::Result;
use gpu_api::lock::Acquire;

use crate::allocator::hand_on;
use crate::{Allocator, Placed, Request, Work};

/// One allocation that is live.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Tracked {
    /// What was handed out.
    pub placed: Placed,
    /// What it is for, as the request said.
    pub tag: &'static str,
    /// The line that made the request.
    pub from: &'static Location<'static>,
}

/// Sums of what a [`Tracking`] has seen, in bytes that were asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Sizes {
    /// Ever allocated.
    pub total: u64,
    /// The most that was live at any time.
    pub peak: u64,
    /// Live.
    pub live: u64,
}

/// What is live under one tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct TagUse {
    /// Allocations.
    pub count: u64,
    /// Bytes that were asked for.
    pub bytes: u64,
}

/// Knows every live allocation, its size, its tag and the line that asked for it.
///
/// # Examples
///
/// ```
/// use allocators::{Allocator, Bfc, BfcOptions, Request, Simulated, Tracking};
///
/// let tracking = Tracking::new(Bfc::new(BfcOptions::new("bfc"), Simulated::new()));
/// tracking.alloc(Request::new(1000).tag("weights"))?;
/// let leaked = &tracking.live()[0];
/// assert_eq!((leaked.tag, leaked.placed.asked), ("weights", 1000));
/// assert!(leaked.from.file().ends_with(".rs"));
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Debug)]
pub struct Tracking<A: Allocator> {
    inner: A,
    state: Mutex<TrackingState>,
}

#[derive(Debug, Default)]
struct TrackingState {
    live: HashMap<u64, Tracked>,
    sizes: Sizes,
}

impl<A: Allocator> Tracking<A> {
    /// Tracks what goes through here from the start.
    pub fn new(inner: A) -> Tracking<A> {
        Tracking {
            inner,
            state: Mutex::default(),
        }
    }

    /// Lists what is live, in the order in which it was allocated.
    pub fn live(&self) -> Vec<Tracked> {
        let mut live: Vec<Tracked> = self.state.acquire().live.values().copied().collect();
        live.sort_by_key(|tracked| tracked.placed.number);
        live
    }

    /// Sums up what is live by tag.
    pub fn by_tag(&self) -> BTreeMap<&'static str, TagUse> {
        let mut tags = BTreeMap::<_, TagUse>::new();
        for tracked in self.state.acquire().live.values() {
            let tag = tags.entry(tracked.tag).or_default();
            tag.count += 1;
            tag.bytes += tracked.placed.asked;
        }
        tags
    }

    /// Returns the sums.
    pub fn sizes(&self) -> Sizes {
        self.state.acquire().sizes
    }

    fn forget(&self, address: u64, free: impl FnOnce() -> Result<()>) -> Result<()> {
        self.inner.check_owner()?;
        // Taken out first: as soon as it is free another thread may get the address.
        let tracked = self.state.acquire().live.remove(&address);
        let freed = free();
        if let Some(tracked) = tracked {
            let mut state = self.state.acquire();
            match freed {
                Ok(()) => state.sizes.live -= tracked.placed.asked,
                Err(_) => {
                    state.live.insert(address, tracked);
                }
            }
        }
        freed
    }
}

// SAFETY: as the allocator beneath, which hands out and takes back.
unsafe impl<A: Allocator> Allocator for Tracking<A> {
    fn alloc(&self, request: Request) -> Result<Placed> {
        let placed = self.inner.alloc(request)?;
        let mut state = self.state.acquire();
        state.sizes.total += placed.asked;
        state.sizes.live += placed.asked;
        state.sizes.peak = state.sizes.peak.max(state.sizes.live);
        state.live.insert(
            placed.address,
            Tracked {
                placed,
                tag: request.tag,
                from: request.from,
            },
        );
        Ok(placed)
    }

    fn free(&self, address: u64) -> Result<()> {
        self.forget(address, || self.inner.free(address))
    }

    fn free_after(&self, address: u64, work: Vec<Work>) -> Result<()> {
        self.forget(address, || self.inner.free_after(address, work))
    }

    fn clear_stats(&self) {
        self.inner.clear_stats();
        let mut state = self.state.acquire();
        state.sizes.peak = state.sizes.live;
    }

    hand_on!(inner: name, record_work, is_wanted, register_keeper, get, find);
    hand_on!(inner: stats, trim, memory, snapshot, check_owner);
}

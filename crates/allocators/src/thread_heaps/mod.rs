//! Best fit with several heaps, so that threads do not take turns at one lock.
//!
//! ```text
//! thread 0 ─► heap 0 ─┐
//! thread 1 ─► heap 1 ─┼─► one upstream, one limit
//! thread 2 ─► heap 0 ─┘
//! ```
//!
//! A heap is a [`Bfc`]: it has regions of its own, so chunks merge as they do there, and an address
//! belongs to one heap at a time. Memory goes back to the heap that it is from, whichever thread
//! frees it.
//!
//! 1. `number`: a small number for each thread, which chooses its heap.
//! 2. `one_upstream`: where all heaps take regions from.
//! 3. `heaps`: what they hand out, take back and count together, with the rule for the peak.
//! 4. `turns`: a request that found nothing free.

// Tests: `crates/allocators/tests/thread_heaps.rs`, `crates/allocators/tests/overlaps.rs`.

mod heaps;
mod number;
mod one_upstream;
mod turns;

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Arc, Weak};
use std::time::Duration;

use gpu_api::Result;

use self::heaps::Heaps;
use crate::bfc::Core;
use crate::{
    Allocator, AllocatorStats, Bfc, BfcOptions, Memory, Placed, Relief, Request, Scope, ScopeStats,
    Snapshot, SubAllocator, Trim, Work,
};

/// Best fit over a fixed number of heaps, for threads that allocate all the time. Each thread has a
/// heap of its own while no more threads run than there are heaps; further threads share.
///
/// It does what [`Bfc`] does: it waits, refuses addresses that are not handed out, keeps memory
/// until work is done, and counts exactly. Two things differ. A heap does not use what is free in
/// another before it has asked upstream for more, so more is reserved: up to a region for each
/// heap. And a request that waits hears of a free in another heap after up to 16 milliseconds.
///
/// With [`Growth::Whole`](crate::Growth::Whole) each heap takes its share of the limit at its first
/// request.
///
/// # Examples
///
/// ```
/// use std::num::NonZeroUsize;
/// use allocators::{Allocator, BfcOptions, Request, Simulated, ThreadHeaps};
///
/// let heaps = NonZeroUsize::new(2).expect("two");
/// let allocator = ThreadHeaps::new(BfcOptions::new("demo").limit(1 << 30), heaps, Simulated::new());
/// let placed = allocator.alloc(Request::new(1000))?;
/// // Any thread may free it.
/// std::thread::scope(|scope| scope.spawn(|| allocator.free(placed.address)).join().expect("no panic"))?;
/// assert!(allocator.free(placed.address).is_err());
/// assert_eq!((allocator.stats().bytes_in_use, allocator.stats().peak_bytes_in_use), (0, 1024));
/// # Ok::<(), gpu_api::Error>(())
/// ```
pub struct ThreadHeaps<U: SubAllocator> {
    heaps: Heaps<U>,
}

impl<U: SubAllocator> ThreadHeaps<U> {
    /// Makes an allocator that has no region yet. The options are of all heaps together. A heap for
    /// each processor is enough; each costs a lock at every new peak and for statistics.
    pub fn new(options: BfcOptions, heaps: NonZeroUsize, upstream: U) -> ThreadHeaps<U> {
        ThreadHeaps {
            heaps: Heaps::new(options, heaps.get(), upstream),
        }
    }

    /// Joins the allocators of a device: turns to them and to its sessions before it is out of
    /// memory, as [`Relieved`](crate::Relieved) does, and they to it. It waits so long for
    /// consumers that were asked to unmap.
    #[must_use]
    pub fn relief(mut self, relief: Arc<Relief>, patience: Duration) -> ThreadHeaps<U> {
        for heap in &self.heaps.each {
            let weak: Weak<dyn Trim> = Arc::<Core<_>>::downgrade(&heap.core);
            relief.register_neighbour(weak);
        }
        self.heaps.relief = Some((relief, patience));
        self
    }

    /// Returns how it was set up.
    pub fn options(&self) -> &BfcOptions {
        &self.heaps.options
    }

    /// Returns where its regions come from.
    pub fn upstream(&self) -> &U {
        self.heaps.upstream.upstream()
    }

    /// Returns the bytes of regions that upstream failed to take back. They are neither used nor
    /// freed again.
    pub fn leaked_bytes(&self) -> u64 {
        self.heaps.each.iter().map(Bfc::leaked_bytes).sum()
    }

    /// Counts apart what is allocated and freed until the scope ends, by whatever thread.
    ///
    /// [`ScopeStats::peak_bytes`] is the sum of what each heap had at most: no less than what all
    /// had at any one time.
    pub fn scope(&self) -> Scope<'_> {
        let open: Vec<_> = self
            .heaps
            .cores()
            .map(|core| core.state().scopes.open())
            .collect();
        let close = move || {
            let counted = self
                .heaps
                .cores()
                .zip(open)
                .map(|(core, scope)| core.state().scopes.close(scope));
            counted.fold(ScopeStats::default(), ScopeStats::beside)
        };
        Scope {
            close: Some(Box::new(close)),
        }
    }

    /// Asks for the work on what was given back, and frees what is no longer worked on; says how
    /// many bytes.
    pub fn settle(&self) -> u64 {
        self.heaps.cores().map(Core::settle).sum()
    }

    /// Allocates as [`Allocator::alloc`], and says what upstream said of the region.
    ///
    /// # Errors
    ///
    /// As [`Bfc::alloc`].
    pub fn place(&self, request: Request) -> Result<Placed<U::Token>> {
        self.place_at(self.heaps.own(), request)
    }

    /// Allocates for a thread whose heap this is.
    #[inline]
    fn place_at(&self, own: usize, request: Request) -> Result<Placed<U::Token>> {
        let heaps = &self.heaps;
        let core = &heaps.each[own].core;
        core.upstream.check_owner()?;
        let fit = core.fit(&request)?;
        let (at, placed) = match core.try_fit(&request, fit) {
            Some(placed) => (own, placed),
            None => heaps.place_slowly(own, request, fit)?,
        };
        if heaps.each[at].core.is_over() {
            heaps.balance();
        }
        Ok(heaps.numbered(at, placed))
    }
}

#[cfg(gpu_ipc_loom)]
impl<U: SubAllocator> ThreadHeaps<U> {
    /// Allocates as a thread whose heap this is: all threads of a model are one of the system's.
    pub fn alloc_as(&self, own: usize, request: Request) -> Result<Placed> {
        self.place_at(own, request).map(|placed| placed.untied())
    }

    /// Takes an allocation back likewise.
    pub fn free_as(&self, own: usize, address: u64) -> Result<()> {
        self.heaps.free_from(own, address)
    }
}

// SAFETY: `Allocator` asks that what is handed out does not overlap: that of one heap does not, and
// the heaps' regions are extents of one upstream, which do not either. `memory` is upstream's.
unsafe impl<U: SubAllocator> Allocator for ThreadHeaps<U> {
    fn name(&self) -> &str {
        &self.heaps.options.name
    }

    fn alloc(&self, request: Request) -> Result<Placed> {
        self.place(request).map(|placed| placed.untied())
    }

    fn free(&self, address: u64) -> Result<()> {
        self.heaps.free_from(self.heaps.own(), address)
    }

    fn free_after(&self, address: u64, work: Vec<Work>) -> Result<()> {
        self.heaps.heap_of(address)?.free_after_all(address, work)
    }

    fn record_work(&self, address: u64, work: Work) -> Result<()> {
        self.heaps.heap_of(address)?.record_work(address, work)
    }

    fn is_wanted(&self) -> bool {
        self.heaps.each.iter().any(Bfc::is_wanted)
    }

    fn register_keeper(&self, keeper: Weak<dyn Trim>) {
        self.heaps
            .each
            .iter()
            .for_each(|heap| heap.register_keeper(keeper.clone()));
    }

    fn get(&self, address: u64) -> Option<Placed> {
        self.heaps.from(self.heaps.own()).find_map(|at| {
            Some(
                self.heaps
                    .numbered(at, self.heaps.each[at].get(address)?)
                    .untied(),
            )
        })
    }

    fn find(&self, address: u64) -> Option<Placed> {
        self.heaps.from(self.heaps.own()).find_map(|at| {
            Some(
                self.heaps
                    .numbered(at, self.heaps.each[at].find(address)?)
                    .untied(),
            )
        })
    }

    fn stats(&self) -> AllocatorStats {
        self.heaps.stats()
    }

    fn clear_stats(&self) {
        self.heaps.clear_stats();
    }

    fn trim(&self) -> Result<u64> {
        self.heaps.upstream.check_owner()?;
        let mut freed = Ok(0);
        for one in self.heaps.cores().map(Core::trim) {
            freed = match (freed, one) {
                (Ok(sum), Ok(bytes)) => Ok(sum + bytes),
                (Err(first), _) | (_, Err(first)) => Err(first),
            };
        }
        freed
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        self.upstream().memory()
    }

    fn snapshot(&self) -> Option<Snapshot> {
        Some(self.heaps.snapshot())
    }

    fn check_owner(&self) -> Result<()> {
        self.heaps.upstream.check_owner()
    }
}

impl<U: SubAllocator> Trim for ThreadHeaps<U> {
    fn trim(&self) -> Result<u64> {
        Allocator::trim(self)
    }
}

impl<U: SubAllocator> fmt::Debug for ThreadHeaps<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadHeaps")
            .field("name", &self.heaps.options.name)
            .field("heaps", &self.heaps.each.len())
            .field("upstream", self.upstream())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

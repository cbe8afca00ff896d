//! Best fit with several heaps, so that threads do not take turns at one lock.
//!
//! ```text
//! thread 0 ─► heap 0 ─┐
//! thread 1 ─► heap 1 ─┼─► one upstream, one limit
//! thread 2 ─► heap 0 ─┘
//! ```
//!
//! A heap is a [`Bfc`]: it has regions of its own, so chunks merge as they do there, and an address belongs to one heap
//! at a time. Memory goes back to the heap that it is from, whichever thread frees it.
//!
//! # The peak
//!
//! Bytes in use, allocations and the largest of them are sums over the heaps. The most bytes in use at any time is not,
//! and a counter that all threads write would cost what the one lock did. So each heap has a *ceiling*:
//!
//! | who | does what | under |
//! |---|---|---|
//! | an allocation | counts its bytes; above its heap's ceiling it sets `over` | its heap's lock |
//! | the same, if `over` is set | balances before it returns | the locks of all heaps, in their order |
//! | a free | counts its bytes; the ceiling stays | its heap's lock |
//! | balance | notes the sum if it is a new peak, and deals the rest of the peak out to the ceilings | all locks |
//!
//! The ceilings add up to no more than the peak, so nobody below theirs can make a new one. An allocation that is above
//! has not returned when the balance counts it: for the statistics it happens then. `tests/loom_peak.rs` checks it.
//!
//! It does not cover other sums while threads allocate: each is of one moment, and two of them of two.

mod number;
mod one_upstream;

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gpu_api::{Error, Result};

use self::number::thread_number;
use self::one_upstream::OneUpstream;
use crate::bfc::{BfcState, Core, Counters, Fit, Turn};
use crate::request::{end_of, foreign};
use crate::sync::{AtomicU64, MutexGuard};
use crate::{
    Allocator, AllocatorStats, Bfc, BfcOptions, Growth, Memory, Placed, Request, Snapshot, SubAllocator, Trim, Work,
};

/// A heap, locked.
type State<'a, U> = MutexGuard<'a, BfcState<<U as SubAllocator>::Token>>;

/// How long a request waits at one heap before it looks at the others, which do not wake it.
const LOOK_AROUND: Duration = Duration::from_millis(16);

/// Best fit over a fixed number of heaps, for threads that allocate all the time. Each thread has a heap of its own
/// while no more threads run than there are heaps; further threads share.
///
/// It does what [`Bfc`] does: it waits, refuses addresses that are not handed out, keeps memory until work is done, and
/// counts exactly. Two things differ. A heap does not use what is free in another before it has asked upstream for
/// more, so more is reserved: up to a region for each heap. And a request that waits hears of a free in another heap
/// after up to 16 milliseconds.
///
/// With [`Growth::Whole`] each heap takes its share of the limit at its first request.
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
    heaps: Box<[Bfc<OneUpstream<U>>]>,
    upstream: OneUpstream<U>,
    options: BfcOptions,
    /// The most bytes in use at any time. Written with all heaps locked.
    peak: AtomicU64,
}

impl<U: SubAllocator> ThreadHeaps<U> {
    /// Makes an allocator that has no region yet. The options are of all heaps together. A heap for each processor is
    /// enough; each costs a lock at every new peak and for statistics.
    pub fn new(options: BfcOptions, heaps: NonZeroUsize, upstream: U) -> ThreadHeaps<U> {
        let upstream = OneUpstream::new(upstream, &options);
        let mut each = options.clone();
        if each.growth == Growth::Whole {
            each.growth = Growth::Fixed(options.limit / heaps.get() as u64);
        }
        let heaps = (0..heaps.get()).map(|_| Bfc::new(each.clone(), upstream.another())).collect();
        let allocator = ThreadHeaps { heaps, upstream, options, peak: AtomicU64::new(0) };
        allocator.balance();
        allocator
    }

    /// Returns how it was set up.
    pub fn options(&self) -> &BfcOptions {
        &self.options
    }

    /// Returns where its regions come from.
    pub fn upstream(&self) -> &U {
        self.upstream.upstream()
    }

    /// Returns the bytes of regions that upstream failed to take back. They are neither used nor freed again.
    pub fn leaked_bytes(&self) -> u64 {
        self.heaps.iter().map(Bfc::leaked_bytes).sum()
    }

    /// Asks for the work on what was given back, and frees what is no longer worked on; says how many bytes.
    pub fn settle(&self) -> u64 {
        self.cores().map(Core::settle).sum()
    }

    /// Allocates as [`Allocator::alloc`], and says what upstream said of the region.
    ///
    /// # Errors
    ///
    /// As [`Bfc::alloc`].
    pub fn place(&self, request: Request) -> Result<Placed<U::Token>> {
        self.place_at(self.own(), request)
    }

    /// Allocates for a thread whose heap this is.
    #[inline]
    fn place_at(&self, own: usize, request: Request) -> Result<Placed<U::Token>> {
        let core = &self.heaps[own].core;
        core.upstream.check_owner()?;
        let fit = core.fit(&request)?;
        let (at, placed) = match core.try_fit(&request, fit) {
            Some(placed) => (own, placed),
            None => self.place_slowly(own, request, fit)?,
        };
        if self.heaps[at].core.is_over() {
            self.balance();
        }
        Ok(self.numbered(at, placed))
    }

    /// Looks for finished work, grows, turns to the other heaps, and waits; says which heap it is from.
    #[cold]
    fn place_slowly(&self, own: usize, request: Request, fit: Fit) -> Result<(usize, Placed<U::Token>)> {
        // Its own first.
        let mut turns: Vec<_> = self.from(own).map(|at| (at, self.heaps[at].core.turn(&request, fit))).collect();
        for round in 0.. {
            let until =
                request.until.filter(|&until| Instant::now() < until && !self.heaps[own].core.is_hopeless(fit.bytes()));
            if until.is_none() {
                turns.iter_mut().for_each(|(_, turn)| turn.is_last());
            }
            let waits_at = round % turns.len();
            let seen = self.heaps[turns[waits_at].0].core.seen();
            let error = match self.look_everywhere(&mut turns, until.is_none()) {
                Err(error @ Error::OutOfMemory { .. }) => error,
                other => return other,
            };
            let Some(deadline) = until else { return Err(self.explain(own, error)) };
            let (at, turn) = &mut turns[waits_at];
            if let Some(placed) = turn.wait(seen, deadline.min(end_of(Instant::now(), LOOK_AROUND))) {
                return Ok((*at, placed));
            }
        }
        unreachable!("rounds have no end")
    }

    fn look_everywhere(
        &self,
        turns: &mut [(usize, Turn<'_, OneUpstream<U>>)],
        is_last: bool,
    ) -> Result<(usize, Placed<U::Token>)> {
        let (own, others) = turns.split_first_mut().expect("at least one heap");
        let error = match own.1.try_harder() {
            Err(error @ Error::OutOfMemory { .. }) => error,
            other => return other.map(|placed| (own.0, placed)),
        };
        let mut trimmed = 0;
        for (at, turn) in others {
            let core = &self.heaps[*at].core;
            core.settle();
            let placed = turn.try_fit().or_else(|| if is_last { turn.break_window() } else { None });
            if let Some(placed) = placed {
                return Ok((*at, placed));
            }
            if self.options.collect_regions {
                // What fails is leaked, and counted so.
                trimmed += core.trim().unwrap_or(0);
            }
        }
        if trimmed == 0 { Err(error) } else { own.1.try_harder().map(|placed| (own.0, placed)) }
    }

    /// Adds to an error of one heap what all of them have.
    #[cold]
    fn explain(&self, own: usize, error: Error) -> Error {
        let Error::OutOfMemory { device, asked, hint, .. } = error else { return error };
        let stats = self.stats();
        let free = stats.bytes_reserved.saturating_sub(stats.bytes_in_use);
        let hint = format!(
            "{hint}; that is one of {} heaps, which have together: reserved {}, in use {}",
            self.heaps.len(),
            stats.bytes_reserved,
            stats.bytes_in_use
        );
        let error = Error::OutOfMemory { device, asked, free, hint };
        self.heaps[own].core.explain(error, |snapshot| *snapshot = self.list())
    }

    /// Takes an allocation back as [`Allocator::free`]; a thread looks into its own heap first.
    #[inline]
    fn free_from(&self, own: usize, address: u64) -> Result<()> {
        self.heaps[own].core.upstream.check_owner()?;
        let is_freed = self.from(own).any(|at| self.heaps[at].try_free(address));
        if is_freed { Ok(()) } else { Err(foreign(address)) }
    }

    /// Finds the heap that handed an address out.
    fn heap_of(&self, address: u64) -> Result<&Bfc<OneUpstream<U>>> {
        self.upstream.check_owner()?;
        let at = self.from(self.own()).find(|&at| self.heaps[at].get(address).is_some());
        at.map(|at| &self.heaps[at]).ok_or_else(|| foreign(address))
    }

    /// Notes a new peak, if it is one, and deals out what is left below the peak; returns the sums, and the largest
    /// free chunk.
    fn balance(&self) -> (Counters, u64) {
        self.balance_locked(&mut self.lock())
    }

    /// Locks all heaps. In their order: who has one lock alone waits for no other.
    fn lock(&self) -> Vec<State<'_, U>> {
        self.cores().map(Core::state).collect()
    }

    fn balance_locked(&self, states: &mut [State<'_, U>]) -> (Counters, u64) {
        let mut sums = Counters::default();
        let mut largest_free = 0;
        for state in &*states {
            sums.add(&state.counters);
            largest_free = largest_free.max(state.heap.largest_free());
        }
        // Relaxed: the locks order it.
        sums.peak_in_use = self.peak.load(Ordering::Relaxed).max(sums.in_use);
        self.peak.store(sums.peak_in_use, Ordering::Relaxed);
        let left = u128::from(sums.peak_in_use - sums.in_use);
        for (state, core) in states.iter_mut().zip(self.cores()) {
            // Who has more in use has more to free and to allocate again. Rounded down, as a share of what is left.
            let share = left * u128::from(state.counters.in_use) / u128::from(sums.in_use.max(1));
            core.set_ceiling(state, share as u64);
        }
        (sums, largest_free)
    }

    fn list(&self) -> Snapshot {
        let mut all = Snapshot { name: self.options.name.clone(), stats: self.stats(), ..Snapshot::default() };
        for (at, heap) in self.heaps.iter().enumerate() {
            let mut one = heap.snapshot();
            all.asked_bytes += one.asked_bytes;
            all.pending_bytes += one.pending_bytes;
            all.leaked_bytes += one.leaked_bytes;
            all.bookkeeping_bytes += one.bookkeeping_bytes;
            for chunk in one.regions.iter_mut().flat_map(|region| &mut region.chunks) {
                chunk.number = self.number(at, chunk.number);
            }
            all.regions.append(&mut one.regions);
        }
        all.regions.sort_by_key(|region| region.base);
        all
    }

    /// Returns the heap of the calling thread.
    #[inline]
    fn own(&self) -> usize {
        thread_number() % self.heaps.len()
    }

    /// Lists the heaps from one on.
    #[inline]
    fn from(&self, own: usize) -> impl Iterator<Item = usize> + use<U> {
        let heaps = self.heaps.len();
        (own..heaps).chain(0..own)
    }

    fn cores(&self) -> impl Iterator<Item = &Core<OneUpstream<U>>> {
        self.heaps.iter().map(|heap| &*heap.core)
    }

    /// Makes the number that a heap gave an allocation one among those of all heaps; 0 stays.
    #[inline]
    fn number(&self, at: usize, number: u64) -> u64 {
        number.checked_sub(1).map_or(0, |before| before * self.heaps.len() as u64 + at as u64 + 1)
    }

    #[inline]
    fn numbered<T>(&self, at: usize, mut placed: Placed<T>) -> Placed<T> {
        placed.number = self.number(at, placed.number);
        placed
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
        self.free_from(own, address)
    }
}

// SAFETY: `Allocator` asks that what is handed out does not overlap: that of one heap does not, and the heaps' regions
// are extents of one upstream, which do not either. `memory` is upstream's.
unsafe impl<U: SubAllocator> Allocator for ThreadHeaps<U> {
    fn name(&self) -> &str {
        &self.options.name
    }

    fn alloc(&self, request: Request) -> Result<Placed> {
        self.place(request).map(|placed| placed.untied())
    }

    fn free(&self, address: u64) -> Result<()> {
        self.free_from(self.own(), address)
    }

    fn free_after(&self, address: u64, work: Vec<Work>) -> Result<()> {
        self.heap_of(address)?.free_after_all(address, work)
    }

    fn record_work(&self, address: u64, work: Work) -> Result<()> {
        self.heap_of(address)?.record_work(address, work)
    }

    fn is_wanted(&self) -> bool {
        self.heaps.iter().any(Bfc::is_wanted)
    }

    fn register_keeper(&self, keeper: Weak<dyn Trim>) {
        self.heaps.iter().for_each(|heap| heap.register_keeper(keeper.clone()));
    }

    fn get(&self, address: u64) -> Option<Placed> {
        self.from(self.own()).find_map(|at| Some(self.numbered(at, self.heaps[at].get(address)?).untied()))
    }

    fn find(&self, address: u64) -> Option<Placed> {
        self.from(self.own()).find_map(|at| Some(self.numbered(at, self.heaps[at].find(address)?).untied()))
    }

    fn stats(&self) -> AllocatorStats {
        let (mut sums, largest_free) = self.balance();
        sums.peak_reserved = self.upstream.peak_reserved();
        sums.stats(self.options.limit, largest_free)
    }

    fn clear_stats(&self) {
        let mut states = self.lock();
        states.iter_mut().for_each(|state| state.counters.clear());
        self.peak.store(0, Ordering::Relaxed);
        self.balance_locked(&mut states);
        drop(states);
        self.upstream.clear_peak();
    }

    fn trim(&self) -> Result<u64> {
        self.upstream.check_owner()?;
        let mut freed = Ok(0);
        for one in self.cores().map(Core::trim) {
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
        Some(self.list())
    }

    fn check_owner(&self) -> Result<()> {
        self.upstream.check_owner()
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
            .field("name", &self.options.name)
            .field("heaps", &self.heaps.len())
            .field("upstream", self.upstream())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

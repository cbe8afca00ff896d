//! The heaps themselves: whose is whose, what one hands out and takes back, and what they count
//! together.
//!
//! # The peak
//!
//! Bytes in use, allocations and the largest of them are sums over the heaps. The most bytes in use
//! at any time is not, and a counter that all threads write would cost what the one lock did. So
//! each heap has a *ceiling*:
//!
//! | who | does what | under |
//! |---|---|---|
//! | an allocation | counts its bytes; above its heap's ceiling it sets `over` | its heap's lock |
//! | the same, if `over` is set | balances before it returns | the locks of all heaps, in their order |
//! | a free | counts its bytes; the ceiling stays | its heap's lock |
//! | balance | notes the sum if it is a new peak, and deals the rest of the peak out to the ceilings | all locks |
//!
//! The ceilings add up to no more than the peak, so nobody below theirs can make a new one. An
//! allocation that is above has not returned when the balance counts it: for the statistics it
//! happens then. `tests/loom_peak.rs` checks it.
//!
//! It does not cover other sums while threads allocate: each is of one moment, and two of them of
//! two.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpu_api::Result;

use super::number::thread_number;
use super::one_upstream::OneUpstream;
use crate::bfc::{BfcState, Core, Counters};
use crate::request::foreign;
use crate::sync::{AtomicU64, MutexGuard};
use crate::{AllocatorStats, Bfc, BfcOptions, Growth, Placed, Relief, Snapshot, SubAllocator};

/// A heap, locked.
type Locked<'a, U> = MutexGuard<'a, BfcState<<U as SubAllocator>::Token>>;

/// Several heaps over one upstream.
pub(super) struct Heaps<U: SubAllocator> {
    pub(super) each: Box<[Bfc<OneUpstream<U>>]>,
    pub(super) upstream: OneUpstream<U>,
    pub(super) options: BfcOptions,
    /// The most bytes in use at any time. Written with all heaps locked.
    peak: AtomicU64,
    /// Who is asked when there is no more, and how long consumers that were asked to unmap are
    /// waited for.
    pub(super) relief: Option<(Arc<Relief>, Duration)>,
}

impl<U: SubAllocator> Heaps<U> {
    /// Makes this many, which have no region yet.
    pub(super) fn new(options: BfcOptions, count: usize, upstream: U) -> Heaps<U> {
        let upstream = OneUpstream::new(upstream, &options);
        let mut own = options.clone();
        if own.growth == Growth::Whole {
            own.growth = Growth::Fixed(options.limit / count as u64);
        }
        let each = (0..count)
            .map(|_| Bfc::new(own.clone(), upstream.another()))
            .collect();
        let heaps = Heaps {
            each,
            upstream,
            options,
            peak: AtomicU64::new(0),
            relief: None,
        };
        heaps.balance();
        heaps
    }

    /// Returns the heap of the calling thread.
    #[inline]
    pub(super) fn own(&self) -> usize {
        thread_number() % self.each.len()
    }

    /// Lists the heaps from one on.
    #[inline]
    pub(super) fn from(&self, own: usize) -> impl Iterator<Item = usize> + use<U> {
        let heaps = self.each.len();
        (own..heaps).chain(0..own)
    }

    pub(super) fn cores(&self) -> impl Iterator<Item = &Core<OneUpstream<U>>> {
        self.each.iter().map(|heap| &*heap.core)
    }

    /// Makes the number that a heap gave an allocation one among those of all heaps; 0 stays.
    #[inline]
    fn number(&self, at: usize, number: u64) -> u64 {
        number
            .checked_sub(1)
            .map_or(0, |before| before * self.each.len() as u64 + at as u64 + 1)
    }

    #[inline]
    pub(super) fn numbered<T>(&self, at: usize, mut placed: Placed<T>) -> Placed<T> {
        placed.number = self.number(at, placed.number);
        placed
    }

    /// Takes an allocation back as [`Allocator::free`]; a thread looks into its own heap first.
    #[inline]
    pub(super) fn free_from(&self, own: usize, address: u64) -> Result<()> {
        self.each[own].core.upstream.check_owner()?;
        let is_freed = self.from(own).any(|at| self.each[at].try_free(address));
        if is_freed {
            Ok(())
        } else {
            Err(foreign(address))
        }
    }

    /// Finds the heap that handed an address out.
    pub(super) fn heap_of(&self, address: u64) -> Result<&Bfc<OneUpstream<U>>> {
        self.upstream.check_owner()?;
        let at = self
            .from(self.own())
            .find(|&at| self.each[at].get(address).is_some());
        at.map(|at| &self.each[at]).ok_or_else(|| foreign(address))
    }

    /// Notes a new peak, if it is one, and deals out what is left below the peak; returns the sums,
    /// and the largest free chunk.
    pub(super) fn balance(&self) -> (Counters, u64) {
        self.balance_locked(&mut self.lock())
    }

    /// Locks all heaps. In their order: who has one lock alone waits for no other.
    fn lock(&self) -> Vec<Locked<'_, U>> {
        self.cores().map(Core::state).collect()
    }

    fn balance_locked(&self, states: &mut [Locked<'_, U>]) -> (Counters, u64) {
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
            // Who has more in use has more to free and to allocate again. Rounded down, as a share
            // of what is left.
            let share = left * u128::from(state.counters.in_use) / u128::from(sums.in_use.max(1));
            core.set_ceiling(state, share as u64);
        }
        (sums, largest_free)
    }

    pub(super) fn stats(&self) -> AllocatorStats {
        let (mut sums, largest_free) = self.balance();
        sums.peak_reserved = self.upstream.peak_reserved();
        sums.stats(self.options.limit, largest_free)
    }

    pub(super) fn clear_stats(&self) {
        let mut states = self.lock();
        states.iter_mut().for_each(|state| state.counters.clear());
        self.peak.store(0, Ordering::Relaxed);
        self.balance_locked(&mut states);
        drop(states);
        self.upstream.clear_peak();
    }

    /// Lists every region and chunk, and what the device's sessions hold.
    pub(super) fn snapshot(&self) -> Snapshot {
        let mut all = Snapshot {
            name: self.options.name.clone(),
            stats: self.stats(),
            ..Snapshot::default()
        };
        for (at, heap) in self.each.iter().enumerate() {
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
        self.relief
            .iter()
            .for_each(|(relief, _)| relief.annotate(&mut all));
        all
    }
}

//! Buffers kept for the next request of the same size.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Weak};

use gpu_api::{Error, Result};

use crate::bfc::Counters;
use crate::pool_options::PoolOptions;
use crate::request::foreign;
use crate::sync::{Acquire, Mutex, MutexGuard};
use crate::{Allocator, AllocatorStats, Memory, Placed, Request, Snapshot, Trim, Work};

/// How many evictions there are between two looks at whether the pool is too small.
const CHECK_AFTER: u64 = 1000;
/// The rate of evictions and the rate of misses above which it is.
const TOLERATED: f64 = 0.002;
/// What the limit grows to at least, and by what.
const GROWN_TO: usize = 100;
const GROWN_BY: f64 = 1.1;

/// What a [`Pool`] has done since it was made, or since it last looked at its rates.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PoolCounts {
    /// Requests that were served from the pool.
    pub from_pool: u64,
    /// Requests that went upstream.
    pub allocated: u64,
    /// Buffers that were put into the pool.
    pub put: u64,
    /// Buffers that had to leave it for others.
    pub evicted: u64,
}

/// What buffers are of one kind by: their bytes and their alignment.
type Kind = (u64, u64);

/// A buffer that is out.
#[derive(Clone, Copy)]
struct Out {
    placed: Placed,
    kind: Kind,
    /// Whether work was noted that may not have finished when it is freed.
    is_worked_on: bool,
}

#[derive(Default)]
struct PoolState {
    out: HashMap<u64, Out>,
    /// The buffers of each kind, the last put last.
    kept: HashMap<Kind, VecDeque<(u64, u64)>>,
    /// Every kept buffer by the turn in which it was put: the first is the next to go.
    turns: BTreeMap<u64, Kind>,
    kept_bytes: u64,
    peak_kept_bytes: u64,
    turn: u64,
    number: u64,
    limit: usize,
    /// How many wait for upstream: while there are any, nothing is kept from them.
    waiters: usize,
    counts: PoolCounts,
    counters: Counters,
}

/// Keeps buffers that were freed for the next request of the same size and alignment.
///
/// What was put first is the first to go, when there are too many buffers or bytes. Zero buffers
/// make it pass everything through. When upstream has no room, all that is kept goes back before it
/// is asked once more; while somebody waits for it, nothing is kept.
///
/// # Examples
///
/// ```
/// use allocators::{Allocator, Bfc, BfcOptions, Pool, PoolOptions, Request, Simulated};
///
/// let pool = Pool::new(PoolOptions::new("pool"), Bfc::new(BfcOptions::new("bfc"), Simulated::new()))?;
/// let first = pool.alloc(Request::new(1000))?.address;
/// pool.free(first)?;
/// assert_eq!(pool.alloc(Request::new(1000))?.address, first);
/// assert_eq!(pool.counts().from_pool, 1);
/// # Ok::<(), gpu_api::Error>(())
/// ```
pub struct Pool<A: Allocator> {
    core: Arc<Core<A>>,
}

/// A [`Pool`] as its upstream knows it.
struct Core<A> {
    options: PoolOptions,
    upstream: A,
    state: Mutex<PoolState>,
}

impl<A: Allocator> Pool<A> {
    /// Makes a pool that keeps nothing yet.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a pool of no buffers that is to grow: it would keep nothing, and
    /// never learn how many it needs.
    pub fn new(options: PoolOptions, upstream: A) -> Result<Pool<A>> {
        if options.auto_resize && options.buffers == 0 {
            return Err(Error::invalid(
                "the buffers of a pool that grows",
                "0",
                "at least 1, or `auto_resize(false)` to pass everything through",
            ));
        }
        let state = PoolState {
            limit: options.buffers,
            ..PoolState::default()
        };
        let core = Arc::new(Core {
            options,
            upstream,
            state: Mutex::new(state),
        });
        let keeper: Weak<dyn Trim> = Arc::<Core<A>>::downgrade(&core);
        core.upstream.register_keeper(keeper);
        Ok(Pool { core })
    }

    /// Returns its counts so far.
    pub fn counts(&self) -> PoolCounts {
        self.state().counts
    }

    /// Returns the most buffers that it keeps at present.
    pub fn limit(&self) -> usize {
        self.state().limit
    }

    /// Returns the allocator beneath.
    pub fn upstream(&self) -> &A {
        &self.core.upstream
    }

    /// Gives every buffer that it keeps back to upstream, and says how many bytes.
    ///
    /// # Errors
    ///
    /// The first error of upstream's; the other buffers are given back all the same.
    pub fn clear(&self) -> Result<u64> {
        self.core.clear()
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.core.state()
    }

    fn ask_upstream(&self, request: Request) -> Result<Placed> {
        // At once: what is kept here may be what it would wait for.
        let error = match self.core.upstream.alloc(request.at_once()) {
            Err(error @ Error::OutOfMemory { .. }) => error,
            other => return other,
        };
        if request.until.is_none() {
            return if self.clear()? > 0 {
                self.core.upstream.alloc(request)
            } else {
                Err(error)
            };
        }
        self.state().waiters += 1;
        let placed = self.clear().and_then(|_| self.core.upstream.alloc(request));
        self.state().waiters -= 1;
        placed
    }
}

impl<A: Allocator> Core<A> {
    fn clear(&self) -> Result<u64> {
        self.upstream.check_owner()?;
        let kept: Vec<(u64, u64)> = {
            let mut state = self.state();
            state.turns.clear();
            state.kept_bytes = 0;
            let kept = state.kept.drain();
            kept.flat_map(|((bytes, _), kept)| {
                kept.into_iter().map(move |(_, address)| (address, bytes))
            })
            .collect()
        };
        let mut freed = 0;
        let mut failed = None;
        for (address, bytes) in kept {
            match self.upstream.free(address) {
                Ok(()) => freed += bytes,
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(freed), Err)
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.acquire()
    }
}

impl<A: Allocator> Trim for Pool<A> {
    fn trim(&self) -> Result<u64> {
        Allocator::trim(self)
    }
}

impl<A: Allocator> Trim for Core<A> {
    fn trim(&self) -> Result<u64> {
        self.clear()
    }
}

impl PoolState {
    fn reuse(&mut self, kind: Kind) -> Option<u64> {
        let (turn, address) = self.kept.get_mut(&kind)?.pop_back()?;
        self.forget(turn, kind);
        self.counts.from_pool += 1;
        Some(address)
    }

    fn forget(&mut self, turn: u64, kind: Kind) {
        self.turns.remove(&turn);
        self.kept_bytes -= kind.0;
        if self.kept.get(&kind).is_some_and(VecDeque::is_empty) {
            self.kept.remove(&kind);
        }
    }

    /// Keeps a buffer, and returns those that have to go for it.
    fn keep(&mut self, address: u64, kind: Kind, options: &PoolOptions) -> Vec<u64> {
        self.counts.put += 1;
        let mut gone = Vec::new();
        while !self.turns.is_empty()
            && (self.turns.len() >= self.limit
                || self.kept_bytes.saturating_add(kind.0) > options.bytes)
        {
            gone.extend(self.evict(options.auto_resize));
        }
        self.turn += 1;
        self.turns.insert(self.turn, kind);
        self.kept
            .entry(kind)
            .or_default()
            .push_back((self.turn, address));
        self.kept_bytes += kind.0;
        self.peak_kept_bytes = self.peak_kept_bytes.max(self.kept_bytes);
        gone
    }

    fn evict(&mut self, auto_resize: bool) -> Option<u64> {
        let (turn, kind) = self.turns.pop_first()?;
        // Within a kind turns only rise, so the oldest is the first.
        let (first, address) = self.kept.get_mut(&kind)?.pop_front()?;
        debug_assert_eq!(first, turn);
        self.forget(turn, kind);
        self.counts.evicted += 1;
        if self.counts.evicted.is_multiple_of(CHECK_AFTER) {
            self.look_at_rates(auto_resize);
        }
        Some(address)
    }

    fn look_at_rates(&mut self, auto_resize: bool) {
        let PoolCounts {
            from_pool,
            allocated,
            put,
            evicted,
        } = std::mem::take(&mut self.counts);
        let evictions = evicted as f64 / put.max(1) as f64;
        let misses = allocated as f64 / (allocated + from_pool).max(1) as f64;
        if auto_resize && evictions > TOLERATED && misses > TOLERATED {
            self.limit = GROWN_TO.max((self.limit as f64 * GROWN_BY) as usize);
        }
    }
}

// SAFETY: `Allocator` asks that what is handed out does not overlap: a buffer is either out or
// kept, and is upstream's otherwise, which keeps the promise for its part. `memory` is upstream's.
unsafe impl<A: Allocator> Allocator for Pool<A> {
    fn name(&self) -> &str {
        &self.core.options.name
    }

    fn alloc(&self, request: Request) -> Result<Placed> {
        request.check()?;
        self.check_owner()?;
        let Some(bytes) = self.core.options.rounding.round(request.bytes) else {
            return self.core.upstream.alloc(request.resized(u64::MAX));
        };
        let kind = (bytes, request.align);
        let kept = self.state().reuse(kind);
        let address = match kept {
            Some(address) => address,
            None => {
                let address = self.ask_upstream(request.resized(bytes))?.address;
                self.state().counts.allocated += 1;
                address
            }
        };
        let mut state = self.state();
        state.number += 1;
        let placed = Placed {
            address,
            bytes,
            asked: request.bytes,
            number: state.number,
            token: (),
        };
        state.out.insert(
            address,
            Out {
                placed,
                kind,
                is_worked_on: false,
            },
        );
        state.counters.allocated(bytes, request.bytes);
        Ok(placed)
    }

    fn free(&self, address: u64) -> Result<()> {
        self.check_owner()?;
        let mut state = self.state();
        let Out {
            placed,
            kind,
            is_worked_on,
        } = state.out.remove(&address).ok_or_else(|| foreign(address))?;
        state.counters.freed(placed.bytes, placed.asked);
        // Read under the lock: a request that starts waiting after this takes memory from the kept
        // buffers.
        let is_wanted = is_worked_on || state.waiters > 0 || self.core.upstream.is_wanted();
        if state.limit == 0 || is_wanted || kind.0 > self.core.options.bytes {
            drop(state);
            return self.core.upstream.free(address);
        }
        let gone = state.keep(address, kind, &self.core.options);
        drop(state);
        for evicted in gone {
            // The buffer that came is kept; that another could not go is not its owner's to know.
            if let Err(error) = self.core.upstream.free(evicted) {
                tracing::warn!(pool = self.core.options.name, %error, "a buffer is leaked");
            }
        }
        Ok(())
    }

    fn free_after(&self, address: u64, work: Vec<Work>) -> Result<()> {
        self.check_owner()?;
        if work.is_empty() {
            return self.free(address);
        }
        // Upstream has the patience, and what is kept here can be given to anybody at once.
        let out = self
            .state()
            .out
            .remove(&address)
            .ok_or_else(|| foreign(address))?;
        let freed = self.core.upstream.free_after(address, work);
        let mut state = self.state();
        match freed {
            Ok(()) => state.counters.freed(out.placed.bytes, out.placed.asked),
            Err(_) => drop(state.out.insert(address, out)),
        }
        freed
    }

    fn record_work(&self, address: u64, work: Work) -> Result<()> {
        self.check_owner()?;
        let mut state = self.state();
        let out = state
            .out
            .get_mut(&address)
            .ok_or_else(|| foreign(address))?;
        self.core.upstream.record_work(address, work)?;
        // Kept, it would go to the next before that work has finished.
        out.is_worked_on = true;
        Ok(())
    }

    fn get(&self, address: u64) -> Option<Placed> {
        self.state().out.get(&address).map(|out| out.placed)
    }

    fn find(&self, address: u64) -> Option<Placed> {
        self.state()
            .out
            .values()
            .map(|out| out.placed)
            .find(|placed| placed.covers(address))
    }

    fn stats(&self) -> AllocatorStats {
        let state = self.state();
        let mut counters = state.counters;
        counters.reserved = counters.in_use + state.kept_bytes;
        counters.peak_reserved = counters.peak_reserved.max(counters.reserved);
        let mut stats = counters.stats(u64::MAX, 0);
        stats.pool_bytes = Some(state.kept_bytes);
        stats.peak_pool_bytes = Some(state.peak_kept_bytes);
        stats
    }

    fn clear_stats(&self) {
        let mut state = self.state();
        state.counters.clear();
        state.peak_kept_bytes = state.kept_bytes;
    }

    fn trim(&self) -> Result<u64> {
        let cleared = self.clear()?;
        // What upstream gives back in turn is made of what was cleared, perhaps with more.
        Ok(cleared.max(self.core.upstream.trim()?))
    }

    fn is_wanted(&self) -> bool {
        self.core.upstream.is_wanted()
    }

    fn register_keeper(&self, keeper: Weak<dyn Trim>) {
        self.core.upstream.register_keeper(keeper);
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        self.core.upstream.memory()
    }

    fn snapshot(&self) -> Option<Snapshot> {
        self.core.upstream.snapshot()
    }

    fn check_owner(&self) -> Result<()> {
        self.core.upstream.check_owner()
    }
}

impl<A: Allocator> Drop for Pool<A> {
    fn drop(&mut self) {
        match self.clear() {
            Ok(_) | Err(Error::Forked { .. }) => {}
            Err(error) => {
                tracing::warn!(pool = self.core.options.name, %error, "a buffer is leaked")
            }
        }
    }
}

impl<A: Allocator> fmt::Debug for Pool<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("options", &self.core.options)
            .field("upstream", &self.core.upstream)
            .field("counts", &self.counts())
            .finish_non_exhaustive()
    }
}

//! The front of the heap: what may be asked of it, and what its drop leaves to a thread.

// Tests: `crates/allocators/tests/suite.rs`, `crates/allocators/tests/streams.rs`,
// `crates/allocators/tests/bfc_on_memory.rs`.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

#[cfg(doc)]
use gpu_api::Error;
use gpu_api::{Result, StreamIdentity, thread};

use super::core::{BfcState, Core, placed};
use super::options::BfcOptions;
use super::pending::{Completion, Work};
use super::stats::{AllocatorStats, Scope, ScopeStats};
use crate::request::foreign;
use crate::sync::MutexGuard;
use crate::upstream::RoomListener;
use crate::{Placed, Request, Snapshot, SubAllocator, Trim};

/// Best fit with coalescing over regions from upstream.
///
/// It takes the smallest free chunk that is large enough, and of several the one with the lowest
/// address. It splits the chunk if the slack is at least 1/8 of the request, or the share that
/// [`BfcOptions::max_slack_share`] sets. A freed chunk merges with its free neighbours at once.
/// Regions come from a [`SubAllocator`] when they are needed.
///
/// An address that was not handed out, lies inside a chunk or was freed already is an error and
/// changes nothing.
///
/// # Locks
///
/// One for the chunks, held for well under a microsecond but when a table grows, a snapshot is
/// taken, or many free chunks have to be looked through for an aligned start, and one for growth,
/// held while upstream is called. Of what others wrote only [`SubAllocator::may_free`] and
/// [`SubAllocator::check_owner`] run under the first. A thread that finds the first taken tries
/// again for some 40 microseconds before it sleeps.
///
/// # Examples
///
/// ```
/// use allocators::{Bfc, BfcOptions, Request, Simulated};
///
/// let bfc = Bfc::new(BfcOptions::new("demo").limit(1 << 30), Simulated::new());
/// let placed = bfc.alloc(Request::new(4))?;
/// assert_eq!((placed.asked, placed.bytes), (4, 256));
/// bfc.free(placed.address)?;
/// assert_eq!(bfc.stats().bytes_in_use, 0);
/// # Ok::<(), gpu_api::Error>(())
/// ```
pub struct Bfc<U: SubAllocator> {
    pub(crate) core: Arc<Core<U>>,
}

impl<U: SubAllocator> Bfc<U> {
    /// Makes an allocator that has no region yet.
    pub fn new(options: BfcOptions, upstream: U) -> Bfc<U> {
        Bfc {
            core: Core::new(options, upstream),
        }
    }

    /// Allocates; grows, gives idle regions back and waits as far as it may.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`](gpu_api::Error::OutOfMemory) when there is no room after all that,
    /// with sums, a histogram and a map of the regions; [`Error::Invalid`](gpu_api::Error::Invalid)
    /// for no bytes or an alignment that is not a power of two; any other error of upstream.
    pub fn alloc(&self, request: Request) -> Result<Placed<U::Token>> {
        self.core.upstream.check_owner()?;
        let fit = self.core.fit(&request)?;
        match self.core.try_fit(&request, fit) {
            Some(placed) => Ok(placed),
            None => self
                .core
                .alloc_slowly(&request, fit)
                .map_err(|error| self.core.explain(error, |_| ())),
        }
    }

    /// Allocates from what is free at this moment, without growing or waiting; `None` when nothing
    /// fits.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](gpu_api::Error::Invalid) as [`alloc`](Bfc::alloc).
    pub fn try_alloc(&self, request: Request) -> Result<Option<Placed<U::Token>>> {
        self.core.upstream.check_owner()?;
        let fit = self.core.fit(&request)?;
        Ok(self.core.try_fit(&request, fit))
    }

    /// Takes an allocation back: its bytes may be used again at once. Never calls upstream.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](gpu_api::Error::Invalid) for an address that is not handed out; nothing
    /// changes then.
    pub fn free(&self, address: u64) -> Result<()> {
        self.core.upstream.check_owner()?;
        if self.try_free(address) {
            Ok(())
        } else {
            Err(foreign(address))
        }
    }

    /// Takes an allocation back; says `false` for an address that is not handed out. For the
    /// process that made it.
    #[inline]
    pub(crate) fn try_free(&self, address: u64) -> bool {
        self.free_in(self.core.state(), address)
    }

    /// Takes an allocation back if it is the one that is meant.
    ///
    /// # Errors
    ///
    /// As [`free`](Bfc::free), and for an address that another allocation has by now.
    pub(crate) fn free_if(
        &self,
        address: u64,
        is_meant: impl FnOnce(&Placed<U::Token>) -> bool,
    ) -> Result<()> {
        self.core.upstream.check_owner()?;
        let state = self.core.state();
        let is_freed = match state.heap.get(address) {
            Some(handed) if is_meant(&placed(&state.heap, handed)) => self.free_in(state, address),
            _ => false,
        };
        if is_freed {
            Ok(())
        } else {
            Err(foreign(address))
        }
    }

    #[inline]
    fn free_in(&self, mut state: MutexGuard<'_, BfcState<U::Token>>, address: u64) -> bool {
        let Some((id, handed)) = state.heap.withdraw(address) else {
            return false;
        };
        state.counters.freed(handed.bytes, handed.asked);
        state.scopes.freed(handed.bytes);
        // Work of an earlier owner's may be left, when its stream got the bytes before it had
        // finished.
        self.core.withdrawn(&mut state, id);
        self.core.wake(state);
        true
    }

    /// Takes an allocation back whose bytes may be used again once `done` says so, and by `stream`
    /// at once.
    ///
    /// `done` stands for the work that was queued on `stream` before this call. As
    /// [`free_after_all`](Bfc::free_after_all) otherwise.
    ///
    /// # Errors
    ///
    /// As [`free`](Bfc::free).
    pub fn free_after(
        &self,
        address: u64,
        stream: StreamIdentity,
        done: impl Completion,
    ) -> Result<()> {
        self.free_after_all(address, vec![Work::on(stream, done)])
    }

    /// Takes an allocation back whose bytes may be used again once all of this work, and what was
    /// [noted](Bfc::record_work) before, has finished.
    ///
    /// When a single stream's work is left, that stream may use the bytes at once, in its order
    /// ([`Request::on`]). Nobody is woken when work finishes: allocations that find no room ask,
    /// and so do [`settle`](Bfc::settle) and every 64th call of this for a stream.
    ///
    /// # Errors
    ///
    /// As [`free`](Bfc::free).
    pub fn free_after_all(&self, address: u64, work: Vec<Work>) -> Result<()> {
        self.core.upstream.check_owner()?;
        let mut guard = self.core.state();
        let state = &mut *guard;
        let Some((id, handed)) = state.heap.withdraw(address) else {
            return Err(foreign(address));
        };
        state.counters.freed(handed.bytes, handed.asked);
        state.scopes.freed(handed.bytes);
        let mut crowded = false;
        for work in work {
            crowded |= state.pending.add(id, work);
        }
        self.core.withdrawn(state, id);
        // A thread that waits has to begin to ask.
        self.core.wake(guard);
        if crowded {
            self.core.settle();
        }
        Ok(())
    }

    /// Notes work that touches an allocation, such as that of a second stream: after its free,
    /// whatever that says, its bytes are not used again before this work has finished, but by its
    /// own stream.
    ///
    /// To be called again after each further piece of work; for one stream the last call covers
    /// those before.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](gpu_api::Error::Invalid) for an address that is not handed out.
    #[doc(alias = "record_stream")]
    pub fn record_work(&self, address: u64, work: Work) -> Result<()> {
        self.core.upstream.check_owner()?;
        let mut state = self.core.state();
        let id = state.heap.id_at(address).ok_or_else(|| foreign(address))?;
        let crowded = state.pending.add(id, work);
        drop(state);
        if crowded {
            self.core.settle();
        }
        Ok(())
    }

    /// Asks for the work on pending chunks and frees those whose work has finished; says how many
    /// bytes.
    pub fn settle(&self) -> u64 {
        self.core.settle()
    }

    /// Returns whole regions that nobody uses and upstream may free, and says how many bytes. May
    /// block.
    ///
    /// # Errors
    ///
    /// The first error of upstream's; the other regions are given back all the same. What failed is
    /// leaked.
    pub fn trim(&self) -> Result<u64> {
        self.core.trim()
    }

    /// Returns what is known of an allocation; `None` for an address that is not handed out.
    pub fn get(&self, address: u64) -> Option<Placed<U::Token>> {
        let state = self.core.state();
        state
            .heap
            .get(address)
            .map(|handed| placed(&state.heap, handed))
    }

    /// Finds the allocation that an address lies in, at its start or anywhere. Looks through the
    /// chunks of a region, with the lock held.
    pub fn find(&self, address: u64) -> Option<Placed<U::Token>> {
        let state = self.core.state();
        state
            .heap
            .covering(address)
            .map(|handed| placed(&state.heap, handed))
    }

    /// Returns what it counts.
    pub fn stats(&self) -> AllocatorStats {
        self.core.stats()
    }

    /// Lists every region and chunk as they are at this moment. Holds the lock while it does.
    pub fn snapshot(&self) -> Snapshot {
        self.core.snapshot()
    }

    /// Starts counting anew: no allocations, the peak is what is in use.
    pub fn clear_stats(&self) {
        self.core.state().counters.clear();
    }

    /// Counts apart what is allocated and freed until the scope ends, by whatever thread.
    pub fn scope(&self) -> Scope<'_> {
        let scope = self.core.state().scopes.open();
        Scope {
            close: Some(Box::new(move || -> ScopeStats {
                self.core.state().scopes.close(scope)
            })),
        }
    }

    /// Returns the bytes of host memory that its tables take.
    pub fn bookkeeping_bytes(&self) -> u64 {
        self.core.state().heap.bookkeeping() as u64
    }

    /// Returns how it was set up.
    pub fn options(&self) -> &BfcOptions {
        &self.core.options
    }

    /// Returns where its regions come from.
    pub fn upstream(&self) -> &U {
        &self.core.upstream
    }

    /// Returns the bytes of regions that upstream failed to take back. They are neither used nor
    /// freed again.
    pub fn leaked_bytes(&self) -> u64 {
        self.core.state().counters.leaked
    }

    /// Adds a keeper of free memory of it, which is asked to return it before a request fails or
    /// waits.
    pub fn register_keeper(&self, keeper: Weak<dyn Trim>) {
        self.core.keepers.add(keeper);
    }

    /// Says whether a request has found nothing free, and waits or tries to get some.
    pub fn is_wanted(&self) -> bool {
        self.core.state().turns > 0
    }

    /// Has waiting requests ask upstream again: an unused region may be returned from here on.
    pub(crate) fn wake_for_trim(&self) {
        self.core.room_came();
    }
}

impl<U: SubAllocator> Drop for Bfc<U> {
    fn drop(&mut self) {
        // In a forked child the regions are the parent's.
        if self.core.upstream.check_owner().is_err() {
            return;
        }
        let name = &self.core.options.name;
        if let Err(error) = self.trim() {
            tracing::warn!(allocator = name, %error, "a region is leaked");
        }
        let in_use = self.core.state().counters.in_use;
        if in_use > 0 {
            tracing::warn!(
                allocator = name,
                in_use,
                "dropped while memory of it is in use"
            );
        }
        let pending = self.core.state().pending.bytes();
        if pending > 0 {
            // The work may end long after this, and a drop must not wait for it.
            let late = Bfc {
                core: self.core.clone(),
            };
            let spawned = thread::start("gpu-ipc-late", move || late.finish());
            if let Err(error) = spawned {
                tracing::warn!(allocator = name, pending, %error, "regions are leaked: no thread waits for their work");
            }
        }
    }
}

/// How long the thread of a dropped allocator naps between two looks at the work, at first and at
/// most.
const LATE_NAPS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(128));

impl<U: SubAllocator> Bfc<U> {
    /// Stays until the work on what was given back has finished; then its drop gives the regions
    /// back.
    fn finish(self) {
        let mut nap = LATE_NAPS.0;
        while self.core.upstream.check_owner().is_ok() && self.core.state().pending.bytes() > 0 {
            std::thread::sleep(nap);
            nap = (2 * nap).min(LATE_NAPS.1);
            self.settle();
        }
    }
}

impl<U: SubAllocator> fmt::Debug for Bfc<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bfc")
            .field("name", &self.core.options.name)
            .field("upstream", &self.core.upstream)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl<U: SubAllocator> Trim for Bfc<U> {
    fn trim(&self) -> Result<u64> {
        Bfc::trim(self)
    }
}

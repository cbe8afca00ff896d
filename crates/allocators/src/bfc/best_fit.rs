//! The heap under its lock: allocate, free, wait.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_api::{Error, Result, StreamIdentity};

use super::growth::Grower;
use super::heap::{Fit, Handed, Heap};
use super::options::BfcOptions;
use super::pending::{Completion, Pending, ask};
use super::stats::{AllocatorStats, Counters, Scope, ScopeStats, Scopes};
use crate::request::foreign;
use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use crate::{Placed, Request, SubAllocator};

/// How often a waiting thread asks for the work on pending chunks, which wakes nobody when it finishes.
const ASK_AGAIN: Duration = Duration::from_millis(1);

/// What the lock guards.
pub(crate) struct State<T> {
    pub(crate) heap: Heap<T>,
    pub(crate) counters: Counters,
    pub(crate) pending: Pending,
    pub(crate) scopes: Scopes,
    /// Rises whenever memory may have become free: who tried in vain waits for it to rise.
    pub(crate) generation: u64,
    /// How often regions went back to upstream, or could, which leaves room to grow.
    pub(crate) trims: u64,
    pub(crate) waiters: u32,
}

/// Best fit with coalescing over regions from upstream.
///
/// The smallest free chunk that is large enough is taken, of several the one with the lowest address; it is cut when
/// what is too much is an eighth of what is needed or more, or what else [`BfcOptions::max_slack_share`] says. What is freed merges with its free neighbours at once. Regions come from a
/// [`SubAllocator`] as they are needed.
///
/// An address that was not handed out, lies inside a chunk or was freed already is an error and changes nothing.
///
/// # Locks
///
/// One for the chunks, held for well under a microsecond but when a table grows, a snapshot is taken, or many free chunks
/// have to be looked through for an aligned start, and one for growth, held while upstream is called. Of what others wrote only [`SubAllocator::may_free`] and
/// [`SubAllocator::check_owner`] run under the first.
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
    pub(crate) options: BfcOptions,
    pub(crate) upstream: U,
    /// Before `state` in the order of locks.
    pub(crate) grower: Mutex<Grower>,
    pub(crate) state: Mutex<State<U::Token>>,
    freed: Condvar,
}

impl<U: SubAllocator> Bfc<U> {
    /// Makes an allocator that has no region yet.
    pub fn new(options: BfcOptions, upstream: U) -> Bfc<U> {
        let state = State {
            heap: Heap::new(options.slack(), options.max_slack_share),
            counters: Counters::default(),
            pending: Pending::default(),
            scopes: Scopes::default(),
            generation: 0,
            trims: 0,
            waiters: 0,
        };
        let grower = Mutex::new(Grower::new(&options));
        Bfc { options, upstream, grower, state: Mutex::new(state), freed: Condvar::new() }
    }

    /// Allocates; grows, gives idle regions back and waits as far as it may.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] when there is no room after all that, with sums, a histogram and a map of the regions;
    /// [`Error::Invalid`] for no bytes or an alignment that is no power of two; what upstream said, when it is not that it
    /// has no room.
    pub fn alloc(&self, request: Request) -> Result<Placed<U::Token>> {
        self.upstream.check_owner()?;
        let fit = self.fit(&request)?;
        match self.try_fit(&request, fit) {
            Some(placed) => Ok(placed),
            None => self.alloc_slowly(&request, fit).map_err(|error| self.explain(error, |_| ())),
        }
    }

    /// Does all of [`alloc`](Bfc::alloc) but the first look; the error has no more than the sums, for who tries again.
    pub(crate) fn alloc_harder(&self, request: Request) -> Result<Placed<U::Token>> {
        self.upstream.check_owner()?;
        let fit = self.fit(&request)?;
        self.alloc_slowly(&request, fit)
    }

    /// Allocates from what is free at this moment, without growing or waiting; `None` when nothing fits.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] as [`alloc`](Bfc::alloc).
    pub fn try_alloc(&self, request: Request) -> Result<Option<Placed<U::Token>>> {
        self.upstream.check_owner()?;
        let fit = self.fit(&request)?;
        Ok(self.try_fit(&request, fit))
    }

    /// Takes an allocation back: its bytes may be used again at once. Never calls upstream.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an address that is not handed out; nothing changes then.
    pub fn free(&self, address: u64) -> Result<()> {
        self.upstream.check_owner()?;
        self.free_in(self.state(), address)
    }

    /// Takes an allocation back if it is the one that is meant.
    ///
    /// # Errors
    ///
    /// As [`free`](Bfc::free), and for an address that another allocation has by now.
    pub(crate) fn free_if(&self, address: u64, is_meant: impl FnOnce(&Placed<U::Token>) -> bool) -> Result<()> {
        self.upstream.check_owner()?;
        let state = self.state();
        match state.heap.get(address) {
            Some(handed) if is_meant(&placed(&state.heap, handed)) => self.free_in(state, address),
            _ => Err(foreign(address)),
        }
    }

    #[inline]
    fn free_in(&self, mut state: MutexGuard<'_, State<U::Token>>, address: u64) -> Result<()> {
        let Some((id, handed)) = state.heap.withdraw(address) else { return Err(foreign(address)) };
        state.counters.freed(handed.bytes, handed.asked);
        state.scopes.freed(handed.bytes);
        state.heap.release(id);
        self.wake(state);
        Ok(())
    }

    /// Takes an allocation back whose bytes may be used again once `done` says so, and by `stream` at once.
    ///
    /// `done` stands for the work that was queued on `stream` before this call. Nobody is woken when it finishes:
    /// allocations that find no room ask, and so do [`settle`](Bfc::settle) and every 64th call of this for a stream.
    ///
    /// # Errors
    ///
    /// As [`free`](Bfc::free).
    pub fn free_after(&self, address: u64, stream: StreamIdentity, done: impl Completion) -> Result<()> {
        self.free_when(address, stream, Arc::new(done))
    }

    pub(crate) fn free_when(&self, address: u64, stream: StreamIdentity, done: Arc<dyn Completion>) -> Result<()> {
        self.upstream.check_owner()?;
        let mut guard = self.state();
        let state = &mut *guard;
        let Some((id, handed)) = state.heap.withdraw(address) else { return Err(foreign(address)) };
        state.counters.freed(handed.bytes, handed.asked);
        state.scopes.freed(handed.bytes);
        let crowded = state.pending.push(&mut state.heap.chunks, id, stream, done);
        // A thread that waits has to begin to ask.
        self.wake(guard);
        if crowded {
            self.settle();
        }
        Ok(())
    }

    /// Asks for the work on pending chunks and frees those whose work has finished; says how many bytes.
    pub fn settle(&self) -> u64 {
        let mut settled = 0;
        if self.upstream.check_owner().is_err() {
            return 0;
        }
        loop {
            let questions = {
                let state = self.state();
                if state.pending.is_empty() {
                    return settled;
                }
                state.pending.questions()
            };
            let passed = ask(questions);
            if passed.is_empty() {
                return settled;
            }
            let mut guard = self.state();
            let state = &mut *guard;
            let (ready, finished) = state.pending.take_passed(&state.heap.chunks, &passed);
            for id in ready {
                settled += state.heap.chunks[id].bytes();
                state.heap.release(id);
            }
            self.wake(guard);
            drop(finished);
        }
    }

    /// Returns what is known of an allocation; `None` for an address that is not handed out.
    pub fn get(&self, address: u64) -> Option<Placed<U::Token>> {
        let state = self.state();
        state.heap.get(address).map(|handed| placed(&state.heap, handed))
    }

    /// Returns what it counts.
    pub fn stats(&self) -> AllocatorStats {
        let state = self.state();
        state.counters.stats(self.options.limit, state.heap.largest_free())
    }

    /// Starts counting anew: no allocations, the peak is what is in use.
    pub fn clear_stats(&self) {
        self.state().counters.clear();
    }

    /// Counts apart what is allocated and freed until the scope ends, by whatever thread.
    pub fn scope(&self) -> Scope<'_> {
        let scope = self.state().scopes.open();
        Scope { close: Some(Box::new(move || -> ScopeStats { self.state().scopes.close(scope) })) }
    }

    /// Returns the bytes of host memory that its tables take.
    pub fn bookkeeping_bytes(&self) -> u64 {
        self.state().heap.bookkeeping() as u64
    }

    /// Returns how it was set up.
    pub fn options(&self) -> &BfcOptions {
        &self.options
    }

    /// Returns where its regions come from.
    pub fn upstream(&self) -> &U {
        &self.upstream
    }

    /// Returns the bytes of regions that upstream failed to take back. They are neither used nor freed again.
    pub fn leaked_bytes(&self) -> u64 {
        self.state().counters.leaked
    }

    /// Says whether whatever anybody gives back makes no room for so much.
    pub(crate) fn is_hopeless(&self, bytes: u64) -> bool {
        bytes > self.options.limit.min(self.upstream.capacity())
    }

    /// Returns a number that rises whenever memory may have become free.
    pub(crate) fn generation(&self) -> u64 {
        self.state().generation
    }

    /// Has those who wait turn to upstream again: a region that nobody uses may be given back from here on.
    pub(crate) fn wake_for_trim(&self) {
        if self.upstream.check_owner().is_ok() {
            let mut state = self.state();
            state.trims += 1;
            self.wake(state);
        }
    }

    /// Returns how often regions went back to upstream, or could.
    pub(crate) fn trims(&self) -> u64 {
        self.state().trims
    }

    /// Waits until memory may have become free since `seen` was read, or until the deadline; says whether it may.
    ///
    /// Whoever reads `seen` before trying cannot miss what was freed in between.
    pub(crate) fn wait(&self, seen: u64, deadline: Instant) -> bool {
        let mut state = self.state();
        loop {
            if state.generation != seen {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let ask_again = !state.pending.is_empty();
            let nap = if ask_again { left.min(ASK_AGAIN) } else { left };
            state.waiters += 1;
            state = self.freed.wait_timeout(state, nap).unwrap_or_else(PoisonError::into_inner).0;
            state.waiters -= 1;
            if ask_again && state.generation == seen {
                drop(state);
                self.settle();
                state = self.state();
            }
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State<U::Token>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells those who wait that memory may have become free.
    pub(crate) fn wake(&self, mut state: MutexGuard<'_, State<U::Token>>) {
        state.generation += 1;
        let waiters = state.waiters;
        drop(state);
        if waiters > 0 {
            self.freed.notify_all();
        }
    }

    pub(crate) fn fit(&self, request: &Request) -> Result<Fit> {
        request.check()?;
        Fit::new(request.bytes, request.align).ok_or_else(|| Error::OutOfMemory {
            device: self.options.device,
            asked: request.bytes,
            free: self.options.limit.saturating_sub(self.state().counters.in_use),
            hint: "no chunk is that large or so aligned, ask for less".into(),
        })
    }

    #[inline]
    pub(crate) fn try_fit(&self, request: &Request, fit: Fit) -> Option<Placed<U::Token>> {
        let mut guard = self.state();
        let state = &mut *guard;
        let own = match request.stream {
            Some(stream) => state.pending.reuse(&state.heap, stream, fit),
            None => None,
        };
        let handed = match own {
            Some(id) => state.heap.hand_out(id, fit.asked),
            None => state.heap.take(fit)?,
        };
        state.counters.allocated(handed.bytes, handed.asked);
        state.scopes.allocated(handed.bytes);
        Some(placed(&state.heap, handed))
    }

    #[cold]
    fn alloc_slowly(&self, request: &Request, fit: Fit) -> Result<Placed<U::Token>> {
        loop {
            let seen = self.generation();
            if self.settle() > 0
                && let Some(placed) = self.try_fit(request, fit)
            {
                return Ok(placed);
            }
            let error = match self.grow_for(request, fit) {
                Ok(placed) => return Ok(placed),
                Err(error @ Error::OutOfMemory { .. }) => error,
                Err(error) => return Err(error),
            };
            match request.until {
                Some(deadline) if !self.is_hopeless(fit.bytes()) && self.wait(seen, deadline) => {}
                _ => return Err(error),
            }
            if let Some(placed) = self.try_fit(request, fit) {
                return Ok(placed);
            }
        }
    }
}

impl<U: SubAllocator> Drop for Bfc<U> {
    fn drop(&mut self) {
        // In a forked child the regions are the parent's.
        if self.upstream.check_owner().is_err() {
            return;
        }
        if let Err(error) = self.trim() {
            tracing::warn!(allocator = self.options.name, %error, "a region is leaked");
        }
        let state = self.state();
        let (in_use, pending) = (state.counters.in_use, state.pending.bytes());
        if in_use + pending > 0 {
            tracing::warn!(allocator = self.options.name, in_use, pending, "dropped while memory of it is in use");
        }
    }
}

impl<U: SubAllocator> fmt::Debug for Bfc<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bfc")
            .field("name", &self.options.name)
            .field("upstream", &self.upstream)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

#[inline]
fn placed<T: Clone>(heap: &Heap<T>, handed: Handed) -> Placed<T> {
    let Handed { address, bytes, asked, number, .. } = handed;
    Placed { address, bytes, asked, number, token: heap.token(handed) }
}

//! The heap under its lock: allocate, free, wait.

use std::fmt;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use gpu_api::{Error, Result, StreamIdentity};

use super::chunk::ChunkId;
use super::growth::Grower;
use super::heap::{Fit, Handed, Heap};
use super::options::BfcOptions;
use super::pending::{Completion, Pending, Work, ask};
use super::stats::{AllocatorStats, Counters, Scope, ScopeStats, Scopes};
use super::window::Window;
use crate::keepers::Keepers;
use crate::request::foreign;
use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use crate::upstream::RoomListener;
use crate::{Placed, Request, SubAllocator, Trim};

/// How often a waiting thread asks for the work on pending chunks, which wakes nobody when it finishes.
const ASK_AGAIN: Duration = Duration::from_millis(1);

/// What the lock guards.
pub(crate) struct BfcState<T> {
    pub(crate) heap: Heap<T>,
    pub(crate) counters: Counters,
    pub(crate) pending: Pending,
    pub(crate) scopes: Scopes,
    /// What is kept together for the request that has waited longest.
    pub(crate) window: Option<Window>,
    /// Rises whenever memory may have become free: a request that failed waits for it to rise.
    pub(crate) generation: u64,
    /// How often upstream may have got room: regions went back, or could, or others gave back what they shared.
    pub(crate) room: u64,
    pub(crate) waiters: u32,
    /// The last request that found nothing free.
    pub(crate) tickets: u64,
    /// How many such requests there are at this moment.
    pub(crate) turns: u32,
}

impl<T> BfcState<T> {
    /// Makes a withdrawn chunk free, or withholds it.
    #[inline]
    fn release(&mut self, id: ChunkId) {
        if let Some(window) = &mut self.window
            && window.covers(&self.heap, id)
        {
            window.keep(&mut self.heap, id);
        } else {
            self.heap.release(id);
        }
    }

    /// Makes free what was withheld for anybody.
    pub(crate) fn dissolve_window(&mut self) -> bool {
        let window = self.window.take();
        let is_there = window.is_some();
        window.into_iter().for_each(|window| window.dissolve(&mut self.heap));
        is_there
    }
}

/// A [`Bfc`] but for its drop, which may have to leave it to somebody else.
pub(crate) struct Core<U: SubAllocator> {
    pub(crate) options: BfcOptions,
    pub(crate) upstream: U,
    /// Before `state` in the order of locks.
    pub(crate) grower: Mutex<Grower>,
    pub(crate) state: Mutex<BfcState<U::Token>>,
    freed: Condvar,
    pub(crate) keepers: Keepers,
}

impl<U: SubAllocator> Core<U> {
    pub(crate) fn state(&self) -> MutexGuard<'_, BfcState<U::Token>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells waiting requests that memory may have become free.
    pub(crate) fn wake(&self, mut state: MutexGuard<'_, BfcState<U::Token>>) {
        state.generation += 1;
        let waiters = state.waiters;
        drop(state);
        if waiters > 0 {
            self.freed.notify_all();
        }
    }
}

impl<U: SubAllocator> RoomListener for Core<U> {
    fn room_came(&self) {
        if self.upstream.check_owner().is_ok() {
            let mut state = self.state();
            state.room += 1;
            self.wake(state);
        }
    }
}

/// How far an allocator had come when somebody looked.
#[derive(Clone, Copy)]
pub(crate) struct Seen {
    generation: u64,
    pub(crate) room: u64,
}

/// Best fit with coalescing over regions from upstream.
///
/// It takes the smallest free chunk that is large enough, and of several the one with the lowest address. It splits the
/// chunk if the slack is at least 1/8 of the request, or the share that [`BfcOptions::max_slack_share`] sets. A freed
/// chunk merges with its free neighbours at once. Regions come from a [`SubAllocator`] when they are needed.
///
/// An address that was not handed out, lies inside a chunk or was freed already is an error and changes nothing.
///
/// # Locks
///
/// One for the chunks, held for well under a microsecond but when a table grows, a snapshot is taken, or many free
/// chunks have to be looked through for an aligned start, and one for growth, held while upstream is called. Of what
/// others wrote only [`SubAllocator::may_free`] and [`SubAllocator::check_owner`] run under the first.
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
        let state = BfcState {
            heap: Heap::new(options.slack(), options.max_slack_share, options.max_split),
            counters: Counters::default(),
            pending: Pending::default(),
            scopes: Scopes::default(),
            window: None,
            generation: 0,
            room: 0,
            waiters: 0,
            tickets: 0,
            turns: 0,
        };
        let grower = Mutex::new(Grower::new(&options));
        let (state, freed, keepers) = (Mutex::new(state), Condvar::new(), Keepers::default());
        let core = Arc::new(Core { options, upstream, grower, state, freed, keepers });
        let listener: Weak<dyn RoomListener> = Arc::<Core<U>>::downgrade(&core);
        core.upstream.subscribe(listener);
        Bfc { core }
    }

    /// Allocates; grows, gives idle regions back and waits as far as it may.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] when there is no room after all that, with sums, a histogram and a map of the regions;
    /// [`Error::Invalid`] for no bytes or an alignment that is no power of two; what upstream said, when it is not that
    /// it has no room.
    pub fn alloc(&self, request: Request) -> Result<Placed<U::Token>> {
        self.core.upstream.check_owner()?;
        let fit = self.fit(&request)?;
        match self.try_fit(&request, fit) {
            Some(placed) => Ok(placed),
            None => self.alloc_slowly(&request, fit).map_err(|error| self.explain(error, |_| ())),
        }
    }

    /// Allocates from what is free at this moment, without growing or waiting; `None` when nothing fits.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] as [`alloc`](Bfc::alloc).
    pub fn try_alloc(&self, request: Request) -> Result<Option<Placed<U::Token>>> {
        self.core.upstream.check_owner()?;
        let fit = self.fit(&request)?;
        Ok(self.try_fit(&request, fit))
    }

    /// Takes an allocation back: its bytes may be used again at once. Never calls upstream.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an address that is not handed out; nothing changes then.
    pub fn free(&self, address: u64) -> Result<()> {
        self.core.upstream.check_owner()?;
        self.free_in(self.state(), address)
    }

    /// Takes an allocation back if it is the one that is meant.
    ///
    /// # Errors
    ///
    /// As [`free`](Bfc::free), and for an address that another allocation has by now.
    pub(crate) fn free_if(&self, address: u64, is_meant: impl FnOnce(&Placed<U::Token>) -> bool) -> Result<()> {
        self.core.upstream.check_owner()?;
        let state = self.state();
        match state.heap.get(address) {
            Some(handed) if is_meant(&placed(&state.heap, handed)) => self.free_in(state, address),
            _ => Err(foreign(address)),
        }
    }

    #[inline]
    fn free_in(&self, mut state: MutexGuard<'_, BfcState<U::Token>>, address: u64) -> Result<()> {
        let Some((id, handed)) = state.heap.withdraw(address) else { return Err(foreign(address)) };
        state.counters.freed(handed.bytes, handed.asked);
        state.scopes.freed(handed.bytes);
        // Work of an earlier owner's may be left, when its stream got the bytes before it had finished.
        self.withdrawn(&mut state, id);
        self.core.wake(state);
        Ok(())
    }

    /// Takes an allocation back whose bytes may be used again once `done` says so, and by `stream` at once.
    ///
    /// `done` stands for the work that was queued on `stream` before this call. As
    /// [`free_after_all`](Bfc::free_after_all) otherwise.
    ///
    /// # Errors
    ///
    /// As [`free`](Bfc::free).
    pub fn free_after(&self, address: u64, stream: StreamIdentity, done: impl Completion) -> Result<()> {
        self.free_after_all(address, vec![Work::on(stream, done)])
    }

    /// Takes an allocation back whose bytes may be used again once all of this work, and what was
    /// [noted](Bfc::record_work) before, has finished.
    ///
    /// When a single stream's work is left, that stream may use the bytes at once, in its order
    /// ([`Request::on`]). Nobody is woken when work finishes: allocations that find no room ask, and so do
    /// [`settle`](Bfc::settle) and every 64th call of this for a stream.
    ///
    /// # Errors
    ///
    /// As [`free`](Bfc::free).
    pub fn free_after_all(&self, address: u64, work: Vec<Work>) -> Result<()> {
        self.core.upstream.check_owner()?;
        let mut guard = self.state();
        let state = &mut *guard;
        let Some((id, handed)) = state.heap.withdraw(address) else { return Err(foreign(address)) };
        state.counters.freed(handed.bytes, handed.asked);
        state.scopes.freed(handed.bytes);
        let mut crowded = false;
        for work in work {
            crowded |= state.pending.add(id, work);
        }
        self.withdrawn(state, id);
        // A thread that waits has to begin to ask.
        self.core.wake(guard);
        if crowded {
            self.settle();
        }
        Ok(())
    }

    /// Notes work that touches an allocation, such as that of a second stream: after its free, whatever that says, its
    /// bytes are not used again before this work has finished, but by its own stream.
    ///
    /// To be called again after each further piece of work; for one stream the last call covers those before.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an address that is not handed out.
    #[doc(alias = "record_stream")]
    pub fn record_work(&self, address: u64, work: Work) -> Result<()> {
        self.core.upstream.check_owner()?;
        let mut state = self.state();
        let id = state.heap.id_at(address).ok_or_else(|| foreign(address))?;
        let crowded = state.pending.add(id, work);
        drop(state);
        if crowded {
            self.settle();
        }
        Ok(())
    }

    /// Makes a withdrawn chunk free, or pending when work of it is left.
    #[inline]
    fn withdrawn(&self, state: &mut BfcState<U::Token>, id: ChunkId) {
        if state.pending.is_busy(id) {
            state.pending.withdraw(&mut state.heap.chunks, id);
        } else {
            state.release(id);
        }
    }

    /// Asks for the work on pending chunks and frees those whose work has finished; says how many bytes.
    pub fn settle(&self) -> u64 {
        let mut settled = 0;
        if self.core.upstream.check_owner().is_err() {
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
                state.release(id);
            }
            self.core.wake(guard);
            drop(finished);
        }
    }

    /// Returns what is known of an allocation; `None` for an address that is not handed out.
    pub fn get(&self, address: u64) -> Option<Placed<U::Token>> {
        let state = self.state();
        state.heap.get(address).map(|handed| placed(&state.heap, handed))
    }

    /// Finds the allocation that an address lies in, at its start or anywhere. Looks through the chunks of a region,
    /// with the lock held.
    pub fn find(&self, address: u64) -> Option<Placed<U::Token>> {
        let state = self.state();
        state.heap.covering(address).map(|handed| placed(&state.heap, handed))
    }

    /// Returns what it counts.
    pub fn stats(&self) -> AllocatorStats {
        let state = self.state();
        state.counters.stats(self.core.options.limit, state.heap.largest_free())
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
        &self.core.options
    }

    /// Returns where its regions come from.
    pub fn upstream(&self) -> &U {
        &self.core.upstream
    }

    /// Returns the bytes of regions that upstream failed to take back. They are neither used nor freed again.
    pub fn leaked_bytes(&self) -> u64 {
        self.state().counters.leaked
    }

    /// Adds a keeper of free memory of it, which is asked to return it before a request fails or waits.
    pub fn register_keeper(&self, keeper: Weak<dyn Trim>) {
        self.core.keepers.add(keeper);
    }

    /// Says whether a request has found nothing free, and waits or tries to get some.
    pub fn is_wanted(&self) -> bool {
        self.state().turns > 0
    }

    /// Says whether whatever anybody gives back makes no room for so much.
    pub(crate) fn is_hopeless(&self, bytes: u64) -> bool {
        bytes > self.core.options.limit.min(self.core.upstream.capacity())
    }

    /// Returns the number of frees so far. A caller that reads it before trying cannot miss a free in between.
    pub(crate) fn seen(&self) -> Seen {
        let state = self.state();
        Seen { generation: state.generation, room: state.room }
    }

    /// Has waiting requests ask upstream again: an unused region may be returned from here on.
    pub(crate) fn wake_for_trim(&self) {
        self.core.room_came();
    }

    /// Waits until memory may have become free since `seen`, or until the deadline; says whether it may.
    pub(crate) fn wait(&self, seen: Seen, deadline: Instant) -> bool {
        let mut state = self.state();
        loop {
            if state.generation != seen.generation {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let ask_again = !state.pending.is_empty();
            let nap = if ask_again { left.min(ASK_AGAIN) } else { left };
            state.waiters += 1;
            state = self.core.freed.wait_timeout(state, nap).unwrap_or_else(PoisonError::into_inner).0;
            state.waiters -= 1;
            if ask_again && state.generation == seen.generation {
                drop(state);
                self.settle();
                state = self.state();
            }
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, BfcState<U::Token>> {
        self.core.state()
    }

    pub(crate) fn fit(&self, request: &Request) -> Result<Fit> {
        request.check()?;
        let rounded = self.core.options.rounded(request.bytes);
        let fit = rounded.and_then(|bytes| Fit::new(request.bytes, bytes, request.align));
        fit.ok_or_else(|| Error::OutOfMemory {
            device: self.core.options.device,
            asked: request.bytes,
            free: self.core.options.limit.saturating_sub(self.state().counters.in_use),
            hint: "no chunk is that large or so aligned, ask for less".into(),
        })
    }

    #[inline]
    pub(crate) fn try_fit(&self, request: &Request, fit: Fit) -> Option<Placed<U::Token>> {
        self.fit_in(&mut self.state(), request, fit)
    }

    #[inline]
    pub(crate) fn fit_in(
        &self,
        state: &mut BfcState<U::Token>,
        request: &Request,
        fit: Fit,
    ) -> Option<Placed<U::Token>> {
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
        let in_use = self.state().counters.in_use;
        if in_use > 0 {
            tracing::warn!(allocator = name, in_use, "dropped while memory of it is in use");
        }
        let pending = self.state().pending.bytes();
        if pending > 0 {
            // The work may end long after this, and a drop must not wait for it.
            let late = Bfc { core: self.core.clone() };
            let spawned = thread::Builder::new().name("gpu-ipc-late".into()).spawn(move || late.finish());
            if let Err(error) = spawned {
                tracing::warn!(allocator = name, pending, %error, "regions are leaked: no thread waits for their work");
            }
        }
    }
}

/// How long the thread of a dropped allocator naps between two looks at the work, at first and at most.
const LATE_NAPS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(128));

impl<U: SubAllocator> Bfc<U> {
    /// Stays until the work on what was given back has finished; then its drop gives the regions back.
    fn finish(self) {
        let mut nap = LATE_NAPS.0;
        while self.core.upstream.check_owner().is_ok() && self.state().pending.bytes() > 0 {
            thread::sleep(nap);
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

#[inline]
fn placed<T: Clone>(heap: &Heap<T>, handed: Handed) -> Placed<T> {
    let Handed { address, bytes, asked, number, .. } = handed;
    Placed { address, bytes, asked, number, token: heap.token(handed) }
}

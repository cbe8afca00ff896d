//! The heap under its lock: hand out, take back, wait. What all of a [`Bfc`](super::Bfc) works on.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use gpu_api::{Error, Result};

use super::chunk::ChunkId;
use super::heap::{Fit, Handed, Heap};
use super::options::BfcOptions;
use super::pending::{Pending, ask};
use super::stats::{AllocatorStats, Counters, Scopes};
use super::window::Window;
use crate::keepers::Keepers;
use crate::sync::{AtomicBool, Condvar, Mutex, MutexGuard, PoisonError, lock_briefly};
use crate::upstream::RoomListener;
use crate::{Placed, Request, SubAllocator};

/// How often a waiting thread asks for the work on pending chunks, which wakes nobody when it
/// finishes.
const ASK_AGAIN: Duration = Duration::from_millis(1);

/// How much comes next. Its lock is held while upstream is called, so that one region is made at a
/// time and the limit is kept.
pub(crate) struct Grower {
    pub(crate) next: u64,
    /// What upstream last had no room for.
    pub(crate) refused: Option<Refused>,
}

/// That upstream had no room.
pub(crate) struct Refused {
    /// How often upstream had got room by then.
    pub(crate) room: u64,
    pub(crate) at: Instant,
    pub(crate) bytes: u64,
}

/// How long a refusal counts for requests that wait: nobody tells of what other processes give
/// back.
const REFUSED: Duration = Duration::from_millis(10);

impl Grower {
    pub(crate) fn new(options: &BfcOptions) -> Grower {
        Grower {
            next: options.first_region(),
            refused: None,
        }
    }

    /// Says whether upstream has just refused as much, with nothing given back since.
    pub(crate) fn has_refused(&self, room: u64, now: Instant, fit: Fit) -> bool {
        self.refused.as_ref().is_some_and(|refused| {
            refused.room == room
                && refused.bytes <= fit.bytes()
                && now.saturating_duration_since(refused.at) < REFUSED
        })
    }
}

/// What the lock guards.
pub(crate) struct BfcState<T> {
    pub(crate) heap: Heap<T>,
    pub(crate) counters: Counters,
    /// Bytes in use beyond which an allocation says that it is `over`: the heap is one of several.
    ceiling: u64,
    pub(crate) pending: Pending,
    pub(crate) scopes: Scopes,
    /// What is kept together for the request that has waited longest.
    pub(crate) window: Option<Window>,
    /// Rises whenever memory may have become free: a request that failed waits for it to rise.
    pub(crate) generation: u64,
    /// How often upstream may have got room: regions went back, or could, or others gave back what
    /// they shared.
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
    pub(crate) fn release(&mut self, id: ChunkId) {
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
        window
            .into_iter()
            .for_each(|window| window.dissolve(&mut self.heap));
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
    /// Whether an allocation went beyond the ceiling. Written under the lock.
    over: AtomicBool,
    pub(crate) keepers: Keepers,
}

impl<U: SubAllocator> Core<U> {
    /// Makes a heap that has no region yet, and listens for room of upstream's.
    pub(crate) fn new(options: BfcOptions, upstream: U) -> Arc<Core<U>> {
        let state = BfcState {
            heap: Heap::new(options.slack(), options.max_slack_share, options.max_split),
            counters: Counters::default(),
            ceiling: u64::MAX,
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
        let (state, freed, over) = (Mutex::new(state), Condvar::new(), AtomicBool::new(false));
        let keepers = Keepers::default();
        let core = Arc::new(Core {
            options,
            upstream,
            grower,
            state,
            freed,
            over,
            keepers,
        });
        let listener: Weak<dyn RoomListener> = Arc::<Core<U>>::downgrade(&core);
        core.upstream.subscribe(listener);
        core
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, BfcState<U::Token>> {
        lock_briefly(&self.state)
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

    /// Returns what it counts.
    pub(crate) fn stats(&self) -> AllocatorStats {
        let state = self.state();
        state
            .counters
            .stats(self.options.limit, state.heap.largest_free())
    }

    /// Says whether whatever anybody gives back makes no room for so much.
    pub(crate) fn is_hopeless(&self, bytes: u64) -> bool {
        bytes > self.options.limit.min(self.upstream.capacity())
    }

    /// Returns the number of frees so far. A caller that reads it before trying cannot miss a free
    /// in between.
    pub(crate) fn seen(&self) -> Seen {
        let state = self.state();
        Seen {
            generation: state.generation,
            room: state.room,
        }
    }

    #[inline]
    pub(crate) fn fit(&self, request: &Request) -> Result<Fit> {
        request.check()?;
        let rounded = self.options.rounded(request.bytes);
        let fit = rounded.and_then(|bytes| Fit::new(request.bytes, bytes, request.align));
        fit.ok_or_else(|| self.unfit(request))
    }

    #[cold]
    fn unfit(&self, request: &Request) -> Error {
        let stats = self.stats();
        Error::OutOfMemory {
            device: self.options.device,
            asked: request.bytes,
            free: stats.bytes_reserved.saturating_sub(stats.bytes_in_use),
            hint: "no chunk is that large or so aligned, ask for less".into(),
        }
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
        if state.counters.in_use > state.ceiling {
            self.over.store(true, Ordering::Relaxed);
        }
        state.scopes.allocated(handed.bytes);
        Some(placed(&state.heap, handed))
    }

    /// Says whether an allocation went beyond the ceiling since that was set; to be asked by who
    /// has just allocated.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        // Relaxed: either this thread wrote it, or who wrote it since had the lock after this
        // thread.
        self.over.load(Ordering::Relaxed)
    }

    /// Sets the ceiling this far above what is in use.
    pub(crate) fn set_ceiling(&self, state: &mut BfcState<U::Token>, above: u64) {
        state.ceiling = state.counters.in_use + above;
        self.over.store(false, Ordering::Relaxed);
    }

    /// Makes a withdrawn chunk free, or pending when work of it is left.
    #[inline]
    pub(crate) fn withdrawn(&self, state: &mut BfcState<U::Token>, id: ChunkId) {
        if state.pending.is_busy(id) {
            state.pending.withdraw(&mut state.heap.chunks, id);
        } else {
            state.release(id);
        }
    }

    /// Asks for the work on pending chunks and frees those whose work has finished; says how many
    /// bytes.
    pub(crate) fn settle(&self) -> u64 {
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
                state.release(id);
            }
            self.wake(guard);
            drop(finished);
        }
    }

    /// Waits until memory may have become free since `seen`, or until the deadline; says whether it
    /// may.
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
            state = self
                .freed
                .wait_timeout(state, nap)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            state.waiters -= 1;
            if ask_again && state.generation == seen.generation {
                drop(state);
                self.settle();
                state = self.state();
            }
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

#[inline]
pub(crate) fn placed<T: Clone>(heap: &Heap<T>, handed: Handed) -> Placed<T> {
    let Handed {
        address,
        bytes,
        asked,
        number,
        ..
    } = handed;
    Placed {
        address,
        bytes,
        asked,
        number,
        token: heap.token(handed),
    }
}

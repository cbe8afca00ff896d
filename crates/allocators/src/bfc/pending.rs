//! Chunks that work on streams may still touch.
//!
//! Work is noted for a chunk, in use or given back, and forgotten when it is seen to have finished.
//! A chunk that was given back is *pending* while work of it is left. Streams finish their work in
//! order, so each has a queue of its own; work of no stream stands alone.

// Tests: `crates/allocators/tests/bfc_waiting.rs`, `crates/allocators/tests/loom_waiting.rs`.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex};

use gpu_api::StreamIdentity;
use gpu_api::lock::Acquire;

use super::chunk::{ChunkId, Chunks, Standing};
use super::free_chunk::FreeChunk;
use super::heap::{Fit, Heap};
use super::index::Index;

/// What stands for the work on a chunk that was given back.
pub trait Completion: Send + Sync + 'static {
    /// Says whether the work has finished; once `true`, always `true`. Called with no lock held.
    fn is_done(&self) -> bool;
}

impl<F: Fn() -> bool + Send + Sync + 'static> Completion for F {
    fn is_done(&self) -> bool {
        self()
    }
}

/// Work that touches an allocation.
///
/// # Examples
///
/// ```
/// use allocators::Work;
/// use gpu_api::StreamIdentity;
///
/// let work = Work::on(StreamIdentity(7), || true);
/// assert!(work.is_done());
/// ```
#[derive(Clone)]
pub struct Work {
    stream: Option<StreamIdentity>,
    done: Arc<dyn Completion>,
}

impl Work {
    /// Stands for what was queued on a stream so far. The stream itself may use the bytes again at
    /// once, in its order ([`Request::on`](crate::Request::on)).
    pub fn on(stream: StreamIdentity, done: impl Completion) -> Work {
        Work {
            stream: Some(stream),
            done: Arc::new(done),
        }
    }

    /// Stands for work of any kind: nobody gets the bytes before it is done.
    pub fn alone(done: impl Completion) -> Work {
        Work {
            stream: None,
            done: Arc::new(done),
        }
    }

    /// Stands for all of this work and for what is done then, once and before anybody gets the
    /// bytes.
    pub(crate) fn and_then(work: Vec<Work>, then: impl FnOnce() + Send + 'static) -> Work {
        let then: Mutex<Option<Box<dyn FnOnce() + Send>>> = Mutex::new(Some(Box::new(then)));
        Work::alone(move || {
            if !work.iter().all(Work::is_done) {
                return false;
            }
            // The lock is held while it is done: other threads that ask meanwhile must wait for it.
            let mut then = then.acquire();
            if let Some(then) = then.take() {
                then();
            }
            true
        })
    }

    /// Says whether it has finished.
    pub fn is_done(&self) -> bool {
        self.done.is_done()
    }

    /// Returns the stream that it was queued on, if it was.
    pub fn stream(&self) -> Option<StreamIdentity> {
        self.stream
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work")
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}

/// The stream or host that work is ordered by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Order {
    Stream(StreamIdentity),
    /// Nobody's: the number is its own.
    Alone(u64),
}

/// One stream's work.
#[derive(Default)]
struct Lane {
    /// In the order in which it was queued, which is the order in which a stream finishes.
    queue: VecDeque<Queued>,
    /// The pending chunks that no other work is left of: the stream may use them again at once.
    index: Index,
}

struct Queued {
    /// Rises with all work.
    sequence: u64,
    chunk: ChunkId,
    done: Arc<dyn Completion>,
}

/// A chunk with work that is not known to have finished.
#[derive(Default)]
struct Busy {
    /// One for each piece of work.
    left: Vec<Order>,
    /// Whether it was given back.
    pending: bool,
}

impl Busy {
    /// Returns the stream whose order covers all that is left.
    fn only_stream(&self) -> Option<Order> {
        let first = *self.left.first()?;
        (matches!(first, Order::Stream(_)) && self.left.iter().all(|&order| order == first))
            .then_some(first)
    }
}

/// How far each stream had come when it was asked.
pub(crate) type Passed = Vec<(Order, u64)>;

/// What to ask of each stream, in its order.
pub(crate) type Questions = Vec<(Order, Vec<Question>)>;

/// Whether work has finished, and its place in the order.
type Question = (u64, Arc<dyn Completion>);

/// What stood for work that has finished.
pub(crate) type Finished = Vec<Arc<dyn Completion>>;

/// The most work of one stream that is asked about at a time: the lock is held while the list is
/// made. Whenever that much more waits, it is asked about although there is room: what stands for
/// work, an event of the driver's, is not kept for ever when nobody runs out of memory.
const QUESTIONS: usize = 64;

/// All work that is not known to have finished.
#[derive(Default)]
pub(crate) struct Pending {
    lanes: HashMap<Order, Lane>,
    busy: HashMap<ChunkId, Busy>,
    sequence: u64,
    bytes: u64,
}

impl Pending {
    /// Notes work on a chunk; says whether it is time to ask.
    #[must_use]
    pub(crate) fn add(&mut self, chunk: ChunkId, work: Work) -> bool {
        self.sequence += 1;
        let order = work
            .stream
            .map_or(Order::Alone(self.sequence), Order::Stream);
        self.busy.entry(chunk).or_default().left.push(order);
        let lane = self.lanes.entry(order).or_default();
        lane.queue.push_back(Queued {
            sequence: self.sequence,
            chunk,
            done: work.done,
        });
        let waiting = if work.stream.is_some() {
            lane.queue.len()
        } else {
            self.lanes.len()
        };
        waiting.is_multiple_of(QUESTIONS)
    }

    /// Says whether work on a chunk is left.
    #[inline]
    pub(crate) fn is_busy(&self, chunk: ChunkId) -> bool {
        !self.busy.is_empty() && self.busy.contains_key(&chunk)
    }

    /// Keeps a withdrawn chunk that is busy until its work has finished.
    pub(crate) fn withdraw(&mut self, chunks: &mut Chunks, id: ChunkId) {
        let Some(busy) = self.busy.get_mut(&id) else {
            return;
        };
        busy.pending = true;
        let chunk = &mut chunks[id];
        chunk.set_standing(Standing::Pending);
        self.bytes += chunk.bytes();
        if let Some(lane) = busy
            .only_stream()
            .and_then(|order| self.lanes.get_mut(&order))
        {
            lane.index.insert(FreeChunk::of(id, chunk));
        }
    }

    /// Finds a chunk that nothing but the stream's own work is left of and that need not be cut.
    /// The work stays noted: the next free of the chunk may not know of it.
    pub(crate) fn reuse<T>(
        &mut self,
        heap: &Heap<T>,
        stream: StreamIdentity,
        fit: Fit,
    ) -> Option<ChunkId> {
        let lane = self.lanes.get_mut(&Order::Stream(stream))?;
        let (cursor, entry) = lane.index.best(fit.units())?;
        if !heap.fits_whole(entry, fit) {
            return None;
        }
        lane.index.remove_at(cursor);
        let id = entry.id();
        self.bytes -= heap.chunks[id].bytes();
        if let Some(busy) = self.busy.get_mut(&id) {
            busy.pending = false;
        }
        Some(id)
    }

    /// Lists what to ask, with no lock held.
    pub(crate) fn questions(&self) -> Questions {
        let ask = |lane: &Lane| {
            lane.queue
                .iter()
                .take(QUESTIONS)
                .map(|work| (work.sequence, work.done.clone()))
                .collect()
        };
        self.lanes
            .iter()
            .map(|(&order, lane)| (order, ask(lane)))
            .collect()
    }

    /// Forgets work that has finished, and takes out the pending chunks that none is left of. What
    /// stood for the work comes with them, to be dropped with no lock held: it is the caller's, and
    /// its drop might call back.
    pub(crate) fn take_passed(
        &mut self,
        chunks: &Chunks,
        passed: &Passed,
    ) -> (Vec<ChunkId>, Finished) {
        let mut ready = Vec::new();
        let mut finished = Vec::new();
        for &(order, sequence) in passed {
            let Some(lane) = self.lanes.get_mut(&order) else {
                continue;
            };
            let mut ended = Vec::new();
            let is_passed = |work: &Queued| work.sequence <= sequence;
            while lane.queue.front().is_some_and(is_passed)
                && let Some(work) = lane.queue.pop_front()
            {
                ended.push(work.chunk);
                finished.push(work.done);
            }
            for chunk in ended {
                ready.extend(self.end(chunks, chunk, order));
            }
            if self
                .lanes
                .get(&order)
                .is_some_and(|lane| lane.queue.is_empty())
            {
                self.lanes.remove(&order);
            }
        }
        (ready, finished)
    }

    /// Forgets one piece of work on a chunk; returns the chunk if it was pending and this was the
    /// last.
    fn end(&mut self, chunks: &Chunks, id: ChunkId, order: Order) -> Option<ChunkId> {
        let busy = self.busy.get_mut(&id)?;
        let before = busy.only_stream();
        let at = busy.left.iter().position(|&other| other == order)?;
        busy.left.swap_remove(at);
        let (pending, after, is_last) = (busy.pending, busy.only_stream(), busy.left.is_empty());
        if is_last {
            self.busy.remove(&id);
        }
        if !pending {
            return None;
        }
        let entry = FreeChunk::of(id, &chunks[id]);
        if before != after {
            if let Some(lane) = before.and_then(|order| self.lanes.get_mut(&order)) {
                lane.index.remove(entry);
            }
            if let Some(lane) = after.and_then(|order| self.lanes.get_mut(&order)) {
                lane.index.insert(entry);
            }
        }
        if is_last {
            self.bytes -= chunks[id].bytes();
        }
        is_last.then_some(id)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Returns the bytes of pending chunks.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Asks each stream how far it has come, and stops at the first work that is not done: the rest
/// comes after it.
pub(crate) fn ask(questions: Questions) -> Passed {
    let answer = |(order, work): (Order, Vec<Question>)| {
        let (sequence, _) = work
            .into_iter()
            .take_while(|(_, done)| done.is_done())
            .last()?;
        Some((order, sequence))
    };
    questions.into_iter().filter_map(answer).collect()
}

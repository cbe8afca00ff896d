//! Chunks that were given back while work that was queued before may still touch them.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use gpu_api::StreamIdentity;

use super::chunk::{ChunkId, Chunks, Standing};
use super::entry::Entry;
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

/// One stream's chunks.
#[derive(Default)]
struct Lane {
    /// In the order in which they were given back, which is the order in which a stream finishes its work.
    queue: VecDeque<Waiting>,
    /// Those that the stream may use again at once, since its own work is ordered.
    index: Index,
}

struct Waiting {
    /// Rises with every chunk given back.
    sequence: u64,
    chunk: ChunkId,
    /// The allocation that it was: the chunk has a later one when its stream took it again.
    number: u64,
    done: Arc<dyn Completion>,
}

/// How far each stream had come when it was asked.
pub(crate) type Passed = Vec<(StreamIdentity, u64)>;

/// What to ask of each stream, in its order.
pub(crate) type Questions = Vec<(StreamIdentity, Vec<Question>)>;

/// Whether the work on a chunk has finished, and the chunk's place in the order.
type Question = (u64, Arc<dyn Completion>);

/// What stood for work that has finished.
pub(crate) type Finished = Vec<Arc<dyn Completion>>;

/// The most chunks of one stream that are asked about at a time: the lock is held while the list is made. Whenever so many
/// more wait, they are asked about although there is room: what stands for work, an event of the driver's, is not kept
/// for ever when nobody runs out of memory.
const QUESTIONS: usize = 64;

/// Every chunk that is pending.
#[derive(Default)]
pub(crate) struct Pending {
    lanes: HashMap<StreamIdentity, Lane>,
    sequence: u64,
    bytes: u64,
}

impl Pending {
    /// Notes a withdrawn chunk until `done` says that it may be used again; says whether it is time to ask.
    #[must_use]
    pub(crate) fn push(
        &mut self,
        chunks: &mut Chunks,
        id: ChunkId,
        stream: StreamIdentity,
        done: Arc<dyn Completion>,
    ) -> bool {
        self.sequence += 1;
        let chunk = &mut chunks[id];
        chunk.set_standing(Standing::Pending);
        self.bytes += chunk.bytes();
        let lane = self.lanes.entry(stream).or_default();
        lane.index.insert(Entry::of(id, chunk));
        lane.queue.push_back(Waiting { sequence: self.sequence, chunk: id, number: chunk.number(), done });
        lane.queue.len().is_multiple_of(QUESTIONS)
    }

    /// Finds a chunk that the stream itself gave back and that need not be cut.
    pub(crate) fn reuse<T>(&mut self, heap: &Heap<T>, stream: StreamIdentity, fit: Fit) -> Option<ChunkId> {
        let lane = self.lanes.get_mut(&stream)?;
        let (cursor, entry) = lane.index.best(fit.units())?;
        if !heap.fits_whole(entry, fit) {
            return None;
        }
        lane.index.remove_at(cursor);
        self.bytes -= heap.chunks[entry.id()].bytes();
        Some(entry.id())
    }

    /// Lists what to ask, with no lock held.
    pub(crate) fn questions(&self) -> Questions {
        let ask = |lane: &Lane| {
            lane.queue.iter().take(QUESTIONS).map(|waiting| (waiting.sequence, waiting.done.clone())).collect()
        };
        self.lanes.iter().map(|(&stream, lane)| (stream, ask(lane))).collect()
    }

    /// Takes out the chunks whose work has finished. What stood for the work comes with them, to be dropped with no lock
    /// held: it is the caller's, and its drop might call back.
    pub(crate) fn take_passed(&mut self, chunks: &Chunks, passed: &Passed) -> (Vec<ChunkId>, Finished) {
        let mut ready = Vec::new();
        let mut finished = Vec::new();
        for &(stream, sequence) in passed {
            let Some(lane) = self.lanes.get_mut(&stream) else { continue };
            let is_passed = |waiting: &Waiting| waiting.sequence <= sequence;
            while lane.queue.front().is_some_and(is_passed)
                && let Some(waiting) = lane.queue.pop_front()
            {
                let chunk = &chunks[waiting.chunk];
                if chunk.standing() == Standing::Pending && chunk.number() == waiting.number {
                    lane.index.remove(Entry::of(waiting.chunk, chunk));
                    self.bytes -= chunk.bytes();
                    ready.push(waiting.chunk);
                }
                finished.push(waiting.done);
            }
            if lane.queue.is_empty() {
                self.lanes.remove(&stream);
            }
        }
        (ready, finished)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Asks each stream how far it has come, and stops at the first work that is not done: the rest comes after it.
pub(crate) fn ask(questions: Questions) -> Passed {
    let answer = |(stream, waiting): (StreamIdentity, Vec<Question>)| {
        let (sequence, _) = waiting.into_iter().take_while(|(_, done)| done.is_done()).last()?;
        Some((stream, sequence))
    };
    questions.into_iter().filter_map(answer).collect()
}

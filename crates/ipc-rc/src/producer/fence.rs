//! The producer's fences: values that its streams write into the participants' timeline words.
//!
//! One [`Line`] for each stream that something was shared after. Values and their enqueueing are ordered by the
//! line's own lock; a line's word at one participant is a [`Cell`] with a lock of its own, which nobody else takes
//! but a thread that looks for a word to use again. Lock order: line, then a participant's cells, then one cell.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use gpu_api::{Error, Gpu, ParticipantId, Result, StreamIdentity, StreamOp, WordPtr};

use crate::counter_file::{CounterFile, TIMELINES, timeline_word};
use crate::descriptor::Fence;
use crate::stream::Stream;
use crate::timeline::{self, LIMIT, Timeline};

/// One timeline word of one participant.
#[derive(Debug)]
struct Cell {
    index: u32,
    owner: StreamIdentity,
    /// The last value that was queued for it.
    last: u64,
}

/// The timeline words of one participant.
#[derive(Debug)]
pub struct Words {
    file: Arc<CounterFile>,
    /// Where streams see the file; `None` on a device without stream words.
    registered: Option<WordPtr>,
    cells: Mutex<Vec<Arc<Mutex<Cell>>>>,
}

impl Words {
    /// Takes the words of a participant's first file.
    pub fn new(file: Arc<CounterFile>, registered: Option<WordPtr>) -> Words {
        Words { file, registered, cells: Mutex::new(Vec::new()) }
    }

    /// Finds a word for a stream: an unused one, or one whose last value was reached.
    fn cell_for(&self, owner: StreamIdentity) -> Result<Arc<Mutex<Cell>>> {
        let mut cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        let index = cells.len() as u32;
        if index < TIMELINES {
            let cell = Arc::new(Mutex::new(Cell { index, owner, last: 0 }));
            cells.push(cell.clone());
            return Ok(cell);
        }
        for cell in cells.iter() {
            // A cell that its stream is using at this moment is not free.
            let Ok(mut free) = cell.try_lock() else { continue };
            if self.file.timeline(free.index).look(free.last) == timeline::Fence::Reached {
                free.owner = owner;
                drop(free);
                return Ok(cell.clone());
            }
        }
        Err(Error::Exhausted {
            what: "timeline words of a participant",
            limit: u64::from(TIMELINES),
            remedy: "share after fewer streams at once, or after synchronising them (After::Done)",
        })
    }

    /// Says whether a stream's value is still awaited.
    pub fn any_pending(&self) -> bool {
        let cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        cells.iter().any(|cell| {
            let cell = cell.lock().unwrap_or_else(PoisonError::into_inner);
            cell.last > 0 && self.file.timeline(cell.index).look(cell.last) == timeline::Fence::Pending
        })
    }

    /// Completes every wait for a value that will never come, because the producer's context is broken.
    pub fn poison(&self) {
        let cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        for cell in cells.iter() {
            let cell = cell.lock().unwrap_or_else(PoisonError::into_inner);
            let word = self.file.timeline(cell.index);
            if cell.last > 0 && word.look(cell.last) == timeline::Fence::Pending {
                word.poison();
            }
        }
    }
}

#[derive(Debug)]
struct LineState {
    next: u64,
    cells: HashMap<ParticipantId, Arc<Mutex<Cell>>>,
}

/// One producing stream.
#[derive(Debug)]
struct Line {
    state: Mutex<LineState>,
}

/// The producing streams of a session.
#[derive(Debug, Default)]
pub struct Fences {
    lines: ArcSwap<HashMap<StreamIdentity, Arc<Line>>>,
}

impl Fences {
    fn line(&self, stream: StreamIdentity) -> Arc<Line> {
        if let Some(line) = self.lines.load().get(&stream) {
            return line.clone();
        }
        let fresh = Arc::new(Line { state: Mutex::new(LineState { next: 1, cells: HashMap::new() }) });
        self.lines.rcu(|lines| {
            let mut lines = HashMap::clone(lines);
            lines.entry(stream).or_insert_with(|| fresh.clone());
            lines
        });
        self.lines.load().get(&stream).cloned().unwrap_or(fresh)
    }

    /// Forgets a participant's words.
    pub fn forget(&self, participant: ParticipantId) {
        for line in self.lines.load().values() {
            line.state.lock().unwrap_or_else(PoisonError::into_inner).cells.remove(&participant);
        }
    }

    /// Queues the next value on `stream`, to be written into the participant's word once all work queued so far has
    /// finished.
    ///
    /// # Errors
    ///
    /// What the driver gives: then nothing was queued and no descriptor may name a value.
    pub fn queue(&self, gpu: &Gpu, stream: &Stream, participant: ParticipantId, words: &Words) -> Result<Fence> {
        stream.refuse_capture("share before the capture begins or after it ended")?;
        let line = self.line(stream.identity());
        let mut state = line.state.lock().unwrap_or_else(PoisonError::into_inner);
        let cell = match state.cells.get(&participant) {
            Some(cell) => cell.clone(),
            None => words.cell_for(stream.identity())?,
        };
        let mut locked = cell.lock().unwrap_or_else(PoisonError::into_inner);
        if locked.owner != stream.identity() {
            // Another stream took the word over while this one had nothing under way.
            drop(locked);
            state.cells.remove(&participant);
            drop(state);
            return self.queue(gpu, stream, participant, words);
        }
        let value = state.next.max(locked.last + 1);
        if value >= LIMIT {
            return Err(Error::Exhausted {
                what: "values of a timeline word",
                limit: LIMIT,
                remedy: "use a new stream",
            });
        }
        let index = locked.index;
        enqueue(gpu, stream, words, index, value)?;
        locked.last = value;
        drop(locked);
        state.next = value + 1;
        state.cells.entry(participant).or_insert(cell);
        Ok(Fence { file: 0, word: index, value })
    }
}

fn enqueue(gpu: &Gpu, stream: &Stream, words: &Words, index: u32, value: u64) -> Result<()> {
    match words.registered {
        Some(base) => {
            let word = base.word(timeline_word(index));
            // SAFETY: `stream_batch` asks for
            // - a live stream: `stream` keeps it;
            // - words in a registration that outlives the operation: a participant's file is unregistered only after
            //   its burial, when no wait of its own is left, and the session keeps it until then.
            unsafe { gpu.backend().stream_batch(stream.raw(), &[StreamOp::Write { word, value }]) }
        }
        None => {
            let file = words.file.clone();
            let reach = Box::new(move || {
                let word: &Timeline<AtomicU64> = file.timeline(index);
                word.reach(value);
            });
            // SAFETY: `host_function` asks for a live stream: `stream` keeps it.
            unsafe { gpu.backend().host_function(stream.raw(), reach) }
        }
    }
}

//! The producer's fences: values that its streams write into the participants' timeline words.
//!
//! One [`Line`] for each stream that something was shared after. Values and their enqueueing are ordered by the
//! line's own lock; a line's word at one participant is a [`Cell`] with a lock of its own, which nobody else takes
//! but a thread that looks for a word to use again. Lock order: line, then a participant's cells, then one cell.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::slice;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use gpu_api::{Error, Gpu, MAX_BATCH, ParticipantId, Result, StreamIdentity, StreamOp, WordPtr};

use crate::producer::peer::Peer;
use crate::stream::{Stream, advise};
use channel::shared::counter_file::{CounterFile, TIMELINES, timeline_word};
use channel::shared::timeline::{self, LIMIT, Timeline};
use channel::wire::descriptor::Fence;

/// What to do instead of a share under capture.
pub(crate) const UNCAPTURED: &str = "share before the capture begins or after it ended";

/// One timeline word of one participant.
#[derive(Debug)]
struct Cell {
    index: u32,
    /// The stream that writes it; none when the participant has gone.
    owner: Option<StreamIdentity>,
    /// The last value that was queued for it.
    last: u64,
}

/// The timeline words of one participant.
#[derive(Debug)]
pub struct Words {
    file: Arc<CounterFile>,
    /// Where streams see the file; `None` on a device without stream words.
    registered: Option<WordPtr>,
    state: Mutex<Taken>,
}

/// The words of a participant that were ever taken.
#[derive(Debug, Default)]
struct Taken {
    cells: Vec<Arc<Mutex<Cell>>>,
    /// No more is queued: the participant has gone.
    is_closed: bool,
}

impl Words {
    /// Takes the words of a participant's first file.
    pub fn new(file: Arc<CounterFile>, registered: Option<WordPtr>) -> Words {
        Words { file, registered, state: Mutex::default() }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses every later value: the participant has gone, and its file goes when none is pending. Whoever found the
    /// participant before may come to its words only now.
    pub fn close(&self) {
        let mut taken = self.taken();
        taken.is_closed = true;
        for cell in &taken.cells {
            // Waits for who is queueing at this moment; its value is pending then.
            cell.lock().unwrap_or_else(PoisonError::into_inner).owner = None;
        }
    }

    /// Finds a word for a stream: an unused one, or one whose last value was reached.
    fn cell_for(&self, owner: StreamIdentity, participant: ParticipantId) -> Result<Arc<Mutex<Cell>>> {
        let mut taken = self.taken();
        if taken.is_closed {
            return Err(Error::ParticipantGone { participant });
        }
        let owner = Some(owner);
        let index = taken.cells.len() as u32;
        if index < TIMELINES {
            let cell = Arc::new(Mutex::new(Cell { index, owner, last: 0 }));
            taken.cells.push(cell.clone());
            return Ok(cell);
        }
        for cell in &taken.cells {
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
        self.taken().cells.iter().any(|cell| {
            let cell = cell.lock().unwrap_or_else(PoisonError::into_inner);
            cell.last > 0 && self.file.timeline(cell.index).look(cell.last) == timeline::Fence::Pending
        })
    }

    /// Completes every wait for a value that will never come, because the producer's context is broken.
    pub fn poison(&self) {
        for cell in &self.taken().cells {
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
    /// Above every value that was queued.
    next: u64,
    cells: BTreeMap<ParticipantId, Arc<Mutex<Cell>>>,
}

impl Default for LineState {
    fn default() -> LineState {
        LineState { next: 1, cells: BTreeMap::new() }
    }
}

/// One producing stream.
#[derive(Debug, Default)]
struct Line {
    state: Mutex<LineState>,
}

/// The producing streams of a session.
#[derive(Debug, Default)]
pub struct Fences {
    lines: ArcSwap<BTreeMap<StreamIdentity, Arc<Line>>>,
}

impl Fences {
    /// Calls `run` with a stream's line, locked.
    fn with_line<T>(&self, stream: StreamIdentity, run: impl FnOnce(&mut LineState) -> T) -> T {
        loop {
            if let Some(line) = self.lines.load().get(&stream) {
                return run(&mut line.state.lock().unwrap_or_else(PoisonError::into_inner));
            }
            self.lines.rcu(|lines| {
                let mut lines = BTreeMap::clone(lines);
                lines.entry(stream).or_default();
                lines
            });
        }
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
        stream.require(gpu)?;
        self.with_line(stream.identity(), |line| {
            loop {
                let (owner, next) = (stream.identity(), line.next);
                let mut cell = line.cell(owner, participant, words)?.lock().unwrap_or_else(PoisonError::into_inner);
                if cell.owner == Some(owner) {
                    let value = value_after(next, cell.last)?;
                    enqueue(gpu, stream, &[(words, cell.index, value)])?;
                    cell.last = value;
                    let word = cell.index;
                    drop(cell);
                    line.next = value + 1;
                    return Ok(Fence { file: 0, word, value });
                }
                // Another stream has taken the word over: this one had nothing under way. Or the participant has gone.
                drop(cell);
                line.cells.remove(&participant);
            }
        })
    }

    /// Queues one value for several participants, in as few calls of the driver as it takes, and notes each's fence.
    ///
    /// # Errors
    ///
    /// As [`queue`](Fences::queue). Values that were queued before the error are reached by nobody's descriptor.
    pub fn queue_many(&self, gpu: &Gpu, stream: &Stream, addressees: &mut [(&Arc<Peer>, Option<Fence>)]) -> Result<()> {
        stream.require(gpu)?;
        self.with_line(stream.identity(), |line| {
            let owner = stream.identity();
            let mut cells = Vec::with_capacity(addressees.len());
            let mut cells: Vec<_> = loop {
                cells.clear();
                for (peer, _) in addressees.iter() {
                    cells.push(line.cell(owner, peer.id, &peer.words)?.clone());
                }
                // Each is held until its value is queued. They are all this line's; who looks for a word to take over does
                // not wait for them.
                let locked: Vec<_> =
                    cells.iter().map(|cell| cell.lock().unwrap_or_else(PoisonError::into_inner)).collect();
                if locked.iter().all(|cell| cell.owner == Some(owner)) {
                    break locked;
                }
                for ((peer, _), cell) in addressees.iter().zip(&locked) {
                    if cell.owner != Some(owner) {
                        line.cells.remove(&peer.id);
                    }
                }
            };
            let last = cells.iter().map(|cell| cell.last).max().unwrap_or(0);
            let value = value_after(line.next, last)?;
            line.next = value + 1;
            for (cells, addressees) in cells.chunks_mut(MAX_BATCH).zip(addressees.chunks_mut(MAX_BATCH)) {
                let writes: Vec<_> = cells
                    .iter()
                    .zip(addressees.iter())
                    .map(|(cell, (peer, _))| (&peer.words, cell.index, value))
                    .collect();
                enqueue(gpu, stream, &writes)?;
                for (cell, (_, fence)) in cells.iter_mut().zip(addressees) {
                    cell.last = value;
                    *fence = Some(Fence { file: 0, word: cell.index, value });
                }
            }
            Ok(())
        })
    }
}

impl LineState {
    /// Finds the line's word at a participant, or takes one. Another stream may have taken it over since.
    fn cell(&mut self, owner: StreamIdentity, participant: ParticipantId, words: &Words) -> Result<&Arc<Mutex<Cell>>> {
        match self.cells.entry(participant) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(place) => Ok(place.insert(words.cell_for(owner, participant)?)),
        }
    }
}

/// Returns the value that follows all that were queued on a line or for a word.
fn value_after(next: u64, last: u64) -> Result<u64> {
    let value = next.max(last + 1);
    if value < LIMIT {
        return Ok(value);
    }
    Err(Error::Exhausted { what: "values of a timeline word", limit: LIMIT, remedy: "use a new stream" })
}

fn enqueue(gpu: &Gpu, stream: &Stream, writes: &[(&Words, u32, u64)]) -> Result<()> {
    debug_assert!(writes.len() <= MAX_BATCH);
    let operation = |&(words, index, value): &(&Words, u32, u64)| {
        Some(StreamOp::Write { word: words.registered?.word(timeline_word(index)), value })
    };
    // Most often it is one, which takes no memory.
    let one = match writes {
        [write] => operation(write),
        _ => None,
    };
    let many: Option<Vec<_>> = if one.is_none() { writes.iter().map(operation).collect() } else { None };
    if let Some(ops) = one.as_ref().map(slice::from_ref).or(many.as_deref()) {
        // SAFETY: `batch_uncaptured` asks for
        // - a live stream: `stream` keeps it;
        // - words in a registration that outlives the operation: a participant's file is unregistered only after its
        //   burial, when no wait of its own is left, and the session keeps it until then.
        return unsafe { gpu.backend().batch_uncaptured(stream.raw(), ops) }.map_err(|error| advise(error, UNCAPTURED));
    }
    stream.refuse_capture(UNCAPTURED)?;
    let words: Vec<_> = writes.iter().map(|(words, index, value)| (words.file.clone(), *index, *value)).collect();
    let reach = Box::new(move || {
        for (file, index, value) in &words {
            let word: &Timeline<AtomicU64> = file.timeline(*index);
            word.reach(*value);
        }
    });
    // SAFETY: `host_function` asks for a live stream, which `stream` keeps, that nobody begins to capture:
    // `Stream::borrow` asks for that.
    unsafe { gpu.backend().host_function(stream.raw(), reach) }
}

#[cfg(test)]
mod tests {
    use backend_host::{HostBackend, HostConfig};
    use gpu_api::DeviceId;

    use super::*;
    use channel::shared::counter_file::FIRST_SLOTS;

    #[test]
    fn no_value_is_queued_for_who_has_gone() {
        let backend = HostBackend::new(HostConfig::default()).expect("it opens");
        let gpu = Gpu::new(backend, DeviceId(0)).expect("there is a device");
        let (old, fresh) = (Stream::create(&gpu).expect("a stream"), Stream::create(&gpu).expect("a stream"));
        let file = Arc::new(CounterFile::create(FIRST_SLOTS).expect("a memfd"));
        let (words, fences, id) = (Words::new(file, None), Fences::default(), ParticipantId(1));
        fences.queue(&gpu, &old, id, &words).expect("queued");
        old.synchronize().expect("it runs");
        words.close();
        // Who found the participant before it went, and comes to its words after.
        for stream in [&old, &fresh] {
            let refused = fences.queue(&gpu, stream, id, &words);
            assert!(matches!(refused, Err(Error::ParticipantGone { participant }) if participant == id), "{refused:?}");
        }
        assert!(!words.any_pending());
    }
}

//! The producer's fences: values that its streams write into the participants' timeline words.
//!
//! One [`Line`] for each stream that something was shared after. Values and their enqueueing are
//! ordered by the line's own lock, which is held across a driver's call; so the session's thread
//! only ever tries it. Lock order: line, then a participant's cells, then one cell. When a
//! participant's words may go: [`progress`](super::progress).

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::slice;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use gpu_api::lock::Acquire;
use gpu_api::{Error, Gpu, MAX_BATCH, ParticipantId, Result, StreamOp};

use crate::gpu_event::GpuEvent;
use crate::producer::fences::progress::{Debt, Progress};
use crate::producer::fences::words::{Cell, Words};
use crate::stream::{Stream, StreamKey, advise};
use transport::shared::counter_file::timeline_word;
use transport::shared::timeline::{LIMIT, Timeline};
use transport::wire::descriptor::Fence;

/// What to do instead of a share under capture.
pub(crate) const UNCAPTURED: &str = "share before the capture begins or after it ended";

/// Lines below which none is given up.
const FEW_LINES: usize = 64;

/// A participant that waits for a value, and its fence once it is queued.
#[derive(Debug)]
pub(crate) struct Addressee<'a> {
    pub id: ParticipantId,
    pub words: &'a Words,
    pub fence: Option<Fence>,
}

#[derive(Debug)]
struct LineState {
    /// Above every value that was queued.
    next: u64,
    cells: BTreeMap<ParticipantId, Arc<Mutex<Cell>>>,
    /// Events on the stream, and the value that each proves.
    proofs: Vec<(GpuEvent, u64)>,
    /// Out of the table: its stream gets another.
    is_retired: bool,
}

/// One producing stream.
#[derive(Debug)]
struct Line {
    /// Its cells have this and not the line, which has them.
    progress: Arc<Progress>,
    state: Mutex<LineState>,
}

impl Line {
    fn new() -> Line {
        let state = LineState {
            next: 1,
            cells: BTreeMap::new(),
            proofs: Vec::new(),
            is_retired: false,
        };
        Line {
            progress: Arc::default(),
            state: Mutex::new(state),
        }
    }

    /// Notes that a value is queued, and records an event behind it if somebody waits for that.
    fn note(&self, stream: &Stream, state: &mut LineState, value: u64) {
        state.next = value + 1;
        self.progress.queue(value);
        if self.progress.is_proof_wanted() {
            let event =
                GpuEvent::new(stream.gpu()).and_then(|event| event.record(stream).map(|()| event));
            // Without an event the wish stays for the next share.
            if let Ok(event) = event {
                self.progress.note_proof();
                state.proofs.push((event, value));
            }
        }
    }
}

/// The producing streams of a session.
#[derive(Debug, Default)]
pub struct Fences {
    lines: ArcSwap<BTreeMap<StreamKey, Arc<Line>>>,
    /// How many lines there are when those that owe nothing are given up.
    many: AtomicUsize,
}

impl Fences {
    /// Calls `run` with a stream's line, locked.
    fn with_line<T>(&self, stream: StreamKey, run: impl FnOnce(&Line, &mut LineState) -> T) -> T {
        loop {
            if let Some(line) = self.lines.load().get(&stream) {
                let mut state = line.state.acquire();
                if !state.is_retired {
                    return run(line, &mut state);
                }
            }
            self.add_line(stream);
        }
    }

    #[cold]
    fn add_line(&self, stream: StreamKey) {
        let fresh = Arc::new(Line::new());
        self.lines.rcu(|lines| {
            let mut lines = BTreeMap::clone(lines);
            let line = lines.entry(stream).or_insert_with(|| fresh.clone());
            if line
                .state
                .try_acquire()
                .is_some_and(|state| state.is_retired)
            {
                *line = fresh.clone();
            }
            lines
        });
        if self.lines.load().len() >= self.many.load(Ordering::Relaxed).max(FEW_LINES) {
            self.give_up_lines();
        }
    }

    /// Gives up the lines of streams that owe nothing: of one that comes back another is made.
    fn give_up_lines(&self) {
        for line in self
            .lines
            .load()
            .values()
            .filter(|line| !line.progress.owes())
        {
            let Some(mut state) = line.state.try_acquire() else {
                continue;
            };
            // Again, under the lock that values are queued under.
            if !line.progress.owes() {
                state.is_retired = true;
                state.cells.clear();
            }
        }
        self.lines.rcu(|lines| {
            let is_kept = |line: &Line| {
                line.state
                    .try_acquire()
                    .is_none_or(|state| !state.is_retired)
            };
            let kept = lines.iter().filter(|(_, line)| is_kept(line));
            kept.map(|(key, line)| (*key, line.clone()))
                .collect::<BTreeMap<_, _>>()
        });
        // As many again before the next look, so that a new stream costs no more than a few lines
        // each.
        self.many
            .store(self.lines.load().len() * 2, Ordering::Relaxed);
    }

    /// Returns what a stream owes at this moment; the caller records an event on it after that.
    pub(crate) fn debt(&self, stream: &Stream) -> Option<Debt> {
        self.lines.load().get(&stream.key())?.progress.debt()
    }

    /// Looks at the events that shares have recorded for participants that have gone. Never waits.
    pub fn look_at_proofs(&self) {
        for line in self.lines.load().values() {
            let Some(mut state) = line.state.try_acquire() else {
                continue;
            };
            // An error means that nobody knows: it stays, and so does what waits for it.
            while state
                .proofs
                .first()
                .is_some_and(|(event, _)| event.is_passed().unwrap_or(false))
            {
                line.progress.prove(state.proofs.remove(0).1);
            }
        }
    }

    /// Says whether events are recorded that have not passed.
    pub fn has_proofs(&self) -> bool {
        let has = |line: &Arc<Line>| {
            line.state
                .try_acquire()
                .is_none_or(|state| !state.proofs.is_empty())
        };
        self.lines.load().values().any(has)
    }

    /// Forgets a participant's words.
    pub fn forget(&self, participant: ParticipantId) {
        for line in self.lines.load().values() {
            // A share that holds the lock keeps a number that is never used again; it goes with the
            // line.
            if let Some(mut state) = line.state.try_acquire() {
                state.cells.remove(&participant);
            }
        }
    }

    /// Counts the lines.
    #[cfg(test)]
    fn count(&self) -> usize {
        self.lines.load().len()
    }

    /// Queues the next value on `stream`, to be written into the participant's word once all work
    /// queued so far has finished.
    ///
    /// # Errors
    ///
    /// The driver's error: then nothing was queued and no descriptor may name a value.
    pub fn queue(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        participant: ParticipantId,
        words: &Words,
    ) -> Result<Fence> {
        stream.require(gpu)?;
        self.with_line(stream.key(), |line, state| {
            loop {
                let next = state.next;
                let cell = state.cell(line, participant, words)?;
                let mut cell = cell.acquire();
                let open = words.check_open(participant);
                if open.is_ok() && Arc::ptr_eq(&cell.owner, &line.progress) {
                    let value = value_after(next, cell.last)?;
                    enqueue(gpu, stream, &[(words, cell.index, value)])?;
                    (cell.owed, cell.last) = (value, value);
                    let word = cell.index;
                    drop(cell);
                    line.note(stream, state, value);
                    return Ok(Fence {
                        file: 0,
                        word,
                        value,
                    });
                }
                // The participant has gone, or another stream has taken the word over: nothing of
                // this one is awaited.
                drop(cell);
                state.cells.remove(&participant);
                open?;
            }
        })
    }

    /// Queues one value for several participants, in as few calls of the driver as it takes, and
    /// notes each's fence.
    ///
    /// # Errors
    ///
    /// As [`queue`](Fences::queue). Values that were queued before the error are reached by
    /// nobody's descriptor.
    pub fn queue_many(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        addressees: &mut [Addressee<'_>],
    ) -> Result<()> {
        stream.require(gpu)?;
        self.with_line(stream.key(), |line, state| {
            let mut cells = Vec::with_capacity(addressees.len());
            let mut cells: Vec<_> = loop {
                cells.clear();
                for to in addressees.iter() {
                    cells.push(state.cell(line, to.id, to.words)?.clone());
                }
                // Each is held until its value is queued. They are all this line's; who looks for a
                // word to take over does not wait for them.
                let locked: Vec<_> = cells.iter().map(|cell| cell.acquire()).collect();
                for to in addressees.iter() {
                    if let Err(gone) = to.words.check_open(to.id) {
                        state.cells.remove(&to.id);
                        return Err(gone);
                    }
                }
                if locked
                    .iter()
                    .all(|cell| Arc::ptr_eq(&cell.owner, &line.progress))
                {
                    break locked;
                }
                for (to, cell) in addressees.iter().zip(&locked) {
                    if !Arc::ptr_eq(&cell.owner, &line.progress) {
                        state.cells.remove(&to.id);
                    }
                }
            };
            let last = cells.iter().map(|cell| cell.last).max().unwrap_or(0);
            let value = value_after(state.next, last)?;
            state.next = value + 1;
            for (cells, addressees) in cells
                .chunks_mut(MAX_BATCH)
                .zip(addressees.chunks_mut(MAX_BATCH))
            {
                let writes: Vec<_> = cells
                    .iter()
                    .zip(addressees.iter())
                    .map(|(cell, to)| (to.words, cell.index, value))
                    .collect();
                enqueue(gpu, stream, &writes)?;
                for (cell, to) in cells.iter_mut().zip(addressees) {
                    (cell.owed, cell.last) = (value, value);
                    to.fence = Some(Fence {
                        file: 0,
                        word: cell.index,
                        value,
                    });
                }
                line.note(stream, state, value);
            }
            Ok(())
        })
    }
}

/// A line's words belong to the line, which each of them has: so they would keep each other for
/// ever.
impl Drop for Fences {
    fn drop(&mut self) {
        for line in self.lines.load().values() {
            // Locked only in a forked child, by a thread that it does not have.
            if let Some(mut state) = line.state.try_acquire() {
                state.cells.clear();
            }
        }
    }
}

impl LineState {
    /// Finds the line's word at a participant, or takes one. Another stream may have taken it over
    /// since.
    fn cell(
        &mut self,
        line: &Line,
        participant: ParticipantId,
        words: &Words,
    ) -> Result<&Arc<Mutex<Cell>>> {
        match self.cells.entry(participant) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(place) => Ok(place.insert(words.cell_for(&line.progress, participant)?)),
        }
    }
}

/// Returns the value that follows all that were queued on a line or for a word.
fn value_after(next: u64, last: u64) -> Result<u64> {
    let value = next.max(last + 1);
    if value < LIMIT {
        return Ok(value);
    }
    Err(Error::exhausted(
        "values of a timeline word",
        LIMIT,
        "use a new stream",
    ))
}

fn enqueue(gpu: &Gpu, stream: &Stream, writes: &[(&Words, u32, u64)]) -> Result<()> {
    debug_assert!(writes.len() <= MAX_BATCH);
    let operation = |&(words, index, value): &(&Words, u32, u64)| {
        Some(StreamOp::Write {
            word: words.registered?.word(timeline_word(index)),
            value,
        })
    };
    // Most often it is one, which takes no memory.
    let one = match writes {
        [write] => operation(write),
        _ => None,
    };
    let many: Option<Vec<_>> = if one.is_none() {
        writes.iter().map(operation).collect()
    } else {
        None
    };
    if let Some(ops) = one.as_ref().map(slice::from_ref).or(many.as_deref()) {
        // SAFETY: `batch_uncaptured` asks for
        // - a live stream: `stream` keeps it;
        // - words in a registration that outlives the operation: a participant's file is
        //   unregistered only after its burial, when no wait of its own is left, and the session
        //   keeps it until then.
        return unsafe { gpu.backend().batch_uncaptured(stream.raw(), ops) }
            .map_err(|error| advise(error, UNCAPTURED));
    }
    stream.refuse_capture(UNCAPTURED)?;
    let words: Vec<_> = writes
        .iter()
        .map(|(words, index, value)| (words.file.clone(), *index, *value))
        .collect();
    let reach = Box::new(move || {
        for (file, index, value) in &words {
            let word: &Timeline<AtomicU64> = file.timeline(*index);
            word.reach(*value);
        }
    });
    // SAFETY: `host_function` asks for a live stream, which `stream` keeps, that nobody begins to
    // capture: `Stream::borrow` asks for that.
    unsafe { gpu.backend().host_function(stream.raw(), reach) }
}

#[cfg(test)]
mod tests {
    use backend_host::{HostBackend, HostConfig};
    use gpu_api::DeviceId;

    use super::*;
    use crate::gone::Gone;
    use transport::shared::counter_file::{CounterFile, FIRST_SLOTS, TIMELINES};

    struct Bench {
        gpu: Gpu,
        fences: Fences,
        words: Words,
        id: ParticipantId,
    }

    impl Bench {
        fn new() -> Bench {
            let backend = HostBackend::new(HostConfig::default()).expect("it opens");
            let gpu = Gpu::new(backend, DeviceId(0)).expect("there is a device");
            let file = Arc::new(CounterFile::create(FIRST_SLOTS).expect("a memfd"));
            let words = Words::new(file, None);
            Bench {
                gpu,
                fences: Fences::default(),
                words,
                id: ParticipantId(1),
            }
        }

        fn stream(&self) -> Stream {
            Stream::create(&self.gpu).expect("a stream")
        }

        fn queue(&self, stream: &Stream) -> Result<Fence> {
            self.fences.queue(&self.gpu, stream, self.id, &self.words)
        }

        /// What the drop of a block does that was shared after a stream.
        fn settle(&self, stream: &Stream) {
            let debt = self.fences.debt(stream).expect("something was queued");
            stream.synchronize().expect("it runs");
            debt.settle();
        }
    }

    #[test]
    fn no_value_is_queued_for_who_has_gone() {
        let bench = Bench::new();
        let (old, fresh) = (bench.stream(), bench.stream());
        bench.queue(&old).expect("queued");
        bench.words.close();
        // Who found the participant before it went, and comes to its words after.
        for stream in [&old, &fresh] {
            let refused = bench.queue(stream);
            let gone =
                refused.as_ref().err().and_then(Gone::of) == Some(Gone::Participant(bench.id));
            assert!(gone, "{refused:?}");
        }
        assert!(bench.words.are_owed());
        bench.settle(&old);
        assert!(!bench.words.are_owed());
    }

    #[test]
    fn a_session_that_ends_keeps_no_line() {
        let bench = Bench::new();
        bench.queue(&bench.stream()).expect("queued");
        let lines: Vec<_> = bench
            .fences
            .lines
            .load()
            .values()
            .map(Arc::downgrade)
            .collect();
        assert_eq!(lines.len(), 1);
        drop(bench);
        assert!(
            lines.iter().all(|line| line.upgrade().is_none()),
            "its words keep it, and it its words"
        );
    }

    #[test]
    fn what_the_participant_writes_settles_nothing() {
        let bench = Bench::new();
        let stream = bench.stream();
        let fence = bench.queue(&stream).expect("queued");
        stream.synchronize().expect("it runs");
        bench.words.file.timeline(fence.word).reach(1 << 60);
        assert!(
            bench.words.are_owed(),
            "the participant's word was believed"
        );
        assert!(!bench.words.are_awaited());
        bench.settle(&stream);
        assert!(!bench.words.are_owed());
    }

    #[test]
    fn a_word_that_was_taken_over_is_owed_until_its_first_stream_is_done() {
        let bench = Bench::new();
        let first = bench.stream();
        let fence = bench.queue(&first).expect("queued");
        bench.words.file.timeline(fence.word).reach(1 << 60);
        let others: Vec<Stream> = (1..TIMELINES).map(|_| bench.stream()).collect();
        for stream in &others {
            bench.queue(stream).expect("queued");
            bench.settle(stream);
        }
        // Every word is taken. The first is the only one that looks written though nothing proves
        // it, or any other.
        let last = bench.stream();
        assert_eq!(bench.queue(&last).expect("queued").word, fence.word);
        bench.settle(&last);
        assert!(
            bench.words.are_owed(),
            "the first stream's debt went with its word"
        );
        bench.settle(&first);
        assert!(!bench.words.are_owed());
    }

    #[test]
    fn the_next_share_proves_what_one_who_has_gone_waits_for() {
        let bench = Bench::new();
        let stream = bench.stream();
        bench.queue(&stream).expect("queued");
        bench.words.close();
        bench.words.want_proof();
        let other = Words::new(
            Arc::new(CounterFile::create(FIRST_SLOTS).expect("a memfd")),
            None,
        );
        bench
            .fences
            .queue(&bench.gpu, &stream, ParticipantId(2), &other)
            .expect("queued");
        assert!(bench.fences.has_proofs());
        stream.synchronize().expect("it runs");
        bench.fences.look_at_proofs();
        assert!(!bench.fences.has_proofs() && !bench.words.are_owed() && !other.are_owed());
    }

    #[test]
    fn lines_of_streams_that_owe_nothing_are_given_up() {
        let bench = Bench::new();
        let kept = bench.stream();
        let first = bench.queue(&kept).expect("queued");
        for _ in 0..1_000 {
            let stream = bench.stream();
            bench.queue(&stream).expect("queued");
            bench.settle(&stream);
        }
        assert!(
            bench.fences.count() <= 2 * FEW_LINES,
            "{} lines",
            bench.fences.count()
        );
        bench.settle(&kept);
        bench.fences.give_up_lines();
        assert_eq!(bench.fences.count(), 0);
        // A stream that comes back goes on above its values, wherever it finds a word.
        let second = bench.queue(&kept).expect("queued");
        assert!(
            second.word != first.word || second.value > first.value,
            "{first:?} {second:?}"
        );
    }
    #[test]
    fn nothing_is_left_of_a_session_that_has_fenced_a_share() {
        let bench = Bench::new();
        let stream = bench.stream();
        bench.queue(&stream).expect("queued");
        let line = Arc::downgrade(&bench.fences.lines.load()[&stream.key()]);
        let progress = Arc::downgrade(&line.upgrade().expect("it is in the table").progress);
        stream.synchronize().expect("it runs");
        drop(bench);
        assert!(
            line.upgrade().is_none() && progress.upgrade().is_none(),
            "something points in a circle"
        );
    }
}

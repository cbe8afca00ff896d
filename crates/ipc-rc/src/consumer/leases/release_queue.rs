//! Release queues: streams of the library's own that end leases once the caller's GPU work is done.
//!
//! A queue serves one *set* of streams. To end a lease it records an event on each stream of the
//! set, waits for them on its own stream, and stores RELEASED into the slot and 1 into its dirty
//! word, all queued and never waited for. The caller's streams are not slowed (measured: a host
//! function would cost them 48 µs each), and a stream that is stuck holds up only those who named
//! it.
//!
//! A driver's queue that is full blocks every thread of the process (measured at 1,020 entries),
//! and the caller's stream may share it. So at most [`MOST_PENDING`] ends are in a queue, and what
//! comes on top takes no place in any queue but one event on each stream, whatever its number: it
//! gathers here, the participant's thread records the events when the last ones are done, and ends
//! what had gathered by then when these are. So it is, too, for a set with a stream of another
//! device or vendor, whose events no stream of ours can wait for.
//!
//! **Any error before the stores are queued leaves the lease HELD** until the process ends,
//! counted, and logged once: an end that might come early would be worse.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use arrayvec::ArrayVec;
use gpu_api::lock::Acquire;
use gpu_api::{Gpu, MAX_BATCH, Result, StreamOp};

use crate::gpu_event::GpuEvent;
use crate::stream::{Stream, StreamKey, advise};

/// Ends in one queue: far below the 1,020 at which a driver blocks.
pub(crate) const MOST_PENDING: usize = 128;
/// Ends in a queue from which on a drop looks which of them are done. Each look reads what a GPU
/// has written, from memory; but the slots of several leases lie in one line, and those that ended
/// meanwhile are read together.
const SETTLED_FROM: usize = MOST_PENDING / 2;
/// Streams of a set that is looked up without taking memory.
const FEW: usize = 8;
/// What to do instead of a drop under capture.
const UNCAPTURED: &str = "drop the block after the capture, or keep it for the graph";
/// Leases that end by one batch: each takes a store, and in the worst case one more into its dirty
/// word.
pub(crate) const MOST_TOGETHER: usize = MAX_BATCH / 2;
/// Queues after which idle ones are given up before another is made.
const MANY_QUEUES: usize = 64;

/// A lease as a queue ends it.
pub(crate) trait Ends {
    /// Ends it at once: no GPU work on its block is left.
    fn release(self);

    /// Says whether a queue has ended it.
    fn is_released(&self) -> bool;

    /// Returns the stores that end it: RELEASED into its slot, then 1 into its dirty word. `None`
    /// where streams have no way to the words.
    fn stores(&self) -> Option<[StreamOp; 2]>;

    /// Lets go of its mapping, after the end.
    fn leave(self);
}

/// Ends that found the queue full.
struct Later<E> {
    /// Behind the events that are recorded.
    recorded: Vec<E>,
    /// Dropped since: the next recording is theirs.
    gathered: Vec<E>,
    /// The set's streams, kept while anything waits here.
    streams: Vec<Stream>,
    /// One for each stream, made when first needed.
    marks: Vec<GpuEvent>,
}

impl<E> Default for Later<E> {
    fn default() -> Later<E> {
        Later {
            recorded: Vec::new(),
            gathered: Vec::new(),
            streams: Vec::new(),
            marks: Vec::new(),
        }
    }
}

impl<E> Later<E> {
    fn is_empty(&self) -> bool {
        self.recorded.is_empty() && self.gathered.is_empty()
    }

    fn are_passed(&self) -> Result<bool> {
        for mark in &self.marks {
            if !mark.is_passed()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn is_capturing(&self) -> bool {
        self.streams
            .iter()
            .any(|stream| stream.is_capturing().unwrap_or(false))
    }

    fn record_all(&mut self) -> Result<()> {
        for stream in &self.streams[self.marks.len()..] {
            self.marks.push(GpuEvent::new(stream.gpu())?);
        }
        self.marks
            .iter()
            .zip(&self.streams)
            .try_for_each(|(mark, stream)| mark.record(stream))
    }

    /// Gives the events up: leases behind them wait for others.
    fn gather_again(&mut self) {
        self.marks.clear();
        self.recorded.append(&mut self.gathered);
        self.gathered = std::mem::take(&mut self.recorded);
    }
}

struct ReleaseQueue<E> {
    /// Taken out of the table: a thread that still finds it looks again.
    retired: bool,
    stream: Stream,
    /// One for each stream of the set, recorded again by every end: a wait keeps what was recorded
    /// when it was queued. `None` for a set of more than [`FEW`], or with a stream of another
    /// device or backend: the participant's thread stores its ends.
    marks: Option<Vec<GpuEvent>>,
    pending: VecDeque<E>,
    later: Later<E>,
}

type Key = Box<[StreamKey]>;

/// Lists the stores that end leases: RELEASED into each slot, then 1 into each dirty word that they
/// share. `None` where streams have no way to the words.
fn list_stores<E: Ends>(ending: &[E], ops: &mut ArrayVec<StreamOp, MAX_BATCH>) -> Option<()> {
    let mut marks = ArrayVec::<_, MOST_TOGETHER>::new();
    for held in ending {
        let [released, marked] = held.stores()?;
        ops.push(released);
        // Leases that end together mostly lie together.
        if marks.last() != Some(&marked) {
            marks.push(marked);
        }
    }
    ops.extend(marks);
    Some(())
}

/// A participant's queues.
pub(crate) struct ReleaseQueues<E> {
    gpu: Gpu,
    table: ArcSwap<BTreeMap<Key, Arc<Mutex<ReleaseQueue<E>>>>>,
    kept: AtomicU64,
    logged: AtomicBool,
}

impl<E: Ends> ReleaseQueues<E> {
    pub fn new(gpu: Gpu) -> ReleaseQueues<E> {
        ReleaseQueues {
            gpu,
            table: ArcSwap::default(),
            kept: AtomicU64::new(0),
            logged: AtomicBool::new(false),
        }
    }

    /// Counts the leases that are kept until the process ends.
    pub fn kept(&self) -> u64 {
        self.kept.load(Ordering::Relaxed)
    }

    /// Ends leases once all that is queued on `streams` at this moment has finished. Never blocks.
    ///
    /// Says whether the participant's thread must look after them.
    pub fn end(&self, ending: &mut ArrayVec<E, MOST_TOGETHER>, streams: &mut [Stream]) -> bool {
        streams.sort_by_key(Stream::key);
        match self.try_end(ending, streams) {
            Ok(watch) => watch,
            Err(error) => {
                ending.drain(..).for_each(|held| self.keep(held, &error));
                false
            }
        }
    }

    /// Keeps a lease until the process ends, because the end of the work on its block cannot be
    /// observed.
    ///
    /// A lease that is never [left](Ends::leave) stays mapped.
    fn keep(&self, _held: E, error: &gpu_api::Error) {
        self.kept.fetch_add(1, Ordering::Relaxed);
        if !self.logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(%error, "a lease is kept until this process ends; later ones are only counted");
        }
    }

    /// Takes out of `ending` what is taken care of; after an error the rest is left in it.
    fn try_end(&self, ending: &mut ArrayVec<E, MOST_TOGETHER>, streams: &[Stream]) -> Result<bool> {
        let unneeded = self.with_queue(streams, |queue| {
            if queue.pending.len() + ending.len() > SETTLED_FROM {
                queue.settle();
            }
            let mut ops = ArrayVec::new();
            if let (Some(marks), true) = (&queue.marks, queue.later.is_empty())
                && queue.pending.len() + ending.len() <= MOST_PENDING
                && list_stores(ending, &mut ops).is_some()
            {
                self.enqueue(queue, marks, streams, &ops)
                    .map_err(|error| advise(error, UNCAPTURED))?;
                queue.pending.extend(ending.drain(..));
                return Ok(None);
            }
            for stream in streams {
                stream.refuse_capture(UNCAPTURED)?;
            }
            if queue.later.is_empty() {
                queue.later.streams = streams.to_vec();
            }
            queue.later.gathered.extend(ending.drain(..));
            Ok(Some(self.look_after(queue)))
        })?;
        // The streams go here, with no lock held: a stream's keeper may be anything.
        Ok(unneeded.is_some())
    }

    fn enqueue(
        &self,
        queue: &ReleaseQueue<E>,
        marks: &[GpuEvent],
        streams: &[Stream],
        ops: &[StreamOp],
    ) -> Result<()> {
        let others: ArrayVec<_, FEW> = marks
            .iter()
            .zip(streams)
            .map(|(mark, stream)| mark.on(stream))
            .collect();
        // SAFETY: `batch_behind` asks for
        // - live streams and events of one device: the queue keeps its own, the caller its streams,
        //   and a queue has marks only if all are of the participant's device;
        // - words in a registration that outlives the operation: the link unregisters its files
        //   only after its queues have run dry.
        unsafe {
            self.gpu
                .backend()
                .batch_behind(queue.stream.raw(), &others, ops)
        }
    }

    /// Ends what is behind events that are done, and records them anew for what has gathered.
    /// Returns streams that are not needed any more, to be dropped with no lock held.
    ///
    /// The application may begin to capture a stream at any moment. An event that was recorded
    /// since is the graph's: it proves nothing, and what it was for gathers again.
    #[must_use]
    fn look_after(&self, queue: &mut ReleaseQueue<E>) -> Vec<Stream> {
        let later = &mut queue.later;
        if !later.recorded.is_empty() {
            match later.are_passed() {
                Ok(true) => later.recorded.drain(..).for_each(E::release),
                Ok(false) => return Vec::new(),
                Err(_) => later.gather_again(),
            }
        }
        if later.gathered.is_empty() {
            return std::mem::take(&mut later.streams);
        }
        // A stream that captures at this moment is asked again at the next look.
        if later.is_capturing() {
            return Vec::new();
        }
        let recorded = later.record_all();
        match recorded {
            // A capture has begun meanwhile: the events are the graph's, or were refused for its
            // sake.
            _ if later.is_capturing() => later.gather_again(),
            Ok(()) => later.recorded = std::mem::take(&mut later.gathered),
            Err(error) => later
                .gathered
                .drain(..)
                .for_each(|held| self.keep(held, &error)),
        }
        Vec::new()
    }

    /// Calls `run` with the queue of a set of streams, locked; makes it first if need be.
    fn with_queue<T>(
        &self,
        streams: &[Stream],
        run: impl FnOnce(&mut ReleaseQueue<E>) -> Result<T>,
    ) -> Result<T> {
        // Most leases are used on few streams, whose queue is found without taking memory.
        let (few, many): (ArrayVec<StreamKey, FEW>, Key);
        let key: &[StreamKey] = if streams.len() <= FEW {
            few = streams.iter().map(Stream::key).collect();
            &few
        } else {
            many = streams.iter().map(Stream::key).collect();
            &many
        };
        loop {
            if let Some(found) = self.table.load().get(key) {
                let mut queue = found.acquire();
                if !queue.retired {
                    return run(&mut queue);
                }
            }
            self.make_queue(key, streams)?;
        }
    }

    /// Puts a fresh queue where there is none, or one that is retired.
    #[cold]
    fn make_queue(&self, key: &[StreamKey], streams: &[Stream]) -> Result<()> {
        let is_own = streams.len() <= FEW && streams.iter().all(|stream| *stream.gpu() == self.gpu);
        let marks = is_own.then(|| {
            streams
                .iter()
                .map(|stream| GpuEvent::new(stream.gpu()))
                .collect()
        });
        let fresh = Arc::new(Mutex::new(ReleaseQueue {
            retired: false,
            stream: Stream::create(&self.gpu)?,
            marks: marks.transpose()?,
            pending: VecDeque::new(),
            later: Later::default(),
        }));
        self.table.rcu(|table| {
            let mut table = BTreeMap::clone(table);
            if table.len() >= MANY_QUEUES {
                // A queue whose lock somebody holds is in use.
                table.retain(|_, queue| {
                    !queue
                        .try_lock()
                        .is_ok_and(|mut queue| queue.retire_if_dry())
                });
            }
            let place = table.entry(key.into()).or_insert_with(|| fresh.clone());
            if !Arc::ptr_eq(place, &fresh) && place.acquire().retired {
                *place = fresh.clone();
            }
            table
        });
        Ok(())
    }

    /// Ends due leases, and says whether the thread has anything left to look after.
    pub fn poll(&self) -> bool {
        let mut left = false;
        for queue in self.table.load().values() {
            let mut queue = queue.acquire();
            queue.settle();
            let unneeded = self.look_after(&mut queue);
            left |= !queue.later.is_empty();
            drop(queue);
            // With no lock held: a stream's keeper may be anything.
            drop(unneeded);
        }
        left
    }

    /// Says whether every lease that was given to a queue has ended, and the queues' streams write
    /// nothing more. Never waits: a queue that somebody has locked is in use.
    pub fn are_dry(&self) -> bool {
        self.table
            .load()
            .values()
            .all(|queue| queue.try_acquire().is_some_and(|mut queue| queue.is_dry()))
    }

    /// Gives up the queues.
    pub fn close(&self) {
        self.table.store(Arc::default());
    }
}

impl<E: Ends> ReleaseQueue<E> {
    /// Lets go of what the queue's stream has ended.
    fn settle(&mut self) {
        while self.pending.front().is_some_and(E::is_released) {
            if let Some(held) = self.pending.pop_front() {
                held.leave();
            }
        }
    }

    /// Says whether every lease that was given to it has ended, and its stream writes nothing more:
    /// after RELEASED comes the dirty word.
    fn is_dry(&mut self) -> bool {
        self.settle();
        self.pending.is_empty() && self.later.is_empty() && {
            // SAFETY: `query_stream` asks for a live stream: the queue keeps it. An error is a
            // broken context, whose streams write nothing.
            unsafe { self.stream.gpu().backend().query_stream(self.stream.raw()) }.unwrap_or(true)
        }
    }

    /// Marks a queue that has nothing to do as retired, and says whether it is.
    fn retire_if_dry(&mut self) -> bool {
        self.retired |= self.is_dry();
        self.retired
    }
}

#[cfg(test)]
mod tests {
    use backend_host::{HostBackend, HostConfig};
    use gpu_api::DeviceId;

    use super::*;

    /// Is never ended.
    struct Nothing;

    impl Ends for Nothing {
        fn release(self) {}

        fn is_released(&self) -> bool {
            false
        }

        fn stores(&self) -> Option<[StreamOp; 2]> {
            None
        }

        fn leave(self) {}
    }

    fn gpu() -> Gpu {
        let host = HostBackend::new(HostConfig::default()).expect("shared memory");
        Gpu::new(host, DeviceId(0)).expect("device 0")
    }

    #[test]
    fn a_set_has_one_queue_until_that_is_retired() {
        let gpu = gpu();
        let queues: ReleaseQueues<Nothing> = ReleaseQueues::new(gpu.clone());
        let streams = [Stream::create(&gpu).expect("a stream")];
        let own = |queue: &mut ReleaseQueue<Nothing>| Ok(queue.stream.identity());
        let first = queues.with_queue(&streams, own).expect("a queue");
        assert_eq!(queues.with_queue(&streams, own).expect("a queue"), first);
        let retire = |queue: &mut ReleaseQueue<Nothing>| {
            queue.retired = true;
            Ok(())
        };
        queues.with_queue(&streams, retire).expect("a queue");
        // Still in the table, as when somebody held its lock while the dry ones were taken out.
        assert_ne!(
            queues.with_queue(&streams, own).expect("another queue"),
            first
        );
    }

    #[test]
    fn idle_queues_are_given_up_before_many_more_are_made() {
        let gpu = gpu();
        let queues: ReleaseQueues<Nothing> = ReleaseQueues::new(gpu.clone());
        for _ in 0..3 * MANY_QUEUES {
            queues
                .with_queue(&[Stream::create(&gpu).expect("a stream")], |_| Ok(()))
                .expect("a queue");
            assert!(queues.table.load().len() <= MANY_QUEUES);
        }
    }

    #[test]
    fn a_queue_whose_stream_has_yet_to_write_stays() {
        let gpu = gpu();
        let queues: ReleaseQueues<Nothing> = ReleaseQueues::new(gpu.clone());
        let stuck = [Stream::create(&gpu).expect("a stream")];
        let (open, gate) = std::sync::mpsc::channel::<()>();
        let wait = Box::new(move || {
            let _ = gate.recv();
        });
        // SAFETY: `host_function` asks for a live stream: it lives to the end of the test.
        unsafe { gpu.backend().host_function(stuck[0].raw(), wait) }.expect("queued");
        // Ends nothing, but behind the stream.
        queues.end(&mut ArrayVec::new(), &mut stuck.clone());
        let own = |queue: &mut ReleaseQueue<Nothing>| Ok(queue.stream.identity());
        let queue = queues.with_queue(&stuck, own).expect("a queue");
        for _ in 0..2 * MANY_QUEUES {
            queues
                .with_queue(&[Stream::create(&gpu).expect("a stream")], |_| Ok(()))
                .expect("a queue");
        }
        assert_eq!(queues.with_queue(&stuck, own).expect("a queue"), queue);
        assert!(!queues.are_dry());
        drop(open);
    }
}

//! Giving back: once the GPU is done with a storage, its segment is unmapped and its counter
//! decreased.
//!
//! A drop records an event on each stream that used the storage and hands the rest to a thread, so
//! it neither blocks nor delays a stream. The thread polls: 50 us rising to 10 ms while something
//! is unfinished, and it sleeps otherwise.
//!
//! The order is PyTorch's: the mapping goes before the count, because at zero the sender may free
//! the segment.

// Tests: `crates/torch/tests/processes/release.rs`, `crates/torch/tests/processes/death.rs`.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use gpu_api::lock::{Acquire, AwaitChange};
use gpu_api::{Error, EventKind, Gpu, RawEvent, Result, thread};
use ipc_rc::Stream;

use crate::counter_file::{CounterFile, CounterName, Released};
use crate::segments::{Mapped, Segments};

const SHORTEST: Duration = Duration::from_micros(50);
const LONGEST: Duration = Duration::from_millis(10);

/// One count that this process holds.
#[derive(Debug)]
pub(crate) struct Held {
    pub file: Arc<CounterFile>,
    pub slot: u32,
    /// `None` for a storage of no bytes.
    pub mapped: Option<Mapped>,
}

/// What is to be given back when its events are done.
struct Pending {
    held: Held,
    events: Vec<RawEvent>,
}

/// What a receiver has opened and given back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct ReceiverStats {
    /// Storages opened.
    pub opened: u64,
    /// Counters decreased.
    pub released: u64,
    /// Storages dropped whose GPU work is not known to be done.
    pub pending: u64,
    /// Storages that stay counted until this process ends, because an error or a graph left their
    /// work unknown.
    pub kept: u64,
    /// Releases that found their counter at nothing: the sender or another receiver counted
    /// wrongly.
    pub over_released: u64,
    /// Segments mapped.
    pub segments: u64,
}

/// How many of a process' storages each counter stands for. It is the process' and no receiver's:
/// two receivers of one process open one message once. A forked child begins with none of its own.
type HeldHere = HashMap<(u32, CounterName, u32), i64>;

fn held_here() -> MutexGuard<'static, HeldHere> {
    static HELD: LazyLock<Mutex<HeldHere>> = LazyLock::new(Mutex::default);
    HELD.acquire()
}

fn key(file: &CounterFile, slot: u32) -> (u32, CounterName, u32) {
    (std::process::id(), file.name().clone(), slot)
}

/// What the thread and the storages share.
#[derive(Debug)]
pub(crate) struct Desk {
    gpu: Gpu,
    pub segments: Segments,
    pending: Mutex<u64>,
    settled: Condvar,
    pub opened: AtomicU64,
    released: AtomicU64,
    kept: AtomicU64,
    over_released: AtomicU64,
}

impl Desk {
    pub(crate) fn stats(&self) -> ReceiverStats {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ReceiverStats {
            opened: read(&self.opened),
            released: read(&self.released),
            pending: *self.pending.acquire(),
            kept: read(&self.kept),
            over_released: read(&self.over_released),
            segments: self.segments.count() as u64,
        }
    }

    /// Notes one more storage of a counter, unless all that it counts are open here.
    pub(crate) fn hold(&self, file: &CounterFile, slot: u32) -> Result<()> {
        let mut held = held_here();
        let here = held.entry(key(file, slot)).or_insert(0);
        let count = file.count(slot);
        if *here < count {
            *here += 1;
            return Ok(());
        }
        let got = format!("at {count}, and {here} of that held here");
        if *here == 0 {
            held.remove(&key(file, slot));
        }
        Err(Error::invalid(
            "PyTorch's counter",
            got,
            "above the number held here: each message can be opened once",
        ))
    }

    /// Takes back what `hold` noted.
    pub(crate) fn unhold(&self, file: &CounterFile, slot: u32) {
        let mut held = held_here();
        let key = key(file, slot);
        if let Some(here) = held.get_mut(&key) {
            *here -= 1;
            if *here <= 0 {
                held.remove(&key);
            }
        }
    }

    /// Leaves a count as it is until the process ends.
    fn keep(&self, held: Held, why: &str) {
        if self.kept.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                why,
                "a storage of PyTorch's stays counted until this process ends; further ones are counted only"
            );
        }
        // The file's count, the segment's use and the counter all stay.
        std::mem::forget(held);
    }

    /// Gives back what no work touches any more.
    fn finish(&self, held: Held) {
        let Held { file, slot, mapped } = held;
        if let Some(mapped) = mapped
            && let Err(error) = self.segments.release(mapped)
        {
            self.keep(
                Held {
                    file,
                    slot,
                    mapped: None,
                },
                &error.to_string(),
            );
            return;
        }
        // Before the count, so that who is told of zero and sends again at once is not refused
        // here.
        self.unhold(&file, slot);
        match file.release(slot) {
            Released::Yes => self.released.fetch_add(1, Ordering::Relaxed),
            Released::NothingLeft => self.over_released.fetch_add(1, Ordering::Relaxed),
        };
    }
}

/// The way to the thread; it ends when the last of these is gone and everything was given back.
pub(crate) struct Releases {
    desk: Arc<Desk>,
    queue: mpsc::Sender<Pending>,
}

impl Releases {
    pub(crate) fn start(gpu: Gpu) -> Result<Releases> {
        let desk = Arc::new(Desk {
            segments: Segments::new(gpu.clone()),
            gpu,
            pending: Mutex::default(),
            settled: Condvar::new(),
            opened: AtomicU64::new(0),
            released: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            over_released: AtomicU64::new(0),
        });
        let (queue, incoming) = mpsc::channel();
        let worker = Worker {
            desk: desk.clone(),
            incoming,
            pending: Vec::new(),
        };
        thread::start("gpu-ipc-torch", move || worker.run())?;
        Ok(Releases { desk, queue })
    }

    pub(crate) fn desk(&self) -> &Arc<Desk> {
        &self.desk
    }

    /// Gives back once all that is queued on the streams at this moment is done.
    pub(crate) fn after(&self, held: Held, streams: &[Stream]) {
        let mut events = Vec::with_capacity(streams.len());
        let mut unmarked = Vec::new();
        for stream in streams {
            match self.record(stream) {
                Ok(event) => events.push(event),
                // What is captured may run more than once.
                Err(error @ Error::Capturing { .. }) => {
                    for event in events {
                        destroy(&self.desk.gpu, event);
                    }
                    return self.desk.keep(held, &error.to_string());
                }
                Err(_) => unmarked.push(stream.clone()),
            }
        }
        *self.desk.pending.acquire() += 1;
        let pending = Pending { held, events };
        if unmarked.is_empty() {
            hand_over(&self.desk, &self.queue, pending)
        } else {
            self.synchronize(pending, unmarked)
        }
    }

    /// Waits for streams on which no event could be recorded, on a thread of its own, before the
    /// rest.
    fn synchronize(&self, pending: Pending, streams: Vec<Stream>) {
        let (desk, queue) = (self.desk.clone(), self.queue.clone());
        // Kept aside: a thread that cannot be started takes its closure with it.
        let waits = Arc::new(Mutex::new(Some(pending)));
        let theirs = waits.clone();
        let spawned = thread::start("gpu-ipc-torch-wait", move || {
            let passed = streams.iter().try_for_each(Stream::synchronize);
            let Some(pending) = theirs.acquire().take() else {
                return;
            };
            match passed {
                Ok(()) => hand_over(&desk, &queue, pending),
                Err(error) => give_up(&desk, pending, &error.to_string()),
            }
        });
        if let Err(error) = spawned
            && let Some(pending) = waits.acquire().take()
        {
            give_up(&self.desk, pending, &error.to_string());
        }
    }

    fn record(&self, stream: &Stream) -> Result<RawEvent> {
        stream.refuse_capture("drop the storage after the capture")?;
        let backend = self.desk.gpu.backend();
        let event = backend.create_event(self.desk.gpu.device(), EventKind::Local)?;
        // SAFETY: `record_event` asks for a live event and stream of one device: just made, kept by
        // `stream`, and `used_on` took only streams of this device.
        if let Err(error) = unsafe { backend.record_event(event, stream.raw()) } {
            destroy(&self.desk.gpu, event);
            return Err(error);
        }
        Ok(event)
    }

    /// Waits until everything dropped so far was given back, and says whether it was.
    pub(crate) fn settle(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut pending = self.desk.pending.acquire();
        while *pending > 0 {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return false;
            };
            pending = self.desk.settled.await_change(pending, Some(left));
        }
        true
    }
}

impl fmt::Debug for Releases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Releases")
            .field("stats", &self.desk.stats())
            .finish()
    }
}

/// Gives what waits for events to the thread.
fn hand_over(desk: &Arc<Desk>, queue: &mpsc::Sender<Pending>, pending: Pending) {
    if let Err(mpsc::SendError(pending)) = queue.send(pending) {
        // Only a panic in the thread closes its end.
        give_up(desk, pending, "the thread that gives back has ended");
    }
}

/// Leaves what was pending as it is.
fn give_up(desk: &Arc<Desk>, pending: Pending, why: &str) {
    for event in pending.events {
        destroy(&desk.gpu, event);
    }
    desk.keep(pending.held, why);
    *desk.pending.acquire() -= 1;
    desk.settled.notify_all();
}

/// Refuses a stream that the backend of `gpu` must not be given: what names a stream here may name
/// nothing, or another one, elsewhere.
pub(crate) fn same_gpu(stream: &Stream, gpu: &Gpu) -> Result<()> {
    if stream.gpu() == gpu {
        return Ok(());
    }
    let name = |gpu: &Gpu| format!("{} of {}", gpu.device(), gpu.kind());
    Err(Error::mismatch(
        "the stream's device",
        name(stream.gpu()),
        name(gpu),
        "pass a stream of the same `Gpu`",
    ))
}

fn destroy(gpu: &Gpu, event: RawEvent) {
    // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards: its number is
    // dropped. An error leaks it.
    let _ = unsafe { gpu.backend().destroy_event(event) };
}

struct Worker {
    desk: Arc<Desk>,
    incoming: mpsc::Receiver<Pending>,
    pending: Vec<Pending>,
}

impl Worker {
    fn run(mut self) {
        let mut pause = SHORTEST;
        loop {
            let next = if self.pending.is_empty() {
                self.incoming
                    .recv()
                    .map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                self.incoming.recv_timeout(pause)
            };
            match next {
                Ok(pending) => {
                    self.pending.push(pending);
                    self.pending.extend(self.incoming.try_iter());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) if self.pending.is_empty() => return,
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(pause),
            }
            pause = if self.turn() {
                SHORTEST
            } else {
                LONGEST.min(pause * 2)
            };
        }
    }

    /// Gives back what is done, and says whether anything was.
    fn turn(&mut self) -> bool {
        let mut ended = 0;
        for mut pending in std::mem::take(&mut self.pending) {
            let backend = self.desk.gpu.backend();
            let mut failed = None;
            pending.events.retain(|&event| {
                // SAFETY: `query_event` asks for a live event: it is destroyed only where it is
                // taken out.
                match unsafe { backend.query_event(event) } {
                    Ok(false) => true,
                    Ok(true) => {
                        destroy(&self.desk.gpu, event);
                        false
                    }
                    Err(error) => {
                        failed = Some(error);
                        false
                    }
                }
            });
            match failed {
                Some(error) => self.desk.keep(pending.held, &error.to_string()),
                None if pending.events.is_empty() => self.desk.finish(pending.held),
                None => {
                    self.pending.push(pending);
                    continue;
                }
            }
            ended += 1;
        }
        if ended > 0 {
            *self.desk.pending.acquire() -= ended;
            self.desk.settled.notify_all();
        }
        ended > 0
    }
}

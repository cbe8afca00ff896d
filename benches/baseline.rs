//! Ours beside the algorithm that PyTorch shares GPU memory with, without a GPU: `cargo bench --bench baseline`.
//!
//! The algorithm, in our words: a file of counters in shared memory, known by name; a share takes the next counter and
//! sets it to 1. Whoever received the block decreases the counter at its end, for which it opens the file by name, maps
//! it, and unmaps it again. A block whose producer drops it while its counter is not 0 goes into one list, limbo; every
//! drop looks at all of that list. (Where PyTorch is installed, `benches/torch` times the thing itself.)
//!
//! Both in one run and on one thread, each figure the least of many rounds: the ratio is what to compare.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, DeviceId, Gpu, Participant, ReceivedBlock, SentBlock, Session, To, Wait};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Counters of a file.
const COUNTERS: usize = 10_000;
const HEADER: usize = 64;
const BYTES: usize = HEADER + 8 * COUNTERS;
/// Operations of a round.
const BATCH: usize = 64;
/// For how long rounds are repeated.
const PATIENCE: Duration = Duration::from_secs(2);
const LIMBO: [usize; 4] = [0, 1_000, 10_000, 100_000];

fn main() {
    println!("{:<28}{:>12}{:>14}{:>10}", "", "ours, ns", "baseline, ns", "ratio");
    let row =
        |case: &str, ours: f64, theirs: f64| println!("{case:<28}{ours:>12.1}{theirs:>14.1}{:>10.1}", theirs / ours);
    row("cycle", cycle(), baseline_cycle());
    let ours: Vec<f64> = LIMBO.into_iter().map(drop_with).collect();
    let theirs: Vec<f64> = LIMBO.into_iter().map(baseline_drop_with).collect();
    for ((limbo, ours), theirs) in LIMBO.into_iter().zip(&ours).zip(&theirs) {
        row(&format!("drop, {limbo} in limbo"), *ours, *theirs);
    }
    println!("ours with {} in limbo against none: {:.2}", LIMBO[3], ours[3] / ours[0]);
}

/// Times rounds of [`BATCH`] operations, what is measured of each, and returns the least of an operation.
fn least(mut round: impl FnMut() -> Duration) -> f64 {
    (0..8).for_each(|_| _ = round());
    let until = Instant::now() + PATIENCE;
    let mut least = Duration::MAX;
    for n in 0.. {
        least = least.min(round());
        if n >= 20 && Instant::now() >= until {
            break;
        }
    }
    least.as_nanos() as f64 / BATCH as f64
}

fn timed(run: impl FnOnce()) -> Duration {
    let start = Instant::now();
    run();
    start.elapsed()
}

// Ours.

struct Pair {
    session: Session,
    participant: Participant,
    _dir: tempfile::TempDir,
}

impl Pair {
    fn new() -> Pair {
        let dir = tempfile::tempdir().expect("a directory");
        let gpu = Gpu::new(HostBackend::new(HostConfig::default()).expect("it opens"), DeviceId(0)).expect("a device");
        let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open().expect("a session");
        let participant = Participant::builder(gpu).connect(session.socket_path()).expect("connected");
        Pair { session, participant, _dir: dir }
    }

    fn lease(&self, block: &SentBlock) -> ReceivedBlock {
        let descriptor = block.share(To::Participant(self.participant.id()), After::Done).expect("shared");
        self.participant.claim(descriptor.as_bytes(), Wait::None, None).expect("claimed")
    }

    fn held(&self, count: usize) -> (Vec<SentBlock>, Vec<ReceivedBlock>) {
        let blocks: Vec<_> = (0..count).map(|_| self.session.alloc(256).expect("there is room")).collect();
        let held = blocks.iter().map(|block| self.lease(block)).collect();
        (blocks, held)
    }
}

fn cycle() -> f64 {
    let pair = Pair::new();
    let block = pair.session.alloc(4096).expect("there is room");
    let once = || {
        drop(pair.lease(&block));
        black_box(pair.session.collect());
    };
    least(|| timed(|| (0..BATCH).for_each(|_| once())))
}

/// One block more is dropped that somebody holds.
fn drop_with(limbo: usize) -> f64 {
    let pair = Pair::new();
    let (blocks, held) = pair.held(limbo);
    drop(blocks);
    let least = least(|| {
        let (blocks, held) = pair.held(BATCH);
        let took = timed(|| drop(blocks));
        drop(held);
        pair.session.collect();
        took
    });
    drop(held);
    least
}

// The baseline.

/// A file of counters, mapped by its producer.
struct Counters {
    name: PathBuf,
    start: *mut u8,
    next: usize,
    used: usize,
}

fn open(name: &PathBuf, create: bool) -> File {
    let file = OpenOptions::new().read(true).write(true).create_new(create).open(name).expect("shared memory");
    if create {
        file.set_len(BYTES as u64).expect("room in shared memory");
    }
    file
}

fn map(file: &File) -> *mut u8 {
    // SAFETY: `mmap` of a place that the kernel chooses takes nobody's memory.
    let start = unsafe { mmap(ptr::null_mut(), BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0) };
    start.expect("address space").cast()
}

fn unmap(start: *mut u8) {
    // SAFETY: `munmap` asks that nothing refers to the memory: each caller made the mapping and is done with it.
    unsafe { munmap(start.cast(), BYTES) }.expect("it is mapped");
}

/// Points at a counter of a mapped file.
fn counter<'a>(start: *mut u8, at: usize) -> &'a AtomicI64 {
    assert!(at < COUNTERS);
    // SAFETY: `add` asks for an offset within the mapping: just asserted.
    let place = unsafe { start.add(HEADER + 8 * at) }.cast::<i64>();
    // SAFETY: `from_ptr` asks for aligned memory that lives as long as the reference and is touched as an atomic alone:
    // callers drop it before they unmap.
    unsafe { AtomicI64::from_ptr(place) }
}

impl Drop for Counters {
    fn drop(&mut self) {
        unmap(self.start);
        let _ = std::fs::remove_file(&self.name);
    }
}

/// What becomes of a block at its producer once it is shared.
struct Sent {
    file: PathBuf,
    at: usize,
    start: *mut u8,
    /// The bytes, which are given back when this goes.
    _bytes: Box<[u8; 256]>,
}

/// What travels.
#[derive(Clone)]
struct Message {
    file: PathBuf,
    at: usize,
    handle: u64,
}

/// The producer's globals.
#[derive(Default)]
struct Producer {
    files: Mutex<HashMap<PathBuf, Counters>>,
    current: Mutex<Option<PathBuf>>,
    made: AtomicI64,
    limbo: Mutex<Vec<Sent>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Producer {
    fn share(&self, handle: u64) -> (Sent, Message) {
        let mut files = lock(&self.files);
        let mut current = lock(&self.current);
        if current.as_ref().is_none_or(|name| files.get(name).is_none_or(|file| file.next == COUNTERS)) {
            if let Some(full) = current.take()
                && files.get(&full).is_some_and(|file| file.used == 0)
            {
                files.remove(&full);
            }
            let name = PathBuf::from(format!(
                "/dev/shm/gpu-ipc-baseline-{}-{}",
                std::process::id(),
                self.made.fetch_add(1, Ordering::Relaxed)
            ));
            let start = map(&open(&name, true));
            files.insert(name.clone(), Counters { name: name.clone(), start, next: 0, used: 0 });
            *current = Some(name);
        }
        let name = current.clone().expect("just made");
        let file = files.get_mut(&name).expect("just found");
        let at = file.next;
        file.next += 1;
        file.used += 1;
        counter(file.start, at).store(1, Ordering::Release);
        let sent = Sent { file: name.clone(), at, start: file.start, _bytes: Box::new([0; 256]) };
        (sent, Message { file: name, at, handle })
    }

    /// Gives a block back if nobody holds it, else puts it into limbo; and looks at all of limbo.
    fn drop_block(&self, sent: Sent) {
        if counter(sent.start, sent.at).load(Ordering::Acquire) > 0 {
            lock(&self.limbo).push(sent);
        } else {
            self.give_back(sent);
        }
        self.collect();
    }

    fn collect(&self) {
        let free = {
            let mut limbo = lock(&self.limbo);
            let mut free = Vec::new();
            let mut kept = Vec::with_capacity(limbo.len());
            for sent in limbo.drain(..) {
                if counter(sent.start, sent.at).load(Ordering::Acquire) > 0 { kept.push(sent) } else { free.push(sent) }
            }
            *limbo = kept;
            free
        };
        free.into_iter().for_each(|sent| self.give_back(sent));
    }

    fn give_back(&self, sent: Sent) {
        let mut files = lock(&self.files);
        let current = lock(&self.current);
        let Some(file) = files.get_mut(&sent.file) else { return };
        file.used -= 1;
        if file.used == 0 && file.next == COUNTERS && current.as_ref() != Some(&sent.file) {
            files.remove(&sent.file);
        }
    }
}

/// The consumer's cache of mapped segments.
#[derive(Default)]
struct Consumer {
    mapped: Mutex<HashMap<u64, Weak<u64>>>,
}

struct Received {
    message: Message,
    _segment: Arc<u64>,
}

impl Consumer {
    fn receive(&self, message: Message) -> Received {
        let mut mapped = lock(&self.mapped);
        let known = mapped.get(&message.handle).and_then(Weak::upgrade);
        let segment = known.unwrap_or_else(|| {
            let segment = Arc::new(message.handle);
            mapped.insert(message.handle, Arc::downgrade(&segment));
            segment
        });
        Received { message, _segment: segment }
    }

    /// Decreases the counter: the file is opened by name and mapped for it.
    fn release(received: Received) {
        let start = map(&open(&received.message.file, false));
        counter(start, received.message.at).fetch_sub(1, Ordering::Release);
        unmap(start);
    }
}

fn baseline_cycle() -> f64 {
    let (producer, consumer) = (Producer::default(), Consumer::default());
    let (kept, message) = producer.share(1);
    let segment = consumer.receive(message);
    let once = || {
        let (sent, message) = producer.share(1);
        Consumer::release(consumer.receive(message));
        producer.drop_block(sent);
    };
    let least = least(|| timed(|| (0..BATCH).for_each(|_| once())));
    Consumer::release(segment);
    producer.drop_block(kept);
    least
}

fn baseline_drop_with(limbo: usize) -> f64 {
    let (producer, consumer) = (Producer::default(), Consumer::default());
    let share = |count: usize| -> (Vec<Sent>, Vec<Received>) {
        (0..count)
            .map(|_| {
                let (sent, message) = producer.share(1);
                (sent, consumer.receive(message))
            })
            .unzip()
    };
    let (sent, held) = share(limbo);
    // As so many drops would have left it; the drops themselves would take minutes.
    lock(&producer.limbo).extend(sent);
    let least = least(|| {
        let (sent, held) = share(BATCH);
        let took = timed(|| sent.into_iter().for_each(|sent| producer.drop_block(sent)));
        held.into_iter().for_each(Consumer::release);
        producer.collect();
        took
    });
    drop(held);
    least
}

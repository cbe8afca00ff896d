//! Several threads on one allocator of each kind, with every way of allocating and freeing, and a
//! checker of overlaps. Threads end and begin all the time, and another one goes on with what each
//! held.
//!
//! `GPU_IPC_OPERATIONS` sets the operations of each seed; `ci/long/overlaps` runs a million.

mod fake;
mod hostile;
mod random;

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use allocators::*;
use backend_host::{HostBackend, HostConfig};
use fake::Fake;
use gpu_api::{DeviceId, Error, Gpu, StreamIdentity};
use hostile::Hostile;
use random::Random;

/// How many threads run at a time.
const THREADS: u64 = 4;
/// More than threads, so that what a worker holds goes from thread to thread.
const WORKERS: u64 = 6;
/// The most operations of a thread.
const STINT: u64 = 200;
const SEEDS: std::ops::Range<u64> = 0..6;
const LIMIT: u64 = 8 << 20;

/// Which bytes are somebody's: the end and the allocation's number, by the first byte.
#[derive(Default)]
struct Checker {
    taken: Mutex<BTreeMap<u64, (u64, u64)>>,
    allocs: AtomicU64,
    /// Bytes that are surely in use, and the most of them.
    in_use: AtomicU64,
    peak: AtomicU64,
}

impl Checker {
    fn taken(&self) -> MutexGuard<'_, BTreeMap<u64, (u64, u64)>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what was handed out.
    fn take(&self, placed: &Placed) {
        let (start, end) = (placed.address, placed.address + placed.bytes);
        let mut taken = self.taken();
        let before = taken
            .range(..end)
            .next_back()
            .filter(|(_, (other, _))| *other > start);
        assert!(before.is_none(), "{placed:x?} overlaps {before:x?}");
        taken.insert(start, (end, placed.number));
        drop(taken);
        self.allocs.fetch_add(1, Ordering::SeqCst);
        let in_use = self.in_use.fetch_add(placed.bytes, Ordering::SeqCst) + placed.bytes;
        self.peak.fetch_max(in_use, Ordering::SeqCst);
    }

    /// Notes what is about to be given back.
    fn give(&self, placed: &Placed) {
        self.end(placed);
        self.let_go(placed);
    }

    /// Notes that bytes are counted as free from here on, though work may still touch them.
    fn end(&self, placed: &Placed) {
        self.in_use.fetch_sub(placed.bytes, Ordering::SeqCst);
    }

    /// Notes that bytes may be anybody's from here on.
    fn let_go(&self, placed: &Placed) {
        let gone = self.taken().remove(&placed.address);
        assert_eq!(gone, Some((placed.address + placed.bytes, placed.number)));
    }
}

/// A stream's work, in order: how much of it was queued, and how much is done.
#[derive(Default)]
struct Stream {
    queued: AtomicU64,
    done: AtomicU64,
}

impl Stream {
    /// Queues work, and returns its place.
    fn work(self: &Arc<Stream>, identity: StreamIdentity) -> (u64, Work) {
        let place = self.queued.fetch_add(1, Ordering::SeqCst) + 1;
        let stream = self.clone();
        (
            place,
            Work::on(identity, move || {
                stream.done.load(Ordering::SeqCst) >= place
            }),
        )
    }
}

/// An allocator, and what it must have come to in the end.
struct Subject {
    allocator: Arc<dyn Allocator>,
    /// Whether what it is over fails at times for other reasons than a lack of room.
    is_hostile: bool,
    /// Asserts that all went back; gets the allocator's last reference but its own.
    at_end: Box<dyn FnOnce()>,
}

impl Subject {
    fn new(allocator: Arc<dyn Allocator>, at_end: impl FnOnce() + 'static) -> Subject {
        Subject {
            allocator,
            is_hostile: false,
            at_end: Box::new(at_end),
        }
    }

    fn hostile(mut self) -> Subject {
        self.is_hostile = true;
        self
    }
}

/// A share of the operations, what is left of it, and what it holds.
struct Worker<'a> {
    allocator: &'a dyn Allocator,
    is_hostile: bool,
    checker: &'a Checker,
    left: u64,
    random: Random,
    identity: StreamIdentity,
    stream: Arc<Stream>,
    held: Vec<Placed>,
    /// What was given back after work: its bytes are this worker's until the stream says so.
    late: VecDeque<(u64, Placed)>,
}

impl Worker<'_> {
    /// Does what one thread does of it; says whether some is left.
    fn stint(&mut self) -> bool {
        let operations = self.left.min(1 + self.random.below(STINT));
        self.left -= operations;
        for _ in 0..operations {
            match self.random.below(100) {
                0..=54 => self.alloc(),
                55..=79 => self.free(),
                80..=82 => self.free_inside(),
                83..=94 => self.free_after_work(),
                95 => self.trim(),
                _ => self.go_on(),
            }
        }
        if self.left == 0 {
            self.finish();
        }
        self.left > 0
    }

    /// Gives everything back.
    fn finish(&mut self) {
        while !self.late.is_empty() {
            self.go_on();
        }
        // Work on what the stream had again before it was done is in no list.
        self.stream.done.store(u64::MAX, Ordering::SeqCst);
        while !self.held.is_empty() {
            self.free();
        }
    }

    fn alloc(&mut self) {
        let random = &mut self.random;
        let bytes = if random.one_in(20) {
            1 + random.below(1 << 19)
        } else {
            1 + random.below(20_000)
        };
        let mut request = Request::new(bytes).align(1 << random.below(15));
        let is_ordered = random.one_in(6);
        if is_ordered {
            request = request.on(self.identity);
        }
        if random.one_in(8) {
            request = request.wait_until(Instant::now() + Duration::from_micros(200));
        }
        match self.allocator.alloc(request) {
            Ok(placed) => {
                if let Some(at) = self
                    .late
                    .iter()
                    .position(|(_, late)| late.address == placed.address)
                {
                    // The stream's own, again before its work is done.
                    assert!(is_ordered, "{placed:x?} may still be worked on");
                    let (_, late) = self.late.remove(at).expect("it is there");
                    self.checker.let_go(&late);
                }
                self.checker.take(&placed);
                self.held.push(placed);
            }
            Err(Error::OutOfMemory { .. }) => self.free(),
            Err(_) if self.is_hostile => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn free(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let placed = self.random.take_one(&mut self.held);
        self.checker.give(&placed);
        self.allocator.free(placed.address).expect("in use");
    }

    /// An address inside what is held is nobody's.
    fn free_inside(&mut self) {
        let Some(placed) = self.held.last().filter(|placed| placed.bytes > 1) else {
            return;
        };
        let inside = placed.address + 1 + self.random.below(placed.bytes - 1);
        let freed = self.allocator.free(inside);
        assert!(
            matches!(freed, Err(Error::Invalid { .. })),
            "{inside:x} in {placed:x?}: {freed:?}"
        );
    }

    fn free_after_work(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let placed = self.random.take_one(&mut self.held);
        self.checker.end(&placed);
        let (place, work) = self.stream.work(self.identity);
        if self.random.one_in(2) {
            self.allocator
                .free_after(placed.address, vec![work])
                .expect("in use");
        } else {
            self.allocator
                .record_work(placed.address, work)
                .expect("in use");
            self.allocator.free(placed.address).expect("in use");
        }
        self.late.push_back((place, placed));
    }

    fn trim(&mut self) {
        match self.allocator.trim() {
            Err(error) if !self.is_hostile => panic!("{error}"),
            _ => {}
        }
    }

    /// The stream goes on: first the bytes are let go of, then it says so.
    fn go_on(&mut self) {
        if let Some((place, placed)) = self.late.pop_front() {
            self.checker.let_go(&placed);
            self.stream.done.store(place, Ordering::SeqCst);
        }
    }
}

/// Does a stint of the worker that has waited longest, and has another thread go on.
fn thread<'scope, 'env>(
    scope: &'scope Scope<'scope, 'env>,
    waiting: &'env Mutex<VecDeque<Worker<'env>>>,
) {
    let next = waiting.lock().expect("no panic").pop_front();
    let Some(mut worker) = next else { return };
    if worker.stint() {
        waiting.lock().expect("no panic").push_back(worker);
    }
    scope.spawn(move || thread(scope, waiting));
}

/// Runs all seeds on allocators of one kind, by default with this many operations each.
fn check(kind: &str, operations: u64, make: impl Fn(u64) -> Subject) {
    let operations = std::env::var("GPU_IPC_OPERATIONS")
        .map_or(operations, |value| value.parse().expect("a number"));
    for seed in SEEDS {
        let subject = make(seed);
        let checker = Checker::default();
        let worker = |own| Worker {
            allocator: &*subject.allocator,
            is_hostile: subject.is_hostile,
            checker: &checker,
            left: operations / WORKERS,
            random: Random::new(seed * WORKERS + own),
            identity: StreamIdentity(own + 1),
            stream: Arc::default(),
            held: Vec::new(),
            late: VecDeque::new(),
        };
        let waiting = Mutex::new((0..WORKERS).map(worker).collect());
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| thread(scope, &waiting));
            }
        });
        let Checker {
            taken,
            allocs,
            peak,
            ..
        } = checker;
        assert!(
            taken.into_inner().expect("no panic").is_empty(),
            "{kind}, seed {seed}"
        );
        let (allocs, peak) = (allocs.into_inner(), peak.into_inner());
        assert!(
            allocs > operations / 8,
            "{kind}, seed {seed}: {allocs} allocations of {operations}"
        );
        let stats = subject.allocator.stats();
        assert_eq!(
            (stats.num_allocs, stats.bytes_in_use),
            (allocs, 0),
            "{kind}, seed {seed}"
        );
        let peaks = peak..=LIMIT;
        assert!(
            peaks.contains(&stats.peak_bytes_in_use),
            "{kind}, seed {seed}: {peaks:?}, {stats:?}"
        );
        println!(
            "{kind}, seed {seed}: {operations} operations, {allocs} allocations, {peak} bytes at the peak"
        );
        let Subject {
            allocator, at_end, ..
        } = subject;
        drop(allocator);
        at_end();
    }
}

fn options(seed: u64) -> BfcOptions {
    let growth = [Growth::Fixed(256 << 10), Growth::DEFAULT, Growth::Whole][seed as usize % 3];
    BfcOptions::new("bfc")
        .limit(LIMIT)
        .growth(growth)
        .max_slack_share(seed as f64 / 8.0)
}

/// Asserts that nothing is left to an allocator after a trim; an upstream that keeps regions at
/// times is asked again.
fn has_nothing<U: SubAllocator>(bfc: &Bfc<U>) {
    for _ in 0..1000 {
        let _ = bfc.trim();
        if bfc.stats().bytes_reserved == 0 {
            break;
        }
    }
    assert_eq!(
        (bfc.stats().bytes_reserved, bfc.snapshot().pending_bytes),
        (0, 0)
    );
}

fn best_fit_over<U: SubAllocator>(
    seed: u64,
    upstream: U,
    at_end: impl FnOnce(&U) + 'static,
) -> Subject {
    let bfc = Arc::new(Bfc::new(options(seed), upstream));
    Subject::new(bfc.clone(), move || {
        has_nothing(&bfc);
        at_end(bfc.upstream());
    })
}

fn thread_heaps_over<U: SubAllocator>(
    seed: u64,
    upstream: U,
    at_end: impl FnOnce(&U) + 'static,
) -> Subject {
    // More heaps than threads, as many, and fewer.
    let count = NonZeroUsize::new([2, 4, 7][seed as usize % 3]).expect("some");
    let heaps = Arc::new(ThreadHeaps::new(options(seed), count, upstream));
    Subject::new(heaps.clone(), move || {
        for _ in 0..1000 {
            let _ = Allocator::trim(&*heaps);
            if heaps.stats().bytes_reserved == 0 {
                break;
            }
        }
        assert_eq!(heaps.stats().bytes_reserved, 0);
        assert_eq!(heaps.snapshot().expect("regions").pending_bytes, 0);
        at_end(heaps.upstream());
    })
}

fn pool_over<U: SubAllocator>(
    seed: u64,
    upstream: U,
    at_end: impl FnOnce(&U) + 'static,
) -> Subject {
    let bfc = Arc::new(Bfc::new(options(seed), upstream));
    let options = PoolOptions::new("pool")
        .buffers(64)
        .rounding(Rounding::PowerOfTwo)
        .auto_resize(seed.is_multiple_of(2));
    let pool = Arc::new(Pool::new(options, bfc.clone()).expect("a pool"));
    Subject::new(pool.clone(), move || {
        assert!(
            bfc.stats().num_allocs < pool.stats().num_allocs,
            "nothing was used again"
        );
        pool.clear().expect("what is kept is upstream's");
        assert_eq!(bfc.stats().bytes_in_use, 0);
        has_nothing(&bfc);
        at_end(bfc.upstream());
    })
}

fn simulated(seed: u64) -> Simulated {
    if seed.is_multiple_of(2) {
        Simulated::new()
    } else {
        Simulated::new().merging()
    }
}

fn is_empty(upstream: &Simulated) {
    assert_eq!(upstream.live_bytes(), 0);
}

fn device() -> Gpu {
    let config = HostConfig::default().bytes_per_device(LIMIT);
    Gpu::new(HostBackend::new(config).expect("it opens"), DeviceId(0)).expect("a device")
}

/// The driver's pool of a device that refuses each of some calls; 0 for none.
fn driver_pool_over(fails_each: usize) -> Subject {
    let fake = Fake::new(LIMIT);
    let pool = Arc::new(DriverPool::new("driver", fake.gpu(), u64::MAX).expect("a pool"));
    fake.state().fails_each = fails_each;
    Subject::new(pool.clone(), move || {
        fake.state().fails_each = 0;
        pool.trim().expect("the device takes it");
        assert_eq!((fake.live_bytes(), pool.leaked_bytes()), (0, 0));
        drop(pool);
        let state = fake.state();
        assert_eq!((state.pools, state.streams), (0, 0));
    })
}

#[test]
fn best_fit() {
    check("best fit", 5_000, |seed| {
        best_fit_over(seed, simulated(seed), is_empty)
    });
}

#[test]
fn best_fit_over_a_hostile_upstream() {
    check("best fit, hostile", 5_000, |seed| {
        best_fit_over(seed, Hostile::new(seed), Hostile::at_end).hostile()
    });
}

#[test]
fn best_fit_over_memory_that_grows_in_place() {
    let upstream = || GrowingMemory::new(device()).expect("memory");
    check("growing in place", 5_000, |seed| {
        best_fit_over(seed, upstream(), |_| ())
    });
}

#[test]
fn best_fit_over_managed_memory() {
    let upstream = || ManagedMemory::new(device()).expect("memory");
    check("managed", 5_000, |seed| {
        best_fit_over(seed, upstream(), |_| ())
    });
}

#[test]
fn a_heap_for_each_thread() {
    check("thread heaps", 5_000, |seed| {
        thread_heaps_over(seed, simulated(seed), is_empty)
    });
}

#[test]
fn a_heap_for_each_thread_over_a_hostile_upstream() {
    let make = |seed| thread_heaps_over(seed, Hostile::new(seed), Hostile::at_end).hostile();
    check("thread heaps, hostile", 5_000, make);
}

#[test]
fn a_heap_for_each_thread_over_memory_that_grows_in_place() {
    let upstream = || GrowingMemory::new(device()).expect("memory");
    check("thread heaps, growing in place", 5_000, |seed| {
        thread_heaps_over(seed, upstream(), |_| ())
    });
}

#[test]
fn pool() {
    check("pool", 5_000, |seed| {
        pool_over(seed, simulated(seed), is_empty)
    });
}

#[test]
fn pool_over_a_hostile_upstream() {
    check("pool, hostile", 5_000, |seed| {
        pool_over(seed, Hostile::new(seed), Hostile::at_end).hostile()
    });
}

#[test]
fn the_drivers_pool() {
    check("driver's pool", 5_000, |_| driver_pool_over(0));
}

#[test]
fn the_drivers_pool_of_a_driver_that_fails() {
    check("driver's pool, hostile", 5_000, |seed| {
        driver_pool_over(41 + seed as usize).hostile()
    });
}

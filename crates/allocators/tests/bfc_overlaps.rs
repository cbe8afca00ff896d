//! Several threads on one allocator, with every way of allocating and freeing, and a checker of overlaps.
//!
//! `GPU_IPC_OPERATIONS` sets the operations of each seed; `ci/nightly` runs a million.

mod random;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use allocators::{Bfc, BfcOptions, Growth, Placed, Request, Simulated, SubAllocator, Work};
use gpu_api::{Error, StreamIdentity};
use random::Random;

const THREADS: u64 = 4;
const SEEDS: std::ops::Range<u64> = 0..6;
const LIMIT: u64 = 8 << 20;

/// Which bytes are somebody's: the end and the allocation's number, by the first byte.
#[derive(Default)]
struct Checker(Mutex<BTreeMap<u64, (u64, u64)>>);

impl Checker {
    fn taken(&self) -> MutexGuard<'_, BTreeMap<u64, (u64, u64)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, placed: &Placed) {
        let (start, end) = (placed.address, placed.address + placed.bytes);
        let mut taken = self.taken();
        let before = taken.range(..end).next_back().filter(|(_, (other, _))| *other > start);
        assert!(before.is_none(), "{placed:x?} overlaps {before:x?}");
        taken.insert(start, (end, placed.number));
    }

    fn give(&self, placed: &Placed) {
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
    fn work(self: &Arc<Stream>, identity: u64) -> Work {
        let place = self.queued.fetch_add(1, Ordering::SeqCst) + 1;
        let stream = self.clone();
        Work::on(StreamIdentity(identity), move || stream.done.load(Ordering::SeqCst) >= place)
    }
}

/// Works on one allocator with one thread's share of the operations.
fn work<U: SubAllocator>(bfc: &Bfc<U>, checker: &Checker, seed: u64, own: u64, operations: u64) {
    let mut random = Random::new(seed * THREADS + own);
    let mut held: Vec<Placed> = Vec::new();
    // What was given back after work: its bytes are this thread's until the stream says so.
    let mut late: VecDeque<(u64, Placed)> = VecDeque::new();
    let stream = Arc::new(Stream::default());
    for _ in 0..operations {
        match random.below(100) {
            0..=54 => {
                let bytes = if random.one_in(20) { 1 + random.below(1 << 19) } else { 1 + random.below(20_000) };
                let mut request = Request::new(bytes).align(1 << random.below(15));
                if random.one_in(8) {
                    request = request.wait_until(Instant::now() + Duration::from_micros(200));
                }
                match bfc.alloc(request) {
                    Ok(placed) => {
                        let placed = placed.untied();
                        checker.take(&placed);
                        held.push(placed);
                    }
                    Err(Error::OutOfMemory { .. }) if !held.is_empty() => {
                        let placed = random.take_one(&mut held);
                        checker.give(&placed);
                        bfc.free(placed.address).expect("in use");
                    }
                    Err(Error::OutOfMemory { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            55..=84 if !held.is_empty() => {
                let placed = random.take_one(&mut held);
                checker.give(&placed);
                bfc.free(placed.address).expect("in use");
            }
            85..=94 if !held.is_empty() => {
                let placed = random.take_one(&mut held);
                let work = stream.work(own + 1);
                let place = stream.queued.load(Ordering::SeqCst);
                if random.one_in(2) {
                    bfc.free_after_all(placed.address, vec![work]).expect("in use");
                } else {
                    bfc.record_work(placed.address, work).expect("in use");
                    bfc.free(placed.address).expect("in use");
                }
                late.push_back((place, placed));
            }
            95 => drop(bfc.trim().expect("upstream takes it")),
            _ => {
                // The stream goes on: first the bytes are let go of, then it says so.
                if let Some((place, placed)) = late.pop_front() {
                    checker.give(&placed);
                    stream.done.store(place, Ordering::SeqCst);
                }
            }
        }
    }
    for (place, placed) in late {
        checker.give(&placed);
        stream.done.store(place, Ordering::SeqCst);
    }
    for placed in held {
        checker.give(&placed);
        bfc.free(placed.address).expect("in use");
    }
}

#[test]
fn nothing_overlaps_and_nothing_is_lost() {
    let operations = std::env::var("GPU_IPC_OPERATIONS").map_or(20_000, |value| value.parse().expect("a number"));
    for seed in SEEDS {
        let growth = [Growth::Fixed(256 << 10), Growth::DEFAULT, Growth::Whole][seed as usize % 3];
        let options = BfcOptions::new("bfc").limit(LIMIT).growth(growth).max_slack_share(seed as f64 / 8.0);
        let upstream = if seed % 2 == 0 { Simulated::new() } else { Simulated::new().merging() };
        let bfc = Bfc::new(options, upstream);
        let checker = Checker::default();
        thread::scope(|scope| {
            for own in 0..THREADS {
                let (bfc, checker) = (&bfc, &checker);
                scope.spawn(move || work(bfc, checker, seed, own, operations / THREADS));
            }
        });
        bfc.settle();
        let stats = bfc.stats();
        assert_eq!((stats.bytes_in_use, bfc.snapshot().pending_bytes), (0, 0), "seed {seed}");
        assert!(stats.num_allocs > operations / 4, "seed {seed}: {} allocations of {operations}", stats.num_allocs);
        assert!(checker.taken().is_empty(), "seed {seed}");
        bfc.trim().expect("upstream takes it");
        assert_eq!((bfc.stats().bytes_reserved, bfc.upstream().live_bytes()), (0, 0), "seed {seed}");
    }
}

//! Several heaps for several threads: what they count, what they refuse, and how they share a
//! limit.

mod random;

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier, Mutex, RwLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use allocators::*;
use allocators::{Holder, Reclaim, Reclaimed};
use gpu_api::{Error, ParticipantId, StreamIdentity};
use proptest::prelude::*;
use random::Random;

const UNIT: u64 = 256;

fn heaps(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).expect("some")
}

/// Nothing is left unused in a chunk, so that two allocators count the same bytes wherever they
/// find them.
fn exact(limit: u64) -> BfcOptions {
    BfcOptions::new("heaps")
        .limit(limit)
        .max_slack_share(0.0)
        .growth(Growth::Fixed(64 * UNIT))
}

fn two_heaps(limit: u64) -> ThreadHeaps<Simulated> {
    ThreadHeaps::new(exact(limit), heaps(2), Simulated::new())
}

type Job<'a> = Box<dyn FnOnce() + Send + 'a>;

/// Threads that stay, each with a number of its own, and do what they are told one at a time.
struct Crew<'a> {
    crew: Vec<Sender<Job<'a>>>,
}

impl<'a> Crew<'a> {
    fn new<'scope>(scope: &'scope thread::Scope<'scope, 'a>, threads: usize) -> Crew<'a>
    where
        'a: 'scope,
    {
        let hire = |_| {
            let (sender, jobs) = channel::<Job<'a>>();
            scope.spawn(move || jobs.into_iter().for_each(|job| job()));
            sender
        };
        Crew {
            crew: (0..threads).map(hire).collect(),
        }
    }

    fn run<T: Send + 'a>(&self, thread: usize, work: impl FnOnce() -> T + Send + 'a) -> T {
        let (answer, answers) = channel();
        let job = move || answer.send(work()).expect("somebody waits");
        self.crew[thread]
            .send(Box::new(job))
            .expect("the thread is there");
        answers.recv().expect("it answers")
    }
}

fn counts(stats: AllocatorStats) -> [u64; 5] {
    let AllocatorStats {
        num_allocs,
        bytes_in_use,
        peak_bytes_in_use,
        peak_allocated_bytes,
        ..
    } = stats;
    [
        num_allocs,
        bytes_in_use,
        peak_bytes_in_use,
        peak_allocated_bytes,
        stats.largest_alloc_size,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Each step by one of three threads, on two heaps and on one `Bfc`.
    #[test]
    fn statistics_are_those_of_one_heap(steps in prop::collection::vec((0usize..3, 0u8..20, 1u64..40_000), 1..150)) {
        let (several, one) = (two_heaps(u64::MAX), Bfc::new(exact(u64::MAX), Simulated::new()));
        let several = &several;
        let compared = thread::scope(|scope| {
            let crew = Crew::new(scope, 3);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (thread, what, number) in steps {
                match what {
                    0 => {
                        crew.run(thread, || several.clear_stats());
                        one.clear_stats();
                    }
                    1 => prop_assert!(crew.run(thread, move || several.free(number * UNIT)).is_err()),
                    // A peak that went unseen shows only once less is in use.
                    2 => {
                        for (here, there) in held.drain(held.len() / 4..) {
                            prop_assert!(crew.run(thread, move || several.free(here)).is_ok());
                            prop_assert!(one.free(there).is_ok());
                        }
                        prop_assert_eq!(counts(several.stats()), counts(one.stats()));
                    }
                    3..=9 if !held.is_empty() => {
                        let (here, there) = held.swap_remove(number as usize % held.len());
                        prop_assert!(crew.run(thread, move || several.free(here)).is_ok());
                        prop_assert!(crew.run(number as usize % 3, move || several.free(here)).is_err(), "twice");
                        prop_assert!(one.free(there).is_ok());
                    }
                    _ => {
                        let here = crew.run(thread, move || several.alloc(Request::new(number))).expect("room");
                        let there = one.alloc(Request::new(number)).expect("room");
                        prop_assert_eq!((here.bytes, here.asked), (there.bytes, there.asked));
                        prop_assert_eq!(several.find(here.address + here.bytes - 1), Some(here));
                        held.push((here.address, there.address));
                    }
                }
                // To ask is to add the heaps up: what is only seen then would go unnoticed if it
                // were asked each time.
                if number % 16 == 0 {
                    prop_assert_eq!(counts(several.stats()), counts(one.stats()));
                }
            }
            prop_assert_eq!(counts(several.stats()), counts(one.stats()));
            Ok(())
        });
        compared?;
    }
}

/// The peak lies between what was surely in use at one time and what may have been.
#[test]
fn the_peak_of_threads_at_once_is_neither_too_low_nor_too_high() {
    #[derive(Default)]
    struct Sum(Mutex<(i64, i64)>);
    impl Sum {
        fn add(&self, bytes: i64) {
            let mut sum = self.0.lock().expect("no panic");
            sum.0 += bytes;
            sum.1 = sum.1.max(sum.0);
        }
        fn most(&self) -> u64 {
            self.0.lock().expect("no panic").1.cast_unsigned()
        }
    }
    for seed in 0..20 {
        let allocator = ThreadHeaps::new(exact(u64::MAX), heaps(3), Simulated::new());
        let (sure, possible) = (Sum::default(), Sum::default());
        let barrier = Barrier::new(3);
        thread::scope(|scope| {
            for own in 0..3 {
                let (allocator, sure, possible, barrier) = (&allocator, &sure, &possible, &barrier);
                scope.spawn(move || {
                    let mut random = Random::new(3 * seed + own);
                    let mut held: Vec<Placed> = Vec::new();
                    barrier.wait();
                    for _ in 0..1000 {
                        if held.len() > 8 || (!held.is_empty() && random.one_in(2)) {
                            let placed = random.take_one(&mut held);
                            sure.add(-placed.bytes.cast_signed());
                            allocator.free(placed.address).expect("in use");
                            possible.add(-placed.bytes.cast_signed());
                        } else {
                            let bytes = UNIT * (1 + random.below(64));
                            possible.add(bytes.cast_signed());
                            let placed = allocator.alloc(Request::new(bytes)).expect("room");
                            sure.add(placed.bytes.cast_signed());
                            held.push(placed);
                        }
                    }
                });
            }
        });
        let peak = allocator.stats().peak_bytes_in_use;
        assert!(
            (sure.most()..=possible.most()).contains(&peak),
            "{peak}: {} to {}",
            sure.most(),
            possible.most()
        );
    }
}

#[test]
fn threads_that_live_together_have_heaps_of_their_own() {
    let (allocator, stay) = (two_heaps(u64::MAX), RwLock::new(()));
    thread::scope(|scope| {
        let (here, stay) = (&allocator, &stay);
        let together = stay.write().expect("no panic");
        // Numbers of other tests' threads may lie between.
        for thread in 1.. {
            assert!(thread < 500, "all of them have one heap");
            scope.spawn(move || {
                here.alloc(Request::new(UNIT)).expect("room");
                drop(stay.read());
            });
            while here.stats().num_allocs < thread {
                thread::yield_now();
            }
            if here.snapshot().expect("regions").regions.len() == 2 {
                break;
            }
        }
        drop(together);
    });
}

#[test]
fn what_a_thread_leaves_behind_is_freed_by_others() {
    let allocator = two_heaps(64 * UNIT);
    for _ in 0..50 {
        let take = || allocator.alloc(Request::new(64 * UNIT)).expect("room");
        let placed = thread::scope(|scope| scope.spawn(take).join().expect("no panic"));
        allocator.free(placed.address).expect("in use");
    }
    assert_eq!(
        (allocator.stats().bytes_in_use, allocator.stats().num_allocs),
        (0, 50)
    );
}

#[test]
fn the_limit_is_that_of_all_heaps_and_all_of_it_is_anybodys() {
    let allocator = two_heaps(128 * UNIT);
    thread::scope(|scope| {
        let crew = Crew::new(scope, 2);
        let here = &allocator;
        let take = move || {
            here.alloc(Request::new(8 * UNIT))
                .map(|placed| placed.address)
        };
        let mut held: Vec<u64> = (0..16)
            .map(|at| crew.run(at % 2, take).expect("room"))
            .collect();
        for thread in 0..2 {
            let error = crew.run(thread, take).expect_err("all is in use");
            assert!(
                matches!(error, Error::OutOfMemory { free: 0, .. }),
                "{error}"
            );
            let text = error.to_string();
            assert!(
                text.contains("one of 2 heaps") && text.contains(&format!("in use {}", 128 * UNIT)),
                "{text}"
            );
        }
        // Of whichever heap: each thread finds it.
        for thread in [0, 1, 1, 0, 0, 1] {
            let address = held.remove(3);
            crew.run(1 - thread, move || here.free(address))
                .expect("in use");
            held.push(crew.run(thread, take).expect("room"));
        }
        assert_eq!(allocator.stats().bytes_reserved, 128 * UNIT);
        // Regions that one has no use for are room for a larger one of the other.
        for address in held {
            crew.run(0, move || here.free(address)).expect("in use");
        }
        crew.run(1, move || here.alloc(Request::new(128 * UNIT)))
            .expect("room");
    });
}

#[test]
fn the_whole_limit_is_dealt_out() {
    let options = BfcOptions::new("heaps")
        .limit(1 << 20)
        .growth(Growth::Whole);
    let allocator = ThreadHeaps::new(options, heaps(4), Simulated::new());
    allocator.alloc(Request::new(UNIT)).expect("room");
    assert_eq!(allocator.stats().bytes_reserved, 1 << 18);
    allocator
        .alloc(Request::new(600 << 10))
        .expect("more than a share is there");
    assert!(allocator.alloc(Request::new(600 << 10)).is_err());
}

#[test]
fn who_waits_hears_of_what_is_freed_in_another_heap() {
    let allocator = two_heaps(64 * UNIT);
    let held = allocator
        .alloc(Request::new(64 * UNIT))
        .expect("room")
        .address;
    thread::scope(|scope| {
        let wait = || {
            allocator
                .alloc(Request::new(UNIT).wait_until(Instant::now() + Duration::from_secs(600)))
        };
        let waiters: Vec<_> = (0..3).map(|_| scope.spawn(wait)).collect();
        while !allocator.is_wanted() {
            thread::yield_now();
        }
        allocator.free(held).expect("in use");
        for waiter in waiters {
            waiter.join().expect("no panic").expect("it is free");
        }
    });
}

#[test]
fn work_is_waited_for_whichever_heap_it_is_of() {
    let allocator = two_heaps(64 * UNIT);
    let done = Arc::new(AtomicBool::new(false));
    let work = || {
        let done = done.clone();
        Work::on(StreamIdentity(1), move || done.load(Ordering::SeqCst))
    };
    thread::scope(|scope| {
        let crew = Crew::new(scope, 2);
        let here = &allocator;
        let placed = crew
            .run(0, move || here.alloc(Request::new(64 * UNIT)))
            .expect("room");
        let noted = work();
        crew.run(1, move || here.record_work(placed.address, noted))
            .expect("in use");
        let last = work();
        crew.run(1, move || here.free_after(placed.address, vec![last]))
            .expect("in use");
        assert!(
            crew.run(1, move || here.free(placed.address)).is_err(),
            "twice"
        );
        assert!(
            crew.run(1, move || here.alloc(Request::new(UNIT))).is_err(),
            "it is worked on"
        );
        assert_eq!(here.snapshot().expect("regions").pending_bytes, 64 * UNIT);
        done.store(true, Ordering::SeqCst);
        crew.run(1, move || here.alloc(Request::new(64 * UNIT)))
            .expect("the work is done");
    });
}

#[test]
fn numbers_are_used_once_and_are_the_same_in_every_report() {
    let allocator = two_heaps(u64::MAX);
    thread::scope(|scope| {
        let crew = Crew::new(scope, 3);
        let here = &allocator;
        let held: Vec<Placed> = (0..30)
            .map(|at| {
                crew.run(at % 3, move || here.alloc(Request::new(UNIT)))
                    .expect("room")
            })
            .collect();
        let mut numbers: Vec<u64> = held.iter().map(|placed| placed.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 30);
        let snapshot = here.snapshot().expect("regions");
        assert!(snapshot.regions.is_sorted_by_key(|region| region.base));
        let chunks = snapshot.regions.iter().flat_map(|region| &region.chunks);
        let mut shown: Vec<u64> = chunks
            .map(|chunk| chunk.number)
            .filter(|&number| number > 0)
            .collect();
        shown.sort_unstable();
        assert_eq!(shown, numbers);
        assert!(
            held.iter()
                .all(|placed| here.get(placed.address) == Some(*placed))
        );
    });
}

/// A session that gives an allocation back at a `collect_all`, or at a later one once consumers
/// were asked.
#[derive(Debug, Default)]
struct Session {
    limbo: Mutex<Option<(Weak<ThreadHeaps<Simulated>>, u64)>>,
    /// How many looks it takes once consumers were asked; before that nothing comes back. At once
    /// for 0.
    slow: usize,
    collects: AtomicUsize,
    asks: AtomicUsize,
}

impl Reclaim for Session {
    fn collect_all(&self) -> Reclaimed {
        let asked = self.asks.load(Ordering::SeqCst) > 0;
        let looks = if asked || self.slow == 0 {
            self.collects.fetch_add(1, Ordering::SeqCst) + 1
        } else {
            0
        };
        if looks <= self.slow {
            return Reclaimed::default();
        }
        let Some((heaps, address)) = self.limbo.lock().expect("no panic").take() else {
            return Reclaimed::default();
        };
        let heaps = heaps.upgrade().expect("they ask");
        let bytes = heaps.get(address).expect("in use").bytes;
        heaps.free(address).expect("in use");
        Reclaimed { blocks: 1, bytes }
    }

    fn ask_to_unmap(&self) -> usize {
        self.asks.fetch_add(1, Ordering::SeqCst);
        usize::from(self.slow > 0)
    }

    fn holders(&self) -> Vec<Holder> {
        vec![Holder {
            participant: ParticipantId(7),
            pid: 4711,
            command: "trainer".into(),
            leases: 1,
            bytes: 64 * UNIT,
            mappings: 0,
            oldest: Duration::from_millis(1500),
            dying: false,
        }]
    }

    fn limbo_bytes(&self) -> u64 {
        64 * UNIT
    }
}

/// Two heaps of two regions, the first of which is in a session's limbo.
fn with_session(
    limit: u64,
    slow: usize,
    patience: Duration,
) -> (Arc<ThreadHeaps<Simulated>>, Arc<Session>) {
    let (relief, session) = (
        Arc::new(Relief::new()),
        Arc::new(Session {
            slow,
            ..Session::default()
        }),
    );
    let weak: Weak<dyn Reclaim> = Arc::<Session>::downgrade(&session);
    relief.register(weak);
    let heaps = Arc::new(two_heaps(limit).relief(relief, patience));
    let placed = heaps.alloc(Request::new(64 * UNIT)).expect("room");
    session.collects.store(0, Ordering::SeqCst);
    *session.limbo.lock().expect("no panic") = Some((Arc::downgrade(&heaps), placed.address));
    (heaps, session)
}

#[test]
fn limbo_is_collected_before_they_grow() {
    for thread in 0..2 {
        let (heaps, session) = with_session(128 * UNIT, 0, Duration::ZERO);
        let here = &*heaps;
        thread::scope(|scope| {
            // Of whichever heap it is.
            let crew = Crew::new(scope, 2);
            crew.run(thread, move || here.alloc(Request::new(64 * UNIT)))
                .expect("it came out of limbo");
        });
        assert_eq!(
            (
                heaps.stats().bytes_reserved,
                session.asks.load(Ordering::SeqCst)
            ),
            (64 * UNIT, 0)
        );
    }
}

#[test]
fn consumers_are_asked_when_nothing_is_left_and_waited_for() {
    let (heaps, session) = with_session(64 * UNIT, 3, Duration::from_secs(600));
    heaps
        .alloc(Request::new(64 * UNIT))
        .expect("they unmapped it");
    assert!(session.asks.load(Ordering::SeqCst) > 0);
    // Who would get nothing by it bothers nobody.
    let (heaps, session) = with_session(64 * UNIT, 3, Duration::from_secs(600));
    let error = heaps
        .alloc(Request::new(65 * UNIT))
        .expect_err("above the limit");
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    assert_eq!(session.asks.load(Ordering::SeqCst), 0);
}

#[test]
fn the_error_names_who_holds_the_memory() {
    let (heaps, session) = with_session(64 * UNIT, usize::MAX, Duration::ZERO);
    let text = heaps
        .alloc(Request::new(UNIT))
        .expect_err("all is in use")
        .to_string();
    for part in [
        "one of 2 heaps",
        "in limbo 16 KiB",
        "process 4711 (trainer) holds 16 KiB in 1 leases",
    ] {
        assert!(text.contains(part), "{part}\nnot in\n{text}");
    }
    let snapshot = heaps.snapshot().expect("regions");
    assert_eq!(
        (snapshot.limbo_bytes, snapshot.holders[0].pid),
        (64 * UNIT, 4711)
    );
    assert_eq!(session.asks.load(Ordering::SeqCst), 1);
}

#[test]
fn a_scope_counts_what_all_threads_do() {
    let allocator = &two_heaps(64 << 20);
    thread::scope(|scope| {
        let crew = Crew::new(scope, 2);
        let alloc = |thread, units| {
            crew.run(thread, move || {
                allocator
                    .alloc(Request::new(units * UNIT))
                    .expect("room")
                    .address
            })
        };
        let before = alloc(0, 3);
        let outer = allocator.scope();
        let here = alloc(0, 2);
        let inner = allocator.scope();
        alloc(1, 5);
        // Of the other thread's heap, and of the time before.
        crew.run(1, move || {
            [here, before].map(|address| allocator.free(address).expect("in use"))
        });
        let counted = inner.finish();
        assert_eq!(
            (counted.allocs, counted.frees, counted.total_bytes),
            (1, 2, 5 * UNIT)
        );
        assert_eq!((counted.bytes, counted.peak_bytes), (0, 5 * UNIT as i64));
        let counted = outer.finish();
        assert_eq!(
            (counted.allocs, counted.frees, counted.total_bytes),
            (2, 2, 7 * UNIT)
        );
        assert_eq!(
            (counted.bytes, counted.peak_bytes),
            (2 * UNIT as i64, 7 * UNIT as i64)
        );
    });
}

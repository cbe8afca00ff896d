//! Who gets room, and when: growth beside others, waiting beside many, limits that are shared.

mod fake;
mod random;

use std::process;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use allocators::*;
use fake::Fake;
use gpu_api::Error;
use random::Random;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const WATCHDOG: Duration = Duration::from_secs(120);

/// Ends the process when a test has not ended in time: a thread that waits for ever cannot be
/// joined.
fn watched(test: impl FnOnce()) {
    let (done, ended) = mpsc::channel::<()>();
    thread::spawn(move || {
        if ended.recv_timeout(WATCHDOG) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("no end within {WATCHDOG:?}");
            process::abort();
        }
    });
    test();
    drop(done);
}

fn patient(bytes: u64) -> Request {
    Request::new(bytes).wait_until(Instant::now() + 2 * WATCHDOG)
}

/// Waits until a request waits.
fn until_wanted(allocator: &dyn Allocator) {
    while !allocator.is_wanted() {
        thread::yield_now();
    }
}

#[test]
fn growth_starts_anew_at_a_trim() {
    let bfc = Bfc::new(BfcOptions::new("bfc"), Simulated::new());
    let held: Vec<u64> = (0..8)
        .map(|_| bfc.alloc(Request::new(4 * GIB)).expect("room").address)
        .collect();
    held.into_iter()
        .for_each(|address| bfc.free(address).expect("in use"));
    assert!(bfc.trim().expect("upstream takes it") >= 32 * GIB);
    bfc.alloc(Request::new(256)).expect("room");
    assert_eq!(bfc.stats().bytes_reserved, 2 * MIB);
}

#[test]
fn a_small_request_leaves_a_shared_budget_to_others() {
    let fake = Fake::new(GIB);
    let budget = Arc::new(Budget::new(64 * MIB));
    let memory = || {
        DeviceMemory::new(fake.gpu())
            .expect("memory")
            .budget(budget.clone())
    };
    let bfc = Bfc::new(BfcOptions::new("bfc"), memory());
    let held: Vec<u64> = (0..30)
        .map(|_| bfc.alloc(Request::new(2 * MIB)).expect("room").address)
        .collect();
    held.into_iter()
        .for_each(|address| bfc.free(address).expect("in use"));
    bfc.trim().expect("the driver takes it");
    bfc.alloc(Request::new(256)).expect("room");
    let other = Bfc::new(BfcOptions::new("other"), memory());
    other
        .alloc(Request::new(MIB))
        .expect("most of the budget is free");
}

#[test]
fn everything_at_once_without_a_limit_takes_what_there_is() {
    let bfc = Bfc::new(
        BfcOptions::new("bfc").growth(Growth::Whole),
        Simulated::new().capacity(GIB),
    );
    bfc.alloc(Request::new(1)).expect("room");
    assert_eq!(bfc.stats().bytes_reserved, GIB);
    let endless = Bfc::new(
        BfcOptions::new("bfc").growth(Growth::Whole),
        Simulated::new(),
    );
    endless.alloc(Request::new(1)).expect("room");
    let beside = Simulated::new();
    beside.alloc(1 << 55, 1).expect("addresses");
    assert!(
        matches!(beside.alloc(1 << 55, 1), Err(Error::OutOfMemory { .. })),
        "addresses end"
    );
}

#[test]
fn nobody_takes_the_region_that_another_grew() {
    // Every region holds one block, so the others can take the bytes of a thread that grows.
    let bfc = Bfc::new(
        BfcOptions::new("bfc").growth(Growth::Fixed(64 * KIB)),
        Simulated::new().gap(256),
    );
    thread::scope(|scope| {
        for seed in 0..4 {
            let bfc = &bfc;
            scope.spawn(move || {
                let mut random = Random::new(seed);
                for _ in 0..5_000 {
                    let placed = bfc
                        .alloc(Request::new(1 + random.below(60 * KIB)))
                        .expect("there is no limit");
                    if random.one_in(50) {
                        bfc.trim().expect("upstream takes it");
                    }
                    bfc.free(placed.address).expect("in use");
                }
            });
        }
    });
    assert_eq!(bfc.stats().bytes_in_use, 0);
}

#[test]
fn bytes_that_others_give_back_to_a_budget_wake_who_waits() {
    watched(|| {
        let fake = Fake::new(GIB);
        let budget = Arc::new(Budget::new(2 * MIB));
        let make = || {
            let memory = DeviceMemory::new(fake.gpu())
                .expect("memory")
                .budget(budget.clone());
            Arc::new(Bfc::new(
                BfcOptions::new("bfc").growth(Growth::Fixed(2 * MIB)),
                memory,
            ))
        };
        for _ in 0..200 {
            let (one, other) = (make(), make());
            let held = one.alloc(Request::new(2 * MIB)).expect("room").address;
            let waiter = thread::spawn({
                let other = other.clone();
                move || {
                    other
                        .alloc(patient(2 * MIB))
                        .map(|placed: Placed| placed.address)
                }
            });
            until_wanted(&*other);
            one.free(held).expect("in use");
            one.trim().expect("the driver takes it");
            let address = waiter
                .join()
                .expect("no panic")
                .expect("the budget has room");
            other.free(address).expect("in use");
        }
    });
}

#[test]
fn there_is_a_last_try_at_the_deadline() {
    watched(|| {
        // Nobody tells of what an upstream gets back from elsewhere, and the deadline comes before
        // it is asked again.
        let fake = Fake::new(2 * MIB);
        let make = || {
            Bfc::new(
                BfcOptions::new("bfc"),
                DeviceMemory::new(fake.gpu()).expect("memory"),
            )
        };
        let (one, other) = (make(), make());
        let held = one.alloc(Request::new(MIB)).expect("room").address;
        let deadline = Instant::now() + Duration::from_millis(8);
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let first = other.alloc(Request::new(MIB).wait_until(deadline));
                // On a machine under load the region may have gone back too late.
                first.or_else(|_| other.alloc(patient(MIB)))
            });
            until_wanted(&other);
            one.free(held).expect("in use");
            one.trim().expect("the driver takes it");
            waiter
                .join()
                .expect("no panic")
                .expect("the device has room");
        });
    });
}

#[test]
fn no_buffer_is_kept_from_who_waits_at_another_pool() {
    watched(|| {
        for limited in [false, true] {
            let upstream: Arc<dyn Allocator> = if limited {
                let cpu = Bfc::new(BfcOptions::new("cpu"), Simulated::new());
                Arc::new(Limit::new(cpu, Arc::new(Budget::new(MIB))))
            } else {
                Arc::new(Bfc::new(
                    BfcOptions::new("bfc").limit(MIB),
                    Simulated::new(),
                ))
            };
            let [one, other] = [(); 2]
                .map(|()| Pool::new(PoolOptions::new("pool"), upstream.clone()).expect("a pool"));
            // What it kept from before goes back before anybody waits.
            let kept = one.alloc(Request::new(MIB)).expect("room").address;
            one.free(kept).expect("in use");
            assert_eq!(one.stats().pool_bytes, Some(MIB));
            let held = other
                .alloc(patient(MIB / 2))
                .expect("the other pool keeps what is wanted")
                .address;
            let rest = one.alloc(Request::new(MIB / 4)).expect("room").address;
            thread::scope(|scope| {
                let waiter = scope.spawn(|| other.alloc(patient(3 * MIB / 4)));
                until_wanted(&*upstream);
                // What is given back meanwhile goes through.
                one.free(rest).expect("in use");
                other.free(held).expect("in use");
                waiter
                    .join()
                    .expect("no panic")
                    .expect("all of it was given back");
            });
        }
    });
}

#[test]
fn a_large_request_is_not_starved_by_small_ones() {
    watched(|| {
        // Of 256 blocks 220 are exchanged without end, and those above are free but for a few, so
        // that no 16 of them lie side by side. The large request needs 16 of the lower ones, of
        // which two are free at one time.
        const BLOCK: u64 = 4 * KIB;
        let bfc = Bfc::new(
            BfcOptions::new("bfc")
                .limit(256 * BLOCK)
                .growth(Growth::Whole),
            Simulated::new(),
        );
        let mut all: Vec<u64> = (0..256)
            .map(|_| bfc.alloc(Request::new(BLOCK)).expect("room").address)
            .collect();
        let (kept, free): (Vec<_>, Vec<_>) = all
            .split_off(220)
            .into_iter()
            .enumerate()
            .partition(|(at, _)| at % 12 == 0 || *at == 35);
        free.into_iter()
            .for_each(|(_, address)| bfc.free(address).expect("in use"));
        let stop = AtomicBool::new(false);
        let turns = AtomicU64::new(0);
        thread::scope(|scope| {
            for (seed, held) in all.chunks(110).map(<[u64]>::to_vec).enumerate() {
                let (bfc, stop, turns) = (&bfc, &stop, &turns);
                scope.spawn(move || {
                    let (mut random, mut held) = (Random::new(seed as u64), held);
                    while !stop.load(Ordering::SeqCst) {
                        bfc.free(random.take_one(&mut held)).expect("in use");
                        held.push(bfc.alloc(patient(BLOCK)).expect("room").address);
                        turns.fetch_add(1, Ordering::SeqCst);
                    }
                    held.into_iter()
                        .for_each(|address| bfc.free(address).expect("in use"));
                });
            }
            while turns.load(Ordering::SeqCst) < 1_000 {
                thread::yield_now();
            }
            let large = bfc.alloc(patient(16 * BLOCK));
            stop.store(true, Ordering::SeqCst);
            bfc.free(large.expect("pieces are kept together for it").address)
                .expect("in use");
        });
        kept.into_iter()
            .for_each(|(_, address)| bfc.free(address).expect("in use"));
        assert_eq!(bfc.stats().bytes_in_use, 0);
        assert_eq!(
            bfc.snapshot().chunks().count(),
            1,
            "nothing is withheld from anybody"
        );
    });
}

#[test]
fn who_holds_and_waits_goes_on_beside_a_large_request_that_cannot_have_it() {
    watched(|| {
        // The small one holds more than the large one leaves, and wants another before it gives any
        // back: what is withheld for the large one would let both wait for ever.
        let bfc = Bfc::new(
            BfcOptions::new("bfc").limit(MIB).growth(Growth::Whole),
            Simulated::new(),
        );
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = Random::new(1);
                let mut held: Vec<u64> = Vec::new();
                let mut turns = 0;
                while turns < 300 {
                    held.push(bfc.alloc(patient(16 * KIB)).expect("room").address);
                    if held.len() == 60 {
                        bfc.free(random.take_one(&mut held)).expect("in use");
                        turns += 1;
                    }
                }
                held.into_iter()
                    .for_each(|address| bfc.free(address).expect("in use"));
            });
            let half = bfc
                .alloc(patient(MIB / 2))
                .expect("in the end all of it is free");
            bfc.free(half.address).expect("in use");
        });
        assert_eq!(bfc.stats().bytes_in_use, 0);
    });
}

#[test]
fn what_is_withheld_goes_to_who_would_fail_for_it() {
    watched(|| {
        let bfc = Bfc::new(
            BfcOptions::new("bfc").limit(MIB).growth(Growth::Whole),
            Simulated::new(),
        );
        let mut held: Vec<u64> = (0..16)
            .map(|_| bfc.alloc(Request::new(MIB / 16)).expect("room").address)
            .collect();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| bfc.alloc(patient(MIB)));
            until_wanted(&bfc);
            // All but one come back: by then everything that is free is withheld.
            let last = held.pop().expect("there are 16");
            for address in held {
                bfc.free(address).expect("in use");
                thread::yield_now();
            }
            let small = bfc
                .alloc(Request::new(256))
                .expect("the first windows are broken for who may not wait");
            bfc.free(small.address).expect("in use");
            bfc.free(last).expect("in use");
            let whole = waiter.join().expect("no panic").expect("all of it is free");
            bfc.free(whole.address).expect("in use");
        });
        assert_eq!(bfc.snapshot().chunks().count(), 1);
    });
}

#[test]
fn a_large_request_is_not_starved_by_small_ones_that_do_not_wait() {
    watched(|| {
        // Each small block is taken again as soon as it is given back, by who does not wait: at no
        // time are half of them free, unless they are kept together.
        let bfc = Bfc::new(
            BfcOptions::new("bfc").limit(8 * MIB).growth(Growth::Whole),
            Simulated::new(),
        );
        let mut held: Vec<Option<u64>> = (0..8)
            .map(|_| Some(bfc.alloc(Request::new(MIB)).expect("room").address))
            .collect();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| bfc.alloc(patient(4 * MIB)));
            until_wanted(&bfc);
            for turn in 0.. {
                if waiter.is_finished() {
                    break;
                }
                let at = turn % held.len();
                if let Some(address) = held[at].take() {
                    bfc.free(address).expect("in use");
                }
                held[at] = match bfc.alloc(Request::new(MIB)) {
                    Ok(placed) => Some(placed.address),
                    Err(Error::OutOfMemory { .. }) => None,
                    Err(error) => panic!("{error}"),
                };
                thread::yield_now();
            }
            let large = waiter.join().expect("no panic").expect("it had its turn");
            bfc.free(large.address).expect("in use");
        });
        held.into_iter()
            .flatten()
            .for_each(|address| bfc.free(address).expect("in use"));
        assert_eq!(bfc.stats().bytes_in_use, 0);
        assert_eq!(bfc.snapshot().chunks().count(), 1);
    });
}

#[test]
fn what_no_chunk_could_hold_is_told_how_much_is_free() {
    let bfc = Bfc::new(
        BfcOptions::new("bfc").growth(Growth::Fixed(MIB)),
        Simulated::new(),
    );
    bfc.alloc(Request::new(MIB / 4)).expect("room");
    for bytes in [1 << 40, 1 << 60, u64::MAX] {
        let error = bfc
            .alloc(Request::new(bytes))
            .expect_err("no chunk is so large");
        let Error::OutOfMemory { asked, free, .. } = error else {
            panic!("{error}");
        };
        assert_eq!((asked, free), (bytes, 3 * MIB / 4));
    }
}

#[test]
fn who_waits_asks_upstream_only_when_it_may_have_room() {
    watched(|| {
        const BLOCKS: u64 = 512;
        let bfc = Bfc::new(
            BfcOptions::new("bfc").growth(Growth::Fixed(64 * KIB)),
            Simulated::new().capacity(BLOCKS * 4 * KIB),
        );
        let held: Vec<u64> = (0..BLOCKS)
            .map(|_| bfc.alloc(Request::new(4 * KIB)).expect("room").address)
            .collect();
        let began = Instant::now();
        let calls = thread::scope(|scope| {
            let waiters = [(); 4].map(|()| {
                scope.spawn(|| {
                    let whole = bfc
                        .alloc(patient(BLOCKS * 4 * KIB))
                        .expect("all of it comes back");
                    bfc.free(whole.address).expect("in use");
                })
            });
            until_wanted(&bfc);
            let before = bfc.upstream().calls();
            for address in held {
                bfc.free(address).expect("in use");
                thread::yield_now();
            }
            waiters
                .into_iter()
                .for_each(|waiter| waiter.join().expect("no panic"));
            bfc.upstream().calls() - before
        });
        // Two for each region that goes back, of which there are 32, and as many for each time that
        // upstream is asked again in case others gave it something.
        let again = began.elapsed().as_millis() as u64 / 10 + 1;
        assert!(
            calls <= 4 * (2 * 32 + 2 * again),
            "{calls} calls for {BLOCKS} frees"
        );
    });
}

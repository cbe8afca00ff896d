//! Waiting for memory that another thread frees, and memory that a stream still works on.

mod random;

use std::process;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use allocators::{Bfc, BfcOptions, Extent, Growth, Placed, Request, Simulated, SubAllocator};
use gpu_api::{Error, StreamIdentity};
use random::Random;

const WATCHDOG: Duration = Duration::from_secs(60);

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

fn room_for(blocks: u64) -> Arc<Bfc<Simulated>> {
    Arc::new(Bfc::new(
        BfcOptions::new("bfc").limit(blocks << 20),
        Simulated::new(),
    ))
}

fn patient() -> Request {
    patient_for(1 << 20)
}

fn patient_for(bytes: u64) -> Request {
    Request::new(bytes).wait_until(Instant::now() + 2 * WATCHDOG)
}

#[test]
fn retry_success_with_three_users_and_room_for_two() {
    watched(|| {
        let bfc = room_for(2);
        let most = Arc::new(AtomicU64::new(0));
        let users: Vec<_> = (0..3)
            .map(|_| {
                let (bfc, most) = (bfc.clone(), most.clone());
                thread::spawn(move || {
                    for _ in 0..2000 {
                        let placed = bfc
                            .alloc(patient())
                            .expect("the other two give theirs back");
                        most.fetch_max(bfc.stats().bytes_in_use, Ordering::SeqCst);
                        bfc.free(placed.address).expect("in use");
                    }
                })
            })
            .collect();
        users
            .into_iter()
            .for_each(|user| user.join().expect("no panic"));
        assert!(most.load(Ordering::SeqCst) <= 2 << 20);
        assert_eq!(
            (bfc.stats().bytes_in_use, bfc.stats().num_allocs),
            (0, 6000)
        );
    });
}

#[test]
fn no_retry_fail() {
    let bfc = room_for(2);
    let held = [(); 2].map(|()| bfc.alloc(Request::new(1 << 20)).expect("room"));
    assert!(matches!(
        bfc.alloc(Request::new(1 << 20)),
        Err(Error::OutOfMemory { .. })
    ));
    held.into_iter()
        .for_each(|placed| bfc.free(placed.address).expect("in use"));
}

#[test]
fn retry_insufficient_fail() {
    watched(|| {
        // Everyone holds and waits: only the deadline ends that.
        let bfc = room_for(2);
        let held = [(); 2].map(|()| bfc.alloc(Request::new(1 << 20)).expect("room"));
        let deadline = Instant::now() + Duration::from_millis(20);
        let error = bfc
            .alloc(Request::new(1 << 20).wait_until(deadline))
            .expect_err("nobody frees");
        assert!(matches!(error, Error::OutOfMemory { .. }));
        assert!(Instant::now() >= deadline, "it did wait");
        held.into_iter()
            .for_each(|placed| bfc.free(placed.address).expect("in use"));
    });
}

#[test]
fn everyone_who_holds_some_and_waits_for_more_fails_in_the_end() {
    watched(|| {
        // Of three blocks each of three threads holds one and waits for another: only a deadline
        // ends that, and what is given back then is enough for the others.
        let bfc = room_for(3);
        let all_hold = Barrier::new(3);
        let user = || {
            let held = bfc.alloc(Request::new(1 << 20)).expect("room").address;
            all_hold.wait();
            let more = bfc.alloc(
                Request::new(1 << 20).wait_until(Instant::now() + Duration::from_millis(20)),
            );
            bfc.free(held).expect("in use");
            match more {
                Ok(placed) => bfc.free(placed.address).map(|()| false).expect("in use"),
                Err(Error::OutOfMemory { .. }) => true,
                Err(error) => panic!("{error}"),
            }
        };
        let failed: Vec<bool> = thread::scope(|scope| {
            let users = [(); 3].map(|()| scope.spawn(user));
            users
                .into_iter()
                .map(|user| user.join().expect("no panic"))
                .collect()
        });
        assert!(failed.contains(&true));
        assert_eq!(bfc.stats().bytes_in_use, 0);
    });
}

#[test]
fn what_could_never_fit_is_not_waited_for() {
    watched(|| {
        let bfc = room_for(2);
        assert!(matches!(
            bfc.alloc(patient_for(2 << 20 | 1)),
            Err(Error::OutOfMemory { .. })
        ));
        bfc.alloc(patient_for(2 << 20)).expect("just the limit");
    });
}

/// Lets one thread wait for memory while another gives it back, as often as it takes to have both
/// happen at once. What is given back is given back once: a wake-up that got lost is not made up
/// for by the next.
fn race(mut round: impl FnMut() -> (Arc<Bfc<Simulated>>, u64, Box<dyn FnOnce()>)) {
    watched(|| {
        for turn in 0..1500u32 {
            let (bfc, bytes, give) = round();
            let waiter = thread::spawn({
                let bfc = bfc.clone();
                move || bfc.alloc(patient_for(bytes))
            });
            (0..turn % 150 * 40).for_each(|_| std::hint::spin_loop());
            give();
            waiter.join().expect("no panic").expect("it was given back");
        }
    });
}

#[test]
fn no_free_goes_unnoticed() {
    race(|| {
        let bfc = room_for(1);
        let held = bfc.alloc(Request::new(1 << 20)).expect("room").address;
        let free = bfc.clone();
        (
            bfc,
            1 << 20,
            Box::new(move || free.free(held).expect("in use")),
        )
    });
}

#[test]
fn no_trim_goes_unnoticed() {
    race(|| {
        let options = BfcOptions::new("bfc")
            .limit(2 << 20)
            .growth(Growth::Fixed(1 << 20))
            .collect_regions(false);
        let bfc = Arc::new(Bfc::new(options, Simulated::new()));
        let held = [(); 2].map(|()| bfc.alloc(Request::new(1 << 20)).expect("room"));
        held.into_iter()
            .for_each(|placed| bfc.free(placed.address).expect("in use"));
        // Neither region is large enough, and there is no room for a third.
        let trim = bfc.clone();
        (
            bfc,
            2 << 20,
            Box::new(move || assert_eq!(trim.trim().expect("upstream takes it"), 2 << 20)),
        )
    });
}

#[test]
fn no_end_of_work_goes_unnoticed() {
    race(|| {
        let bfc = room_for(1);
        let held = bfc.alloc(Request::new(1 << 20)).expect("room").address;
        let done = Arc::new(AtomicBool::new(false));
        let end = done.clone();
        bfc.free_after(held, StreamIdentity(1), move || done.load(Ordering::SeqCst))
            .expect("in use");
        // Nobody says so: who waits has to ask.
        (
            bfc,
            1 << 20,
            Box::new(move || end.store(true, Ordering::SeqCst)),
        )
    });
}

/// An upstream that takes as long as it is told to.
#[derive(Debug)]
struct Slow {
    inner: Simulated,
    calls: mpsc::Sender<()>,
    may_go_on: Mutex<mpsc::Receiver<()>>,
}

// SAFETY: as `Simulated`, which makes the extents.
unsafe impl SubAllocator for Slow {
    type Token = ();

    fn alloc(&self, len: u64, align: u64) -> gpu_api::Result<(Extent, ())> {
        self.calls.send(()).expect("the test listens");
        self.may_go_on
            .lock()
            .expect("no panic")
            .recv()
            .expect("the test says so");
        self.inner.alloc(len, align)
    }

    fn free(&self, extent: Extent, (): ()) -> gpu_api::Result<()> {
        self.inner.free(extent, ())
    }
}

#[test]
fn a_call_of_upstream_holds_up_nobody_who_needs_none() {
    watched(|| {
        let (calls, called) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel();
        let slow = Slow {
            inner: Simulated::new(),
            calls,
            may_go_on: Mutex::new(may_go_on),
        };
        let bfc = Arc::new(Bfc::new(
            BfcOptions::new("bfc").growth(Growth::Fixed(1 << 20)),
            slow,
        ));
        go_on.send(()).expect("it listens");
        let held = bfc.alloc(Request::new(1 << 10)).expect("room").address;
        called.recv().expect("the first region");
        let grows = thread::spawn({
            let bfc = bfc.clone();
            move || {
                bfc.alloc(Request::new(1 << 20))
                    .map(|placed: Placed| placed.address)
            }
        });
        called.recv().expect("it is upstream");
        bfc.free(held).expect("in use");
        bfc.alloc(Request::new(1 << 10))
            .expect("room in the first region");
        assert_eq!(bfc.snapshot().regions.len(), 1);
        go_on.send(()).expect("it listens");
        grows.join().expect("no panic").expect("upstream has room");
        assert_eq!(bfc.snapshot().regions.len(), 2);
    });
}

#[test]
fn what_stands_for_finished_work_is_not_kept_while_there_is_room() {
    // A loop that never runs out of memory: its stream takes its own block again each time.
    let bfc = room_for(2);
    let kept = Arc::new(());
    for _ in 0..10_000 {
        let placed = bfc
            .alloc(Request::new(1 << 20).on(StreamIdentity(1)))
            .expect("room");
        let event = kept.clone();
        let is_done = move || Arc::strong_count(&event) > 0;
        bfc.free_after(placed.address, StreamIdentity(1), is_done)
            .expect("in use");
        assert!(
            Arc::strong_count(&kept) <= 1 + 64,
            "{} events",
            Arc::strong_count(&kept) - 1
        );
    }
}

#[test]
fn a_waiter_finds_out_that_pending_work_has_finished() {
    watched(|| {
        let bfc = room_for(1);
        let done = Arc::new(AtomicBool::new(false));
        let placed = bfc.alloc(Request::new(1 << 20)).expect("room");
        let is_done = done.clone();
        bfc.free_after(placed.address, StreamIdentity(1), move || {
            is_done.load(Ordering::SeqCst)
        })
        .expect("in use");
        assert!(bfc.alloc(Request::new(1 << 20)).is_err(), "still worked on");
        let waiter = thread::spawn({
            let bfc = bfc.clone();
            move || bfc.alloc(patient())
        });
        done.store(true, Ordering::SeqCst);
        assert_eq!(
            waiter
                .join()
                .expect("no panic")
                .expect("the work is done")
                .address,
            placed.address
        );
    });
}

#[test]
fn a_stream_takes_its_own_memory_again_at_once() {
    let bfc = room_for(2);
    let (own, other) = (StreamIdentity(1), StreamIdentity(2));
    let placed = bfc.alloc(Request::new(1 << 20).on(own)).expect("room");
    bfc.alloc(Request::new(1 << 20)).expect("room");
    let done = Arc::new(AtomicBool::new(false));
    let is_done = done.clone();
    bfc.free_after(placed.address, own, move || is_done.load(Ordering::SeqCst))
        .expect("in use");
    assert_eq!(bfc.snapshot().pending_bytes, 1 << 20);
    assert!(
        bfc.alloc(Request::new(1 << 20).on(other)).is_err(),
        "another stream is not ordered behind it"
    );
    let again = bfc.alloc(Request::new(1 << 20).on(own)).expect("its own");
    assert_eq!(again.address, placed.address);
    assert_ne!(again.number, placed.number);
    bfc.free(again.address).expect("in use");
    assert!(
        bfc.alloc(Request::new(1 << 20).on(other)).is_err(),
        "the old work is not done by that"
    );
    done.store(true, Ordering::SeqCst);
    bfc.alloc(Request::new(1 << 20).on(other)).expect("free");
}

#[test]
fn work_is_asked_for_with_no_lock_held() {
    let bfc = room_for(1);
    let placed = bfc.alloc(Request::new(1)).expect("room");
    let inner = Arc::downgrade(&bfc);
    let asks_back = move || {
        inner
            .upgrade()
            .is_none_or(|bfc| bfc.stats().bytes_in_use == 0)
    };
    bfc.free_after(placed.address, StreamIdentity(1), asks_back)
        .expect("in use");
    assert_eq!(bfc.settle(), 256);
}

#[test]
fn what_stands_for_work_is_dropped_with_no_lock_held() {
    watched(|| {
        struct AsksBack(std::sync::Weak<Bfc<Simulated>>);
        impl Drop for AsksBack {
            fn drop(&mut self) {
                if let Some(bfc) = self.0.upgrade() {
                    assert_eq!(bfc.stats().bytes_in_use, 0);
                }
            }
        }
        let bfc = room_for(1);
        let placed = bfc.alloc(Request::new(1)).expect("room");
        let asks_back = AsksBack(Arc::downgrade(&bfc));
        let done = move || asks_back.0.strong_count() > 0;
        bfc.free_after(placed.address, StreamIdentity(1), done)
            .expect("in use");
        assert_eq!(bfc.settle(), 256);
    });
}

/// What was queued on a stream, and how far the stream has come.
#[derive(Default)]
struct Stream {
    queued: AtomicU64,
    done: AtomicU64,
}

#[test]
fn nobody_gets_bytes_early_or_waits_in_vain_while_streams_finish() {
    // Three threads with a stream each share four blocks, which they free while their stream still
    // works on them. Streams finish at any time: before somebody is out of memory, while he asks,
    // or while he waits.
    watched(|| {
        let bfc = room_for(4);
        let streams: Arc<[Stream; 3]> = Arc::default();
        // The work that was queued last on each block: 1 plus its stream, and its place in the
        // stream's order.
        let last: [AtomicU64; 4] = Default::default();
        let working = AtomicU64::new(streams.len() as u64);
        let user = |own: u64| {
            for _ in 0..3000 {
                let placed = bfc
                    .alloc(patient().on(StreamIdentity(own)))
                    .expect("streams finish");
                let block = &last[((placed.address - Simulated::BASE) >> 20) as usize];
                let before = block.load(Ordering::SeqCst);
                if let Some(stream) = (before >> 32)
                    .checked_sub(1)
                    .filter(|&stream| stream != own)
                {
                    let done = streams[stream as usize].done.load(Ordering::SeqCst);
                    assert!(
                        done >= before & u64::from(u32::MAX),
                        "stream {stream} still works on it"
                    );
                }
                let place = streams[own as usize].queued.fetch_add(1, Ordering::SeqCst) + 1;
                block.store((own + 1) << 32 | place, Ordering::SeqCst);
                let streams = streams.clone();
                let is_done = move || streams[own as usize].done.load(Ordering::SeqCst) >= place;
                bfc.free_after(placed.address, StreamIdentity(own), is_done)
                    .expect("in use");
            }
            working.fetch_sub(1, Ordering::SeqCst);
        };
        thread::scope(|scope| {
            let users = [0, 1, 2].map(|own| scope.spawn(move || user(own)));
            while working.load(Ordering::SeqCst) > 0 && !users.iter().all(|user| user.is_finished())
            {
                for Stream { queued, done } in &*streams {
                    let queued = queued.load(Ordering::SeqCst);
                    done.store(
                        queued.min(done.load(Ordering::SeqCst) + 1),
                        Ordering::SeqCst,
                    );
                }
                thread::yield_now();
            }
            for Stream { queued, done } in &*streams {
                done.store(queued.load(Ordering::SeqCst), Ordering::SeqCst);
            }
        });
        bfc.settle();
        assert_eq!(
            (bfc.stats().num_allocs, bfc.snapshot().pending_bytes),
            (9000, 0)
        );
        assert_eq!(
            bfc.trim().expect("upstream takes it"),
            bfc.stats().peak_bytes_reserved
        );
    });
}

#[test]
fn scopes_nest() {
    let bfc = room_for(8);
    let outer = bfc.scope();
    let first = bfc.alloc(Request::new(1000)).expect("room");
    let inner = bfc.scope();
    bfc.alloc(Request::new(2000)).expect("room");
    bfc.free(first.address).expect("in use");
    let counted = inner.finish();
    assert_eq!(
        (counted.allocs, counted.frees, counted.total_bytes),
        (1, 1, 2048)
    );
    assert_eq!((counted.bytes, counted.peak_bytes), (1024, 2048));
    let counted = outer.finish();
    assert_eq!(
        (counted.allocs, counted.frees, counted.total_bytes),
        (2, 1, 3072)
    );
    assert_eq!((counted.bytes, counted.peak_bytes), (2048, 3072));
    bfc.alloc(Request::new(1)).expect("room");
    let after = bfc.scope();
    drop(bfc.scope());
    assert_eq!(after.finish().allocs, 0, "what ended before counts nothing");
}

#[test]
fn threads_get_bytes_of_their_own() {
    watched(|| {
        let bfc = room_for(64);
        thread::scope(|scope| {
            for seed in 1..5u64 {
                let bfc = &bfc;
                scope.spawn(move || {
                    let mut random = Random::new(seed);
                    let mut held = Vec::new();
                    for _ in 0..20_000 {
                        if held.len() > 40 || (random.one_in(3) && !held.is_empty()) {
                            bfc.free(random.take_one(&mut held)).expect("in use");
                        } else {
                            let request =
                                Request::new(1 + random.below(60_000)).align(1 << random.below(14));
                            held.push(bfc.alloc(request).expect("room").address);
                        }
                    }
                    held.into_iter()
                        .for_each(|address| bfc.free(address).expect("in use"));
                });
            }
        });
        assert_eq!(bfc.stats().bytes_in_use, 0);
        assert!(
            bfc.snapshot()
                .regions
                .iter()
                .all(|region| region.chunks.len() == 1)
        );
    });
}

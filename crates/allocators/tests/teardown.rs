//! The end of allocators: in which order, and what of theirs is still needed then.

mod fake;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use allocators::RegionSource;
use allocators::*;
use fake::{Fake, Freed};
use gpu_api::{Error, HostMemory, Sharing, StreamIdentity};

const MIB: u64 = 1 << 20;
const FIRST: VirtualDevice = VirtualDevice(0);

fn state() -> (Arc<Fake>, ProcessState) {
    let fake = Fake::new(64 * MIB);
    let state = ProcessState::new([fake.gpu()]);
    let options = ProcessOptions::default()
        .limit(MemoryLimit::Bytes(32 * MIB))
        .sharing(Sharing::Handle);
    state
        .configure(
            options
                .growth(Growth::Fixed(2 * MIB))
                .arena_growth(Growth::Fixed(MIB)),
        )
        .expect("nothing is made yet");
    (fake, state)
}

fn on_device() -> AllocatorAttributes {
    AllocatorAttributes::default()
}

fn on_host() -> AllocatorAttributes {
    AllocatorAttributes::default().on_host()
}

fn device_memory(fake: &Arc<Fake>) -> Bfc<DeviceMemory> {
    let memory = DeviceMemory::new(fake.gpu())
        .expect("memory")
        .sharing(Sharing::Handle);
    Bfc::new(BfcOptions::new("bfc").growth(Growth::Fixed(MIB)), memory)
}

fn refusal(result: gpu_api::Result<u64>) -> String {
    match result {
        Err(error @ Error::Invalid { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn device_memory_goes_before_the_host_memory_that_it_may_be_copied_to() {
    // Whatever the order in which they were made.
    let kinds = [on_host(), on_host().gpu_compatible(), on_device()];
    for first in 0..kinds.len() {
        let (fake, state) = state();
        for at in 0..kinds.len() {
            if at == first {
                let arena = state.arena(FIRST).expect("made");
                arena.give_back(arena.take(1, 1).expect("room"));
            }
            let allocator = state
                .allocator(FIRST, kinds[(first + at) % kinds.len()])
                .expect("made");
            let placed = allocator.alloc(Request::new(1)).expect("room");
            allocator.free(placed.address).expect("in use");
        }
        assert_eq!(fake.state().freed, []);
        drop(state);
        let host = Freed::Host(HostMemory {
            pinned: true,
            numa_node: None,
        });
        assert_eq!(
            fake.state().freed,
            [Freed::Device(2 * MIB), Freed::Device(MIB), host]
        );
    }
}

/// Waits for something that happens in another thread.
fn until(happened: impl Fn() -> bool) {
    let watchdog = Instant::now() + Duration::from_secs(60);
    while !happened() {
        assert!(Instant::now() < watchdog, "it never happened");
        thread::yield_now();
    }
}

#[test]
fn what_is_in_use_outlives_its_allocator() {
    let fake = Fake::new(64 * MIB);
    let bfc = device_memory(&fake);
    let [held, idle] = [(); 2].map(|()| bfc.alloc(Request::new(MIB)).expect("room").address);
    bfc.free(idle).expect("in use");
    drop(bfc);
    // Somebody may still write there: the driver keeps it until the process ends.
    assert_eq!(
        fake.state().live.keys().copied().collect::<Vec<_>>(),
        [held]
    );
    let cpu = Direct::new(
        "direct",
        HostPages::new(fake.gpu(), HostMemory::default()).expect("pages"),
    );
    cpu.alloc(Request::new(1)).expect("room");
    drop(Pool::new(PoolOptions::new("pool"), cpu).expect("a pool"));
    assert_eq!(fake.state().host_live(), 1);
}

#[test]
fn what_a_stream_works_on_outlives_its_allocator() {
    let fake = Fake::new(64 * MIB);
    let bfc = device_memory(&fake);
    let [held, other] = [(); 2].map(|()| bfc.alloc(Request::new(MIB)).expect("room").address);
    let done = Arc::new(AtomicBool::new(false));
    let is_done = done.clone();
    bfc.free_after(held, StreamIdentity(1), move || {
        is_done.load(Ordering::SeqCst)
    })
    .expect("in use");
    bfc.free_after(other, StreamIdentity(1), || true)
        .expect("in use");
    drop(bfc);
    assert!(fake.state().live.contains_key(&held), "still worked on");
    // The work ends long after the allocator is gone: the region goes back then.
    done.store(true, Ordering::SeqCst);
    until(|| fake.state().live.is_empty());
}

#[test]
fn who_looks_for_idle_memory_is_no_reason_against_a_teardown() {
    let (_fake, state) = state();
    let key = AllocatorKey::Device(FIRST);
    let stop = AtomicBool::new(false);
    let arena = state.arena(FIRST).expect("made");
    thread::scope(|scope| {
        scope.spawn(|| {
            // More than there is: every neighbour is asked for what it does not need.
            while !stop.load(Ordering::SeqCst) {
                arena.take(1 << 40, 1).expect_err("more than there is");
                if let Ok(piece) = arena.take(40 * MIB, 1) {
                    arena.give_back(piece);
                }
            }
        });
        let refused = (0..3000).filter(|_| {
            let device = state.allocator(FIRST, on_device()).expect("made");
            drop(device);
            state.tear_down(key).is_err()
        });
        let refused = refused.count();
        stop.store(true, Ordering::SeqCst);
        assert_eq!(refused, 0);
    });
}

#[test]
fn an_allocator_with_work_under_way_is_not_torn_down() {
    let (fake, state) = state();
    let key = AllocatorKey::Device(FIRST);
    let device = state.allocator(FIRST, on_device()).expect("made");
    let done = Arc::new(AtomicBool::new(false));
    let placed = device.alloc(Request::new(1)).expect("room");
    let is_done = done.clone();
    let work = Work::on(StreamIdentity(1), move || is_done.load(Ordering::SeqCst));
    device
        .free_after(placed.address, vec![work])
        .expect("in use");
    drop(device);
    let text = refusal(state.tear_down(key));
    assert!(
        text.contains("2097152 bytes that were freed after work that is not done"),
        "{text}"
    );
    assert_eq!(fake.live_bytes(), 2 * MIB);
    done.store(true, Ordering::SeqCst);
    assert_eq!(state.tear_down(key).expect("the work is done"), 2 * MIB);
    assert_eq!(fake.live_bytes(), 0);
}

#[test]
fn a_driver_that_takes_nothing_back_is_told_of() {
    let (fake, state) = state();
    let key = AllocatorKey::Device(FIRST);
    let use_it = || {
        let device = state.allocator(FIRST, on_device()).expect("made");
        let placed = device.alloc(Request::new(1)).expect("room");
        device.free(placed.address).expect("in use");
    };
    use_it();
    fake.state().refuses_free = true;
    assert_eq!(
        state
            .tear_down(key)
            .expect_err("the driver refuses")
            .to_string(),
        "free failed on device 0"
    );
    fake.state().refuses_free = false;
    assert_eq!(state.tear_down(key).expect("nothing is left of it"), 0);
    use_it();
    assert_eq!(fake.live_bytes(), 4 * MIB, "what leaked is not freed again");
}

#[test]
fn what_leaked_counts_against_the_limit() {
    let fake = Fake::new(64 * MIB);
    let memory = DeviceMemory::new(fake.gpu())
        .expect("memory")
        .sharing(Sharing::Handle);
    let bfc = Bfc::new(
        BfcOptions::new("bfc")
            .limit(2 * MIB)
            .growth(Growth::Fixed(MIB)),
        memory,
    );
    let placed = bfc.alloc(Request::new(1)).expect("room");
    bfc.free(placed.address).expect("in use");
    fake.state().refuses_free = true;
    bfc.trim().expect_err("the driver refuses");
    fake.state().refuses_free = false;
    assert_eq!(bfc.stats().bytes_reservable_limit, Some(MIB));
    bfc.alloc(Request::new(MIB))
        .expect("half of the limit is left");
    let error = bfc
        .alloc(Request::new(1))
        .expect_err("the driver may still have the other")
        .to_string();
    assert!(
        error.contains(
            "limit 2097152, reserved 1048576, in use 1048576, largest free piece 0, fragmentation 0 %, leaked 1 MiB"
        ),
        "{error}"
    );
    assert_eq!(fake.live_bytes(), 2 * MIB);
}

#[test]
fn it_is_torn_down_and_built_again_while_others_use_it_and_look() {
    let (fake, state) = state();
    let ended = AtomicBool::new(false);
    let user = || {
        for _ in 0..300 {
            let device = state.allocator(FIRST, on_device()).expect("made");
            let placed = device.alloc(Request::new(MIB)).expect("room");
            device.free(placed.address).expect("in use");
        }
    };
    thread::scope(|scope| {
        let users = [scope.spawn(user), scope.spawn(user)];
        scope.spawn(|| {
            while !ended.load(Ordering::SeqCst) {
                if let Err(error) = state.tear_down(AllocatorKey::Device(FIRST)) {
                    assert!(matches!(error, Error::Invalid { .. }), "{error}");
                }
                for (_, snapshot) in state.snapshots() {
                    let stats = snapshot.expect("it has regions").stats;
                    assert!(
                        stats.bytes_in_use <= 2 * MIB && stats.bytes_in_use <= stats.bytes_reserved
                    );
                }
            }
        });
        users
            .into_iter()
            .for_each(|user| user.join().expect("no panic"));
        ended.store(true, Ordering::SeqCst);
    });
    let left = fake.live_bytes();
    assert_eq!(
        state
            .tear_down(AllocatorKey::Device(FIRST))
            .expect("nobody uses it"),
        left
    );
    assert_eq!(fake.live_bytes(), 0);
}

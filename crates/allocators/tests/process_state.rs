//! The value that owns every allocator.

mod fake;

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use allocators::bfc::Divisions;
use allocators::*;
use allocators::{Piece, RegionSource};
use backend_host::{HostBackend, HostConfig};
use fake::Fake;
use gpu_api::groups::*;
use gpu_api::{BackendKind, DeviceId, Error, Gpu, Result, Sharing};

const MIB: u64 = 1 << 20;
const ROOM: u64 = 64 * MIB;
const FIRST: VirtualDevice = VirtualDevice(0);
const SECOND: VirtualDevice = VirtualDevice(1);

fn state() -> (Arc<Fake>, ProcessState) {
    let fake = Fake::new(ROOM);
    let state = ProcessState::new([fake.gpu()]);
    (fake, state)
}

fn options() -> ProcessOptions {
    ProcessOptions::default()
        .limit(MemoryLimit::Bytes(32 * MIB))
        .sharing(Sharing::Handle)
}

fn host(bytes: u64) -> Gpu {
    let backend =
        HostBackend::new(HostConfig::default().bytes_per_device(bytes)).expect("it opens");
    Gpu::new(backend, DeviceId(0)).expect("a device")
}

fn heaps(count: usize) -> AllocatorKind {
    AllocatorKind::ThreadHeaps(NonZeroUsize::new(count).expect("some"))
}

/// Kinds that have regions.
fn with_regions() -> [AllocatorKind; 2] {
    [AllocatorKind::BestFit, heaps(3)]
}

/// Allocates in another thread, whose heap may be another.
fn elsewhere(allocator: &Arc<dyn Allocator>, bytes: u64) -> Placed {
    thread::scope(|scope| scope.spawn(|| allocator.alloc(Request::new(bytes))).join())
        .expect("no panic")
        .expect("room")
}

fn on_device() -> AllocatorAttributes {
    AllocatorAttributes::default()
}

fn on_host() -> AllocatorAttributes {
    AllocatorAttributes::default().on_host()
}

fn physical(device: u32) -> PhysicalDevice {
    PhysicalDevice {
        backend: BackendKind::Host,
        device: DeviceId(device),
    }
}

fn is_invalid<T>(result: Result<T>, part: &str) {
    match result.err() {
        Some(error @ Error::Invalid { .. }) if error.to_string().contains(part) => {}
        other => panic!("{part}\nnot in\n{other:?}"),
    }
}

#[test]
fn allocators_are_made_on_first_use_and_once() {
    let (fake, state) = state();
    state.configure(options()).expect("nothing is made yet");
    assert!(state.snapshots().is_empty());
    let device = state.allocator(FIRST, on_device()).expect("made");
    assert!(Arc::ptr_eq(
        &device,
        &state.allocator(FIRST, on_device()).expect("made")
    ));
    assert_eq!(fake.state().allocs, 0, "no memory before it is asked for");
    let placed = device.alloc(Request::new(1)).expect("room");
    assert_eq!(fake.live_bytes(), 2 * MIB);
    device.free(placed.address).expect("in use");
    assert_eq!(state.snapshots().len(), 1);
}

#[test]
fn attributes_choose_the_memory() {
    let (fake, state) = state();
    let name = |attributes| {
        state
            .allocator(FIRST, attributes)
            .expect("made")
            .name()
            .to_owned()
    };
    assert_eq!(name(on_device()), "virtual device 0");
    assert_eq!(name(on_device().gpu_compatible()), "virtual device 0");
    assert_eq!(name(on_host()), "cpu");
    assert_eq!(name(on_host().gpu_compatible()), "pinned host memory");
    assert_eq!(name(on_host().nic_compatible()), "pinned host memory");
    assert!(fake.state().host.is_empty());
    let take = |attributes| {
        state
            .allocator(FIRST, attributes)
            .expect("made")
            .alloc(Request::new(1))
            .expect("room")
    };
    take(on_host());
    take(on_host().gpu_compatible());
    let pinned: Vec<bool> = fake
        .state()
        .host
        .iter()
        .map(|memory| memory.pinned)
        .collect();
    assert_eq!(pinned, [true], "plain memory is no driver's");
    is_invalid(
        state.allocator(SECOND, on_device()),
        "a virtual device is 1",
    );
}

#[test]
fn a_device_that_shares_nothing_has_private_memory_all_the_same() {
    let fake = Fake::new(ROOM);
    fake.state().shares_nothing = true;
    let state = ProcessState::new([fake.gpu()]);
    let private = state.allocator(FIRST, on_device()).expect("made");
    let held = private.alloc(Request::new(MIB)).expect("room");
    assert!(fake.live_bytes() >= MIB);
    let error = state.arena(FIRST).expect_err("nobody could map it");
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    private.free(held.address).expect("in use");
}

#[test]
fn options_after_the_first_use_are_an_error() {
    let (_fake, state) = state();
    state.configure(options()).expect("nothing is made yet");
    state.configure(options()).expect("still nothing");
    state.allocator(FIRST, on_host()).expect("made");
    is_invalid(
        state.configure(options()),
        "given after an allocator was made",
    );
}

#[test]
fn host_memory_differs_by_node() {
    let fake = Fake::with_devices(ROOM, 2);
    fake.state().nodes = Some(vec![0, 1]);
    let state = ProcessState::new([fake.device(0), fake.device(1)]);
    state
        .configure(options().numa_node(FIRST, 0).numa_node(SECOND, 1))
        .expect("nothing is made yet");
    for attributes in [on_host(), on_host().gpu_compatible()] {
        let [first, second] =
            [FIRST, SECOND].map(|device| state.allocator(device, attributes).expect("made"));
        assert!(!Arc::ptr_eq(&first, &second));
        fake.state().host.clear();
        first.alloc(Request::new(1)).expect("room");
        second.alloc(Request::new(1)).expect("room");
        let nodes: Vec<Option<u32>> = fake
            .state()
            .host
            .iter()
            .map(|memory| memory.numa_node)
            .collect();
        // Plain memory is the kernel's, which no driver is asked for.
        assert_eq!(
            nodes,
            if attributes.gpu_compatible {
                vec![Some(0), Some(1)]
            } else {
                vec![]
            }
        );
    }
    let pinned = state
        .host_allocator(Some(BackendKind::Host), Some(1))
        .expect("made");
    assert_eq!(pinned.name(), "pinned host memory of node 1");
    assert!(Arc::ptr_eq(
        &pinned,
        &state
            .allocator(SECOND, on_host().gpu_compatible())
            .expect("made")
    ));
    is_invalid(
        state.host_allocator(Some(BackendKind::Cuda), None),
        "none of cuda",
    );
}

#[test]
fn a_kernel_that_cannot_bind_gives_memory_all_the_same() {
    let fake = Fake::new(ROOM);
    fake.state().nodes = Some(vec![0]);
    let pages = HostPages::new(
        fake.gpu(),
        gpu_api::HostMemory {
            pinned: true,
            numa_node: Some(7),
        },
    )
    .expect("pages");
    assert!(pages.is_bound());
    let bfc = Bfc::new(BfcOptions::new("bfc"), pages);
    bfc.alloc(Request::new(1)).expect("room");
    assert!(!bfc.upstream().is_bound());
    let asked: Vec<Option<u32>> = fake
        .state()
        .host
        .iter()
        .map(|memory| memory.numa_node)
        .collect();
    assert_eq!(asked, [Some(7), None]);
}

#[test]
fn one_is_torn_down_and_built_again() {
    for kind in with_regions() {
        let (fake, state) = state();
        state
            .configure(options().device_kind(kind).pinned_kind(kind))
            .expect("nothing is made yet");
        let key = AllocatorKey::Device(FIRST);
        assert_eq!(state.tear_down(key).expect("there is none"), 0);
        for _ in 0..2 {
            let device = state.allocator(FIRST, on_device()).expect("made");
            let placed = device
                .alloc(Request::new(30 * MIB))
                .expect("the whole limit is there again");
            is_invalid(state.tear_down(key), "bytes in use");
            device.free(placed.address).expect("in use");
            is_invalid(state.tear_down(key), "1 handles elsewhere");
            drop(device);
            assert_eq!(state.tear_down(key).expect("nobody uses it"), 32 * MIB);
            assert_eq!(fake.live_bytes(), 0);
        }
    }
}

#[test]
fn an_arena_that_others_may_have_mapped_is_not_torn_down() {
    let (fake, state) = state();
    let key = AllocatorKey::Arena(FIRST);
    state
        .configure(options().arena_growth(Growth::Fixed(MIB)))
        .expect("nothing is made yet");
    let arena = state.arena(FIRST).expect("made");
    let piece: Piece = arena.take(1, 1).expect("room");
    let region = piece.region.clone();
    region.pin();
    is_invalid(state.tear_down(key), "bytes in use");
    arena.give_back(piece);
    is_invalid(state.tear_down(key), "others may have mapped");
    region.unpin();
    is_invalid(state.tear_down(key), "1 handles elsewhere");
    drop(arena);
    assert_eq!(state.tear_down(key).expect("nobody uses it"), MIB);
    assert_eq!(fake.live_bytes(), 0);
    state
        .arena(FIRST)
        .expect("another one")
        .take(1, 1)
        .expect("room");
}

#[test]
fn private_memory_and_the_arena_share_the_limit() {
    for kind in with_regions() {
        let (fake, state) = state();
        state
            .configure(
                options()
                    .device_kind(kind)
                    .pinned_kind(kind)
                    .arena_growth(Growth::Fixed(MIB)),
            )
            .expect("nothing is made yet");
        let (device, arena) = (
            state.allocator(FIRST, on_device()).expect("made"),
            state.arena(FIRST).expect("made"),
        );
        let placed = device.alloc(Request::new(20 * MIB)).expect("room");
        assert!(matches!(
            arena.take(20 * MIB, 1),
            Err(Error::OutOfMemory { .. })
        ));
        assert_eq!(
            fake.live_bytes(),
            32 * MIB,
            "the driver has more, the limit is reached"
        );
        device.free(placed.address).expect("in use");
        // The arena has the private allocator give its idle region back.
        let piece = arena.take(20 * MIB, 1).expect("room");
        assert_eq!(fake.live_bytes(), 20 * MIB);
        assert!(device.alloc(Request::new(20 * MIB)).is_err());
        arena.give_back(piece);
        device
            .alloc(Request::new(20 * MIB))
            .expect("the other way round");
    }
}

#[test]
fn who_waits_gets_what_another_allocator_of_the_device_frees() {
    for kind in with_regions() {
        let (_fake, state) = state();
        let options = options()
            .device_kind(kind)
            .pinned_kind(kind)
            .arena_growth(Growth::Fixed(MIB))
            .wait(Duration::from_secs(600));
        state.configure(options).expect("nothing is made yet");
        let (device, arena) = (
            state.allocator(FIRST, on_device()).expect("made"),
            state.arena(FIRST).expect("made"),
        );
        let placed = device.alloc(Request::new(32 * MIB)).expect("room");
        thread::scope(|scope| {
            let waiter = scope.spawn(|| arena.take(32 * MIB, 1));
            device.free(placed.address).expect("in use");
            // It went back to the driver by nobody's call but that of who waits.
            arena.give_back(waiter.join().expect("no panic").expect("the whole limit"));
        });
    }
}

#[test]
fn private_memory_never_lies_in_a_region_that_is_shared() {
    let (_fake, state) = state();
    state
        .configure(options().arena_growth(Growth::Fixed(MIB)))
        .expect("nothing is made yet");
    let (device, arena) = (
        state.allocator(FIRST, on_device()).expect("made"),
        state.arena(FIRST).expect("made"),
    );
    let mut shared = Vec::new();
    let mut private = Vec::new();
    for at in 0..200 {
        shared.push(arena.take(1 + at * 37, 1).expect("room"));
        private.push(device.alloc(Request::new(1 + at * 53)).expect("room"));
        if at % 3 == 0 {
            arena.give_back(shared.swap_remove(0));
            device.free(private.swap_remove(0).address).expect("in use");
        }
    }
    for piece in &shared {
        let region = &piece.region;
        let end = region.base().0 + region.len();
        assert!(
            private
                .iter()
                .all(|p| p.address + p.bytes <= region.base().0 || end <= p.address)
        );
    }
}

#[test]
fn virtual_devices_on_one_gpu_have_limits_of_their_own() {
    let (fake, state) = state();
    let mut devices = VirtualDevices::new();
    for device in [FIRST, SECOND] {
        devices.map(device, physical(0)).expect("on one");
    }
    let options = || options().devices(devices.clone());
    let limits = options()
        .limit_of(FIRST, MemoryLimit::Bytes(8 * MIB))
        .limit_of(SECOND, MemoryLimit::Fraction(0.25));
    state.configure(limits).expect("nothing is made yet");
    let [first, second] =
        [FIRST, SECOND].map(|device| state.allocator(device, on_device()).expect("made"));
    assert_eq!(first.stats().bytes_limit, Some(8 * MIB));
    assert_eq!(second.stats().bytes_limit, Some(16 * MIB));
    first.alloc(Request::new(8 * MIB)).expect("room");
    second.alloc(Request::new(16 * MIB)).expect("room");
    assert!(first.alloc(Request::new(1)).is_err());
    assert_eq!(fake.live_bytes(), 24 * MIB);
}

#[test]
fn limits_that_a_device_cannot_keep_are_refused() {
    let mut devices = VirtualDevices::new();
    for device in [FIRST, SECOND] {
        devices.map(device, physical(0)).expect("on one");
    }
    let refused = |options: ProcessOptions, part: &str| {
        let (_fake, state) = state();
        state.configure(options).expect("nothing is made yet");
        is_invalid(state.allocator(FIRST, on_device()), part);
    };
    let shared = || ProcessOptions::default().devices(devices.clone());
    refused(
        shared(),
        "in bytes or a fraction where several virtual devices",
    );
    refused(
        shared().limit(MemoryLimit::Fraction(0.6)),
        "summed over its virtual devices",
    );
    refused(
        ProcessOptions::default().limit(MemoryLimit::Bytes(ROOM + 1)),
        "no more than the device has",
    );
    refused(
        ProcessOptions::default().limit(MemoryLimit::AllBut(ROOM)),
        "more than nothing",
    );
    let (_fake, state) = state();
    let mut elsewhere = VirtualDevices::new();
    elsewhere.map(FIRST, physical(9)).expect("the first");
    is_invalid(
        state.configure(ProcessOptions::default().devices(elsewhere)),
        "a device is host device 9",
    );
}

#[test]
fn all_but_a_reserve_counts_what_is_free() {
    let (fake, state) = state();
    let taken = fake
        .alloc(DeviceId(0), 10 * MIB, Sharing::Handle)
        .expect("room");
    assert_eq!(taken.len, 10 * MIB);
    state
        .configure(ProcessOptions::default().limit(MemoryLimit::AllBut(4 * MIB)))
        .expect("nothing is made yet");
    let device = state.allocator(FIRST, on_device()).expect("made");
    assert_eq!(device.stats().bytes_limit, Some(50 * MIB));
}

#[test]
fn wrappers_are_put_over_what_is_made() {
    let (_fake, state) = state();
    let made = Arc::new(AtomicUsize::new(0));
    let count = made.clone();
    let options = options().wrap(move |key, allocator| {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(match key {
            AllocatorKey::Cpu(_) => Arc::new(Guard::new(allocator)?),
            _ => Arc::new(Tracking::new(allocator)),
        })
    });
    state.configure(options).expect("nothing is made yet");
    let cpu = state.allocator(FIRST, on_host()).expect("made");
    let placed = cpu.alloc(Request::new(100)).expect("room");
    assert_eq!(
        placed.bytes, 100,
        "a guard hands out exactly what was asked for"
    );
    state.allocator(FIRST, on_device()).expect("made");
    state.allocator(FIRST, on_device()).expect("made");
    assert_eq!(made.load(Ordering::Relaxed), 2);
}

#[test]
fn everything_is_destroyed_with_the_state() {
    let (fake, state) = state();
    state.configure(options()).expect("nothing is made yet");
    for attributes in [on_device(), on_host(), on_host().gpu_compatible()] {
        let allocator = state.allocator(FIRST, attributes).expect("made");
        let placed = allocator.alloc(Request::new(1)).expect("room");
        allocator.free(placed.address).expect("in use");
    }
    let arena = state.arena(FIRST).expect("made");
    arena.give_back(arena.take(1, 1).expect("room"));
    drop(arena);
    assert!(fake.live_bytes() > 0 && fake.state().host_live() == 1);
    drop(state);
    assert_eq!((fake.live_bytes(), fake.state().host_live()), (0, 0));
}

#[test]
fn a_forked_child_leaves_everything_alone() {
    for kind in with_regions() {
        let (fake, state) = state();
        state
            .configure(options().device_kind(kind))
            .expect("nothing is made yet");
        let device = state.allocator(FIRST, on_device()).expect("made");
        let placed = device.alloc(Request::new(1)).expect("room");
        // SAFETY: `fork` in a process with threads lets the child do only what is safe in a signal
        // handler: the calls return before they lock or allocate anything.
        unsafe {
            harness::holds_in_a_fork(|| {
                matches!(device.alloc(Request::new(1)), Err(Error::Forked { .. }))
                    && matches!(device.free(placed.address), Err(Error::Forked { .. }))
                    && matches!(device.trim(), Err(Error::Forked { .. }))
            });
        }
        device.free(placed.address).expect("in use");
        assert!(fake.live_bytes() > 0);
    }
}

#[test]
fn host_memory_needs_no_device_and_devices_may_come_later() {
    let state = ProcessState::new([]);
    let cpu = state.host_allocator(None, None).expect("it needs none");
    let placed = cpu.alloc(Request::new(100)).expect("room");
    is_invalid(state.allocator(FIRST, on_device()), "a virtual device is 0");
    is_invalid(
        state.host_allocator(Some(BackendKind::Cuda), None),
        "none of cuda",
    );
    let fake = Fake::new(ROOM);
    assert_eq!(
        (
            state.add_devices([fake.gpu()]),
            state.add_devices([fake.gpu()])
        ),
        (1, 0)
    );
    state
        .allocator(FIRST, on_device())
        .expect("it is there now")
        .alloc(Request::new(1))
        .expect("room");
    assert!(
        Arc::ptr_eq(&cpu, &state.allocator(FIRST, on_host()).expect("made")),
        "what was made stays"
    );
    cpu.free(placed.address).expect("in use");
}

#[test]
fn every_memory_can_be_kept_by_each_kind() {
    let kinds = [
        AllocatorKind::BestFit,
        heaps(3),
        AllocatorKind::Pool,
        AllocatorKind::Direct,
    ];
    for (kind, node) in kinds
        .into_iter()
        .flat_map(|kind| [(kind, None), (kind, Some(0))])
    {
        let (_fake, state) = state();
        state
            .configure(options().device_kind(kind).pinned_kind(kind).cpu_kind(kind))
            .expect("nothing is made yet");
        for allocator in [
            state.allocator(FIRST, on_device()).expect("made"),
            state
                .host_allocator(Some(BackendKind::Host), node)
                .expect("made"),
            state.host_allocator(None, node).expect("made"),
        ] {
            let first = allocator.alloc(Request::new(1000)).expect("room").address;
            allocator.free(first).expect("in use");
            let kept = allocator.stats().bytes_reserved;
            let is_kept = kind != AllocatorKind::Direct || allocator.name() == "cpu of node 0";
            assert_eq!(
                kept > 0,
                is_kept,
                "{kind:?} {}: {kept} bytes",
                allocator.name()
            );
        }
    }
    let (_fake, state) = state();
    state
        .configure(options().cpu_kind(AllocatorKind::Driver))
        .expect("nothing is made yet");
    assert!(matches!(
        state.host_allocator(None, None),
        Err(Error::Unsupported { .. })
    ));
}

#[test]
fn threads_have_heaps_of_their_own_within_one_limit() {
    let (fake, state) = state();
    state
        .configure(options().device_kind(heaps(64)))
        .expect("nothing is made yet");
    let device = state.allocator(FIRST, on_device()).expect("made");
    let barrier = Barrier::new(4);
    let take = || {
        let placed = device.alloc(Request::new(1)).expect("room");
        barrier.wait();
        placed.address
    };
    let held: Vec<u64> = thread::scope(|scope| {
        let threads = [(); 4].map(|()| scope.spawn(take));
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .collect()
    });
    assert_eq!(
        (
            device.snapshot().expect("regions").regions.len(),
            fake.live_bytes()
        ),
        (4, 8 * MIB)
    );
    assert_eq!(device.stats().bytes_limit, Some(32 * MIB));
    let rest = device
        .alloc(Request::new(24 * MIB))
        .expect("the rest of the limit");
    let error = device
        .alloc(Request::new(3 * MIB))
        .expect_err("above the limit");
    assert!(error.to_string().contains("one of 64 heaps"), "{error}");
    assert_eq!(fake.live_bytes(), 32 * MIB);
    // What is idle in any of them is room for the arena of the device.
    held.into_iter()
        .chain([rest.address])
        .for_each(|address| device.free(address).expect("in use"));
    let arena = state.arena(FIRST).expect("made");
    arena.give_back(arena.take(32 * MIB, 1).expect("the whole limit"));
}

#[test]
fn the_drivers_pool_is_kept_in_the_devices_limit_and_torn_down() {
    let state = ProcessState::new([host(ROOM)]);
    state
        .configure(options().device_kind(AllocatorKind::Driver))
        .expect("nothing is made yet");
    let pool = state.allocator(FIRST, on_device()).expect("made");
    let arena = state.arena(FIRST).expect("made");
    let placed = pool.alloc(Request::new(20 * MIB)).expect("room");
    assert_eq!(pool.stats().bytes_limit, Some(32 * MIB));
    assert_eq!(
        state.owner_of(placed.address + 9).map(|owner| owner.key),
        Some(AllocatorKey::Device(FIRST))
    );
    let error = arena.take(20 * MIB, 1).expect_err("the pool has it");
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    let piece = arena.take(8 * MIB, 1).expect("there is so much");
    let error = pool
        .alloc(Request::new(8 * MIB))
        .expect_err("the arena has it");
    assert!(
        error.to_string().contains("of a budget of 33554432 bytes"),
        "{error}"
    );
    arena.give_back(piece);
    pool.free(placed.address).expect("in use");
    is_invalid(
        state.tear_down(AllocatorKey::Device(FIRST)),
        "1 handles elsewhere",
    );
    drop(pool);
    assert_eq!(
        state
            .tear_down(AllocatorKey::Device(FIRST))
            .expect("nobody has it"),
        20 * MIB
    );
}

#[test]
fn memory_that_grows_in_place_is_one_region_for_a_heap() {
    for kind in with_regions() {
        let state = ProcessState::new([host(ROOM)]);
        let growth = Growth::Fixed(MIB);
        state
            .configure(
                options()
                    .device_kind(kind)
                    .growth(growth)
                    .grows_in_place(true),
            )
            .expect("nothing is made yet");
        let device = state.allocator(FIRST, on_device()).expect("made");
        let held: Vec<u64> = (0..8)
            .map(|_| device.alloc(Request::new(MIB)).expect("room").address)
            .collect();
        assert!(
            held.windows(2).all(|pair| pair[1] == pair[0] + MIB),
            "{kind:?}: {held:x?}"
        );
        assert_eq!(
            device.snapshot().expect("regions").regions.len(),
            1,
            "{kind:?}"
        );
        held.into_iter()
            .for_each(|address| device.free(address).expect("in use"));
        assert_eq!(device.trim().expect("it goes back"), 8 * MIB);
    }
}

#[test]
fn managed_memory_goes_beyond_the_device() {
    let state = ProcessState::new([host(4 * MIB)]);
    let managed = || ProcessOptions::default().managed(true);
    state
        .configure(managed().limit(MemoryLimit::Fraction(1e12)))
        .expect("nothing is made yet");
    is_invalid(
        state.allocator(FIRST, on_device()),
        "that the host has free",
    );
    state
        .configure(managed().limit(MemoryLimit::Fraction(4.0)))
        .expect("nothing is made yet");
    let device = state.allocator(FIRST, on_device()).expect("made");
    let placed = device
        .alloc(Request::new(12 * MIB))
        .expect("three times what the device has");
    let error = device
        .alloc(Request::new(8 * MIB))
        .expect_err("above the limit");
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    let memory = device.memory().expect("there is some");
    // SAFETY: `write` asks for a range of a live allocation that nothing else uses: it is this
    // test's own.
    unsafe { memory.write(placed.address + 12 * MIB - 4, b"last") }.expect("it is written");
    device.free(placed.address).expect("in use");
}

#[test]
fn pinned_memory_grows_by_its_own_rule_and_keeps_its_limit() {
    for kind in [AllocatorKind::BestFit, heaps(3), AllocatorKind::Pool] {
        let (_fake, state) = state();
        let options = options()
            .growth(Growth::Whole)
            .pinned_limit(4 * MIB)
            .pinned_kind(kind);
        state.configure(options).expect("nothing is made yet");
        let pinned = state
            .host_allocator(Some(BackendKind::Host), None)
            .expect("made");
        pinned.alloc(Request::new(1)).expect("room");
        assert!(
            pinned.stats().bytes_reserved <= 2 * MIB,
            "one byte pins no more"
        );
        let error = pinned
            .alloc(Request::new(4 * MIB + 1))
            .expect_err("above the limit");
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    }
}

#[test]
fn an_address_finds_its_owner() {
    let kinds = [
        AllocatorKind::BestFit,
        heaps(3),
        AllocatorKind::Pool,
        AllocatorKind::Direct,
    ];
    for kind in kinds {
        let (_fake, state) = state();
        state
            .configure(options().device_kind(kind).pinned_kind(kind).cpu_kind(kind))
            .expect("nothing is made yet");
        let private = [on_device(), on_host().gpu_compatible(), on_host()]
            .map(|attributes| state.allocator(FIRST, attributes).expect("made"));
        let arena = state.arena(FIRST).expect("made");
        let keys = [
            AllocatorKey::Device(FIRST),
            AllocatorKey::Pinned(BackendKind::Host, None),
            AllocatorKey::Cpu(None),
        ];
        for (allocator, key) in private.iter().zip(keys) {
            let here = allocator.alloc(Request::new(5000)).expect("room");
            for placed in [here, elsewhere(allocator, 5000)] {
                for inside in [0, 1, 4999] {
                    let owner = state
                        .owner_of(placed.address + inside)
                        .expect("it is somebody's");
                    assert_eq!((owner.key, owner.placed), (key, placed));
                }
                let behind = state.owner_of(placed.address + placed.bytes);
                assert!(
                    behind.is_none_or(|owner| owner.placed.number != placed.number),
                    "{behind:?}"
                );
                allocator.free(placed.address).expect("in use");
                assert_eq!(state.owner_of(placed.address + 1), None);
            }
        }
        let piece = arena.take(5000, 1).expect("room");
        let owner = state
            .owner_of(piece.ptr().0 + 4000)
            .expect("it is the arena's");
        assert_eq!(
            (owner.key, owner.placed.address),
            (AllocatorKey::Arena(FIRST), piece.ptr().0)
        );
        assert_eq!(state.owner_of(0), None);
        arena.give_back(piece);
    }
}

/// Counts regions by allocator, and bytes.
#[derive(Default)]
struct Registered(std::sync::Mutex<std::collections::BTreeMap<AllocatorKey, (u64, u64)>>);

impl KeyedVisitor for Registered {
    fn region_came(&self, key: AllocatorKey, region: Extent) {
        let mut regions = self.0.lock().expect("no panic");
        let (count, bytes) = regions.entry(key).or_default();
        (*count, *bytes) = (*count + 1, *bytes + region.len);
    }

    fn region_goes(&self, key: AllocatorKey, region: Extent) {
        let mut regions = self.0.lock().expect("no panic");
        let (count, bytes) = regions.get_mut(&key).expect("it came");
        (*count, *bytes) = (*count - 1, *bytes - region.len);
    }
}

#[test]
fn visitors_hear_of_every_region_that_comes_and_goes() {
    for kind in with_regions() {
        let (_fake, state) = state();
        let registered = Arc::new(Registered::default());
        state
            .configure(
                options()
                    .device_kind(kind)
                    .pinned_kind(kind)
                    .arena_growth(Growth::Fixed(MIB))
                    .visitor(registered.clone()),
            )
            .expect("nothing is made yet");
        let device = state.allocator(FIRST, on_device()).expect("made");
        let pinned = state
            .allocator(FIRST, on_host().gpu_compatible())
            .expect("made");
        let arena = state.arena(FIRST).expect("made");
        let held = [&device, &pinned]
            .map(|allocator| allocator.alloc(Request::new(100)).expect("room").address);
        let piece = arena.take(100, 1).expect("room");
        let keys = [
            AllocatorKey::Device(FIRST),
            AllocatorKey::Arena(FIRST),
            AllocatorKey::Pinned(BackendKind::Host, None),
        ];
        let of = |key| registered.0.lock().expect("no panic").get(&key).copied();
        assert_eq!(
            keys.map(of),
            [Some((1, 2 * MIB)), Some((1, MIB)), Some((1, 2 * MIB))]
        );
        arena.give_back(piece);
        device.free(held[0]).expect("in use");
        pinned.free(held[1]).expect("in use");
        [device.trim(), pinned.trim(), arena.trim()]
            .into_iter()
            .for_each(|trimmed| assert!(trimmed.expect("trimmed") > 0));
        assert_eq!(keys.map(of), [Some((0, 0)); 3]);
    }
}

#[test]
fn visitors_hear_of_plain_host_memory_whatever_keeps_it() {
    let kinds = [
        AllocatorKind::BestFit,
        heaps(3),
        AllocatorKind::Pool,
        AllocatorKind::Direct,
    ];
    for (kind, node) in kinds
        .into_iter()
        .flat_map(|kind| [(kind, None), (kind, Some(0))])
    {
        let state = ProcessState::new([]);
        let registered = Arc::new(Registered::default());
        state
            .configure(options().cpu_kind(kind).visitor(registered.clone()))
            .expect("nothing is made yet");
        let cpu = state
            .host_allocator(None, node)
            .expect("it needs no device");
        let of = || {
            registered
                .0
                .lock()
                .expect("no panic")
                .get(&AllocatorKey::Cpu(node))
                .copied()
        };
        let held = cpu.alloc(Request::new(100)).expect("room").address;
        assert!(
            of().is_some_and(|(regions, bytes)| regions == 1 && bytes >= 100),
            "{kind:?} {node:?}: {:?}",
            of()
        );
        cpu.free(held).expect("in use");
        cpu.trim().expect("it goes back");
        assert_eq!(of(), Some((0, 0)), "{kind:?} {node:?}");
    }
}

#[test]
fn all_of_it_is_torn_down_and_configured_anew() {
    for kind in with_regions() {
        let (fake, state) = state();
        state
            .configure(options().device_kind(kind).pinned_kind(kind))
            .expect("nothing is made yet");
        let device = state.allocator(FIRST, on_device()).expect("made");
        let placed = device.alloc(Request::new(1)).expect("room");
        state
            .allocator(FIRST, on_host().gpu_compatible())
            .expect("made")
            .alloc(Request::new(1))
            .expect("room");
        is_invalid(state.tear_down_all(), "bytes in use");
        device.free(placed.address).expect("in use");
        is_invalid(state.tear_down_all(), "handles elsewhere");
        drop(device);
        is_invalid(state.tear_down_all(), "Pinned");
        let pinned = state
            .allocator(FIRST, on_host().gpu_compatible())
            .expect("it stays");
        let held = pinned.find(0);
        assert_eq!(
            (held, fake.live_bytes()),
            (None, 0),
            "the device's went first"
        );
        is_invalid(
            state.configure(options().device_kind(kind).pinned_kind(kind)),
            "given after an allocator was made",
        );
        let other = ProcessState::new([fake.gpu()]);
        other
            .configure(options().device_kind(kind).pinned_kind(kind))
            .expect("nothing is made yet");
        other.allocator(FIRST, on_device()).expect("made");
        assert_eq!(other.tear_down_all().expect("nothing is in use"), 0);
        let less = ProcessOptions::default().limit(MemoryLimit::Bytes(MIB));
        other
            .configure(less)
            .expect("it is as if nothing had been made");
        let device = other.allocator(FIRST, on_device()).expect("made");
        assert!(
            device.alloc(Request::new(2 * MIB)).is_err(),
            "the limit is the later one"
        );
    }
}

#[test]
fn what_ran_out_of_memory_is_written_down() {
    for kind in with_regions() {
        let (_fake, state) = state();
        let folder = std::env::temp_dir().join(format!("gpu-ipc-dump-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        state
            .configure(
                options()
                    .device_kind(kind)
                    .pinned_kind(kind)
                    .memory_dump(folder.join("heap")),
            )
            .expect("nothing is made yet");
        let device = state.allocator(FIRST, on_device()).expect("made");
        device.alloc(Request::new(MIB)).expect("room");
        device
            .alloc(Request::new(33 * MIB))
            .expect_err("above the limit");
        let files: Vec<_> = std::fs::read_dir(&folder)
            .expect("it is there")
            .map(|file| file.expect("a file").path())
            .collect();
        let [file] = &files[..] else {
            panic!("{files:?}")
        };
        let text = std::fs::read_to_string(file).expect("it is readable");
        let snapshot: Snapshot = serde_json::from_str(&text).expect("it is a snapshot");
        assert_eq!(
            (snapshot.name.as_str(), snapshot.stats.bytes_in_use),
            ("virtual device 0", MIB)
        );
        std::fs::remove_dir_all(folder).expect("it was ours");
    }
}

#[test]
fn pytorchs_rules_for_cutting_rounding_and_collecting() {
    // Small requests leave chunks above the limit alone, and large ones get regions of their own.
    let options = BfcOptions::new("bfc")
        .max_split(Some(8 * MIB))
        .growth(Growth::Fixed(4 * MIB));
    let bfc = Bfc::new(options, Simulated::new());
    let large = bfc.alloc(Request::new(64 * MIB)).expect("room");
    assert_eq!(bfc.stats().bytes_reserved, 64 * MIB);
    bfc.free(large.address).expect("in use");
    bfc.alloc(Request::new(MIB)).expect("room");
    assert_eq!(
        bfc.stats().bytes_reserved,
        68 * MIB,
        "it took no piece of the large one"
    );
    assert!(
        bfc.alloc(Request::new(30 * MIB)).expect("room").address != large.address,
        "the slack would be more than the share"
    );
    assert_eq!(
        bfc.alloc(Request::new(50 * MIB)).expect("room").address,
        large.address
    );
    // Idle regions go before there are more, from a share of the limit on.
    let options = BfcOptions::new("bfc")
        .limit(10 * MIB)
        .growth(Growth::Fixed(MIB))
        .collect_from(Some(0.3));
    let bfc = Bfc::new(options, Simulated::new().gap(256));
    for round in 0..20 {
        bfc.free(
            bfc.alloc(Request::new(MIB + 256 * round))
                .expect("room")
                .address,
        )
        .expect("in use");
    }
    assert!(
        bfc.stats().peak_bytes_reserved < 6 * MIB,
        "{}",
        bfc.stats().peak_bytes_reserved
    );
    // Sizes are the same more often.
    let bfc = Bfc::new(
        BfcOptions::new("bfc").round_up_divisions(Some(Divisions::all(4).expect("a power of two"))),
        Simulated::new(),
    );
    let first = bfc.alloc(Request::new(1_100_000)).expect("room");
    bfc.free(first.address).expect("in use");
    assert_eq!(
        bfc.alloc(Request::new(1_200_000)).expect("room").bytes,
        first.bytes
    );
}

//! Running out of memory, with real processes: what limbo, idle mappings and idle regions give
//! back, and what the error says when nothing does.
//!
//! With `GPU_IPC_TEST_BACKEND=cuda` they run on a GPU. Nothing here sleeps to be in time.

mod consumer;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use gpu_ipc::allocators::{
    Allocator, AllocatorAttributes, AllocatorKey, AllocatorKind, Arena, ArenaOptions, Bfc,
    BfcOptions, Budget, DeviceMemory, DriverPool, GrowingMemory, Growth, ManagedMemory,
    MemoryLimit, ProcessOptions, ProcessState, Recorded, Request, Snapshot, SubAllocator,
    VirtualDevice,
};
use gpu_ipc::backend::{MemoryKind, Piece, RegionSource};
use gpu_ipc::session::SessionBuilder;
use gpu_ipc::{After, BackendKind, Descriptor, Error, Gpu, ParticipantId, SentBlock, Session, To};
use harness::{WATCHDOG, wait_until};
use libtest_mimic::{Arguments, Failed, Trial};

use consumer::{Consumer, open_gpu, read_stamp, write_stamp};

/// Two of what a GPU's driver rounds up to.
const REGION: u64 = 4 << 20;
const FIRST: VirtualDevice = VirtualDevice(0);

const CASES: &[(&str, fn())] = &[
    (
        "an_allocation_succeeds_only_because_limbo_was_collected",
        limbo,
    ),
    (
        "an_allocation_succeeds_only_because_a_peer_dropped_an_idle_mapping",
        idle_mapping,
    ),
    ("an_error_names_the_process_that_holds_the_memory", named),
    (
        "a_session_gets_memory_from_another_sessions_limbo",
        two_sessions,
    ),
    ("private_memory_gets_what_an_arena_does_not_need", private),
    (
        "memory_that_grows_in_place_serves_a_request_across_its_pieces",
        grows_in_place,
    ),
    (
        "bytes_that_two_streams_work_on_wait_for_both_of_them",
        two_streams,
    ),
    (
        "the_drivers_pool_gives_a_stream_its_own_bytes_and_others_wait",
        drivers_pool,
    ),
    (
        "the_drivers_pool_of_a_process_shares_its_limit_with_the_arena",
        drivers_pool_of_a_process,
    ),
    (
        "the_drivers_pool_is_what_the_frameworks_variables_ask_for",
        drivers_pool_by_variable,
    ),
    (
        "managed_memory_is_written_by_streams_and_has_a_limit",
        managed,
    ),
    ("an_allocation_waits_for_a_dead_holder", dead_holder),
    ("many_processes_share_more_than_there_is_at_once", many),
    ("a_forked_child_leaves_the_arena_alone", forked),
    (
        "a_snapshot_over_the_socket_shows_limbo_and_who_holds_it",
        asked_from_outside,
    ),
    (
        "a_session_without_an_arena_shows_where_its_blocks_lie",
        own_arena,
    ),
    (
        "a_participant_is_told_apart_in_two_sessions_of_one_arena",
        told_apart,
    ),
];

fn main() {
    if let Some(consumer::Role::Consumer) = harness::role() {
        return consumer::run();
    }
    let trial = |&(name, run): &(&'static str, fn())| {
        Trial::test(name, move || {
            run();
            Ok::<(), Failed>(())
        })
    };
    libtest_mimic::run(&Arguments::from_args(), CASES.iter().map(trial).collect()).exit();
}

fn options(regions: u64) -> ArenaOptions {
    ArenaOptions::default()
        .limit(regions * REGION)
        .growth(Growth::Fixed(REGION))
        .patience(WATCHDOG)
}

fn arena(gpu: &Gpu, options: ArenaOptions) -> Arc<Arena> {
    Arena::new(gpu.clone(), options).expect("an arena")
}

/// A session on an arena.
struct Producer {
    session: Session,
    /// Kept for its removal.
    _dir: tempfile::TempDir,
}

fn builder(gpu: &Gpu) -> (SessionBuilder, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("a directory");
    (
        Session::builder(gpu.clone())
            .socket(dir.path().join("s"))
            .quarantine(Duration::from_millis(1)),
        dir,
    )
}

impl Producer {
    /// Opens one that the arena knows of.
    fn registered(gpu: &Gpu, arena: &Arc<Arena>) -> Producer {
        let (builder, _dir) = builder(gpu);
        Producer {
            session: builder.arena(arena).open().expect("a session"),
            _dir,
        }
    }

    fn share(&self, block: &SentBlock, to: ParticipantId) -> Descriptor {
        block
            .share(To::Participant(to), After::Done)
            .expect("shared")
    }

    /// Lets a consumer hold a block that this side has dropped; returns the consumer's number of
    /// it.
    fn lend(&self, consumer: &mut Consumer, to: ParticipantId, bytes: u64) -> u64 {
        let block = self.session.alloc(bytes).expect("room");
        let descriptor = self.share(&block, to);
        drop(block);
        consumer.claim(&descriptor)
    }
}

#[track_caller]
fn is_out_of_memory(result: gpu_ipc::Result<Piece>) -> String {
    match result {
        Err(error @ Error::OutOfMemory { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// How often a consumer lets go just before an allocation. The session's own thread looks after a
/// while: that it is first in half of them is out of the question.
const ROUNDS: u64 = 100;

/// Takes what a consumer has just let go of, and says whether the first request found it. That one
/// alone has limbo looked at; where the session's thread looked first, the block may be on its way
/// back, which a later request finds.
#[track_caller]
fn take_back<T>(take: impl Fn() -> gpu_ipc::Result<T>) -> (T, bool) {
    let mut taken = take().ok();
    let at_once = taken.is_some();
    wait_until("the session's thread to give the block back", || {
        taken = taken.take().or_else(|| take().ok());
        taken.is_some()
    });
    (taken.expect("waited for"), at_once)
}

fn limbo() {
    let gpu = open_gpu();
    let arena = arena(&gpu, options(1).patience(Duration::ZERO));
    let producer = Producer::registered(&gpu, &arena);
    let mut consumer = Consumer::start();
    let id = consumer.connect(&producer.session);
    let mut late = 0;
    for _ in 0..ROUNDS {
        let held = producer.lend(&mut consumer, id, REGION);
        is_out_of_memory(arena.take(REGION, 1));
        consumer.let_go(held);
        // The arena waits for nothing.
        let (piece, at_once) = take_back(|| arena.take(REGION, 1));
        late += u64::from(!at_once);
        assert_eq!(
            (arena.stats().in_use, arena.stats().reserved),
            (REGION, REGION)
        );
        arena.give_back(piece);
    }
    assert!(
        late < ROUNDS / 2,
        "{late} of {ROUNDS} requests did not find what limbo had"
    );
}

fn idle_mapping() {
    let gpu = open_gpu();
    let arena = arena(&gpu, options(2).patience(Duration::ZERO));
    let (builder, _dir) = builder(&gpu);
    let session = builder
        .source(Arc::<Arena>::clone(&arena))
        .open()
        .expect("a session");
    let producer = Producer { session, _dir };
    let mut consumer = Consumer::start();
    let id = consumer.connect(&producer.session);
    let held = producer.lend(&mut consumer, id, 4096);
    consumer.let_go(held);
    wait_until("the block to be back", || {
        producer.session.collect();
        arena.stats().in_use == 0
    });
    // Nothing is in use, but the consumer keeps the region mapped for the next block.
    assert_eq!(arena.stats().exported, REGION);
    assert_eq!(consumer.mappings(), 1);
    is_out_of_memory(arena.take(2 * REGION, 1));
    assert_eq!(arena.trim().expect("the driver takes nothing"), 0);

    arena.register(producer.session.reclaim());
    let patient = Instant::now() + WATCHDOG;
    let piece = loop {
        match arena.take(2 * REGION, 1) {
            Ok(piece) => break piece,
            Err(error) => assert!(Instant::now() < patient, "{error}"),
        }
    };
    assert_eq!(consumer.mappings(), 0);
    assert_eq!(
        (arena.stats().reserved, arena.stats().exported),
        (2 * REGION, 0)
    );
    arena.give_back(piece);
}

fn named() {
    let gpu = open_gpu();
    let arena = arena(&gpu, options(1).patience(Duration::ZERO));
    let producer = Producer::registered(&gpu, &arena);
    let mut consumer = Consumer::start();
    let id = consumer.connect(&producer.session);
    let held = producer.lend(&mut consumer, id, REGION);
    let text = is_out_of_memory(arena.take(REGION, 1));
    let name = format!("process {} (", consumer.pid());
    for part in [
        &name,
        "holds 4 MiB in 1 leases",
        "in limbo 4 MiB",
        "limit 4194304",
        "|####",
    ] {
        assert!(text.contains(part), "{part}\nnot in\n{text}");
    }
    let snapshot = arena.snapshot();
    assert_eq!(
        (snapshot.holders[0].pid, snapshot.holders[0].bytes),
        (consumer.pid(), REGION)
    );
    assert_eq!(
        (arena.stats().limbo, arena.stats().exported),
        (REGION, REGION)
    );
    assert!(
        snapshot
            .svg()
            .contains(&format!("process {}", consumer.pid()))
    );
    consumer.let_go(held);
    arena.give_back(take_back(|| arena.take(REGION, 1)).0);
    wait_until("limbo to be empty", || arena.snapshot().limbo_bytes == 0);
}

fn two_sessions() {
    let gpu = open_gpu();
    let arena = arena(&gpu, options(1).patience(Duration::ZERO));
    let lender = Producer::registered(&gpu, &arena);
    let other = Producer::registered(&gpu, &arena);
    let mut consumer = Consumer::start();
    let id = consumer.connect(&lender.session);
    let mut late = 0;
    for _ in 0..ROUNDS {
        let held = lender.lend(&mut consumer, id, REGION);
        consumer.let_go(held);
        let (block, at_once) = take_back(|| other.session.alloc(REGION));
        late += u64::from(!at_once);
        // A block is free before it is not counted any more.
        wait_until("limbo to be empty", || {
            lender.session.stats().limbo_blocks == 0
        });
        drop(block);
    }
    assert!(
        late < ROUNDS / 2,
        "{late} of {ROUNDS} requests did not find what the other session's limbo had"
    );
}

fn grows_in_place() {
    let gpu = open_gpu();
    if !gpu.caps().ranges {
        let refused = GrowingMemory::new(gpu).expect_err("a device without ranges");
        assert!(
            refused.to_string().contains("has no ranges of addresses"),
            "{refused}"
        );
        return;
    }
    let options = BfcOptions::new("grows")
        .growth(Growth::Fixed(REGION))
        .limit(8 * REGION);
    let bfc = Bfc::new(
        options.clone(),
        GrowingMemory::new(gpu.clone()).expect("ranges"),
    );
    let held: Vec<u64> = (0..8)
        .map(|_| bfc.alloc(Request::new(REGION)).expect("room").address)
        .collect();
    held[1..]
        .iter()
        .for_each(|&address| bfc.free(address).expect("in use"));
    // Seven pieces, one request: written through and read again across their borders.
    let placed = bfc
        .alloc(Request::new(7 * REGION))
        .expect("what is free lies side by side");
    assert_eq!(placed.address, held[1]);
    let memory = bfc.upstream().memory().expect("memory");
    let bytes: Vec<u8> = (0..7 * REGION).map(|at| (at % 251) as u8).collect();
    let mut read = vec![0; bytes.len()];
    // SAFETY: `write` asks for a range of one allocation that nothing else uses: it is this case's
    // own.
    unsafe { memory.write(placed.address, &bytes) }.expect("it is written");
    // SAFETY: as above.
    unsafe { memory.read(placed.address, &mut read) }.expect("it is read");
    assert!(bytes == read, "what was written across the pieces");
    bfc.free(placed.address).expect("in use");
    assert_eq!(bfc.trim().expect("the driver takes the tail"), 7 * REGION);
    bfc.alloc(Request::new(4 * REGION))
        .expect("the tail comes again");
    // The same in regions that lie apart.
    let apart = Bfc::new(
        options.collect_regions(false),
        DeviceMemory::new(gpu).expect("memory"),
    );
    let held: Vec<u64> = (0..8)
        .map(|_| apart.alloc(Request::new(REGION)).expect("room").address)
        .collect();
    held[1..]
        .iter()
        .for_each(|&address| apart.free(address).expect("in use"));
    let refused = apart
        .alloc(Request::new(7 * REGION))
        .expect_err("no region has as much");
    assert!(matches!(refused, Error::OutOfMemory { .. }), "{refused}");
}

fn two_streams() {
    let gpu = open_gpu();
    let memory = DeviceMemory::new(gpu.clone()).expect("memory");
    let bfc = Bfc::new(
        BfcOptions::new("bfc")
            .limit(2 * REGION)
            .growth(Growth::Whole),
        memory,
    );
    let streams = [(); 2].map(|()| gpu_ipc::Stream::create(&gpu).expect("a stream"));
    for round in 0..200u64 {
        let placed = bfc
            .alloc(Request::new(2 * REGION).wait_until(Instant::now() + WATCHDOG))
            .expect("both get there");
        streams.iter().for_each(|stream| {
            write_stamp(
                &gpu,
                stream,
                gpu_ipc::backend::DevicePtr(placed.address),
                round,
            )
        });
        // SAFETY: `work_on` asks for a live stream of the device: both live until the end.
        let other = unsafe { Recorded::work_on(&gpu, streams[1].raw()) }.expect("it is recorded");
        bfc.record_work(placed.address, other).expect("in use");
        // SAFETY: as above.
        unsafe { Recorded::free_on(&bfc, placed.address, &gpu, &[streams[0].raw()]) }
            .expect("in use");
        assert!(bfc.free(placed.address).is_err(), "it is freed already");
    }
    wait_until("both streams to be done", || {
        bfc.settle() == 0 && bfc.snapshot().pending_bytes == 0
    });
    assert_eq!(bfc.trim().expect("the driver takes it"), 2 * REGION);
}

/// Looks whether a refusal says why, and what to do about it.
fn pools_are_refused(gpu: &Gpu, error: Error) {
    assert!(
        !gpu.caps().pools && matches!(error, Error::Unsupported { .. }),
        "{error}"
    );
    let text = error.to_string();
    if gpu.backend().kind() == BackendKind::Hip {
        let seen = text.contains("the probe saw here") || text.contains("no probe has proved it");
        assert!(seen && text.contains("GPU_IPC_HIP_TRY=pools"), "{text}");
    }
}

fn drivers_pool() {
    let gpu = open_gpu();
    if !gpu.caps().pools {
        return pools_are_refused(
            &gpu,
            DriverPool::new("pool", gpu.clone(), u64::MAX).expect_err("it has none"),
        );
    }
    let budget = Arc::new(Budget::new(2 * REGION));
    let pool = DriverPool::new("pool", gpu.clone(), u64::MAX)
        .expect("a pool")
        .budget(budget.clone());
    let streams = [(); 2].map(|()| gpu_ipc::Stream::create(&gpu).expect("a stream"));
    // SAFETY: `know_stream` asks for streams that live as long as the pool is used: they do, and
    // nobody captures them.
    let known = streams
        .each_ref()
        .map(|stream| unsafe { pool.know_stream(stream.raw()) }.expect("it is ours"));
    for round in 0..200_u8 {
        let placed = pool
            .alloc(Request::new(2 * REGION).on(known[0]))
            .expect("room");
        let ptr = gpu_ipc::backend::DevicePtr(placed.address);
        // SAFETY: `fill` asks for a live stream and a range that stays valid until the fill is
        // done: the allocation goes back behind it.
        unsafe { gpu.backend().fill(streams[0].raw(), ptr, round, 2 * REGION) }
            .expect("it is queued");
        // SAFETY: `work_on` asks for a live stream of the device: it lives until the end.
        let work = unsafe { Recorded::work_on(&gpu, streams[0].raw()) }.expect("it is recorded");
        // In the stream's order, whether the kernel has run or not.
        pool.free_after(placed.address, vec![work]).expect("in use");
        assert!(pool.free(placed.address).is_err(), "it is freed already");
    }
    // Work of two streams: no order of one covers it, so what stands for it is asked.
    let placed = pool.alloc(Request::new(REGION).on(known[0])).expect("room");
    write_stamp(
        &gpu,
        &streams[0],
        gpu_ipc::backend::DevicePtr(placed.address),
        77,
    );
    assert_eq!(
        read_stamp(
            &gpu,
            &streams[0],
            gpu_ipc::backend::DevicePtr(placed.address)
        ),
        77
    );
    // SAFETY: as above.
    let work = streams
        .each_ref()
        .map(|stream| unsafe { Recorded::work_on(&gpu, stream.raw()) }.expect("recorded"));
    pool.free_after(placed.address, work.into())
        .expect("in use");
    let all = pool
        .alloc(Request::new(2 * REGION).wait_until(Instant::now() + WATCHDOG))
        .expect("the work ends");
    let refused = pool
        .alloc(Request::new(1))
        .expect_err("the budget is used up");
    assert!(refused.to_string().contains("budget"), "{refused}");
    let stats = pool.stats();
    assert_eq!((stats.bytes_in_use, stats.num_allocs), (2 * REGION, 202));
    assert!(
        stats.bytes_reserved >= 2 * REGION && stats.peak_bytes_reserved >= stats.bytes_reserved
    );
    pool.free(all.address).expect("in use");
    pool.trim().expect("the driver takes it");
    assert_eq!((pool.stats().bytes_reserved, budget.used()), (0, 0));
}

fn drivers_pool_of_a_process() {
    let gpu = open_gpu();
    let state = ProcessState::new([gpu.clone()]);
    let options = ProcessOptions::default()
        .device_kind(AllocatorKind::Driver)
        .limit(MemoryLimit::Bytes(4 * REGION));
    state
        .configure(options.arena_growth(Growth::Fixed(REGION)))
        .expect("nothing is made yet");
    let device = match state.allocator(FIRST, AllocatorAttributes::default()) {
        Ok(device) => device,
        Err(error) => return pools_are_refused(&gpu, error),
    };
    let arena = state.arena(FIRST).expect("an arena");
    let placed = device.alloc(Request::new(3 * REGION)).expect("room");
    let piece = arena.take(REGION, 1).expect("the rest");
    is_out_of_memory(arena.take(REGION, 1));
    device.free(placed.address).expect("in use");
    arena.give_back(
        arena
            .take(REGION, 1)
            .expect("what the pool does not use counts no more"),
    );
    arena.give_back(piece);
    drop(device);
    state
        .tear_down(AllocatorKey::Device(FIRST))
        .expect("nobody has it");
}

fn drivers_pool_by_variable() {
    let gpu = open_gpu();
    let names = [
        ("TF_GPU_ALLOCATOR", "cuda_malloc_async"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),
        ("PYTORCH_HIP_ALLOC_CONF", "backend:hipMallocAsync"),
    ];
    for (name, value) in names {
        let options = ProcessOptions::from_vars(|asked| (asked == name).then(|| value.to_owned()))
            .expect("it is known");
        let state = ProcessState::new([gpu.clone()]);
        state
            .configure(options.limit(MemoryLimit::Bytes(2 * REGION)))
            .expect("nothing is made yet");
        let device = match state.allocator(FIRST, AllocatorAttributes::default()) {
            Ok(device) => device,
            Err(error) => {
                pools_are_refused(&gpu, error);
                continue;
            }
        };
        let placed = device.alloc(Request::new(REGION)).expect("room");
        let kind = gpu
            .backend()
            .classify(gpu_ipc::backend::DevicePtr(placed.address))
            .expect("it is known")
            .kind;
        assert_eq!(kind, MemoryKind::Pool, "{name}");
        device.free(placed.address).expect("in use");
        drop(device);
        state
            .tear_down(AllocatorKey::Device(FIRST))
            .expect("nobody has it");
    }
}

fn managed() {
    let gpu = open_gpu();
    if !gpu.caps().managed {
        let error = ManagedMemory::new(gpu).expect_err("it has none");
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        return;
    }
    let bfc = Bfc::new(
        BfcOptions::new("managed"),
        ManagedMemory::new(gpu.clone()).expect("it has some"),
    );
    let placed = bfc.alloc(Request::new(2 * REGION)).expect("room");
    let stream = gpu_ipc::Stream::create(&gpu).expect("a stream");
    for at in [0, REGION, 2 * REGION - 8] {
        let ptr = gpu_ipc::backend::DevicePtr(placed.address + at);
        write_stamp(&gpu, &stream, ptr, at + 1);
        assert_eq!(read_stamp(&gpu, &stream, ptr), at + 1);
    }
    let info = gpu
        .backend()
        .classify(gpu_ipc::backend::DevicePtr(placed.address))
        .expect("it is known");
    assert_eq!((info.kind, info.sharing), (MemoryKind::Managed, None));
    // More than device and host have is refused before the driver is asked: its pages come at their
    // first touch, when nobody can refuse them.
    let refused = bfc.alloc(Request::new(1 << 50)).expect_err("a pebibyte");
    assert!(refused.to_string().contains("out of memory"), "{refused}");
    bfc.free(placed.address).expect("in use");
    assert!(bfc.trim().expect("the driver takes it") >= 2 * REGION);
}

fn private() {
    let gpu = open_gpu();
    let state = ProcessState::new([gpu.clone()]);
    let limit = ProcessOptions::default()
        .limit(MemoryLimit::Bytes(4 * REGION))
        .patience(WATCHDOG);
    state
        .configure(limit.arena_growth(Growth::Fixed(3 * REGION)))
        .expect("nothing is made yet");
    let arena = state.arena(FIRST).expect("an arena");
    let device = state
        .allocator(FIRST, AllocatorAttributes::default())
        .expect("memory");
    let producer = Producer::registered(&gpu, &arena);
    let mut consumer = Consumer::start();
    let id = consumer.connect(&producer.session);
    let held = producer.lend(&mut consumer, id, 3 * REGION);
    consumer.let_go(held);
    // The block is in limbo, and its region is mapped: it takes a collect, an unmapping and a trim.
    let placed = device
        .alloc(Request::new(2 * REGION))
        .expect("the arena gave its region back");
    assert_eq!(arena.stats().reserved, 0);
    device.free(placed.address).expect("in use");
}

fn dead_holder() {
    let gpu = open_gpu();
    let arena = arena(&gpu, options(1).wait(WATCHDOG));
    let producer = Producer::registered(&gpu, &arena);
    let mut consumer = Consumer::start();
    let id = consumer.connect(&producer.session);
    producer.lend(&mut consumer, id, REGION);
    let waiter = thread::spawn({
        let arena = arena.clone();
        move || arena.take(REGION, 1)
    });
    consumer.kill();
    let piece = waiter
        .join()
        .expect("no panic")
        .expect("the dead hold nothing");
    arena.give_back(piece);
    assert_eq!(producer.session.stats().deaths, 1);
}

fn many() {
    let gpu = open_gpu();
    // Of 200 blocks of half a region at most four are there at once.
    let arena = arena(&gpu, options(2).wait(WATCHDOG));
    let producer = Producer::registered(&gpu, &arena);
    let mut consumers: Vec<(Consumer, ParticipantId)> = (0..4)
        .map(|_| {
            let mut consumer = Consumer::start();
            let id = consumer.connect(&producer.session);
            (consumer, id)
        })
        .collect();
    let stream = gpu_ipc::Stream::create(&gpu).expect("a stream");
    for number in 0..200u64 {
        let (consumer, id) = &mut consumers[number as usize % 4];
        let block = producer
            .session
            .alloc(REGION / 2)
            .expect("room, sooner or later");
        write_stamp(&gpu, &stream, block.device_ptr(), number);
        let descriptor = producer.share(&block, *id);
        drop(block);
        let held = consumer.claim(&descriptor);
        assert_eq!(consumer.stamp(held), number);
        consumer.let_go(held);
    }
    assert!(arena.stats().reserved <= 2 * REGION);
    wait_until("everything to be back", || {
        producer.session.collect();
        arena.stats().in_use == 0
    });
}

fn forked() {
    let gpu = open_gpu();
    let arena = arena(&gpu, options(1));
    let piece = arena.take(1, 1).expect("room");
    // SAFETY: `fork` asks that the child of a process with threads calls only what is safe there:
    // the calls return before they lock anything.
    unsafe {
        harness::holds_in_a_fork(|| {
            let refused = matches!(arena.take(1, 1), Err(Error::Forked { .. }))
                && matches!(arena.trim(), Err(Error::Forked { .. }));
            arena.give_back(piece.clone());
            refused
        });
    }
    arena.give_back(piece);
    assert_eq!(arena.trim().expect("the driver takes it"), REGION);
}

/// What somebody who looks from outside sees of a session.
#[track_caller]
fn seen(session: &Session) -> Snapshot {
    let text = gpu_ipc::admin::snapshot(session.socket_path(), Some(WATCHDOG)).expect("an answer");
    Snapshot::from_json(&text).expect("a good snapshot")
}

fn asked_from_outside() {
    let gpu = open_gpu();
    let arena = arena(&gpu, options(2));
    // The arena does not know of it: the session that is asked tells of itself.
    let (builder, _dir) = builder(&gpu);
    let session = builder
        .source(Arc::<Arena>::clone(&arena))
        .open()
        .expect("a session");
    let producer = Producer { session, _dir };
    let mut consumer = Consumer::start();
    let id = consumer.connect(&producer.session);
    let kept = producer.session.alloc(REGION / 2).expect("room");
    let descriptor = producer.share(&kept, id);
    let shared = consumer.claim(&descriptor);
    let dropped = producer.lend(&mut consumer, id, REGION / 4);

    let snapshot = seen(&producer.session);
    assert_eq!(
        (snapshot.limbo_bytes, snapshot.limbo_of(0)),
        (REGION / 4, REGION / 4)
    );
    assert_eq!(
        (snapshot.holders[0].pid, snapshot.holders[0].bytes),
        (consumer.pid(), 3 * REGION / 4)
    );
    assert_eq!(snapshot.regions, arena.snapshot().regions);
    let mut lent: Vec<_> = snapshot
        .lent
        .iter()
        .map(|lent| (lent.len, lent.limbo, lent.holder))
        .collect();
    lent.sort_unstable();
    assert_eq!(
        lent,
        [(REGION / 4, true, Some(0)), (REGION / 2, false, Some(0))]
    );
    let text = snapshot.to_string();
    let map = text
        .lines()
        .find(|line| line.contains('|'))
        .expect("a region is drawn");
    assert_eq!(
        (
            map.matches('o').count(),
            map.matches('#').count(),
            map.matches('_').count()
        ),
        (32, 16, 16),
        "{text}"
    );
    let svg = snapshot.svg();
    assert!(
        svg.contains(&format!("in limbo, held by {} (", consumer.pid())),
        "{svg}"
    );

    consumer.let_go(dropped);
    wait_until("limbo to be empty", || {
        producer.session.collect();
        producer.session.stats().limbo_blocks == 0
    });
    let snapshot = seen(&producer.session);
    assert_eq!((snapshot.limbo_bytes, snapshot.lent.len()), (0, 1));
    consumer.let_go(shared);
}

fn own_arena() {
    let (builder, _dir) = builder(&open_gpu());
    let session = builder.open().expect("a session");
    let block = session.alloc(REGION / 4).expect("there is room");
    let snapshot = seen(&session);
    assert!(snapshot.name.starts_with("arena"), "{snapshot}");
    assert_eq!(
        (snapshot.stats.bytes_in_use, snapshot.regions.len()),
        (REGION / 4, 1),
        "{snapshot}"
    );
    drop(block);
    assert_eq!(seen(&session).stats.bytes_in_use, 0);
    // It goes on answering.
    gpu_ipc::admin::inspect(session.socket_path(), Some(WATCHDOG)).expect("a report");
}

fn told_apart() {
    let gpu = open_gpu();
    let arena = arena(&gpu, options(2));
    let sessions = [
        Producer::registered(&gpu, &arena),
        Producer::registered(&gpu, &arena),
    ];
    let mut consumers = [Consumer::start(), Consumer::start()];
    let ids: Vec<ParticipantId> = sessions
        .iter()
        .zip(&mut consumers)
        .map(|(producer, consumer)| consumer.connect(&producer.session))
        .collect();
    // Both are their session's first: only the session tells one from the other.
    assert_eq!(ids[0], ids[1]);
    let held: Vec<u64> = (0..2)
        .map(|at| sessions[at].lend(&mut consumers[at], ids[at], (at as u64 + 1) * REGION / 8))
        .collect();
    for (asked, producer) in sessions.iter().enumerate() {
        let snapshot = seen(&producer.session);
        assert_eq!(snapshot.limbo_bytes, 3 * REGION / 8);
        assert_eq!(
            snapshot.holders.len(),
            2,
            "nobody twice: {:?}",
            snapshot.holders
        );
        // The session that is asked comes first.
        for (place, of) in [asked, 1 - asked].into_iter().enumerate() {
            assert_eq!(snapshot.holders[place].pid, consumers[of].pid());
            assert_eq!(snapshot.limbo_of(place), (of as u64 + 1) * REGION / 8);
        }
    }
    for (consumer, held) in consumers.iter_mut().zip(held) {
        consumer.let_go(held);
    }
}

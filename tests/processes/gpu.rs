//! What only a real GPU can show. Ignored unless the backend that is tested is CUDA.

use std::sync::Arc;
use std::time::Instant;

use gpu_ipc::allocators::{
    Allocator, Bfc, BfcOptions, DeviceMemory, GraphPool, Placed, Recorded, Request,
};
use gpu_ipc::backend::{DevicePtr, Sharing};
use gpu_ipc::participant::GraphBlocks;
use gpu_ipc::{After, Claims, Gpu, Participant, ParticipantId, SentBlock, State, Stream, To, Wait};
use harness::{WATCHDOG, wait_until};

use crate::agent::Agent;
use crate::device::{open_gpu, read_stamp, write_stamp};
use crate::kernel::Kernels;
use crate::{Case, Producer};

pub const CASES: &[Case] = &[
    ("gpu::no_write_of_the_dead_lands_after_reuse_by_fd", || {
        no_late_write(Sharing::Fd, Fork::Never)
    }),
    (
        "gpu::no_write_of_the_dead_lands_after_reuse_by_handle",
        || no_late_write(Sharing::Handle, Fork::Never),
    ),
    (
        "gpu::no_write_of_the_dead_lands_after_reuse_by_fd_forked_before",
        || no_late_write(Sharing::Fd, Fork::Before),
    ),
    (
        "gpu::no_write_of_the_dead_lands_after_reuse_by_fd_forked_after",
        || no_late_write(Sharing::Fd, Fork::After),
    ),
    (
        "gpu::no_write_of_the_dead_lands_after_reuse_by_handle_forked_before",
        || {
            no_late_write(Sharing::Handle, Fork::Before);
        },
    ),
    (
        "gpu::no_write_of_the_dead_lands_after_reuse_by_handle_forked_after",
        || {
            no_late_write(Sharing::Handle, Fork::After);
        },
    ),
    (
        "gpu::a_producer_that_dies_in_its_kernel_hangs_nobody",
        producer_dies_in_its_kernel,
    ),
    (
        "gpu::a_producer_whose_context_breaks_hangs_nobody",
        producer_breaks,
    ),
    (
        "gpu::a_consumer_whose_context_breaks_harms_nobody",
        consumer_breaks,
    ),
    (
        "gpu::a_kernel_that_never_ends_holds_up_nobody_else",
        endless_kernel,
    ),
    ("gpu::ten_thousand_blocks", ten_thousand_blocks),
    ("gpu::thirty_two_consumers", thirty_two_consumers),
    ("gpu::a_region_of_32_gib", large_region),
    (
        "gpu::a_global_capture_survives_what_the_library_does",
        global_capture,
    ),
    (
        "gpu::captures_survive_leases_that_end_behind_their_stream",
        captures_beside_releases,
    ),
    ("gpu::a_graph_is_launched_again_after_the_drop", graph_again),
    (
        "gpu::what_is_freed_under_capture_is_the_graphs_at_every_launch",
        graph_pool,
    ),
];

/// Bytes that a dying consumer writes to.
const LEN: u64 = 1 << 20;

/// When the consumer forks a child that lives on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fork {
    Never,
    /// Before it connects: the child has the driver's files and not the socket.
    Before,
    /// After it connected: the child has both.
    After,
}

/// Reads the whole of a block.
fn contents(gpu: &Gpu, stream: &Stream, block: &SentBlock) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(block.len()).expect("it fits")];
    // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the copy is
    // done: the stream is synchronised before `bytes` is read, and it is as long as the block.
    unsafe {
        gpu.backend().copy_to_host(
            stream.raw(),
            bytes.as_mut_ptr(),
            block.device_ptr(),
            bytes.len(),
        )
    }
    .expect("queued");
    stream.synchronize().expect("it runs");
    bytes
}

/// Fills a block, and waits for it.
pub fn fill(gpu: &Gpu, stream: &Stream, block: &SentBlock, byte: u8) {
    // SAFETY: `fill` asks for a live stream and a range that is valid until it is done: the stream
    // is synchronised, and the block is held.
    unsafe {
        gpu.backend()
            .fill(stream.raw(), block.device_ptr(), byte, block.len())
    }
    .expect("queued");
    stream.synchronize().expect("it runs");
}

fn no_late_write(sharing: Sharing, fork: Fork) {
    let producer = Producer::with(|builder| builder.sharing(sharing).region_bytes(2 << 20));
    let mut consumer = Agent::start();
    let mut child = (fork == Fork::Before).then(|| consumer.fork());
    let id = consumer.connect(&producer.session);
    let block = producer.session.alloc(LEN).expect("there is room");
    let index = consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    if fork == Fork::After {
        child = Some(consumer.fork());
    }
    consumer.write_on(index, LEN / 8);
    let first = producer.stamp(&block);
    wait_until("the kernel to write", || producer.stamp(&block) != first);
    let place = block.place();
    drop(block);
    let killed = Instant::now();
    consumer.kill();
    if let Some(child) = child {
        wait_until("the death to be noticed", || {
            producer.session.stats().quarantined == 1
        });
        for _ in 0..1000 {
            producer.session.collect();
            assert_eq!(
                producer.session.stats().limbo_blocks,
                1,
                "reclaimed while the child keeps the kernel running"
            );
        }
        rustix::process::kill_process(child, rustix::process::Signal::KILL).expect("it lives");
    }
    wait_until("the block to be reclaimed", || {
        producer.session.collect();
        producer.session.stats().live_blocks == 0
    });
    println!(
        "{sharing:?}, child {fork:?}: {} ms from the kill to the reclaim",
        killed.elapsed().as_millis()
    );
    let again = producer.session.alloc(LEN).expect("there is room");
    assert_eq!(again.place(), place, "the same bytes");
    fill(&producer.gpu, &producer.stream, &again, 0x5a);
    for _ in 0..300 {
        let bytes = contents(&producer.gpu, &producer.stream, &again);
        assert!(
            bytes.iter().all(|&byte| byte == 0x5a),
            "the dead wrote after the reuse"
        );
    }
}

/// A producer in another process, a participant of its session here, and a block of it.
fn remote() -> (Agent, u64, Participant, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let mut producer = Agent::start();
    producer.open(&path);
    let block = producer.alloc(1048576, 6);
    let participant = Participant::builder(open_gpu())
        .connect(&path)
        .expect("connected");
    (producer, block, participant, dir)
}

/// Claims what stands behind a kernel that never ends, on a stream, and waits until that stream is
/// done.
fn wait_behind_the_kernel(
    producer: &mut Agent,
    block: u64,
    participant: &Participant,
    end: impl FnOnce(&mut Agent),
) {
    producer.write_on(block, 131_072);
    let descriptor = producer.share_on_stream(block, To::Participant(participant.id()));
    let stream = Stream::create(participant.gpu()).expect("a stream");
    let received = participant
        .claim(descriptor.as_bytes(), Wait::Stream(&stream), Some(WATCHDOG))
        .expect("claimed");
    assert_eq!(received.state(), State::Pending);
    end(producer);
    stream.synchronize().expect("the wait is over");
    wait_until("the news", || received.state() == State::Poisoned);
}

fn producer_dies_in_its_kernel() {
    let (mut producer, block, participant, _dir) = remote();
    wait_behind_the_kernel(&mut producer, block, &participant, |producer| {
        producer.kill()
    });
    wait_until("the dead producer's memory to go", || {
        participant.mappings() == 0
    });
}

fn producer_breaks() {
    let (mut producer, block, participant, _dir) = remote();
    wait_behind_the_kernel(&mut producer, block, &participant, |producer| {
        producer.crash();
    });
    // Its process lives, and other sessions do not notice.
    let other = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&other.session);
    let block = other.block(9);
    let index = consumer.claim(
        &block
            .share(To::Participant(id), After::Stream(&other.stream))
            .expect("shared"),
    );
    assert_eq!(consumer.stamp(index), 9);
}

fn consumer_breaks() {
    let producer = Producer::new();
    let (mut broken, mut well) = (Agent::start(), Agent::start());
    let (first, second) = (
        broken.connect(&producer.session),
        well.connect(&producer.session),
    );
    let (block, other) = (producer.block(3), producer.block(4));
    let index = broken.claim(
        &block
            .share(To::Participant(first), After::Done)
            .expect("shared"),
    );
    broken.used(index);
    broken.crash();
    broken.let_go_of_all();
    let index = well.claim(
        &other
            .share(To::Participant(second), After::Done)
            .expect("shared"),
    );
    assert_eq!(well.stamp(index), 4);
    assert_eq!(producer.stamp(&block), 3, "the producer goes on");
    drop(block);
    // Nobody can say when the broken context's work ended: its process does.
    broken.kill();
    well.let_go_of_all();
    drop(other);
    producer.wait_for_nothing_held();
}

fn endless_kernel() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.session.alloc(LEN).expect("there is room");
    let share = |block: &SentBlock| {
        block
            .share(To::Participant(id), After::Done)
            .expect("shared")
    };
    let stuck = consumer.claim(&share(&block));
    consumer.write_on(stuck, 8);
    consumer.let_go(stuck);
    // On a stream of its own a session and a participant begin and end meanwhile: none of their
    // calls may stop.
    for round in 0..20 {
        let other = Producer::new();
        let participant =
            Participant::builder(other.gpu.clone()).connect(other.session.socket_path());
        let participant = participant.expect("connected");
        let block = other.block(round);
        let descriptor = block
            .share(To::Participant(participant.id()), After::Done)
            .expect("shared");
        let stream = Stream::create(&other.gpu).expect("a stream");
        let received = participant
            .claim(descriptor.as_bytes(), Wait::Stream(&stream), Some(WATCHDOG))
            .expect("claimed");
        assert_eq!(
            read_stamp(&other.gpu, &stream, received.device_ptr()),
            round
        );
    }
    assert_eq!(block.outstanding(), 1, "the kernel still writes");
    consumer.kill();
    drop(block);
    producer.wait_for_nothing_held();
}

fn ten_thousand_blocks() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let blocks: Vec<SentBlock> = (0..10_000)
        .map(|_| producer.session.alloc(4096).expect("there is room"))
        .collect();
    for some in blocks.chunks(500) {
        let grants: Vec<_> = some
            .iter()
            .map(|block| (block, To::Participant(id)))
            .collect();
        let after = After::Stream(&producer.stream);
        let descriptors = producer
            .session
            .share_many(&grants, after, &Default::default())
            .expect("shared");
        assert_eq!(consumer.claim_many(&descriptors), (500, None));
    }
    drop(blocks);
    assert_eq!(producer.session.stats().limbo_blocks, 10_000);
    consumer.let_go_of_all();
    producer.wait_for_nothing_held();
    assert_eq!(producer.session.stats().live_blocks, 0);
}

fn thirty_two_consumers() {
    let producer = Producer::new();
    let mut consumers: Vec<Agent> = (0..32).map(|_| Agent::start()).collect();
    let ids: Vec<ParticipantId> = consumers
        .iter_mut()
        .map(|agent| agent.connect(&producer.session))
        .collect();
    let block = producer.block(8);
    let ticket = block
        .share(
            To::Ticket(Claims::Unlimited),
            After::Stream(&producer.stream),
        )
        .expect("a ticket");
    for (consumer, &id) in consumers.iter_mut().zip(&ids) {
        let addressed = block
            .share(To::Participant(id), After::Stream(&producer.stream))
            .expect("shared");
        for descriptor in [addressed, ticket] {
            let claimed = consumer.claim_on_stream(&descriptor);
            assert_eq!(consumer.stamp(claimed), 8);
        }
    }
    assert_eq!(block.outstanding(), 64);
    drop(block);
    for consumer in &mut consumers[..16] {
        consumer.kill();
    }
    for consumer in &mut consumers[16..] {
        consumer.let_go_of_all();
    }
    producer.wait_for_nothing_held();
}

fn large_region() {
    let len = 32u64 << 30;
    let producer = Producer::new();
    let block = producer.session.alloc(len).expect("the device has room");
    let end = block.device_ptr().offset(len - 4096);
    write_stamp(&producer.gpu, &producer.stream, end, 77);
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let whole = consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    assert_eq!(consumer.len(whole), len);
    let last = consumer.slice(whole, len - 4096, len);
    assert_eq!(consumer.stamp(last), 77);
    drop(block);
    consumer.let_go_of_all();
    producer.wait_for_nothing_held();
}

fn global_capture() {
    let kernels = Kernels::open();
    let producer = Producer::new();
    let participant =
        Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
    let participant = participant.expect("connected");
    let (captured, stream) = (
        Stream::create(&producer.gpu).expect("a stream"),
        Stream::create(&producer.gpu).expect("a stream"),
    );
    let target = producer.session.alloc(4096).expect("there is room");
    let graph = kernels.capture(&captured, || {
        kernels.write_once(&captured, target.device_ptr(), 512);
        // Shares, claims, drops, collects and times out while the application captures.
        for n in 0..200 {
            let block = producer.session.alloc(4096).expect("there is room");
            let to = if n % 2 == 0 {
                To::Participant(participant.id())
            } else {
                To::Ticket(Claims::Once)
            };
            let descriptor = block.share(to, After::Stream(&stream)).expect("shared");
            drop(block);
            let claimed =
                participant.claim(descriptor.as_bytes(), Wait::Stream(&stream), Some(WATCHDOG));
            drop(claimed.expect("claimed"));
            producer.session.collect();
        }
        assert!(
            target
                .share(To::Participant(participant.id()), After::Stream(&captured))
                .is_err(),
            "it captures"
        );
    });
    kernels.launch_graph(&graph, &captured);
    captured.synchronize().expect("it runs");
    assert_eq!(producer.stamp(&target), 1);
}

/// More leases end behind a stream than a queue takes, so that the participant's thread records
/// events on it, while the application begins and ends captures of the same stream.
fn captures_beside_releases() {
    let kernels = Kernels::open();
    let producer = Producer::new();
    let participant =
        Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
    let participant = participant.expect("connected");
    let stream = Stream::create(&producer.gpu).expect("a stream");
    let (block, target) = (
        producer.session.alloc(4096).expect("there is room"),
        producer.session.alloc(4096).expect("there is room"),
    );
    for _ in 0..50 {
        let (go, gate) = std::sync::mpsc::channel::<()>();
        let hold = Box::new(move || {
            let _ = gate.recv();
        });
        // SAFETY: `host_function` asks for a live stream that nobody captures at this moment: it
        // lives to the end of the case.
        unsafe { producer.gpu.backend().host_function(stream.raw(), hold) }.expect("queued");
        for _ in 0..200 {
            let descriptor = block
                .share(To::Participant(participant.id()), After::Done)
                .expect("shared");
            let held = participant
                .claim(descriptor.as_bytes(), Wait::None, Some(WATCHDOG))
                .expect("claimed");
            held.used_on(&stream).expect("a stream of its own");
        }
        drop(go);
        for _ in 0..20 {
            let _graph = kernels.capture(&stream, || {
                kernels.write_once(&stream, target.device_ptr(), 512)
            });
        }
    }
    wait_until("every lease to end", || {
        producer.session.collect();
        producer.session.stats().held == 0
    });
    assert_eq!(participant.kept_leases(), 0, "a capture kept a lease");
}

fn graph_again() {
    let kernels = Kernels::open();
    let producer = Producer::new();
    let participant =
        Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
    let participant = participant.expect("connected");
    let stream = Stream::create(&producer.gpu).expect("a stream");
    let block = producer.block(50);
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    let received = participant
        .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("claimed");
    let list = GraphBlocks::new();
    let graph = kernels.capture(&stream, || {
        kernels.write_once(&stream, received.device_ptr(), 512);
        received.keep_for(&list);
        drop(received);
    });
    for stamp in [60, 70] {
        write_stamp(&producer.gpu, &producer.stream, block.device_ptr(), stamp);
        list.launched_on(&stream).expect("a stream of its own");
        kernels.launch_graph(&graph, &stream);
        stream.synchronize().expect("it runs");
        assert_eq!(
            producer.stamp(&block),
            1,
            "the graph writes the block again"
        );
        producer.session.collect();
        assert_eq!((block.outstanding(), participant.kept_leases()), (1, 0));
    }
    drop(list);
    wait_until("the lease to end", || {
        producer.session.collect();
        block.outstanding() == 0
    });
}

fn graph_pool() {
    let kernels = Kernels::open();
    let gpu = open_gpu();
    let stream = Stream::create(&gpu).expect("a stream");
    let memory = DeviceMemory::new(gpu.clone()).expect("memory");
    let program = Arc::new(Bfc::new(BfcOptions::new("program"), memory));
    // SAFETY: `stream_info` asks for a live stream: it lives until the end.
    let identity = unsafe { gpu.backend().stream_info(stream.raw()) }
        .expect("a stream of ours")
        .identity;
    let pool = GraphPool::new("graph", program.clone());
    let result = program.alloc(Request::new(LEN)).expect("room");
    let mut places = Vec::new();
    let graph = kernels.capture(&stream, || {
        // Each of the three is freed before the next is taken: all have the same bytes, in the
        // stream's order.
        for _ in 0..3 {
            let placed = pool
                .alloc(Request::new(LEN).on(identity))
                .expect("room under capture");
            kernels.write_once(&stream, DevicePtr(placed.address), 512);
            pool.free(placed.address).expect("in use");
            places.push(placed.address);
        }
        kernels.write_once(&stream, DevicePtr(result.address), 512);
    });
    assert!(
        places.iter().all(|&place| place == places[0]),
        "{places:x?}"
    );
    for stamp in [60, 70] {
        // The program cannot get the graph's bytes, so no launch writes into what it has.
        let others: Vec<Placed> = (0..32)
            .map(|_| program.alloc(Request::new(LEN)).expect("room"))
            .collect();
        others
            .iter()
            .for_each(|other| write_stamp(&gpu, &stream, DevicePtr(other.address), stamp));
        kernels.launch_graph(&graph, &stream);
        stream.synchronize().expect("it runs");
        assert_eq!(
            read_stamp(&gpu, &stream, DevicePtr(result.address)),
            1,
            "the graph wrote its result"
        );
        assert_eq!(
            read_stamp(&gpu, &stream, DevicePtr(places[0])),
            1,
            "and its own memory"
        );
        for other in others {
            assert_eq!(
                read_stamp(&gpu, &stream, DevicePtr(other.address)),
                stamp,
                "and nobody else's"
            );
            program.free(other.address).expect("in use");
        }
    }
    kernels.launch_graph(&graph, &stream);
    // SAFETY: `work_on` asks for a live stream of the device: it lives until the end.
    let launched = unsafe { Recorded::work_on(&gpu, stream.raw()) }.expect("it is recorded");
    pool.release(vec![launched]).expect("it does not wait");
    program.free(result.address).expect("in use");
    wait_until("the last launch to be done", || {
        program.settle();
        program.stats().bytes_in_use == 0 && Bfc::snapshot(&program).pending_bytes == 0
    });
}

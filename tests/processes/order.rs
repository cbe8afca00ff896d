//! The order of GPU work: fences from producer to consumer, releases from consumer to producer.

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{
    After, ClaimError, Claims, Error, Gpu, Participant, ReceivedBlock, State, Stream, To, Wait,
};
use harness::wait_until;

use crate::agent::{Agent, claim, number};
use crate::device::{is_host, open_host};
use crate::gate::Gate;
use crate::words::{Command, Contents, Waits};
use crate::{Case, Producer};

pub const CASES: &[Case] = &[
    (
        "order::contents_are_there_when_the_stream_has_waited",
        waited_on_stream,
    ),
    (
        "order::contents_are_there_when_the_host_has_waited",
        waited_on_host,
    ),
    (
        "order::a_release_waits_for_the_work_that_was_named",
        release_waits,
    ),
    ("order::a_stuck_stream_holds_up_nobody_else", stuck_lane),
    (
        "order::a_dropped_block_waits_for_the_producers_own_work",
        own_work,
    ),
    ("order::many_streams_share_the_timeline_words", many_streams),
    (
        "order::nothing_of_ours_is_captured_into_a_graph",
        under_capture,
    ),
    (
        "order::a_graph_keeps_its_blocks_until_it_goes",
        kept_for_a_graph,
    ),
    (
        "order::a_block_kept_after_a_launch_waits_for_it",
        kept_after_a_launch,
    ),
    (
        "order::a_device_without_stream_words_waits_on_the_host",
        without_stream_words,
    ),
    (
        "order::a_device_without_stream_waits_waits_on_the_host",
        without_stream_waits,
    ),
    (
        "order::what_the_driver_blocks_on_blocks_nobody",
        blocking_calls,
    ),
    (
        "order::many_drops_together_wait_for_their_streams",
        drops_together,
    ),
    (
        "order::drops_together_end_though_an_iterator_panics",
        drops_that_panic,
    ),
    (
        "order::streams_of_other_devices_end_leases_and_carry_no_fences",
        foreign_streams,
    ),
    (
        "order::what_keeps_a_stream_may_drop_blocks_itself",
        keeper_that_drops,
    ),
];

fn waited_on_stream() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.session.alloc(4096).expect("there is room");
    for stamp in 1..50u64 {
        let bytes = stamp.to_le_bytes();
        // SAFETY: `copy_to_device` asks for a live stream and ranges that are valid until it is
        // done: the stream is synchronised before `bytes` goes.
        unsafe {
            producer.gpu.backend().copy_to_device(
                producer.stream.raw(),
                block.device_ptr(),
                bytes.as_ptr(),
                8,
            )
        }
        .expect("it copies");
        let descriptor = block
            .share(To::Participant(id), After::Stream(&producer.stream))
            .expect("shared");
        let index = consumer.claim_on_stream(&descriptor);
        assert_eq!(consumer.stamp(index), stamp);
        assert_eq!(consumer.contents(index), Contents::Ready);
        producer.stream.synchronize().expect("it runs");
        consumer.let_go(index);
    }
}

fn waited_on_host() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(0);
    let go = Gate::close(&producer.gpu, &producer.stream);
    let bytes = 9u64.to_le_bytes();
    // SAFETY: `copy_to_device` asks for a live stream and ranges that are valid until it is done:
    // the stream is synchronised before `bytes` goes.
    unsafe {
        producer.gpu.backend().copy_to_device(
            producer.stream.raw(),
            block.device_ptr(),
            bytes.as_ptr(),
            8,
        )
    }
    .expect("queued");
    let share = |after: After<'_>| block.share(To::Participant(id), after).expect("shared");
    let (early, late) = (
        share(After::Stream(&producer.stream)),
        share(After::Stream(&producer.stream)),
    );
    let index = consumer.claim_unready(&early);
    assert_eq!(consumer.contents(index), Contents::Pending);
    consumer.tell(&claim(&late, Waits::OnTheHost));
    drop(go);
    let index = number(consumer.answer().expect("it lives").expect("claimed"));
    assert_eq!(consumer.stamp(index), 9);
    producer.stream.synchronize().expect("it runs");
}

fn release_waits() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    let index = consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    consumer.close_gate();
    consumer.used(index);
    consumer.let_go(index);
    for _ in 0..1000 {
        producer.session.collect();
        assert_eq!(block.outstanding(), 1, "released before its work was done");
    }
    consumer.open_gates();
    wait_until("the release", || {
        producer.session.collect();
        block.outstanding() == 0
    });
    assert_eq!(number(consumer.must(&Command::KeptLeases)), 0);
}

/// One stream is stuck for ever, with more drops behind it than a queue takes; 100,000 drops on
/// another go through.
fn stuck_lane() {
    let producer = Producer::new();
    let participant =
        Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
    let participant = participant.expect("connected");
    let to = To::Participant(participant.id());
    let (stuck, free) = (
        Stream::create(&producer.gpu).expect("a stream"),
        Stream::create(&producer.gpu).expect("a stream"),
    );
    let go = Gate::close(&producer.gpu, &stuck);
    let block = producer.block(1);
    let claim = || {
        let descriptor = block.share(to, After::Done).expect("shared");
        participant
            .claim(descriptor.as_bytes(), Wait::None, None)
            .expect("claimed")
    };
    for _ in 0..500 {
        claim().used_on(&stuck).expect("a stream of its own");
    }
    for n in 0..100_000u32 {
        claim().used_on(&free).expect("a stream of its own");
        if n % 1_000 == 0 {
            wait_until("the drops on the other stream to go through", || {
                producer.session.collect();
                block.outstanding() <= 500
            });
        }
    }
    wait_until("all drops on the other stream to go through", || {
        producer.session.collect();
        block.outstanding() == 500
    });
    drop(go);
    wait_until("the stuck ones to follow", || {
        producer.session.collect();
        block.outstanding() == 0
    });
    assert_eq!(participant.kept_leases(), 0);
}

fn own_work() {
    let producer = Producer::new();
    let block = producer.block(1);
    let go = Gate::close(&producer.gpu, &producer.stream);
    block
        .used_on(&producer.stream)
        .expect("a stream of its own");
    drop(block);
    for _ in 0..1000 {
        producer.session.collect();
        assert_eq!(
            producer.session.stats().limbo_blocks,
            1,
            "freed under the producer's own work"
        );
    }
    drop(go);
    producer.wait_for_nothing_held();
}

/// More streams than there are words, one after another: words are used again, counting on.
fn many_streams() {
    let producer = Producer::new();
    let participant =
        Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
    let participant = participant.expect("connected");
    for n in 0..600u64 {
        let stream = Stream::create(&producer.gpu).expect("a stream");
        let block = producer.session.alloc(64).expect("there is room");
        let bytes = n.to_le_bytes();
        // SAFETY: `copy_to_device` asks for a live stream and ranges that are valid until it is
        // done: the stream is synchronised before `bytes` goes.
        unsafe {
            producer.gpu.backend().copy_to_device(
                stream.raw(),
                block.device_ptr(),
                bytes.as_ptr(),
                8,
            )
        }
        .expect("queued");
        let descriptor = block
            .share(To::Participant(participant.id()), After::Stream(&stream))
            .expect("shared");
        let received = participant
            .claim(descriptor.as_bytes(), Wait::Host, None)
            .expect("claimed");
        assert_eq!(received.state(), State::Ready);
        assert_eq!(
            crate::device::read_stamp(&producer.gpu, &producer.stream, received.device_ptr()),
            n
        );
        stream.synchronize().expect("it runs");
    }
}

/// What is queued on a capturing stream goes into a graph that may run more than once: nothing of
/// ours may.
fn kept_for_a_graph() {
    let dir = tempfile::tempdir().expect("a directory");
    let (backend, gpu) = open_host();
    let session = gpu_ipc::Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let participant = Participant::builder(gpu.clone())
        .connect(session.socket_path())
        .expect("connected");
    let (capturing, launching) = (
        Stream::create(&gpu).expect("a stream"),
        Stream::create(&gpu).expect("a stream"),
    );
    let block = session.alloc(4096).expect("there is room");
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    drop(block);
    let received = participant
        .claim(descriptor.as_bytes(), Wait::None, None)
        .expect("claimed");
    let graph = gpu_ipc::participant::GraphBlocks::new();
    backend.set_capture(capturing.raw(), gpu_ipc::backend::CaptureStatus::Active);
    received.used_on(&capturing).expect("a stream of its own");
    received.keep_for(&graph);
    drop(received);
    backend.set_capture(capturing.raw(), gpu_ipc::backend::CaptureStatus::None);
    session.collect();
    assert_eq!(
        (session.stats().held, participant.kept_leases()),
        (1, 0),
        "the graph may be launched"
    );
    // A launch that is still under way when the graph goes.
    let let_go = Gate::close(&gpu, &launching);
    graph.launched_on(&launching).expect("a stream of its own");
    drop(graph);
    session.collect();
    assert_eq!(session.stats().held, 1, "its last launch is not done");
    drop(let_go);
    wait_until("the lease to end", || {
        session.collect();
        session.stats().live_blocks == 0
    });
    assert_eq!(participant.kept_leases(), 0);
}

fn kept_after_a_launch() {
    let producer = Producer::new();
    let participant =
        Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
    let participant = participant.expect("connected");
    let block = producer.block(1);
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    drop(block);
    let received = participant
        .claim(descriptor.as_bytes(), Wait::None, None)
        .expect("claimed");
    let launching = Stream::create(&producer.gpu).expect("a stream");
    let graph = gpu_ipc::participant::GraphBlocks::new();
    let let_go = Gate::close(&producer.gpu, &launching);
    graph.launched_on(&launching).expect("a stream of its own");
    received.keep_for(&graph);
    drop(received);
    drop(graph);
    for _ in 0..1000 {
        producer.session.collect();
        assert_eq!(producer.session.stats().held, 1, "its launch is not done");
    }
    drop(let_go);
    producer.wait_for_nothing_held();
    assert_eq!(participant.kept_leases(), 0);
}

fn under_capture() {
    let dir = tempfile::tempdir().expect("a directory");
    let (backend, gpu) = open_host();
    let session = gpu_ipc::Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let participant = Participant::builder(gpu.clone())
        .connect(session.socket_path())
        .expect("connected");
    let to = To::Participant(participant.id());
    let stream = Stream::create(&gpu).expect("a stream");
    let block = session.alloc(64).expect("there is room");
    let descriptor = block.share(to, After::Done).expect("shared");

    backend.set_capture(stream.raw(), gpu_ipc::backend::CaptureStatus::Active);
    let error = block
        .share(to, After::Stream(&stream))
        .expect_err("the stream is being captured");
    assert!(matches!(error, Error::Capturing { .. }), "{error}");
    let error = participant
        .claim(descriptor.as_bytes(), Wait::Stream(&stream), None)
        .expect_err("as above");
    assert!(matches!(error, ClaimError::Capturing), "{error}");
    // Neither took anything: the grant is there to be claimed.
    let received = participant
        .claim(descriptor.as_bytes(), Wait::None, None)
        .expect("claimed");
    received.used_on(&stream).expect("a stream of its own");
    drop(received);
    backend.set_capture(stream.raw(), gpu_ipc::backend::CaptureStatus::None);
    session.collect();
    assert_eq!(
        (participant.kept_leases(), block.outstanding()),
        (1, 1),
        "a graph may still use the block"
    );
}

/// A device without words in stream order: the host waits, and the fence is set by a host function.
fn without_stream_words() {
    waits_on_the_host(HostConfig::default().stream_words(false));
}

/// A device whose streams write words and wait for none: the host waits, and leases end by the
/// streams.
fn without_stream_waits() {
    waits_on_the_host(HostConfig::default().stream_waits(false));
}

fn waits_on_the_host(config: HostConfig) {
    let dir = tempfile::tempdir().expect("a directory");
    let backend = HostBackend::new(config).expect("it opens");
    let gpu = Gpu::new(backend, DeviceId(0)).expect("there is a device");
    let session = gpu_ipc::Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let participant = Participant::builder(gpu.clone())
        .connect(session.socket_path())
        .expect("connected");
    let (ours, theirs) = (
        Stream::create(&gpu).expect("a stream"),
        Stream::create(&gpu).expect("a stream"),
    );
    for stamp in 1..20u64 {
        let block = session.alloc(64).expect("there is room");
        let bytes = stamp.to_le_bytes();
        // SAFETY: `copy_to_device` asks for a live stream and ranges that are valid until it is
        // done: the stream is synchronised before `bytes` goes.
        unsafe {
            gpu.backend()
                .copy_to_device(ours.raw(), block.device_ptr(), bytes.as_ptr(), 8)
        }
        .expect("queued");
        let descriptor = block
            .share(To::Participant(participant.id()), After::Stream(&ours))
            .expect("shared");
        let received = participant
            .claim(descriptor.as_bytes(), Wait::Stream(&theirs), None)
            .expect("claimed");
        assert_eq!(
            crate::device::read_stamp(&gpu, &theirs, received.device_ptr()),
            stamp
        );
        ours.synchronize().expect("it runs");
        drop((block, received));
    }
    wait_until("all blocks to come back", || {
        session.collect();
        session.stats().live_blocks == 0
    });
}

/// While a stream waits for a word the driver's free and close block: nothing of ours may wait for
/// them.
fn blocking_calls() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = HostConfig::default().blocking_waits(true);
    let backend = HostBackend::new(config).expect("it opens");
    let gpu = Gpu::new(backend, DeviceId(0)).expect("there is a device");
    let session = gpu_ipc::Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let participant = Participant::builder(gpu.clone())
        .connect(session.socket_path())
        .expect("connected");
    let (producing, waiting) = (
        Stream::create(&gpu).expect("a stream"),
        Stream::create(&gpu).expect("a stream"),
    );
    let go = Gate::close(&gpu, &producing);
    let to = To::Participant(participant.id());
    let block = session.alloc(64).expect("there is room");
    let descriptor = block.share(to, After::Stream(&producing)).expect("shared");
    let held = participant
        .claim(descriptor.as_bytes(), Wait::Stream(&waiting), None)
        .expect("claimed");
    assert_eq!(held.state(), State::Pending);
    // Another participant comes and goes: its files are unregistered on a thread that blocks, and
    // nobody else does.
    let other = Participant::builder(gpu.clone())
        .connect(session.socket_path())
        .expect("connected");
    drop(other);
    for _ in 0..200 {
        let block = session.alloc(64).expect("there is room");
        let descriptor = block.share(to, After::Done).expect("shared");
        drop(block);
        drop(
            participant
                .claim(descriptor.as_bytes(), Wait::None, None)
                .expect("claimed"),
        );
    }
    wait_until("all but the one that waits", || {
        session.collect();
        session.stats().live_blocks == 1
    });
    drop(go);
    waiting.synchronize().expect("it runs");
    assert_eq!(held.state(), State::Ready);
}

/// Streams of another vendor's backend, and of another device of the same one where the host plays
/// it.
fn foreign_streams() {
    let producer = if is_host() {
        let backend = HostBackend::new(HostConfig::default().devices(2)).expect("it opens");
        Producer::on(
            Gpu::new(backend, DeviceId(0)).expect("there is a device"),
            |builder| builder,
        )
    } else {
        Producer::new()
    };
    let participant =
        Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
    let participant = participant.expect("connected");
    let to = To::Participant(participant.id());
    let mut foreign = vec![open_host().1];
    if is_host() {
        foreign.push(
            Gpu::new(producer.gpu.backend().clone(), DeviceId(1))
                .expect("there is a second device"),
        );
    }
    for gpu in foreign {
        let stream = Stream::create(&gpu).expect("a stream");
        let block = producer.block(5);
        for to in [to, To::Ticket(Claims::Once)] {
            let refused = block.share(to, After::Stream(&stream));
            assert!(
                matches!(
                    refused,
                    Err(Error::Mismatch {
                        what: "the stream's device",
                        ..
                    })
                ),
                "{refused:?}"
            );
        }
        let descriptor = block.share(to, After::Done).expect("shared");
        let refused = participant.claim(descriptor.as_bytes(), Wait::Stream(&stream), None);
        assert!(
            matches!(refused, Err(ClaimError::Backend(Error::Mismatch { .. }))),
            "{refused:?}"
        );
        let received = participant
            .claim(descriptor.as_bytes(), Wait::Host, None)
            .expect("the refusal took nothing");
        // The work of both sides on it stands still, then goes on.
        let go = Gate::close(&gpu, &stream);
        received.used_on(&stream).expect("a stream of its own");
        received
            .used_on(&producer.stream)
            .expect("a stream of its own");
        drop(received);
        block.used_on(&stream).expect("a stream of its own");
        drop(block);
        for _ in 0..1000 {
            producer.session.collect();
            let stats = producer.session.stats();
            assert_eq!(
                (stats.limbo_blocks, stats.held),
                (1, 1),
                "the other device still works on it"
            );
        }
        drop(go);
        producer.wait_for_nothing_held();
        assert_eq!(
            (
                producer.session.stats().live_blocks,
                participant.kept_leases()
            ),
            (0, 0)
        );
    }
}

fn drops_together() {
    const BLOCKS: usize = 600;
    let producer = Producer::new();
    let participant =
        Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
    let participant = participant.expect("connected");
    let to = To::Participant(participant.id());
    let streams = [(); 2].map(|()| Stream::create(&producer.gpu).expect("a stream"));
    let go = Gate::close(&producer.gpu, &streams[1]);
    let (mut received, mut stuck) = (Vec::new(), 0);
    for n in 0..BLOCKS {
        let block = producer.session.alloc(64).expect("there is room");
        let descriptor = block.share(to, After::Done).expect("shared");
        let claimed = participant
            .claim(descriptor.as_bytes(), Wait::None, None)
            .expect("claimed");
        match n % 300 {
            // On none, on the first, on the one that stands still, and on both.
            0..10 => {}
            10..100 => claimed.used_on(&streams[0]).expect("a stream of its own"),
            100..290 => claimed.used_on(&streams[1]).expect("a stream of its own"),
            _ => streams
                .iter()
                .for_each(|stream| claimed.used_on(stream).expect("a stream of its own")),
        }
        stuck += u64::from(n % 300 >= 100);
        received.push(claimed);
    }
    let clone = received[0].clone();
    ReceivedBlock::drop_many(received);
    let held = || {
        producer.session.collect();
        producer.session.stats().held
    };
    wait_until("those that wait for nothing", || held() == stuck + 1);
    for _ in 0..1000 {
        assert_eq!(
            held(),
            stuck + 1,
            "an end came before the work was done, or a clone did not count"
        );
    }
    drop(go);
    wait_until("all but the clone", || held() == 1);
    ReceivedBlock::drop_many([clone]);
    producer.wait_for_nothing_held();
    assert_eq!(participant.kept_leases(), 0);
}

fn drops_that_panic() {
    let producer = Producer::new();
    let participant =
        Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
    let participant = participant.expect("connected");
    let stream = Stream::create(&producer.gpu).expect("a stream");
    let mut received = (0..3).map(|n| {
        // Neither a message nor a trace: it is no failure.
        if n == 2 {
            std::panic::resume_unwind(Box::new("the application's"));
        }
        let block = producer.block(1);
        let descriptor = block
            .share(To::Participant(participant.id()), After::Done)
            .expect("shared");
        let claimed = participant
            .claim(descriptor.as_bytes(), Wait::None, None)
            .expect("claimed");
        claimed.used_on(&stream).expect("a stream of its own");
        claimed
    });
    let dropping = std::panic::AssertUnwindSafe(|| ReceivedBlock::drop_many(&mut received));
    assert!(std::panic::catch_unwind(dropping).is_err());
    producer.wait_for_nothing_held();
    assert_eq!(
        (
            producer.session.stats().live_blocks,
            participant.kept_leases()
        ),
        (0, 0)
    );
}

/// What keeps a stream: something of the application's, whose end ends more.
struct Keeper(#[allow(dead_code, reason = "kept for its drop")] Option<ReceivedBlock>);

/// A stream's keeper goes with the last that needs the stream, on whatever thread; it may take the
/// same way itself.
fn keeper_that_drops() {
    let producer = Producer::new();
    let participant =
        Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
    let participant = participant.expect("connected");
    // Of another device, so that the participant's thread looks after what was used on it.
    let gpu = open_host().1;
    let stream = Stream::create(&gpu).expect("a stream");
    let borrow = |inside| {
        // SAFETY: `borrow` asks for a stream that lives as long as its keeper: it lives to the end
        // of this function, which waits for all that needs it.
        unsafe {
            Stream::borrow(
                &gpu,
                stream.raw().handle,
                std::sync::Arc::new(Keeper(inside)),
            )
        }
        .expect("a stream")
    };
    let receive = || {
        let block = producer.block(1);
        let descriptor = block
            .share(To::Participant(participant.id()), After::Done)
            .expect("shared");
        participant
            .claim(descriptor.as_bytes(), Wait::Host, None)
            .expect("claimed")
    };
    let go = Gate::close(&gpu, &stream);
    // The first is behind an event. The second gathers, and the queue alone keeps its stream then.
    let first = receive();
    first.used_on(&borrow(None)).expect("a stream of its own");
    drop(first);
    let inside = receive();
    inside.used_on(&stream).expect("a stream of its own");
    let second = receive();
    second
        .used_on(&borrow(Some(inside)))
        .expect("a stream of its own");
    drop(second);
    drop(go);
    producer.wait_for_nothing_held();
    assert_eq!(
        (
            producer.session.stats().live_blocks,
            participant.kept_leases()
        ),
        (0, 0)
    );
}

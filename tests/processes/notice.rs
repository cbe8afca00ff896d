//! What either side is told, and asks for: events, backpressure, idle mappings, reports.

use std::time::Duration;

use gpu_ipc::admin::{inspect, sessions};
use gpu_ipc::session::{Departure, SessionNotice};
use gpu_ipc::{After, Claims, Error, ParticipantId, Session, To};
use harness::{WATCHDOG, wait_until};
use rustix::process::Signal;

use crate::agent::{Agent, bytes, number};
use crate::words::{Command, Heard, Why};
use crate::{Case, Producer};

pub const CASES: &[Case] = &[
    (
        "notice::a_claim_that_would_block_tells_when_to_try_again",
        try_again,
    ),
    (
        "notice::a_consumer_is_told_of_the_producers_death_and_of_what_was_taken_back",
        told,
    ),
    (
        "notice::a_producer_waits_until_its_block_is_released",
        backpressure,
    ),
    (
        "notice::a_producer_is_told_by_name_who_died_and_who_said_goodbye",
        departures,
    ),
    ("notice::idle_mappings_are_kept_within_bounds", cache),
    (
        "notice::a_region_goes_back_when_nobody_maps_it",
        region_goes_back,
    ),
    ("notice::room_is_made_by_a_peer_that_unmaps", room),
    ("notice::a_report_names_who_holds_what", report),
    ("notice::a_stopped_producer_shows_as_hung", hung),
];

fn try_again() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let (mut producer, mut consumer) = (Agent::start(), Agent::start());
    producer.open(&path);
    consumer.connect_to(&path);
    let block = producer.alloc(4096, 1);
    let ticket = producer.share(block, To::Ticket(Claims::Once));
    producer.stop();
    for _ in 0..3 {
        assert_eq!(
            consumer
                .try_claim(&ticket)
                .expect_err("it stands still")
                .why,
            Why::WouldBlock
        );
    }
    producer.signal(Signal::CONT);
    let claimed = loop {
        consumer.hears(&Heard::TryAgain);
        match consumer.try_claim(&ticket) {
            Ok(block) => break block,
            Err(refusal) => assert_eq!(refusal.why, Why::WouldBlock),
        }
    };
    assert_eq!(consumer.stamp(claimed), 1);
}

fn told() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let mut producer = Agent::start();
    producer.open(&path);
    let mut consumer = Agent::start();
    let id = consumer.connect_to(&path);
    let block = producer.alloc(4096, 6);
    let descriptor = producer.share(block, To::Participant(id));
    producer.must(&Command::Cancel {
        block,
        descriptor: bytes(&descriptor),
    });
    consumer.hears(&Heard::revoked(&descriptor));
    producer.kill();
    consumer.hears(&Heard::ProducerGone);
}

fn backpressure() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    assert!(matches!(
        block.wait_released(Some(Duration::ZERO)),
        Err(Error::Deadline { .. })
    ));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| block.wait_released(Some(WATCHDOG)));
        consumer.let_go_of_all();
        waiting.join().expect("it waits").expect("released");
    });
    assert_eq!(block.outstanding(), 0);
}

/// How three end that claimed: one that holds, one that holds nothing, and one that says goodbye.
fn departures() {
    let producer = Producer::new();
    let block = producer.block(1);
    for (holds, how) in [
        (true, Departure::Died),
        (false, Departure::Died),
        (false, Departure::Goodbye),
    ] {
        let mut consumer = Agent::start();
        let id = consumer.connect(&producer.session);
        let name = producer.session.participant_name(id).expect("it is here");
        if holds {
            consumer.claim(
                &block
                    .share(To::Participant(id), After::Done)
                    .expect("shared"),
            );
        }
        match how {
            Departure::Goodbye => consumer.disconnect(),
            _ => consumer.kill(),
        }
        let mut left = None;
        wait_until("the notice of its end", || {
            left = producer
                .session
                .next_notice()
                .filter(|notice| matches!(notice, SessionNotice::Left { .. }));
            left.is_some()
        });
        let participant = id;
        let notice = SessionNotice::Left {
            participant,
            name,
            how,
        };
        assert_eq!(left, Some(notice), "holds: {holds}");
        assert_eq!(producer.session.participant_name(id), None);
    }
    assert_eq!(block.outstanding(), 0);
}

/// A region for each block, in a session whose blocks come from regions of this size.
const REGION: u64 = 2 << 20;

fn cache() {
    let producer = Producer::with(|builder| builder.region_bytes(REGION));
    for (bytes, regions, most) in [(u64::MAX, 2, 2), (3 * REGION, 1024, 3)] {
        let mut consumer = Agent::start();
        let socket = producer.session.socket_path().into();
        let id = number(consumer.must(&Command::ConnectWithCache {
            socket,
            bytes,
            regions,
        }));
        let id = ParticipantId(id);
        let blocks: Vec<_> = (0..6)
            .map(|_| producer.session.alloc(REGION).expect("there is room"))
            .collect();
        let claims: Vec<u64> = blocks
            .iter()
            .map(|block| {
                consumer.claim(
                    &block
                        .share(To::Participant(id), After::Done)
                        .expect("shared"),
                )
            })
            .collect();
        assert_eq!(consumer.mappings(), 6, "what is in use stays mapped");
        for index in claims {
            consumer.let_go(index);
        }
        wait_until("idle mappings to go", || consumer.mappings() <= most);
        assert_eq!(consumer.mappings(), most, "no more than the bound goes");
        consumer.disconnect();
    }
}

fn region_goes_back() {
    let producer = Producer::with(|builder| builder.region_bytes(REGION));
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.session.alloc(REGION).expect("there is room");
    let index = consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    drop(block);
    assert_eq!(producer.session.trim().expect("asked"), 0, "it is in use");
    consumer.hears(&Heard::PleaseUnmap);
    assert_eq!(producer.session.stats().source.pinned, REGION);
    consumer.let_go(index);
    // Nobody trims again: the unmapping itself gives it back.
    wait_until("the region to be given back", || {
        producer.session.collect();
        producer.session.stats().source.reserved == 0
    });
    assert_eq!(consumer.mappings(), 0);
}

fn room() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = gpu_ipc::host::HostConfig::default().bytes_per_device(4 * REGION);
    let backend = gpu_ipc::host::HostBackend::new(config).expect("it opens");
    let gpu = gpu_ipc::Gpu::new(backend, gpu_ipc::backend::DeviceId(0)).expect("a device");
    let session = Session::builder(gpu)
        .socket(dir.path().join("s"))
        .region_bytes(REGION)
        .open()
        .expect("a session");
    let mut consumer = Agent::start();
    let id = consumer.connect(&session);
    let small: Vec<_> = (0..4)
        .map(|_| session.alloc(REGION).expect("there is room"))
        .collect();
    for block in &small {
        consumer.claim(
            &block
                .share(To::Participant(id), After::Done)
                .expect("shared"),
        );
    }
    consumer.let_go_of_all();
    drop(small);
    // All four regions are free and mapped by the consumer; one of twice their size needs two of
    // them back.
    let large = session
        .alloc_within(2 * REGION, WATCHDOG)
        .expect("room is made");
    assert_eq!(large.len(), 2 * REGION);
    let error = session
        .alloc_within(4 * REGION, Duration::ZERO)
        .expect_err("it is in use");
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
}

fn report() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    let _ticket = block
        .share(To::Ticket(Claims::Once), After::Done)
        .expect("a ticket");
    consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    let report = inspect(producer.session.socket_path(), Some(WATCHDOG)).expect("a report");
    assert_eq!(
        (report.session, report.pid),
        (producer.session.id(), std::process::id())
    );
    assert_eq!(
        (report.backend, report.device),
        (producer.gpu.kind(), producer.gpu.uuid())
    );
    let stats = &report.stats;
    assert_eq!(
        (
            stats.live_blocks,
            stats.held,
            stats.tickets,
            stats.participants
        ),
        (1, 1, 1, 1)
    );
    let [holder] = &stats.holders[..] else {
        panic!("one holder: {stats:?}")
    };
    assert_eq!((holder.participant, holder.pid), (id, consumer.pid()));
    assert_eq!(
        (holder.leases, holder.bytes, holder.mappings, holder.dying),
        (1, 4096, 1, false)
    );
    // More holders than one message tells of.
    consumer.must(&Command::Join {
        socket: producer.session.socket_path().into(),
        count: 100,
    });
    let report = inspect(producer.session.socket_path(), Some(WATCHDOG)).expect("a report");
    assert_eq!(report.stats.holders.len(), 101);
    assert_eq!(
        producer.session.participants().len(),
        101,
        "a process that inspects is no participant"
    );
}

fn hung() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let mut producer = Agent::start();
    producer.open(&path);
    inspect(&path, Some(WATCHDOG)).expect("it answers");
    producer.stop();
    let hung = inspect(&path, Some(Duration::from_millis(50)));
    assert!(matches!(hung, Err(Error::Deadline { .. })), "{hung:?}");
    producer.signal(Signal::CONT);
    inspect(&path, Some(WATCHDOG)).expect("it answers again");

    // A session in the runtime directory is found there, and one that has ended is not.
    let runtime = tempfile::tempdir().expect("a directory");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    std::fs::set_permissions(runtime.path(), mode).expect("ours");
    let session = Session::builder(crate::device::open_gpu())
        .runtime_dir(runtime.path())
        .open()
        .expect("a session");
    assert_eq!(
        sessions(Some(runtime.path())).expect("a list"),
        [session.socket_path()]
    );
    drop(session);
    wait_until("its socket to go", || {
        sessions(Some(runtime.path())).expect("a list").is_empty()
    });
}

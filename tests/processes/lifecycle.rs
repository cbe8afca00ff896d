//! The main job: share, claim, use, drop, collect.

use gpu_ipc::session::AdoptToken;
use gpu_ipc::{After, Error, Gone, Participant, State, To, Wait};
use harness::{WATCHDOG, wait_until};

use crate::agent::Agent;
use crate::words::Why;
use crate::{Case, Producer};

pub const CASES: &[Case] = &[
    (
        "lifecycle::a_block_is_seen_by_a_consumer_and_freed_when_it_is_done",
        seen_and_freed,
    ),
    ("lifecycle::a_descriptor_is_claimed_once", claimed_once),
    ("lifecycle::a_cancelled_grant_cannot_be_claimed", cancelled),
    ("lifecycle::a_grant_that_nobody_claims_lapses", lapses),
    (
        "lifecycle::a_short_time_to_live_ends_before_a_longer_one",
        lapses_in_time,
    ),
    (
        "lifecycle::one_block_goes_to_many_consumers",
        many_consumers,
    ),
    (
        "lifecycle::blocks_of_one_region_are_mapped_once",
        mapped_once,
    ),
    (
        "lifecycle::clones_and_slices_share_a_lease",
        clones_and_slices,
    ),
    (
        "lifecycle::a_consumer_in_the_same_process_gets_the_pointer",
        same_process,
    ),
    ("lifecycle::adopted_memory_comes_back_by_its_token", adopted),
    (
        "lifecycle::a_full_counter_file_gets_a_successor_within_the_quota",
        successor,
    ),
    ("lifecycle::eight_threads_share_at_once", eight_threads),
    ("lifecycle::shutdown_reports_who_holds_what", shutdown),
    ("lifecycle::sessions_come_and_go_on_one_device", come_and_go),
    (
        "lifecycle::a_participant_goes_while_its_thread_unmaps",
        goes_while_unmapping,
    ),
    (
        "lifecycle::out_of_memory_is_survived_when_limbo_is_collected",
        out_of_memory,
    ),
];

fn seen_and_freed() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(7);
    let descriptor = block
        .share(To::Participant(id), After::Done)
        .expect("shared");
    assert_eq!(producer.session.stats().in_flight, 1);
    let place = block.place();
    drop(block);
    let index = consumer.claim(&descriptor);
    assert_eq!(consumer.stamp(index), 7);
    let stats = producer.session.stats();
    assert_eq!((stats.limbo_blocks, stats.held, stats.in_flight), (1, 1, 0));
    assert_eq!(stats.holders[0].pid, consumer.pid());
    // While it is held its bytes are not given out again.
    let others: Vec<_> = (0..8)
        .map(|_| producer.session.alloc(4096).expect("there is room"))
        .collect();
    assert!(others.iter().all(|other| other.place() != place));
    drop(others);
    consumer.let_go(index);
    producer.wait_for_nothing_held();
    assert_eq!(producer.session.stats().live_blocks, 0);
}

fn claimed_once() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    let descriptor = block
        .share(To::Participant(id), After::Done)
        .expect("shared");
    let index = consumer.claim(&descriptor);
    assert_eq!(consumer.cannot_claim(&descriptor), Why::AlreadyClaimed);
    consumer.let_go(index);
    drop(block);
    producer.wait_for_nothing_held();
    let reused = producer.block(2);
    let _held = reused
        .share(To::Participant(id), After::Done)
        .expect("shared");
    assert_eq!(consumer.cannot_claim(&descriptor), Why::Stale);
}

fn cancelled() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    let descriptor = block
        .share(To::Participant(id), After::Done)
        .expect("shared");
    assert!(block.cancel(&descriptor).expect("it is ours"));
    assert!(
        !block.cancel(&descriptor).expect("it is ours"),
        "cancelled twice"
    );
    assert_eq!(consumer.cannot_claim(&descriptor), Why::Revoked);
    assert_eq!(block.outstanding(), 0);
    let claimed = block
        .share(To::Participant(id), After::Done)
        .expect("shared");
    consumer.claim(&claimed);
    assert!(
        !block.cancel(&claimed).expect("it is ours"),
        "a claimed lease was cancelled"
    );
    let other = producer.block(2);
    assert!(matches!(
        other.cancel(&claimed),
        Err(Error::Mismatch { .. })
    ));
}

fn lapses() {
    let producer =
        Producer::with(|builder| builder.time_to_live(Some(std::time::Duration::from_millis(20))));
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    let descriptor = block
        .share(To::Participant(id), After::Done)
        .expect("shared");
    drop(block);
    wait_until("the grant to lapse", || {
        producer.session.stats().expired == 1
    });
    assert_eq!(consumer.cannot_claim(&descriptor), Why::Revoked);
    producer.wait_for_nothing_held();
}

/// The session's own time to live is long, and nothing else happens: the grant's own time is kept
/// all the same.
fn lapses_in_time() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    let times = [20, 900].map(std::time::Duration::from_millis);
    let start = std::time::Instant::now();
    let [brief, _longer] = times.map(|time| {
        let options = gpu_ipc::session::ShareOptions::default().time_to_live(Some(time));
        block
            .share_with(To::Participant(id), After::Done, &options)
            .expect("shared")
    });
    let mut expired = 0;
    wait_until("a grant to lapse", || {
        expired = producer.session.stats().expired;
        expired > 0
    });
    // A machine that had no time for this process meanwhile shows both at once.
    assert!(
        expired == 1 || start.elapsed() >= times[1],
        "20 ms ended no sooner than 900"
    );
    assert_eq!(consumer.cannot_claim(&brief), Why::Revoked);
    wait_until("the other to lapse", || {
        producer.session.stats().expired == 2
    });
}

fn many_consumers() {
    let producer = Producer::new();
    let mut consumers: Vec<Agent> = (0..6).map(|_| Agent::start()).collect();
    let block = producer.block(5);
    for consumer in &mut consumers {
        let id = consumer.connect(&producer.session);
        let index = consumer.claim(
            &block
                .share(To::Participant(id), After::Done)
                .expect("shared"),
        );
        assert_eq!(consumer.stamp(index), 5);
    }
    assert_eq!(block.outstanding(), 6);
    for (n, consumer) in consumers.iter_mut().enumerate() {
        consumer.let_go_of_all();
        wait_until("one lease less", || {
            producer.session.collect();
            block.outstanding() == 5 - n
        });
    }
}

fn mapped_once() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let blocks: Vec<_> = (0..50).map(|n| producer.block(n)).collect();
    for (n, block) in blocks.iter().enumerate() {
        let index = consumer.claim(
            &block
                .share(To::Participant(id), After::Done)
                .expect("shared"),
        );
        assert_eq!(consumer.stamp(index), n as u64);
    }
    assert_eq!(consumer.mappings(), 1);
    assert_eq!(producer.session.stats().holders[0].mappings, 1);
}

fn clones_and_slices() {
    let producer = Producer::new();
    let participant =
        Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
    let participant = participant.expect("connected");
    let block = producer.block(3);
    let to = To::Participant(participant.id());
    let descriptor = block.share(to, After::Done).expect("shared");
    let received = participant
        .claim(descriptor.as_bytes(), Wait::Host, None)
        .expect("claimed");
    let (head, clone) = (received.slice(..8).expect("inside"), received.clone());
    assert_eq!(head.len(), 8);
    assert_eq!(
        received.slice(100..200).expect("inside").device_ptr().0,
        received.device_ptr().0 + 100
    );
    assert!(received.slice(4000..5000).is_err() && received.slice(8..8).is_err());
    assert!(
        head.slice(..9).is_err(),
        "a slice of a slice reached beyond it"
    );
    drop((received, clone));
    producer.session.collect();
    assert_eq!(block.outstanding(), 1, "a slice lost its lease");
    drop(head);
    wait_until("the lease to end", || {
        producer.session.collect();
        block.outstanding() == 0
    });
}

fn same_process() {
    let producer = Producer::new();
    let participant =
        Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
    let participant = participant.expect("connected");
    let block = producer.block(3);
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    let received = participant
        .claim(descriptor.as_bytes(), Wait::Host, None)
        .expect("claimed");
    assert_eq!(received.device_ptr(), block.device_ptr());
    assert_eq!(received.state(), State::Ready);
}

fn adopted() {
    let producer = Producer::new();
    let backend = producer.gpu.backend();
    let own = backend
        .alloc(
            producer.gpu.device(),
            1 << 20,
            gpu_ipc::backend::Sharing::Fd,
        )
        .expect("there is room");
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let part = own.base.offset(4096);
    // SAFETY: `adopt` asks that the range stays allocated until the token comes back, and overlaps
    // no other block: it is freed below, after the token.
    let block =
        unsafe { producer.session.adopt(part, 4096, AdoptToken(42)) }.expect("it can be shared");
    crate::device::write_stamp(&producer.gpu, &producer.stream, block.device_ptr(), 9);
    let index = consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    assert_eq!(consumer.stamp(index), 9);
    drop(block);
    assert!(
        producer.session.collect().tokens.is_empty(),
        "the token came back while the block was held"
    );
    consumer.let_go(index);
    let mut tokens = Vec::new();
    wait_until("the token", || {
        tokens.extend(producer.session.collect());
        !tokens.is_empty()
    });
    assert_eq!(tokens, [AdoptToken(42)]);
    assert_eq!(
        consumer.mappings(),
        0,
        "the owner may free what is still mapped"
    );
    // SAFETY: `free` asks for an allocation of this backend that nobody uses or maps: the token
    // says so.
    unsafe { backend.free(own.base) }.expect("it frees");
}

fn successor() {
    let producer = Producer::with(|builder| builder.max_slots(8_192 + 16_384));
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    let mut descriptors = Vec::new();
    let error = loop {
        match block.share(To::Participant(id), After::Done) {
            Ok(descriptor) => descriptors.push(descriptor),
            Err(error) => break error,
        }
    };
    assert_eq!(descriptors.len(), 8_192 + 16_384);
    assert!(error.to_string().contains("max_slots"), "{error}");
    for descriptor in [
        &descriptors[0],
        &descriptors[8_192],
        descriptors.last().expect("many"),
    ] {
        let index = consumer.claim(descriptor);
        assert_eq!(consumer.stamp(index), 1);
    }
    consumer.let_go_of_all();
    wait_until("three leases less", || {
        producer.session.collect();
        block.outstanding() == descriptors.len() - 3
    });
    block
        .share(To::Participant(id), After::Done)
        .expect("there is room again");
}

fn eight_threads() {
    let producer = Producer::new();
    let participant =
        Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
    let participant = participant.expect("connected");
    let to = To::Participant(participant.id());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for n in 0..500 {
                    let block = producer.session.alloc(256 + n).expect("there is room");
                    let descriptor = block.share(to, After::Done).expect("shared");
                    drop(block);
                    let received = participant
                        .claim(descriptor.as_bytes(), Wait::None, None)
                        .expect("claimed");
                    assert_eq!(received.len(), 256 + n);
                }
            });
        }
    });
    producer.wait_for_nothing_held();
    assert_eq!(producer.session.stats().live_blocks, 0);
}

fn shutdown() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    let index = consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    drop(block);
    let report = producer.session.shutdown(std::time::Duration::ZERO);
    assert!(!report.clean);
    assert_eq!(
        (report.blocks, report.holders.len(), report.holders[0].pid),
        (1, 1, consumer.pid())
    );
    let refused = producer.session.alloc(1).err();
    assert_eq!(refused.as_ref().and_then(Gone::of), Some(Gone::Session));
    assert_eq!(consumer.stamp(index), 1);
    consumer.let_go(index);
    let report = producer.session.shutdown(WATCHDOG);
    assert!(report.clean, "{report:?}");
    wait_until("the socket to be removed", || {
        !producer.session.socket_path().exists()
    });
    assert!(producer.dir.path().exists());
}

/// What a session or a participant registers with the driver is given back: else an address that is
/// used again cannot be registered.
fn come_and_go() {
    let gpu = crate::device::open_gpu();
    for round in 0..40 {
        let dir = tempfile::tempdir().expect("a directory");
        let session = gpu_ipc::Session::builder(gpu.clone())
            .socket(dir.path().join("s"))
            .open()
            .expect("a session");
        let participants: Vec<_> = (0..3)
            .map(|n| {
                let connected = Participant::builder(gpu.clone()).connect(session.socket_path());
                connected.unwrap_or_else(|error| panic!("round {round}, participant {n}: {error}"))
            })
            .collect();
        let block = session.alloc(64).expect("there is room");
        for participant in &participants {
            let descriptor = block
                .share(To::Participant(participant.id()), After::Done)
                .expect("shared");
            participant
                .claim(descriptor.as_bytes(), Wait::None, None)
                .expect("claimed");
        }
        drop(block);
        // The session goes first in every other round, the participants in the others.
        let report = if round % 2 == 0 {
            session.shutdown(WATCHDOG)
        } else {
            drop(participants);
            session.shutdown(WATCHDOG)
        };
        assert!(report.clean, "round {round}: {report:?}");
    }
}

fn out_of_memory() {
    let producer = Producer::with(|builder| builder.region_bytes(1 << 20));
    let participant =
        Participant::builder(producer.gpu.clone()).connect(producer.session.socket_path());
    let participant = participant.expect("connected");
    let mut blocks = Vec::new();
    let error = loop {
        match producer.session.alloc(64 << 20) {
            Ok(block) => blocks.push(block),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    let block = blocks.pop().expect("some fitted");
    let descriptor = block
        .share(To::Participant(participant.id()), After::Done)
        .expect("shared");
    drop(block);
    let received = participant
        .claim(descriptor.as_bytes(), Wait::None, None)
        .expect("claimed");
    assert!(
        producer.session.alloc(64 << 20).is_err(),
        "held memory was given out"
    );
    drop(received);
    wait_until("the released block to be given out again", || {
        producer.session.alloc(64 << 20).is_ok()
    });
}

/// A participant whose thread is about to find nothing more to unmap when the last handle goes.
fn goes_while_unmapping() {
    const REGION: u64 = 2 << 20;
    let producer = Producer::with(|builder| builder.region_bytes(REGION));
    let blocks: Vec<_> = (0..2)
        .map(|_| producer.session.alloc(REGION).expect("there is room"))
        .collect();
    for round in 0..600 {
        let builder = Participant::builder(producer.gpu.clone()).mapping_cache(u64::MAX, 1);
        let participant = builder
            .connect(producer.session.socket_path())
            .expect("connected");
        let to = To::Participant(participant.id());
        let received: Vec<_> = blocks
            .iter()
            .map(|block| {
                let descriptor = block.share(to, After::Done).expect("shared");
                participant
                    .claim(descriptor.as_bytes(), Wait::Host, None)
                    .expect("claimed")
            })
            .collect();
        // One mapping more than the cache keeps is idle from here on.
        drop(received);
        (0..round * 8).for_each(|_| std::hint::spin_loop());
        drop(participant);
        wait_until("the participant to be gone", || {
            producer.session.stats().participants == 0
        });
    }
}

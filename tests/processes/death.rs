//! Kill -9 at every named step: who dies where, what is left, who repairs it. `docs/GUARANTEES.md`
//! has the table.

use std::time::Duration;

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, BackendKind, Error, Gone, Gpu, Participant, State, To, Wait};
use harness::wait_until;
use rustix::process::Signal;

use crate::agent::{Agent, claim};
use crate::device::{is_host, open_gpu, read_stamp};
use crate::words::{Command, Heard, Step, Waits, Why};
use crate::{Case, Producer};

pub const CASES: &[Case] = &[
    ("death::a_consumer_at_hello", consumer_at_hello),
    ("death::a_consumer_at_claim", || consumer_at(Step::Claim)),
    ("death::a_consumer_at_map", || consumer_at(Step::Map)),
    ("death::a_consumer_at_use", || consumer_at(Step::Use)),
    ("death::a_consumer_at_release", || {
        consumer_at(Step::Release)
    }),
    ("death::a_consumer_at_unmap", consumer_at_unmap),
    ("death::a_consumer_before_it_claims", before_claim),
    ("death::a_consumer_while_it_holds", while_holding),
    ("death::a_consumer_with_a_late_write", late_write),
    (
        "death::a_consumer_whose_work_the_driver_still_shows",
        still_shown,
    ),
    ("death::a_stopped_consumer_keeps_its_block", stopped),
    ("death::a_producer_at_share", || producer_at(Step::Share)),
    ("death::a_producer_at_send", || producer_at(Step::Send)),
    ("death::a_producer_at_drop", || producer_at(Step::Drop)),
    ("death::a_producer_at_collect", || {
        producer_at(Step::CollectBegins)
    }),
    ("death::a_producer_at_welcome", producer_at_welcome),
    (
        "death::a_producer_while_its_block_is_held",
        producer_while_held,
    ),
    (
        "death::a_producer_with_work_under_way_hangs_nobody",
        producer_with_work,
    ),
    ("death::a_broken_context_hangs_nobody", broken_context),
    (
        "death::a_dead_producers_socket_is_replaced",
        socket_replaced,
    ),
    ("death::many_consumers_die_at_once", many),
    (
        "death::a_question_that_a_dead_producer_never_answered",
        unanswered,
    ),
];

/// Needs a device whose context processes share: the host's, told so, or NVIDIA's under MPS.
pub const SHARED_CONTEXT: &[Case] = &[(
    "death::in_a_shared_context_what_the_dead_held_is_not_used_again",
    in_shared_context,
)];

/// Says whether the backend that is tested has, or can play, a shared context.
pub fn can_share_context() -> bool {
    is_host()
        || gpu_ipc::detect().is_ok_and(|found| {
            found
                .gpus()
                .iter()
                .any(|gpu| gpu.kind() != BackendKind::Host && gpu.caps().shared_context)
        })
}

/// Blocks of the dead come back, and only after proof and quarantine; the session goes on with the
/// living.
fn check_survival(producer: &Producer) {
    producer.wait_for_nothing_held();
    let mut next = Agent::start();
    let id = next.connect(&producer.session);
    let block = producer.block(77);
    let index = next.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    assert_eq!(next.stamp(index), 77);
}

/// The process is gone for the kernel, and the driver shows that its queues are not: what it held
/// stays held. A file of the same name that comes later is another process'.
fn still_shown() {
    let folder = tempfile::tempdir().expect("a directory");
    let backend =
        HostBackend::new(HostConfig::default().signs_of_life(folder.path())).expect("it opens");
    let gpu = Gpu::new(backend, DeviceId(0)).expect("there is a device");
    let producer = Producer::on(gpu, |builder| builder.quarantine(Duration::from_millis(5)));
    let mut agent = Agent::start();
    let sign = folder.path().join(agent.pid().to_string());
    std::fs::write(&sign, "").expect("a file");
    let id = agent.connect(&producer.session);
    let block = producer.block(1);
    agent.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    agent.kill();
    wait_until("the session to know", || {
        producer.session.stats().quarantined == 1
    });
    let quiet = std::time::Instant::now();
    // Twenty quarantines.
    while quiet.elapsed() < Duration::from_millis(100) {
        producer.session.collect();
        assert_eq!(
            block.outstanding(),
            1,
            "buried while the driver shows its work"
        );
    }
    // Another process may get the pid, and with it the name, at any time.
    let other = folder.path().join("other");
    std::fs::write(&other, "").expect("a file");
    std::fs::rename(&other, &sign).expect("one folder");
    wait_until("the burial", || {
        producer.session.collect();
        block.outstanding() == 0
    });
}

fn in_shared_context() {
    let gpu = if is_host() {
        let backend =
            HostBackend::new(HostConfig::default().shared_context(true)).expect("it opens");
        Gpu::new(backend, DeviceId(0)).expect("there is a device")
    } else {
        open_gpu()
    };
    assert!(gpu.caps().shared_context);
    let producer = Producer::on(gpu, |builder| builder);
    let (mut dies, mut lives) = (Agent::start(), Agent::start());
    let mut dies_too = Agent::start();
    let (first, second) = (
        dies.connect(&producer.session),
        dies_too.connect(&producer.session),
    );
    let third = lives.connect(&producer.session);
    let (lost, kept) = (producer.block(1), producer.block(2));
    let (place, len) = (lost.place(), lost.len());
    for (agent, id) in [
        (&mut dies, first),
        (&mut dies_too, second),
        (&mut lives, third),
    ] {
        agent.claim(
            &lost
                .share(To::Participant(id), After::Done)
                .expect("shared"),
        );
    }
    lives.claim(
        &kept
            .share(To::Participant(third), After::Done)
            .expect("shared"),
    );
    drop((lost, kept));
    dies.kill();
    dies_too.kill();
    wait_until("the burials", || producer.session.stats().deaths == 2);
    // Who says itself that its work is done is believed there as anywhere.
    lives.let_go_of_all();
    wait_until("the living one's block to come back", || {
        producer.session.collect();
        producer.session.stats().live_blocks == 1
    });
    let stats = producer.session.stats();
    assert_eq!(
        (stats.leaked_blocks, stats.leaked_bytes, stats.limbo_blocks),
        (1, len, 1),
        "{stats:?}"
    );
    let again: Vec<_> = (0..64)
        .map(|_| producer.session.alloc(len).expect("there is room"))
        .collect();
    assert!(
        again.iter().all(|block| block.place() != place),
        "what the dead held is used again"
    );
}

fn consumer_at_hello() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    consumer.die_at(Step::Hello);
    consumer.tell(&Command::Connect {
        socket: producer.session.socket_path().into(),
    });
    assert!(consumer.answer().is_none(), "it lives");
    check_survival(&producer);
}

fn consumer_at(step: Step) {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    let descriptor = block
        .share(To::Participant(id), After::Done)
        .expect("shared");
    drop(block);
    consumer.die_at(step);
    consumer.tell(&claim(&descriptor, Waits::OnTheHost));
    consumer.tell(&Command::Stamp { block: 1 });
    consumer.tell(&Command::LetGo { block: 1 });
    consumer.dies();
    wait_until("it to be gone", || {
        producer.session.stats().participants == 0
    });
    wait_until("the block to come back", || {
        producer.session.stats().live_blocks == 0
    });
    check_survival(&producer);
}

fn consumer_at_unmap() {
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
    consumer.let_go(index);
    producer.wait_for_nothing_held();
    consumer.die_at(Step::Unmap);
    producer.session.trim().expect("it trims");
    consumer.dies();
    wait_until("the burial", || producer.session.stats().deaths == 1);
    wait_until("the region to be returned", || {
        producer.session.trim().expect("it trims");
        producer.session.stats().source.reserved == 0
    });
    check_survival(&producer);
}

fn before_claim() {
    let producer = Producer::new();
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    let descriptor = block
        .share(To::Participant(id), After::Done)
        .expect("shared");
    consumer.kill();
    wait_until("the grant to be taken back", || block.outstanding() == 0);
    assert!(!block.cancel(&descriptor).expect("it is ours"));
    wait_until("it to be gone", || {
        producer.session.stats().participants == 0
    });
    let refused = block.share(To::Participant(id), After::Done).err();
    let gone = refused.as_ref().and_then(Gone::of);
    assert_eq!(gone, Some(Gone::Participant(id)));
    check_survival(&producer);
}

fn while_holding() {
    let quarantine = Duration::from_millis(300);
    let producer = Producer::with(|builder| builder.quarantine(quarantine));
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    drop(block);
    let killed = std::time::Instant::now();
    consumer.kill();
    wait_until("the quarantine to begin", || {
        let stats = producer.session.stats();
        stats.quarantined == 1 || stats.deaths == 1
    });
    producer.wait_for_nothing_held();
    assert!(
        killed.elapsed() >= quarantine,
        "reused before the quarantine was over"
    );
    check_survival(&producer);
}

/// A GPU may write for some milliseconds after its process died: never into a block that is used
/// again.
fn late_write() {
    // Much longer than a busy machine keeps the write waiting.
    let producer = Producer::with(|builder| builder.quarantine(Duration::from_secs(3)));
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    let place = block.place();
    let index = consumer.claim(
        &block
            .share(To::Participant(id), After::Done)
            .expect("shared"),
    );
    consumer.must(&Command::LateWrite {
        block: index,
        stamp: 666,
        milliseconds: 50,
    });
    drop(block);
    consumer.kill();
    let mut reused = None;
    wait_until("the block's bytes to be used again", || {
        producer.session.collect();
        let block = producer.session.alloc(4096).expect("there is room");
        let same = block.place() == place;
        if same {
            reused = Some(block);
        }
        same
    });
    let reused = reused.expect("just found");
    // The write came during the quarantine: the bytes show it, and what is written now stays.
    assert_eq!(
        producer.stamp(&reused),
        666,
        "the late write did not happen: the case proves nothing"
    );
    crate::device::write_stamp(&producer.gpu, &producer.stream, reused.device_ptr(), 2);
    assert_eq!(producer.stamp(&reused), 2);
}

fn stopped() {
    let producer = Producer::with(|builder| {
        builder
            .quarantine(Duration::ZERO)
            .time_to_live(Some(Duration::ZERO))
    });
    let mut consumer = Agent::start();
    let id = consumer.connect(&producer.session);
    let block = producer.block(1);
    let options = gpu_ipc::session::ShareOptions::default().time_to_live(None);
    let index = consumer.claim(
        &block
            .share_with(To::Participant(id), After::Done, &options)
            .expect("shared"),
    );
    drop(block);
    consumer.stop();
    // Another participant's whole life passes meanwhile, death and burial included.
    let mut other = Agent::start();
    let id = other.connect(&producer.session);
    let theirs = producer.block(2);
    other.claim(
        &theirs
            .share_with(To::Participant(id), After::Done, &options)
            .expect("shared"),
    );
    drop(theirs);
    other.kill();
    wait_until("the other's burial", || {
        producer.session.stats().deaths == 1
    });
    for _ in 0..1000 {
        producer.session.collect();
    }
    assert_eq!(
        producer.session.stats().limbo_blocks,
        1,
        "taken from a process that lives"
    );
    consumer.signal(Signal::CONT);
    assert_eq!(consumer.stamp(index), 1);
    consumer.let_go(index);
    producer.wait_for_nothing_held();
}

/// Opens a session in an agent, and a participant of it here.
fn foreign_producer() -> (Agent, Participant, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let mut producer = Agent::start();
    producer.open(&path);
    let gpu = open_gpu();
    let participant = Participant::builder(gpu).connect(&path).expect("connected");
    (producer, participant, dir)
}

fn producer_at(step: Step) {
    let (mut producer, participant, _dir) = foreign_producer();
    let first = producer.alloc(4096, 5);
    let descriptor = producer.share(first, To::Participant(participant.id()));
    let held = participant
        .claim(descriptor.as_bytes(), Wait::Host, None)
        .expect("claimed");
    producer.die_at(step);
    let to = To::Participant(participant.id()).into();
    producer.tell(&Command::Share {
        block: first,
        to,
        on_stream: false,
    });
    producer.tell(&Command::LetGo { block: first });
    producer.tell(&Command::Collect);
    producer.dies();
    wait_until("the news of its death", || participant.is_producer_gone());
    assert_eq!(held.state(), State::ReadyProducerGone);
    let error = participant
        .claim(descriptor.as_bytes(), Wait::Host, None)
        .expect_err("nothing new comes");
    assert!(
        matches!(error, gpu_ipc::ClaimError::ProducerGone),
        "{error}"
    );
    // What was mapped stays readable: its bytes are the importer's until it unmaps.
    let gpu = open_gpu();
    let stream = gpu_ipc::Stream::create(&gpu).expect("a stream");
    assert_eq!(read_stamp(&gpu, &stream, held.device_ptr()), 5);
    drop(held);
    wait_until("the mapping to go", || participant.mappings() == 0);
}

fn producer_at_welcome() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let mut producer = Agent::start();
    producer.open(&path);
    producer.die_at(Step::Welcome);
    let gpu = open_gpu();
    // The welcome is on its way when the producer dies, or not: either way the consumer is told.
    match Participant::builder(gpu).connect(&path) {
        Ok(participant) => wait_until("the news of its death", || participant.is_producer_gone()),
        Err(error) => assert!(matches!(error, Error::Refused { .. }), "{error}"),
    }
}

fn producer_while_held() {
    let (mut producer, participant, _dir) = foreign_producer();
    let first = producer.alloc(4096, 5);
    let descriptor = producer.share(first, To::Participant(participant.id()));
    let held = participant
        .claim(descriptor.as_bytes(), Wait::Host, None)
        .expect("claimed");
    assert_eq!(held.state(), State::Ready);
    producer.kill();
    wait_until("the news of its death", || participant.is_producer_gone());
    assert_eq!(held.state(), State::ReadyProducerGone);
}

fn producer_with_work() {
    let (mut producer, participant, _dir) = foreign_producer();
    let gpu = participant.gpu().clone();
    let stream = gpu_ipc::Stream::create(&gpu).expect("a stream");
    let to = participant.id();
    let first = producer.alloc(4096, 5);
    let done = producer.share_on_stream(first, To::Participant(to));
    producer.synchronize();
    producer.close_gate();
    let pending = producer.share_on_stream(first, To::Participant(to));
    let done = participant
        .claim(done.as_bytes(), Wait::None, None)
        .expect("claimed");
    if !gpu.caps().stream_waits {
        // The thread waits in its claim, which ends with the producer.
        std::thread::scope(|scope| {
            let claims =
                scope.spawn(|| participant.claim(pending.as_bytes(), Wait::Stream(&stream), None));
            for _ in 0..100 {
                assert!(!claims.is_finished(), "the claim did not wait");
                std::thread::yield_now();
            }
            producer.kill();
            match claims.join().expect("it ends") {
                Ok(block) => assert_eq!(block.state(), State::Poisoned),
                Err(error) => assert!(
                    matches!(error, gpu_ipc::ClaimError::ProducerGone),
                    "{error}"
                ),
            }
        });
        wait_until("the news of its death", || participant.is_producer_gone());
        assert_eq!(
            done.state(),
            State::ReadyProducerGone,
            "what was ready before counts as garbage"
        );
        drop(done);
        return wait_until("the mapping to go", || participant.mappings() == 0);
    }
    let waiting = participant
        .claim(pending.as_bytes(), Wait::Stream(&stream), None)
        .expect("claimed");
    assert_eq!(
        (done.state(), waiting.state()),
        (State::Ready, State::Pending)
    );
    producer.kill();
    // The stream waits for a value that never comes, and goes on all the same.
    stream.synchronize().expect("it runs");
    assert_eq!(waiting.state(), State::Poisoned);
    assert_eq!(
        done.state(),
        State::ReadyProducerGone,
        "what was ready before counts as garbage"
    );
    drop((done, waiting));
    wait_until("the mapping to go", || participant.mappings() == 0);
}

fn broken_context() {
    let (mut producer, participant, _dir) = foreign_producer();
    let stream = gpu_ipc::Stream::create(participant.gpu()).expect("a stream");
    let to = participant.id();
    let first = producer.alloc(4096, 5);
    producer.close_gate();
    let pending = producer.share_on_stream(first, To::Participant(to));
    let waiting = participant
        .claim(pending.as_bytes(), Wait::Stream(&stream), None)
        .expect("claimed");
    producer.must(&Command::BreakContext);
    stream.synchronize().expect("it runs");
    assert_eq!(waiting.state(), State::Poisoned);
    assert!(!participant.is_producer_gone());
}

fn socket_replaced() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let mut producer = Agent::start();
    producer.open(&path);
    let mut rival = Agent::start();
    rival.must_not(&Command::Open {
        socket: path.clone(),
    });
    producer.kill();
    rival.open(&path);
    let gpu = open_gpu();
    Participant::builder(gpu)
        .connect(&path)
        .expect("connected to the successor");
}

fn many() {
    let producer = Producer::new();
    let mut consumers: Vec<Agent> = (0..12).map(|_| Agent::start()).collect();
    for consumer in &mut consumers {
        let id = consumer.connect(&producer.session);
        for n in 0..5 {
            let block = producer.block(n);
            consumer.claim(
                &block
                    .share(To::Participant(id), After::Done)
                    .expect("shared"),
            );
        }
    }
    assert_eq!(producer.session.stats().limbo_blocks, 60);
    let survivor = consumers.remove(0);
    for consumer in &mut consumers {
        consumer.kill();
    }
    wait_until("eleven burials", || producer.session.stats().deaths == 11);
    wait_until("all blocks but the survivor's", || {
        producer.session.stats().limbo_blocks <= 5
    });
    assert_eq!(
        producer.session.stats().limbo_blocks,
        5,
        "a block of the survivor's was taken"
    );
    drop(survivor);
    check_survival(&producer);
}

/// Who asked how to map a region, gave up waiting, and lost the producer, ends with its last handle
/// all the same.
fn unanswered() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let (mut producer, mut consumer) = (Agent::start(), Agent::start());
    producer.open(&path);
    let id = consumer.connect_to(&path);
    let block = producer.alloc(4096, 1);
    let descriptor = producer.share(block, To::Participant(id));
    producer.stop();
    assert_eq!(
        consumer
            .try_claim(&descriptor)
            .expect_err("it stands still")
            .why,
        Why::WouldBlock
    );
    producer.kill();
    consumer.hears(&Heard::ProducerGone);
    assert_eq!(participants_threads(&consumer), 1);
    consumer.disconnect();
    wait_until("the participant's thread to end", || {
        participants_threads(&consumer) == 0
    });
}

/// Counts the threads of a process that are participants' own.
fn participants_threads(agent: &Agent) -> usize {
    let threads = std::fs::read_dir(format!("/proc/{}/task", agent.pid())).expect("it lives");
    // A thread that ends at this moment has no name any more.
    let names =
        threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
    names
        .filter(|name| name.starts_with("gpu-ipc-partici"))
        .count()
}

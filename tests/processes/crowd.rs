//! Many of everything: sessions, devices, participants, roles; and both sides without threads of the library's own.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use gpu_ipc::{After, ClaimError, Claims, DeviceId, Gpu, Notice, Participant, Session, State, Stream, To, Wait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::agent::{Agent, WATCHDOG, open_gpu, read_stamp, write_stamp};
use crate::{Case, Producer, wait_until};

pub const CASES: &[Case] = &[
    ("crowd::many_consumers_of_one_session", many_consumers),
    ("crowd::a_session_for_each_device", session_per_device),
    ("crowd::a_process_is_producer_and_consumer_of_another", both_roles),
    ("crowd::several_sessions_and_participants_in_one_process", several),
    ("crowd::both_sides_by_hand_in_one_thread", by_hand),
    ("crowd::a_session_by_hand_tells_of_releases", released_by_hand),
    ("crowd::calls_that_wait_turn_a_session_by_hand", waiting_by_hand),
    ("crowd::a_session_by_hand_ends_after_its_last_handle", ends_by_hand),
    ("crowd::a_consumer_by_hand_survives_its_producer", producer_dies),
];

fn many_consumers() {
    let producer = Producer::new();
    // As many processes as a test may start, each with many participants.
    let mut agents: Vec<Agent> = (0..8).map(|_| Agent::start()).collect();
    for agent in &mut agents {
        agent.must(&format!("crowd-of {} 32", producer.session.socket_path().display()));
    }
    let ids = producer.session.wait_for_participants(256, Some(WATCHDOG)).expect("they are here");
    assert_eq!(ids.len(), 256);
    let block = producer.block(3);
    let grants: Vec<_> = ids.iter().map(|&id| (&block, To::Participant(id))).collect();
    let after = After::Stream(&producer.stream);
    let descriptors = producer.session.share_many(&grants, after, &Default::default()).expect("shared");
    assert_eq!((descriptors.len(), block.outstanding()), (256, 256));
    let ticket = block.share(To::Ticket(Claims::Unlimited), After::Done).expect("a ticket");
    for agent in &mut agents {
        let claimed = agent.must(&format!("crowd-claim-all {}", crate::agent::hex(ticket.as_bytes())));
        assert_eq!(claimed, ["32"]);
    }
    assert_eq!(block.outstanding(), 512);
    for agent in &mut agents[..4] {
        agent.kill();
    }
    drop(agents);
    drop(block);
    producer.wait_for_nothing_held();
    assert_eq!(producer.session.stats().live_blocks, 0);
}

fn session_per_device() {
    let dir = tempfile::tempdir().expect("a directory");
    let backend = gpu_ipc::host::HostBackend::new(gpu_ipc::host::HostConfig::default().devices(3)).expect("it opens");
    let mut kept = Vec::new();
    for device in 0..3 {
        let gpu = Gpu::new(backend.clone(), DeviceId(device)).expect("a device");
        let path = dir.path().join(device.to_string());
        let session = Session::builder(gpu.clone()).socket(&path).open().expect("a session");
        let participant = Participant::builder(gpu.clone()).connect(&path).expect("connected");
        let stream = Stream::create(&gpu).expect("a stream");
        let block = session.alloc(4096).expect("there is room");
        write_stamp(&gpu, &stream, block.device_ptr(), u64::from(device) + 10);
        let descriptor = block.share(To::Participant(participant.id()), After::Stream(&stream)).expect("shared");
        kept.push((gpu, session, participant, stream, descriptor, block));
    }
    // Another device's descriptor names another session: told apart.
    let error = kept[0].2.claim(kept[1].4.as_bytes(), Wait::None, None).expect_err("of another session");
    assert!(matches!(error, ClaimError::Refused { .. }), "{error}");
    for (device, (gpu, _, participant, stream, descriptor, _)) in (0..).zip(&kept) {
        let received = participant.claim(descriptor.as_bytes(), Wait::Stream(stream), Some(WATCHDOG)).expect("claimed");
        assert_eq!(read_stamp(gpu, stream, received.device_ptr()), device + 10);
    }
}

fn both_roles() {
    let dir = tempfile::tempdir().expect("a directory");
    let (first, second) = (dir.path().join("a"), dir.path().join("b"));
    let (mut a, mut b) = (Agent::start(), Agent::start());
    a.must(&format!("open {}", first.display()));
    b.must(&format!("open {}", second.display()));
    let of_a = a.must(&format!("connect {}", second.display()))[0].clone();
    let of_b = b.must(&format!("connect {}", first.display()))[0].clone();
    let round = |from: &mut Agent, to: &mut Agent, id: &str, stamp: &str| {
        let block = from.must(&format!("alloc 4096 {stamp}"))[0].clone();
        let descriptor = from.must(&format!("share-stream {block} {id}"))[0].clone();
        let received = to.must(&format!("claim-stream {descriptor}"))[0].clone();
        assert_eq!(to.must(&format!("stamp {received}")), [stamp]);
        from.must(&format!("drop {block}"));
        to.must(&format!("drop {received}"));
    };
    for n in 0..50 {
        round(&mut a, &mut b, &of_b, &n.to_string());
        round(&mut b, &mut a, &of_a, &(n + 1000).to_string());
    }
    a.kill();
    b.must("await-event ProducerGone");
}

fn several() {
    let producers: Vec<Producer> = (0..4).map(|_| Producer::new()).collect();
    let gpu = open_gpu();
    let mut kept = Vec::new();
    for (n, producer) in (0..).zip(&producers) {
        // Two participants of each session, on a backend of their own: as two libraries in one process would have.
        for _ in 0..2 {
            let participant = Participant::builder(gpu.clone()).connect(producer.session.socket_path());
            let participant = participant.expect("connected");
            let block = producer.block(n);
            let to = To::Participant(participant.id());
            let descriptor = block.share(to, After::Done).expect("shared");
            kept.push((participant, descriptor, n));
        }
    }
    let stream = Stream::create(&gpu).expect("a stream");
    for (participant, descriptor, n) in &kept {
        let received = participant.claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG)).expect("claimed");
        assert_eq!(read_stamp(&gpu, &stream, received.device_ptr()), *n);
    }
    for producer in &producers {
        producer.wait_for_nothing_held();
    }
}

/// A session and a participant that the test turns itself.
struct ByHand {
    gpu: Gpu,
    stream: Stream,
    session: Session,
    participant: Participant,
    _dir: tempfile::TempDir,
}

impl ByHand {
    fn new() -> ByHand {
        let dir = tempfile::tempdir().expect("a directory");
        let gpu = open_gpu();
        let path = dir.path().join("s");
        let session = Session::builder(gpu.clone()).socket(&path).manual().open().expect("a session");
        // The hello needs an answer, so somebody must turn the session meanwhile.
        let participant = std::thread::scope(|scope| {
            let builder = Participant::builder(gpu.clone()).manual();
            let joining = scope.spawn(|| builder.connect(&path));
            wait_until("the welcome", || {
                session.turn().expect("it is by hand");
                joining.is_finished()
            });
            joining.join().expect("it joins").expect("connected")
        });
        let stream = Stream::create(&gpu).expect("a stream");
        ByHand { gpu, stream, session, participant, _dir: dir }
    }

    /// Polls both descriptors and turns what is readable, until something holds. Polls without a time of its own: what
    /// is due makes the descriptors readable.
    fn turn_until<T>(&self, what: &str, mut done: impl FnMut() -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(value) = done() {
                return value;
            }
            assert!(start.elapsed() < WATCHDOG, "waited too long for: {what}");
            let (session, participant) = (self.session.as_fd(), self.participant.as_fd());
            let mut fds = [PollFd::new(&session, PollFlags::IN), PollFd::new(&participant, PollFlags::IN)];
            let watchdog = Timespec { tv_sec: WATCHDOG.as_secs() as i64, tv_nsec: 0 };
            let ready = poll(&mut fds, Some(&watchdog)).expect("poll");
            assert!(ready > 0, "nothing is due, and yet: {what}");
            if fds[0].revents().contains(PollFlags::IN) {
                self.session.turn().expect("it is by hand");
            }
            if fds[1].revents().contains(PollFlags::IN) {
                self.participant.turn().expect("it is by hand");
                while self.participant.next_notice().is_some() {}
            }
        }
    }
}

fn by_hand() {
    let both = ByHand::new();
    for n in 0..20 {
        let block = both.session.alloc(4096).expect("there is room");
        write_stamp(&both.gpu, &both.stream, block.device_ptr(), n);
        let to = if n % 2 == 0 { To::Participant(both.participant.id()) } else { To::Ticket(Claims::Once) };
        let descriptor = block.share(to, After::Stream(&both.stream)).expect("shared");
        drop(block);
        let received = both.turn_until("the claim", || {
            match both.participant.try_claim(descriptor.as_bytes(), Wait::Stream(&both.stream)) {
                Ok(received) => Some(received),
                Err(ClaimError::WouldBlock) => None,
                Err(error) => panic!("{error}"),
            }
        });
        assert_eq!(received.state(), State::Ready, "it waits on the host");
        assert_eq!(read_stamp(&both.gpu, &both.stream, received.device_ptr()), n);
        drop(received);
        both.turn_until("the block to be free", || {
            both.session.collect();
            (both.session.stats().live_blocks == 0).then_some(())
        });
    }
}

fn released_by_hand() {
    let both = ByHand::new();
    // The producer keeps its block and writes into it again: nothing is in limbo, and no call waits.
    let block = both.session.alloc(4096).expect("there is room");
    for round in 0..10 {
        write_stamp(&both.gpu, &both.stream, block.device_ptr(), round);
        let descriptor = block.share(To::Participant(both.participant.id()), After::Done).expect("shared");
        let claim = || both.participant.try_claim(descriptor.as_bytes(), Wait::Host).ok();
        let received = both.turn_until("the claim", claim);
        assert!(block.wait_released(Some(Duration::ZERO)).is_err());
        received.used_on(&both.stream);
        drop(received);
        both.turn_until("the release", || block.wait_released(Some(Duration::ZERO)).ok());
    }
}

fn waiting_by_hand() {
    let both = ByHand::new();
    let block = both.session.alloc(4096).expect("there is room");
    let descriptor = block.share(To::Ticket(Claims::Once), After::Done).expect("a ticket");
    // Each side's wait needs the other to be turned: two threads, and none of the library's.
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let (session, block) = (&both.session, &block);
        let waiting = scope.spawn(move || {
            wait_until("the claim", || {
                session.turn().expect("it is by hand");
                told.try_recv().is_ok()
            });
            block.wait_released(Some(WATCHDOG))
        });
        let claimed = both.participant.claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG)).expect("claimed");
        tell.send(()).expect("it listens");
        drop(claimed);
        waiting.join().expect("it waits").expect("released");
    });
    let threaded = Producer::new();
    assert!(threaded.session.turn().is_err(), "it has a thread");
}

fn ends_by_hand() {
    let both = ByHand::new();
    let block = both.session.alloc(4096).expect("there is room");
    let descriptor = block.share(To::Participant(both.participant.id()), After::Done).expect("shared");
    let received = both.turn_until("the claim", || both.participant.try_claim(descriptor.as_bytes(), Wait::Host).ok());
    let ByHand { session, participant, gpu, .. } = both;
    let reclaim = session.reclaim();
    drop((block, session, participant));
    // The lease outlives both handles; whoever looks after it ends when it does.
    assert!(reclaim.upgrade().is_some_and(|core| core.limbo_bytes() == 4096));
    drop(received);
    wait_until("the session to end", || reclaim.upgrade().is_none());
    drop(gpu);
}

fn producer_dies() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("s");
    let mut producer = Agent::start();
    producer.must(&format!("open {}", path.display()));
    let gpu = open_gpu();
    let participant = Participant::builder(gpu.clone()).manual().connect(&path).expect("connected");
    let block = producer.must("alloc 4096 6")[0].clone();
    producer.must("stick");
    let descriptor = producer.must(&format!("share-stream {block} {}", participant.id().0))[0].clone();
    let bytes = crate::agent::unhex(&descriptor);
    let received = participant.claim(&bytes, Wait::None, Some(WATCHDOG)).expect("claimed");
    assert_eq!(received.state(), State::Pending);
    producer.kill();
    wait_until("the news", || {
        participant.turn().expect("it is by hand");
        participant.next_notice() == Some(Notice::ProducerGone)
    });
    wait_until("the poison", || {
        participant.turn().expect("it is by hand");
        received.state() == State::Poisoned
    });
    assert!(matches!(participant.claim(&bytes, Wait::None, None), Err(ClaimError::ProducerGone)));
    assert_eq!(participant.mappings(), 1);
    drop(received);
    wait_until("the mapping to go", || {
        participant.turn().expect("it is by hand");
        participant.mappings() == 0
    });
}

//! Many of everything: sessions, devices, participants, roles; and both sides in an event loop.

use std::time::Duration;

use gpu_ipc::backend::DeviceId;
use gpu_ipc::session::{AdoptToken, SessionNotice};
use gpu_ipc::{
    After, ClaimError, Claims, Descriptor, Gpu, Participant, ParticipantId, ReceivedBlock, Session,
    State, Stream, To, Wait,
};
use harness::{WATCHDOG, wait_until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::agent::{Agent, bytes, number};
use crate::device::{open_gpu, read_stamp, write_stamp};
use crate::words::{Command, Heard};
use crate::{Case, Producer};

pub const CASES: &[Case] = &[
    ("crowd::many_consumers_of_one_session", many_consumers),
    ("crowd::a_session_for_each_device", session_per_device),
    (
        "crowd::a_process_is_producer_and_consumer_of_another",
        both_roles,
    ),
    (
        "crowd::several_sessions_and_participants_in_one_process",
        several,
    ),
    (
        "crowd::an_event_loop_of_one_thread_serves_both_sides",
        one_loop,
    ),
    ("crowd::a_session_tells_of_releases", releases),
    ("crowd::a_session_tells_of_returned_tokens", tokens),
    ("crowd::both_sides_outlive_their_last_handles", outlived),
];

fn many_consumers() {
    let producer = Producer::new();
    // As many processes as a test may start, each with many participants.
    let mut agents: Vec<Agent> = (0..8).map(|_| Agent::start()).collect();
    for agent in &mut agents {
        agent.must(&Command::Join {
            socket: producer.session.socket_path().into(),
            count: 32,
        });
    }
    let ids = producer
        .session
        .wait_for_participants(256, Some(WATCHDOG))
        .expect("they are here");
    assert_eq!(ids.len(), 256);
    let block = producer.block(3);
    let grants: Vec<_> = ids
        .iter()
        .map(|&id| (&block, To::Participant(id)))
        .collect();
    let after = After::Stream(&producer.stream);
    let descriptors = producer
        .session
        .share_many(&grants, after, &Default::default())
        .expect("shared");
    assert_eq!((descriptors.len(), block.outstanding()), (256, 256));
    let ticket = block
        .share(To::Ticket(Claims::Unlimited), After::Done)
        .expect("a ticket");
    for agent in &mut agents {
        let claimed = number(agent.must(&Command::ClaimByAll {
            descriptor: bytes(&ticket),
        }));
        assert_eq!(claimed, 32);
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
    let backend = gpu_ipc::host::HostBackend::new(gpu_ipc::host::HostConfig::default().devices(3))
        .expect("it opens");
    let mut kept = Vec::new();
    for device in 0..3 {
        let gpu = Gpu::new(backend.clone(), DeviceId(device)).expect("a device");
        let path = dir.path().join(device.to_string());
        let session = Session::builder(gpu.clone())
            .socket(&path)
            .open()
            .expect("a session");
        let participant = Participant::builder(gpu.clone())
            .connect(&path)
            .expect("connected");
        let stream = Stream::create(&gpu).expect("a stream");
        let block = session.alloc(4096).expect("there is room");
        write_stamp(&gpu, &stream, block.device_ptr(), u64::from(device) + 10);
        let descriptor = block
            .share(To::Participant(participant.id()), After::Stream(&stream))
            .expect("shared");
        kept.push((gpu, session, participant, stream, descriptor, block));
    }
    // Another device's descriptor names another session: told apart.
    let error = kept[0]
        .2
        .claim(kept[1].4.as_bytes(), Wait::None, None)
        .expect_err("of another session");
    assert!(matches!(error, ClaimError::Refused { .. }), "{error}");
    for (device, (gpu, _, participant, stream, descriptor, _)) in (0..).zip(&kept) {
        let received = participant
            .claim(descriptor.as_bytes(), Wait::Stream(stream), Some(WATCHDOG))
            .expect("claimed");
        assert_eq!(read_stamp(gpu, stream, received.device_ptr()), device + 10);
    }
}

fn both_roles() {
    let dir = tempfile::tempdir().expect("a directory");
    let (first, second) = (dir.path().join("a"), dir.path().join("b"));
    let (mut a, mut b) = (Agent::start(), Agent::start());
    a.open(&first);
    b.open(&second);
    let of_a = a.connect_to(&second);
    let of_b = b.connect_to(&first);
    let round = |from: &mut Agent, to: &mut Agent, id: ParticipantId, stamp: u64| {
        let block = from.alloc(4096, stamp);
        let descriptor = from.share_on_stream(block, To::Participant(id));
        let received = to.claim_on_stream(&descriptor);
        assert_eq!(to.stamp(received), stamp);
        from.let_go(block);
        to.let_go(received);
    };
    for n in 0..50 {
        round(&mut a, &mut b, of_b, n);
        round(&mut b, &mut a, of_a, n + 1000);
    }
    a.kill();
    b.hears(&Heard::ProducerGone);
}

fn several() {
    let producers: Vec<Producer> = (0..4).map(|_| Producer::new()).collect();
    let gpu = open_gpu();
    let mut kept = Vec::new();
    for (n, producer) in (0..).zip(&producers) {
        // Two participants of each session, on a backend of their own: as two libraries in one
        // process would have.
        for _ in 0..2 {
            let participant =
                Participant::builder(gpu.clone()).connect(producer.session.socket_path());
            let participant = participant.expect("connected");
            let block = producer.block(n);
            let to = To::Participant(participant.id());
            let descriptor = block.share(to, After::Done).expect("shared");
            kept.push((participant, descriptor, n));
        }
    }
    let stream = Stream::create(&gpu).expect("a stream");
    for (participant, descriptor, n) in &kept {
        let received = participant
            .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
            .expect("claimed");
        assert_eq!(read_stamp(&gpu, &stream, received.device_ptr()), *n);
    }
    for producer in &producers {
        producer.wait_for_nothing_held();
    }
}

/// Both sides, and an event loop that polls their descriptors.
struct EventLoop {
    gpu: Gpu,
    stream: Stream,
    session: Session,
    participant: Participant,
    _dir: tempfile::TempDir,
}

impl EventLoop {
    fn new() -> EventLoop {
        let dir = tempfile::tempdir().expect("a directory");
        let gpu = open_gpu();
        let session = Session::builder(gpu.clone())
            .socket(dir.path().join("s"))
            .open()
            .expect("a session");
        let participant = Participant::builder(gpu.clone())
            .connect(session.socket_path())
            .expect("connected");
        let stream = Stream::create(&gpu).expect("a stream");
        EventLoop {
            gpu,
            stream,
            session,
            participant,
            _dir: dir,
        }
    }

    /// Tries, and again whenever a descriptor is readable: nothing but the notices says when.
    fn run_until<T>(&self, what: &str, mut done: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(value) = done() {
                return value;
            }
            let mut fds = [
                PollFd::new(&self.session, PollFlags::IN),
                PollFd::new(&self.participant, PollFlags::IN),
            ];
            let watchdog = Timespec {
                tv_sec: WATCHDOG.as_secs() as i64,
                tv_nsec: 0,
            };
            assert!(
                poll(&mut fds, Some(&watchdog)).expect("poll") > 0,
                "no notice, and yet: {what}"
            );
            self.session.next_notice();
            self.participant.next_notice();
        }
    }

    fn claim(&self, descriptor: &Descriptor) -> ReceivedBlock {
        self.run_until("the claim", || {
            match self
                .participant
                .try_claim(descriptor.as_bytes(), Wait::Host)
            {
                Ok(received) => Some(received),
                Err(ClaimError::WouldBlock) => None,
                Err(error) => panic!("{error}"),
            }
        })
    }
}

fn one_loop() {
    let both = EventLoop::new();
    let block = both.session.alloc(4096).expect("there is room");
    for n in 0..20 {
        write_stamp(&both.gpu, &both.stream, block.device_ptr(), n);
        let to = if n % 2 == 0 {
            To::Participant(both.participant.id())
        } else {
            To::Ticket(Claims::Once)
        };
        let descriptor = block
            .share(to, After::Stream(&both.stream))
            .expect("shared");
        let received = both.claim(&descriptor);
        assert_eq!(received.state(), State::Ready, "it waits on the host");
        assert_eq!(
            read_stamp(&both.gpu, &both.stream, received.device_ptr()),
            n
        );
        drop(received);
        both.run_until("the release", || {
            block.wait_released(Some(Duration::ZERO)).ok()
        });
    }
}

fn releases() {
    let both = EventLoop::new();
    // Several blocks are out at once: each release is told, however they come.
    let blocks: Vec<_> = (0..8)
        .map(|_| both.session.alloc(4096).expect("there is room"))
        .collect();
    for round in 0..10 {
        let received: Vec<_> = blocks
            .iter()
            .map(|block| {
                block
                    .share(To::Participant(both.participant.id()), After::Done)
                    .expect("shared")
            })
            .map(|descriptor| both.claim(&descriptor))
            .collect();
        assert!(
            blocks
                .iter()
                .all(|block| block.wait_released(Some(Duration::ZERO)).is_err())
        );
        // By this thread, or by the GPU a little later.
        received
            .iter()
            .skip(round % 2)
            .step_by(2)
            .for_each(|received| received.used_on(&both.stream).expect("a stream of its own"));
        drop(received);
        for block in &blocks {
            both.run_until("the release", || {
                block.wait_released(Some(Duration::ZERO)).ok()
            });
        }
    }
}

fn tokens() {
    let both = EventLoop::new();
    let pool = both.gpu.backend().alloc(
        both.gpu.device(),
        1 << 20,
        both.gpu.default_sharing().expect("it shares"),
    );
    let pool = pool.expect("there is room");
    for round in 0..10 {
        let token = AdoptToken(round);
        // SAFETY: `adopt` asks that the range stays allocated until its token is back: it is freed
        // below; and that no other block overlaps it: the one before it has returned its token.
        let block =
            unsafe { both.session.adopt(pool.base, 4096, token) }.expect("it can be shared");
        let descriptor = block
            .share(To::Participant(both.participant.id()), After::Done)
            .expect("shared");
        let received = both.claim(&descriptor);
        drop(block);
        assert_eq!(both.session.collect().tokens, [], "it is held");
        drop(received);
        // Nobody calls the session meanwhile: it asks the participant to unmap by itself, and says
        // when it has.
        while both.session.next_notice() != Some(SessionNotice::TokensReturned) {
            let watchdog = Timespec {
                tv_sec: WATCHDOG.as_secs() as i64,
                tv_nsec: 0,
            };
            let ready = poll(
                &mut [PollFd::new(&both.session, PollFlags::IN)],
                Some(&watchdog),
            )
            .expect("poll");
            assert!(ready > 0, "no notice of the token");
        }
        assert_eq!(both.session.collect().tokens, [token]);
    }
    // SAFETY: `free` asks for memory of `alloc` that nothing touches and nobody has open: every
    // token is back.
    unsafe { both.gpu.backend().free(pool.base) }.expect("nobody has it");
}

fn outlived() {
    let both = EventLoop::new();
    let block = both.session.alloc(4096).expect("there is room");
    let descriptor = block
        .share(To::Participant(both.participant.id()), After::Done)
        .expect("shared");
    let received = both.claim(&descriptor);
    let EventLoop {
        session,
        participant,
        gpu,
        ..
    } = both;
    let reclaim = session.reclaim();
    drop((block, session, participant));
    // The lease outlives both handles, and the threads that look after it end when it does.
    assert!(
        reclaim
            .upgrade()
            .is_some_and(|core| core.limbo_bytes() == 4096)
    );
    drop(received);
    wait_until("the session to end", || reclaim.upgrade().is_none());
    drop(gpu);
}

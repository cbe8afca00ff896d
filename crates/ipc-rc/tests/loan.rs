//! Loans: shared again and again, claimed again and again, and taken back.

use std::num::NonZeroU32;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Error, Gpu};
use ipc_rc::{
    After, ClaimError, Claims, Descriptor, Gone, Participant, ReceivedBlock, Session,
    SessionBuilder, ShareOptions, State, Stream, To, Wait,
};

/// A wait that is longer will never end.
const PATIENCE: Duration = Duration::from_secs(120);

const BROADCAST: To = To::Ticket(Claims::Unlimited);

struct Stage {
    gpu: Gpu,
    session: Session,
    _dir: tempfile::TempDir,
}

impl Stage {
    fn new() -> Stage {
        Stage::with(|builder| builder)
    }

    fn with(options: impl FnOnce(SessionBuilder) -> SessionBuilder) -> Stage {
        let dir = tempfile::tempdir().expect("a directory");
        let backend = HostBackend::new(HostConfig::default()).expect("it opens");
        let gpu = Gpu::new(backend, DeviceId(0)).expect("a device");
        let builder = Session::builder(gpu.clone()).socket(dir.path().join("s"));
        let session = options(builder).open().expect("a session");
        Stage {
            gpu,
            session,
            _dir: dir,
        }
    }

    fn join(&self) -> Participant {
        Participant::builder(self.gpu.clone())
            .connect(self.session.socket_path())
            .expect("connected")
    }
}

fn claim(participant: &Participant, descriptor: &Descriptor) -> Result<ReceivedBlock, ClaimError> {
    participant.claim(descriptor.as_bytes(), Wait::None, Some(PATIENCE))
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "waited too long for: {what}");
        std::thread::yield_now();
    }
}

/// Holds a stream up until what it returns is dropped.
fn hold_up(stage: &Stage, stream: &Stream) -> Sender<()> {
    let (open, gate) = channel::<()>();
    let wait = Box::new(move || {
        let _ = gate.recv();
    });
    // SAFETY: `host_function` asks for a live stream that nobody captures: the caller keeps it until
    // the gate opens.
    unsafe { stage.gpu.backend().host_function(stream.raw(), wait) }.expect("queued");
    open
}

#[test]
fn a_broadcast_is_claimed_again_by_a_participant_that_holds_it_and_by_one_that_dropped_it() {
    let stage = Stage::new();
    let (first, second) = (stage.join(), stage.join());
    let loan = stage
        .session
        .lend(stage.session.alloc(4096).expect("room"), After::Done)
        .expect("lent");
    let descriptor = loan.share(BROADCAST).expect("shared");
    let held = claim(&first, &descriptor).expect("claimed");
    let again = claim(&first, &descriptor).expect("claimed again while it is held");
    let theirs = claim(&second, &descriptor).expect("claimed by another");
    assert_eq!(loan.block().outstanding(), 3);
    drop((held, again, theirs));
    loan.block().wait_released(Some(PATIENCE)).expect("dropped");
    for _ in 0..100 {
        drop(claim(&first, &descriptor).expect("claimed again after it was dropped"));
    }
    assert!(
        stage.session.stats().tickets == 1 && loan.block().outstanding() <= 100,
        "one ticket, and a lease for each claim"
    );
    loan.release()
        .wait(Some(PATIENCE))
        .expect("nobody holds it");
}

#[test]
fn threads_of_one_participant_that_claim_a_broadcast_at_once_have_a_lease_each() {
    const THREADS: usize = 6;
    const ROUNDS: usize = 50;
    let stage = Stage::new();
    let participant = stage.join();
    let loan = stage
        .session
        .lend(stage.session.alloc(4096).expect("room"), After::Done)
        .expect("lent");
    let descriptor = loan.share(BROADCAST).expect("shared");
    let barrier = Barrier::new(THREADS);
    for _ in 0..ROUNDS {
        let held: Vec<ReceivedBlock> = std::thread::scope(|scope| {
            let claimed: Vec<_> = (0..THREADS)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        claim(&participant, &descriptor).expect("it is a broadcast")
                    })
                })
                .collect();
            claimed
                .into_iter()
                .map(|thread| thread.join().expect("it claims"))
                .collect()
        });
        assert_eq!(loan.block().outstanding(), THREADS);
        drop(held);
        loan.block().wait_released(Some(PATIENCE)).expect("dropped");
    }
}

#[test]
fn a_claim_that_would_have_to_wait_comes_to_the_next_lease_of_a_broadcast() {
    let stage = Stage::new();
    let participant = stage.join();
    let block = stage.session.alloc(4096).expect("room");
    let broadcast = block.share(BROADCAST, After::Done).expect("shared");
    let once = block
        .share(To::Ticket(Claims::Once), After::Done)
        .expect("shared");
    let try_claim = |descriptor: &Descriptor| loop {
        match participant.try_claim(descriptor.as_bytes(), Wait::None) {
            Err(ClaimError::WouldBlock) => std::thread::yield_now(),
            done => break done,
        }
    };
    let held: Vec<_> = (0..3)
        .map(|_| try_claim(&broadcast).expect("claimed"))
        .collect();
    assert_eq!(held.len(), 3);
    let _only = try_claim(&once).expect("claimed");
    let refused = try_claim(&once);
    assert!(matches!(refused, Err(ClaimError::AlreadyClaimed)));
}

#[test]
fn no_time_to_live_ends_a_broadcast_of_a_loan_unless_it_was_asked_for() {
    let stage = Stage::with(|builder| builder.time_to_live(Some(Duration::from_millis(20))));
    let participant = stage.join();
    let loan = stage
        .session
        .lend(stage.session.alloc(4096).expect("room"), After::Done)
        .expect("lent");
    let lasts = loan.share(BROADCAST).expect("shared");
    let short = ShareOptions::default().time_to_live(Some(Duration::from_millis(20)));
    let lapses = [
        loan.share_with(BROADCAST, &short).expect("shared"),
        loan.share(To::Ticket(Claims::Once)).expect("shared"),
        loan.share(To::Participant(participant.id()))
            .expect("shared"),
    ];
    wait_until("the others to lapse", || stage.session.stats().expired == 3);
    for descriptor in &lapses {
        let refused = claim(&participant, descriptor);
        assert!(matches!(refused, Err(ClaimError::Revoked)), "{refused:?}");
    }
    claim(&participant, &lasts).expect("it lasts as long as the loan");
}

#[test]
fn a_release_ends_what_nobody_claimed_and_leaves_what_is_held() {
    let stage = Stage::new();
    let (holder, asker, late) = (stage.join(), stage.join(), stage.join());
    let loan = stage
        .session
        .lend(stage.session.alloc(4096).expect("room"), After::Done)
        .expect("lent");
    let descriptor = loan.share(BROADCAST).expect("shared");
    let held = claim(&holder, &descriptor).expect("claimed");
    asker.prefetch(&[descriptor.as_bytes()]).expect("asked");
    wait_until("the answer to one that only asked", || {
        loan.block().outstanding() == 2
    });
    let released = loan.release();
    for participant in [&holder, &asker, &late] {
        let refused = claim(participant, &descriptor);
        assert!(matches!(refused, Err(ClaimError::Revoked)), "{refused:?}");
    }
    assert!(matches!(
        released.wait(Some(Duration::ZERO)),
        Err(Error::Deadline { .. })
    ));
    assert_eq!(held.state(), State::Ready);
    drop(held);
    released.wait(Some(PATIENCE)).expect("nobody holds it");
    assert!(released.is_over());
    assert_eq!(stage.session.stats().live_blocks, 0);
}

#[test]
fn a_loan_that_becomes_a_block_again_is_written_and_lent_again() {
    let stage = Stage::new();
    let participant = stage.join();
    let mut block = stage.session.alloc(4096).expect("room");
    let mut last: Option<Descriptor> = None;
    for _ in 0..3 {
        let loan = stage.session.lend(block, After::Done).expect("lent");
        let descriptor = loan.share(BROADCAST).expect("shared");
        drop(claim(&participant, &descriptor).expect("claimed"));
        if let Some(last) = last.replace(descriptor) {
            let refused = claim(&participant, &last);
            assert!(matches!(refused, Err(ClaimError::Revoked)), "{refused:?}");
        }
        block = loan.into_block();
        block
            .wait_released(Some(PATIENCE))
            .expect("nobody holds it");
    }
}

#[test]
fn a_loan_is_read_after_the_work_that_it_was_made_after() {
    let stage = Stage::new();
    let participant = stage.join();
    let stream = Stream::create(&stage.gpu).expect("a stream");
    let open = hold_up(&stage, &stream);
    let block = stage.session.alloc(4096).expect("room");
    let loan = stage
        .session
        .lend(block, After::Stream(&stream))
        .expect("lent");
    let received: Vec<_> = [
        BROADCAST,
        To::Participant(participant.id()),
        To::Ticket(Claims::Times(NonZeroU32::MIN)),
    ]
    .into_iter()
    .map(|to| claim(&participant, &loan.share(to).expect("shared")).expect("claimed"))
    .collect();
    for received in &received {
        assert_eq!(received.state(), State::Pending);
    }
    drop(open);
    for received in &received {
        received.wait(Wait::Host, Some(PATIENCE)).expect("it ends");
        assert_eq!(received.state(), State::Ready);
    }
    // What the stream does later is not waited for.
    let later = hold_up(&stage, &stream);
    for to in [BROADCAST, To::Participant(participant.id())] {
        let received = claim(&participant, &loan.share(to).expect("shared")).expect("claimed");
        assert_eq!(received.state(), State::Ready);
    }
    drop(later);
    drop(received);
    loan.release()
        .wait(Some(PATIENCE))
        .expect("nobody holds it");
}

#[test]
fn a_closed_session_shares_no_loan_and_what_was_shared_lasts_as_long_as_it() {
    let stage = Stage::new();
    let participant = stage.join();
    let loan = stage
        .session
        .lend(stage.session.alloc(4096).expect("room"), After::Done)
        .expect("lent");
    let descriptor = loan.share(BROADCAST).expect("shared");
    let report = stage.session.shutdown(Duration::ZERO);
    assert!(!report.clean && report.own_blocks == 1, "{report:?}");
    let refused = loan.share(BROADCAST).err();
    assert_eq!(refused.as_ref().and_then(Gone::of), Some(Gone::Session));
    drop(claim(&participant, &descriptor).expect("those that are connected claim"));
    loan.release()
        .wait(Some(PATIENCE))
        .expect("nobody holds it");
    drop(participant);
    assert!(stage.session.shutdown(PATIENCE).clean);
}

#[test]
fn a_loan_of_another_sessions_block_is_refused() {
    let (stage, other) = (Stage::new(), Stage::new());
    let block = other.session.alloc(4096).expect("room");
    let refused = stage.session.lend(block, After::Done);
    assert!(
        matches!(refused, Err(Error::Mismatch { .. })),
        "{refused:?}"
    );
}

#[test]
fn what_was_shared_without_a_block_in_hand_is_revoked_by_its_descriptor() {
    let (stage, other) = (Stage::new(), Stage::new());
    let participant = stage.join();
    let share = |to| {
        let block = stage.session.alloc(4096).expect("room");
        block.share(to, After::Done).expect("shared")
    };
    for to in [
        To::Participant(participant.id()),
        To::Ticket(Claims::Once),
        To::Ticket(Claims::Times(NonZeroU32::MIN.saturating_add(2))),
    ] {
        let descriptor = share(to);
        let foreign = other.session.revoke(&descriptor);
        assert!(
            matches!(foreign, Err(Error::Mismatch { .. })),
            "{foreign:?}"
        );
        assert!(stage.session.revoke(&descriptor).expect("ours"), "{to:?}");
        assert!(!stage.session.revoke(&descriptor).expect("ours"), "{to:?}");
        let refused = claim(&participant, &descriptor);
        assert!(matches!(refused, Err(ClaimError::Revoked)), "{refused:?}");
        wait_until("its block to be given back", || {
            stage.session.stats().live_blocks == 0
        });
        let claimed = share(to);
        let held = claim(&participant, &claimed).expect("claimed");
        let taken = stage.session.revoke(&claimed).expect("ours");
        assert_eq!(
            taken,
            matches!(to, To::Ticket(Claims::Times(_))),
            "of {to:?} nothing but the claims that are left"
        );
        assert_eq!(held.state(), State::Ready);
    }
    stage.session.collect();
    wait_until("all to be given back", || {
        stage.session.collect();
        stage.session.stats().live_blocks == 0
    });
}

#[test]
fn a_ticket_that_was_redeemed_and_not_claimed_is_taken_back() {
    let stage = Stage::new();
    let participant = stage.join();
    for claims in [Claims::Once, Claims::Unlimited] {
        let block = stage.session.alloc(4096).expect("room");
        let descriptor = block
            .share(To::Ticket(claims), After::Done)
            .expect("shared");
        participant
            .prefetch(&[descriptor.as_bytes()])
            .expect("asked");
        wait_until("the answer", || stage.session.stats().in_flight == 1);
        assert!(stage.session.revoke(&descriptor).expect("ours"));
        assert_eq!(block.outstanding(), 0);
        let refused = claim(&participant, &descriptor);
        assert!(matches!(refused, Err(ClaimError::Revoked)), "{refused:?}");
    }
}

#[test]
fn of_a_claim_and_a_revocation_at_once_one_wins() {
    let stage = Stage::new();
    let participant = stage.join();
    let block = stage.session.alloc(4096).expect("room");
    let (barrier, over) = (Barrier::new(2), AtomicBool::new(false));
    let (give, take) = channel::<Descriptor>();
    let (tell, told) = channel::<bool>();
    std::thread::scope(|scope| {
        let (barrier, over, participant) = (&barrier, &over, &participant);
        let claimant = scope.spawn(move || {
            let mut won = 0;
            loop {
                barrier.wait();
                if over.load(Ordering::Relaxed) {
                    return won;
                }
                let descriptor = take.recv().expect("one each round");
                let claimed = match claim(participant, &descriptor) {
                    Ok(_) => true,
                    Err(ClaimError::Revoked | ClaimError::Stale) => false,
                    Err(error) => panic!("{error}"),
                };
                won += u32::from(claimed);
                tell.send(claimed).expect("it listens");
            }
        });
        for round in 0..2_000 {
            let to = match round % 2 {
                0 => To::Participant(participant.id()),
                _ => To::Ticket(Claims::Once),
            };
            let descriptor = block.share(to, After::Done).expect("shared");
            give.send(descriptor).expect("it listens");
            barrier.wait();
            let revoked = stage.session.revoke(&descriptor).expect("ours");
            let claimed = told.recv().expect("it tells");
            assert_ne!(claimed, revoked, "round {round}: both or none has it");
        }
        over.store(true, Ordering::Relaxed);
        barrier.wait();
        claimant.join().expect("it claims");
    });
    block.wait_released(Some(PATIENCE)).expect("all have ended");
}

//! What a session that is closing still gives, what it ends, and what its report names.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Gpu, ParticipantId, Result};
use ipc_rc::{After, ClaimError, Claims, Gone, Participant, Session, SessionBuilder, To, Wait};
use transport::os::socket;

const WATCHDOG: Duration = Duration::from_secs(120);

fn open(
    choose: impl FnOnce(SessionBuilder) -> SessionBuilder,
) -> (tempfile::TempDir, Gpu, Session) {
    let dir = tempfile::tempdir().expect("a directory");
    let backend = HostBackend::new(HostConfig::default()).expect("it opens");
    let gpu = Gpu::new(backend, DeviceId(0)).expect("a device");
    let builder = Session::builder(gpu.clone()).socket(dir.path().join("s"));
    let session = choose(builder).open().expect("a session");
    (dir, gpu, session)
}

fn connect(gpu: &Gpu, session: &Session) -> Participant {
    Participant::builder(gpu.clone())
        .connect(session.socket_path())
        .expect("connected")
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < WATCHDOG, "waited too long for: {what}");
        std::thread::yield_now();
    }
}

/// Waits on another thread for two participants, and returns what the wait gave.
fn wait_for_two(session: &Session, meanwhile: impl FnOnce()) -> Result<Vec<ParticipantId>> {
    let (done, waited) = channel();
    let (began, begun) = channel();
    let waiter = session.clone();
    std::thread::spawn(move || {
        began.send(()).expect("the test listens");
        let _ = done.send(waiter.wait_for_participants(2, None));
    });
    begun.recv().expect("it began");
    meanwhile();
    waited
        .recv_timeout(WATCHDOG)
        .expect("it waits for ever for participants that cannot come")
}

#[test]
fn waiting_for_participants_ends_with_the_session() {
    let (_dir, gpu, session) = open(|builder| builder);
    let _one = connect(&gpu, &session);
    let waited = wait_for_two(&session, || drop(session.shutdown(Duration::ZERO)));
    let gone = waited.as_ref().err().and_then(Gone::of);
    assert_eq!(gone, Some(Gone::Session), "{waited:?}");
    // And so does a wait that begins after.
    let waited = wait_for_two(&session, || {});
    let gone = waited.as_ref().err().and_then(Gone::of);
    assert_eq!(gone, Some(Gone::Session), "{waited:?}");
}

#[test]
fn participants_that_are_connected_claim_after_the_close_until_the_last_has_gone() {
    let (_dir, gpu, session) = open(|builder| builder.time_to_live(None));
    let (first, second) = (connect(&gpu, &session), connect(&gpu, &session));
    let share = |to| {
        let block = session.alloc(4096).expect("there is room");
        block.share(to, After::Done).expect("shared")
    };
    let tickets = [0; 3].map(|_| share(To::Ticket(Claims::Once)));
    let addressed = share(To::Participant(second.id()));
    let report = session.shutdown(Duration::ZERO);
    assert_eq!((report.clean, report.tickets), (false, 3), "{report:?}");
    assert!(
        report
            .to_string()
            .contains("3 tickets that connected processes can still claim"),
        "{report}"
    );
    let claim = |participant: &Participant, descriptor: &ipc_rc::Descriptor| {
        participant.claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
    };
    drop(claim(&first, &tickets[0]).expect("it was connected before the close"));
    first.close(Some(WATCHDOG)).expect("it went");
    drop(claim(&second, &tickets[1]).expect("the other may claim still"));
    drop(claim(&second, &addressed).expect("what was granted to it"));
    assert_eq!(session.stats().tickets, 1);
    second.close(Some(WATCHDOG)).expect("it went");
    // The one that is left can be claimed by no process.
    let report = session.shutdown(WATCHDOG);
    assert!(report.clean, "{report}");
    assert_eq!((report.tickets, session.stats().tickets), (0, 0));
    assert_eq!(session.stats().revoked, 1);
}

#[test]
fn a_connection_that_was_made_before_the_close_may_say_hello_and_claim() {
    let (_dir, gpu, session) = open(|builder| builder.time_to_live(None));
    let block = session.alloc(4096).expect("there is room");
    let ticket = block
        .share(To::Ticket(Claims::Once), After::Done)
        .expect("a ticket");
    drop(block);
    let (ours, theirs) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .expect("a pair");
    session.accept(ours).expect("taken in");
    assert_eq!(session.shutdown(Duration::ZERO).tickets, 1);
    let participant = Participant::builder(gpu)
        .connect_by(theirs)
        .expect("it was there before the close");
    drop(
        participant
            .claim(ticket.as_bytes(), Wait::Host, Some(WATCHDOG))
            .expect("claimed"),
    );
    participant.close(Some(WATCHDOG)).expect("it went");
    assert!(session.shutdown(WATCHDOG).clean);
}

#[test]
fn a_connection_that_says_nothing_keeps_no_ticket_of_a_closed_session() {
    let (_dir, _gpu, session) = open(|builder| builder.time_to_live(None));
    let silent = socket::connect_within(session.socket_path(), None).expect("it listens");
    let (ours, passed_on) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .expect("a pair");
    session.accept(ours).expect("taken in");
    let block = session.alloc(4096).expect("there is room");
    block
        .share(To::Ticket(Claims::Once), After::Done)
        .expect("a ticket");
    drop(block);
    let report = session.shutdown(WATCHDOG);
    assert!(report.clean && report.tickets == 0, "{report}");
    drop((silent, passed_on));
}

#[test]
fn a_claim_that_comes_too_late_for_a_closed_session_finds_the_producer_gone() {
    let (_dir, gpu, session) = open(|builder| builder.time_to_live(None));
    let participant = connect(&gpu, &session);
    let block = session.alloc(4096).expect("there is room");
    let ticket = block
        .share(To::Ticket(Claims::Once), After::Done)
        .expect("a ticket");
    session.shutdown(Duration::ZERO);
    drop((block, session));
    // The ticket keeps the session for the one that is connected.
    drop(
        participant
            .claim(ticket.as_bytes(), Wait::Host, Some(WATCHDOG))
            .expect("claimed"),
    );
    wait_until("the session to end", || participant.is_producer_gone());
    let error = participant
        .claim(ticket.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect_err("nothing answers");
    assert!(matches!(error, ClaimError::ProducerGone), "{error}");
}

#[test]
fn a_session_opens_at_once_where_another_was_dropped_or_shut_down() {
    let dir = tempfile::tempdir().expect("a directory");
    let backend = HostBackend::new(HostConfig::default()).expect("it opens");
    let gpu = Gpu::new(backend, DeviceId(0)).expect("a device");
    let path = dir.path().join("s");
    let open = |round: usize| {
        let opened = Session::builder(gpu.clone()).socket(&path).open();
        opened.unwrap_or_else(|error| panic!("session {round}: {error}"))
    };
    for round in 0..200 {
        let session = open(round);
        if round % 2 == 0 {
            session.shutdown(Duration::ZERO);
            assert!(!path.exists(), "the socket's file stays");
        }
        drop(session);
        assert!(!path.exists(), "the socket's file stays");
    }
    // A predecessor whose thread still runs removes nothing of its successor's.
    let first = open(200);
    let participant = connect(&gpu, &first);
    let block = first.alloc(4096).expect("there is room");
    let to = To::Participant(participant.id());
    let descriptor = block.share(to, After::Done).expect("shared");
    let held = participant
        .claim(descriptor.as_bytes(), Wait::Host, Some(WATCHDOG))
        .expect("claimed");
    first.shutdown(Duration::ZERO);
    let second = open(201);
    drop((held, block, participant));
    assert!(first.shutdown(WATCHDOG).clean);
    drop(first);
    connect(&gpu, &second);
}

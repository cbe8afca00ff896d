//! File descriptors that a session keeps under names until they are fetched.

use std::fs::File;
use std::io::{Read, Write, pipe};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Error, Gpu};
use ipc_rc::{ClaimError, Departure, DepositId, Gone, Participant, Session, SessionNotice};
use transport::os::process::own_pidfd;
use transport::os::socket::{ReceiveOutcome, SendOutcome, connect_within, receive, send};
use transport::wire::message::{MOST_BYTES, RefusalCode, ToParticipant, ToProducer};

/// Long enough for the slowest machine; a test that waits longer hangs.
const WATCHDOG: Duration = Duration::from_secs(120);
const ID: DepositId = DepositId(*b"one of a kind ..");

struct Stage {
    gpu: Gpu,
    session: Session,
    _dir: tempfile::TempDir,
}

impl Stage {
    fn new() -> Stage {
        let dir = tempfile::tempdir().expect("a directory");
        let backend = HostBackend::new(HostConfig::default()).expect("it opens");
        let gpu = Gpu::new(backend, DeviceId(0)).expect("a device");
        let session = Session::builder(gpu.clone())
            .socket(dir.path().join("s"))
            .open()
            .expect("a session");
        Stage {
            gpu,
            session,
            _dir: dir,
        }
    }

    fn connect(&self) -> Participant {
        Participant::builder(self.gpu.clone())
            .connect(self.session.socket_path())
            .expect("connected")
    }
}

/// A file with a content, of which there is no other copy.
fn file(content: &str) -> OwnedFd {
    let (reader, mut writer) = pipe().expect("a pipe");
    writer.write_all(content.as_bytes()).expect("written");
    reader.into()
}

fn content(file: OwnedFd) -> String {
    let mut text = String::new();
    File::from(file).read_to_string(&mut text).expect("read");
    text
}

fn refused<T: std::fmt::Debug>(result: Result<T, ClaimError>) -> String {
    match result {
        Err(ClaimError::Refused { why, remedy }) => format!("{why}; {remedy}"),
        other => panic!("{other:?}"),
    }
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < WATCHDOG, "waited too long for: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn what_one_deposits_is_fetched_once_by_another_or_by_the_session() {
    let stage = Stage::new();
    let (from, to) = (stage.connect(), stage.connect());
    from.deposit(ID, file("first"), Some(WATCHDOG))
        .expect("kept");
    assert_eq!(stage.session.deposits(), 1);
    let fetched = to.fetch(ID, Some(WATCHDOG)).expect("fetched");
    assert_eq!(content(fetched), "first");
    // The session has no copy any more: that ends by a question of its own.
    wait_until("the end of the fetch", || stage.session.deposits() == 0);
    let why = refused(to.fetch(ID, Some(WATCHDOG)));
    assert!(
        why.contains("no descriptor is kept") && why.contains("deposit it first"),
        "{why}"
    );

    from.deposit(ID, file("second"), Some(WATCHDOG))
        .expect("the name is free again");
    assert_eq!(content(stage.session.fetch(ID).expect("fetched")), "second");
    stage
        .session
        .deposit(ID, file("third"))
        .expect("of the session");
    assert_eq!(content(to.fetch(ID, None).expect("fetched")), "third");
    assert!(matches!(
        stage.session.fetch(ID),
        Err(Error::Invalid {
            what: "the name of a deposit",
            ..
        })
    ));
}

#[test]
fn a_name_that_is_taken_is_refused_and_the_first_stays() {
    let stage = Stage::new();
    let (one, other) = (stage.connect(), stage.connect());
    one.deposit(ID, file("mine"), Some(WATCHDOG)).expect("kept");
    let why = refused(other.deposit(ID, file("theirs"), Some(WATCHDOG)));
    assert!(
        why.contains("another descriptor is kept under the name"),
        "{why}"
    );
    let again = stage.session.deposit(ID, file("the session's"));
    assert!(matches!(again, Err(Error::Invalid { .. })), "{again:?}");
    assert_eq!(
        content(other.fetch(ID, Some(WATCHDOG)).expect("fetched")),
        "mine"
    );
}

#[test]
fn a_participant_has_a_quota_and_others_have_theirs() {
    let stage = Stage::new();
    let (one, other) = (stage.connect(), stage.connect());
    let name = |number: u32| DepositId(u128::from(number).to_le_bytes());
    for number in 0..256 {
        one.deposit(name(number), file(""), Some(WATCHDOG))
            .expect("kept");
    }
    let why = refused(one.deposit(name(256), file(""), Some(WATCHDOG)));
    assert!(why.contains("256 descriptors of this participant"), "{why}");
    other
        .deposit(name(256), file(""), Some(WATCHDOG))
        .expect("kept");
    drop(stage.session.fetch(name(0)).expect("fetched"));
    one.deposit(name(257), file(""), Some(WATCHDOG))
        .expect("there is room again");
}

#[test]
fn a_goodbye_ends_what_is_not_fetched() {
    let stage = Stage::new();
    let (from, to) = (stage.connect(), stage.connect());
    from.deposit(ID, file("left"), Some(WATCHDOG))
        .expect("kept");
    from.close(Some(WATCHDOG)).expect("a goodbye");
    assert_eq!(stage.session.deposits(), 0);
    refused(to.fetch(ID, Some(WATCHDOG)));
}

#[test]
fn of_many_that_fetch_one_gets_it() {
    let stage = Stage::new();
    let (from, to) = (stage.connect(), [(); 4].map(|()| stage.connect()));
    for round in 0..50 {
        from.deposit(ID, file("one"), Some(WATCHDOG)).expect("kept");
        let fetched: usize = std::thread::scope(|scope| {
            let threads = to.each_ref().map(|to| {
                // Two threads of each, which are no less apart than two participants.
                [(); 2].map(|()| scope.spawn(|| to.fetch(ID, Some(WATCHDOG)).is_ok()))
            });
            let won = threads.into_iter().flatten();
            won.map(|thread| usize::from(thread.join().expect("it ends")))
                .sum()
        });
        assert_eq!(fetched, 1, "in round {round}");
        wait_until("the end of the fetch", || stage.session.deposits() == 0);
    }
}

#[test]
fn a_closing_session_keeps_nothing_more_and_a_closed_one_lets_go() {
    let stage = Stage::new();
    let participant = stage.connect();
    let (reader, mut writer) = pipe().expect("a pipe");
    participant
        .deposit(ID, reader, Some(WATCHDOG))
        .expect("kept");
    let report = stage.session.shutdown(Duration::ZERO);
    assert!(report.blocks == 0, "{report:?}");
    let refused = participant.deposit(DepositId([1; 16]), file(""), Some(WATCHDOG));
    assert!(
        matches!(
            refused,
            Err(ClaimError::Refused { .. } | ClaimError::ProducerGone)
        ),
        "{refused:?}"
    );
    let closed = stage.session.deposit(ID, file(""));
    let gone = closed.as_ref().err().and_then(Gone::of);
    assert_eq!(gone, Some(Gone::Session), "{closed:?}");
    drop((participant, stage));
    // The last reader is gone.
    wait_until("the close of what was kept", || {
        writer.write_all(b"x").is_err()
    });
}

// Participants that are free to say anything.

fn say(socket: &OwnedFd, message: &ToProducer, with: &[OwnedFd]) {
    let mut bytes = [0; MOST_BYTES];
    let len = message.encode(&mut bytes);
    let fds: Vec<_> = with.iter().map(AsFd::as_fd).collect();
    let outcome = send(socket, &bytes[..len], &fds).expect("said");
    assert_eq!(outcome, SendOutcome::Sent);
}

fn hear(socket: &OwnedFd) -> ToParticipant {
    let (mut bytes, mut fds) = ([0; MOST_BYTES], Vec::new());
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < WATCHDOG, "it is not answered");
        match receive(socket, &mut bytes, &mut fds).expect("it is read") {
            ReceiveOutcome::Packet(len) => {
                return ToParticipant::decode(&bytes[..len], fds.len()).expect("a message");
            }
            ReceiveOutcome::Empty => std::thread::yield_now(),
            ReceiveOutcome::HungUp => panic!("it hung up"),
        }
    }
}

fn join(path: &Path, gpu: &Gpu) -> OwnedFd {
    let socket = connect_within(path, Some(Instant::now() + WATCHDOG)).expect("it listens");
    let hello = ToProducer::Hello {
        backend: gpu.kind(),
        descendants: 0,
        sign: 0,
        device: gpu.uuid(),
        name: "free".into(),
    };
    say(&socket, &hello, &[own_pidfd().expect("a pidfd")]);
    assert!(matches!(hear(&socket), ToParticipant::Welcome { .. }));
    socket
}

fn deposit(request: u64, settled: u64) -> ToProducer {
    ToProducer::Deposit {
        request,
        settled,
        id: ID,
    }
}

#[test]
fn a_deposit_that_is_said_again_is_not_kept_again() {
    let stage = Stage::new();
    let socket = join(stage.session.socket_path(), &stage.gpu);
    let noted = |request| assert_eq!(hear(&socket), ToParticipant::Noted { request });
    say(&socket, &deposit(1, 1), &[file("first")]);
    noted(1);
    drop(stage.session.fetch(ID).expect("fetched"));
    // The repeat was on its way, or its answer was lost.
    say(&socket, &deposit(1, 1), &[file("repeat")]);
    noted(1);
    assert_eq!(
        stage.session.deposits(),
        0,
        "what was fetched is kept again"
    );
    say(&socket, &deposit(2, 2), &[file("second")]);
    noted(2);
    // The answer to the first is waited for no longer.
    say(&socket, &deposit(1, 2), &[file("late")]);
    // The end of the first does not end the second.
    for (of, left) in [(1, 1), (2, 0)] {
        let end = ToProducer::EndDeposit {
            request: 10 + of,
            id: ID,
            of,
            returns: false,
        };
        say(&socket, &end, &[]);
        noted(10 + of);
        assert_eq!(stage.session.deposits(), left);
    }
}

#[test]
fn a_fetch_that_is_said_again_gets_the_same_and_one_that_gave_up_leaves_it() {
    let stage = Stage::new();
    stage.session.deposit(ID, file("one")).expect("kept");
    let sockets = [(); 2].map(|()| join(stage.session.socket_path(), &stage.gpu));
    let fetch = |who: usize, request| {
        say(&sockets[who], &ToProducer::Fetch { request, id: ID }, &[]);
        hear(&sockets[who])
    };
    let end = |who: usize, of, returns| {
        let (request, id) = (100 + of, ID);
        let end = ToProducer::EndDeposit {
            request,
            id,
            of,
            returns,
        };
        say(&sockets[who], &end, &[]);
        assert_eq!(hear(&sockets[who]), ToParticipant::Noted { request });
    };
    let given = |request| ToParticipant::Fetched { request, id: ID };
    let is_refused = |answer| match answer {
        ToParticipant::Declined { code, .. } => assert_eq!(code, RefusalCode::Deposit),
        other => panic!("{other:?}"),
    };
    assert_eq!(fetch(0, 1), given(1));
    assert_eq!(fetch(0, 1), given(1));
    is_refused(fetch(0, 2));
    is_refused(fetch(1, 1));
    assert!(stage.session.fetch(ID).is_err(), "it is being fetched");
    // Ends of what is another's change nothing.
    end(1, 1, false);
    end(0, 2, true);
    is_refused(fetch(1, 3));
    end(0, 1, true);
    assert_eq!(fetch(1, 4), given(4));
    end(1, 4, false);
    assert_eq!(stage.session.deposits(), 0);
    is_refused(fetch(0, 5));
}

#[test]
fn a_fetcher_that_is_gone_leaves_what_did_not_arrive() {
    let stage = Stage::new();
    stage.session.deposit(ID, file("one")).expect("kept");
    let socket = join(stage.session.socket_path(), &stage.gpu);
    say(&socket, &ToProducer::Fetch { request: 1, id: ID }, &[]);
    assert!(matches!(hear(&socket), ToParticipant::Fetched { .. }));
    drop(socket);
    wait_until("the fetch to end", || stage.session.fetch(ID).is_ok());
}

#[test]
fn a_lost_connection_proves_no_death() {
    let stage = Stage::new();
    let socket = join(stage.session.socket_path(), &stage.gpu);
    say(&socket, &deposit(1, 1), &[file("one")]);
    assert_eq!(hear(&socket), ToParticipant::Noted { request: 1 });
    let empty = join(stage.session.socket_path(), &stage.gpu);
    drop((socket, empty));
    // This process lives, so the one that deposited nothing has lost its connection, and the other
    // is waited for.
    let mut left = Vec::new();
    wait_until("a departure", || {
        left.extend(stage.session.next_notice());
        left.iter().any(|notice| {
            matches!(notice, SessionNotice::Left { how, .. } if *how == Departure::ConnectionLost)
        })
    });
    assert_eq!(content(stage.session.fetch(ID).expect("it is kept")), "one");
    wait_until("the other's departure", || {
        left.extend(stage.session.next_notice());
        let gone = |notice: &&SessionNotice| matches!(notice, SessionNotice::Left { .. });
        left.iter().filter(gone).count() == 2
    });
}

#[test]
fn a_deposit_without_its_descriptor_silences_its_sender_alone() {
    let stage = Stage::new();
    let socket = join(stage.session.socket_path(), &stage.gpu);
    let mut bytes = [0; MOST_BYTES];
    let len = deposit(1, 1).encode(&mut bytes);
    assert_eq!(
        send(&socket, &bytes[..len], &[]).expect("said"),
        SendOutcome::Sent
    );
    say(&socket, &ToProducer::Fetch { request: 2, id: ID }, &[]);
    let other = stage.connect();
    other
        .deposit(ID, file("one"), Some(WATCHDOG))
        .expect("kept");
    assert_eq!(
        content(other.fetch(ID, Some(WATCHDOG)).expect("fetched")),
        "one"
    );
    let unheard = receive(&socket, &mut bytes, &mut Vec::new());
    assert!(matches!(unheard, Ok(ReceiveOutcome::Empty)), "{unheard:?}");
}

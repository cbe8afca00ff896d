//! A participant that sends what is no message is read no further, and costs one line in the log.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Gpu};
use ipc_rc::{Participant, Session};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use transport::os::process::own_pidfd;
use transport::os::socket::{ReceiveOutcome, SendOutcome, connect_within, receive, send};
use transport::wire::message::{MOST_BYTES, ToProducer};

const WATCHDOG: Duration = Duration::from_secs(120);

static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps every warning as a line.
struct Listener;

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        SAID.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(line.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0 += &format!("{}={value:?} ", field.name());
    }
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < WATCHDOG, "waited too long for: {what}");
        std::thread::yield_now();
    }
}

fn say(socket: &OwnedFd, message: &ToProducer, with: &[OwnedFd]) {
    let mut bytes = [0; MOST_BYTES];
    let len = message.encode(&mut bytes);
    let fds: Vec<_> = with.iter().map(AsFd::as_fd).collect();
    let outcome = send(socket, &bytes[..len], &fds).expect("said");
    assert_eq!(outcome, SendOutcome::Sent);
}

fn hello(gpu: &Gpu) -> ToProducer {
    ToProducer::Hello {
        backend: gpu.kind(),
        descendants: 0,
        sign: 0,
        device: gpu.uuid(),
        name: String::new(),
    }
}

/// Connects as a participant that is free to say anything.
fn join(path: &Path, gpu: &Gpu) -> OwnedFd {
    let socket = connect_within(path, Some(Instant::now() + WATCHDOG)).expect("it listens");
    say(&socket, &hello(gpu), &[own_pidfd().expect("a pidfd")]);
    wait_until("the welcome", || is_answered(&socket));
    socket
}

/// Takes an answer, if there is one.
fn is_answered(socket: &OwnedFd) -> bool {
    let outcome = receive(socket, &mut [0; MOST_BYTES], &mut Vec::new()).expect("it is read");
    matches!(outcome, ReceiveOutcome::Packet(_))
}

/// Counts the bytes of memory that sent packets take up which the other end has not read.
fn unread(socket: &OwnedFd) -> i32 {
    let mut bytes = 0;
    // SAFETY: `ioctl` asks for a request whose argument is a place for an `int`: `TIOCOUTQ` writes
    // one, and `bytes` lives on this frame.
    let asked = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    assert_eq!(asked, 0, "{}", std::io::Error::last_os_error());
    bytes
}

/// Sends one packet of a kind.
type Speech<'a> = &'a dyn Fn(&OwnedFd);

#[test]
fn a_participant_that_speaks_nonsense_is_not_read_again_and_costs_one_line_in_the_log() {
    tracing::subscriber::set_global_default(Listener).expect("the only one");
    let backend = HostBackend::new(HostConfig::default()).expect("it opens");
    let gpu = Gpu::new(backend, DeviceId(0)).expect("a device");
    let dir = tempfile::tempdir().expect("a directory");
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let invalid = |socket: &OwnedFd| {
        assert_eq!(
            send(socket, b"nonsense", &[]).expect("said"),
            SendOutcome::Sent
        );
    };
    let empty = |socket: &OwnedFd| {
        assert_eq!(send(socket, b"", &[]).expect("said"), SendOutcome::Sent);
    };
    let again = |socket: &OwnedFd| {
        say(socket, &hello(&gpu), &[own_pidfd().expect("a pidfd")]);
    };
    let kinds: [(&str, Speech<'_>); 3] = [
        ("an invalid message", &invalid),
        ("an empty packet", &empty),
        ("a second hello", &again),
    ];
    for (number, (kind, nonsense)) in (1..).zip(kinds) {
        let socket = join(session.socket_path(), &gpu);
        nonsense(&socket);
        wait_until("it to be granted nothing more", || {
            session.stats().holders.iter().any(|holder| holder.dying)
        });
        for _ in 0..4 {
            nonsense(&socket);
        }
        say(
            &socket,
            &ToProducer::Inspect {
                request: 9,
                from: 0,
            },
            &[],
        );
        let left = unread(&socket);
        assert!(left > 0, "{kind}: packets are read on");
        for _ in 0..3 {
            // One who is let in was answered after what was there before.
            let participant = Participant::builder(gpu.clone())
                .connect(session.socket_path())
                .expect("connected");
            participant.close(Some(WATCHDOG)).expect("it went");
        }
        assert_eq!(unread(&socket), left, "{kind}: packets are read on");
        assert!(!is_answered(&socket), "{kind}: it is answered");
        let said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
        let lines: Vec<_> = said
            .iter()
            .filter(|line| line.contains("not read again"))
            .collect();
        assert_eq!(lines.len(), number, "{kind}: {lines:#?}");
        assert_eq!(said.len(), number, "{kind}: {said:#?}");
        drop(said);
        // Its hang-up is awaited, and heard behind what was not read.
        drop(socket);
        wait_until("it to be gone", || session.stats().participants == 0);
    }
    assert_eq!(session.stats().deaths, 0);
    assert!(session.shutdown(WATCHDOG).clean);
}

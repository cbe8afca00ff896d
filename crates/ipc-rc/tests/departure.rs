//! A participant that has gone is gone for its session, though nothing else wakes the session's
//! thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use backend_host::{HostBackend, HostConfig};
use gpu_api::{Access, DeviceId, Gpu, ParticipantId};
use harness::program::Running;
use ipc_rc::{After, Participant, Session, To, Wait};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use transport::os::socket::{ReceiveOutcome, SendOutcome, connect_within, receive, send};
use transport::shared::slot::Generation;
use transport::wire::descriptor::{Descriptor, Fields};
use transport::wire::lease_address::LeaseAddress;
use transport::wire::message::{MOST_BYTES, ToParticipant, ToProducer};

/// Long enough for the slowest machine; a test that waits longer hangs.
const WATCHDOG: Duration = Duration::from_secs(120);

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < WATCHDOG, "waited too long for: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_participant_that_released_unmapped_and_went_is_gone_though_nothing_wakes_the_session_afterwards()
 {
    let dir = tempfile::tempdir().expect("a directory");
    let backend = HostBackend::new(HostConfig::default()).expect("it opens");
    let gpu = Gpu::new(backend, DeviceId(0)).expect("there is a device");
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let block = session.alloc(4096).expect("there is room");
    // The release, the unmapping and the goodbye come to the session's thread in one wake-up or in
    // several.
    for _ in 0..100 {
        let participant = Participant::builder(gpu.clone())
            .connect(session.socket_path())
            .expect("connected");
        let descriptor = block
            .share(To::Participant(participant.id()), After::Done)
            .expect("shared");
        let received = participant
            .claim(descriptor.as_bytes(), Wait::Host, None)
            .expect("claimed");
        drop(received);
        drop(participant);
        wait_until("the participant to be gone", || {
            session.stats().participants == 0
        });
    }
}

fn say(socket: &OwnedFd, message: &ToProducer, with: &[BorrowedFd<'_>]) {
    let mut bytes = [0; MOST_BYTES];
    let len = message.encode(&mut bytes);
    let outcome = send(socket, &bytes[..len], with).expect("said");
    assert_eq!(outcome, SendOutcome::Sent);
}

fn hear(socket: &OwnedFd) -> ToParticipant {
    let (mut bytes, mut heard) = ([0; MOST_BYTES], None);
    wait_until("an answer", || {
        let mut fds = Vec::new();
        let came = receive(socket, &mut bytes, &mut fds).expect("it is read");
        if let ReceiveOutcome::Packet(len) = came {
            heard = Some(ToParticipant::decode(&bytes[..len], fds.len()).expect("a message"));
        }
        heard.is_some()
    });
    heard.expect("just heard")
}

/// Connects for a process, whose GPU work the driver shows under `sign`.
fn join(path: &Path, gpu: &Gpu, process: &Running, sign: u32) -> (OwnedFd, ParticipantId) {
    let socket = connect_within(path, Some(Instant::now() + WATCHDOG)).expect("it listens");
    let hello = ToProducer::Hello {
        backend: gpu.kind(),
        descendants: 0,
        sign,
        device: gpu.uuid(),
        name: "contained".into(),
    };
    let pid = Pid::from_raw(process.pid().cast_signed()).expect("it has one");
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("it lives");
    say(&socket, &hello, &[pidfd.as_fd()]);
    match hear(&socket) {
        ToParticipant::Welcome { participant, .. } => (socket, participant),
        other => panic!("{other:?}"),
    }
}

/// Maps the region of a block as a participant.
fn map(socket: &OwnedFd, descriptor: &Descriptor) {
    let Fields {
        region,
        file,
        slot,
        generation,
        ..
    } = descriptor.fields();
    let lease = LeaseAddress {
        file,
        slot,
        generation: Generation::new(generation).expect("it was granted"),
    };
    let access = Access::ReadWrite;
    let asked = ToProducer::MapRegion {
        request: 1,
        region,
        access,
        lease,
    };
    say(socket, &asked, &[]);
    let answer = hear(socket);
    assert!(matches!(answer, ToParticipant::Region { .. }), "{answer:?}");
}

/// As in containers: the pids that the session sees are not those that the driver shows.
#[test]
fn the_sign_that_a_process_gave_bounds_its_quarantine_and_one_without_waits_for_longer() {
    let (dir, shown) = (tempdir(), tempdir());
    let config = HostConfig::default().signs_of_life(shown.path());
    let gpu = Gpu::new(HostBackend::new(config).expect("it opens"), DeviceId(0)).expect("a device");
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let sign = shown.path().join("4000000001");
    std::fs::write(&sign, "").expect("a file");
    let block = session.alloc(4096).expect("there is room");
    let mut dead = Vec::new();
    // The last of them names a process that the driver does not show.
    for number in [0, 4_000_000_001, 4_000_000_002] {
        let mut process = Running::start(Command::new("sleep").arg("infinity"));
        let (socket, id) = join(session.socket_path(), &gpu, &process, number);
        let descriptor = block
            .share(To::Participant(id), After::Done)
            .expect("shared");
        map(&socket, &descriptor);
        process.kill();
        drop(socket);
        dead.push(id);
    }
    let dying = || {
        let stats = session.stats();
        let dying = stats
            .holders
            .iter()
            .filter(|holder| holder.dying && holder.mappings == 1);
        dying.map(|holder| holder.participant).collect::<Vec<_>>()
    };
    wait_until("the deaths", || dying() == dead);
    // Ten times the quarantine of a process whose signs are gone.
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(1) {
        session.collect();
        assert_eq!(dying(), dead, "buried while the driver shows work");
    }
    std::fs::remove_file(&sign).expect("it is there");
    wait_until("the burial", || {
        session.collect();
        session.stats().deaths == 1
    });
    assert_eq!(dying(), [dead[0], dead[2]]);
}

fn tempdir() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

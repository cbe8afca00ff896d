//! A participant that has gone is gone for its session, though nothing else wakes the session's
//! thread.

use std::time::{Duration, Instant};

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Gpu};
use ipc_rc::{After, Participant, Session, To, Wait};

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

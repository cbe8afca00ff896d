//! A participant that has gone is gone for its session at once: what it ended before is seen in the same turn.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Gpu};
use ipc_rc::{After, Participant, Session, To, Wait};

/// Long enough for the slowest machine; whoever waits longer hangs.
const WATCHDOG: Duration = Duration::from_secs(120);

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < WATCHDOG, "waited too long for: {what}");
        std::thread::yield_now();
    }
}

/// Counts this process' threads that are participants'.
fn participants_threads() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").expect("a process has threads");
    // A thread that ends at this moment has no name any more.
    let names = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with("gpu-ipc-partici") || name.starts_with("gpu-ipc-blockin")).count()
}

#[test]
fn who_released_unmapped_and_went_is_gone_in_one_turn() {
    let dir = tempfile::tempdir().expect("a directory");
    let backend = HostBackend::new(HostConfig::default()).expect("it opens");
    let gpu = Gpu::new(backend, DeviceId(0)).expect("there is a device");
    let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).manual().open().expect("a session");
    let block = session.alloc(4096).expect("there is room");
    let is_served = AtomicBool::new(true);
    let (received, participant) = std::thread::scope(|scope| {
        scope.spawn(|| {
            while is_served.load(Ordering::Relaxed) {
                session.turn().expect("in manual mode");
            }
        });
        let participant = Participant::builder(gpu).connect(session.socket_path()).expect("connected");
        let descriptor = block.share(To::Participant(participant.id()), After::Done).expect("shared");
        let received = participant.claim(descriptor.as_bytes(), Wait::Host, None).expect("claimed");
        is_served.store(false, Ordering::Relaxed);
        (received, participant)
    });
    drop(received);
    drop(participant);
    wait_until("the participant to have said all", || participants_threads() == 0);
    assert_eq!(session.stats().participants, 1, "nobody has listened");
    session.turn().expect("in manual mode");
    assert_eq!(session.stats().participants, 0);
}

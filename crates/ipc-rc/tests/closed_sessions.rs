//! Sessions that were closed with grants that no process can claim give everything back. Alone in
//! its process: it counts what the process has.

use std::time::{Duration, Instant};

use backend_host::{HostBackend, HostConfig};
use gpu_api::{DeviceId, Gpu};
use ipc_rc::{After, Claims, Session, To};

const WATCHDOG: Duration = Duration::from_secs(120);

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < WATCHDOG, "waited too long for: {what}");
        std::thread::yield_now();
    }
}

fn count(directory: &str) -> usize {
    std::fs::read_dir(directory)
        .expect("proc is mounted")
        .count()
}

#[test]
fn closed_sessions_with_grants_that_no_process_can_claim_give_back_memory_descriptors_and_threads()
{
    let dir = tempfile::tempdir().expect("a directory");
    // As large as three sessions' regions: the fourth fails if those before it keep theirs.
    let config = HostConfig::default().bytes_per_device(100 << 20);
    let gpu = Gpu::new(HostBackend::new(config).expect("it opens"), DeviceId(0)).expect("a device");
    let open = |number: usize| {
        Session::builder(gpu.clone())
            .socket(dir.path().join(number.to_string()))
            .time_to_live(None)
            .open()
            .expect("a session")
    };
    let threads = count("/proc/self/task");
    // The first makes what a process keeps.
    drop(open(0));
    wait_until("its end", || count("/proc/self/task") <= threads);
    let descriptors = count("/proc/self/fd");
    for number in 1..=51 {
        let session = open(number);
        // One that was dropped ends by its thread.
        let block = session
            .alloc_within(4096, WATCHDOG)
            .expect("the sessions before keep their memory");
        let grants = [Claims::Once, Claims::Unlimited].map(|claims| {
            block
                .share(To::Ticket(claims), After::Done)
                .expect("a ticket")
        });
        drop(block);
        if number % 2 == 0 {
            let report = session.shutdown(WATCHDOG);
            assert!(report.clean, "{report}");
        }
        drop((session, grants));
    }
    wait_until("their descriptors and threads", || {
        count("/proc/self/fd") <= descriptors && count("/proc/self/task") <= threads
    });
}

//! Real processes, through the public API alone.
//!
//! Each case starts this binary again as an [`agent`](agent::Agent), which is a consumer or a producer, and kills,
//! stops or forks it. Nothing here sleeps to be in time: a case waits for a condition, under a watchdog.

mod agent;
mod bad_input;
mod death;
mod fork;
mod lifecycle;
mod order;
mod step;

use std::time::Instant;

use libtest_mimic::{Arguments, Failed, Trial};

/// A case: its name and what it does.
type Case = (&'static str, fn());

fn main() {
    if std::env::var_os(agent::ROLE).is_some() {
        agent::run();
        return;
    }
    let cases = [lifecycle::CASES, death::CASES, fork::CASES, order::CASES, bad_input::CASES].concat();
    let trials = cases
        .into_iter()
        .map(|(name, run): Case| {
            Trial::test(name, move || {
                run();
                Ok::<(), Failed>(())
            })
        })
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// Waits until a condition holds.
#[track_caller]
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < agent::WATCHDOG, "waited too long for: {what}");
        std::thread::yield_now();
    }
}

/// A session on a fresh host device of this process, with its socket in a directory that goes with it.
struct Producer {
    gpu: gpu_ipc::Gpu,
    stream: gpu_ipc::Stream,
    session: gpu_ipc::Session,
    /// Kept for its removal.
    dir: tempfile::TempDir,
}

impl Producer {
    fn new() -> Producer {
        Self::with(|builder| builder)
    }

    fn with(choose: impl FnOnce(gpu_ipc::SessionBuilder) -> gpu_ipc::SessionBuilder) -> Producer {
        let dir = tempfile::tempdir().expect("a directory");
        let (_, gpu) = agent::open_gpu();
        let builder = gpu_ipc::Session::builder(gpu.clone()).socket(dir.path().join("s"));
        let session = choose(builder).open().expect("a session");
        let stream = gpu_ipc::Stream::create(&gpu).expect("a stream");
        Producer { gpu, stream, session, dir }
    }

    /// Allocates a block with a stamp in it.
    fn block(&self, stamp: u64) -> gpu_ipc::SentBlock {
        let block = self.session.alloc(4096).expect("there is room");
        agent::write_stamp(&self.gpu, &self.stream, block.ptr(), stamp);
        block
    }

    fn stamp(&self, block: &gpu_ipc::SentBlock) -> u64 {
        agent::read_stamp(&self.gpu, &self.stream, block.ptr())
    }

    /// Waits until nothing is in limbo, in flight or held.
    #[track_caller]
    fn wait_for_nothing_held(&self) {
        wait_until("nothing to be held", || {
            self.session.collect();
            let stats = self.session.stats();
            stats.limbo_blocks == 0 && stats.in_flight + stats.held + stats.poisoned == 0
        });
    }
}

//! Real processes, through the public API alone.
//!
//! With `GPU_IPC_TEST_BACKEND=cuda` they run on a GPU; what only the host backend can be made to do
//! shows as ignored.
//!
//! Each case starts this binary again as an [`agent`](agent::Agent), which is a consumer or a
//! producer, and kills, stops or forks it. Nothing here sleeps to be in time: a case waits for a
//! condition, under a watchdog.

mod agent;
mod agent_process;
mod bad_input;
mod child;
mod container;
mod crowd;
mod death;
mod default_stream;
mod device;
mod fork;
mod forward;
mod gate;
mod gpu;
mod growth;
mod kernel;
mod lifecycle;
mod notice;
mod order;
mod read_only;
mod ticket;
mod two_devices;
mod words;

use harness::wait_until;
use libtest_mimic::{Arguments, Failed, Trial};

/// Cases that need what the host backend alone can be made to do: a late write, a broken context, a
/// capture, a second device, a small device.
const HOST_ONLY: &[&str] = &[
    "lifecycle::out_of_memory_is_survived_when_limbo_is_collected",
    "death::a_consumer_with_a_late_write",
    "death::a_broken_context_hangs_nobody",
    "order::nothing_of_ours_is_captured_into_a_graph",
    "order::a_graph_keeps_its_blocks_until_it_goes",
    "order::a_device_without_stream_words_waits_on_the_host",
    "order::a_device_without_stream_waits_waits_on_the_host",
    "death::a_consumer_whose_work_the_driver_still_shows",
    "order::what_the_driver_blocks_on_blocks_nobody",
    "bad_input::another_device",
    "notice::room_is_made_by_a_peer_that_unmaps",
    "crowd::a_session_for_each_device",
    "bad_input::few_file_descriptors",
    "read_only::a_mapping_cannot_be_made_writable",
];

/// A case: its name and what it does.
type Case = (&'static str, fn());

fn main() {
    if let Some(agent::Role::Agent) = harness::role() {
        return agent_process::run();
    }
    let here = [
        lifecycle::CASES,
        death::CASES,
        fork::CASES,
        order::CASES,
        default_stream::CASES,
        bad_input::CASES,
        ticket::CASES,
        forward::CASES,
        notice::CASES,
        crowd::CASES,
        container::CASES,
    ]
    .concat();
    let mut trials = trials(&here, true);
    trials.extend(self::trials(
        container::NAMESPACES,
        harness::surroundings::has_namespaces(),
    ));
    trials.extend(self::trials(
        container::USERS,
        harness::surroundings::has_users(),
    ));
    trials.extend(self::trials(
        death::SHARED_CONTEXT,
        death::can_share_context(),
    ));
    trials.extend(self::trials(
        read_only::CASES,
        device::can_share_read_only(),
    ));
    let on_cuda = std::env::var(device::BACKEND).is_ok_and(|backend| backend == "cuda");
    trials.extend(self::trials(gpu::CASES, on_cuda));
    if on_cuda || device::is_host() {
        trials.extend(self::trials(growth::CASES, true));
    } else {
        eprintln!(
            "no ranges of addresses: {} cases of growth in place are left out",
            growth::CASES.len()
        );
    }
    let devices = if on_cuda { two_devices::devices() } else { 0 };
    if devices == 1 {
        eprintln!(
            "one device: {} cases that need two are left out",
            two_devices::CASES.len()
        );
    } else {
        trials.extend(self::trials(two_devices::CASES, devices >= 2));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// Makes trials of cases. What this machine cannot do shows as ignored. On a GPU the cases that are
/// not about it are left out: a list without anything ignored has run all that it could.
fn trials(cases: &[Case], possible: bool) -> Vec<Trial> {
    let elsewhere = |name| !device::is_host() && HOST_ONLY.contains(&name);
    cases
        .iter()
        .filter(|(name, _)| !elsewhere(*name))
        .map(|&(name, run)| {
            Trial::test(name, move || {
                run();
                Ok::<(), Failed>(())
            })
            .with_ignored_flag(!possible)
        })
        .collect()
}

/// A session on a fresh host device of this process, with its socket in a directory that goes with
/// it.
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

    fn with(
        choose: impl FnOnce(gpu_ipc::session::SessionBuilder) -> gpu_ipc::session::SessionBuilder,
    ) -> Producer {
        Self::on(device::open_gpu(), choose)
    }

    fn on(
        gpu: gpu_ipc::Gpu,
        choose: impl FnOnce(gpu_ipc::session::SessionBuilder) -> gpu_ipc::session::SessionBuilder,
    ) -> Producer {
        let dir = tempfile::tempdir().expect("a directory");
        let builder = gpu_ipc::Session::builder(gpu.clone()).socket(dir.path().join("s"));
        let session = choose(builder).open().expect("a session");
        let stream = gpu_ipc::Stream::create(&gpu).expect("a stream");
        Producer {
            gpu,
            stream,
            session,
            dir,
        }
    }

    /// Allocates a block with a stamp in it.
    fn block(&self, stamp: u64) -> gpu_ipc::SentBlock {
        let block = self.session.alloc(4096).expect("there is room");
        device::write_stamp(&self.gpu, &self.stream, block.device_ptr(), stamp);
        block
    }

    fn stamp(&self, block: &gpu_ipc::SentBlock) -> u64 {
        device::read_stamp(&self.gpu, &self.stream, block.device_ptr())
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

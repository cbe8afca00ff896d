//! One side of a step, in a process of its own.

use std::env;
use std::io::Write;

use backend_hip::{Hip, PoolDefect, Proof, Step};
use gpu_api::{DeviceId, GpuStreams};

use crate::channel::Channel;
use crate::runtime::{Runtime, Seen, told};
use crate::{memory, order, pool};

/// Set in a process that runs one side of a step: the step, the side, the device.
pub(crate) const TASK: &str = "GPU_IPC_HIP_PROBE";

/// The two sides of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    Exporter,
    Importer,
}

impl Side {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Side::Exporter => "exporter",
            Side::Importer => "importer",
        }
    }
}

/// Runs one side of a step and ends the process, if [`prove`](crate::prove) started it for that;
/// else does nothing.
///
/// Call it first thing in `main`, before anything is printed or any thread is started.
pub fn run_if_asked() {
    let Ok(task) = env::var(TASK) else { return };
    let code = match run(&task) {
        // AMD's is reported to crash here once a pool was used (ROCm/rocm-systems#11642): what is
        // said now is read only if it does.
        Ok(()) if task.starts_with(Step::Pools.name()) => {
            let _ = writeln!(
                std::io::stderr(),
                "{}; all went well before",
                PoolDefect::CrashesAtTheEnd
            );
            std::process::exit(0)
        }
        Ok(()) => 0,
        Err(why) => {
            // Only the parent reads it, so an error here has no other reader.
            let _ = writeln!(std::io::stderr(), "{why}");
            1
        }
    };
    // The runtime's own clean-up at the end of a process is no part of what the other steps prove,
    // and may hang too. SAFETY: `_exit` has no conditions.
    unsafe { libc::_exit(code) }
}

fn run(task: &str) -> Seen {
    let words: Vec<&str> = task.split(' ').collect();
    let [step, side, device] = words[..] else {
        return Err(format!("not a task: {task}"));
    };
    let step = Step::from_name(step).ok_or_else(|| format!("no such step: {step}"))?;
    let device = device
        .parse()
        .map(DeviceId)
        .map_err(|_| format!("no such device: {device}"))?;
    let side = [Side::Exporter, Side::Importer]
        .into_iter()
        .find(|known| known.name() == side);
    let side = side.ok_or_else(|| format!("no such side: {task}"))?;
    // A side whose starter is killed must not stay behind; where the kernel cannot promise that,
    // the socket ends it.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    let channel = Channel::from_stdin()?;
    let assumed: &[Step] = match step {
        Step::ReadOnly => &[Step::Vmm, Step::ReadOnly],
        Step::Waits => &[Step::Words, Step::Waits],
        _ => &[step],
    };
    let version = Hip::inspect().map_err(told)?.version;
    let assumed = Proof::new(version, assumed.iter().copied());
    let hip = Hip::load_with(Some(assumed)).map_err(told)?;
    let stream = hip.create_stream(device).map_err(told)?;
    let runtime = Runtime {
        hip,
        device,
        stream,
        channel,
    };
    match (step, side) {
        (Step::Handles, Side::Exporter) => memory::export_handles(&runtime),
        (Step::Handles, Side::Importer) => memory::open_handles(&runtime),
        (Step::Vmm | Step::DmaBuf, Side::Exporter) => memory::export(&runtime),
        (Step::Vmm | Step::DmaBuf, Side::Importer) => memory::import(&runtime),
        (Step::ReadOnly, Side::Exporter) => memory::lend(&runtime),
        (Step::ReadOnly, Side::Importer) => memory::overwrite(&runtime),
        (Step::Words, Side::Exporter) => order::words_here(&runtime),
        (Step::Words, Side::Importer) => order::words_there(&runtime),
        (Step::Waits, Side::Exporter) => order::waits_here(&runtime),
        (Step::Waits, Side::Importer) => order::waits_there(&runtime),
        (Step::Events, Side::Exporter) => order::events_here(&runtime),
        (Step::Events, Side::Importer) => order::events_there(&runtime),
        (Step::Pools, Side::Exporter) => pool::use_pools(&runtime),
        (Step::Pools, Side::Importer) => pool::use_the_rest(&runtime),
        _ => Err(format!("no such step here: {step}")),
    }
}

//! Finding out what a runtime can do, by doing it, in child processes.
//!
//! What is to be found out may bring a process down, or never return. So [`prove`] starts a program
//! twice for each [`Step`] and device, one to export and one to import as two processes would,
//! waits for both within a patience, and kills what has not come back. The program is any that
//! calls [`run_if_asked`] first thing in its `main`, usually the calling one itself:
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use backend_hip::{Step, probe};
//!
//! fn main() -> gpu_api::Result<()> {
//!     probe::run_if_asked();
//!     let program = std::env::current_exe().expect("a program has a path");
//!     let findings = probe::prove(&program, &Step::HARMLESS, Duration::from_secs(30))?;
//!     for finding in &findings.all {
//!         println!("{} on {}: {:?}", finding.step, finding.device, finding.seen);
//!     }
//!     println!("GPU_IPC_HIP_PROOF='{}'", findings.proof);
//!     Ok(())
//! }
//! ```
//!
//! `runner` starts the two sides and waits for them. `side` is one of them, in its process: a
//! `runtime`, a `channel` to the other side, and what the step does with them, to `memory`, to the
//! `order` of work or with a `pool`.
//!
//! A library cannot start its own process again unasked, so
//! [`HipBackend::load`](crate::HipBackend::load) never probes.

mod channel;
mod memory;
mod order;
mod pool;
mod runner;
mod runtime;
mod side;

use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use gpu_api::{DeviceId, GpuDevices, Result};

use crate::hip::Hip;
use crate::pool_defect::PoolDefect;
use crate::proof::{Proof, Step};

use self::runner::attempt;
use self::runtime::Seen;
pub use self::side::run_if_asked;

/// What was seen of one step on one device.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Finding {
    /// What was tried.
    pub step: Step,
    /// Where.
    pub device: DeviceId,
    /// Nothing, where it worked; else what went wrong.
    pub seen: Seen,
}

/// What was seen of all steps on all devices.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Findings {
    /// One by one.
    pub all: Vec<Finding>,
    /// The steps that worked on every device.
    pub proof: Proof,
}

/// Tries steps on every device and says which worked.
///
/// `patience` is what one step on one device may take.
///
/// # Errors
///
/// Where the runtime cannot be loaded, as [`Hip::load_with`](crate::Hip::load_with);
/// [`Error::System`](gpu_api::Error::System) where `program` cannot be started. What a step does is never an error: it is a [`Finding`].
pub fn prove(program: &Path, steps: &[Step], patience: Duration) -> Result<Findings> {
    prove_and_tell(program, steps, patience, |_| {})
}

/// Does what [`prove`] does, all devices at once, and calls `tell` with each finding as soon as it
/// is there.
///
/// # Errors
///
/// As [`prove`].
pub fn prove_and_tell(
    program: &Path,
    steps: &[Step],
    patience: Duration,
    mut tell: impl FnMut(&Finding),
) -> Result<Findings> {
    let hip = Hip::load_with(None)?;
    let devices = hip.device_count()?;
    let mut all = Vec::new();
    for &step in steps {
        let (found, finding) = mpsc::channel();
        let seen = thread::scope(|scope| {
            for device in (0..devices).map(DeviceId) {
                let found = found.clone();
                let name = format!("gpu-ipc-probe-{}", device.0);
                let run = move || {
                    // The other end waits until the last has told.
                    let _ = found.send((device, attempt(program, step, device, patience)));
                };
                gpu_api::thread::start_scoped(scope, &name, run)?;
            }
            drop(found);
            finding.iter().try_for_each(|(device, seen)| {
                let finding = Finding {
                    step,
                    device,
                    seen: seen?,
                };
                tell(&finding);
                all.push(finding);
                Ok(())
            })
        });
        seen?;
    }
    let worked = |step: &Step| {
        all.iter()
            .filter(|finding| finding.step == *step)
            .all(|finding| finding.seen.is_ok())
    };
    let of_pools = all.iter().filter(|finding| finding.step == Step::Pools);
    let defects = of_pools.filter_map(|finding| PoolDefect::told_in(finding.seen.as_ref().err()?));
    let proof =
        Proof::new(hip.version(), steps.iter().copied().filter(worked)).with_pool_defects(defects);
    Ok(Findings { all, proof })
}

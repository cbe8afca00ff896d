//! Finding out what an installed HIP runtime can do, by doing it, in child processes.
//!
//! What is to be found out may bring a process down, or never return. So [`prove`] starts a program
//! twice for each [`Step`] and device, one to export and one to import as two processes would,
//! waits for both within a patience, and kills what has not come back. What it saw is a [`Proof`],
//! which the backend takes in. The program is any that calls [`run_if_asked`] first thing in its
//! `main`, usually the calling one itself:
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use backend_hip::Step;
//!
//! fn main() -> gpu_api::Result<()> {
//!     hip_probe::run_if_asked();
//!     let program = std::env::current_exe().expect("a program has a path");
//!     let findings = hip_probe::prove(&program, &Step::HARMLESS, Duration::from_secs(30))?;
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
//! [`HipBackend::load`](backend_hip::HipBackend::load) never probes.

// Tests: `crates/backend-hip/tests/shim/probe.rs`.
#![deny(unsafe_op_in_unsafe_fn)]

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

use backend_hip::{Hip, PoolDefect, Proof, Step};
use gpu_api::{DeviceId, GpuDevices, Result};

use crate::runner::attempt;
pub use crate::runtime::Seen;
pub use crate::side::run_if_asked;

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
    /// The steps that worked, and on which device they did not.
    pub proof: Proof,
}

/// Tries steps on every device and says which worked.
///
/// `patience` is what one step on one device may take.
///
/// # Errors
///
/// Where the runtime cannot be loaded, as [`Hip::load_with`];
/// [`Error::System`](gpu_api::Error::System) where `program` cannot be started. What a step does is never an error: it is a [`Finding`].
pub fn prove(program: &Path, steps: &[Step], patience: Duration) -> Result<Findings> {
    prove_and_tell(program, steps, patience, |_| {})
}

/// Does what [`prove`] does, all devices at once but for those at one place of the PCI bus, which may
/// be partitions with one memory, and calls `tell` with each finding as soon as it
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
    let devices: Vec<DeviceId> = (0..hip.device_count()?).map(DeviceId).collect();
    // One that does not say where it is, is alone there.
    let told = devices.iter().map(|&device| hip.pci_address(device).ok());
    let places: Vec<Option<String>> = told.map(Option::flatten).collect();
    let place = |device: DeviceId| places[device.0 as usize].as_deref();
    let mut groups: Vec<Vec<DeviceId>> = Vec::new();
    for &device in &devices {
        let is_with = |group: &&mut Vec<DeviceId>| {
            place(device).is_some() && place(group[0]) == place(device)
        };
        match groups.iter_mut().find(is_with) {
            Some(group) => group.push(device),
            None => groups.push(vec![device]),
        }
    }
    let mut all: Vec<Finding> = Vec::new();
    for &step in steps {
        let (found, finding) = mpsc::channel();
        let seen = thread::scope(|scope| {
            for group in &groups {
                let found = found.clone();
                let name = format!("gpu-ipc-probe-{}", group[0].0);
                let run = move || {
                    for &device in group {
                        // The other end waits until the last has told.
                        let _ = found.send((device, attempt(program, step, device, patience)));
                    }
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
    let of = |step: Step| all.iter().filter(move |finding| finding.step == step);
    let failed = |step: Step| of(step).filter(|finding| finding.seen.is_err());
    // What one device fails is not taken from the others, if it can be named.
    let is_named = |finding: &Finding| place(finding.device).is_some();
    let holds =
        |step: &Step| failed(*step).count() < of(*step).count() && failed(*step).all(is_named);
    let worked: Vec<Step> = steps.iter().copied().filter(holds).collect();
    let failures = worked
        .iter()
        .flat_map(|step| failed(*step))
        .filter_map(|finding| Some((finding.step, place(finding.device)?.to_owned())));
    let defects = failed(Step::Pools)
        .filter(|_| !worked.contains(&Step::Pools))
        .filter_map(|finding| PoolDefect::told_in(finding.seen.as_ref().err()?));
    let proof = Proof::new(hip.version(), worked.iter().copied())
        .with_failures(failures.collect::<Vec<_>>())
        .with_pool_defects(defects.collect::<Vec<_>>());
    Ok(Findings { all, proof })
}

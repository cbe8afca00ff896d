//! The doctor: what this machine can do, and for each thing that is missing the reason and the
//! remedy.
//!
//! 1. `check`: one thing and how it stands. `report`: all of them, for people and for programs.
//! 2. `kernel`, `limits`, `namespaces`: what every backend needs.
//! 3. `backend`: what one backend has, asked in a process of its own, so that a driver that crashes
//!    or hangs is reported. `probe` is that process; `trial` shares a block in it with a third,
//!    `consumer`.
//! 4. `device_files`, `mps`: what lies around a driver; `hip`: what AMD's runtime is seen to do.

// Tests: `crates/cli/tests/doctor.rs`.

mod backend;
mod check;
pub mod consumer;
mod device_files;
#[cfg(feature = "hip")]
mod hip;
mod kernel;
mod limits;
mod mps;
pub mod namespaces;
pub mod probe;
mod report;
mod trial;

use std::io;
use std::time::Duration;

use gpu_ipc::BackendKind;
use indicatif::ProgressBar;

use crate::args::{DoctorOptions, DoctorProcess};
use crate::{Outcome, output};
use report::Report;

/// Looks at everything and says what was found.
pub fn run(options: &DoctorOptions) -> Outcome {
    // Drawn on standard error, and only on a terminal.
    let progress = if options.json {
        ProgressBar::hidden()
    } else {
        ProgressBar::new_spinner()
    };
    let tell = |what: String| {
        progress.set_message(what);
        progress.tick();
    };
    tell("the kernel".into());
    let mut kernel = kernel::checks();
    kernel.push(namespaces::check());
    let limits = limits::checks();
    let patience = Duration::from_secs(u64::from(options.timeout));
    // The host first: whether anything works at all.
    let mut kinds = BackendKind::ALL;
    kinds.sort_unstable();
    let backends = kinds
        .into_iter()
        .map(|kind| backend::ask(kind, patience, &tell))
        .collect();
    progress.finish_and_clear();
    let required: Vec<BackendKind> = options.require.iter().map(|vendor| vendor.kind()).collect();
    let report = Report::new(&required, kernel, limits, backends);
    let outcome = if report.ok {
        Outcome::Good
    } else {
        Outcome::Finding
    };
    output::conclude(
        &if options.json {
            report.json()
        } else {
            report.text(width())
        },
        outcome,
    )
}

fn width() -> Option<u16> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    Some(size.ws_col)
}

/// Lives as a process of a run.
pub fn run_process(process: &DoctorProcess) -> Outcome {
    match process {
        DoctorProcess::Backend(options) => probe::run(options.backend),
        DoctorProcess::Consumer(options) => consumer::run(options),
        DoctorProcess::Namespaces => namespaces::run(),
    }
}

//! What only a real driver can show of this backend, beyond what every backend must do
//! (`testing/conformance`).
//!
//! Every case runs in a process of its own, this program started again: several break their context
//! on purpose. Without a device they are ignored and say so; with `REQUIRE_GPU=1` they fail.

mod memory;
mod queue;
mod thread;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, thread as threads};

use backend_cuda::CudaBackend;
use backend_cuda::launch::{Application, Kernel};
use gpu_api::{DeviceId, Result};
use harness::program::{passes, this_program};
use libtest_mimic::{Arguments, Failed, Trial};

/// Names the case that a child process is to run.
const CASE: &str = "GPU_CASE";

/// The device of every case.
pub const GPU: DeviceId = DeviceId(0);

/// One case.
pub struct Case {
    name: &'static str,
    run: fn() -> Result<()>,
}

/// Names a case after its function.
#[macro_export]
macro_rules! case {
    ($name:ident) => {
        $crate::Case {
            name: stringify!($name),
            run: $name,
        }
    };
}

fn main() -> ExitCode {
    let cases: Vec<&'static Case> = [memory::CASES, queue::CASES, thread::CASES]
        .into_iter()
        .flatten()
        .collect();
    if let Ok(name) = env::var(CASE) {
        let case = cases
            .iter()
            .find(|case| case.name == name)
            .expect("the parent names a case of the list");
        watchdog();
        return match (case.run)() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                let cause = std::error::Error::source(&error)
                    .map(ToString::to_string)
                    .unwrap_or_default();
                eprintln!("{error}: {cause}");
                ExitCode::FAILURE
            }
        };
    }
    let missing = CudaBackend::load().err();
    if let Some(error) = &missing {
        eprintln!("no device: {error}");
    }
    let required = env::var("REQUIRE_GPU").is_ok_and(|value| value == "1");
    let trials = cases
        .into_iter()
        .map(|case| {
            Trial::test(case.name, move || in_child(case))
                .with_ignored_flag(missing.is_some() && !required)
        })
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn in_child(case: &Case) -> std::result::Result<(), Failed> {
    Ok(passes(this_program().env(CASE, case.name))?)
}

/// Ends a process that hangs: a stream that never completes takes every call of the driver with it.
fn watchdog() {
    threads::spawn(|| {
        threads::sleep(Duration::from_secs(60));
        eprintln!("the case hangs");
        std::process::abort();
    });
}

/// Loads the backend.
pub fn cuda() -> Arc<CudaBackend> {
    CudaBackend::load().expect("the parent found a device")
}

/// Compiles the kernel that writes on and on.
pub fn write_on(application: &Application) -> Result<Kernel> {
    application.kernel(include_str!("../kernel/write.ptx"), "write_on")
}

/// Waits until a condition holds; the watchdog ends the wait if it never does.
pub fn wait_until(mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    while !holds()? {
        threads::yield_now();
    }
    Ok(())
}

/// Returns the median time of a call, in nanoseconds: for the record, never to judge by.
pub fn median(mut call: impl FnMut() -> Result<()>) -> Result<u64> {
    let mut times = Vec::new();
    for _ in 0..1000 {
        let start = Instant::now();
        call()?;
        times.push(start.elapsed().as_nanos() as u64);
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

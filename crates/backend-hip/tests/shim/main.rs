//! The backend over a library that stands in for AMD's, on shared memory: what it does by which
//! version's rules, what it makes of AMD's faults, and what its probe proves.
//!
//! Every case runs in a process of its own, this program started again, because the library is
//! chosen when a process first loads it.

mod foreign;
mod library;
mod load;
mod memory;
mod pool;
mod probe;
mod queue;
mod rules;
mod server;

use std::env;
use std::process::ExitCode;
use std::sync::Arc;

use backend_hip::{Hip, HipBackend, Proof, Step, Version};
use gpu_api::DeviceId;
use harness::program::{passes, this_program};
use libtest_mimic::{Arguments, Failed, Trial};

/// Names the case that a child process is to run.
const CASE: &str = "HIP_SHIM_CASE";

/// The one device of most cases.
pub const GPU: DeviceId = DeviceId(0);

/// One case, and the library that it runs over.
pub struct Case {
    name: &'static str,
    library: Library,
    environment: &'static [(&'static str, &'static str)],
    run: fn(),
}

/// Which library stands in for AMD's.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// One that is named and not there.
    Absent,
    /// One that is not AMD's.
    Foreign,
    /// One without these functions.
    Without(&'static [&'static str]),
    /// Two on the loader's path, and none named: `libamdhip64.so.8`, which lacks `hipStreamGetId`,
    /// and `libamdhip64.so.6`.
    Installed,
    /// One on the loader's path that is no library.
    Broken,
}

/// All of it.
pub const WHOLE: Library = Library::Without(&[]);

fn main() -> ExitCode {
    hip_probe::run_if_asked();
    if foreign::run_if_asked() {
        return ExitCode::SUCCESS;
    }
    let cases: Vec<&'static Case> = [
        load::CASES,
        memory::CASES,
        pool::CASES,
        queue::CASES,
        rules::CASES,
        server::CASES,
        probe::CASES,
    ]
    .into_iter()
    .flatten()
    .collect();
    if let Ok(name) = env::var(CASE) {
        let case = cases
            .iter()
            .find(|case| case.name == name)
            .expect("the parent names a case of the list");
        (case.run)();
        return ExitCode::SUCCESS;
    }
    // SAFETY: `remove_var` asks that no other thread reads the environment: this is the only
    // thread.
    unsafe { env::remove_var(backend_hip::LIBRARY) };
    // A runtime of the machine's own would be found behind what is none.
    let has_runtime = Hip::inspect().is_ok();
    let trials = cases
        .into_iter()
        .map(|case| {
            let hidden = case.library == Library::Broken && has_runtime;
            Trial::test(case.name, move || in_child(case)).with_ignored_flag(hidden)
        })
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn in_child(case: &Case) -> Result<(), Failed> {
    let directory = tempfile::tempdir()?;
    let mut command = this_program();
    match library::provide(case.library, directory.path())? {
        Some(library) => command.env(backend_hip::LIBRARY, library),
        None => command
            .env_remove(backend_hip::LIBRARY)
            .env("LD_LIBRARY_PATH", directory.path()),
    };
    // What this machine's GPUs and settings are has no part in it.
    for variable in [
        backend_hip::PROOF,
        "GPU_IPC_HOST_BYTES",
        "GPU_IPC_SHIM_VERSION",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "HSA_ENABLE_IPC_MODE_LEGACY",
    ] {
        command.env_remove(variable);
    }
    command
        .env(CASE, case.name)
        .env("GPU_IPC_SHIM", "host")
        .envs(case.environment.iter().copied());
    Ok(passes(&mut command)?)
}

/// The version whose rules the library keeps.
pub fn version() -> Version {
    Version(
        env::var("GPU_IPC_SHIM_VERSION").map_or(70_253_211, |text| text.parse().expect("a number")),
    )
}

/// Loads the backend with everything proved.
pub fn hip() -> Arc<HipBackend> {
    proved(&Step::ALL)
}

/// Loads the backend with some steps proved.
pub fn proved(steps: &[Step]) -> Arc<HipBackend> {
    Hip::load_with(Some(Proof::new(version(), steps.iter().copied()))).expect("the library starts")
}

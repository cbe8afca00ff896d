//! The backend over a driver without a GPU: which calls it makes, in which order, and what is left
//! when one fails.
//!
//! Every case runs in a process of its own, this program started again, with a fake `libcuda.so.1`
//! first on the loader's path; the test builds it with the machine's C compiler. Where there is
//! none, or where the machine has a driver that a case must not find, the case is ignored and says
//! so.

mod fake;
mod load;
mod memory;
mod pool;
mod queue;
mod range;
mod thread;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use harness::program::{passes, this_program, try_output};
use libtest_mimic::{Arguments, Failed, Trial};

/// Names the case that a child process is to run.
const CASE: &str = "FAKE_DRIVER_CASE";

/// One case, and the driver that it runs over.
pub struct Case {
    name: &'static str,
    library: Library,
    environment: &'static [(&'static str, &'static str)],
    run: fn(),
}

/// Which library stands in for the driver.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// None: the machine must have none of its own.
    Absent,
    /// One that is not NVIDIA's.
    Foreign,
    /// A driver of CUDA 10: no virtual memory, no batches, no capture modes, no stream numbers.
    Old,
    /// All of it.
    Whole,
}

impl Library {
    fn directory(self, root: &Path) -> PathBuf {
        root.join(match self {
            Library::Absent => "absent",
            Library::Foreign => "foreign",
            Library::Old => "old",
            Library::Whole => "whole",
        })
    }

    fn build(self, root: &Path) -> Result<(), String> {
        let directory = self.directory(root);
        fs::create_dir_all(&directory).map_err(|error| error.to_string())?;
        let define: &[&str] = match self {
            Library::Absent => return Ok(()),
            Library::Foreign => &["-DNOTHING"],
            Library::Old => &["-DOLD"],
            Library::Whole => &[],
        };
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_driver/libcuda.c");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1"])
            .args(define)
            .arg("-o")
            .arg(directory.join("libcuda.so.1"))
            .arg(source);
        let output = try_output(&mut cc).map_err(|error| format!("cc: {error}"))?;
        // The loader tries the name without a number first, and a toolkit's stub has that name.
        fs::hard_link(directory.join("libcuda.so.1"), directory.join("libcuda.so"))
            .map_err(|error| format!("{error}; {}", String::from_utf8_lossy(&output.stderr)))
    }
}

fn main() -> ExitCode {
    let cases: Vec<&'static Case> = [
        load::CASES,
        memory::CASES,
        range::CASES,
        pool::CASES,
        thread::CASES,
        queue::CASES,
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
    let root = tempfile::tempdir().expect("a directory for the libraries can be made");
    let built = [
        Library::Absent,
        Library::Foreign,
        Library::Old,
        Library::Whole,
    ]
    .into_iter()
    .try_for_each(|library| library.build(root.path()));
    if let Err(error) = &built {
        eprintln!("ignored: the fake driver cannot be built: {error}");
    }
    // SAFETY: `is_culib_present` runs the initialisers of the libraries that it tries: a driver's
    // have no conditions.
    let has_driver = unsafe { cudarc::driver::sys::is_culib_present() };
    let trials = cases
        .into_iter()
        .map(|case| {
            let ignored = built.is_err() || (case.library == Library::Absent && has_driver);
            let root = root.path().to_owned();
            Trial::test(case.name, move || in_child(case, &root)).with_ignored_flag(ignored)
        })
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn in_child(case: &Case, root: &Path) -> Result<(), Failed> {
    let mut command = this_program();
    command
        .env(CASE, case.name)
        .env("LD_LIBRARY_PATH", case.library.directory(root))
        .env("CUDA_MPS_PIPE_DIRECTORY", root.join("no-daemon"))
        .envs(case.environment.iter().copied());
    Ok(passes(&mut command)?)
}

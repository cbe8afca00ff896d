//! Runs the list on HIP devices that are shared memory: over a library that stands in for AMD's, as
//! a runtime of which everything is proved, one of which nothing is, one without virtual memory,
//! and an old one.

use std::env;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use gpu_ipc::hip::{LIBRARY, PROOF, Proof, Step, Version};
use harness::WATCHDOG;
use harness::program::run_to_end;
use libtest_mimic::{Arguments, Failed, Trial};

#[path = "conformance.rs"]
mod conformance_program;

/// Set in a process that runs the list over one runtime.
const RUN: &str = "GPU_IPC_CONFORMANCE_HIP";

/// A runtime: its name here, its version, and what is proved of it.
type Runtime = (&'static str, u32, &'static [Step]);

const RUNTIMES: &[Runtime] = &[
    ("proved_7_14", 71_400_000, &Step::ALL),
    ("unproved_7_2", 70_253_211, &[]),
    ("dma_buf_7_2", 70_253_211, &[Step::DmaBuf, Step::Words]),
    ("words_6_4", 60_443_484, &[Step::Words]),
    ("virtual_memory_6_2", 60_242_134, &[Step::Vmm, Step::Words]),
    ("virtual_memory_5_7", 50_731_921, &[Step::Vmm, Step::Words]),
    ("words_5_2", 50_221_153, &[Step::Words]),
];

fn main() -> ExitCode {
    if env::var_os(RUN).is_some() {
        conformance_program::main();
        return ExitCode::SUCCESS;
    }
    let trials = RUNTIMES
        .iter()
        .map(|runtime| Trial::test(runtime.0, move || run(runtime)))
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn run(&(name, version, steps): &Runtime) -> Result<(), Failed> {
    let program = env::current_exe()?;
    let library: PathBuf = program.with_file_name("libhip_on_cuda.so");
    let mut command = Command::new(program);
    command
        .arg("hip:")
        .env(RUN, "1")
        .env(LIBRARY, library)
        .env(
            PROOF,
            Proof::new(Version(version), steps.iter().copied()).to_string(),
        )
        .env("GPU_IPC_SHIM", "host")
        // A wait of a stream's occupies one of four queues, which no probe would prove.
        .env(
            "GPU_IPC_SHIM_INJECT",
            if steps.contains(&Step::Waits) {
                "free-queues"
            } else {
                ""
            },
        )
        .env("GPU_IPC_SHIM_VERSION", version.to_string())
        .env("REQUIRE_GPU", "1")
        .env("REQUIRE_BACKEND", "hip");
    let output = run_to_end(&mut command, 5 * WATCHDOG);
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    let result = out
        .lines()
        .find(|line| line.starts_with("test result:"))
        .unwrap_or("it did not end")
        .to_owned();
    // A list that ran nothing would be all right too, as far as its own result goes.
    let some = out
        .lines()
        .any(|line| line.starts_with("test hip:1::") && line.ends_with("ok"));
    if output.status.success() && some && result.contains(" 0 ignored;") {
        eprintln!("{name}: {result}");
        return Ok(());
    }
    Err(format!("{}: {result}\n{out}{err}", output.status).into())
}

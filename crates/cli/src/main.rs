//! The `gpu-ipc` program.
//!
//! 1. `args`: what it can be told; `output`: how it answers.
//! 2. `demo`: the main job with real processes.
//! 3. `doctor`: what this machine can do, and what it lacks.
//! 4. `sessions`: those on this host, and who holds what.
//! 5. `torture`: whoever dies, nothing is lost or freed early; and methods of which that is not true.
//! 6. `bench`: what it costs, beside the raw calls.
//! 7. What they share: `device` (which one), `child` (this program in other processes), `copier`, `pattern` (contents of
//!    blocks), `hex`, `size`.

mod args;
mod bench;
mod child;
mod copier;
mod demo;
mod device;
mod doctor;
mod hex;
mod output;
mod pattern;
mod sessions;
mod size;
mod torture;

use std::process::ExitCode;

use clap::Parser;

use args::{Args, Command};

/// How a command ended, as an exit status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    /// All is well.
    Good = 0,
    /// Something was found that should not be.
    Finding = 1,
    /// What was asked for is not to be had on this machine.
    Unavailable = 3,
}

fn main() -> ExitCode {
    #[cfg(feature = "hip")]
    gpu_ipc::hip::probe::run_if_asked();
    // clap itself ends with 2 for what it does not understand.
    let outcome = match Args::parse().command {
        Command::Demo(options) => demo::run(&options),
        Command::Ls(options) => sessions::ls::run(&options),
        Command::Top(options) => sessions::top::run(&options),
        Command::Snapshot(options) => sessions::snapshot::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::BenchConsumer(options) => bench::consumer::run(&options),
        Command::BenchMemory(options) => bench::memory::run(&options),
        Command::DemoConsumer(options) => demo::consumer::run(&options),
        Command::DoctorBackend(options) => doctor::probe::run(options.backend),
        Command::DoctorConsumer(options) => doctor::consumer::run(&options),
        Command::Torture(options) => torture::run(&options),
        Command::TortureMember(options) => torture::run_member(&options),
        Command::DoctorNamespaces => doctor::namespaces::run(),
    };
    ExitCode::from(outcome as u8)
}

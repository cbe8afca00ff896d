//! The `gpu-ipc` program. Nothing of this library is a promise: it exists so that the torture and
//! the steady state, which are not published, start the same processes.
//!
//! 1. `args`: its arguments.
//! 2. `demo`: the main job with real processes.
//! 3. `doctor`: what works on this machine, and why the rest does not.
//! 4. `sessions`: the sessions on this host and their holders.
//! 5. `objects`: memory that outlives the process that filled it. `gateway`: the same on other
//!    hosts.
//! 6. `bench`: what sharing costs beside the raw driver calls.
//! 7. What the commands share: `choice` and `device` (which one), `child` (this program in other
//!    processes), `owner` (a keeper and its broker), `copier`, `pattern` (contents of blocks),
//!    `output`, `log`, `size`, `patience`, `failure` (why a
//!    command failed).

// Tests: `crates/cli/tests/program.rs`.

mod args;
mod bench;
pub mod child;
pub mod choice;
pub mod copier;
mod demo;
pub mod device;
mod doctor;
mod failure;
mod gateway;
pub mod log;
pub mod objects;
pub mod output;
pub mod owner;
mod patience;
pub mod pattern;
mod sessions;
pub mod size;

use std::process::ExitCode;

use clap::Parser;

use args::{Args, Command};

/// How a command ended, as an exit status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// All is well.
    Good = 0,
    /// Something was found that should not be.
    Finding = 1,
    /// It was told what cannot be: as clap ends for what it does not understand.
    Usage = 2,
    /// What was asked for is not to be had on this machine.
    Unavailable = 3,
    /// A signal asked for the end: as a shell shows SIGINT.
    Interrupted = 130,
    /// Nothing read what it printed: as a shell shows SIGPIPE.
    Unread = 141,
}

/// Runs the command that this process' arguments name.
pub fn run() -> ExitCode {
    #[cfg(feature = "hip")]
    gpu_ipc::hip::probe::run_if_asked();
    let outcome = match Args::parse().command {
        Command::Demo(options) => demo::run(&options),
        Command::Ls(options) => sessions::ls::run(&options),
        Command::Top(options) => sessions::top::run(&options),
        Command::Metrics(options) => sessions::metrics::run(&options),
        Command::Snapshot(options) => sessions::snapshot::run(&options),
        Command::Keep(options) => objects::keep::run(&options),
        Command::Broker(options) => objects::serve::run(&options),
        Command::Ready(options) => objects::ready::run(&options),
        Command::Stop(options) => objects::stop::run(&options),
        Command::Reload(options) => objects::reload::run(&options),
        Command::Objects(options) => objects::list::run(&options),
        Command::Put(options) => objects::put::run(&options),
        Command::Get(options) => objects::get::run(&options),
        Command::Rm(options) => objects::remove::run(&options),
        Command::Gateway(options) => gateway::run(&options),
        Command::Pull(options) => gateway::pull(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::BenchProcess(process) => bench::run_process(&process),
        Command::DemoConsumer(options) => demo::consumer::run(&options),
        Command::DoctorProcess(process) => doctor::run_process(&process),
    };
    ExitCode::from(outcome as u8)
}

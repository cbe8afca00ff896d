//! The `gpu-ipc` program.
//!
//! 1. `args`: its arguments.
//! 2. `demo`: the main job with real processes.
//! 3. `doctor`: what works on this machine, and why the rest does not.
//! 4. `sessions`: the sessions on this host and their holders.
//! 5. `objects`: memory that outlives the process that filled it. `gateway`: the same on other
//!    hosts.
//!
//! `torture`, `steady` and `bench` are in the crate `lab`, and so is what all commands share.

mod args;
mod demo;
mod doctor;
mod gateway;
mod objects;
mod sessions;

use std::process::ExitCode;

use clap::Parser;

use args::{Args, Command};
use lab::{bench, steady, torture};

fn main() -> ExitCode {
    #[cfg(feature = "hip")]
    gpu_ipc::hip::probe::run_if_asked();
    // clap itself ends with 2 for what it does not understand.
    let outcome = match Args::parse().command {
        Command::Demo(options) => demo::run(&options),
        Command::Ls(options) => sessions::ls::run(&options),
        Command::Top(options) => sessions::top::run(&options),
        Command::Metrics(options) => sessions::metrics::run(&options),
        Command::Snapshot(options) => sessions::snapshot::run(&options),
        Command::Keep(options) => objects::keep::run(&options),
        Command::Broker(options) => objects::serve::run(&options),
        Command::Objects(options) => objects::list::run(&options),
        Command::Put(options) => objects::put::run(&options),
        Command::Get(options) => objects::get::run(&options),
        Command::Gateway(options) => gateway::run(&options),
        Command::Pull(options) => gateway::pull(&options),
        Command::Rm(options) => objects::remove::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::BenchConsumer(options) => bench::consumer::run(&options),
        Command::BenchWorker(options) => bench::jobs::worker::run(&options),
        Command::BenchMemory(options) => bench::memory::run(&options),
        Command::BenchObject(options) => bench::objects::run_reader(&options),
        Command::DemoConsumer(options) => demo::consumer::run(&options),
        Command::DoctorBackend(options) => doctor::probe::run(options.backend),
        Command::DoctorConsumer(options) => doctor::consumer::run(&options),
        Command::Torture(options) => torture::run(&options),
        Command::Steady(options) => steady::run(&options),
        Command::SteadyLender(options) => steady::run_lender(&options),
        Command::TortureMember(options) => torture::run_member(&options),
        Command::TortureObject(options) => torture::objects::run_member(&options),
        Command::DoctorNamespaces => doctor::namespaces::run(),
    };
    ExitCode::from(outcome as u8)
}

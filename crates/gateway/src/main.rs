//! The `gpu-ipc-gateway` program.

use std::process::ExitCode;

use clap::Parser;
use gateway::Error;
use gateway::program::args::{Args, Command};
use gateway::program::{certs, objects, pull, pulls, run, state};
use gateway::transport::nixl;

fn main() -> ExitCode {
    #[cfg(feature = "hip")]
    gpu_ipc::hip::probe::run_if_asked();
    // SAFETY: `ask_the_driver` asks that no other thread runs: this one has started none.
    unsafe { nixl::ask_the_driver() };
    let command = Args::parse().command;
    let serves = matches!(command, Command::Run(_));
    let outcome = match command {
        Command::Run(options) => run::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Pull(options) => pull::run(&options),
        Command::Pulls(options) => pulls::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Carrier(options) => options.run().map(|()| ExitCode::SUCCESS),
        Command::Objects(options) => objects::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Certs(options) => certs::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Status(options) => state::status(&options).map(|()| ExitCode::SUCCESS),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("gpu-ipc-gateway: {error}");
        // What keeps a gateway from serving may pass: its keeper starts it again.
        ExitCode::from(if serves && !matches!(error, Error::Invalid { .. }) {
            1
        } else {
            2
        })
    })
}

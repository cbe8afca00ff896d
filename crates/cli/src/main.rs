//! The `gpu-ipc` program.
//!
//! `args` says what it can be told, `demo` shows the main job with real processes, `sessions` looks at those on this
//! host.

mod args;
mod demo;
mod sessions;

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
    // clap itself ends with 2 for what it does not understand.
    let outcome = match Args::parse().command {
        Command::Demo(options) => demo::run(&options),
        Command::Ls(options) => sessions::ls::run(&options),
        Command::Top(options) => sessions::top::run(&options),
        Command::DemoConsumer(options) => demo::consumer::run(&options),
    };
    ExitCode::from(outcome as u8)
}

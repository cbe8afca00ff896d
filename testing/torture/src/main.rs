//! Torture: producers and consumers that are killed, stopped and forked at random, and an oracle
//! that is in the blocks.
//!
//! 1. `options`: what a run is asked for. `supervisor` starts the other processes (`process`), in a
//!    `directory` that goes with the run, torments them, and counts what they found (`report`).
//! 2. `seat`: which process one is. `producer`, `consumer`: what each of them does; `sides`: how it
//!    gets at memory; `lender`, `borrower`: by the library; `control`: by a method that must fail.
//!    `visitor`: connections that are opened and abandoned.
//! 3. `shared_stats`: what they count in memory that outlives each of them; `message`: what goes
//!    between them; `audit`: which bytes a session takes and gives back; `fork`: children that live
//!    on.
//!
//! `objects` is the same for a broker: writers and readers of objects, or holders and readers of
//! pools, with brokers and keepers.
//!
//! Every block is filled with its generation. A holder compares all bytes before and after;
//! returned bytes are overwritten at once where the CPU can reach them. docs/TESTING.md lists what
//! is done, and to which process.

mod audit;
mod borrower;
mod consumer;
mod control;
mod directory;
mod fork;
mod lender;
mod message;
mod objects;
mod options;
mod process;
mod producer;
mod report;
mod seat;
mod shared_stats;
mod sides;
mod supervisor;
mod told;
mod visitor;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gpu_ipc_cli::objects::keep::{self, KeepOptions};
use gpu_ipc_cli::objects::serve::{self, BrokerOptions};
use objects::ObjectMemberOptions;

use gpu_ipc_cli::choice::Vendor;
use gpu_ipc_cli::{Outcome, child, device, output};
use options::TortureOptions;
use seat::{MemberOptions, Seat};

/// Kills, stops and forks producers and consumers at random, and checks that nothing is lost or
/// freed early
#[derive(Parser, Debug)]
#[command(
    name = "gpu-ipc-torture",
    version,
    args_conflicts_with_subcommands = true
)]
#[command(after_help = "\
Examples:
  gpu-ipc-torture                                  a minute on shared memory, six consumers at a time
  gpu-ipc-torture --seconds 28800 --backend cuda   a night on a GPU
  gpu-ipc-torture --seed 7 --json                  one JSON object on standard output, for programs
  gpu-ipc-torture --seconds 10 --control counter   a method known to be wrong: exit status 1 means that it was found
  gpu-ipc-torture --broker                         writers and readers of objects, their broker and its keeper
  gpu-ipc-torture --pools                          holders and readers of pools, their broker and its keeper

The seed fixes the actions, not their timing: reproducing a finding may take several runs.
docs/TESTING.md lists the actions and explains the fields of --json.

Exit status:
  0  nothing was reused early, ended twice, leaked or hung
  1  something did, or a process crashed; with --control: the defect was found
  2  wrong usage
  3  the requested backend has no device here
  130  a signal ended it: nothing can be said of the run, and its folder is removed")]
struct Args {
    #[command(flatten)]
    run: TortureOptions,
    #[command(subcommand)]
    process: Option<Process>,
}

/// A process that the torture starts.
#[derive(Subcommand, Debug)]
enum Process {
    /// A producer, a consumer or a visitor
    #[command(hide = true)]
    Member(MemberOptions),
    /// A process that works with a broker's objects or pools
    #[command(hide = true)]
    Object(ObjectMemberOptions),
    /// A broker's keeper
    #[command(hide = true)]
    Keep(KeepOptions),
    /// A broker
    #[command(hide = true)]
    Broker(BrokerOptions),
}

fn main() -> ExitCode {
    #[cfg(feature = "hip")]
    gpu_ipc::hip::probe::run_if_asked();
    let args = Args::parse();
    let outcome = match args.process {
        None => run(&args.run),
        Some(Process::Member(options)) => run_member(&options),
        Some(Process::Object(options)) => objects::run_member(&options),
        Some(Process::Keep(options)) => keep::run(&options),
        Some(Process::Broker(options)) => serve::run(&options),
    };
    ExitCode::from(outcome as u8)
}

/// Runs a torture.
fn run(options: &TortureOptions) -> Outcome {
    let asked = match (options.broker, options.pools) {
        (true, _) => Some("--broker"),
        (false, true) => Some("--pools"),
        (false, false) => None,
    };
    if options
        .control
        .is_some_and(|control| control.goes_with() != asked)
    {
        let why = "--control blind-broker and lossy-upgrade go with --broker, early-seal with --pools, and the other \
                   controls with neither";
        return output::fail(why, options.json, Outcome::Finding);
    }
    let gpu = match device::choose(options.backend) {
        Ok(gpu) => gpu,
        Err(why) => return output::fail(&why, options.json, Outcome::Unavailable),
    };
    if asked.is_some() {
        return objects::run(options, &gpu);
    }
    let backend = Vendor(gpu.kind());
    let (uuid, can_grow) = (gpu.uuid().to_string(), gpu.caps().ranges);
    drop(gpu);
    match supervisor::run(options, backend, &uuid, can_grow) {
        Ok((report, crashes)) => {
            for crash in &crashes {
                output::complain(crash);
            }
            let outcome = if report.is_good() {
                Outcome::Good
            } else {
                Outcome::Finding
            };
            output::conclude(
                &if options.json {
                    report.json()
                } else {
                    report.text()
                },
                outcome,
            )
        }
        Err(why) => {
            let outcome = if why == supervisor::INTERRUPTED {
                Outcome::Interrupted
            } else {
                Outcome::Finding
            };
            output::fail(
                &format!("the torture stopped: {why}"),
                options.json,
                outcome,
            )
        }
    }
}

/// Lives as a process of a run.
fn run_member(options: &MemberOptions) -> Outcome {
    child::die_with_parent();
    let lived = Seat::take(options).and_then(|seat| {
        match (options.visitor, seat.serial == seat.producer) {
            (true, _) => visitor::run(&seat),
            (false, true) => producer::run(&seat),
            (false, false) => consumer::run(&seat),
        }
    });
    match lived {
        Ok(()) => Outcome::Good,
        Err(error) => {
            output::complain(&format!(
                "process {} of the torture: {error}",
                options.told.serial
            ));
            Outcome::Finding
        }
    }
}

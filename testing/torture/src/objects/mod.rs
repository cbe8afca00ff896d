//! Torture of objects and of pools: who writes and reads them, their broker and its keeper, killed
//! and stopped at random.
//!
//! 1. `supervisor` starts them (`member`), torments them, and counts what they found (`report`).
//! 2. `writer` puts object after object; some ask for the commit before they have written, which a
//!    broker must not hear. `reader` opens, advances, sleeps and wakes, and compares every byte.
//! 3. Of pools: `holder` adopts, compares, fills and seals; `onlooker` reads beside it; `ledger`
//!    has what their blocks contain, and which of them are known to be whole.
//! 4. `seat`: which process one is; `contents`: what an object contains; `tally`: what they count
//!    in memory that outlives each of them; `journal`: what happened, line by line.
//!
//! An object's parts have contents that follow from its stamp, which travels beside them: a reader
//! that finds others has seen a half. What was answered as committed must be there, or something
//! newer.

mod contents;
mod holder;
mod journal;
mod ledger;
mod member;
mod onlooker;
mod reader;
mod report;
mod seat;
mod supervisor;
mod tally;
mod writer;

use gpu_ipc::Gpu;

use super::options::TortureOptions;
use gpu_ipc_cli::{Outcome, child, output};
pub use seat::ObjectMemberOptions;
use seat::{Role, Seat};

/// Runs a torture.
pub fn run(options: &TortureOptions, gpu: &Gpu) -> Outcome {
    match supervisor::run(options, gpu) {
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
        Err(why) => output::fail(
            &format!("the torture stopped: {why}"),
            options.json,
            Outcome::Finding,
        ),
    }
}

/// Lives as a process of a run.
pub fn run_member(options: &ObjectMemberOptions) -> Outcome {
    child::die_with_parent();
    let lived = Seat::take(options).and_then(|seat| match options.role {
        Role::Writer => writer::run(&seat),
        Role::Reader => reader::run(&seat),
        Role::Holder => holder::run(&seat),
        Role::Onlooker => onlooker::run(&seat),
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

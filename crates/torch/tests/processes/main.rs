//! A sender and a receiver in two processes, on the host backend, with everything between them that
//! PyTorch would have.
//!
//! What PyTorch itself does with the same files and fields is in the workspace's `tests/torch`.

mod agent;
mod chunks;
mod death;
mod opening;
mod pieces;
mod release;
mod side;

use libtest_mimic::{Arguments, Failed, Trial};

/// A case: its name and what it does.
type Case = (&'static str, fn());

fn main() {
    if let Some(agent::Role::Agent) = harness::role() {
        return agent::run();
    }
    let cases = [
        opening::CASES,
        release::CASES,
        death::CASES,
        pieces::CASES,
        chunks::CASES,
    ]
    .concat();
    let trials = cases.into_iter().map(|(name, run)| {
        Trial::test(name, move || {
            run();
            Ok::<(), Failed>(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}

//! Deaths before each instruction of a claim, a release, a grant and a revocation.
//!
//! Each case starts this binary again as an [`agent`], which gets everything ready and stops. A
//! [`trace`] then has it execute a number of instructions of the one call, kills it, and checks
//! that what it left is repaired, once. A plain shared counter, which cannot be repaired, is killed
//! in the same way and must leak.
//!
//! By default instructions are sampled: evenly, and all around the one that changes the lease.
//! `GPU_IPC_INSTRUCTIONS=all` tries every one, which takes minutes; a number tries about that many
//! of each call.

mod agent;
mod calls;
mod consumer;
mod counter;
mod producer;
mod trace;

use libtest_mimic::{Arguments, Failed, Trial};

/// A case: its name and what it does.
type Case = (&'static str, fn());

fn main() {
    if let Some(call) = harness::role() {
        return calls::run(call);
    }
    let possible = trace::is_allowed();
    let cases = [consumer::CASES, producer::CASES, counter::CASES].concat();
    let trials = cases.iter().map(|&(name, run)| {
        let run = move || {
            run();
            Ok::<(), Failed>(())
        };
        Trial::test(name, run).with_ignored_flag(!possible)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}

/// Chooses the instructions of a call to die before: all close to the decisive ones, and some of
/// the others.
fn chosen(total: usize, decisive: &[usize]) -> Vec<usize> {
    /// How many of a call's instructions are tried, besides those around the decisive ones.
    const SAMPLES: usize = 40;
    /// How many on either side of a decisive one.
    const AROUND: usize = 8;
    let samples = match std::env::var("GPU_IPC_INSTRUCTIONS") {
        Ok(all) if all == "all" => total,
        Ok(number) => number
            .parse()
            .expect("GPU_IPC_INSTRUCTIONS is `all` or a number"),
        Err(_) => SAMPLES,
    };
    let every = total.div_ceil(samples.max(1)).max(1);
    let is_close = |n: &usize| decisive.iter().any(|at| n.abs_diff(*at) <= AROUND);
    (0..=total)
        .filter(|n| n % every == 0 || *n == total || is_close(n))
        .collect()
}

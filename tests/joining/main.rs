//! The way in and the way out, step by step: each system call that connect and welcome make fails,
//! or stands still, or is the last of its process, on both sides, on the code that ships.
//!
//! 1. `injector`: whose n-th call fails, waits or kills, for n = 1, 2, ... until a whole life
//!    passes.
//! 2. `servers`: a session and a broker, which every case runs over, each with its client.
//! 3. `steps`: what must hold after each of them: of a connect that failed no row, no descriptor,
//!    no mapped or registered file and no thread is left at either side; one that succeeded can be
//!    shared with; who was there is served, and so is the next who comes.
//! 4. `deaths`: the same when a process dies there. `agent`: that process.

mod agent;
mod deaths;
mod injector;
mod servers;
mod steps;

use std::time::Instant;

use harness::WATCHDOG;
use libtest_mimic::{Arguments, Failed, Trial};

/// A case: its name and what it does.
type Case = (&'static str, fn());

fn main() {
    if let Some(role) = harness::role() {
        return agent::run(role);
    }
    let mut arguments = Arguments::from_args();
    // Each counts what this process has open.
    arguments.test_threads = Some(1);
    let possible = arguments.list || own_thread(injector::Injector::new).is_ok();
    if !possible {
        println!(
            "this kernel, or this container, lets no process filter its own calls: every case is ignored"
        );
    }
    let trials = [steps::CASES, deaths::CASES]
        .concat()
        .into_iter()
        .map(|(name, run)| {
            let trial = Trial::test(name, move || {
                own_thread(run);
                Ok::<(), Failed>(())
            });
            trial.with_ignored_flag(!possible)
        });
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

/// Runs something on a thread of its own: a filter ends with its threads.
fn own_thread<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::Builder::new()
        .name("case".into())
        .spawn(run)
        .expect("a thread");
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Waits until a condition holds; says what there is if it never does.
#[track_caller]
fn wait_until(what: &str, mut holds: impl FnMut() -> Result<(), String>) {
    let start = Instant::now();
    while let Err(why) = holds() {
        assert!(
            start.elapsed() < WATCHDOG,
            "waited too long for {what}: {why}"
        );
        std::thread::yield_now();
    }
}

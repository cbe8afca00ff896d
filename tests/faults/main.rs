//! Calls that fail: the n-th of the backend, for n = 1, 2, ... until a whole life passes, and
//! system calls that find no descriptor or no memory; and participants that mean harm.
//!
//! Whatever fails, nobody panics, nothing is given back twice, nothing that somebody holds is
//! freed, and what does not come back is counted.

mod agent;
mod backend;
mod consumer;
mod faulty;
mod hostile;
mod limits;
mod mapping;

use libtest_mimic::{Arguments, Failed, Trial};

/// A case: its name and what it does.
type Case = (&'static str, fn());

fn main() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        default(panic);
        // A panic of a thread of the library's would be nobody's failure otherwise.
        if std::thread::current()
            .name()
            .is_some_and(|name| name.starts_with("gpu-ipc"))
        {
            std::process::abort();
        }
    }));
    if let Some(fault) = harness::role() {
        return consumer::run(fault);
    }
    let here = [
        backend::CASES,
        limits::CASES,
        hostile::CASES,
        mapping::CASES,
    ]
    .concat();
    let mut trials: Vec<Trial> = here.iter().map(|case| trial(case, true)).collect();
    let can_mount = harness::surroundings::can_mount();
    trials.extend(limits::MOUNTS.iter().map(|case| trial(case, can_mount)));
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn trial(&(name, run): &Case, possible: bool) -> Trial {
    let trial = Trial::test(name, move || {
        run();
        Ok::<(), Failed>(())
    });
    trial.with_ignored_flag(!possible)
}

//! What the paths of a lease and of a heap cost in instructions, against upper bounds:
//! `ci/test/instructions`.
//!
//! What asks another thread cannot be counted so: the claim of a ticket, a forward, a mapping, an
//! object. Nor are streams: on shared memory a thread is one.
//!
//! A count says the same on a slow machine and on a busy one, so it can fail a build where a time
//! cannot. Each case runs in a process of its own, which is stepped through what is measured;
//! `bounds.csv` holds the bounds. Beforehand the library's threads are stopped where they sleep, so
//! none of them runs beside the case.
//!
//! ```text
//! instructions                  counts every case and compares it with its bound
//! instructions --burden N       the first case with N more turns of a loop in each operation: a control that must fail
//! instructions --calls          counts the system calls of 10,000 cycles and of 20,000, which must be the same
//! instructions --times          nanoseconds instead, the least of many rounds
//! instructions --profile NAME   the addresses of one case's instructions, for addr2line, and how often each came
//! ```

mod cases;
mod heap;
mod pair;
mod stepper;

use std::hint::black_box;
use std::process::{Command, ExitCode};
use std::time::Duration;

use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{After, Gpu, Participant, Session, To, Wait};

use cases::{CASES, Case};
use pair::{BATCH, Pair};
use stepper::What;

/// Case, upper bound.
const BOUNDS: &str = include_str!("bounds.csv");
/// Rounds before the first that is measured.
const WARM: usize = 64;
/// Rounds that are counted, and timed.
const COUNTED: usize = 1;
const TIMED: usize = 1_000;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| arg != "--bench")
        .collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => count_all(0),
        ["--burden", n] => count_all(n.parse().expect("a number")),
        ["--calls"] => compare_calls(0),
        ["--calls", "--burden", n] => compare_calls(n.parse().expect("a number")),
        ["--cycles", cycles, "--burden", n] => cycles_with_calls(
            cycles.parse().expect("a number"),
            n.parse().expect("a number"),
        ),
        ["--times"] => times(),
        ["--profile", name] => profile(name),
        ["--case", name, "--burden", n] => one(name, n.parse().expect("a number")),
        _ => {
            eprintln!(
                "instructions: the first lines of benches/instructions.rs say how it is called"
            );
            ExitCode::FAILURE
        }
    }
}

fn find(name: &str) -> Option<&'static Case> {
    CASES.iter().find(|(case, ..)| *case == name)
}

/// Runs one case under the eyes of a tracer.
fn one(name: &str, burden: u64) -> ExitCode {
    let Some(&(_, before, round)) = find(name) else {
        eprintln!("instructions: no case is called {name}");
        return ExitCode::FAILURE;
    };
    let mut pair = Pair::new(before, burden);
    stepper::submit();
    // Before the first round: a collect by the session's thread would give slots back in another
    // order.
    stepper::hold_others_here();
    (0..WARM).for_each(|_| round(&mut pair));
    pair.marks = true;
    (0..COUNTED).for_each(|_| round(&mut pair));
    // The library's threads stay stopped, and so cannot end anything.
    std::mem::forget(pair);
    ExitCode::SUCCESS
}

fn times() -> ExitCode {
    println!("{:<24}{:>8}", "case", "ns");
    for &(name, before, round) in CASES {
        let mut pair = Pair::new(before, 0);
        (0..WARM).for_each(|_| round(&mut pair));
        let least = (0..TIMED).map(|_| {
            pair.spent = Duration::ZERO;
            round(&mut pair);
            pair.spent
        });
        let least = least.min().expect("there are rounds").as_nanos() as f64;
        println!("{name:<24}{:>8.1}", least / BATCH as f64);
    }
    ExitCode::SUCCESS
}

fn count_all(burden: u64) -> ExitCode {
    let bounds: Vec<(&str, u64)> = BOUNDS
        .lines()
        .skip(1)
        .map(|line| line.split_once(',').expect("case and bound"))
        .map(|(case, bound)| (case, bound.trim().parse().expect("a bound is a number")))
        .collect();
    let mut failed = bounds.len() != CASES.len();
    if failed {
        eprintln!(
            "instructions: bounds.csv has {} cases, the program {}",
            bounds.len(),
            CASES.len()
        );
    }
    println!("{:<24}{:>12}{:>8}", "case", "instructions", "bound");
    for (name, ..) in CASES.iter().take(if burden == 0 { CASES.len() } else { 1 }) {
        let Some(&(_, bound)) = bounds.iter().find(|(case, _)| case == name) else {
            eprintln!("instructions: {name} has no bound in bounds.csv");
            failed = true;
            continue;
        };
        match count(name, burden) {
            Ok(count) => {
                let verdict = if count > bound { "  too many" } else { "" };
                println!("{name:<24}{count:>12}{bound:>8}{verdict}");
                failed |= count > bound;
            }
            Err(why) => {
                eprintln!("instructions: {name} cannot be counted: {why}");
                failed = true;
            }
        }
    }
    if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// Counts the instructions of one operation, on average over the rounds.
fn count(name: &str, burden: u64) -> Result<u64, String> {
    let steps = stepper::count(&mut case(name, burden)?, What::Instructions)?;
    let per_operation = steps.count / (COUNTED * BATCH) as u64;
    if per_operation == 0 {
        Err("nothing was counted".into())
    } else {
        Ok(per_operation)
    }
}

/// Cycles with the library's own threads running, of which the calling thread's system calls are
/// counted. A burden of `n` is one system call in every `n` cycles.
fn cycles_with_calls(cycles: u64, burden: u64) -> ExitCode {
    let dir = tempfile::tempdir().expect("a directory");
    let gpu = Gpu::new(
        HostBackend::new(HostConfig::default()).expect("it opens"),
        DeviceId(0),
    )
    .expect("a device");
    let session = Session::builder(gpu.clone())
        .socket(dir.path().join("s"))
        .open()
        .expect("a session");
    let participant = Participant::builder(gpu)
        .connect(session.socket_path())
        .expect("connected");
    let block = session.alloc(4096).expect("there is room");
    let to = To::Participant(participant.id());
    let cycle = || {
        let descriptor = block.share(to, After::Done).expect("shared");
        drop(
            participant
                .claim(descriptor.as_bytes(), Wait::None, None)
                .expect("claimed"),
        );
        session.collect()
    };
    (0..1_000).for_each(|_| drop(cycle()));
    stepper::submit();
    stepper::mark();
    for n in 0..cycles {
        drop(cycle());
        if burden != 0 && n % burden == 0 {
            black_box(std::os::unix::process::parent_id());
        }
    }
    stepper::mark();
    ExitCode::SUCCESS
}

fn compare_calls(burden: u64) -> ExitCode {
    let calls = |cycles: &str| {
        let mut command = Command::new(std::env::current_exe().map_err(|e| e.to_string())?);
        command.args(["--cycles", cycles, "--burden", &burden.to_string()]);
        stepper::count(&mut command, What::Calls).map(|steps| steps.count)
    };
    // The session's thread may hold a lock at the very moment: that waits in the kernel, and does
    // not come three times.
    for _ in 0..3 {
        match (calls("10000"), calls("20000")) {
            (Ok(once), Ok(twice)) => {
                println!("stops at system calls: {once} in 10,000 cycles, {twice} in 20,000");
                if once == twice {
                    return ExitCode::SUCCESS;
                }
            }
            (once, twice) => {
                eprintln!("instructions: the calls cannot be counted: {once:?}, {twice:?}")
            }
        }
    }
    ExitCode::FAILURE
}

fn case(name: &str, burden: u64) -> Result<Command, String> {
    let mut command = Command::new(std::env::current_exe().map_err(|e| e.to_string())?);
    command.args(["--case", name, "--burden", &burden.to_string()]);
    // Which copy loop the C library takes depends on the processor: the plainest is the same
    // everywhere.
    command.env(
        "GLIBC_TUNABLES",
        "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX2,-AVX,-ERMS,-FSRM",
    );
    stepper::fix_addresses(&mut command);
    Ok(command)
}

/// Prints where a case spends its instructions: addresses for `addr2line`, the most frequent first.
fn profile(name: &str) -> ExitCode {
    let steps = case(name, 0).and_then(|mut command| stepper::count(&mut command, What::Places));
    match steps {
        Ok(steps) => {
            let mut places: Vec<_> = steps.at.into_iter().collect();
            places.sort_by_key(|&(address, count)| (std::cmp::Reverse(count), address));
            for (address, count) in places {
                println!("{:#x} {count}", address.wrapping_sub(stepper::BASE));
            }
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("instructions: {name} cannot be counted: {why}");
            ExitCode::FAILURE
        }
    }
}

//! What the paths of a lease and of a heap cost in instructions, against upper bounds: `ci/instructions`.
//!
//! A count says the same on a slow machine and on a busy one, so it can fail a build where a time cannot. Each case
//! runs in a process of its own, which is stepped through what is measured; `bounds.csv` holds the bounds. Beforehand
//! the library's threads are stopped where they sleep, so none of them runs beside the case.
//!
//! ```text
//! instructions                  counts every case and compares it with its bound
//! instructions --burden N       the first case with N more turns of a loop in each operation: a control that must fail
//! instructions --calls          counts the system calls of 10,000 cycles and of 20,000, which must be the same
//! instructions --times          nanoseconds instead, the least of many rounds
//! instructions --profile NAME   the addresses of one case's instructions, for addr2line, and how often each came
//! ```

mod heap;
mod stepper;

use std::hint::black_box;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use gpu_ipc::Descriptor;
use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Gpu, Participant, ReceivedBlock, SentBlock, Session, To, Wait};

use heap::Heap;
use stepper::What;

/// Case, upper bound.
const BOUNDS: &str = include_str!("bounds.csv");
/// Operations of a round.
const BATCH: usize = 64;
/// Rounds before the first that is measured.
const WARM: usize = 64;
/// Rounds that are counted, and timed.
const COUNTED: usize = 1;
const TIMED: usize = 1_000;

/// Name, blocks in limbo, and one round of [`BATCH`] operations.
type Case = (&'static str, usize, fn(&mut Pair));

const CASES: &[Case] = &[
    ("share", 0, share),
    ("claim", 0, claim),
    ("drop_received", 0, drop_received),
    ("collect", 0, collect),
    ("collect_many", 0, collect_many),
    ("collect_nothing", 0, collect_nothing),
    ("cycle", 0, cycle),
    ("share_many", 0, share_many),
    ("drop_many", 0, drop_sent),
    ("drop_in_limbo_0", 0, drop_sent_held),
    ("drop_in_limbo_100000", 100_000, drop_sent_held),
    ("heap_pair_10", 0, |pair| heap_pairs(pair, 10)),
    ("heap_pair_1000", 0, |pair| heap_pairs(pair, 1_000)),
    ("heap_pair_100000", 0, |pair| heap_pairs(pair, 100_000)),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => count_all(0),
        ["--burden", n] => count_all(n.parse().expect("a number")),
        ["--calls"] => compare_calls(0),
        ["--calls", "--burden", n] => compare_calls(n.parse().expect("a number")),
        ["--cycles", cycles, "--burden", n] => {
            cycles_with_calls(cycles.parse().expect("a number"), n.parse().expect("a number"))
        }
        ["--times"] => times(),
        ["--profile", name] => profile(name),
        ["--case", name, "--burden", n] => one(name, n.parse().expect("a number")),
        _ => {
            eprintln!("instructions: the first lines of benches/instructions.rs say how it is called");
            ExitCode::FAILURE
        }
    }
}

/// A producer and a consumer, and what a round needs.
struct Pair {
    session: Session,
    participant: Participant,
    block: SentBlock,
    burden: u64,
    /// Marks what is counted.
    marks: bool,
    spent: Duration,
    in_limbo: Vec<ReceivedBlock>,
    heap: Option<Heap>,
    _dir: tempfile::TempDir,
}

impl Pair {
    fn new(limbo: usize, burden: u64) -> Pair {
        let dir = tempfile::tempdir().expect("a directory");
        let gpu = Gpu::new(HostBackend::new(HostConfig::default()).expect("it opens"), DeviceId(0)).expect("a device");
        let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open().expect("a session");
        let block = session.alloc(4096).expect("there is room");
        let participant = Participant::builder(gpu).connect(session.socket_path()).expect("connected");
        let mut pair = Pair {
            session,
            participant,
            block,
            burden,
            marks: false,
            spent: Duration::ZERO,
            in_limbo: Vec::new(),
            heap: None,
            _dir: dir,
        };
        for _ in 0..limbo {
            let block = pair.session.alloc(256).expect("there is room");
            let received = pair.lease(&block);
            pair.in_limbo.push(received);
        }
        // The region is mapped from here on.
        drop(pair.lease(&pair.block));
        pair.session.collect();
        pair
    }

    /// Counts and times what happens to each of some things.
    fn measure<I, T>(&mut self, input: Vec<I>, run: impl Fn(&Pair, I) -> T) -> Vec<T> {
        let mut output = Vec::with_capacity(input.len());
        let start = Instant::now();
        if self.marks {
            stepper::mark();
        }
        for one in input {
            output.push(run(self, one));
            for n in 0..self.burden {
                black_box(n);
            }
        }
        if self.marks {
            stepper::mark();
        }
        self.spent += start.elapsed();
        output
    }

    fn to(&self) -> To {
        To::Participant(self.participant.id())
    }

    fn share(&self, block: &SentBlock) -> Descriptor {
        block.share(self.to(), After::Done).expect("shared")
    }

    fn claim(&self, descriptor: &Descriptor) -> ReceivedBlock {
        self.participant.claim(descriptor.as_bytes(), Wait::None, None).expect("claimed")
    }

    fn lease(&self, block: &SentBlock) -> ReceivedBlock {
        self.claim(&self.share(block))
    }

    fn blocks(&self) -> Vec<SentBlock> {
        (0..BATCH).map(|_| self.session.alloc(256).expect("there is room")).collect()
    }

    fn leases(&self) -> Vec<ReceivedBlock> {
        (0..BATCH).map(|_| self.claim(&self.share(&self.block))).collect()
    }
}

fn share(pair: &mut Pair) {
    let descriptors = pair.measure(vec![(); BATCH], |pair, ()| pair.share(&pair.block));
    descriptors.iter().for_each(|descriptor| drop(pair.claim(descriptor)));
    pair.session.collect();
}

fn claim(pair: &mut Pair) {
    let descriptors = (0..BATCH).map(|_| pair.share(&pair.block)).collect();
    drop(pair.measure(descriptors, |pair, descriptor| pair.claim(&descriptor)));
    pair.session.collect();
}

fn drop_received(pair: &mut Pair) {
    let leases = pair.leases();
    pair.measure(leases, |_, received| drop(received));
    pair.session.collect();
}

/// One lease has ended.
fn collect(pair: &mut Pair) {
    for _ in 0..BATCH {
        drop(pair.claim(&pair.share(&pair.block)));
        pair.measure(vec![()], |pair, ()| pair.session.collect());
    }
}

/// As many have ended as a group has slots.
fn collect_many(pair: &mut Pair) {
    drop(pair.leases());
    pair.measure(vec![()], |pair, ()| {
        (0..pair.burden * BATCH as u64).for_each(|n| _ = black_box(n));
        pair.session.collect()
    });
}

fn collect_nothing(pair: &mut Pair) {
    let held = pair.claim(&pair.share(&pair.block));
    pair.measure(vec![(); BATCH], |pair, ()| pair.session.collect());
    drop(held);
    pair.session.collect();
}

/// Grant, claim, release, retire.
fn cycle(pair: &mut Pair) {
    pair.measure(vec![(); BATCH], |pair, ()| {
        drop(pair.claim(&pair.share(&pair.block)));
        pair.session.collect()
    });
}

fn share_many(pair: &mut Pair) {
    let many = pair.measure(vec![()], |pair, ()| {
        let grants = [(&pair.block, pair.to()); BATCH];
        (0..pair.burden * BATCH as u64).for_each(|n| _ = black_box(n));
        pair.session.share_many(&grants, After::Done, &ShareOptions::default()).expect("shared")
    });
    many.iter().flatten().for_each(|descriptor| drop(pair.claim(descriptor)));
    pair.session.collect();
}

/// Blocks that nobody holds.
fn drop_sent(pair: &mut Pair) {
    let blocks = pair.blocks();
    pair.measure(blocks, |_, block| drop(block));
}

/// Blocks that somebody holds.
fn drop_sent_held(pair: &mut Pair) {
    let blocks = pair.blocks();
    let held: Vec<ReceivedBlock> = blocks.iter().map(|block| pair.claim(&pair.share(block))).collect();
    pair.measure(blocks, |_, block| drop(block));
    drop(held);
    pair.session.collect();
}

/// A free and an allocation at random, among this many live chunks.
fn heap_pairs(pair: &mut Pair, live: usize) {
    let mut heap = pair.heap.take().unwrap_or_else(|| Heap::new(live));
    pair.measure(heap.plan(BATCH), |_, planned| heap.pair(planned));
    pair.heap = Some(heap);
}

fn find(name: &str) -> Option<&'static Case> {
    CASES.iter().find(|(case, ..)| *case == name)
}

/// Runs one case under the eyes of a tracer.
fn one(name: &str, burden: u64) -> ExitCode {
    let Some((_, limbo, round)) = find(name) else {
        eprintln!("instructions: no case is called {name}");
        return ExitCode::FAILURE;
    };
    let mut pair = Pair::new(*limbo, burden);
    stepper::submit();
    // Before the first round: a collect by the session's thread would give slots back in another order.
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
    for (name, limbo, round) in CASES {
        let mut pair = Pair::new(*limbo, 0);
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
        eprintln!("instructions: bounds.csv has {} cases, the program {}", bounds.len(), CASES.len());
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
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Counts the instructions of one operation, on average over the rounds.
fn count(name: &str, burden: u64) -> Result<u64, String> {
    let steps = stepper::count(&mut case(name, burden)?, What::Instructions)?;
    let per_operation = steps.count / (COUNTED * BATCH) as u64;
    if per_operation == 0 { Err("nothing was counted".into()) } else { Ok(per_operation) }
}

/// Cycles with the library's own threads running, of which the calling thread's system calls are counted. A burden of
/// `n` is one system call in every `n` cycles.
fn cycles_with_calls(cycles: u64, burden: u64) -> ExitCode {
    let dir = tempfile::tempdir().expect("a directory");
    let gpu = Gpu::new(HostBackend::new(HostConfig::default()).expect("it opens"), DeviceId(0)).expect("a device");
    let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open().expect("a session");
    let participant = Participant::builder(gpu).connect(session.socket_path()).expect("connected");
    let block = session.alloc(4096).expect("there is room");
    let to = To::Participant(participant.id());
    let cycle = || {
        let descriptor = block.share(to, After::Done).expect("shared");
        drop(participant.claim(descriptor.as_bytes(), Wait::None, None).expect("claimed"));
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
    // The session's thread may hold a lock at the very moment: that waits in the kernel, and does not come three times.
    for _ in 0..3 {
        match (calls("10000"), calls("20000")) {
            (Ok(once), Ok(twice)) => {
                println!("stops at system calls: {once} in 10,000 cycles, {twice} in 20,000");
                if once == twice {
                    return ExitCode::SUCCESS;
                }
            }
            (once, twice) => eprintln!("instructions: the calls cannot be counted: {once:?}, {twice:?}"),
        }
    }
    ExitCode::FAILURE
}

fn case(name: &str, burden: u64) -> Result<Command, String> {
    let mut command = Command::new(std::env::current_exe().map_err(|e| e.to_string())?);
    command.args(["--case", name, "--burden", &burden.to_string()]);
    // Which copy loop the C library takes depends on the processor: the plainest is the same everywhere.
    command.env("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX2,-AVX,-ERMS,-FSRM");
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

//! The same scripts on this allocator and on others from crates.io: `cargo bench --profile dist -p
//! gpu-ipc-allocators --bench scripts`.
//!
//! | script | what it does |
//! |---|---|
//! | pairs | N live chunks of log-uniform sizes from 256 B to 1 MiB, then random pairs of one free and one alloc |
//! | replay | a log of a training loop (made here, always the same), read from CSV and done again |
//! | bm_alloc_and_free | TensorFlow's: one of 4 KiB, and back; the figure is for the two |
//! | bm_alloc_batch_then_free | TensorFlow's: 1,000 of 256 B to 32 KiB, then all back; for each one of them |
//! | bm_allocation_delayed | TensorFlow's: each goes back after 100 more; for each one of them |
//! | threads | one, two and four do pairs, each with N live chunks of its own, on one allocator |
//!
//! Each figure is the least and the median over batches of 1,000 pairs (of those of the first
//! script, the second half), or over whole replays. Waste is what the highest byte in use was,
//! beyond what was asked for at the peak: all start from one region without end, and all do the
//! same pairs.
//!
//! `Bfc` is measured through its public calls, with its lock, its statistics and its look-up by
//! address. The others are measured twice: as they come, which is for one thread, with nothing
//! counted and chunks given back by what the allocation returned; and, as 'same job', behind a
//! mutex, with a map from addresses to chunks and the same counts. 'Nothing, same job' is what
//! mutex, map and counts take around an allocator that does nothing.
//!
//! Prints each figure as it comes, and in the end the tables of `docs/ALLOCATORS.md`: medians, or
//! the least with `--least`, which is nearer to the truth on a machine that others use too.
//!
//! Pass `--quick` for fewer rounds, `--ours` to leave the others out, `--live N` for pairs of one
//! size alone, `--live 0` for everything but pairs, `--threads` for threads alone, 1,000 live each,
//! or `--live N`.

mod subjects;
mod table;

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use allocators::{Log, Request, Step, Trace};
use subjects::{ByThread, Common, Nothing, Offset, Ours, Range, SameJob, Subject};
use table::{Column, ROWS, Shown};

const BATCH: usize = 1000;
/// A fixed sequence: xorshift.
struct Sequence(u64);

impl Sequence {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Log-uniform from 256 B to 1 MiB.
    fn size(&mut self) -> u64 {
        let part = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        (256.0 * 4096f64.powf(part)) as u64
    }
}

/// What a script measured.
#[derive(Clone, Copy)]
pub struct Figures {
    least: f64,
    median: f64,
    waste: Option<f64>,
}

impl Figures {
    fn of(mut nanos: Vec<f64>, waste: Option<f64>) -> Figures {
        nanos.sort_by(f64::total_cmp);
        Figures {
            least: nanos[0],
            median: nanos[nanos.len() / 2],
            waste,
        }
    }
}

/// Shows a figure as soon as it is known.
fn report(script: &str, row: usize, figures: Figures) -> Option<Figures> {
    let Figures {
        least,
        median,
        waste,
    } = figures;
    let waste = waste.map_or(String::new(), |waste| {
        format!("   waste {:>5.1} %", 100.0 * waste)
    });
    eprintln!(
        "{script:<24} {:<36} {least:>7.1} ns, median {median:>7.1} ns{waste}",
        ROWS[row]
    );
    Some(figures)
}

/// What is done with each allocator.
trait Script {
    fn name(&self) -> String;
    fn run<S: Subject>(&self, make: impl Fn() -> S) -> Figures;
}

struct Pairs {
    live: usize,
    batches: usize,
}

impl Script for Pairs {
    fn name(&self) -> String {
        format!("pairs, {}", self.live)
    }

    fn run<S: Subject>(&self, make: impl Fn() -> S) -> Figures {
        let (mut subject, live) = (make(), self.live);
        let mut random = Sequence(0x9e37_79b9_7f4a_7c15);
        let sizes: Vec<u64> = (0..live).map(|_| random.size()).collect();
        let mut asked: u64 = sizes.iter().sum();
        let mut held_sizes = sizes.clone();
        let mut held: Vec<Option<S::Chunk>> = sizes
            .iter()
            .map(|&bytes| Some(subject.alloc(bytes)))
            .collect();
        let mut highest = held.iter().flatten().map(S::end).max().unwrap_or(0);
        let mut most_asked = asked;
        let mut nanos = Vec::with_capacity(self.batches);
        for _ in 0..self.batches {
            let plan: Vec<(usize, u64)> = (0..BATCH)
                .map(|_| ((random.next() % live as u64) as usize, random.size()))
                .collect();
            let start = Instant::now();
            for &(at, bytes) in &plan {
                if let Some(chunk) = held[at].take() {
                    subject.free(chunk);
                }
                held[at] = Some(black_box(subject.alloc(bytes)));
            }
            nanos.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
            for &(at, bytes) in &plan {
                asked = asked - held_sizes[at] + bytes;
                held_sizes[at] = bytes;
                most_asked = most_asked.max(asked);
                highest = highest.max(held[at].as_ref().map_or(0, S::end));
            }
        }
        held.into_iter()
            .flatten()
            .for_each(|chunk| subject.free(chunk));
        // A heap that was just filled has hardly a hole: the first half makes them.
        let nanos = nanos.split_off(self.batches / 2);
        // Where a batch replaces every chunk many times, the highest byte was mostly another's than
        // what is held behind it.
        let waste = (live >= BATCH).then(|| highest as f64 / most_asked as f64 - 1.0);
        Figures::of(nanos, waste)
    }
}

struct AllocAndFree {
    batches: usize,
}

impl Script for AllocAndFree {
    fn name(&self) -> String {
        "bm_alloc_and_free".into()
    }

    fn run<S: Subject>(&self, make: impl Fn() -> S) -> Figures {
        let mut subject = make();
        let batch = |_| {
            let start = Instant::now();
            for _ in 0..BATCH {
                let chunk = black_box(subject.alloc(4096));
                subject.free(chunk);
            }
            start.elapsed().as_nanos() as f64 / BATCH as f64
        };
        Figures::of((0..self.batches).map(batch).collect(), None)
    }
}

struct BatchThenFree {
    batches: usize,
}

impl Script for BatchThenFree {
    fn name(&self) -> String {
        "bm_alloc_batch_then_free".into()
    }

    fn run<S: Subject>(&self, make: impl Fn() -> S) -> Figures {
        let mut subject = make();
        let mut held = Vec::with_capacity(BATCH);
        let batch = |_| {
            let start = Instant::now();
            held.extend((0..BATCH).map(|at| subject.alloc(256 << (at % 8))));
            held.drain(..).for_each(|chunk| subject.free(chunk));
            start.elapsed().as_nanos() as f64 / BATCH as f64
        };
        Figures::of((0..self.batches).map(batch).collect(), None)
    }
}

struct Delayed {
    batches: usize,
}

impl Script for Delayed {
    fn name(&self) -> String {
        "bm_allocation_delayed".into()
    }

    fn run<S: Subject>(&self, make: impl Fn() -> S) -> Figures {
        const SIZES: [u64; 6] = [256, 4096, 16_384, 524_288, 512, 1_048_576];
        let mut subject = make();
        let mut held: Vec<Option<S::Chunk>> = (0..100).map(|_| None).collect();
        let mut at = 0;
        let batch = |_| {
            let start = Instant::now();
            for _ in 0..BATCH {
                at += 1;
                if let Some(chunk) = held[at % 100].take() {
                    subject.free(chunk);
                }
                held[at % 100] = Some(subject.alloc(SIZES[at % 6]));
            }
            start.elapsed().as_nanos() as f64 / BATCH as f64
        };
        let nanos = (0..self.batches).map(batch).collect();
        held.into_iter()
            .flatten()
            .for_each(|chunk| subject.free(chunk));
        Figures::of(nanos, None)
    }
}

/// A training loop as a log: weights that stay, activations that come and go in reverse, buffers of
/// odd sizes.
fn training_log() -> String {
    let log = Log::new(Ours::new().0, Vec::new());
    let take = |bytes: u64| {
        allocators::Allocator::alloc(&log, Request::new(bytes))
            .expect("room")
            .address
    };
    let give = |address: u64| allocators::Allocator::free(&log, address).expect("in use");
    let mut random = Sequence(7);
    let layers: Vec<u64> = (0..48).map(|at| 1 << (18 + at % 5)).collect();
    let weights: Vec<u64> = layers
        .iter()
        .flat_map(|&bytes| [take(bytes), take(bytes), take(2 * bytes)])
        .collect();
    for step in 0..60 {
        let batch = 1 + step % 3;
        let mut activations = Vec::new();
        for &bytes in &layers {
            let scratch: Vec<u64> = (0..6).map(|_| take(random.size())).collect();
            activations.push(take(batch * bytes + 700));
            scratch.into_iter().for_each(give);
        }
        while let Some(activation) = activations.pop() {
            let gradients = [take(random.size()), take(random.size())];
            give(activation);
            gradients.into_iter().for_each(give);
        }
    }
    weights.into_iter().for_each(give);
    String::from_utf8(log.finish().expect("a buffer takes everything")).expect("text")
}

struct Replay<'a> {
    trace: &'a Trace,
    rounds: usize,
}

impl Script for Replay<'_> {
    fn name(&self) -> String {
        format!("replay, {} steps", self.trace.steps().len())
    }

    fn run<S: Subject>(&self, make: impl Fn() -> S) -> Figures {
        let steps = self.trace.steps();
        let mut nanos = Vec::with_capacity(self.rounds);
        for _ in 0..self.rounds {
            let mut subject = make();
            let mut held: Vec<Option<S::Chunk>> = Vec::with_capacity(steps.len());
            let start = Instant::now();
            for step in steps {
                match *step {
                    Step::Alloc { bytes, .. } => held.push(Some(subject.alloc(bytes))),
                    Step::Free { slot } => {
                        if let Some(chunk) = held[slot as usize].take() {
                            subject.free(chunk);
                        }
                    }
                    _ => {}
                }
            }
            nanos.push(start.elapsed().as_nanos() as f64 / steps.len() as f64);
        }
        Figures::of(nanos, Some(waste_of(&mut make(), steps)))
    }
}

fn waste_of<S: Subject>(subject: &mut S, steps: &[Step]) -> f64 {
    let (mut asked, mut most_asked, mut highest) = (0u64, 0u64, 0u64);
    let mut held: HashMap<u32, (S::Chunk, u64)> = HashMap::new();
    for step in steps {
        match *step {
            Step::Alloc { slot, bytes, .. } => {
                let chunk = subject.alloc(bytes);
                highest = highest.max(S::end(&chunk));
                asked += bytes;
                most_asked = most_asked.max(asked);
                held.insert(slot, (chunk, bytes));
            }
            Step::Free { slot } => {
                if let Some((chunk, bytes)) = held.remove(&slot) {
                    subject.free(chunk);
                    asked -= bytes;
                }
            }
            _ => {}
        }
    }
    highest as f64 / most_asked as f64 - 1.0
}

/// Some threads on one allocator, in rounds that all begin together; the figure is the time of the
/// thread that takes longest, for each of its pairs. It has the waits of every thread in it, which
/// a median over short batches would hide.
fn threads(common: &dyn Common, threads: u64, live: usize, batches: usize) -> Figures {
    /// Batches of a round.
    const ROUND: usize = 10;
    let barrier = Barrier::new(threads as usize);
    let work = |thread: u64| {
        let mut random = Sequence(3 + 2 * thread);
        let mut held: Vec<u64> = (0..live).map(|_| common.take(random.size())).collect();
        let mut nanos = Vec::with_capacity(batches / ROUND);
        for _ in 0..batches / ROUND {
            let plan: Vec<(usize, u64)> = (0..ROUND * BATCH)
                .map(|_| ((random.next() % live as u64) as usize, random.size()))
                .collect();
            barrier.wait();
            let start = Instant::now();
            for &(at, bytes) in &plan {
                common.give(held[at]);
                held[at] = common.take(bytes);
            }
            nanos.push(start.elapsed().as_nanos() as f64 / plan.len() as f64);
        }
        held.into_iter().for_each(|address| common.give(address));
        nanos
    };
    let nanos = std::thread::scope(|scope| {
        let work = &work;
        let others: Vec<_> = (1..threads)
            .map(|thread| scope.spawn(move || work(thread)))
            .collect();
        let mut slowest = work(0);
        for other in others {
            let nanos = other.join().expect("no panic");
            slowest
                .iter_mut()
                .zip(nanos)
                .for_each(|(slowest, nanos)| *slowest = slowest.max(nanos));
        }
        slowest
    });
    Figures::of(nanos, None)
}

/// Whom a script is run with.
#[derive(Clone, Copy)]
struct Field {
    only_ours: bool,
    /// The chunks that one has to be told of before.
    live: usize,
}

fn compare(script: &impl Script, field: Field) -> Column {
    let Field { only_ours, live } = field;
    let name = script.name();
    let report = |row, figures| report(&name, row, figures);
    let mut column: Column = Default::default();
    column[0] = report(0, script.run(Ours::new));
    column[1] = report(1, script.run(Ours::slack));
    column[2] = report(2, script.run(Ours::cutting));
    column[3] = report(3, script.run(ByThread::new));
    if only_ours {
        return column;
    }
    column[4] = report(4, script.run(|| SameJob::new(Offset::new(live))));
    let nothing = script.run(|| SameJob::new(Nothing::new()));
    column[6] = report(
        6,
        Figures {
            waste: None,
            ..nothing
        },
    );
    column[7] = report(7, script.run(|| Offset::new(live)));
    // Its list is searched from end to end.
    if live <= 10_000 {
        column[5] = report(5, script.run(|| SameJob::new(Range::new())));
        column[8] = report(8, script.run(Range::new));
    }
    column
}

fn compare_threads(count: u64, batches: usize, field: Field) -> Column {
    let Field { only_ours, live } = field;
    let name = format!("threads, {count}, {live} live");
    let report = |row, figures| report(&name, row, figures);
    let mut column: Column = Default::default();
    let run = |common: &dyn Common| threads(common, count, live, batches);
    column[0] = report(0, run(&Ours::new()));
    column[3] = report(3, run(&ByThread::new()));
    if !only_ours {
        column[4] = report(
            4,
            run(&SameJob::new(Offset::new(2 * live * count as usize))),
        );
        if live <= 1000 {
            column[5] = report(5, run(&SameJob::new(Range::new())));
        }
    }
    column
}

/// Writes a number as the documents do.
fn grouped(number: usize) -> String {
    match number {
        0..1000 => number.to_string(),
        _ => format!("{},{:03}", grouped(number / 1000), number % 1000),
    }
}

fn main() {
    let is_given = |wanted: &str| std::env::args().any(|argument| argument == wanted);
    let (quick, only_ours) = (is_given("--quick"), is_given("--ours"));
    let shown = if is_given("--least") {
        Shown::Least
    } else {
        Shown::Median
    };
    let mut arguments = std::env::args().skip_while(|argument| argument != "--live");
    let only_live: Option<usize> = arguments.nth(1).and_then(|live| live.parse().ok());
    let batches = if quick { 50 } else { 500 };
    let machine = table::machine();
    let mut pairs = Vec::new();
    let only_threads = is_given("--threads");
    for live in [10, 1_000, 10_000, 100_000, 1_000_000] {
        if !only_threads && only_live.is_none_or(|only| only == live) {
            let live_too = if pairs.is_empty() { " live" } else { "" };
            pairs.push((
                grouped(live) + live_too,
                compare(&Pairs { live, batches }, Field { only_ours, live }),
            ));
        }
    }
    let mut others = Vec::new();
    if !only_threads && only_live.is_none_or(|only| only == 0) {
        let field = Field {
            only_ours,
            live: 4000,
        };
        let trace: Trace = training_log().parse().expect("a log of our own");
        others = vec![
            (
                "(b) `AllocAndFree`".to_owned(),
                compare(&AllocAndFree { batches }, field),
            ),
            (
                "(b) `AllocBatchThenFree`, 1,000".to_owned(),
                compare(&BatchThenFree { batches }, field),
            ),
            (
                "(b) `AllocationDelayed`, 100".to_owned(),
                compare(&Delayed { batches }, field),
            ),
            (
                "(d) replay, each step".to_owned(),
                compare(
                    &Replay {
                        trace: &trace,
                        rounds: batches / 10,
                    },
                    field,
                ),
            ),
        ];
    }
    let mut beside = Vec::new();
    if only_threads || only_live.is_none_or(|only| only == 0) {
        let heading = |count| {
            if count == 1 {
                "one thread".to_owned()
            } else {
                format!("{count} threads")
            }
        };
        let field = Field {
            only_ours,
            live: only_live.filter(|&live| live > 0).unwrap_or(1000),
        };
        beside = [1, 2, 4]
            .map(|count| (heading(count), compare_threads(count, batches, field)))
            .into();
    }
    let which = match shown {
        Shown::Median => "Medians",
        Shown::Least => "The least",
    };
    println!("{which} on {machine}.");
    for (corner, columns) in [
        ("(a) pairs: time, waste", pairs),
        ("", others),
        ("(c) threads on one allocator", beside),
    ] {
        if !columns.is_empty() {
            println!("\n{}", table::markdown(corner, &columns, shown));
        }
    }
}

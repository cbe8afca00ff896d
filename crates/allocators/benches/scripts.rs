//! The same scripts on this allocator and on others from crates.io: `cargo bench -p gpu-ipc-allocators --bench scripts`.
//!
//! | script | what it does |
//! |---|---|
//! | pairs | N live chunks of log-uniform sizes from 256 B to 1 MiB, then random pairs of one free and one alloc |
//! | replay | a log of a training loop (made here, always the same), read from CSV and done again |
//!
//! Each figure is the least and the median over batches of 1,000 pairs, or over whole replays. Waste is what the
//! highest byte in use was, beyond what was asked for at the peak: all start from one region without end, and all do
//! the same pairs.
//!
//! `Bfc` is measured through its public calls, with its lock, its statistics and its look-up by address. The others are
//! measured twice: as they come, which is for one thread, with nothing counted and chunks given back by what the
//! allocation returned; and, as 'same job', behind a mutex, with a map from addresses to chunks and the same counts.
//!
//! Pass `--quick` for fewer rounds, `--ours` to leave the others out, `--live N` for one size alone, `--live 0` for the
//! replay alone.

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Mutex;
use std::time::Instant;

use allocators::{Bfc, BfcOptions, Growth, Log, Placed, Request, Simulated, Step, Trace};

const UNIT: u64 = 256;
const BATCH: usize = 1000;
const OFFSET_SHARED: &str = "offset-allocator, same job";
const RANGE_SHARED: &str = "range-alloc, same job";
/// Bytes that everything fits in.
const ROOM: u64 = 512 << 30;

/// What a script needs of an allocator.
trait Subject {
    type Chunk;
    fn name(&self) -> &'static str;
    fn alloc(&mut self, bytes: u64) -> Self::Chunk;
    fn free(&mut self, chunk: Self::Chunk);
    fn end(chunk: &Self::Chunk) -> u64;
}

struct Ours(Bfc<Simulated>, &'static str);

impl Ours {
    fn with(options: BfcOptions, name: &'static str) -> Ours {
        Ours(Bfc::new(options.limit(ROOM).growth(Growth::Whole), Simulated::new()), name)
    }

    /// As it comes: with slack below an eighth of the request.
    fn new() -> Ours {
        Ours::with(BfcOptions::new("bfc"), "gpu-ipc Bfc")
    }

    /// With TensorFlow's rule, which leaves slack below the size of the request.
    fn slack() -> Ours {
        Ours::with(BfcOptions::new("bfc").max_slack_share(1.0), "gpu-ipc Bfc, share 1")
    }

    /// With all slack cut off, as the others do and as the arena nearly does.
    fn cutting() -> Ours {
        Ours::with(BfcOptions::new("bfc").max_slack_share(0.0), "gpu-ipc Bfc, share 0")
    }
}

impl Subject for Ours {
    type Chunk = Placed;

    fn name(&self) -> &'static str {
        self.1
    }

    fn alloc(&mut self, bytes: u64) -> Placed {
        self.0.alloc(Request::new(bytes)).expect("room")
    }

    fn free(&mut self, chunk: Placed) {
        self.0.free(chunk.address).expect("in use");
    }

    fn end(chunk: &Placed) -> u64 {
        chunk.address + chunk.bytes - Simulated::BASE
    }
}

struct Offset(offset_allocator::Allocator<u32>);

impl Offset {
    fn new(live: usize) -> Offset {
        // Free chunks lie between live ones, and need numbers too.
        let numbers = (live as u32 + 16) * 3;
        Offset(offset_allocator::Allocator::with_max_allocs((ROOM / UNIT) as u32, numbers))
    }
}

impl Subject for Offset {
    type Chunk = (offset_allocator::Allocation<u32>, u32);

    fn name(&self) -> &'static str {
        "offset-allocator"
    }

    fn alloc(&mut self, bytes: u64) -> Self::Chunk {
        let units = bytes.div_ceil(UNIT) as u32;
        (self.0.allocate(units).expect("room"), units)
    }

    fn free(&mut self, (chunk, _): Self::Chunk) {
        self.0.free(chunk);
    }

    fn end(&(chunk, units): &Self::Chunk) -> u64 {
        (u64::from(chunk.offset) + u64::from(units)) * UNIT
    }
}

struct Range(range_alloc::RangeAllocator<u64>);

impl Range {
    fn new() -> Range {
        Range(range_alloc::RangeAllocator::new(0..ROOM / UNIT))
    }
}

impl Subject for Range {
    type Chunk = std::ops::Range<u64>;

    fn name(&self) -> &'static str {
        "range-alloc"
    }

    fn alloc(&mut self, bytes: u64) -> Self::Chunk {
        self.0.allocate_range(bytes.div_ceil(UNIT)).expect("room")
    }

    fn free(&mut self, chunk: Self::Chunk) {
        self.0.free_range(chunk);
    }

    fn end(chunk: &Self::Chunk) -> u64 {
        chunk.end * UNIT
    }
}

/// What an allocator of a process does around another: a lock, chunks found by their address, and counts.
struct SameJob<S: Subject> {
    shared: Mutex<Shared<S>>,
    name: &'static str,
}

struct Shared<S: Subject> {
    subject: S,
    chunks: HashMap<u64, (S::Chunk, u64)>,
    allocs: u64,
    in_use: u64,
    peak: u64,
    largest: u64,
}

impl<S: Subject> SameJob<S> {
    fn new(subject: S, name: &'static str) -> SameJob<S> {
        let shared = Shared { subject, chunks: HashMap::new(), allocs: 0, in_use: 0, peak: 0, largest: 0 };
        SameJob { shared: Mutex::new(shared), name }
    }
}

impl<S: Subject> Subject for SameJob<S> {
    /// The address and the bytes.
    type Chunk = (u64, u64);

    fn name(&self) -> &'static str {
        self.name
    }

    fn alloc(&mut self, bytes: u64) -> (u64, u64) {
        let mut guard = self.shared.lock().expect("no panic");
        let shared = &mut *guard;
        let chunk = shared.subject.alloc(bytes);
        let rounded = bytes.next_multiple_of(UNIT);
        let address = S::end(&chunk) - rounded;
        shared.chunks.insert(address, (chunk, rounded));
        shared.allocs += 1;
        shared.in_use += rounded;
        shared.peak = shared.peak.max(shared.in_use);
        shared.largest = shared.largest.max(rounded);
        (address, rounded)
    }

    fn free(&mut self, (address, _): (u64, u64)) {
        let mut guard = self.shared.lock().expect("no panic");
        let shared = &mut *guard;
        let (chunk, bytes) = shared.chunks.remove(&address).expect("in use");
        shared.subject.free(chunk);
        shared.in_use -= bytes;
    }

    fn end(&(address, bytes): &(u64, u64)) -> u64 {
        address + bytes
    }
}

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
struct Figures {
    least: f64,
    median: f64,
    waste: f64,
}

impl Figures {
    fn of(mut nanos: Vec<f64>, waste: f64) -> Figures {
        nanos.sort_by(f64::total_cmp);
        Figures { least: nanos[0], median: nanos[nanos.len() / 2], waste }
    }
}

fn report(script: &str, name: &str, figures: &Figures) {
    let Figures { least, median, waste } = figures;
    println!("{script:<19} {name:<27} {least:>7.1} ns, median {median:>7.1} ns   waste {:>5.1} %", 100.0 * waste);
}

fn pairs<S: Subject>(subject: &mut S, live: usize, batches: usize) -> Figures {
    let mut random = Sequence(0x9e37_79b9_7f4a_7c15);
    let sizes: Vec<u64> = (0..live).map(|_| random.size()).collect();
    let mut asked: u64 = sizes.iter().sum();
    let mut held_sizes = sizes.clone();
    let mut held: Vec<Option<S::Chunk>> = sizes.iter().map(|&bytes| Some(subject.alloc(bytes))).collect();
    let mut highest = held.iter().flatten().map(S::end).max().unwrap_or(0);
    let mut most_asked = asked;
    let mut nanos = Vec::with_capacity(batches);
    for _ in 0..batches {
        let plan: Vec<(usize, u64)> =
            (0..BATCH).map(|_| ((random.next() % live as u64) as usize, random.size())).collect();
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
    held.into_iter().flatten().for_each(|chunk| subject.free(chunk));
    Figures::of(nanos, highest as f64 / most_asked as f64 - 1.0)
}

/// A training loop as a log: weights that stay, activations that come and go in reverse, buffers of odd sizes.
fn training_log() -> String {
    let log = Log::new(Ours::new().0, Vec::new());
    let take = |bytes: u64| allocators::Allocator::alloc(&log, Request::new(bytes)).expect("room").address;
    let give = |address: u64| allocators::Allocator::free(&log, address).expect("in use");
    let mut random = Sequence(7);
    let layers: Vec<u64> = (0..48).map(|at| 1 << (18 + at % 5)).collect();
    let weights: Vec<u64> = layers.iter().flat_map(|&bytes| [take(bytes), take(bytes), take(2 * bytes)]).collect();
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

fn replay<S: Subject>(make: impl Fn() -> S, trace: &Trace, rounds: usize) -> Figures {
    let steps = trace.steps();
    let mut nanos = Vec::with_capacity(rounds);
    let mut waste = 0.0;
    for _ in 0..rounds {
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
        waste = waste_of(&mut make(), steps);
    }
    Figures::of(nanos, waste)
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

fn main() {
    let quick = std::env::args().any(|argument| argument == "--quick");
    let only_ours = std::env::args().any(|argument| argument == "--ours");
    let mut arguments = std::env::args().skip_while(|argument| argument != "--live");
    let only_live: Option<usize> = arguments.nth(1).and_then(|live| live.parse().ok());
    let batches = if quick { 50 } else { 500 };
    for live in [1_000, 10_000, 100_000, 1_000_000] {
        if only_live.is_some_and(|only| only != live) {
            continue;
        }
        let script = format!("pairs, {live}");
        let mut ours = Ours::new();
        report(&script, ours.name(), &pairs(&mut ours, live, batches));
        let mut slack = Ours::slack();
        report(&script, slack.name(), &pairs(&mut slack, live, batches));
        let mut cutting = Ours::cutting();
        report(&script, cutting.name(), &pairs(&mut cutting, live, batches));
        if only_ours {
            continue;
        }
        let mut offset = Offset::new(live);
        report(&script, offset.name(), &pairs(&mut offset, live, batches));
        let mut shared = SameJob::new(Offset::new(live), OFFSET_SHARED);
        report(&script, shared.name(), &pairs(&mut shared, live, batches));
        // Its lists are searched from end to end.
        if live <= 10_000 {
            let mut range = Range::new();
            report(&script, range.name(), &pairs(&mut range, live, batches));
            let mut shared = SameJob::new(Range::new(), RANGE_SHARED);
            report(&script, shared.name(), &pairs(&mut shared, live, batches));
        }
    }
    let trace: Trace = training_log().parse().expect("a log of our own");
    let script = format!("replay, {} steps", trace.steps().len());
    let rounds = if quick { 5 } else { 50 };
    if only_live.is_some_and(|only| only > 0) {
        return;
    }
    report(&script, "gpu-ipc Bfc", &replay(Ours::new, &trace, rounds));
    report(&script, "gpu-ipc Bfc, share 1", &replay(Ours::slack, &trace, rounds));
    report(&script, "gpu-ipc Bfc, share 0", &replay(Ours::cutting, &trace, rounds));
    if only_ours {
        return;
    }
    report(&script, "offset-allocator", &replay(|| Offset::new(2000), &trace, rounds));
    report(&script, OFFSET_SHARED, &replay(|| SameJob::new(Offset::new(2000), OFFSET_SHARED), &trace, rounds));
    report(&script, "range-alloc", &replay(Range::new, &trace, rounds));
    report(&script, RANGE_SHARED, &replay(|| SameJob::new(Range::new(), RANGE_SHARED), &trace, rounds));
}

//! Rows of the protocol alone: grant, claim, release and retire in one process, without work on a
//! GPU.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use gpu_ipc::backend::thread;
use gpu_ipc::{After, Participant, ReceivedBlock, SentBlock, Session, To, Wait};

use super::baseline::Baseline;
use super::fixture::Stage;
use super::row::{Goal, Row};
use super::sample::{Figures, Pairs, time};
use crate::failure::{Failure, Result};

/// Calls in one sample.
const CALLS: usize = 500;
/// Leases of one thread that a collect retires: one that every lease paid for would be the threads'
/// common bottleneck.
const RETIRED: usize = 64;
/// Threads that the goal of many producers speaks of.
const PRODUCERS: usize = 8;

/// Leases in one process.
#[derive(Debug)]
pub struct Pair {
    pub session: Session,
    participant: Participant,
}

impl Pair {
    /// Opens a session and joins it.
    pub fn new(stage: &Stage) -> Result<Pair> {
        let (session, participant) = stage.pair()?;
        Ok(Pair {
            session,
            participant,
        })
    }

    /// Allocates a small block.
    pub fn alloc(&self) -> Result<SentBlock> {
        self.session.alloc(256).map_err(Failure::from)
    }

    /// Shares a block and claims it.
    pub fn lease(&self, block: &SentBlock) -> Result<ReceivedBlock> {
        let to = To::Participant(self.participant.id());
        let descriptor = block.share(to, After::Done)?;
        Ok(self
            .participant
            .claim(descriptor.as_bytes(), Wait::None, None)?)
    }

    fn cycle(&self, block: &SentBlock) -> Result<()> {
        drop(self.lease(block)?);
        black_box(self.session.collect());
        Ok(())
    }

    /// Takes it down.
    pub fn end(self, stage: &Stage) -> Result<()> {
        drop(self.participant);
        stage.end(self.session, [])
    }
}

/// The four steps of a slot and nothing else.
fn bare_slot(word: &AtomicU64) -> Result<()> {
    let granted = word.load(Ordering::Relaxed).wrapping_add(1);
    word.store(granted, Ordering::Release);
    let claimed = word.compare_exchange(granted, granted + 1, Ordering::Acquire, Ordering::Relaxed);
    word.store(black_box(claimed.unwrap_or(0)) + 2, Ordering::Release);
    word.swap(granted + 3, Ordering::AcqRel);
    Ok(())
}

/// A lease's whole life.
pub fn protocol(stage: &Stage) -> Result<Vec<Row>> {
    let pair = Pair::new(stage)?;
    let block = pair.alloc()?;
    let word = AtomicU64::new(0);
    let mut pairs = Pairs::new(CALLS);
    pair.cycle(&block)?;
    for _ in 0..stage.choose(400, 20) {
        pairs.sample(|| pair.cycle(&block), || bare_slot(&word))?;
    }
    let mut rows = steps(stage, &pair, &block)?;
    drop(block);
    pair.end(stage)?;
    let mut baseline = Baseline::new();
    let mut other = Vec::new();
    for _ in 0..stage.choose(100, 5) {
        let mut cycle = || {
            let sent = baseline.share()?;
            baseline.release(sent)?;
            baseline.drop_sent(sent);
            Ok(())
        };
        other.push(time(50, &mut cycle)?);
    }
    let what = "grant, claim, release and retire, one process, nothing queued";
    let row = Row::new("protocol", what, "store, compare and swap, store, swap");
    rows.insert(
        0,
        row.measured(pairs)
            .baseline(Figures::of(other, 50))
            .goal(Goal::AtMost(100.0)),
    );
    Ok(rows)
}

/// The four steps of a lease one by one, each for as many leases as a group of slots has.
fn steps(stage: &Stage, pair: &Pair, block: &SentBlock) -> Result<Vec<Row>> {
    const LEASES: usize = 64;
    let to = To::Participant(pair.participant.id());
    let word = AtomicU64::new(0);
    let mut all: [Pairs; 4] = std::array::from_fn(|_| Pairs::new(LEASES));
    for round in 0..=stage.choose(400, 10) {
        let (mut descriptors, mut held) = (Vec::with_capacity(LEASES), Vec::with_capacity(LEASES));
        let [grant, claim, release, retire] = &mut all;
        // The first round is not counted.
        if round == 1 {
            [&mut *grant, claim, release, retire]
                .into_iter()
                .for_each(|pairs| *pairs = Pairs::new(LEASES));
        }
        let granting = || {
            descriptors.push(block.share(to, After::Done)?);
            Ok(())
        };
        grant.sample(granting, || store(&word))?;
        let mut left = descriptors.iter();
        let claiming = || {
            let bytes = left.next().ok_or("no descriptor is left")?.as_bytes();
            held.push(
                pair.participant
                    .claim(bytes, Wait::None, None)
                    .map_err(|e| e.to_string())?,
            );
            Ok(())
        };
        claim.sample(claiming, || exchange(&word))?;
        let releasing = || {
            drop(held.pop());
            Ok(())
        };
        release.sample(releasing, || store(&word))?;
        let start = Instant::now();
        black_box(pair.session.collect());
        retire
            .ours
            .push(start.elapsed().as_nanos() as f64 / LEASES as f64);
        retire.floor.push(time(LEASES, &mut || exchange(&word))?);
    }
    let names = [
        ("grant", "share without a stream", "one store"),
        ("claim-done", "claim without a wait", "one compare and swap"),
        (
            "release",
            "drop of a block that was used on no stream",
            "one store",
        ),
        (
            "retire",
            "a collect of 64 released leases, for each",
            "one compare and swap",
        ),
    ];
    let rows = names.into_iter().zip(all);
    Ok(rows
        .map(|((name, what, floor_is), pairs)| Row::new(name, what, floor_is).measured(pairs))
        .collect())
}

fn store(word: &AtomicU64) -> Result<()> {
    word.store(black_box(0), Ordering::Release);
    Ok(())
}

fn exchange(word: &AtomicU64) -> Result<()> {
    let _ = black_box(word.compare_exchange(black_box(0), 0, Ordering::AcqRel, Ordering::Relaxed));
    Ok(())
}

fn collect(pair: &Pair) {
    black_box(pair.session.collect());
}

/// The same with many leases outstanding.
pub fn scale(stage: &Stage) -> Result<Vec<Row>> {
    let idle = Pair::new(stage)?;
    let idle_block = idle.alloc()?;
    let pair = Pair::new(stage)?;
    let block = pair.alloc()?;
    let mut held = Vec::new();
    let mut rows = Vec::new();
    let steps: &[(usize, &str)] = match stage.quick {
        true => &[(1_000, "1k")],
        false => &[
            (1_000, "1k"),
            (10_000, "10k"),
            (100_000, "100k"),
            (1_000_000, "1M"),
        ],
    };
    for &(leases, shown) in steps {
        while held.len() < leases {
            held.push(pair.lease(&block)?);
        }
        let mut pairs = Pairs::new(CALLS);
        for _ in 0..stage.choose(200, 10) {
            let ours = &mut || pair.lease(&block).map(drop);
            let floor = &mut || idle.lease(&idle_block).map(drop);
            pairs.sample_whole([ours, floor], [&|| collect(&pair), &|| collect(&idle)])?;
        }
        let what = "grant, claim, release and retire with N outstanding";
        let row =
            Row::new("leases", what, "the same with none outstanding").at(leases as u64, shown);
        rows.push(row.measured(pairs).goal(Goal::Times(1.2, 0.0)));
    }
    drop((block, idle_block));
    drop(held);
    pair.end(stage)?;
    idle.end(stage)?;
    Ok(rows)
}

/// The same with many participants connected, of which one is shared with; and a drop at the
/// producer among them.
pub fn participants(stage: &Stage) -> Result<Vec<Row>> {
    let (pair, alone) = (Pair::new(stage)?, Pair::new(stage)?);
    let mut others = Vec::new();
    let counts: &[usize] = if stage.quick { &[4] } else { &[16, 64, 256] };
    let mut rows = Vec::new();
    for &count in counts {
        while others.len() + 1 < count {
            let other = Participant::builder(stage.gpu.clone()).connect(pair.session.socket_path());
            others.push(other?);
        }
        const DROPS: usize = 64;
        let mut pairs = Pairs::new(DROPS);
        for _ in 0..stage.choose(200, 10) {
            let blocks = |pair: &Pair| {
                (0..DROPS)
                    .map(|_| pair.alloc())
                    .collect::<Result<Vec<_>, _>>()
            };
            let (mut some, mut none) = (blocks(&pair)?, blocks(&alone)?);
            let life = |pair: &Pair, blocks: &mut Vec<SentBlock>| {
                let block = blocks.pop().ok_or("no block is left")?;
                pair.lease(&block).map(drop)
            };
            let ours = &mut || life(&pair, &mut some);
            let floor = &mut || life(&alone, &mut none);
            pairs.sample_whole([ours, floor], [&|| collect(&pair), &|| collect(&alone)])?;
        }
        let what = "a block's lease, release, drop and return with N participants connected";
        let row = Row::new("participants", what, "the same with one")
            .at(count as u64, &count.to_string());
        rows.push(row.measured(pairs).goal(Goal::Times(1.2, 0.0)));
    }
    drop(others);
    pair.end(stage)?;
    alone.end(stage)?;
    Ok(rows)
}

/// Many threads of one producer, each with a block of its own.
pub fn producers(stage: &Stage) -> Result<Vec<Row>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.min(PRODUCERS);
    let pair = Pair::new(stage)?;
    let blocks = (0..threads)
        .map(|_| pair.alloc())
        .collect::<Result<Vec<_>, _>>()?;
    let cycles = stage.choose(20_000, 500);
    let mut pairs = Pairs::new(cycles);
    for round in 0..stage.choose(21, 3) {
        let many = each_of(&pair, &blocks, cycles)?;
        let one = each_of(&pair, &blocks[..1], cycles)?;
        if round > 0 {
            pairs.ours.push(many);
            pairs.floor.push(one);
        }
    }
    drop(blocks);
    pair.end(stage)?;
    let what = "a lease's life on N threads at once, for each lease";
    let row = Row::new("producers", what, "the same with one thread")
        .at(threads as u64, &threads.to_string());
    let row = row.measured(pairs).goal(Goal::Times(0.25, 0.0));
    Ok(vec![match cores < PRODUCERS {
        true => Row { met: None, ..row }.note(format!(
            "the goal is of 8 threads, this machine runs {cores}"
        )),
        false => row,
    }])
}

/// Runs cycles on a thread for each block, and returns the nanoseconds of each cycle of all of
/// them: from the first thread's beginning to the last one's end, by their own clocks, because the
/// thread that waits for them may sleep through both.
fn each_of(pair: &Pair, blocks: &[SentBlock], cycles: usize) -> Result<f64> {
    let barrier = Barrier::new(blocks.len());
    let run = |block: &SentBlock| {
        barrier.wait();
        let begun = Instant::now();
        for cycle in 0..cycles {
            drop(pair.lease(block)?);
            if cycle % RETIRED == 0 {
                black_box(pair.session.collect());
            }
        }
        Ok::<_, Failure>((begun, Instant::now()))
    };
    let ran = std::thread::scope(|scope| {
        let running: Vec<_> = blocks
            .iter()
            .map(|block| {
                // The others wait at the barrier for each of them.
                thread::start_scoped(scope, "gpu-ipc-bench", || run(block)).expect("a thread")
            })
            .collect();
        let joined = running.into_iter().map(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err("a thread panicked".into()))
        });
        joined.collect::<Result<Vec<(Instant, Instant)>>>()
    })?;
    let first = ran.iter().map(|(begun, _)| *begun).min();
    let last = ran.iter().map(|(_, ended)| *ended).max();
    let nanos = first
        .zip(last)
        .map_or(0, |(first, last)| last.duration_since(first).as_nanos());
    Ok(nanos as f64 / (cycles * blocks.len()) as f64)
}

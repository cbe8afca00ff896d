//! Rows of the protocol alone: grant, claim, release and retire in one process, without work on a GPU.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use gpu_ipc::{After, Participant, ReceivedBlock, SentBlock, Session, To, Wait};

use super::baseline::Baseline;
use super::row::{Goal, Row};
use super::sample::{Figures, Pairs, time};
use super::stage::Stage;
use crate::device::explain;

/// Calls in one sample.
const CALLS: usize = 500;
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
    pub fn new(stage: &Stage) -> Result<Pair, String> {
        let (session, participant) = stage.pair()?;
        Ok(Pair { session, participant })
    }

    /// Allocates a small block.
    pub fn alloc(&self) -> Result<SentBlock, String> {
        self.session.alloc(256).map_err(|e| explain(&e))
    }

    /// Shares a block and claims it.
    pub fn lease(&self, block: &SentBlock) -> Result<ReceivedBlock, String> {
        let to = To::Participant(self.participant.id());
        let descriptor = block.share(to, After::Done).map_err(|e| explain(&e))?;
        self.participant.claim(descriptor.as_bytes(), Wait::None, None).map_err(|e| e.to_string())
    }

    fn cycle(&self, block: &SentBlock) -> Result<(), String> {
        drop(self.lease(block)?);
        black_box(self.session.collect());
        Ok(())
    }

    /// Takes it down.
    pub fn end(self, stage: &Stage) -> Result<(), String> {
        drop(self.participant);
        stage.end(self.session, [])
    }
}

/// The four steps of a slot and nothing else.
fn bare_slot(word: &AtomicU64) -> Result<(), String> {
    let granted = word.load(Ordering::Relaxed).wrapping_add(1);
    word.store(granted, Ordering::Release);
    let claimed = word.compare_exchange(granted, granted + 1, Ordering::Acquire, Ordering::Relaxed);
    word.store(black_box(claimed.unwrap_or(0)) + 2, Ordering::Release);
    word.swap(granted + 3, Ordering::AcqRel);
    Ok(())
}

/// A lease's whole life.
pub fn protocol(stage: &Stage) -> Result<Vec<Row>, String> {
    let pair = Pair::new(stage)?;
    let block = pair.alloc()?;
    let word = AtomicU64::new(0);
    let mut pairs = Pairs::new(CALLS);
    pair.cycle(&block)?;
    for _ in 0..stage.choose(400, 20) {
        pairs.sample(|| pair.cycle(&block), || bare_slot(&word))?;
    }
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
    Ok(vec![row.measured(pairs).baseline(Figures::of(other, 50)).goal(Goal::AtMost(100.0))])
}

/// The same with many leases outstanding.
pub fn scale(stage: &Stage) -> Result<Vec<Row>, String> {
    let idle = Pair::new(stage)?;
    let idle_block = idle.alloc()?;
    let pair = Pair::new(stage)?;
    let block = pair.alloc()?;
    let mut held = Vec::new();
    let mut rows = Vec::new();
    let steps: &[(usize, &str)] = match stage.quick {
        true => &[(1_000, "1k")],
        false => &[(1_000, "1k"), (10_000, "10k"), (100_000, "100k"), (1_000_000, "1M")],
    };
    for &(leases, shown) in steps {
        while held.len() < leases {
            held.push(pair.lease(&block)?);
        }
        let mut pairs = Pairs::new(CALLS);
        for _ in 0..stage.choose(200, 10) {
            pairs.sample(|| pair.cycle(&block), || idle.cycle(&idle_block))?;
        }
        let what = "a lease's whole life with so many outstanding";
        let row = Row::new("leases", what, "the same with none outstanding").at(leases as u64, shown);
        rows.push(row.measured(pairs).goal(Goal::Times(1.2, 0.0)));
    }
    drop((block, idle_block));
    drop(held);
    pair.end(stage)?;
    idle.end(stage)?;
    Ok(rows)
}

/// Many threads of one producer, each with a block of its own.
pub fn producers(stage: &Stage) -> Result<Vec<Row>, String> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.min(PRODUCERS);
    let pair = Pair::new(stage)?;
    let blocks = (0..threads).map(|_| pair.alloc()).collect::<Result<Vec<_>, _>>()?;
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
    let what = "a lease's whole life with many threads at it, for each lease";
    let row = Row::new("producers", what, "the same with one thread").at(threads as u64, &threads.to_string());
    let row = row.measured(pairs).goal(Goal::Times(0.25, 0.0));
    Ok(vec![match cores < PRODUCERS {
        true => Row { met: None, ..row }.note(format!("the goal is of 8 threads, this machine runs {cores}")),
        false => row,
    }])
}

/// Runs cycles on a thread for each block, and returns the nanoseconds of each cycle of all of them.
fn each_of(pair: &Pair, blocks: &[SentBlock], cycles: usize) -> Result<f64, String> {
    let barrier = Barrier::new(blocks.len() + 1);
    let run = |block: &SentBlock| {
        barrier.wait();
        let ran = (0..cycles).try_for_each(|_| {
            drop(pair.lease(block)?);
            Ok::<(), String>(())
        });
        barrier.wait();
        ran
    };
    let nanos = std::thread::scope(|scope| {
        let running: Vec<_> = blocks.iter().map(|block| scope.spawn(|| run(block))).collect();
        barrier.wait();
        let start = Instant::now();
        barrier.wait();
        let nanos = start.elapsed().as_nanos() as f64;
        let joined =
            running.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".into())));
        joined.collect::<Result<Vec<()>, String>>().map(|_| nanos)
    });
    Ok(nanos? / (cycles * blocks.len()) as f64)
}

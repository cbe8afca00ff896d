//! The rows of what a lease takes, in all processes.

use super::fixture::{PATIENCE, Stage};
use super::protocol::Pair;
use super::row::Row;
use super::sample::Figures;
use crate::bench::options::BenchMemoryOptions;
use crate::child::{self, Child};
use crate::failure::Result;
use crate::{Outcome, device};

/// Bytes that a lease cannot do without: its word in shared memory, and a pointer to its block.
const LEAST: f64 = 16.0;

/// Memory for each of many leases of one block, and of many blocks. Each in a process of its own:
/// an allocator does not give back what an earlier one took.
pub fn rows(stage: &Stage) -> Result<Vec<Row>> {
    let leases: usize = stage.choose(100_000, 5_000);
    let row = |name, what, blocks: usize| {
        let device = stage.gpu.uuid().to_string();
        let (leases_text, blocks) = (leases.to_string(), blocks.to_string());
        let args = [
            "bench-process",
            "memory",
            "--backend",
            stage.gpu.kind().name(),
            "--device",
            &device,
            "--leases",
            &leases_text,
        ];
        let mut child =
            Child::<()>::start(args.into_iter().chain(["--blocks", &blocks]), PATIENCE)?;
        let bytes: u64 = child.answer()?;
        child.wait()?;
        let row = Row::new(name, what, "a word for the slot and a pointer to the block").bytes();
        let each = bytes as f64 / leases as f64;
        Ok::<Row, String>(row.figures(Figures::of(vec![each], leases), Figures::of(vec![LEAST], 1)))
    };
    let lease = "memory of a lease, many of one block, producer and consumer together";
    let block = "memory of a lease and a block, the block's own bytes left out";
    Ok(vec![
        row("memory-lease", lease, 1)?,
        row("memory-block", block, leases)?,
    ])
}

/// Runs in a process of its own, and answers with the bytes.
pub fn run(options: &BenchMemoryOptions) -> Outcome {
    child::live(|| {
        let gpu = device::find(options.backend.kind(), &options.device)?;
        child::reply(&grown(
            &Stage::new(gpu, false)?,
            options.leases,
            options.blocks,
        )?)
    })
}

/// Returns the bytes that this many leases added. Producer and consumer are one process, whose
/// proportional set size counts their shared pages once.
fn grown(stage: &Stage, leases: usize, blocks: usize) -> Result<u64> {
    let pair = Pair::new(stage)?;
    let first = pair.alloc()?;
    drop(pair.lease(&first)?);
    // The vectors are the benchmark's own: touched before the first look.
    let mut held: Vec<Option<_>> = (0..leases).map(|_| None).collect();
    let mut sent: Vec<Option<_>> = (0..leases).map(|_| None).collect();
    let before = resident()?;
    for at in 0..leases {
        if at < blocks {
            sent[at] = Some(pair.alloc()?);
        }
        if let Some(block) = &sent[at.min(blocks - 1)] {
            held[at] = Some(pair.lease(block)?);
        }
    }
    let after = resident()?;
    drop((held, sent, first));
    pair.end(stage)?;
    Ok(after.saturating_sub(before))
}

/// The process' own memory and its part of what it shares, in bytes; without files, whose part
/// changes with every other process that has them mapped.
fn resident() -> Result<u64> {
    let path = "/proc/self/smaps_rollup";
    let text = std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?;
    let part = |name: &str| {
        let line = text
            .lines()
            .find(|line| line.starts_with(name))
            .ok_or_else(|| format!("{path} has no {name}"))?;
        let kib: Option<u64> = line
            .split_whitespace()
            .nth(1)
            .and_then(|word| word.parse().ok());
        kib.ok_or_else(|| format!("{path}: {line}"))
    };
    Ok((part("Pss_Anon:")? + part("Pss_Shmem:")?) * 1024)
}

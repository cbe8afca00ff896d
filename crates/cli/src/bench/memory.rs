//! The row of what a lease takes, in all processes.

use super::protocol::Pair;
use super::row::Row;
use super::sample::Figures;
use super::stage::Stage;

/// Bytes that a lease cannot do without: its word in shared memory, and a pointer to its block.
const LEAST: f64 = 16.0;

/// Memory for each of many leases of one block, and of many blocks.
pub fn rows(stage: &Stage) -> Result<Vec<Row>, String> {
    let leases = stage.choose(100_000, 5_000);
    let one = grown(stage, leases, 1)?;
    let each = grown(stage, leases, leases)?;
    let row = |name, what, bytes| {
        let row = Row::new(name, what, "a word for the slot and a pointer to the block").bytes();
        row.figures(Figures::of(vec![bytes], leases), Figures::of(vec![LEAST], 1))
    };
    Ok(vec![
        row("memory-lease", "memory of a lease, many of one block, producer and consumer together", one),
        row("memory-block", "memory of a lease and a block, the block's own bytes left out", each),
    ])
}

/// Returns the bytes of memory that each lease added. Producer and consumer are one process, whose proportional set size
/// counts their shared pages once.
fn grown(stage: &Stage, leases: usize, blocks: usize) -> Result<f64, String> {
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
    Ok(after.saturating_sub(before) as f64 / leases as f64)
}

/// The process' proportional set size, in bytes.
fn resident() -> Result<u64, String> {
    let path = "/proc/self/smaps_rollup";
    let text = std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?;
    let line = text.lines().find(|line| line.starts_with("Pss:")).ok_or_else(|| format!("{path} has no line Pss"))?;
    let kib: Option<u64> = line.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    Ok(kib.ok_or_else(|| format!("{path}: {line}"))? * 1024)
}

//! Rows of the allocator: a script of random pairs, and the replay of a logged trace.

use std::hint::black_box;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use gpu_ipc::allocators::{Bfc, BfcOptions, Growth, Placed, Request, Simulated, Trace};
use serde_json::json;

use super::fixture::Stage;
use super::row::{Goal, Row, digits, show};
use super::sample::Pairs;
use crate::failure::Result;
use crate::size;

/// Pairs in one sample.
const PAIRS: usize = 1000;
/// Bytes that everything fits in.
const ROOM: u64 = 512 << 30;

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

/// Random pairs of one free and one alloc among N live chunks of sizes from 256 B to 1 MiB.
pub fn pairs(stage: &Stage) -> Result<Vec<Row>> {
    let steps: &[(usize, &str, f64)] = match stage.quick {
        true => &[(1_000, "1k", 250.0)],
        false => &[
            (1_000, "1k", 250.0),
            (10_000, "10k", 250.0),
            (100_000, "100k", 400.0),
            (1_000_000, "1M", 750.0),
        ],
    };
    steps
        .iter()
        .map(|&(live, shown, goal)| pairs_of(stage, live, shown, goal))
        .collect()
}

fn pairs_of(stage: &Stage, live: usize, shown: &str, goal: f64) -> Result<Row> {
    let options = BfcOptions::new("bench").limit(ROOM).growth(Growth::Whole);
    let bfc = Bfc::new(options, Simulated::new());
    let mut random = Sequence(0x9e37_79b9_7f4a_7c15);
    let take = |bytes: u64| bfc.alloc(Request::new(bytes)).map_err(|e| e.to_string());
    let mut held: Vec<Placed> = (0..live)
        .map(|_| take(random.size()))
        .collect::<Result<_, _>>()?;
    let records = Mutex::new(vec![0u64; live]);
    let mut pairs = Pairs::new(PAIRS);
    for _ in 0..stage.choose(300, 10) {
        let plan: Vec<(usize, u64)> = (0..PAIRS)
            .map(|_| ((random.next() % live as u64) as usize, random.size()))
            .collect();
        let (mut ours, mut floor) = (plan.iter(), plan.iter());
        let ours = || {
            let &(at, bytes) = ours.next().ok_or("the plan is over")?;
            bfc.free(held[at].address).map_err(|e| e.to_string())?;
            held[at] = black_box(take(bytes)?);
            Ok(())
        };
        let floor = || {
            let &(at, bytes) = floor.next().ok_or("the plan is over")?;
            records.lock().unwrap_or_else(PoisonError::into_inner)[at] = 0;
            black_box(&mut records.lock().unwrap_or_else(PoisonError::into_inner)[at])
                .clone_from(&bytes);
            Ok(())
        };
        pairs.sample(ours, floor)?;
    }
    let what = "a free and an alloc at random, bookkeeping alone";
    let row = Row::new(
        "alloc-script",
        what,
        "a lock and a record for each of the two",
    )
    .at(live as u64, shown);
    Ok(row.measured(pairs).goal(Goal::AtMost(goal)))
}

/// What a trace took, for people or for programs.
pub fn replay(file: &Path, as_json: bool) -> Result<String> {
    let name = file.display();
    let text = std::fs::read_to_string(file).map_err(|e| format!("{name}: {e}"))?;
    let trace: Trace = text.parse().map_err(|e| format!("{name}: {e}"))?;
    let steps = trace.steps().len();
    if steps == 0 {
        return Err(format!("{name}: the trace has no steps").into());
    }
    let mut nanos = Vec::new();
    let mut last = None;
    for _ in 0..7 {
        let bfc = Bfc::new(
            BfcOptions::new("replay").limit(ROOM),
            Simulated::new().merging(),
        );
        let replayed = trace.replay(&bfc).map_err(|e| format!("{name}: {e}"))?;
        nanos.push(replayed.nanos as f64 / steps as f64);
        last = Some(replayed);
    }
    nanos.sort_by(f64::total_cmp);
    let (each, done) = (nanos[nanos.len() / 2], last.ok_or("nothing was replayed")?);
    let fragmentation = done.peak_fragmentation();
    if as_json {
        let object = json!({
            "ok": true, "trace": name.to_string(), "steps": steps, "ns_a_step": each, "replays": nanos.len(),
            "allocs": done.allocs, "frees": done.frees, "failures": done.failures, "left": done.left,
            "unknown_frees": trace.unknown_frees(), "peak_in_use": done.peak_in_use,
            "peak_reserved": done.peak_reserved, "peak_fragmentation": fragmentation,
        });
        return Ok(object.to_string());
    }
    Ok(format!(
        "{name}: {steps} steps, {} a step (median of {})\n\
         peak in use {}, reserved {}, fragmentation {} %\n\
         {} allocations, {} frees, {} for which there was no room, {} never freed, {} frees of what was not allocated",
        show(each, super::row::Unit::Nanoseconds),
        nanos.len(),
        size::show(done.peak_in_use),
        size::show(done.peak_reserved),
        digits(fragmentation * 100.0),
        done.allocs,
        done.frees,
        done.failures,
        done.left,
        trace.unknown_frees(),
    ))
}

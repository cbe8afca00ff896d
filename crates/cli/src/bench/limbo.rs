//! Rows of limbo: drops at the producer with much of it, and collects.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_ipc::{ReceivedBlock, SentBlock};

use super::baseline::{Baseline, Sent};
use super::fixture::Stage;
use super::protocol::Pair;
use super::row::{Goal, Row};
use super::sample::{Figures, Pairs, time};
use crate::failure::Result;

/// Drops in one sample.
const CALLS: usize = 64;
/// Leases that are released before a collect is timed.
const RELEASED: usize = 1000;

fn steps(stage: &Stage) -> &'static [(usize, &'static str)] {
    if stage.quick {
        &[(0, "0"), (1_000, "1k")]
    } else {
        &[(0, "0"), (1_000, "1k"), (10_000, "10k"), (100_000, "100k")]
    }
}

/// Drops at the producer of blocks that are held, with N in limbo.
pub fn drops(stage: &Stage) -> Result<Vec<Row>> {
    let (full, empty) = (Pair::new(stage)?, Pair::new(stage)?);
    let mut held: Vec<ReceivedBlock> = Vec::new();
    let mut baseline = Baseline::new();
    let mut rows = Vec::new();
    for &(limbo, shown) in steps(stage) {
        while held.len() < limbo {
            let block = full.alloc()?;
            held.push(full.lease(&block)?);
            // One by one would take the baseline seconds.
            baseline.put_into_limbo()?;
        }
        let count = AtomicU64::new(1 << 32);
        let (mut pairs, mut returns) = (Pairs::new(CALLS), Pairs::new(1));
        for _ in 0..stage.choose(200, 10) {
            let mut some = leased(&full)?;
            let mut none = leased(&empty)?;
            let ours = || {
                some.0.pop();
                Ok(())
            };
            let floor = || {
                if limbo > 0 {
                    none.0.pop();
                } else {
                    // What a drop does at least: it counts one down, and another one up.
                    black_box(count.fetch_sub(1, Ordering::AcqRel));
                    black_box(count.fetch_add(1, Ordering::AcqRel));
                }
                Ok(())
            };
            pairs.sample(ours, floor)?;
            // What the drops left to be done: the holders let go, and the blocks are given back.
            let mut back = || {
                some.1.clear();
                black_box(full.session.collect());
                Ok(())
            };
            let mut back_alone = || {
                none.1.clear();
                black_box(empty.session.collect());
                Ok(())
            };
            returns.sample(&mut back, &mut back_alone)?;
            drop((some, none));
        }
        let floor_is = if limbo > 0 {
            "the same with none in limbo"
        } else {
            "two atomic additions"
        };
        let row = Row::new(
            "limbo",
            "drop at the producer of a block that is held",
            floor_is,
        )
        .at(limbo as u64, shown);
        let other = baseline_drops(stage, &mut baseline)?;
        let row = row.measured(pairs).baseline(other);
        rows.push(match (limbo, row.ours, other) {
            (0, _, _) => row,
            (100_000, Some(ours), Some(other)) => {
                let met = ours.median * 100.0 <= other.median
                    && row.ratio.is_some_and(|ratio| ratio <= 1.2);
                row.judged("at most 1.2 x floor, and 1/100 of the baseline", Some(met))
            }
            _ => row.goal(Goal::Times(1.2, 0.0)),
        });
        // With none in limbo both are the same.
        if limbo > 0 {
            let (ours, floor) = returns.figures();
            let each =
                |figures: Option<Figures>| figures.map(|figures| figures.divided_by(CALLS as f64));
            let what = "release and return of a block in limbo, for each of 64";
            let row = Row::new("limbo-return", what, "the same with no others in limbo")
                .at(limbo as u64, shown);
            rows.push(
                row.figures(each(ours), each(floor))
                    .goal(Goal::Times(1.2, 0.0)),
            );
        }
    }
    drop(held);
    full.end(stage)?;
    empty.end(stage)?;
    Ok(rows)
}

/// Blocks that are held, and who holds them.
fn leased(pair: &Pair) -> Result<(Vec<SentBlock>, Vec<ReceivedBlock>)> {
    let blocks = (0..CALLS)
        .map(|_| pair.alloc())
        .collect::<Result<Vec<_>, _>>()?;
    let held = blocks
        .iter()
        .map(|block| pair.lease(block))
        .collect::<Result<Vec<_>, _>>()?;
    Ok((blocks, held))
}

fn baseline_drops(stage: &Stage, baseline: &mut Baseline) -> Result<Option<Figures>> {
    const DROPS: usize = 8;
    let mut samples = Vec::new();
    for _ in 0..stage.choose(20, 3) {
        let mut sent: Vec<Sent> = (0..DROPS)
            .map(|_| baseline.share())
            .collect::<Result<_, _>>()?;
        let released = sent.clone();
        let mut one = || {
            sent.pop()
                .into_iter()
                .for_each(|sent| baseline.drop_sent(sent));
            Ok(())
        };
        samples.push(time(DROPS, &mut one)?);
        released
            .into_iter()
            .try_for_each(|sent| baseline.release(sent))?;
        baseline.collect();
    }
    Ok(Figures::of(samples, DROPS))
}

/// Collects with N held and none released, and of released blocks.
pub fn collect(stage: &Stage) -> Result<Vec<Row>> {
    let (full, empty) = (Pair::new(stage)?, Pair::new(stage)?);
    let block = full.alloc()?;
    let mut held = Vec::new();
    let mut rows = Vec::new();
    for &(count, shown) in steps(stage) {
        while held.len() < count {
            held.push(full.lease(&block)?);
        }
        let word = AtomicU64::new(0);
        let mut pairs = Pairs::new(100);
        for _ in 0..stage.choose(200, 10) {
            let ours = || {
                black_box(full.session.collect());
                Ok(())
            };
            let floor = || {
                if count > 0 {
                    black_box(empty.session.collect());
                } else {
                    black_box(word.swap(0, Ordering::AcqRel));
                }
                Ok(())
            };
            pairs.sample(ours, floor)?;
        }
        let floor_is = if count > 0 {
            "the same with none held"
        } else {
            "one atomic swap"
        };
        let row = Row::new(
            "collect-held",
            "collect with N held and none released",
            floor_is,
        );
        rows.push(row.at(count as u64, shown).measured(pairs));
    }
    drop((held, block));
    full.end(stage)?;
    empty.end(stage)?;
    rows.push(released(stage)?);
    Ok(rows)
}

/// Collects of what was released: each of a block of its own, which the collect gives back.
fn released(stage: &Stage) -> Result<Row> {
    let pair = Pair::new(stage)?;
    let words: Vec<AtomicU64> = (0..RELEASED).map(|_| AtomicU64::new(0)).collect();
    let mut pairs = Pairs::new(RELEASED);
    let mut taken_by_thread = 0;
    for _ in 0..stage.choose(100, 6) {
        let mut held = Vec::with_capacity(RELEASED);
        for _ in 0..RELEASED {
            let block = pair.alloc()?;
            held.push(pair.lease(&block)?);
        }
        drop(held);
        let mut found = 0;
        let mut once = || {
            found = pair.session.collect().blocks;
            Ok(())
        };
        let nanos = time(1, &mut once)?;
        // The session's own thread collects too, and may have been first.
        if (found as usize) < RELEASED / 2 {
            taken_by_thread += 1;
            continue;
        }
        pairs.ours.push(nanos / found as f64);
        let mut floor = || {
            for word in &words {
                black_box(word.swap(1, Ordering::AcqRel));
                word.store(0, Ordering::Release);
            }
            Ok(())
        };
        pairs.floor.push(time(1, &mut floor)? / RELEASED as f64);
    }
    pair.end(stage)?;
    let what = "collect of blocks whose leases were released, for each";
    let row = Row::new(
        "collect-released",
        what,
        "an atomic swap and a store for each",
    )
    .measured(pairs);
    Ok(row.note(format!(
        "{taken_by_thread} samples left out: the session's thread was first"
    )))
}

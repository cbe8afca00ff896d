//! Rows of a lease's way: share, claim, drop, and all three together.

use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Descriptor, SentBlock, Session, To};

use super::consumer::CALLS;
use super::fixture::{Consumer, Stage, until_released};
use super::raw_calls::Naked;
use super::row::{Goal, Row};
use super::sample::{Figures, Pairs};
use super::told::Told;
use super::words::Hold;
use crate::failure::{Failure, Result};

/// Leases in one round: fewer than a release queue takes, and than a driver's queue takes.
const ROUND: usize = 64;
/// Blocks that are shared or dropped together.
const MANY: usize = 64;
/// Steps of a stretch of work, a drop after each.
const STEPS: usize = 96;
const _: () = assert!(
    MANY.is_multiple_of(CALLS) && STEPS.is_multiple_of(CALLS) && ROUND.is_multiple_of(CALLS)
);

/// Share, claim and drop, each beside its raw calls, and the sum of them.
pub fn cycle(stage: &Stage) -> Result<Vec<Row>> {
    let session = stage.session()?;
    let mut consumer = stage.consumer(&session)?;
    let (stream, block) = (stage.stream()?, alloc(&session)?);
    let to = To::Participant(consumer.id);
    let mut naked = Naked::new(&stage.gpu, &*stage.floor)?;
    let mut hold = Hold::new(&stage.gpu)?;
    let (mut share, mut claim, mut end) = (Pairs::new(CALLS), Pairs::new(CALLS), Pairs::new(CALLS));
    let rounds = stage.choose(50, 4);
    for round in 0..=rounds {
        let mut descriptors = Vec::with_capacity(ROUND);
        let mut shared = Pairs::new(CALLS);
        for _ in 0..ROUND / CALLS {
            let ours = || {
                descriptors.push(block.share(to, After::Stream(&stream))?);
                Ok(())
            };
            shared.sample(ours, || naked.write())?;
        }
        stream.synchronize()?;
        naked.settle()?;
        consumer.ask(Told::Take, &descriptors)?;
        until_released(&session, &block)?;
        // Behind a stream that is held up, so that every claim has to queue a wait.
        hold.begin();
        hold.stop(stream.raw())?;
        let descriptors = share_some(&block, to, After::Stream(&stream), ROUND)?;
        let claimed = consumer.ask(Told::Lease, &descriptors);
        hold.let_go();
        let claimed = claimed?;
        stream.synchronize()?;
        let ended: Vec<u64> = consumer.child.ask(&Told::End)?;
        until_released(&session, &block)?;
        // The first round maps the region, makes the queue and warms the rest.
        if round > 0 {
            share.add(&shared.numbers());
            claim.add(&claimed);
            end.add(&ended);
        }
    }
    drop(block);
    stage.end(session, [consumer])?;
    let aim = |row: Row| {
        if is_gpu(stage) {
            row.goal(Goal::Times(1.3, 300.0))
        } else {
            row
        }
    };
    let share = aim(Row::new("share", "share after a stream", "one stream write").measured(share));
    let claim = aim(Row::new(
        "claim",
        "claim of a mapped block, with a queued wait",
        "one stream wait",
    )
    .measured(claim));
    let what = "drop at the consumer, of a block that was used on a stream";
    let end = aim(Row::new(
        "drop",
        what,
        "event record, stream wait, a batch of 2 writes",
    )
    .measured(end));
    let sum = |of: fn(&Row) -> Option<Figures>| {
        let parts = [of(&share)?, of(&claim)?, of(&end)?];
        let add = |part: fn(&Figures) -> f64| parts.iter().map(part).sum();
        Some(Figures {
            median: add(|f| f.median),
            p99: add(|f| f.p99),
            ..parts[0]
        })
    };
    let cycle = Row::new(
        "cycle",
        "share, claim and drop, summed up",
        "their raw calls, summed up",
    )
    .figures(sum(|row| row.ours), sum(|row| row.floor));
    let cycle = if is_gpu(stage) {
        cycle.goal(Goal::Times(1.35, 0.0))
    } else {
        cycle
    };
    Ok(vec![share, claim, end, cycle])
}

/// Many blocks shared at once, for each.
pub fn share_many(stage: &Stage) -> Result<Vec<Row>> {
    let session = stage.session()?;
    let mut consumer = stage.consumer(&session)?;
    let stream = stage.stream()?;
    let blocks = (0..MANY)
        .map(|_| alloc(&session))
        .collect::<Result<Vec<_>, _>>()?;
    let grants: Vec<(&SentBlock, To)> = blocks
        .iter()
        .map(|block| (block, To::Participant(consumer.id)))
        .collect();
    let mut naked = Naked::new(&stage.gpu, &*stage.floor)?;
    let mut pairs = Pairs::new(1);
    for _ in 0..stage.choose(300, 10) {
        let mut descriptors = Vec::new();
        let ours = || {
            let options = ShareOptions::default();
            descriptors = session.share_many(&grants, After::Stream(&stream), &options)?;
            Ok(())
        };
        pairs.sample(ours, || naked.write())?;
        stream.synchronize()?;
        naked.settle()?;
        consumer.ask(Told::Take, &descriptors)?;
        until_released(&session, &blocks[MANY - 1])?;
    }
    drop(grants);
    drop(blocks);
    stage.end(session, [consumer])?;
    let (ours, floor) = pairs.figures();
    let each = |figures: Option<Figures>| figures.map(|figures| figures.divided_by(MANY as f64));
    let row = Row::new(
        "share-many",
        "share_many of 64 blocks, for each",
        "one stream write, for each of 64",
    );
    Ok(vec![
        row.figures(each(ours), each(floor))
            .goal(Goal::Beyond(150.0)),
    ])
}

/// Many blocks dropped at once, for each.
pub fn drop_many(stage: &Stage) -> Result<Vec<Row>> {
    let session = stage.session()?;
    let mut consumer = stage.consumer(&session)?;
    let block = alloc(&session)?;
    let mut pairs = Pairs::new(1);
    for _ in 0..stage.choose(100, 6) {
        lease(&mut consumer, &block, MANY)?;
        pairs.add(&consumer.child.ask::<Vec<u64>>(&Told::EndMany)?);
        until_released(&session, &block)?;
    }
    drop(block);
    stage.end(session, [consumer])?;
    let (ours, floor) = pairs.figures();
    let each = |figures: Option<Figures>| figures.map(|figures| figures.divided_by(MANY as f64));
    let floor_is = "event record, stream wait, a batch of 128 writes, for each of 64";
    let row = Row::new(
        "drop-many",
        "drop_many of 64 blocks at the consumer, for each",
        floor_is,
    )
    .figures(each(ours), each(floor));
    Ok(vec![if is_gpu(stage) {
        row.goal(Goal::AtMost(400.0))
    } else {
        row
    }])
}

/// What a drop adds to the stream that the block was used on.
pub fn stretch(stage: &Stage) -> Result<Vec<Row>> {
    // About 20 µs of a fast GPU's time, and not much of a processor's.
    let bytes: u64 = if is_gpu(stage) { 64 << 20 } else { 1 << 20 };
    let session = stage.session()?;
    let mut consumer = stage.consumer(&session)?;
    let block = alloc(&session)?;
    let mut pairs = Pairs::new(STEPS);
    for _ in 0..stage.choose(20, 4) {
        lease(&mut consumer, &block, STEPS)?;
        pairs.add(&consumer.child.ask::<Vec<u64>>(&Told::Stretch {
            bytes,
            steps: STEPS as u64,
        })?);
        until_released(&session, &block)?;
    }
    drop(block);
    stage.end(session, [consumer])?;
    let what = "a step of a stream's work with a drop behind it";
    let row = Row::new("drop-stream", what, "the same step without the drop").measured(pairs);
    Ok(vec![if is_gpu(stage) {
        row.goal(Goal::Beyond(200.0))
    } else {
        row
    }])
}

/// Has a consumer hold `count` leases that count as used on its stream.
fn lease(consumer: &mut Consumer, block: &SentBlock, count: usize) -> Result<()> {
    let descriptors = share_some(block, To::Participant(consumer.id), After::Done, count)?;
    consumer.ask(Told::Lease, &descriptors).map(drop)
}

fn share_some(
    block: &SentBlock,
    to: To,
    after: After<'_>,
    count: usize,
) -> Result<Vec<Descriptor>> {
    (0..count)
        .map(|_| block.share(to, after).map_err(Failure::from))
        .collect()
}

fn alloc(session: &Session) -> Result<SentBlock> {
    session.alloc(512).map_err(Failure::from)
}

fn is_gpu(stage: &Stage) -> bool {
    !stage.gpu.kind().in_host_memory()
}

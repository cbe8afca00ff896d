//! Rows of one block for many consumers, and of a consumer's death.

use std::time::{Duration, Instant};

use gpu_ipc::backend::thread;
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, SentBlock, Session, Stream, To};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use super::fixture::{Consumer, PATIENCE, Stage, Starting, until, until_released};
use super::raw_calls::Naked;
use super::row::Row;
use super::sample::{Figures, Pairs};
use super::told::Told;
use crate::failure::Result;

/// What a death is kept in quarantine unless said.
const QUARANTINE: Duration = Duration::from_millis(100);
/// What the proof of a death may take beyond the kernel's word and the quarantine.
const PROOF: Duration = Duration::from_millis(20);
/// What a consumer beyond the first may add to a share, in nanoseconds.
const BEYOND: f64 = 150.0;

/// One block shared with N consumers at once.
pub fn fan_out(stage: &Stage) -> Result<Vec<Row>> {
    let counts: &[usize] = if stage.quick {
        &[1, 2, 4]
    } else {
        &[1, 2, 4, 8, 16, 32]
    };
    let session = stage.session()?;
    let most = counts[counts.len() - 1];
    let starting = (0..most)
        .map(|_| stage.start(&session, &[]))
        .collect::<Result<Vec<_>, _>>()?;
    let mut consumers = starting
        .into_iter()
        .map(Starting::up)
        .collect::<Result<Vec<_>, _>>()?;
    let (stream, block) = (stage.stream()?, session.alloc(512)?);
    let mut naked = Naked::new(&stage.gpu, &*stage.floor)?;
    let mut all: Vec<Pairs> = counts.iter().map(|_| Pairs::new(1)).collect();
    // What each consumer beyond the first adds, by the same round's share with the first alone:
    // both come after a pause.
    let mut ones = all.clone();
    // In turns, so that what changes on the machine changes for all.
    for round in 0..=stage.choose(100, 5) {
        for ((pairs, one), &count) in all.iter_mut().zip(&mut ones).zip(counts) {
            let mut share = |count: usize, pairs: &mut Pairs| {
                share_with(
                    &session,
                    &stream,
                    &block,
                    &mut consumers[..count],
                    &mut naked,
                    pairs,
                )
            };
            share(1, one)?;
            share(count, pairs)?;
            // The first round maps the region and warms the rest.
            if round == 0 {
                (*one, *pairs) = (Pairs::new(1), Pairs::new(1));
            }
        }
    }
    drop(block);
    stage.end(session, consumers)?;
    let mut rows: Vec<Row> = Vec::new();
    for ((pairs, one), &count) in all.into_iter().zip(ones).zip(counts) {
        let others = (count.max(2) - 1) as f64;
        let beyond = pairs
            .ours
            .iter()
            .zip(&one.ours)
            .map(|(all, one)| (all - one) / others)
            .collect();
        let what = "one block shared with N consumers after a stream";
        let row =
            Row::new("fan-out", what, "one batch of N writes").at(count as u64, &count.to_string());
        let row = row.measured(pairs);
        rows.push(match Figures::of(beyond, 1) {
            Some(each) if count > 1 => {
                // Less than nothing is no figure: the pause before a share costs more than the
                // consumers do.
                let met = (each.median > 0.0).then_some(each.median <= BEYOND);
                let row = row.judged(format!("at most {BEYOND:.0} ns a consumer beyond the first"), met);
                match met {
                    Some(_) => row.note(format!("{:.0} ns for each beyond the first", each.median)),
                    None => row.note("not judged: the others' cost is less than what one share differs from the next"),
                }
            }
            _ => row,
        });
    }
    Ok(rows)
}

/// Shares a block with some consumers beside a batch of as many writes, and has them take and
/// release it.
fn share_with(
    session: &Session,
    stream: &Stream,
    block: &SentBlock,
    consumers: &mut [Consumer],
    naked: &mut Naked<'_>,
    pairs: &mut Pairs,
) -> Result<()> {
    let to: Vec<(&SentBlock, To)> = consumers
        .iter()
        .map(|consumer| (block, To::Participant(consumer.id)))
        .collect();
    let mut descriptors = Vec::new();
    let ours = || {
        let options = ShareOptions::default();
        descriptors = session.share_many(&to, After::Stream(stream), &options)?;
        Ok(())
    };
    pairs.sample(ours, || naked.writes(to.len()))?;
    stream.synchronize()?;
    naked.settle()?;
    for (consumer, descriptor) in consumers.iter_mut().zip(&descriptors) {
        consumer.ask(Told::Take, [descriptor])?;
    }
    until_released(session, block)
}

/// From a kill to the dead consumer's block being free.
pub fn death(stage: &Stage) -> Result<Vec<Row>> {
    let session = stage.builder().quarantine(QUARANTINE).open()?;
    let mut pairs = Pairs::new(1);
    let mut over = Vec::new();
    for _ in 0..stage.choose(5, 1) {
        let mut consumer = stage.consumer(&session)?;
        let block = session.alloc(512)?;
        let descriptor = block.share(To::Participant(consumer.id), After::Done)?;
        consumer.hold(&[descriptor])?;
        drop(block);
        let pid = i32::try_from(consumer.child.id())
            .ok()
            .and_then(Pid::from_raw)
            .ok_or("a process without a number")?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|e| format!("pidfd_open: {e}"))?;
        let told = thread::start("gpu-ipc-death", move || {
            let limit = Timespec {
                tv_sec: PATIENCE.as_secs() as i64,
                tv_nsec: 0,
            };
            let polled = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit));
            polled
                .map(|_| Instant::now())
                .map_err(|e| format!("poll: {e}"))
        })?;
        let killed = Instant::now();
        kill_process(pid, Signal::KILL).map_err(|e| format!("kill: {e}"))?;
        until("the block of the dead", || {
            session.stats().limbo_blocks == 0
        })?;
        let free = killed.elapsed();
        let told = told
            .join()
            .map_err(|_| "the polling thread panicked")??
            .duration_since(killed);
        pairs.ours.push(free.as_nanos() as f64);
        pairs.floor.push((told + QUARANTINE).as_nanos() as f64);
        over.push(free.saturating_sub(told + QUARANTINE));
        // It is dead: this reaps it.
        drop(consumer);
    }
    stage.end(session, [])?;
    over.sort();
    let middle = over[over.len() / 2];
    let floor_is = "its raw pidfd in the same run, and the quarantine of 100 ms";
    let row =
        Row::new("death", "a consumer's death to its block's reuse", floor_is).measured(pairs);
    let row = row.judged("at most floor + 20 ms, run by run", Some(middle <= PROOF));
    Ok(vec![row.note(format!(
        "{:.1} ms beyond the floor",
        middle.as_secs_f64() * 1e3
    ))])
}

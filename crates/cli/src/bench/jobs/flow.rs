//! Frames at a fixed rate, from one process to others: a camera, and a KV cache that is handed
//! over.
//!
//! The clock of a latency is the device's: the producer's stream writes the time behind its kernel,
//! the consumer's before its own. Beside it the same through shared host memory: copied down by the
//! producer, up by each consumer.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use gpu_ipc::backend::DevicePtr;
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, SentBlock, Stream, To};

use super::memory::{DeviceMemory, HostShared};
use super::told::{By, Told};
use super::worker::process_nanos;
use super::{Worker, beside, reason};
use crate::bench::fixture::{PATIENCE, Stage};
use crate::bench::row::Row;
use crate::bench::sample::Figures;
use crate::failure::{Failure, Result};
use crate::size;

/// Between two ticks.
const TICK: Duration = Duration::from_millis(1);

/// What flows.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    bytes: u64,
    /// Frames at each tick.
    batch: u64,
    ticks: u64,
    /// Frames that may be in consumers' hands.
    pool: u64,
}

/// What a way of handing over took.
struct Run {
    /// Of all consumers, in nanoseconds.
    latencies: Vec<f64>,
    /// For each frame, in nanoseconds.
    producer_cpu: f64,
    consumer_cpu: f64,
    /// Frames in a second.
    rate: f64,
}

/// Frames of 4 MiB at 1 kHz.
pub fn camera(stage: &Stage) -> Result<Vec<Row>> {
    let is_host = stage.gpu.kind().in_host_memory();
    let bytes = if stage.quick { 64 << 10 } else { 4 << 20 };
    // A small machine writes each frame with its own processors.
    let ticks = stage.choose(if is_host { 200 } else { 2_000 }, 30);
    let shape = Shape {
        name: "camera",
        bytes,
        batch: 1,
        ticks,
        pool: 8,
    };
    let consumers: &[u64] = if stage.quick { &[1, 2] } else { &[1, 8, 32] };
    let rows = consumers
        .iter()
        .map(|&consumers| rows(stage, shape, consumers, &[By::Stream, By::Host]));
    Ok(rows.collect::<Result<Vec<_>, _>>()?.concat())
}

/// 10,000 blocks of 64 KiB a second, between two processes.
pub fn kv(stage: &Stage) -> Result<Vec<Row>> {
    let ticks = stage.choose(2_000, 30);
    rows(
        stage,
        Shape {
            name: "kv",
            bytes: 64 << 10,
            batch: 10,
            ticks,
            pool: 320,
        },
        1,
        &[By::Stream],
    )
}

fn rows(stage: &Stage, shape: Shape, consumers: u64, ways: &[By]) -> Result<Vec<Row>> {
    let today = copied(stage, shape, consumers)?;
    let one = |nanos| Figures::of(vec![nanos], (shape.ticks * shape.batch) as usize);
    let mut rows = Vec::new();
    for &by in ways {
        let ours = shared(stage, shape, consumers, by)?;
        let note = format!(
            "{} frames of {} to each; {:.0} a second, and {:.0} by copies{}",
            shape.ticks * shape.batch,
            size::show(shape.bytes),
            ours.rate,
            today.rate,
            if stage.gpu.kind().in_host_memory() {
                "; the processors do the device's work too"
            } else {
                ""
            }
        );
        let (suffix, waits) = match by {
            By::Stream => ("", ""),
            By::Host => (
                "-host",
                ", where each consumer's CPU waits for the frame and for its kernel",
            ),
        };
        let row = |what: &str, text: &str| {
            let name = format!("{}{suffix}-{what}", shape.name);
            let row = Row::new(
                &name,
                &format!("{text}{waits}"),
                "the same by copies through shared host memory",
            );
            row.at(consumers, &consumers.to_string())
        };
        let latency = row(
            "latency",
            "from the end of the producer's kernel to the start of the consumer's",
        );
        rows.extend([
            beside(
                latency,
                Figures::of(ours.latencies, 1),
                Figures::of(today.latencies.clone(), 1),
            )
            .note(note),
            beside(
                row(
                    "cpu-producer",
                    "the producer's processor time for each frame",
                ),
                one(ours.producer_cpu),
                one(today.producer_cpu),
            ),
            beside(
                row("cpu-consumer", "a consumer's processor time for each frame"),
                one(ours.consumer_cpu),
                one(today.consumer_cpu),
            ),
        ]);
    }
    Ok(rows)
}

/// Sleeps until a tick; a producer that is late goes on at once.
fn await_tick(begun: Instant, tick: u64) {
    let until = begun + TICK * tick as u32;
    std::thread::sleep(until.saturating_duration_since(Instant::now()));
}

/// Queues the producer's kernel: it fills a frame, and the time of its end is the last word.
fn render(stage: &Stage, stream: &Stream, at: DevicePtr, bytes: u64, frame: u64) -> Result<()> {
    // SAFETY: `fill` asks for a live stream and a range that is valid until the fill is done: the
    // callers keep it.
    unsafe {
        stage
            .gpu
            .backend()
            .fill(stream.raw(), at, stage.contents(frame), bytes)
    }?;
    stage.floor.stamp(stream.raw(), at.offset(bytes - 8))
}

/// By leases.
fn shared(stage: &Stage, shape: Shape, consumers: u64, by: By) -> Result<Run> {
    let (session, stream) = (stage.session()?, stage.stream()?);
    let pool = (0..shape.pool)
        .map(|_| session.alloc(shape.bytes))
        .collect::<gpu_ipc::Result<Vec<_>>>();
    let pool = pool?;
    let mut workers = (0..consumers)
        .map(|_| Worker::start(stage, &session))
        .collect::<Result<Vec<_>, _>>()?;
    let count = shape.ticks * shape.batch;
    for worker in &mut workers {
        worker.process.child.tell(&Told::Flow {
            bytes: shape.bytes,
            count,
            by,
        })?;
    }
    let (cpu, begun) = (process_nanos(), Instant::now());
    let mut frames = (0..).zip(pool.iter().cycle());
    let published = (0..shape.ticks).try_for_each(|tick| {
        await_tick(begun, tick);
        let batch: Vec<&SentBlock> = frames
            .by_ref()
            .take(shape.batch as usize)
            .map(|(frame, block)| {
                block.wait_released(Some(PATIENCE))?;
                render(stage, &stream, block.device_ptr(), shape.bytes, frame).map(|()| block)
            })
            .collect::<Result<_>>()?;
        let to = |worker: &Worker| To::Participant(worker.process.id);
        let grants: Vec<_> = workers
            .iter()
            .flat_map(|worker| batch.iter().map(move |&block| (block, to(worker))))
            .collect();
        let shared = session.share_many(&grants, After::Stream(&stream), &ShareOptions::default());
        let shared = shared?;
        for (worker, descriptors) in workers.iter().zip(shared.chunks(batch.len())) {
            worker.send_all(descriptors)?;
        }
        Ok(())
    });
    published.map_err(|why: Failure| reason(&mut workers, why))?;
    let run = finish(shape, &mut workers, process_nanos() - cpu, begun)?;
    stream.synchronize()?;
    drop(pool);
    workers.into_iter().try_for_each(Worker::end)?;
    stage.end(session, [])?;
    Ok(run)
}

/// By copies through shared host memory.
fn copied(stage: &Stage, shape: Shape, consumers: u64) -> Result<Run> {
    let (session, stream) = (stage.session()?, stage.stream()?);
    let host = HostShared::create(&stage.gpu, shape.pool * shape.bytes)?;
    let frames = DeviceMemory::new(&stream, shape.batch * shape.bytes)?;
    let mut workers = (0..consumers)
        .map(|_| Worker::start(stage, &session))
        .collect::<Result<Vec<_>, _>>()?;
    let count = shape.ticks * shape.batch;
    for worker in &mut workers {
        let fd = host.fd().as_raw_fd();
        worker.process.child.tell(&Told::Copies {
            bytes: shape.bytes,
            count,
            fd,
            slots: shape.pool,
        })?;
    }
    let (cpu, begun) = (process_nanos(), Instant::now());
    let published = (0..shape.ticks).try_for_each(|tick| {
        await_tick(begun, tick);
        // A slot is written again when every consumer has copied it.
        if tick >= shape.pool / shape.batch {
            workers.iter_mut().try_for_each(Worker::wait_done)?;
        }
        let mut packet = Vec::new();
        for index in 0..shape.batch {
            let frame = tick * shape.batch + index;
            let (slot, at) = (frame % shape.pool, frames.at(index * shape.bytes));
            render(stage, &stream, at, shape.bytes, frame)?;
            let (to, len) = (host.at(slot * shape.bytes), shape.bytes as usize);
            // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the
            // copy is done: it is waited for below.
            unsafe { stage.gpu.backend().copy_to_host(stream.raw(), to, at, len) }?;
            packet.extend_from_slice(&slot.to_le_bytes());
        }
        stream.synchronize()?;
        workers.iter().try_for_each(|worker| worker.send(&packet))
    });
    published.map_err(|why: Failure| reason(&mut workers, why))?;
    let run = finish(shape, &mut workers, process_nanos() - cpu, begun)?;
    workers.into_iter().try_for_each(Worker::end)?;
    stage.end(session, [])?;
    Ok(run)
}

/// Takes the workers' answers in. The frames of the first pool do not count: each is mapped for the
/// first time.
fn finish(shape: Shape, workers: &mut [Worker], producer: u64, begun: Instant) -> Result<Run> {
    let count = (shape.ticks * shape.batch) as usize;
    let (mut latencies, mut cpu) = (Vec::new(), 0);
    for worker in &mut *workers {
        let answer: Vec<u64> = worker.process.child.answer()?;
        let (&used, seen) = answer.split_first().ok_or("a worker measured nothing")?;
        if seen.len() != count {
            return Err(format!("a worker saw {} of {count} frames", seen.len()).into());
        }
        cpu += used;
        latencies.extend(
            seen.iter()
                .skip(count.min(shape.pool as usize) / 2)
                .map(|&nanos| nanos as f64),
        );
    }
    let each = |nanos: u64| nanos as f64 / count as f64;
    Ok(Run {
        latencies,
        producer_cpu: each(producer),
        consumer_cpu: each(cpu / workers.len().max(1) as u64),
        rate: count as f64 / begun.elapsed().as_secs_f64(),
    })
}

//! Tensors of a trainer that four processes open, beside a copy to each through shared host memory.

use std::os::fd::AsRawFd;
use std::time::Instant;

use gpu_ipc::session::ShareOptions;
use gpu_ipc::{After, Gpu, SentBlock, To};

use super::memory::HostShared;
use super::told::Told;
use super::{DESCRIPTOR, PACKET, Worker, beside};
use crate::bench::fixture::{Stage, until_released};
use crate::bench::row::Row;
use crate::bench::sample::Figures;
use crate::failure::{Failure, Result};
use crate::size;

/// Processes that open them.
const WORKERS: usize = 4;
/// Tensors that are shared at once: what fills a packet.
const PART: usize = PACKET / DESCRIPTOR;

/// What a way of handing over took.
struct Run {
    /// Until the last process has them all, in nanoseconds, for each round.
    nanos: Vec<f64>,
    /// Bytes of the device beyond the trainer's own.
    bytes: u64,
}

/// 1,000 tensors of 4 MiB, and 64 GiB in 200; smaller where the machine is.
pub fn rows(stage: &Stage) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let jobs: &[(u64, u64)] = if stage.quick {
        &[(20, 64 << 10)]
    } else {
        &[(1_000, 4 << 20), (200, (64 << 30) / 200)]
    };
    for &(count, wanted) in jobs {
        // Each tensor begins at a word.
        let wanted = wanted & !4095;
        let free = free(&stage.gpu)?;
        let fits = |copies: u64| wanted.min(free / 2 / copies / count) & !4095;
        // Beside a copy in each process there is room for smaller ones, or for none.
        let is_host = stage.gpu.kind().in_host_memory();
        let has_copies = is_host || fits(WORKERS as u64 + 1) == wanted;
        let bytes = if is_host {
            fits(WORKERS as u64 + 2)
        } else {
            fits(1)
        };
        if bytes == 0 {
            return Err(format!("{free} bytes are free: too few for {count} tensors").into());
        }
        let ours = shared(stage, count, bytes)?;
        let today = if has_copies {
            Some(copied(stage, count, bytes)?)
        } else {
            None
        };
        let name = format!("{count}x{}", size::show(bytes).replace(' ', ""));
        let row = |what: &str, text: &str| {
            Row::new(
                &format!("weights-{what}"),
                text,
                "a copy to each through shared host memory",
            )
            .at(bytes, &name)
        };
        let mut note = format!(
            "{} rounds; the first, which maps, took {:.1} ms",
            ours.nanos.len(),
            ours.nanos[0] / 1e6
        );
        if bytes < wanted {
            note += &format!("; of {} there is no room", size::show(wanted));
        }
        if today.is_none() {
            note += "; there is no room for a copy in each process";
        }
        let time = |run: &Run| Figures::of(run.nanos[1..].to_vec(), 1);
        let memory = |run: &Run| Figures::of(vec![run.bytes as f64], 1);
        let today_memory = today.as_ref().and_then(memory);
        rows.push(
            beside(
                row(
                    "time",
                    "a trainer's tensors to 4 processes, until the last has them all",
                ),
                time(&ours),
                today.as_ref().and_then(time),
            )
            .note(note),
        );
        rows.push(beside(
            row("memory", "memory of the device beyond the trainer's").bytes(),
            memory(&ours),
            today_memory,
        ));
    }
    Ok(rows)
}

/// Returns the bytes that a device has free, or a small machine.
fn free(gpu: &Gpu) -> Result<u64> {
    let free = gpu.backend().memory_info(gpu.device())?.free_bytes;
    if !gpu.kind().in_host_memory() {
        return Ok(free);
    }
    let text =
        std::fs::read_to_string("/proc/meminfo").map_err(|e| format!("/proc/meminfo: {e}"))?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .unwrap_or_default();
    let kib: u64 = line
        .split_whitespace()
        .next()
        .and_then(|word| word.parse().ok())
        .unwrap_or(0);
    Ok(free.min(kib << 9))
}

fn taken(gpu: &Gpu) -> Result<u64> {
    let memory = gpu.backend().memory_info(gpu.device())?;
    Ok(memory.total_bytes - memory.free_bytes)
}

fn fill(stage: &Stage, tensors: &[SentBlock]) -> Result<()> {
    let stream = stage.stream()?;
    for (number, tensor) in (0..).zip(tensors) {
        let byte = stage.contents(number);
        // SAFETY: `fill` asks for a live stream and a range that is valid until the fill is done:
        // it is waited for.
        unsafe {
            stage
                .gpu
                .backend()
                .fill(stream.raw(), tensor.device_ptr(), byte, tensor.len())
        }?;
    }
    stream.synchronize().map_err(Failure::from)
}

/// By leases.
fn shared(stage: &Stage, count: u64, bytes: u64) -> Result<Run> {
    let session = stage.session()?;
    let tensors = (0..count)
        .map(|_| session.alloc(bytes))
        .collect::<gpu_ipc::Result<Vec<_>>>();
    let tensors = tensors?;
    fill(stage, &tensors)?;
    let mut workers = (0..WORKERS)
        .map(|_| Worker::start(stage, &session))
        .collect::<Result<Vec<_>, _>>()?;
    let mut run = Run {
        nanos: Vec::new(),
        bytes: 0,
    };
    for _ in 0..stage.choose(8, 3) {
        let before = taken(&stage.gpu)?;
        for worker in &mut workers {
            worker.process.child.tell(&Told::Tensors { count })?;
        }
        let start = Instant::now();
        for part in tensors.chunks(PART) {
            for worker in &workers {
                let to = To::Participant(worker.process.id);
                let grants: Vec<_> = part.iter().map(|tensor| (tensor, to)).collect();
                let descriptors =
                    session.share_many(&grants, After::Done, &ShareOptions::default());
                worker.send_all(&descriptors?)?;
            }
        }
        workers.iter_mut().try_for_each(Worker::wait_done)?;
        run.nanos.push(start.elapsed().as_nanos() as f64);
        run.bytes = taken(&stage.gpu)?.saturating_sub(before);
        for worker in &mut workers {
            run.bytes += worker
                .process
                .child
                .answer::<Vec<u64>>()?
                .first()
                .ok_or("a worker opened nothing")?;
        }
        tensors
            .iter()
            .try_for_each(|tensor| until_released(&session, tensor))?;
    }
    drop(tensors);
    workers.into_iter().try_for_each(Worker::end)?;
    stage.end(session, [])?;
    Ok(run)
}

/// By a copy to shared host memory and one in each process.
fn copied(stage: &Stage, count: u64, bytes: u64) -> Result<Run> {
    let (session, stream) = (stage.session()?, stage.stream()?);
    let tensors = (0..count)
        .map(|_| session.alloc(bytes))
        .collect::<gpu_ipc::Result<Vec<_>>>();
    let tensors = tensors?;
    fill(stage, &tensors)?;
    let mut run = Run {
        nanos: Vec::new(),
        bytes: 0,
    };
    for _ in 0..stage.choose(4, 3) {
        let host = HostShared::create(&stage.gpu, count * bytes)?;
        let mut workers = (0..WORKERS)
            .map(|_| Worker::start(stage, &session))
            .collect::<Result<Vec<_>, _>>()?;
        let before = taken(&stage.gpu)?;
        for worker in &mut workers {
            let fd = host.fd().as_raw_fd();
            worker
                .process
                .child
                .tell(&Told::CopiedTensors { count, bytes, fd })?;
        }
        let start = Instant::now();
        for (number, tensor) in (0..).zip(&tensors) {
            let (to, from) = (host.at(number * bytes), tensor.device_ptr());
            // SAFETY: `copy_to_host` asks for a live stream and two ranges that are valid until the
            // copy is done: it is waited for below.
            unsafe {
                stage
                    .gpu
                    .backend()
                    .copy_to_host(stream.raw(), to, from, bytes as usize)
            }?;
        }
        stream.synchronize()?;
        workers.iter().try_for_each(|worker| worker.send(&[0; 8]))?;
        workers.iter_mut().try_for_each(Worker::wait_done)?;
        run.nanos.push(start.elapsed().as_nanos() as f64);
        run.bytes = taken(&stage.gpu)?.saturating_sub(before);
        for worker in &mut workers {
            run.bytes += worker
                .process
                .child
                .answer::<Vec<u64>>()?
                .first()
                .ok_or("a worker copied nothing")?;
        }
        workers.into_iter().try_for_each(Worker::end)?;
    }
    drop(tensors);
    stage.end(session, [])?;
    Ok(run)
}

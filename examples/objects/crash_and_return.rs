//! Crash and return: an engine is killed, and its successor has the weights mapped and answers.
//!
//! ```text
//! cargo run --features broker --example crash_and_return -- [--backend host|cuda|hip] [--bytes 40GiB] [--parts 200]
//! ```
//!
//! Keeper, broker, loader and engines are processes of their own. The loader puts the weights and ends. The first
//! engine is killed while it answers; the second is timed from its start to its first right answer, which takes every
//! byte of the weights. Beside it, a process without a broker copies as many bytes from pinned host memory.

mod shared;

use std::error::Error;
use std::io::BufRead;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use gpu_ipc::Stream;
use gpu_ipc::backend::{HostMemory, Sharing};
use shared::engine::Engine;
use shared::options::{Options, open, shown};
use shared::process::{Owner, Process, connect, die_with_parent, end, own, say};
use shared::weights;

/// What the weights are filled with.
const STAMP: u8 = 77;
/// Bytes that are copied at a time from pinned host memory.
const PIECE: u64 = 1 << 30;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // This program starts itself in these roles.
        [role @ ("keeper" | "broker"), dir, backend] => own(role, dir, backend).unwrap_or(Ok(())),
        ["loader", dir, backend, bytes, parts] => load(dir, backend, bytes, parts),
        ["engine", dir, backend] => engine(dir, backend),
        ["copier", _, backend, bytes] => copier(backend, bytes),
        _ => Options::parse("crash_and_return", &args).and_then(|options| play(&options)),
    };
    end("crash_and_return", done)
}

fn play(options: &Options) -> Result<(), Box<dyn Error>> {
    let Options { backend, bytes, parts, .. } = options;
    let owner = Owner::start(backend)?;
    let mut loader = Process::start("loader", owner.dir(), backend, &[bytes.to_string(), parts.to_string()])?;
    loader.expect("committed")?;
    loader.end()?;
    let mut first = Process::start("engine", owner.dir(), backend, &[])?;
    first.expect("answered")?;
    // It answers on and on; wherever it is, it ends here.
    first.kill()?;
    let mut second = Process::start("engine", owner.dir(), backend, &[])?;
    let numbers = second.expect("answered")?;
    let whole = second.since.elapsed();
    let [device, opened, answered] = numbers[..] else { return Err("an engine says three times".into()) };
    second.kill()?;
    let mut copier = Process::start("copier", owner.dir(), backend, &[bytes.to_string()])?;
    let [copied] = copier.expect("copied")?[..] else { return Err("a copier says one time".into()) };
    copier.end()?;
    let ms = |nanos: u64| nanos as f64 / 1e6;
    println!(
        "crash_and_return: an engine with {} in {parts} parts was killed; its successor answered right {:.1} ms after \
         its start: {:.1} ms until it had device and broker, {:.3} ms to open, {:.1} ms to capture and to look at \
         every byte; a copy of the same from pinned host memory takes {:.1} ms, {:.0} times as long as the open",
        shown(*bytes),
        whole.as_secs_f64() * 1e3,
        ms(device),
        ms(opened),
        ms(answered),
        ms(copied),
        copied as f64 / opened as f64,
    );
    Ok(())
}

fn load(dir: &str, backend: &str, bytes: &str, parts: &str) -> Result<(), Box<dyn Error>> {
    die_with_parent()?;
    let client = connect(&open(backend)?, Path::new(dir), "loader")?;
    let epoch = weights::put(&client, (bytes.parse()?, parts.parse()?), STAMP)?;
    say(&format!("committed {epoch}"))?;
    wait_for_end()
}

fn engine(dir: &str, backend: &str) -> Result<(), Box<dyn Error>> {
    die_with_parent()?;
    let start = Instant::now();
    let gpu = open(backend)?;
    // The first stream makes the driver's context.
    drop(Stream::create(&gpu)?);
    let client = connect(&gpu, Path::new(dir), "engine")?;
    let device = start.elapsed();
    let (mut engine, opened) = Engine::open(&client)?;
    engine.answer_right()?;
    let answered = start.elapsed() - device - opened;
    say(&format!("answered {} {} {}", device.as_nanos(), opened.as_nanos(), answered.as_nanos()))?;
    loop {
        engine.answer_right()?;
    }
}

/// Copies as many bytes from pinned host memory to the device, from one piece to one place: there may be no room for
/// more.
fn copier(backend: &str, bytes: &str) -> Result<(), Box<dyn Error>> {
    die_with_parent()?;
    let (gpu, bytes) = (open(backend)?, bytes.parse::<u64>()?);
    let piece = bytes.min(PIECE);
    let stream = Stream::create(&gpu)?;
    let pinned = HostMemory { pinned: true, numa_node: None };
    let from = gpu.backend().host_alloc(gpu.device(), piece as usize, pinned)?;
    let to = gpu.backend().alloc(gpu.device(), piece, Sharing::Fd)?.base;
    let copy = |len: u64| {
        // SAFETY: `copy_to_device` asks for a live stream and two ranges that are valid until the copy is done: both
        // have `piece` bytes and stay until this process ends.
        unsafe {
            gpu.backend().copy_to_device(stream.raw(), to, std::ptr::with_exposed_provenance(from.0), len as usize)
        }
    };
    // The first one warms the way.
    copy(piece)?;
    stream.synchronize()?;
    let start = Instant::now();
    let mut left = bytes;
    while left > 0 {
        copy(left.min(piece))?;
        left -= left.min(piece);
    }
    stream.synchronize()?;
    say(&format!("copied {}", start.elapsed().as_nanos()))?;
    wait_for_end()
}

fn wait_for_end() -> Result<(), Box<dyn Error>> {
    std::io::stdin().lock().lines().next();
    Ok(())
}

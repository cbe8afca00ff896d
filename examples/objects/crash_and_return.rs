//! Crash and return: an engine is killed, and its successor has the weights mapped and answers.
//!
//! ```text
//! cargo run --features broker --example crash_and_return -- [--backend host|cuda|hip] [--bytes 40GiB] [--parts 200]
//! ```
//!
//! Keeper, broker, loader and engines are processes of their own. The loader puts the weights and
//! ends. The first engine is killed while it answers; the second is timed from its start to its
//! first right answer, which takes every byte of the weights. What a copy of as many bytes takes
//! beside it: `gpu-ipc bench --only objects`.

mod shared;

use std::error::Error;
use std::io::BufRead;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use gpu_ipc::Stream;
use shared::engine::Engine;
use shared::options::{Options, open, shown};
use shared::process::{Owner, Process, connect, die_with_parent, end, own, say};
use shared::weights;

/// What the weights are filled with.
const STAMP: u8 = 77;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // This program starts itself in these roles.
        [role @ ("keeper" | "broker"), dir, backend] => own(role, dir, backend).unwrap_or(Ok(())),
        ["loader", dir, backend, bytes, parts] => load(dir, backend, bytes, parts),
        ["engine", dir, backend] => engine(dir, backend),
        _ => Options::parse("crash_and_return", &args).and_then(|options| play(&options)),
    };
    end("crash_and_return", done)
}

fn play(options: &Options) -> Result<(), Box<dyn Error>> {
    let Options {
        backend,
        bytes,
        parts,
        ..
    } = options;
    let owner = Owner::start(backend)?;
    let mut loader = Process::start(
        "loader",
        owner.dir(),
        backend,
        &[bytes.to_string(), parts.to_string()],
    )?;
    loader.expect("committed")?;
    loader.end()?;
    let mut first = Process::start("engine", owner.dir(), backend, &[])?;
    first.expect("answered")?;
    // It answers on and on; wherever it is, it ends here.
    first.kill()?;
    let mut second = Process::start("engine", owner.dir(), backend, &[])?;
    let numbers = second.expect("answered")?;
    let whole = second.since.elapsed();
    let [device, opened, answered] = numbers[..] else {
        return Err("an engine says three times".into());
    };
    second.kill()?;
    let ms = |nanos: u64| nanos as f64 / 1e6;
    println!(
        "crash_and_return: an engine with {} in {parts} parts was killed; its successor answered right {:.1} ms after \
         its start: {:.1} ms until it had device and broker, {:.3} ms to open, {:.1} ms to capture and to look at \
         every byte",
        shown(*bytes),
        whole.as_secs_f64() * 1e3,
        ms(device),
        ms(opened),
        ms(answered),
    );
    Ok(())
}

fn load(dir: &str, backend: &str, bytes: &str, parts: &str) -> Result<(), Box<dyn Error>> {
    die_with_parent()?;
    let client = connect(&open(backend)?, Path::new(dir), "loader")?;
    let epoch = weights::put(&client, (bytes.parse()?, parts.parse()?), STAMP)?;
    say(&format!("committed {epoch}"))?;
    std::io::stdin().lock().lines().next();
    Ok(())
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
    say(&format!(
        "answered {} {} {}",
        device.as_nanos(),
        opened.as_nanos(),
        answered.as_nanos()
    ))?;
    loop {
        engine.answer_right()?;
    }
}

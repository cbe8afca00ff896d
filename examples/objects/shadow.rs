//! Shadow: a second engine with the same weights mapped costs no memory but its context, and takes
//! over at once.
//!
//! ```text
//! cargo run --features broker --example shadow -- [--backend host|cuda|hip] [--bytes 40GiB] [--parts 200]
//! ```
//!
//! The first engine serves; the second has the same weights mapped and waits. What it takes is
//! measured in two steps: before it opens the weights, and after. Then the first is killed, and the
//! second answers.

mod shared;

use std::error::Error;
use std::io::BufRead;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use gpu_ipc::{BackendKind, Stream};
use shared::engine::{Engine, memory_taken};
use shared::options::{Options, open, shown};
use shared::process::{Owner, Process, connect, die_with_parent, end, own, say};
use shared::weights;

/// What the weights are filled with.
const STAMP: u8 = 33;
/// What a shadow may take beyond its context: page tables, the captured graph, and its answer.
const MOST: u64 = 64 << 20;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // This program starts itself in these roles.
        [role @ ("keeper" | "broker"), dir, backend] => own(role, dir, backend).unwrap_or(Ok(())),
        ["loader", dir, backend, bytes, parts] => load(dir, backend, bytes, parts),
        ["engine", dir, backend] => engine(dir, backend),
        _ => Options::parse("shadow", &args).and_then(|options| play(&options)),
    };
    end("shadow", done)
}

fn play(options: &Options) -> Result<(), Box<dyn Error>> {
    let Options {
        backend,
        bytes,
        parts,
        ..
    } = options;
    let is_host = options.gpu()?.kind() == BackendKind::Host;
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
    first.expect("ready")?;
    ask(&mut first, "open")?;
    let mut shadow = Process::start("engine", owner.dir(), backend, &[])?;
    shadow.expect("ready")?;
    // Without a GPU each process knows its own part alone, and shared pages are counted in parts.
    let taken = |first: &mut Process, shadow: &mut Process| {
        let own = if is_host { ask(shadow, "memory")? } else { 0 };
        Ok::<u64, Box<dyn Error>>(ask(first, "memory")? + own)
    };
    let before = taken(&mut first, &mut shadow)?;
    ask(&mut shadow, "open")?;
    let after = taken(&mut first, &mut shadow)?;
    let more = after.saturating_sub(before);
    if more > MOST || more > bytes / 2 {
        return Err(
            format!("the shadow took {more} bytes more: {before} before it opened the weights, {after} after").into()
        );
    }
    let killed = Instant::now();
    first.kill()?;
    ask(&mut shadow, "answer")?;
    let over = killed.elapsed();
    shadow.end()?;
    println!(
        "shadow: {} in {parts} parts, mapped by two engines; the second took {:.1} MiB more for them; when the first \
         was killed it answered right within {:.1} ms",
        shown(*bytes),
        more as f64 / f64::from(1 << 20),
        over.as_secs_f64() * 1e3,
    );
    Ok(())
}

fn ask(engine: &mut Process, what: &str) -> Result<u64, Box<dyn Error>> {
    engine.tell(what)?;
    let numbers = engine.expect("done")?;
    numbers
        .first()
        .copied()
        .ok_or_else(|| "an answer without a number".into())
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
    let gpu = open(backend)?;
    // The first stream makes the driver's context.
    drop(Stream::create(&gpu)?);
    let client = connect(&gpu, Path::new(dir), "engine")?;
    let mut engine = None;
    say("ready")?;
    for line in std::io::stdin().lock().lines() {
        let number = match line?.as_str() {
            "open" => {
                engine.insert(Engine::open(&client)?.0).answer_right()?;
                0
            }
            "answer" => {
                engine.as_mut().ok_or("nothing is open")?.answer_right()?;
                0
            }
            "memory" => memory_taken(&gpu)?,
            _ => break,
        };
        say(&format!("done {number}"))?;
    }
    Ok(())
}

//! Hot swap: new weights under a captured graph, from a trainer that dies in the middle of every
//! third commit.
//!
//! ```text
//! cargo run --features broker --example hot_swap -- [--backend host|cuda|hip] [--bytes 8GiB] [--rounds 6] \
//!     [--every 1000]
//! ```
//!
//! The engine answers in a loop: on an NVIDIA GPU each answer is one launch of a graph that was
//! captured once. A thread of it watches for a newer epoch, and the loop advances between two
//! answers, at the same addresses. Each answer takes every byte of the weights, and must be that of
//! the one epoch which is mapped. A trainer that is killed half-way leaves nothing that anybody
//! sees: another one takes its place.

mod shared;

use std::error::Error;
use std::io::BufRead;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpu_ipc::Stream;
use gpu_ipc::broker::Epoch;
use shared::NAME;
use shared::engine::Engine;
use shared::options::{Options, open, shown};
use shared::process::{Owner, Process, connect, die_with_parent, end, own, say};
use shared::weights;

/// Every this many trainers, one is killed half-way.
const KILL_EVERY: u64 = 3;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // This program starts itself in these roles.
        [role @ ("keeper" | "broker"), dir, backend] => own(role, dir, backend).unwrap_or(Ok(())),
        ["trainer", dir, backend, bytes, parts] => trainer(dir, backend, bytes, parts),
        ["engine", dir, backend] => engine(dir, backend),
        _ => Options::parse("hot_swap", &args).and_then(|options| play(&options)),
    };
    end("hot_swap", done)
}

fn play(options: &Options) -> Result<(), Box<dyn Error>> {
    let Options {
        backend,
        bytes,
        parts,
        rounds,
        every,
    } = options;
    let owner = Owner::start(backend)?;
    let size = [bytes.to_string(), parts.to_string()];
    let start_trainer = || {
        let mut trainer = Process::start("trainer", owner.dir(), backend, &size)?;
        trainer.expect("ready")?;
        Ok::<Process, Box<dyn Error>>(trainer)
    };
    let mut trainer = start_trainer()?;
    trainer.tell("commit 1")?;
    trainer.expect("committed")?;
    let mut engine = Process::start("engine", owner.dir(), backend, &[])?;
    engine.expect("maps")?;
    let (mut committed, mut killed) = (1, 0);
    let mut next = Instant::now();
    for round in 1..=*rounds {
        next += Duration::from_millis(*every);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        let stamp = 1 + round % 254;
        if round % KILL_EVERY == 0 {
            trainer.tell(&format!("half {stamp}"))?;
            trainer.expect("half")?;
            trainer.kill()?;
            killed += 1;
            trainer = start_trainer()?;
            continue;
        }
        trainer.tell(&format!("commit {stamp}"))?;
        committed += 1;
        let epoch = trainer.expect("committed")?;
        if epoch != [committed] {
            return Err(format!(
                "commit {committed} has epoch {epoch:?}: a killed trainer's became visible"
            )
            .into());
        }
        let mapped = engine.expect("maps")?;
        if mapped != [committed, stamp] {
            return Err(format!(
                "the engine maps {mapped:?}, not epoch {committed} with stamp {stamp}"
            )
            .into());
        }
    }
    drop(trainer);
    let last = engine.end()?.pop().ok_or("the engine says what it did")?;
    let numbers: Vec<f64> = last
        .split_whitespace()
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let [answers, advances, median, slowest, answer] = numbers[..] else {
        return Err(last.into());
    };
    println!(
        "hot_swap: {} in {parts} parts, {committed} epochs, {killed} trainers killed half-way; {answers} answers of \
         {answer:.2} ms, each of exactly one epoch; {advances} advances at the same addresses, {median:.3} ms each, \
         {slowest:.3} ms at most",
        shown(*bytes),
    );
    Ok(())
}

/// Fills and commits weights, or stops half-way: with half of the parts asked for, and the GPU
/// still at work on them.
fn trainer(dir: &str, backend: &str, bytes: &str, parts: &str) -> Result<(), Box<dyn Error>> {
    die_with_parent()?;
    let size = (bytes.parse()?, parts.parse()?);
    let client = connect(&open(backend)?, Path::new(dir), "trainer")?;
    let stream = Stream::create(client.gpu())?;
    say("ready")?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ') {
            Some(("commit", stamp)) => {
                say(&format!(
                    "committed {}",
                    weights::put(&client, size, stamp.parse()?)?
                ))?;
            }
            Some(("half", stamp)) => {
                let _writer = weights::begin(&client, size, stamp.parse()?, &stream, 0.5)?;
                say("half")?;
                loop {
                    std::thread::park();
                }
            }
            _ => break,
        }
    }
    Ok(())
}

fn engine(dir: &str, backend: &str) -> Result<(), Box<dyn Error>> {
    die_with_parent()?;
    let client = connect(&open(backend)?, Path::new(dir), "engine")?;
    let (mut engine, _) = Engine::open(&client)?;
    engine.answer_right()?;
    say(&format!("maps {} {}", engine.epoch(), engine.stamp()?))?;
    let newest = Arc::new(AtomicU64::new(engine.epoch()));
    let ends = Arc::new(AtomicBool::new(false));
    std::thread::spawn({
        let (client, newest) = (client.clone(), newest.clone());
        move || {
            loop {
                let seen = Epoch(newest.load(Ordering::Relaxed));
                if let Ok(Some((epoch, _))) = client.watch(NAME, seen, Duration::from_secs(3_600)) {
                    newest.store(epoch.0, Ordering::Relaxed);
                }
            }
        }
    });
    std::thread::spawn({
        let ends = ends.clone();
        move || {
            std::io::stdin().lock().lines().next();
            ends.store(true, Ordering::Relaxed);
        }
    });
    let (mut answers, mut advances) = (1u64, Vec::new());
    let mut spent = Duration::ZERO;
    while !ends.load(Ordering::Relaxed) {
        if newest.load(Ordering::Relaxed) > engine.epoch() {
            let start = Instant::now();
            engine.advance()?;
            advances.push(start.elapsed());
            engine.answer_right()?;
            say(&format!("maps {} {}", engine.epoch(), engine.stamp()?))?;
        }
        let start = Instant::now();
        engine.answer_right()?;
        spent += start.elapsed();
        answers += 1;
    }
    advances.sort();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let median = advances
        .get(advances.len() / 2)
        .copied()
        .unwrap_or_default();
    let slowest = advances.last().copied().unwrap_or_default();
    let each = ms(spent) / answers as f64;
    say(&format!(
        "{answers} {} {} {} {each}",
        advances.len(),
        ms(median),
        ms(slowest)
    ))
}

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
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpu_ipc::Stream;
use harness::{Child, next, say};
use serde::{Deserialize, Serialize};
use shared::engine::{Engine, follow};
use shared::options::{Options, shown};
use shared::process::{Owner, Place, run, start};
use shared::weights;

/// Every this many trainers, one is killed half-way.
const KILL_EVERY: u64 = 3;

/// The engine is told to end.
static ENDS: AtomicBool = AtomicBool::new(false);

#[derive(Serialize, Deserialize)]
enum Role {
    /// Commits weights of so many bytes and parts, and says the epoch.
    Trainer(Place, u64, u64),
    Engine(Place),
}

/// What a trainer is told: the stamp of weights to commit, or to leave half-way.
#[derive(Serialize, Deserialize)]
enum Told {
    Commit(u8),
    Half(u8),
}

/// What an engine says: an epoch and its stamp once it answers with them, and at its end what it
/// did, with the slowest advance.
#[derive(Serialize, Deserialize)]
enum Said {
    Maps(u64, u8),
    Done(u64, u64, Duration),
}

fn main() -> ExitCode {
    run("hot_swap", demonstrate, |role| match role {
        Role::Trainer(place, bytes, parts) => train(&place, (bytes, parts)),
        Role::Engine(place) => serve(&place),
    })
}

fn demonstrate(options: &Options) -> Result<(), Box<dyn Error>> {
    let (bytes, parts) = (options.bytes, options.parts);
    let owner = Owner::start(&options.backend)?;
    let trainer = || -> Child<Told, u64> { start(Role::Trainer(owner.place(), bytes, parts)) };
    let mut current = trainer();
    current.ask(&Told::Commit(1));
    let mut engine: Child<(), Said> = start(Role::Engine(owner.place()));
    let (mut committed, mut killed) = (1, 0);
    let must_map = |engine: &mut Child<(), Said>, epoch, stamp| match engine.answer() {
        Some(Said::Maps(mapped, its)) if (mapped, its) == (epoch, stamp) => Ok(()),
        _ => Err(format!(
            "the engine does not map epoch {epoch} with stamp {stamp}"
        )),
    };
    must_map(&mut engine, committed, 1)?;
    for round in 1..=options.rounds {
        std::thread::sleep(Duration::from_millis(options.every));
        let stamp = 1 + (round % 254) as u8;
        if round % KILL_EVERY == 0 {
            current.ask(&Told::Half(stamp));
            current.kill();
            killed += 1;
            current = trainer();
            continue;
        }
        committed += 1;
        if current.ask(&Told::Commit(stamp)) != committed {
            return Err("a killed trainer's weights became visible".into());
        }
        must_map(&mut engine, committed, stamp)?;
    }
    engine.end();
    let Some(Said::Done(answers, advances, slowest)) = engine.answer() else {
        return Err("the engine failed".into());
    };
    println!(
        "hot_swap: {} in {parts} parts, {committed} epochs, {killed} trainers killed half-way; {answers} answers, \
         each of exactly one epoch; {advances} advances at the same addresses, {:.3} ms at most",
        shown(bytes),
        slowest.as_secs_f64() * 1e3,
    );
    Ok(())
}

/// Fills and commits weights, or stops half-way: with half of the parts asked for, and the GPU
/// still at work on them.
fn train(place: &Place, size: (u64, u64)) -> Result<(), Box<dyn Error>> {
    let client = place.connect("trainer")?;
    let stream = Stream::create(client.gpu())?;
    let mut unfinished = Vec::new();
    while let Some(told) = next() {
        let epoch = match told {
            Told::Commit(stamp) => weights::put(&client, size, stamp)?.0,
            Told::Half(stamp) => {
                unfinished.push(weights::begin(&client, size, stamp, &stream, 0.5)?);
                0
            }
        };
        say(&epoch);
    }
    Ok(())
}

fn serve(place: &Place) -> Result<(), Box<dyn Error>> {
    let client = place.connect("engine")?;
    let (mut engine, _) = Engine::open(&client)?;
    engine.answer_right()?;
    say(&Said::Maps(engine.epoch(), engine.stamp()?));
    let newest = follow(&client, engine.epoch());
    std::thread::spawn(|| {
        let _ = next::<()>();
        ENDS.store(true, Ordering::Relaxed);
    });
    let (mut answers, mut advances, mut slowest) = (1, 0, Duration::ZERO);
    while !ENDS.load(Ordering::Relaxed) {
        if newest.load(Ordering::Relaxed) > engine.epoch() {
            let start = Instant::now();
            engine.advance()?;
            (advances, slowest) = (advances + 1, slowest.max(start.elapsed()));
            engine.answer_right()?;
            say(&Said::Maps(engine.epoch(), engine.stamp()?));
        }
        engine.answer_right()?;
        answers += 1;
    }
    say(&Said::Done(answers, advances, slowest));
    Ok(())
}

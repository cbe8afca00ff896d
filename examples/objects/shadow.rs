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
use std::process::ExitCode;
use std::time::Instant;

use gpu_ipc::BackendKind;
use harness::{Child, next, say};
use serde::{Deserialize, Serialize};
use shared::engine::{Engine, memory_taken};
use shared::options::{Options, shown};
use shared::process::{Owner, Place, run, start};
use shared::weights;

/// What the weights are filled with.
const STAMP: u8 = 33;
/// What a shadow may take beyond its context: page tables, the captured graph, and its answer.
const MOST: u64 = 64 << 20;

#[derive(Serialize, Deserialize)]
enum Role {
    /// Puts weights of so many bytes and parts, says their epoch and ends.
    Loader(Place, u64, u64),
    /// Does what it is told, and says a number.
    Engine(Place),
}

#[derive(Serialize, Deserialize)]
enum Told {
    Open,
    Answer,
    /// Says how much memory is taken.
    Memory,
}

fn main() -> ExitCode {
    run("shadow", demonstrate, |role| match role {
        Role::Loader(place, bytes, parts) => load(&place, (bytes, parts)),
        Role::Engine(place) => serve(&place),
    })
}

fn demonstrate(options: &Options) -> Result<(), Box<dyn Error>> {
    let (bytes, parts) = (options.bytes, options.parts);
    let owner = Owner::start(&options.backend)?;
    let mut loader: Child<(), u64> = start(Role::Loader(owner.place(), bytes, parts));
    loader.answer().ok_or("the loader put nothing")?;
    let engine = || -> Child<Told, u64> { start(Role::Engine(owner.place())) };
    let (mut first, mut shadow) = (engine(), engine());
    first.ask(&Told::Open);
    // Without a GPU each process knows its own part alone, and shared pages are counted in parts.
    let is_host = options.backend == BackendKind::Host.name();
    let mut taken = |shadow: &mut Child<Told, u64>| {
        let own = shadow.ask(&Told::Memory);
        first.ask(&Told::Memory) + if is_host { own } else { 0 }
    };
    let before = taken(&mut shadow);
    shadow.ask(&Told::Open);
    let more = taken(&mut shadow).saturating_sub(before);
    if more > MOST || more > bytes / 2 {
        return Err(format!("the shadow took {more} bytes more for the weights").into());
    }
    let killed = Instant::now();
    first.kill();
    shadow.ask(&Told::Answer);
    println!(
        "shadow: {} in {parts} parts, mapped by two engines; the second took {:.1} MiB more for them; when the first \
         was killed it answered right within {:.1} ms",
        shown(bytes),
        more as f64 / f64::from(1 << 20),
        killed.elapsed().as_secs_f64() * 1e3,
    );
    Ok(())
}

fn load(place: &Place, size: (u64, u64)) -> Result<(), Box<dyn Error>> {
    say(&weights::put(&place.connect("loader")?, size, STAMP)?.0);
    Ok(())
}

fn serve(place: &Place) -> Result<(), Box<dyn Error>> {
    let client = place.connect("engine")?;
    // The first stream makes the driver's context.
    drop(gpu_ipc::Stream::create(client.gpu())?);
    let mut engine = None;
    while let Some(told) = next() {
        let number = match told {
            Told::Open => {
                engine.insert(Engine::open(&client)?.0).answer_right()?;
                0
            }
            Told::Answer => {
                engine.as_mut().ok_or("nothing is open")?.answer_right()?;
                0
            }
            Told::Memory => memory_taken(client.gpu())?,
        };
        say(&number);
    }
    Ok(())
}

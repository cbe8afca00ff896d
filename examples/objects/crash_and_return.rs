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
use std::process::ExitCode;
use std::time::{Duration, Instant};

use harness::{Child, say};
use serde::{Deserialize, Serialize};
use shared::engine::Engine;
use shared::options::{Options, shown};
use shared::process::{Owner, Place, run, start};
use shared::weights;

/// What the weights are filled with.
const STAMP: u8 = 77;

#[derive(Serialize, Deserialize)]
enum Role {
    /// Puts weights of so many bytes and parts, says their epoch and ends.
    Loader(Place, u64, u64),
    /// Says its times once it has answered, and answers until it is killed.
    Engine(Place),
}

/// How long an engine took: until it had device and broker, to open, to capture and to answer.
type Times = [Duration; 3];

fn main() -> ExitCode {
    run("crash_and_return", demonstrate, |role| match role {
        Role::Loader(place, bytes, parts) => load(&place, (bytes, parts)),
        Role::Engine(place) => serve(&place),
    })
}

fn demonstrate(options: &Options) -> Result<(), Box<dyn Error>> {
    let (bytes, parts) = (options.bytes, options.parts);
    let owner = Owner::start(&options.backend)?;
    let mut loader: Child<(), u64> = start(Role::Loader(owner.place(), bytes, parts));
    loader.answer().ok_or("the loader put nothing")?;
    loader.wait();
    let mut first: Child<(), Times> = start(Role::Engine(owner.place()));
    first.answer().ok_or("the engine does not answer")?;
    // It answers on and on; wherever it is, it ends here.
    first.kill();
    let began = Instant::now();
    let mut second: Child<(), Times> = start(Role::Engine(owner.place()));
    let times = second.answer().ok_or("the successor does not answer")?;
    let whole = began.elapsed().as_secs_f64() * 1e3;
    let [device, opened, answered] = times.map(|time| time.as_secs_f64() * 1e3);
    println!(
        "crash_and_return: an engine with {} in {parts} parts was killed; its successor answered right {whole:.1} ms \
         after its start: {device:.1} ms until it had device and broker, {opened:.3} ms to open, {answered:.1} ms to \
         capture and to look at every byte",
        shown(bytes),
    );
    Ok(())
}

fn load(place: &Place, size: (u64, u64)) -> Result<(), Box<dyn Error>> {
    say(&weights::put(&place.connect("loader")?, size, STAMP)?.0);
    Ok(())
}

fn serve(place: &Place) -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    let client = place.connect("engine")?;
    let device = start.elapsed();
    let (mut engine, opened) = Engine::open(&client)?;
    engine.answer_right()?;
    let answered = start.elapsed() - device - opened;
    say(&[device, opened, answered]);
    loop {
        engine.answer_right()?;
    }
}

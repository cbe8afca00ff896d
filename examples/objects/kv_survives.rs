//! KV survives: an engine is killed at random, and its successor answers from the blocks that were
//! whole.
//!
//! ```text
//! cargo run --features broker --example kv_survives -- [--backend host|cuda|hip] [--bytes 40GiB] [--parts 200]
//! ```
//!
//! The KV cache is a pool of so many blocks. An engine fills block after block on a stream, each in
//! 16 pieces, and seals it behind the last. Wherever it is when it is killed, the next one, which has
//! device and broker already, adopts the pool, compares every byte of each sealed block with its key
//! and computes the others again.

mod shared;

use std::collections::BTreeSet;
use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use gpu_ipc::Stream;
use gpu_ipc::broker::pool::{Key, Sealed, bytes_for};
use gpu_ipc::broker::{Client, Layout, ObjectError, PartSpec, Pool};
use harness::rng::{Dice, chosen_seed};
use harness::{Child, next, say, wait_until};
use serde::{Deserialize, Serialize};
use shared::options::{Options, shown};
use shared::process::{Owner, Place, run, start};

/// Pieces of a block, each filled with another byte of its key.
const PIECES: u64 = 16;
/// Blocks that are queued at a time.
const QUEUED: u64 = 8;

#[derive(Serialize, Deserialize)]
enum Role {
    /// Waits until it is told to, adopts the pool of so many blocks of so many bytes, and computes
    /// until it is killed.
    Engine(Place, u64, u64),
}

#[derive(Serialize, Deserialize)]
enum Said {
    Warm,
    /// It has the pool, and one sealed block, if there is one, is right.
    Answered,
    /// So many blocks were sealed, and every byte of them is right.
    Kept(u64),
}

fn main() -> ExitCode {
    run("kv_survives", demonstrate, |role| match role {
        Role::Engine(place, blocks, bytes) => serve(&place, blocks, bytes),
    })
}

fn demonstrate(options: &Options) -> Result<(), Box<dyn Error>> {
    let (blocks, bytes) = (
        options.parts,
        options.bytes / options.parts / PIECES * PIECES,
    );
    let owner = Owner::start(&options.backend)?;
    let warm = || -> Result<Child<(), Said>, Box<dyn Error>> {
        let mut engine = start(Role::Engine(owner.place(), blocks, bytes));
        match engine.answer() {
            Some(Said::Warm) => Ok(engine),
            _ => Err("an engine does not start".into()),
        }
    };
    let mut dice = Dice::new(chosen_seed(), 0);
    let (mut kept, mut times) = (0, Vec::new());
    let mut engine = warm()?;
    for round in 0..=options.rounds {
        let death = Instant::now();
        let (Said::Answered, answered, Some(Said::Kept(whole))) =
            (engine.ask(&()), death.elapsed(), engine.answer())
        else {
            return Err("an engine does not answer".into());
        };
        if round > 0 {
            kept += whole;
            times.push(answered);
        }
        if round < options.rounds {
            let successor = warm()?;
            std::thread::sleep(Duration::from_millis(dice.below(options.every)));
            engine.kill();
            engine = successor;
        }
    }
    times.sort_unstable();
    let median = times.get(times.len() / 2).copied().unwrap_or_default();
    println!(
        "kv_survives: {} engines with {} in {blocks} blocks were killed; their successors answered right {:.1} ms \
         after the death (median), found {kept} sealed blocks, every byte of them right, and computed {} again",
        options.rounds,
        shown(blocks * bytes),
        median.as_secs_f64() * 1e3,
        options.rounds * blocks - kept,
    );
    Ok(())
}

fn serve(place: &Place, blocks: u64, bytes: u64) -> Result<(), Box<dyn Error>> {
    let client = place.connect("engine")?;
    let stream = Stream::create(client.gpu())?;
    say(&Said::Warm);
    next::<()>().ok_or("not told to begin")?;
    let pool = take(&client, blocks, bytes)?;
    let sealed = pool.sealed()?;
    sealed
        .first()
        .map_or(Ok(()), |found| check(&pool, found, bytes))?;
    say(&Said::Answered);
    for found in &sealed {
        check(&pool, found, bytes)?;
    }
    say(&Said::Kept(sealed.len() as u64));
    let mut dice = Dice::new(chosen_seed(), 0);
    let whole: BTreeSet<u32> = sealed.iter().map(|found| found.block).collect();
    for block in (0..blocks as u32).filter(|block| !whole.contains(block)) {
        compute(&pool, block, bytes, &stream, &mut dice)?;
    }
    // It lives on: other contents in random blocks, until it is killed.
    loop {
        stream.synchronize()?;
        for _ in 0..QUEUED {
            let block = dice.below(blocks) as u32;
            compute(&pool, block, bytes, &stream, &mut dice)?;
        }
    }
}

/// Adopts the pool as soon as the last holder's death is proven; the first engine makes it.
fn take(client: &Client, blocks: u64, bytes: u64) -> Result<Pool, Box<dyn Error>> {
    let mut pool = None;
    wait_until("the pool is free", || {
        pool = match client.adopt("kv", false) {
            Err(ObjectError::Refused { .. }) => None,
            adopted => Some(adopted),
        };
        pool.is_some()
    });
    match pool.ok_or("no answer")? {
        Err(ObjectError::NotFound { .. }) => {
            let layout = Layout::pack([PartSpec::bytes("kv", blocks * bytes)?], b"")?;
            Ok(client.create_pool("kv", layout, bytes_for(blocks as u32))?)
        }
        adopted => Ok(adopted?),
    }
}

/// Queues a block's filling, and its seal behind that.
fn compute(
    pool: &Pool,
    block: u32,
    bytes: u64,
    stream: &Stream,
    dice: &mut Dice,
) -> Result<(), ObjectError> {
    let mut key = [0; PIECES as usize];
    key.fill_with(|| dice.throw() as u8);
    pool.invalidate(block)?;
    let piece = bytes / PIECES;
    for (at, byte) in (u64::from(block) * bytes..)
        .step_by(piece as usize)
        .zip(key)
    {
        pool.fill("kv", at, piece, byte, stream)?;
    }
    pool.seal(block, Key(key), stream)
}

/// Compares every byte of a sealed block with its key.
fn check(pool: &Pool, found: &Sealed, bytes: u64) -> Result<(), Box<dyn Error>> {
    let mut contents = vec![0; bytes as usize];
    pool.read_part("kv", u64::from(found.block) * bytes, &mut contents)?;
    let mut pieces = contents.chunks((bytes / PIECES) as usize).zip(found.key.0);
    if pieces.all(|(piece, byte)| piece.iter().all(|is| *is == byte)) {
        return Ok(());
    }
    Err(format!("block {} is listed and not whole", found.block).into())
}

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

type Done<T = ()> = Result<T, Box<dyn Error>>;

/// Pieces of a block, each filled with another byte of its key.
const PIECES: u64 = 16;
/// Blocks that are queued at a time.
const QUEUED: usize = 8;

/// An engine for so many blocks of so many bytes. It says 0 when it has device and broker, and is
/// told to begin; 0 again when it has the pool and one sealed block, if there is one, is right; then
/// how many blocks were sealed, when every byte of them was.
#[derive(Serialize, Deserialize)]
struct Engine(Place, u64, u64);

fn main() -> ExitCode {
    run(
        "kv_survives",
        demonstrate,
        |Engine(place, blocks, bytes)| serve(&place, blocks, bytes),
    )
}

fn demonstrate(options: &Options) -> Done {
    let (blocks, bytes) = (
        options.parts,
        options.bytes / options.parts / PIECES * PIECES,
    );
    let owner = Owner::start(&options.backend)?;
    let warm = || -> Done<Child<(), u64>> {
        let mut engine = start(Engine(owner.place(), blocks, bytes));
        engine.answer().ok_or("an engine does not start")?;
        Ok(engine)
    };
    let (mut dice, mut kept, mut times) = (Dice::new(chosen_seed(), 0), 0, Vec::new());
    let mut engine = warm()?;
    engine.ask(&());
    engine.answer().ok_or("the first engine does not answer")?;
    for _ in 0..options.rounds {
        let mut successor = warm()?;
        std::thread::sleep(Duration::from_millis(dice.below(options.every)));
        let death = Instant::now();
        engine.kill();
        successor.ask(&());
        times.push(death.elapsed());
        kept += successor.answer().ok_or("a sealed block is not right")?;
        engine = successor;
    }
    times.sort_unstable();
    println!(
        "kv_survives: {} engines with {} in {blocks} blocks were killed; their successors answered right {:.1} ms \
         after the death (median), found {kept} sealed blocks, every byte of them right, and computed {} again",
        options.rounds,
        shown(blocks * bytes),
        times
            .get(times.len() / 2)
            .map_or(0.0, Duration::as_secs_f64)
            * 1e3,
        options.rounds * blocks - kept,
    );
    Ok(())
}

fn serve(place: &Place, blocks: u64, bytes: u64) -> Done {
    let client = place.connect("engine")?;
    let stream = Stream::create(client.gpu())?;
    say(&0);
    next::<()>().ok_or("not told to begin")?;
    let pool = take(&client, blocks, bytes)?;
    let sealed = pool.sealed()?;
    let mut found = sealed.iter();
    found
        .next()
        .map_or(Ok(()), |first| check(&pool, first, bytes))?;
    say(&0);
    found.try_for_each(|found| check(&pool, found, bytes))?;
    say(&sealed.len());
    let mut dice = Dice::new(chosen_seed(), 0);
    let is_lost = |block: &u32| sealed.iter().all(|found| found.block != *block);
    let lost: Vec<u32> = (0..blocks as u32).filter(is_lost).collect();
    // What was lost, and then other contents in random blocks, until it is killed.
    for queued in lost.chunks(QUEUED) {
        compute(&pool, queued, bytes, &stream, &mut dice)?;
    }
    loop {
        let block = dice.below(blocks) as u32;
        compute(&pool, &[block], bytes, &stream, &mut dice)?;
    }
}

/// Makes the pool, or adopts it as soon as the last holder's death is proven.
fn take(client: &Client, blocks: u64, bytes: u64) -> Done<Pool> {
    let layout = Layout::pack([PartSpec::bytes("kv", blocks * bytes)?], b"")?;
    let mut pool = client.create_pool("kv", layout, bytes_for(blocks as u32));
    wait_until("the pool is free", || {
        if let Err(ObjectError::Refused { .. }) = pool {
            pool = client.adopt("kv", false);
        }
        !matches!(pool, Err(ObjectError::Refused { .. }))
    });
    Ok(pool?)
}

/// Fills blocks and seals each behind its last piece.
fn compute(pool: &Pool, blocks: &[u32], bytes: u64, stream: &Stream, dice: &mut Dice) -> Done {
    for &block in blocks {
        let key = std::array::from_fn(|_| dice.throw() as u8);
        pool.invalidate(block)?;
        let places = (u64::from(block) * bytes..).step_by((bytes / PIECES) as usize);
        for (at, byte) in places.zip(key) {
            pool.fill("kv", at, bytes / PIECES, byte, stream)?;
        }
        pool.seal(block, Key(key), stream)?;
    }
    Ok(stream.synchronize()?)
}

/// Compares every byte of a sealed block with its key.
fn check(pool: &Pool, found: &Sealed, bytes: u64) -> Done {
    let mut contents = vec![0; bytes as usize];
    pool.read_part("kv", u64::from(found.block) * bytes, &mut contents)?;
    let mut pieces = contents.chunks((bytes / PIECES) as usize).zip(found.key.0);
    if pieces.all(|(piece, byte)| piece.iter().all(|is| *is == byte)) {
        return Ok(());
    }
    Err(format!("block {} is listed and not whole", found.block).into())
}

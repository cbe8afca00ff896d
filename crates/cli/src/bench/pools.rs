//! Rows of pools: what a seal costs, and how soon a dead holder's successor answers.

use std::time::{Duration, Instant};

use gpu_ipc::Stream;
use gpu_ipc::broker::pool::{Key, bytes_for};
use gpu_ipc::broker::{Client, Layout, ObjectError, PartSpec, Pool};

use super::fixture::{PATIENCE, Stage};
use super::objects::{Pinned, largest, process_args, shown, taken};
use super::options::BenchPoolOptions;
use super::raw_calls::Naked;
use super::row::{Goal, Row};
use super::sample::Pairs;
use crate::child::{self, Child};
use crate::failure::Result;
use crate::owner::{Owner, connect};
use crate::{Outcome, device};

/// Blocks that are sealed in one call.
const SEALED: u32 = 64;
/// Bytes of a block where a successor is timed.
const BLOCK: u64 = 1 << 20;
/// What the blocks are filled with.
const CONTENTS: u8 = 77;
/// Between two attempts to adopt.
const PAUSE: Duration = Duration::from_millis(1);

/// Both rows.
pub fn rows(stage: &Stage) -> Result<Vec<Row>> {
    let before = taken(&stage.gpu)?;
    let dir = std::env::temp_dir().join(format!("gpu-ipc-bench-pools-{}", std::process::id()));
    let owner = Owner::start(&stage.gpu, dir, &[])?;
    let rows = vec![seal(stage, &owner)?, successor(stage, &owner, before)?];
    // What the host backend does is no driver's work.
    Ok(if stage.gpu.kind().in_host_memory() {
        rows.into_iter().map(Row::without_goal).collect()
    } else {
        rows
    })
}

/// A seal of many blocks beside the batch of words that it queues.
fn seal(stage: &Stage, owner: &Owner) -> Result<Row> {
    let client = owner.connect(&stage.gpu, "bench")?;
    let layout = Layout::pack([PartSpec::bytes("kv", 4096)?], b"")?;
    let pool = client.create_pool("seals", layout, bytes_for(SEALED))?;
    let stream = Stream::create(&stage.gpu)?;
    let mut naked = Naked::new(&stage.gpu, &*stage.floor)?;
    let blocks: Vec<(u32, Key)> = (0..SEALED)
        .map(|block| (block, Key([block as u8; 16])))
        .collect();
    let mut pairs = Pairs::new(1);
    for _ in 0..stage.choose(2_000, 5) {
        for (block, _) in &blocks {
            pool.invalidate(*block)?;
        }
        pairs.sample(
            || Ok(pool.seal_all(&blocks, &stream)?),
            || naked.writes(SEALED as usize),
        )?;
        stream.synchronize()?;
        naked.settle()?;
    }
    let row = Row::new(
        "pool-seal",
        "seal of so many blocks on a stream",
        "one batch of as many raw words",
    );
    let row = row.at(u64::from(SEALED), &SEALED.to_string());
    Ok(row.measured(pairs).goal(Goal::Times(1.3, 0.0)))
}

/// From a holder's death until a process that waits for the pool has looked at a whole block, beside
/// a copy of all blocks.
fn successor(stage: &Stage, owner: &Owner, before: u64) -> Result<Row> {
    let bytes = largest(stage, before)?;
    let pinned = Pinned::new(&stage.gpu, bytes)?;
    let mut args = process_args(stage, owner, "pool", "kv");
    args.extend(["--bytes".to_owned(), bytes.to_string()]);
    let warm = || -> Result<Child<()>> {
        let mut child = Child::start(args.iter().map(String::as_str), PATIENCE)?;
        child.answer::<()>()?;
        Ok(child)
    };
    let mut holder = warm()?;
    let () = holder.ask(&())?;
    let mut pairs = Pairs::new(1);
    for _ in 0..stage.choose(5, 1) {
        let mut next = warm()?;
        next.tell(&())?;
        let start = Instant::now();
        holder.kill()?;
        let () = next.answer()?;
        let answered = start.elapsed().as_nanos() as u64;
        let start = Instant::now();
        pinned.copy(bytes)?;
        pairs.add(&[answered, start.elapsed().as_nanos() as u64]);
        holder = next;
    }
    let row = Row::new(
        "pool-successor",
        "from a holder's death to its successor's first right answer",
        "a copy of as many bytes from pinned host memory, 1 GiB at a time",
    );
    let row = row.at(bytes, &shown(bytes)).measured(pairs);
    Ok(row.goal(Goal::Times(1.0 / 5.0, 0.0)))
}

/// Lives as a holder: says that it is there, waits for its turn, and answers when one block that was
/// whole is right. The first fills all of them.
pub fn run_holder(options: &BenchPoolOptions) -> Outcome {
    child::live(|| -> Result<()> {
        let place = &options.place;
        let gpu = device::find(place.backend.kind(), &place.device)?;
        let stream = Stream::create(&gpu)?;
        let client = connect(&gpu, &place.dir, "bench holder")?;
        child::reply(&())?;
        child::next::<()>()?;
        let blocks = u32::try_from(options.bytes / BLOCK).map_err(|e| e.to_string())?;
        let pool = take(&client, &place.name, options.bytes, blocks)?;
        if pool.generation() == 1 {
            fill(&pool, options.bytes, blocks, &stream)?;
        }
        let whole = pool.sealed()?;
        if whole.len() != blocks as usize {
            return Err(format!("{} of {blocks} blocks are whole", whole.len()).into());
        }
        let mut contents = vec![0; BLOCK as usize];
        pool.read_part("kv", u64::from(blocks / 2) * BLOCK, &mut contents)?;
        if contents.iter().any(|byte| *byte != CONTENTS) {
            return Err("a whole block has other contents".into());
        }
        child::reply(&())?;
        child::next::<()>()?;
        Ok(())
    })
}

fn take(client: &Client, name: &str, bytes: u64, blocks: u32) -> Result<Pool> {
    loop {
        match client.adopt(name, false) {
            Err(ObjectError::Refused { .. }) => std::thread::sleep(PAUSE),
            Err(ObjectError::NotFound { .. }) => {
                let layout = Layout::pack([PartSpec::bytes("kv", bytes)?], b"")?;
                return Ok(client.create_pool(name, layout, bytes_for(blocks))?);
            }
            adopted => return Ok(adopted?),
        }
    }
}

fn fill(pool: &Pool, bytes: u64, blocks: u32, stream: &Stream) -> Result<()> {
    let keys: Vec<(u32, Key)> = (0..blocks)
        .map(|block| (block, Key([CONTENTS; 16])))
        .collect();
    for (block, _) in &keys {
        pool.invalidate(*block)?;
    }
    pool.fill("kv", 0, bytes, CONTENTS, stream)?;
    pool.seal_all(&keys, stream)?;
    Ok(stream.synchronize()?)
}

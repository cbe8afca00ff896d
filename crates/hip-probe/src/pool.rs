//! The runtime's stream-ordered pools: that what is written stays, that nobody waits or comes too
//! early, that they run out where the device does, and that they keep and give back what they were
//! told.
//!
//! Each part follows a report of AMD's, or a rule of [`GpuPools`]: what is found is a
//! [`PoolDefect`].

use std::collections::VecDeque;
use std::io::Write;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use backend_hip::PoolDefect;
use gpu_api::thread::start_scoped;
use gpu_api::{
    Allocation, Error, EventKind, GpuCopies, GpuEvents, GpuMemory, GpuPools, GpuStreams, PoolUsage,
    RawEvent, RawPool, RawStream, Sharing,
};

use crate::runtime::{Runtime, Seen, expect, told};

/// What buffers that pass from stream to stream have, in bytes.
const SIZES: [u64; 6] = [256, 4096, 12 << 10, 64 << 10, 1 << 20, 3 << 20];
/// How many of them pass. Of 600 a report saw 151 zeroed.
const ROUNDS: usize = 60;
/// How many stay a while, to be looked at after others came and went.
const LIVE: usize = 6;
/// Large beside what a pool takes from the device at once.
const PIECE: u64 = 64 << 20;
/// How many pieces of the device's memory come and go, and into how many parts that memory is
/// divided for it.
const CHURN: u64 = 24;
const PARTS: u64 = 16;
/// What a call that waits for nobody may take, and memory that comes back.
const MOMENT: Duration = Duration::from_secs(10);

/// Makes a reason of a defect where it shows.
fn found(defect: PoolDefect, shows: bool, detail: &str) -> Seen {
    if shows {
        Err(format!("{defect}; {detail}"))
    } else {
        Ok(())
    }
}

/// A pool that is ended with its step; after an error with the process.
struct Pool<'a> {
    runtime: &'a Runtime,
    raw: RawPool,
}

impl Pool<'_> {
    fn make(runtime: &Runtime, keep: u64) -> Result<Pool<'_>, String> {
        Ok(Pool {
            runtime,
            raw: runtime
                .hip
                .create_pool(runtime.device, keep)
                .map_err(told)?,
        })
    }

    fn end(self) -> Seen {
        // SAFETY: `destroy_pool` asks for a live pool: it is its owner's end.
        unsafe { self.runtime.hip.destroy_pool(self.raw) }.map_err(told)
    }

    /// Allocates; there may be no room.
    fn try_alloc(&self, stream: RawStream, len: u64) -> Result<Allocation, Error> {
        // SAFETY: `pool_alloc` asks for a live pool and stream of one device: both until the step's
        // end.
        unsafe { self.runtime.hip.pool_alloc(self.raw, stream, len) }
    }

    /// Allocates where there is room.
    fn alloc(&self, stream: RawStream, len: u64) -> Result<Allocation, String> {
        self.try_alloc(stream, len).map_err(|error| match error {
            Error::OutOfMemory { .. } => {
                format!("{}; {len} bytes: {}", PoolDefect::RunsOut, told(error))
            }
            error => told(error),
        })
    }

    fn free(&self, stream: RawStream, memory: Allocation) -> Seen {
        // SAFETY: `pool_free` asks for memory of a pool, once, all of whose work this stream comes
        // after: each part sees to it.
        unsafe { self.runtime.hip.pool_free(stream, memory.base) }.map_err(told)
    }

    fn usage(&self) -> Result<PoolUsage, String> {
        // SAFETY: `pool_usage` asks for a live pool: `self` keeps it.
        unsafe { self.runtime.hip.pool_usage(self.raw) }.map_err(told)
    }

    fn trim(&self) -> Seen {
        // SAFETY: `trim_pool` asks for a live pool: `self` keeps it.
        unsafe { self.runtime.hip.trim_pool(self.raw, 0) }.map_err(told)
    }

    /// Looks until the pool has less than a piece, each time after its stream is synchronised.
    fn expect_empty(&self, when: &str) -> Seen {
        let until = Instant::now() + MOMENT;
        loop {
            self.runtime.synchronize(self.runtime.stream)?;
            let reserved = self.usage()?.reserved;
            if reserved < PIECE {
                return Ok(());
            }
            let detail = format!("{reserved} bytes are reserved {when}");
            found(
                PoolDefect::GivesNothingBack,
                Instant::now() > until,
                &detail,
            )?;
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Queues a fill.
fn fill(runtime: &Runtime, stream: RawStream, memory: Allocation, byte: u8) -> Seen {
    // SAFETY: `fill` asks for a live stream and a range that stays valid until it is done: what
    // frees the memory is queued behind it.
    unsafe { runtime.hip.fill(stream, memory.base, byte, memory.len) }.map_err(told)
}

/// Makes a stream wait for all that another one has queued.
fn follow(runtime: &Runtime, event: RawEvent, after: RawStream, stream: RawStream) -> Seen {
    // SAFETY: `record_event` asks for a live event and stream of one device: until the process
    // ends.
    unsafe { runtime.hip.record_event(event, after) }.map_err(told)?;
    // SAFETY: `stream_wait_event` asks for the same.
    unsafe { runtime.hip.stream_wait_event(stream, event) }.map_err(told)
}

/// Reads all of a buffer and finds the first byte that is another.
fn first_other(
    runtime: &Runtime,
    stream: RawStream,
    memory: Allocation,
    byte: u8,
) -> Result<Option<usize>, String> {
    let mut bytes = vec![!byte; memory.len as usize];
    // SAFETY: `copy_to_host` asks for a live stream and ranges that are valid until it is done:
    // this waits for it.
    unsafe {
        runtime
            .hip
            .copy_to_host(stream, bytes.as_mut_ptr(), memory.base, bytes.len())
    }
    .map_err(told)?;
    runtime.synchronize(stream)?;
    // All at once: one by one takes long in a build without optimisation.
    if bytes == vec![byte; bytes.len()] {
        return Ok(None);
    }
    Ok(bytes.iter().position(|found| *found != byte))
}

fn expect_kept(
    runtime: &Runtime,
    stream: RawStream,
    memory: Allocation,
    byte: u8,
    when: &str,
) -> Seen {
    let other = first_other(runtime, stream, memory, byte)?;
    let detail = format!(
        "byte {} of {}, {when}",
        other.unwrap_or_default(),
        memory.len
    );
    found(PoolDefect::LosesBytes, other.is_some(), &detail)
}

/// What is to be read only where the process does not come to its end.
fn begin(part: &str) {
    // Only the parent reads it, so an error here has no other reader.
    let _ = writeln!(std::io::stderr(), "it {part}");
}

pub(crate) fn use_pools(runtime: &Runtime) -> Seen {
    runtime.channel.await_point(b'h')?;
    let other = runtime.hip.create_stream(runtime.device).map_err(told)?;
    for keep in [0, u64::MAX] {
        let pool = Pool::make(runtime, keep)?;
        begin("passed buffers of a pool from one stream to the other");
        pass_buffers(&pool, other)?;
        begin("held up a stream that had given memory back to a pool");
        for len in [4096, 1 << 20, PIECE] {
            keep_apart(&pool, other, len)?;
        }
        runtime.synchronize(other)?;
        pool.end()?;
    }
    begin("took more from a pool, bit by bit, than the device has");
    churn(runtime)?;
    begin("gave memory back to a pool that was to keep it");
    keep_what_is_told(runtime)?;
    begin("asked a pool for more than was left");
    fail_alone(runtime)?;
    runtime.channel.tell(b'f')?;
    runtime.channel.await_point(b'u')
}

/// Allocates from the other process' share, once this one's allocation failed and went back.
pub(crate) fn use_the_rest(runtime: &Runtime) -> Seen {
    runtime.channel.tell(b'h')?;
    runtime.channel.await_point(b'f')?;
    let len = runtime.free_bytes()? / 2;
    let memory = runtime.hip.alloc(runtime.device, len, Sharing::Handle);
    let memory = memory.map_err(|error| {
        format!(
            "{}; for another process: {}",
            PoolDefect::KeepsTheRest,
            told(error)
        )
    })?;
    runtime.write(memory.base, 1)?;
    // SAFETY: `free` asks for an allocation that nothing touches: the write was waited for.
    unsafe { runtime.hip.free(memory.base) }.map_err(told)?;
    runtime.channel.tell(b'u')
}

/// Fills buffers of one stream, copies them on the other, and gives each back on the stream that
/// did not allocate it (ROCm/rocm-systems#10943: copies alone, two streams, synchronised now and
/// then).
fn pass_buffers(pool: &Pool<'_>, other: RawStream) -> Seen {
    let runtime = pool.runtime;
    let (own, event) = (
        runtime.stream,
        runtime
            .hip
            .create_event(runtime.device, EventKind::Local)
            .map_err(told)?,
    );
    let mut live: VecDeque<(Allocation, u8)> = VecDeque::new();
    for round in 0..ROUNDS {
        let (len, byte) = (SIZES[round % SIZES.len()], (round % 251 + 1) as u8);
        let first = pool.alloc(own, len)?;
        fill(runtime, own, first, byte)?;
        follow(runtime, event, own, other)?;
        let second = pool.alloc(other, len)?;
        // SAFETY: `copy` asks for a live stream and ranges that stay valid until it is done: what
        // frees them is queued behind it.
        unsafe { runtime.hip.copy(other, second.base, first.base, len) }.map_err(told)?;
        pool.free(other, first)?;
        expect_kept(runtime, other, second, byte, "when it was copied")?;
        live.push_back((second, byte));
        if round % 8 == 0 {
            runtime.synchronize(own)?;
        }
        if live.len() > LIVE
            && let Some((oldest, byte)) = live.pop_front()
        {
            expect_kept(runtime, other, oldest, byte, "after others came and went")?;
            follow(runtime, event, other, own)?;
            pool.free(own, oldest)?;
        }
    }
    for (memory, byte) in live {
        expect_kept(runtime, other, memory, byte, "at last")?;
        pool.free(other, memory)?;
    }
    runtime.synchronize(own)?;
    runtime.synchronize(other)?;
    // SAFETY: `destroy_event` asks for an event that nobody uses afterwards: both streams are done.
    unsafe { runtime.hip.destroy_event(event) }.map_err(told)
}

/// Gives memory back on a stream that is held up, and allocates as much on another one: that must
/// not wait, and must not be the same memory.
fn keep_apart(pool: &Pool<'_>, other: RawStream, len: u64) -> Seen {
    let (runtime, own) = (pool.runtime, pool.runtime.stream);
    let first = pool.alloc(own, len)?;
    let go = runtime.hold(own)?;
    fill(runtime, own, first, 1)?;
    pool.free(own, first)?;
    let (done, waiting) = mpsc::channel();
    let (second, go) = thread::scope(|scope| {
        // The receiver is dropped after the thread's end only.
        let ask = || done.send(pool.alloc(other, len));
        if let Err(error) = start_scoped(scope, "gpu-ipc-probe", ask) {
            return (Err(told(error)), Some(go));
        }
        let second = waiting.recv_timeout(MOMENT);
        let late = found(
            PoolDefect::Waits,
            second.is_err(),
            "the call did not return until the other stream went on",
        );
        // What is late is waited for at the end of the scope, and that waits for the stream.
        let go = late.is_ok().then_some(go);
        (
            late.and_then(|()| second.unwrap_or_else(|_| Err("no allocation came".to_owned()))),
            go,
        )
    });
    let second = second?;
    fill(runtime, other, second, 2)?;
    if second.base < first.base.offset(first.len) && first.base < second.base.offset(second.len) {
        let until = Instant::now() + MOMENT;
        while !runtime.is_idle(other)? {
            let waits = Instant::now() > until;
            found(
                PoolDefect::Waits,
                waits,
                "it was given memory that the other stream still worked on",
            )?;
            thread::sleep(Duration::from_millis(1));
        }
        found(
            PoolDefect::TooEarly,
            true,
            "what the second stream wrote will be overwritten",
        )?;
    }
    drop(go);
    runtime.synchronize(own)?;
    expect_kept(
        runtime,
        other,
        second,
        2,
        "beside a stream that was held up",
    )?;
    pool.free(other, second)
}

/// Takes and gives back pieces of several sizes, more than the device has in all (ROCm/hip#3775).
fn churn(runtime: &Runtime) -> Seen {
    let (pool, stream) = (Pool::make(runtime, u64::MAX)?, runtime.stream);
    let part = runtime.free_bytes()? / PARTS;
    for round in 0..CHURN {
        let len = part * (1 + round % 6);
        let memory = match pool.try_alloc(stream, len) {
            // What it keeps may be in pieces that are too small: an allocator gives those back and
            // asks again.
            Err(Error::OutOfMemory { .. }) => {
                pool.trim()?;
                pool.alloc(stream, len)?
            }
            other => other.map_err(told)?,
        };
        let last = Allocation {
            base: memory.base.offset(memory.len - 4096),
            len: 4096,
        };
        fill(runtime, stream, last, 3)?;
        expect_kept(runtime, stream, last, 3, "at the end of a large piece")?;
        pool.free(stream, memory)?;
        runtime.synchronize(stream)?;
    }
    pool.trim()?;
    pool.expect_empty("after a trim")?;
    pool.end()
}

/// Looks whether a pool keeps what it was told to (ROCm/rocm-systems#11690), and gives it back when
/// it is trimmed; and whether one that is to keep nothing does.
fn keep_what_is_told(runtime: &Runtime) -> Seen {
    let (stream, before) = (runtime.stream, runtime.free_bytes()?);
    let pool = Pool::make(runtime, u64::MAX)?;
    let three = || -> Result<[Allocation; 3], String> {
        let one = || pool.alloc(stream, PIECE);
        Ok([one()?, one()?, one()?])
    };
    let [first, second, third] = three()?;
    for memory in [first, second, third] {
        fill(runtime, stream, memory, 4)?;
    }
    runtime.synchronize(stream)?;
    // In two steps: more idle than in use is what made the reported one release.
    pool.free(stream, first)?;
    pool.free(stream, second)?;
    runtime.synchronize(stream)?;
    pool.free(stream, third)?;
    runtime.synchronize(stream)?;
    let reserved = pool.usage()?.reserved;
    let detail = format!("{reserved} bytes are reserved of {}", 3 * PIECE);
    found(PoolDefect::IgnoresThreshold, reserved < 3 * PIECE, &detail)?;
    pool.trim()?;
    pool.expect_empty("after a trim")?;
    pool.end()?;
    expect_free(runtime, before, "after a trim")?;

    let pool = Pool::make(runtime, 0)?;
    let memory = pool.alloc(stream, 3 * PIECE)?;
    fill(runtime, stream, memory, 5)?;
    pool.free(stream, memory)?;
    pool.expect_empty("of a pool that is to keep nothing")?;
    expect_free(runtime, before, "of a pool that is to keep nothing")?;
    pool.end()
}

/// Looks until the device has as much free memory as before, but for a piece.
fn expect_free(runtime: &Runtime, before: u64, when: &str) -> Seen {
    let until = Instant::now() + MOMENT;
    loop {
        let free = runtime.free_bytes()?;
        if free + PIECE >= before {
            return Ok(());
        }
        let detail = format!("{free} bytes are free {when}, {before} before");
        found(
            PoolDefect::GivesNothingBack,
            Instant::now() > until,
            &detail,
        )?;
        thread::sleep(Duration::from_millis(1));
    }
}

/// Asks a pool for more than is left of the device, and looks whether the rest stays what it was
/// (ROCm/rocm-systems#11642).
fn fail_alone(runtime: &Runtime) -> Seen {
    let plain = |len| runtime.hip.alloc(runtime.device, len, Sharing::Handle);
    let give_back = |memory: Allocation| {
        // SAFETY: `free` asks for an allocation that nothing touches: nothing was queued on it.
        unsafe { runtime.hip.free(memory.base) }.map_err(told)
    };
    let (pool, stream) = (Pool::make(runtime, 0)?, runtime.stream);
    let small = pool.alloc(stream, 1 << 20)?;
    fill(runtime, stream, small, 6)?;
    runtime.synchronize(stream)?;
    let free = runtime.free_bytes()?;
    let most = plain(free / 3 * 2).map_err(told)?;
    match pool.try_alloc(stream, free / 2) {
        Ok(_) => expect("more than is left of the device is refused", false)?,
        Err(Error::OutOfMemory { .. }) => {}
        Err(error) => return Err(told(error)),
    }
    let rest = plain(free / 4);
    let rest = rest.map_err(|error| {
        format!(
            "{}; {} bytes: {}",
            PoolDefect::KeepsTheRest,
            free / 4,
            told(error)
        )
    })?;
    let whole = first_other(runtime, stream, small, 6)?.is_none();
    found(PoolDefect::LosesBytes, !whole, "after an allocation failed")?;
    pool.free(stream, small)?;
    give_back(rest)?;
    give_back(most)?;
    runtime.synchronize(stream)?;
    pool.end()?;
    expect_free(runtime, free, "after an allocation failed")
}

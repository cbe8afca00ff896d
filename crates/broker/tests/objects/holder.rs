//! A process that holds a pool.

use std::cell::RefCell;

use broker::pool::{Key, bytes_for};
use broker::{Client, Layout, ObjectError, PartSpec, Pool};
use gpu_api::Error;
use ipc_rc::Stream;
use serde::{Deserialize, Serialize};

pub const BLOCK: u64 = 4_096;
pub const BLOCKS: u32 = 16;

/// What a holder is told.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Told {
    /// Adopts the pool, which it creates if there is none; says its generation.
    Take,
    /// Fills a block with a byte, seals it and waits.
    Put(u32, u8),
    /// Fills half of a block, and queues the rest and the seal behind what never ends.
    Half(u32, u8),
    Close,
    /// Forks a child that lives on; says its pid.
    Fork,
}

thread_local! {
    /// What this process holds.
    static HELD: RefCell<Option<(Pool, Stream)>> = const { RefCell::new(None) };
}

/// Does as a holder what it is told; returns the generation of what it took.
pub fn carry_out(client: &Client, told: Told) -> broker::Result<Option<u64>> {
    HELD.with_borrow_mut(|held| match told {
        Told::Take => {
            let pool = match client.adopt("kv", false) {
                Err(ObjectError::NotFound { .. }) => create(client)?,
                pool => pool?,
            };
            let generation = pool.generation();
            *held = Some((pool, Stream::create(client.gpu())?));
            Ok(Some(generation))
        }
        Told::Put(block, byte) => {
            let (pool, stream) = held.as_ref().expect("taken first");
            put_block(pool, stream, block, byte)?;
            stream.synchronize()?;
            Ok(None)
        }
        Told::Half(block, byte) => {
            let (pool, _) = held.as_ref().expect("taken first");
            let stream = Stream::create(client.gpu())?;
            pool.invalidate(block)?;
            let at = u64::from(block) * BLOCK;
            pool.fill("kv", at, BLOCK / 2, byte, &stream)?;
            stream.synchronize()?;
            let (open, gate) = std::sync::mpsc::channel::<()>();
            std::mem::forget(open);
            stream.host_function(move || gate.recv().unwrap_or(()))?;
            pool.fill("kv", at + BLOCK / 2, BLOCK / 2, byte, &stream)?;
            pool.seal(block, key(byte), &stream)?;
            Ok(None)
        }
        Told::Fork => {
            // SAFETY: `fork` asks for a child that does only what is safe in a signal handler: it
            // sleeps.
            let child = unsafe {
                harness::fork(|| {
                    std::thread::sleep(std::time::Duration::from_secs(600));
                    0
                })
            };
            let child = child.map_err(|e| Error::system("fork", "raise RLIMIT_NPROC", e))?;
            let pid = child.pid();
            child.leave();
            Ok(Some(u64::from(pid)))
        }
        Told::Close => {
            let (pool, stream) = held.take().expect("taken first");
            pool.close(&[&stream])?;
            Ok(None)
        }
    })
}

pub fn key(byte: u8) -> Key {
    Key([byte; 16])
}

pub fn create(client: &Client) -> broker::Result<Pool> {
    let part = PartSpec::bytes("kv", BLOCK * u64::from(BLOCKS))?;
    client.create_pool("kv", Layout::pack([part], b"")?, bytes_for(BLOCKS))
}

pub fn put_block(pool: &Pool, stream: &Stream, block: u32, byte: u8) -> broker::Result<()> {
    pool.invalidate(block)?;
    pool.fill("kv", u64::from(block) * BLOCK, BLOCK, byte, stream)?;
    pool.seal(block, key(byte), stream)
}

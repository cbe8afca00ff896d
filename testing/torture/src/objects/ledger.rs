//! What the pools of a run contain, and what is known of each block, in memory that outlives the
//! holders.
//!
//! | word | stored | says |
//! |---|---|---|
//! | `proven` | 0 before the block is given up, its stamp once its stream was waited for | the block is whole: a successor must list it, with that stamp |
//! | `asked` | before the seal is queued | the only stamp that may be listed |

use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_ipc::broker::pool::{Key, Sealed};
use gpu_ipc::broker::{Layout, PartSpec};

use crate::shared_stats::{Shared, map};
use gpu_ipc_cli::device::explain;
use gpu_ipc_cli::pattern;

/// Pools of a run.
pub const POOLS: usize = 2;
/// Blocks of a pool.
pub const BLOCKS: u32 = 24;
/// Bytes of a block.
pub const BLOCK_BYTES: u64 = 16 << 10;
/// Pieces of a block, each of another byte.
pub const PIECES: usize = 16;
pub const PIECE_BYTES: u64 = BLOCK_BYTES / PIECES as u64;
pub const PART: &str = "kv";

/// Names a pool.
pub fn name_of(pool: usize) -> String {
    format!("cache{pool}")
}

/// Lays out a pool.
pub fn layout() -> Result<Layout, String> {
    let part = PartSpec::bytes(PART, u64::from(BLOCKS) * BLOCK_BYTES).map_err(|e| explain(&e))?;
    Layout::pack([part], b"").map_err(|e| explain(&e))
}

/// Where a block begins in the part.
pub fn offset_of(block: u32) -> u64 {
    u64::from(block) * BLOCK_BYTES
}

/// Returns the byte of each piece of the contents with a stamp.
pub fn pieces_of(stamp: u64) -> [u8; PIECES] {
    let mut pieces = [0; PIECES];
    pattern::fill(&mut pieces, stamp);
    pieces
}

/// Makes the key of the contents with a stamp.
pub fn key_of(stamp: u64) -> Key {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&stamp.to_le_bytes());
    key[8..].copy_from_slice(&pattern::stamp(stamp, 0).to_le_bytes());
    Key(key)
}

/// Returns the stamp of a key; `None` for a key that no process of a run makes.
pub fn stamp_of(key: Key) -> Option<u64> {
    let stamp = u64::from_le_bytes(key.0[..8].try_into().ok()?);
    (key_of(stamp) == key).then_some(stamp)
}

/// Says whether a block's bytes are those of its key.
pub fn is_whole(bytes: &[u8], found: &Sealed) -> bool {
    stamp_of(found.key).is_some_and(|stamp| {
        let pieces = bytes.chunks(PIECE_BYTES as usize).zip(pieces_of(stamp));
        pieces
            .into_iter()
            .all(|(piece, byte)| piece.iter().all(|found| *found == byte))
    })
}

/// What is known of a block.
#[derive(Debug)]
#[repr(C)]
struct Block {
    asked: AtomicU64,
    proven: AtomicU64,
}

/// What is known of a pool. All zeroes: it was not made yet.
#[derive(Debug)]
#[repr(C)]
pub struct Pool {
    /// The last generation that a holder saw.
    generation: AtomicU64,
    /// Serial and pid of the process that holds it; 0 from before a close on.
    holder: AtomicU64,
    blocks: [Block; BLOCKS as usize],
}

/// What is known of all pools.
#[derive(Debug)]
#[repr(C)]
pub struct Ledger([Pool; POOLS]);

// SAFETY: its fields are arrays and `repr(C)` structs of atomic integers.
unsafe impl Shared for Ledger {}

impl Ledger {
    /// Makes a file for one, or opens the one that is there.
    ///
    /// # Errors
    ///
    /// The system's error.
    pub fn open(path: &Path) -> io::Result<&'static Ledger> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(path)?;
        file.set_len(size_of::<Ledger>() as u64)?;
        map(&file)
    }

    pub fn pool(&self, pool: usize) -> &Pool {
        &self.0[pool]
    }
}

impl Pool {
    /// Says whether a process has held it.
    pub fn is_made(&self) -> bool {
        self.generation.load(Ordering::Acquire) > 0
    }

    /// Notes a hold's generation. Returns the one before, which must be lower.
    pub fn adopted(&self, generation: u64) -> u64 {
        self.generation.fetch_max(generation, Ordering::AcqRel)
    }

    /// Notes which process holds it. Returns the pid of the one before, if that lives and has not
    /// closed it.
    pub fn held_by(&self, serial: u64) -> Option<u32> {
        let word = serial << 32 | u64::from(std::process::id());
        let before = self.holder.swap(word, Ordering::AcqRel);
        let (serial, pid) = ((before >> 32).to_string(), before as u32);
        // One that has exited has no words any more.
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = words.split(|byte| *byte == 0);
        let lives = before != 0
            && words.any(|word| word == b"--serial")
            && words.next() == Some(serial.as_bytes());
        lives.then_some(pid)
    }

    /// Notes that the hold is about to be closed.
    pub fn closes(&self) {
        self.holder.store(0, Ordering::Release);
    }

    /// Notes that a block is about to be given up.
    pub fn gives_up(&self, block: u32) {
        self.blocks[block as usize]
            .proven
            .store(0, Ordering::Release);
    }

    /// Notes the stamp with which a block is about to be sealed.
    pub fn asks(&self, block: u32, stamp: u64) {
        self.blocks[block as usize]
            .asked
            .store(stamp, Ordering::Release);
    }

    /// Notes that a block is whole: its stream was waited for.
    pub fn proves(&self, block: u32, stamp: u64) {
        self.blocks[block as usize]
            .proven
            .store(stamp, Ordering::Release);
    }

    /// Returns the stamp that a block may be listed with.
    pub fn asked(&self, block: u32) -> u64 {
        self.blocks[block as usize].asked.load(Ordering::Acquire)
    }

    /// Lists the blocks that must be listed, with their stamps.
    pub fn proven(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        let stamps = self
            .blocks
            .iter()
            .map(|of| of.proven.load(Ordering::Acquire));
        (0..).zip(stamps).filter(|(_, stamp)| *stamp != 0)
    }
}

#[cfg(test)]
mod tests {
    use harness::program::Running;
    use harness::wait_until;

    use super::*;

    #[test]
    fn a_block_is_whole_with_the_bytes_of_its_key_alone() {
        let found = |key| Sealed {
            block: 0,
            key,
            generation: 1,
        };
        let bytes = pieces_of(7).map(|byte| [byte; PIECE_BYTES as usize]);
        let mut bytes = bytes.concat();
        assert_eq!(bytes.len() as u64, BLOCK_BYTES);
        assert!(is_whole(&bytes, &found(key_of(7))));
        assert!(!is_whole(&bytes, &found(key_of(8))));
        assert!(!is_whole(&bytes, &found(Key([7; 16]))), "no key of a run");
        *bytes.last_mut().expect("a byte") ^= 1;
        assert!(!is_whole(&bytes, &found(key_of(7))));
    }

    #[test]
    fn a_holder_that_lives_is_found() {
        let dir = tempfile::tempdir().expect("a directory");
        let ledger = Ledger::open(&dir.path().join("ledger")).expect("a ledger");
        let pool = ledger.pool(1);
        assert_eq!((pool.held_by(5), pool.adopted(1)), (None, 0));
        assert_eq!(pool.held_by(6), None, "this process has no serial 5");
        pool.closes();
        let mut other = std::process::Command::new("sh");
        other.args(["-c", "kill -STOP $$", "--serial", "9"]);
        let mut other = Running::start(&mut other);
        let word = 9 << 32 | u64::from(other.pid());
        // Until then it has this program's words.
        wait_until("the shell to run", || {
            pool.holder.store(word, Ordering::Release);
            pool.held_by(7) == Some(other.pid())
        });
        pool.holder.store(word, Ordering::Release);
        other.kill();
        assert_eq!(pool.held_by(7), None);
        assert_eq!(pool.adopted(1), 1);
    }
}

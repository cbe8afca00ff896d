//! What the tables of free chunks hold.

use super::chunk::{Chunk, ChunkId};

/// A free chunk: its units in the highest 32 bits, its first unit in the 64 below, its number in
/// the lowest 32.
///
/// Compared as one number that is the order of best fit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct FreeChunk(u128);

impl FreeChunk {
    /// More than every chunk: what fills a leaf behind its last entry.
    pub(crate) const END: FreeChunk = FreeChunk(u128::MAX);

    pub(crate) fn of(id: ChunkId, chunk: &Chunk) -> FreeChunk {
        FreeChunk(
            u128::from(chunk.units) << 96 | u128::from(chunk.start()) << 32 | u128::from(id.0),
        )
    }

    /// Returns what is less than every chunk of at least this many units, and more than every
    /// smaller one.
    pub(crate) fn least(units: u32) -> FreeChunk {
        FreeChunk(u128::from(units) << 96)
    }

    pub(crate) fn units(self) -> u32 {
        (self.0 >> 96) as u32
    }

    pub(crate) fn start(self) -> u64 {
        (self.0 >> 32) as u64
    }

    pub(crate) fn id(self) -> ChunkId {
        ChunkId(self.0 as u32)
    }
}

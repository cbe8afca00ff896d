//! Counts blocks and bytes without a line that all threads write.

use std::sync::atomic::{AtomicI64, Ordering};

use crate::producer::ledger::{SHARDS, own_shard};

/// Blocks and their bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Amount {
    /// Blocks.
    pub blocks: u64,
    /// Bytes.
    pub bytes: u64,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Cell {
    blocks: AtomicI64,
    bytes: AtomicI64,
}

/// A count spread over one cell for each of a few threads.
///
/// Relaxed throughout: a count orders nothing, and a sum taken while others count is a moment's picture.
#[derive(Debug, Default)]
pub struct Count([Cell; SHARDS]);

impl Count {
    /// Counts one block more.
    #[inline]
    pub fn add(&self, bytes: u64) {
        let cell = &self.0[own_shard()];
        cell.blocks.fetch_add(1, Ordering::Relaxed);
        cell.bytes.fetch_add(bytes.cast_signed(), Ordering::Relaxed);
    }

    /// Counts one block less.
    #[inline]
    pub fn sub(&self, bytes: u64) {
        let cell = &self.0[own_shard()];
        cell.blocks.fetch_sub(1, Ordering::Relaxed);
        cell.bytes.fetch_sub(bytes.cast_signed(), Ordering::Relaxed);
    }

    /// Sums up.
    pub fn sum(&self) -> Amount {
        let sum = |f: fn(&Cell) -> &AtomicI64| -> u64 {
            let sum: i64 = self.0.iter().map(|cell| f(cell).load(Ordering::Relaxed)).sum();
            u64::try_from(sum).unwrap_or(0)
        };
        Amount { blocks: sum(|cell| &cell.blocks), bytes: sum(|cell| &cell.bytes) }
    }
}

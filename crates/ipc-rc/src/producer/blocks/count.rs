//! Counts blocks and bytes without a line that all threads write.
//!
//! What came and what went are counted apart, each spread over one cell for each of a few threads.
//!
//! | step | who | operation | ordering |
//! |---|---|---|---|
//! | add | who makes a block | `fetch_add` to what came, in its own cell | Relaxed |
//! | sub | who drops it | `fetch_add` to what went, in its own cell, which may be another | [`WENT`] Release |
//! | sum | anybody | load all that went, then all that came | [`SUM`] Acquire, then Relaxed |
//!
//! **A sum is never less than what is there**: `WENT` pairs with `SUM`, so whatever is counted as
//! gone is counted as come. One word for both could not say so: a block that comes by a cell that
//! was read before, and goes by one that is read after, would stand for another that is still
//! there, and a session would end while somebody holds a block.
//!
//! **It may be more**: blocks that come and go meanwhile may be counted as there. A thread that
//! waits for 0 looks again.
//!
//! Checked by `tests/loom_count.rs`; weakening `WENT` or `SUM` to Relaxed fails it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::shard::{SHARDS, own_shard};
use transport::shared::word::{NamedOrdering, Tally};

/// Pairs with [`SUM`].
pub const WENT: NamedOrdering = NamedOrdering::new("went", Ordering::Release);
/// Pairs with [`WENT`].
pub const SUM: NamedOrdering = NamedOrdering::new("sum", Ordering::Acquire);

/// Blocks and their bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Amount {
    /// Blocks.
    pub blocks: u64,
    /// Bytes.
    pub bytes: u64,
}

/// What some threads counted. Only these methods touch the words.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Cell<W> {
    blocks_came: W,
    bytes_came: W,
    blocks_went: W,
    bytes_went: W,
}

impl<W: Tally> Cell<W> {
    /// Counts one block more.
    #[inline]
    pub fn add(&self, bytes: u64) {
        self.blocks_came.fetch_add(1, Ordering::Relaxed);
        self.bytes_came.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts one block less.
    #[inline]
    pub fn sub(&self, bytes: u64) {
        self.blocks_went.fetch_add(1, WENT.get());
        self.bytes_went.fetch_add(bytes, WENT.get());
    }

    /// Sums cells up.
    pub fn sum(cells: &[Cell<W>]) -> Amount {
        let sum = |word: fn(&Cell<W>) -> &W, order| {
            cells
                .iter()
                .fold(0, |sum: u64, cell| sum.wrapping_add(word(cell).load(order)))
        };
        let (blocks_went, bytes_went) = (
            sum(|cell| &cell.blocks_went, SUM.get()),
            sum(|cell| &cell.bytes_went, SUM.get()),
        );
        let (blocks_came, bytes_came) = (
            sum(|cell| &cell.blocks_came, Ordering::Relaxed),
            sum(|cell| &cell.bytes_came, Ordering::Relaxed),
        );
        Amount {
            blocks: blocks_came.wrapping_sub(blocks_went),
            bytes: bytes_came.wrapping_sub(bytes_went),
        }
    }
}

/// A session's count of blocks.
#[derive(Debug, Default)]
pub struct Count([Cell<AtomicU64>; SHARDS]);

impl Count {
    /// Counts one block more.
    #[inline]
    pub fn add(&self, bytes: u64) {
        self.0[own_shard()].add(bytes);
    }

    /// Counts one block less.
    #[inline]
    pub fn sub(&self, bytes: u64) {
        self.0[own_shard()].sub(bytes);
    }

    /// Sums up.
    pub fn sum(&self) -> Amount {
        Cell::sum(&self.0)
    }
}

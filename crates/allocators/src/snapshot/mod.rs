//! What a heap looks like at one moment: as data here, in words by [`Display`](std::fmt::Display),
//! as a picture by [`Snapshot::svg`], for another process by [`Snapshot::json`].

mod json;
mod shown;
mod svg;
mod text;

use crate::{Holder, Lent};
use serde::{Deserialize, Serialize};

use crate::AllocatorStats;

/// Every region and chunk of an allocator at one moment.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// The allocator.
    pub name: String,
    /// What it counts.
    pub stats: AllocatorStats,
    /// Bytes that were asked for, of what is handed out.
    pub asked_bytes: u64,
    /// Bytes given back while work on them was under way.
    pub pending_bytes: u64,
    /// Bytes of blocks that sessions have dropped and something still holds. They count as used
    /// above.
    pub limbo_bytes: u64,
    /// Bytes of blocks held by processes that are dead, until proof and quarantine are over. They
    /// count as used above.
    pub quarantined_bytes: u64,
    /// Bytes of regions that upstream failed to take back.
    pub leaked_bytes: u64,
    /// Bytes of host memory that its tables take.
    pub bookkeeping_bytes: u64,
    /// The processes that hold memory of the sessions on the device.
    pub holders: Vec<HolderSnapshot>,
    /// Their leases on blocks of it.
    pub lent: Vec<LentSnapshot>,
    /// Its regions, lowest address first.
    pub regions: Vec<RegionSnapshot>,
    /// Chunks that are not listed because there are too many: their regions have none.
    pub chunks_left_out: u64,
}

/// One process that holds memory of a session: [`Holder`] as plain data.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HolderSnapshot {
    /// Its number in the session.
    pub participant: u64,
    /// Its process id as this process sees it; 0 when it is in a namespace that hides it.
    pub pid: u32,
    /// The command it runs.
    pub command: String,
    /// Leases that it was granted and has not ended.
    pub leases: u64,
    /// Bytes of the blocks behind them; a block leased twice counts twice.
    pub bytes: u64,
    /// Regions that it may have mapped.
    pub mappings: u64,
    /// The age of its oldest lease.
    pub oldest_ms: u64,
    /// `true` once its process is dead and the rest of the proof, or the quarantine, is awaited.
    pub dying: bool,
}

impl From<Holder> for HolderSnapshot {
    fn from(holder: Holder) -> HolderSnapshot {
        HolderSnapshot {
            participant: holder.participant.0,
            pid: holder.pid,
            command: holder.command,
            leases: holder.leases,
            bytes: holder.bytes,
            mappings: holder.mappings,
            oldest_ms: u64::try_from(holder.oldest.as_millis()).unwrap_or(u64::MAX),
            dying: holder.dying,
        }
    }
}

/// A lease on a block: [`Lent`] as plain data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LentSnapshot {
    /// The block's first byte.
    pub address: u64,
    /// Its bytes.
    pub len: u64,
    /// Its holder: an index in the list of holders, which may have been cut since.
    pub holder: Option<usize>,
    /// Whether the producer dropped the block: it is in limbo.
    pub limbo: bool,
}

impl LentSnapshot {
    /// Takes over what a session said, of the holder at a place.
    pub(crate) fn of(lent: Lent, holder: Option<usize>) -> LentSnapshot {
        LentSnapshot {
            address: lent.ptr.0,
            len: lent.len,
            holder,
            limbo: lent.limbo,
        }
    }
}

/// One region.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RegionSnapshot {
    /// The first byte's address.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Whether it may not be given back although nobody here uses it: another process may have it
    /// mapped.
    pub pinned: bool,
    /// Its chunks, lowest address first; together they are the region.
    pub chunks: Vec<ChunkSnapshot>,
}

/// One chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ChunkSnapshot {
    /// The first byte's address.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Bytes that were asked for; 0 for a free one.
    pub asked: u64,
    /// The allocation's number; 0 for a free one.
    pub number: u64,
    /// Where it stands.
    pub state: ChunkState,
}

/// Where a chunk stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ChunkState {
    /// In no use.
    Free,
    /// Handed out.
    Used,
    /// Given back, but work that was queued before may still touch it.
    Pending,
}

/// The chunks of one order of size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Bin {
    /// The least bytes of a chunk in it.
    pub from: u64,
    /// Chunks.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Those in use.
    pub chunks_in_use: u64,
    /// Their bytes.
    pub bytes_in_use: u64,
    /// The bytes that were asked for of them.
    pub asked_bytes: u64,
}

/// Orders of size: 256 bytes, 512 bytes, and so on; the last has everything from 256 MiB on.
pub const BINS: usize = 21;

impl Snapshot {
    /// Sums the chunks up by order of size.
    pub fn bins(&self) -> [Bin; BINS] {
        let mut bins: [Bin; BINS] = std::array::from_fn(|at| Bin {
            from: 256 << at,
            ..Bin::default()
        });
        for chunk in self.chunks() {
            let bin = &mut bins[bin_of(chunk.len)];
            bin.chunks += 1;
            bin.bytes += chunk.len;
            if chunk.state == ChunkState::Used {
                bin.chunks_in_use += 1;
                bin.bytes_in_use += chunk.len;
                bin.asked_bytes += chunk.asked;
            }
        }
        bins
    }

    /// Lists every chunk, lowest address first.
    pub fn chunks(&self) -> impl Iterator<Item = &ChunkSnapshot> + '_ {
        self.regions.iter().flat_map(|region| &region.chunks)
    }

    /// Returns the bytes that were taken from upstream and are in no use.
    pub fn free_bytes(&self) -> u64 {
        self.stats
            .bytes_reserved
            .saturating_sub(self.stats.bytes_in_use.saturating_add(self.pending_bytes))
    }

    /// Returns the bytes of regions that another process may have mapped.
    pub fn exported_bytes(&self) -> u64 {
        self.regions
            .iter()
            .filter(|region| region.pinned)
            .map(|region| region.len)
            .sum()
    }

    /// Returns the part of the free bytes that one request could not get: 0 when they are in one
    /// piece or there are none, towards 1 the more they are scattered.
    pub fn fragmentation(&self) -> f64 {
        match self.free_bytes() {
            0 => 0.0,
            free => (free - self.stats.largest_free_block_bytes.min(free)) as f64 / free as f64,
        }
    }
}

/// Returns the order of size of a chunk.
pub fn bin_of(bytes: u64) -> usize {
    ((bytes / 256).max(1).ilog2() as usize).min(BINS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log2_floor() {
        assert_eq!(
            [0, 1, 255, 256, 511, 512, 1023, 1024].map(bin_of),
            [0, 0, 0, 0, 0, 1, 1, 2]
        );
        assert_eq!(bin_of((256 << 20) - 1), 19);
        assert_eq!(bin_of(256 << 20), 20);
        assert_eq!(bin_of(u64::MAX), 20);
    }

    #[test]
    fn nothing_free_is_not_fragmented() {
        assert_eq!(Snapshot::default().fragmentation(), 0.0);
    }
}

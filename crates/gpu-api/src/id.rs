//! The numbers of regions and participants, and who holds memory.

use std::fmt;
use std::time::Duration;

use crate::Access;

/// Numbers a region within the source that made it; never used again there.
///
/// A source numbers its regions below 2^62. Bit 62 belongs to sessions: with it, the number names
/// the region as what a participant may only read.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[repr(transparent)]
pub struct RegionId(pub u64);

impl RegionId {
    const READ_ONLY: u64 = 1 << 62;

    /// Returns how a participant that is given this number may map the region.
    pub const fn access(self) -> Access {
        match self.0 & RegionId::READ_ONLY {
            0 => Access::ReadWrite,
            _ => Access::ReadOnly,
        }
    }

    /// Returns the number that stands for the same region mapped so.
    #[must_use]
    pub const fn with_access(self, access: Access) -> RegionId {
        match access {
            Access::ReadWrite => RegionId(self.0 & !RegionId::READ_ONLY),
            Access::ReadOnly => RegionId(self.0 | RegionId::READ_ONLY),
        }
    }
}

/// Where a region lies in a range of addresses that is filled piece by piece.
///
/// A block may lie across such regions, which are contiguous in every process that maps them. The
/// number of such a region belongs to its place: memory that is mapped there later has the same
/// number, so `behind` stays true.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spot {
    /// The range's number within its source, below 2^62 as a region's.
    pub range: u64,
    /// The range's bytes.
    pub range_len: u64,
    /// Bytes from the range's base.
    pub offset: u64,
    /// The number of the region that begins where this one ends, if there is one.
    pub behind: RegionId,
}

impl Spot {
    /// Returns the place among the numbers that stand for the same regions mapped so, in a range of
    /// its own.
    #[must_use]
    pub fn with_access(self, access: Access) -> Spot {
        Spot {
            range: RegionId(self.range).with_access(access).0,
            behind: self.behind.with_access(access),
            ..self
        }
    }
}

/// Numbers a participant of a session; never used again there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[repr(transparent)]
pub struct ParticipantId(pub u64);

impl fmt::Display for ParticipantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "participant {}", self.0)
    }
}

/// A process that holds memory of a session, for reports and out-of-memory errors.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holder {
    /// Its number in the session.
    pub participant: ParticipantId,
    /// Its process id as this process sees it; 0 when it is in a namespace that hides it.
    pub pid: u32,
    /// What it called itself when it connected, or else the command it runs: for reading only.
    pub command: String,
    /// Leases that it was granted and has not ended.
    pub leases: u64,
    /// Bytes of the blocks behind them; a block leased twice counts twice.
    pub bytes: u64,
    /// Regions that it may have mapped.
    pub mappings: u64,
    /// The age of its oldest lease.
    pub oldest: Duration,
    /// `true` once its process is dead and the rest of the proof, or the quarantine, is awaited.
    pub dying: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_has_a_number_for_each_access() {
        for number in [0, 7, (1 << 62) - 1, 1 << 63, u64::MAX ^ 1 << 62] {
            let region = RegionId(number);
            let alias = region.with_access(Access::ReadOnly);
            assert_ne!(region, alias);
            assert_eq!(
                (region.access(), alias.access()),
                (Access::ReadWrite, Access::ReadOnly)
            );
            assert_eq!(alias.with_access(Access::ReadWrite), region);
            assert_eq!(alias.with_access(Access::ReadOnly), alias);
        }
    }
}

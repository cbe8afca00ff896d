//! The numbers of regions and participants.

use std::fmt;

/// Numbers a region within the source that made it; never used again there.
///
/// A source numbers its regions below 2^62. Bit 62 belongs to sessions: with it, the number names
/// the region as what a participant may only read.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[repr(transparent)]
pub struct RegionId(pub u64);

/// Numbers a participant of a session; never used again there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[repr(transparent)]
pub struct ParticipantId(pub u64);

impl fmt::Display for ParticipantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "participant {}", self.0)
    }
}

//! Where a descriptor has what, and the numbers in it.

use std::fmt;

/// The length of every descriptor.
pub const BYTES: usize = 192;

/// The version of descriptors and messages. Both sides must have the same.
pub const VERSION: u16 = 2;

pub(super) const MAGIC: [u8; 4] = *b"GIPC";
/// The number of no fence word.
pub const NO_FENCE: u32 = u32::MAX;
/// Above are the three state bits of a slot word; the poison of timeline words lies there too.
pub const LIMIT: u64 = 1 << 61;

pub(super) const AT_VERSION: usize = 4;
pub(super) const AT_BACKEND: usize = 6;
pub(super) const AT_KIND: usize = 7;
pub(super) const AT_DEVICE: usize = 8;
pub(super) const AT_SESSION: usize = 24;
pub(super) const AT_PARTICIPANT: usize = 40;
pub(super) const AT_FILE: usize = 48;
pub(super) const AT_SLOT: usize = 52;
pub(super) const AT_GENERATION: usize = 56;
pub(super) const AT_REGION: usize = 64;
pub(super) const AT_OFFSET: usize = 72;
pub(super) const AT_LEN: usize = 80;
pub(super) const AT_FENCE_WORD: usize = 88;
pub(super) const AT_FENCE_FILE: usize = 92;
pub(super) const AT_FENCE_VALUE: usize = 96;
pub(super) const AT_FLAGS: usize = 104;
pub(super) const AT_USER: usize = 112;
pub(super) const AT_ZERO: usize = 176;
pub(super) const AT_SUM: usize = 184;
/// The bytes that are the same in all descriptors of one kind to one participant.
pub(super) const HEAD: usize = AT_FILE;
/// The flag of a descriptor with user bytes. Without it they are zero, and not hashed.
pub(super) const HAS_USER: u64 = 1;
const _: () = assert!(AT_USER + 64 == AT_ZERO && AT_ZERO + 8 == AT_SUM && AT_SUM + 8 == BYTES);

/// Identifies a session: 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct SessionId(pub [u8; 16]);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Tells the grants of a session apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct LeaseId {
    file: u32,
    slot: u32,
    generation: u64,
}

impl LeaseId {
    /// Names a slot of a counter file at a generation.
    pub fn new(file: u32, slot: u32, generation: u64) -> LeaseId {
        LeaseId {
            file,
            slot,
            generation,
        }
    }
}

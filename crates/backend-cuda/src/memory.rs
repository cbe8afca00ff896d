//! Where this backend's memory came from.

use gpu_api::Access;
use gpu_api::vendor::memory_table::{self, MemoryTable, Way};

/// What was allocated, opened, imported and mapped.
pub(crate) type Memory = MemoryTable<Origin>;
/// One allocation or mapping.
pub(crate) type Entry = memory_table::Entry<Origin>;

/// Where memory came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemCreate`, reserved and mapped.
    Virtual,
    /// `cuIpcOpenMemHandle`, this many times.
    Opened {
        /// The driver unmaps at the last close.
        times: u32,
    },
    /// Imported from file descriptors, reserved and mapped.
    Imported {
        /// What this process' devices may do with it.
        access: Access,
        /// Bytes of each mapping: all of them, or one piece of several side by side.
        piece: u64,
    },
    /// `cuMemAllocFromPoolAsync`.
    Pool,
    /// `cuMemAllocManaged`.
    Managed,
    /// A piece of a range that the caller reserved.
    Piece {
        /// What this process' devices may do with it.
        access: Access,
    },
}

impl Origin {
    /// Says whether this process allocated it, so that its base can be exported.
    pub(crate) fn is_own(self) -> bool {
        memory_table::Origin::way(&self) == Way::Free
    }
}

impl memory_table::Origin for Origin {
    fn way(&self) -> Way {
        match self {
            Origin::Plain | Origin::Virtual | Origin::Managed => Way::Free,
            Origin::Opened { .. } | Origin::Imported { .. } => Way::Close,
            Origin::Piece { .. } => Way::Unmap,
            Origin::Pool => Way::Return,
        }
    }

    fn times(&mut self) -> Option<&mut u32> {
        if let Origin::Opened { times } = self {
            Some(times)
        } else {
            None
        }
    }

    fn mapped(&self) -> Option<Access> {
        match *self {
            Origin::Virtual => Some(Access::ReadWrite),
            Origin::Imported { access, .. } | Origin::Piece { access } => Some(access),
            Origin::Plain | Origin::Opened { .. } | Origin::Pool | Origin::Managed => None,
        }
    }
}

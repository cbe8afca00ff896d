//! Grants to be read only.
//!
//! A region has two numbers: its own, and the one that [`RegionId::with_access`] makes of it, by
//! which a participant maps it read-only. A read-only grant carries the second, in its descriptor or
//! in the answer about its ticket, and the ledger notes the access beside the lease.
//!
//! | step | who | what |
//! |---|---|---|
//! | share | producer | refused, unless the device maps read-only and the region is exported by a descriptor |
//! | grant | producer | the lease's access is written down under the ledger's lock, before the slot is granted |
//! | `MapRegion` | participant | asks for the number that it was given, by the right of that lease |
//! | `Region` | producer | only where the number's access is the lease's; for the second number a descriptor that can be mapped read-only alone, where the backend has such |
//! | map | participant | read-only for the second number, whatever the participant was connected with; a handle is refused |
//! | forward | producer | grants with the access of the forwarder's lease |
//!
//! Everything after that (pins, `Unmapped`, trimming, the table of mappings) goes by the number, so
//! the two mappings of one region live and end apart: a participant that holds both kinds of lease
//! has both mappings, each pinned by itself.
//!
//! What this does not cover: a participant that holds, or has held, a writable lease in the region
//! can keep that mapping, and write by it what it was granted to be read; a mapping cannot be taken
//! back. A vendor's descriptor can be mapped writable by a program that does not go by this library.
//!
//! Checked by `tests/processes/read_only.rs` and `tests/security/read_only.rs`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use allocators::Export;
#[cfg(doc)]
use gpu_api::RegionId;
use gpu_api::{Access, Error, Result};

use crate::producer::blocks::block::Block;
use crate::producer::core::Core;
use transport::wire::message::Extent;

impl Core {
    /// Returns where a part of a block is found by those who may use it so.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a read-only grant of memory that can only be mapped writable.
    #[inline]
    pub(crate) fn place_with(
        &self,
        access: Access,
        block: &Block,
        place: Extent,
    ) -> Result<Extent> {
        if access == Access::ReadOnly {
            self.check_read_only(block.region().export())?;
        }
        Ok(Extent {
            region: place.region.with_access(access),
            ..place
        })
    }

    #[cold]
    fn check_read_only(&self, export: &Export) -> Result<()> {
        let (why, remedy) = match export {
            Export::Handle(_) => (
                "other processes open it by a handle, which is always writable",
                "allocate it to be shared by a file descriptor, or share it writable (`read_only=False` in Python)",
            ),
            Export::Fd(_) if !self.facts.gpu.caps().read_only => (
                "the device maps nothing read-only",
                "share it writable (`read_only=False` in Python), or share a copy",
            ),
            Export::Fd(_) => return Ok(()),
        };
        Err(Error::unsupported(
            "sharing this memory read-only",
            why,
            remedy,
        ))
    }

    /// Makes of a region's descriptor what a participant that may only read is sent; `None` where
    /// the region's own is all that there is.
    ///
    /// # Errors
    ///
    /// What the kernel refuses: the participant is told, and can ask again.
    pub(crate) fn narrowed(
        &self,
        access: Access,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Option<OwnedFd>> {
        match fd {
            Some(fd) if access == Access::ReadOnly => {
                let gpu = &self.facts.gpu;
                gpu.backend().read_only_fd(gpu.device(), fd.as_fd())
            }
            _ => Ok(None),
        }
    }
}

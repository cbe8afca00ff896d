//! Blocks out of regions, for sessions that were given no allocator.
//!
//! 1. `chunks`: which bytes of which region are free: numbers only.
//! 2. Here: where regions come from and when they go back.
//!
//! # Locks
//!
//! `growth` before `chunks`. No call of the driver is made under `chunks`, so giving back never waits for one; one
//! region at a time is made under `growth`.

mod chunks;
#[cfg(test)]
mod fake;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_api::{
    Allocation, Error, Export, Gpu, Piece, Region, RegionId, RegionSource, Result, Sharing, SourceUsage,
};

use crate::fork::ForkGuard;
use chunks::{Chunks, STEP};

/// A region source that carves pieces out of a few large regions: best fit, neighbours merged when given back.
///
/// A region is allocated and exported once and holds many blocks, so most blocks cost no call of the driver. It goes
/// back to the driver by [`trim`](RegionSource::trim), or when the carver is dropped, and only whole and unpinned.
///
/// Pieces are rounded up to 256 bytes within their region; [`Piece::len`] is what was asked for.
///
/// # Dropping
///
/// Frees the regions that nobody uses and nothing pins, which may block. Others stay until the process ends, and so
/// does everything in a forked child.
pub struct Carver {
    gpu: Gpu,
    sharing: Sharing,
    region_bytes: u64,
    fork: ForkGuard,
    /// The next region's number.
    growth: Mutex<u64>,
    chunks: Mutex<Chunks>,
}

impl Carver {
    /// The bytes of a region when nobody says: a few of them hold thousands of small blocks, and one is mapped by a
    /// participant in well under a millisecond.
    pub const DEFAULT_REGION_BYTES: u64 = 32 << 20;

    /// Makes a carver that has no region yet.
    ///
    /// Regions have `region_bytes`, or more for a larger piece, or just what a piece needs when the device has no
    /// room for that many.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for regions of no bytes, [`Error::System`] when the kernel has no page for the fork guard.
    pub fn new(gpu: Gpu, sharing: Sharing, region_bytes: u64) -> Result<Carver> {
        if region_bytes == 0 {
            return Err(Error::Invalid { what: "region size", got: "0 bytes".into(), must: "at least 1 byte" });
        }
        let fork = ForkGuard::new()?;
        Ok(Carver { gpu, sharing, region_bytes, fork, growth: Mutex::new(0), chunks: Mutex::default() })
    }

    /// Returns the bytes of regions whose free failed. They are neither used nor freed again.
    pub fn leaked_bytes(&self) -> u64 {
        self.chunks().leaked
    }

    fn chunks(&self) -> MutexGuard<'_, Chunks> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_owner(&self) -> Result<()> {
        if self.fork.is_child() { Err(Error::Forked { what: "this source of memory" }) } else { Ok(()) }
    }

    /// Allocates a region with room for `need` bytes.
    fn allocate(&self, need: u64) -> Result<Allocation> {
        let (backend, device) = (self.gpu.backend(), self.gpu.device());
        let asked = need.max(self.region_bytes);
        match backend.alloc(device, asked, self.sharing) {
            Err(Error::OutOfMemory { .. }) if asked > need => backend.alloc(device, need, self.sharing),
            other => other,
        }
    }

    fn export(&self, allocation: Allocation) -> Result<Export> {
        match self.sharing {
            Sharing::Handle => self.gpu.backend().export_handle(allocation.base).map(Export::Handle),
            Sharing::Fd => self.gpu.backend().export_fd(allocation.base).map(Export::Fd),
            other => Err(Error::Unsupported {
                what: "carving blocks out of regions",
                why: format!("the carver knows no {other:?} regions"),
                remedy: "choose `Sharing::Fd` or `Sharing::Handle`",
            }),
        }
    }

    /// Makes a region with room for `need` bytes, and numbers it.
    fn grow(&self, next: &mut u64, need: u64) -> Result<Region> {
        let allocation = self.allocate(need)?;
        let export = match self.export(allocation) {
            Ok(export) => export,
            Err(error) => {
                // Nobody has seen the allocation yet. That it could not be shared is what the caller can mend.
                let _ = self.free(allocation);
                return Err(error);
            }
        };
        let id = RegionId(*next);
        *next += 1;
        Ok(Region::new(id, self.gpu.device(), allocation.base, allocation.len, export))
    }

    /// Gives an allocation back to the driver that no piece lies in and no process has mapped.
    fn free(&self, allocation: Allocation) -> Result<()> {
        // SAFETY: `GpuBackend::free` asks for
        // - a base from `alloc`, not yet freed: callers pass what `allocate` returned and drop it here, or a region that
        //   they have just taken out of `chunks`, where it was once;
        // - no GPU work that touches it: whoever gave back the last piece said that its bytes may be used again;
        // - no process with its handle open: the region was never published, or is not pinned.
        let freed = unsafe { self.gpu.backend().free(allocation.base) };
        if freed.is_err() {
            // Nobody knows whether it is free: CUDA reports older failures here, too.
            self.chunks().leaked += allocation.len;
        }
        freed
    }

    fn never_fits(&self, asked: u64) -> Error {
        let free = self.gpu.backend().memory_info(self.gpu.device()).map_or(0, |info| info.free_bytes);
        let hint = "no region can be that large, ask for less".into();
        Error::OutOfMemory { device: self.gpu.device(), asked, free, hint }
    }
}

impl RegionSource for Carver {
    fn take(&self, len: u64, align: u64) -> Result<Piece> {
        if len == 0 {
            return Err(Error::Invalid { what: "block size", got: "0 bytes".into(), must: "at least 1 byte" });
        }
        if !align.is_power_of_two() {
            return Err(Error::Invalid { what: "alignment", got: align.to_string(), must: "a power of two" });
        }
        self.check_owner()?;
        let align = align.max(STEP);
        let rounded = len.checked_next_multiple_of(STEP).ok_or_else(|| self.never_fits(len))?;
        let piece = |(region, offset)| Piece { region, offset, len };
        if let Some(found) = self.chunks().take(rounded, align) {
            return Ok(piece(found));
        }
        let mut next = self.growth.lock().unwrap_or_else(PoisonError::into_inner);
        // Whoever held the lock before may have brought a region with room for both.
        if let Some(found) = self.chunks().take(rounded, align) {
            return Ok(piece(found));
        }
        // Drivers align to 256 bytes at least; for more than that the region has room to choose.
        let slack = if align > STEP { align } else { 0 };
        let need = rounded.checked_add(slack).ok_or_else(|| self.never_fits(len))?;
        let region = self.grow(&mut next, need)?;
        let mut chunks = self.chunks();
        chunks.insert(Arc::new(region));
        let found = chunks.take(rounded, align).expect("a region that was made for a piece has room for it");
        Ok(piece(found))
    }

    fn give_back(&self, piece: Piece) {
        let rounded = piece.len.checked_next_multiple_of(STEP);
        let given = rounded.is_some_and(|rounded| self.chunks().give_back(&piece.region, piece.offset, rounded));
        if !given {
            // To believe it would hand out bytes twice.
            tracing::error!(region = piece.region.id().0, piece.offset, piece.len, "no such piece is out");
        }
    }

    fn trim(&self) -> Result<u64> {
        self.check_owner()?;
        let idle = self.chunks().remove_idle();
        let mut freed = 0;
        let mut failed = None;
        for region in idle {
            match self.free(Allocation { base: region.base(), len: region.len() }) {
                Ok(()) => freed += region.len(),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(freed), Err)
    }

    fn usage(&self) -> SourceUsage {
        self.chunks().usage()
    }
}

impl Drop for Carver {
    fn drop(&mut self) {
        match self.trim() {
            Ok(_) | Err(Error::Forked { .. }) => {}
            Err(error) => tracing::warn!(%error, "a region is leaked"),
        }
    }
}

impl fmt::Debug for Carver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Carver").field("sharing", &self.sharing).field("usage", &self.usage()).finish_non_exhaustive()
    }
}

//! Sources of blocks, and sessions that can return some.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

pub use gpu_api::Holder;
use gpu_api::{DeviceId, DevicePtr, MemHandle, ParticipantId, RegionId, Result, Sharing, Spot};

/// What another process needs to map a region, made once when the region is.
#[derive(Debug)]
pub enum Export {
    /// A vendor's 64 bytes.
    Handle(MemHandle),
    /// A file descriptor. While it is open the driver keeps the memory, so it lives and dies with
    /// its [`Region`].
    Fd(OwnedFd),
}

impl Export {
    /// Says which way this is.
    pub fn sharing(&self) -> Sharing {
        match self {
            Export::Handle(_) => Sharing::Handle,
            Export::Fd(_) => Sharing::Fd,
        }
    }
}

/// What the driver allocated, and the unit in which other processes map it.
///
/// A region is *pinned* while another process may have it mapped. The source that made it gives it
/// back to the driver only when none of its bytes is in use and nothing pins it.
///
/// # Pins
///
/// `pin` and `unpin` are counted with one atomic. A pin is only ever taken for a block that is in
/// use, and a region with a block in use is not given back; so a source that sees no block in use
/// and [`is_pinned`](Region::is_pinned) false, in that order, cannot be overtaken by a pin. `unpin`
/// is Release and `is_pinned` Acquire: the unmapping happens before the free.
#[derive(Debug)]
pub struct Region {
    id: RegionId,
    device: DeviceId,
    base: DevicePtr,
    len: u64,
    export: Export,
    spot: Option<Spot>,
    pins: AtomicU32,
}

impl Region {
    /// Describes an allocation that others may map.
    pub fn new(
        id: RegionId,
        device: DeviceId,
        base: DevicePtr,
        len: u64,
        export: Export,
    ) -> Region {
        Region {
            id,
            device,
            base,
            len,
            export,
            spot: None,
            pins: AtomicU32::new(0),
        }
    }

    /// Says that it is a piece of a range of addresses, and where.
    #[must_use]
    pub fn with_spot(mut self, spot: Spot) -> Region {
        self.spot = Some(spot);
        self
    }

    /// Returns its number within its source.
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// Returns the device it lies on.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Returns its first byte's address in the producer.
    pub fn base(&self) -> DevicePtr {
        self.base
    }

    /// Returns its bytes.
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns what another process needs to map it.
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// Returns its place in a range of addresses; `None` for a region on its own.
    pub fn spot(&self) -> Option<Spot> {
        self.spot
    }

    /// Notes that another process may map it.
    pub fn pin(&self) {
        self.pins.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that a process that might have mapped it provably has not any more.
    pub fn unpin(&self) {
        let before = self.pins.fetch_sub(1, Ordering::Release);
        debug_assert!(before > 0, "a region was unpinned more often than pinned");
    }

    /// Says whether another process may have it mapped.
    pub fn is_pinned(&self) -> bool {
        self.pins.load(Ordering::Acquire) != 0
    }
}

/// A block's bytes: a piece of a region, which may go on in the regions behind it.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The region.
    pub region: Arc<Region>,
    /// Bytes from the region's base.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Piece {
    /// Returns the address of its first byte in the producer.
    pub fn ptr(&self) -> DevicePtr {
        self.region.base().offset(self.offset)
    }
}

/// Where a session takes the bytes of its blocks from.
///
/// Allocators implement it. A source may be shared by several sessions of one device.
///
/// # Locks
///
/// Sessions call a source with no lock of their own held, and a source calls [`Reclaim`] with none
/// of its own held.
pub trait RegionSource: fmt::Debug + Send + Sync + 'static {
    /// Takes `len` bytes, aligned to `align` (a power of two), out of a region that can be shared.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`](gpu_api::Error::OutOfMemory) when there is no room after everything
    /// that the source can do about it, [`Error::Invalid`](gpu_api::Error::Invalid) for a length of
    /// zero or a bad alignment.
    fn take(&self, len: u64, align: u64) -> Result<Piece>;

    /// Takes a piece back: its bytes may be used again at once. Never blocks on the driver.
    fn give_back(&self, piece: Piece);

    /// Lists the regions from the one that a piece names to the one that it ends in. The piece is
    /// out, and stays so until the call returns. Must not block. A source that wraps another passes
    /// this on.
    fn regions(&self, piece: &Piece) -> Vec<Arc<Region>> {
        vec![piece.region.clone()]
    }

    /// Returns whole regions that nobody uses and nothing pins to the driver, and says how many
    /// bytes. May block.
    ///
    /// # Errors
    ///
    /// What the driver's free gave; the region is leaked then, never freed twice.
    fn trim(&self) -> Result<u64>;

    /// Hears that nothing pins a region of its own any more: whole, it could go back to the driver.
    /// Must not block.
    fn unpinned(&self, region: &Region) {
        let _ = region;
    }

    /// Says what the source holds.
    fn usage(&self) -> SourceUsage;

    /// Describes every region and piece as one JSON object of at most `most` bytes, for a process
    /// that inspects the session; `None` for a source without a description.
    ///
    /// `asker` is that session, and says what it has lent. The reader checks every value of the
    /// object.
    fn snapshot(&self, asker: &dyn Reclaim, most: usize) -> Option<String> {
        let _ = (asker, most);
        None
    }
}

/// What a region source holds, in bytes unless said.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SourceUsage {
    /// Regions.
    pub regions: u64,
    /// Taken from the driver.
    pub reserved: u64,
    /// Handed out as pieces.
    pub in_use: u64,
    /// In regions that other processes may have mapped.
    pub pinned: u64,
}

/// What a collect brought back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Reclaimed {
    /// Blocks whose last lease had ended.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// A lease on a block of a session, as a place in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lent {
    /// The block's first byte, in the producer.
    pub ptr: DevicePtr,
    /// The block's bytes.
    pub len: u64,
    /// Its holder.
    pub participant: ParticipantId,
    /// `true` once the producer dropped the block: it waits in limbo for this lease and perhaps
    /// others.
    pub limbo: bool,
}

/// Returns memory when an allocator runs out. Sessions implement it.
pub trait Reclaim: fmt::Debug + Send + Sync + 'static {
    /// Looks at every lease and gives back all blocks in limbo that nothing holds any more; waits
    /// for a collect that is under way.
    fn collect_all(&self) -> Reclaimed;

    /// Asks every participant to unmap regions that it does not use, and says how many were asked.
    fn ask_to_unmap(&self) -> usize;

    /// Lists the holders of memory.
    fn holders(&self) -> Vec<Holder>;

    /// Returns the bytes in limbo.
    fn limbo_bytes(&self) -> u64;

    /// Lists leases that are granted or held, at most `most` of them; empty if untracked.
    fn lent(&self, most: usize) -> Vec<Lent> {
        let _ = most;
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_pinned_until_the_last_unpin() {
        let export = Export::Handle(MemHandle([0; 64]));
        let region = Region::new(RegionId(1), DeviceId(0), DevicePtr(0x1000), 4096, export);
        assert!(!region.is_pinned());
        region.pin();
        region.pin();
        region.unpin();
        assert!(region.is_pinned());
        region.unpin();
        assert!(!region.is_pinned());
    }
}

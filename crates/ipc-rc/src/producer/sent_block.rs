//! Sent blocks: what a producer allocates and shares.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use allocators::{Piece, Region, RegionSource};
use gpu_api::{DevicePtr, Error, Result};

use crate::producer::blocks::block::{Block, Origin, keep_for_ever};
use crate::producer::blocks::tokens::AdoptToken;
use crate::producer::core::Core;
use crate::producer::grants::slot_group::Effort;
use crate::producer::share::{After, ShareOptions, To};
use crate::stream::Stream;
use transport::trace_point;
use transport::wire::descriptor::Descriptor;

/// A block that this process produces: allocate, [`share`](SentBlock::share), drop.
///
/// The drop never blocks. While another process holds the block, or the producer's own queued work
/// may touch it, the block is in limbo; a later collect frees it.
pub struct SentBlock {
    core: ManuallyDrop<Arc<Core>>,
    block: ManuallyDrop<Arc<Block>>,
}

impl SentBlock {
    pub(crate) fn new(core: &Arc<Core>, piece: Piece, origin: Origin) -> SentBlock {
        let block = Block::new(&core.memory, piece, origin);
        SentBlock {
            core: ManuallyDrop::new(core.clone()),
            block: ManuallyDrop::new(block),
        }
    }

    /// Returns its session.
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Returns what ledgers hold of it.
    pub(crate) fn shared(&self) -> &Arc<Block> {
        &self.block
    }

    /// Returns the address of the first byte, in this process.
    ///
    /// Work that is queued on a stream and touches the block must have its stream named with
    /// [`used_on`](SentBlock::used_on) before the drop, unless the block was shared after that
    /// stream.
    pub fn device_ptr(&self) -> DevicePtr {
        self.block.ptr()
    }

    /// Returns the length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "a block is never empty")]
    pub fn len(&self) -> u64 {
        self.block.len()
    }

    /// Lists the regions that the block lies in, in the order of their addresses: one, or of an
    /// arena that grows in place several. Empty if the session's source of regions failed to say.
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.core.memory.regions(self.block.piece())
    }

    /// Grants a lease and returns the descriptor by which it is claimed.
    ///
    /// # Errors
    ///
    /// [`Gone::Participant`](crate::Gone::Participant), [`Gone::Session`](crate::Gone::Session), [`Error::Forked`], [`Error::Capturing`] for
    /// a stream that is being captured, [`Error::Exhausted`] when the participant's quota of leases
    /// is used up or too many tickets are live, and the driver's error. After an error nothing was
    /// granted.
    ///
    /// # Examples
    ///
    /// See the crate's first page.
    #[inline]
    pub fn share(&self, to: To, after: After<'_>) -> Result<Descriptor> {
        self.share_with(to, after, &ShareOptions::default())
    }

    /// Grants a lease as [`share`](SentBlock::share) does, with options.
    ///
    /// # Errors
    ///
    /// As `share`.
    #[inline]
    pub fn share_with(
        &self,
        to: To,
        after: After<'_>,
        options: &ShareOptions,
    ) -> Result<Descriptor> {
        self.core
            .share(&self.block, self.block.extent(), to, after, options)
    }

    /// Makes a block of some of this one's bytes, for an allocator that hands out parts of it. The
    /// part is the allocator's again when [`collect`](crate::Session::collect) returns `token`:
    /// when it was dropped and its last lease has ended. It counts as outstanding on this block,
    /// which it keeps.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range that is empty or does not lie in the block,
    /// [`Gone::Session`](crate::Gone::Session), [`Error::Forked`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # use ipc_rc::{AdoptToken, After, Claims, Session, To};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # let session = Session::builder(gpu).socket(dir.path().join("s")).open()?;
    /// let segment = session.alloc(1 << 20)?;
    /// let tensor = segment.part(4096, 512, AdoptToken(7))?;
    /// let ticket = tensor.share(To::Ticket(Claims::Once), After::Done)?;
    /// assert_eq!((ticket.len(), segment.outstanding()), (512, 1));
    /// assert!(tensor.cancel(&ticket)?);
    /// drop(tensor);
    /// assert_eq!(session.collect().tokens, [AdoptToken(7)]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn part(&self, offset: u64, len: u64, token: AdoptToken) -> Result<SentBlock> {
        self.part_of(offset, len, Some(token))
    }

    pub(crate) fn part_of(
        &self,
        offset: u64,
        len: u64,
        token: Option<AdoptToken>,
    ) -> Result<SentBlock> {
        let (whole, core) = (&*self.block, &*self.core);
        core.check_open()?;
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > whole.len()) {
            return Err(Error::invalid(
                "the part of a block",
                format!("{len} bytes at {offset} of {}", whole.len()),
                "inside the block, and not empty",
            ));
        }
        let mut piece = Piece {
            region: whole.region().clone(),
            offset: whole.offset() + offset,
            len,
        };
        if piece.offset >= piece.region.len() {
            // It begins in a region behind.
            let start = piece.ptr().0;
            let regions = core.memory.regions(whole.piece());
            let begins = |region: &Arc<Region>| {
                region.base().0 <= start && start - region.base().0 < region.len()
            };
            if let Some(region) = regions.into_iter().find(begins) {
                piece.offset = start - region.base().0;
                piece.region = region;
            }
        }
        Ok(SentBlock::new(
            core,
            piece,
            Origin::Part {
                token,
                _whole: whole.clone(),
            },
        ))
    }

    /// Revokes a grant that is not claimed yet, and says whether it did: as
    /// [`Session::revoke`](crate::Session::revoke), for a descriptor that must be of this block.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] for a descriptor of another session or block, [`Error::Forked`].
    pub fn cancel(&self, descriptor: &Descriptor) -> Result<bool> {
        self.core.revoke(descriptor, Some(&self.block))
    }

    /// Names a stream of this process, of any device and vendor, whose queued work touches the
    /// block: the block is not reused before that work is done.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the per-thread default stream (handle 2): the thread that drops the
    /// block may be another; [`Error::Forked`].
    pub fn used_on(&self, stream: &Stream) -> Result<()> {
        self.core.check_fork()?;
        stream.refuse_per_thread()?;
        self.block.note_use(stream, &self.core.fences);
        Ok(())
    }

    /// Counts the leases that are granted or held; a ticket that can still be claimed counts as
    /// one, an unlimited ticket as none.
    ///
    /// Leases that have ended are collected first, unless there is none: what a consumer released
    /// before the call does not count. In a forked child it is the parent's count at the fork.
    pub fn outstanding(&self) -> usize {
        if self.held() > 0 && !self.core.is_child() {
            self.core.collect(Effort::Marked);
        }
        self.held()
    }

    /// Counts the leases and tickets that keep the block, ended ones that are not collected among
    /// them.
    fn held(&self) -> usize {
        Arc::strong_count(&self.block) - 1
    }

    /// Waits until no lease on the block is outstanding: backpressure for a producer that writes
    /// into it again.
    ///
    /// With a timeout of zero it does not wait:
    /// [`SessionNotice::TryAgain`](crate::SessionNotice::TryAgain) then tells an event loop when to
    /// ask again.
    ///
    /// # Errors
    ///
    /// [`Error::Deadline`] when some still are after `timeout` (`None` waits for ever),
    /// [`Error::Forked`].
    ///
    /// # Examples
    ///
    /// A frame is written again as soon as no consumer has it:
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # use ipc_rc::{After, Claims, Session, To};
    /// # use std::time::Duration;
    /// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// let pool = [session.alloc(4096)?, session.alloc(4096)?];
    /// let seen = pool[0].share(To::Ticket(Claims::Once), After::Done)?;
    /// let free = pool.iter().position(|frame| frame.wait_released(Some(Duration::ZERO)).is_ok());
    /// assert_eq!(free, Some(1));
    /// assert!(pool[0].cancel(&seen)?, "it was not claimed");
    /// pool[0].wait_released(None)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait_released(&self, timeout: Option<Duration>) -> Result<()> {
        let core = &self.core;
        core.check_fork()?;
        let released = || {
            core.collect(Effort::Marked);
            let is_released = self.held() == 0;
            // The count is read without an ordering, and each lease's end lowered it with Release:
            // what the consumers did comes before what the producer does next.
            fence(Ordering::Acquire);
            is_released.then_some(())
        };
        core.wakeups.wait_for(timeout, released).ok_or_else(|| {
            core.releases.watch(&self.block);
            core.wakeups.thread.nudge();
            Error::deadline("the consumers of a block")
        })
    }

    /// Returns the region that it lies in and the offset there, in bytes, as a
    /// [snapshot](crate::snapshot) shows them.
    pub fn place(&self) -> (gpu_api::RegionId, u64) {
        (self.block.region().id(), self.block.offset())
    }
}

impl fmt::Debug for SentBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (region, offset) = self.place();
        write!(
            f,
            "SentBlock {{ {} bytes of region {} at {offset} }}",
            self.len(),
            region.0
        )
    }
}

impl Drop for SentBlock {
    fn drop(&mut self) {
        if self.core.memory.guard.is_child() {
            // The parent's block: nothing of it may change, its count least of all.
            return;
        }
        // SAFETY: `ManuallyDrop::take` asks that the value is not used again: this is its owner's
        // drop.
        let core = unsafe { ManuallyDrop::take(&mut self.core) };
        // SAFETY: as above.
        let block = unsafe { ManuallyDrop::take(&mut self.block) };
        trace_point!("drop");
        if block.enter_limbo() {
            core.end_broadcasts(&block);
        }
        match block.take_uses() {
            None => drop(block),
            Some(used) => {
                let owed = |stream: &Stream| core.fences.debt(stream);
                let streams = used.streams.iter().map(|stream| &**stream);
                match core.pending.wait_for(block, used.proofs, streams, owed) {
                    Ok(false) => {}
                    // The thread that may block waits for the streams.
                    Ok(true) => core.wakeups.thread.nudge(),
                    Err((block, error)) => keep_for_ever(block, &error),
                }
            }
        }
        core.look_on_drop();
    }
}

/// Alignment of blocks, in bytes: what device allocators promise.
const ALIGN: u64 = 256;

/// Allocates a block from the session's source.
pub(crate) fn alloc(core: &Arc<Core>, len: u64) -> Result<SentBlock> {
    if len == 0 {
        return Err(Error::invalid(
            "the length of a block",
            "0",
            "at least 1 byte",
        ));
    }
    let piece = RegionSource::take(&*core.memory.source, len, ALIGN)?;
    // The source may round up; the block is what was asked for, and the piece goes back whole.
    Ok(SentBlock::new(core, piece, Origin::Source))
}

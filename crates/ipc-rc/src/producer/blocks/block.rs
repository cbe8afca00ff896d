//! Blocks: bytes that are shared, kept until the last lease has ended.
//!
//! A block is an [`Arc`]: the producer's [`SentBlock`] holds one, every row of a ledger holds one, and so does every
//! piece of the producer's own work that is not finished. The block's count *is* the number of these, private to this
//! process, and whoever drops the last one gives the bytes back. Between the drop of the `SentBlock` and that moment the
//! block is in limbo.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpu_api::{DevicePtr, Error, Piece, Region, RegionSource, Result};

use crate::producer::blocks::pending_work::Proof;
use crate::producer::core::Core;
use crate::producer::fences::fence::Fences;
use crate::producer::grants::ledger::Effort;
use crate::producer::share::{After, ShareOptions, To};
use crate::stream::{NamedStream, Stream};
use channel::trace_point;
use channel::wire::descriptor::Descriptor;

/// What the owner of adopted memory chose to know it by; [`Session::collect`](crate::Session::collect) returns it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub struct AdoptToken(pub u64);

/// Where a block's bytes go when nothing holds them any more.
#[derive(Debug)]
pub(crate) enum Origin {
    /// Back to the session's source.
    Source,
    /// Back to the owner, by its token.
    Adopted(AdoptToken),
    /// Back to the owner of this part, by its token; the block itself goes on.
    Part { token: AdoptToken, _whole: Arc<Block> },
}

/// Streams below which none is looked at whether it is still in use.
const FEW_STREAMS: usize = 8;

/// The producer's own work that may touch a block.
#[derive(Debug, Default)]
struct UsedOn {
    streams: Vec<NamedStream>,
    /// Events on streams that the application has let go of.
    proofs: Vec<Proof>,
    /// How many streams there are when they are looked at.
    many: usize,
}

impl UsedOn {
    #[inline]
    fn is_empty(&self) -> bool {
        self.streams.is_empty() && self.proofs.is_empty()
    }

    /// Lets go of streams that nobody can queue work on any more: an event stands for what they have left to do.
    fn prune(&mut self, fences: &Fences) {
        if self.streams.len() < self.many.max(FEW_STREAMS) {
            return;
        }
        self.proofs.retain(|proof| !proof.is_passed());
        self.streams.retain(|stream| {
            let proof = stream.is_let_go().then(|| Proof::record(stream, fences.debt(stream)));
            // Without an event the stream itself stays.
            let Some(Ok(proof)) = proof else { return true };
            self.proofs.push(proof);
            false
        });
        // As many again before the next look.
        self.many = self.streams.len() * 2;
    }
}

/// A block, as ledgers and limbo hold it.
pub(crate) struct Block {
    core: Arc<Core>,
    piece: ManuallyDrop<Piece>,
    origin: Origin,
    /// Streams of the producer whose work may touch the block.
    used_on: Mutex<UsedOn>,
    /// The `SentBlock` was dropped.
    limbo: AtomicBool,
    /// There may be unlimited tickets, which end with the `SentBlock`.
    has_tickets: AtomicBool,
    /// Never used again, and counted as leaked. Only read and set by a swap, which orders nothing else.
    is_leaked: AtomicBool,
}

impl Block {
    pub(crate) fn new(core: &Arc<Core>, piece: Piece, origin: Origin) -> Arc<Block> {
        core.live.add(piece.len);
        Arc::new(Block {
            core: core.clone(),
            piece: ManuallyDrop::new(piece),
            origin,
            used_on: Mutex::default(),
            limbo: AtomicBool::new(false),
            has_tickets: AtomicBool::new(false),
            is_leaked: AtomicBool::new(false),
        })
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    pub(crate) fn len(&self) -> u64 {
        self.piece.len
    }

    /// Returns the address of the first byte, in this process.
    pub(crate) fn ptr(&self) -> DevicePtr {
        self.piece.ptr()
    }

    pub(crate) fn offset(&self) -> u64 {
        self.piece.offset
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.piece.region
    }

    /// Says whether its `SentBlock` was dropped.
    pub(crate) fn is_in_limbo(&self) -> bool {
        // Both flags SeqCst: `Tickets::issue` sets the other one and reads this, `SentBlock::drop` the reverse.
        self.limbo.load(Ordering::SeqCst)
    }

    /// Notes that there may be unlimited tickets.
    pub(crate) fn note_tickets(&self) {
        self.has_tickets.store(true, Ordering::SeqCst);
    }

    /// Keeps a block for ever, because nobody can say when the work on it ends. Counted once, whoever else held it.
    pub(crate) fn leak(self: Arc<Block>) {
        if !self.is_leaked.swap(true, Ordering::Relaxed) {
            self.core.leaked.add(self.len());
        }
        std::mem::forget(self);
    }

    /// Notes that work on `stream` may touch the block.
    pub(crate) fn note_use(&self, stream: &Stream) {
        let mut used = self.used_on.lock().unwrap_or_else(PoisonError::into_inner);
        if !used.streams.iter().any(|s| s.key() == stream.key()) {
            used.prune(&self.core.fences);
            used.streams.push(stream.name());
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (region, offset) = (self.region().id().0, self.offset());
        write!(f, "Block {{ {} bytes of region {region} at {offset} }}", self.len())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.core.guard.is_child() {
            return;
        }
        // SAFETY: `ManuallyDrop::take` asks that the value is not used again: this is the block's own drop.
        let piece = unsafe { ManuallyDrop::take(&mut self.piece) };
        let len = piece.len;
        trace_point!("retire");
        // Before the counts, so that who sees in them that a block is gone finds its bytes free.
        match self.origin {
            Origin::Source => {
                if self.core.ask_source(|source| source.give_back(piece)).is_none() {
                    // Nobody knows whether its bytes are free: it stays counted.
                    self.core.leaked.add(len);
                    return;
                }
            }
            Origin::Adopted(token) => self.core.return_token(token, Some(piece)),
            // Whoever maps the region may go on: its bytes stay the block's.
            Origin::Part { token, .. } => self.core.return_token(token, None),
        }
        self.core.live.sub(len);
        if *self.limbo.get_mut() {
            self.core.limbo.sub(len);
        }
    }
}

/// A block that this process produces: allocate, [`share`](SentBlock::share), drop.
///
/// The drop never blocks. If somebody still holds the block, or the producer's own queued work may touch it, it waits
/// in limbo and is given back by a later collect.
pub struct SentBlock {
    block: ManuallyDrop<Arc<Block>>,
}

impl SentBlock {
    pub(crate) fn new(block: Arc<Block>) -> SentBlock {
        SentBlock { block: ManuallyDrop::new(block) }
    }

    /// Returns what ledgers hold of it.
    pub(crate) fn shared(&self) -> &Arc<Block> {
        &self.block
    }

    /// Returns the address of the first byte, in this process.
    ///
    /// Work that is queued on a stream and touches the block must have its stream named with
    /// [`used_on`](SentBlock::used_on) before the drop, unless the block was shared after that stream.
    pub fn device_ptr(&self) -> DevicePtr {
        self.block.piece.ptr()
    }

    /// Returns the bytes.
    #[allow(clippy::len_without_is_empty, reason = "a block is never empty")]
    pub fn len(&self) -> u64 {
        self.block.len()
    }

    /// Grants a lease and returns the descriptor by which it is claimed.
    ///
    /// # Errors
    ///
    /// [`Error::ParticipantGone`], [`Error::Closing`], [`Error::Forked`], [`Error::Capturing`] for a stream that is
    /// being captured, [`Error::Exhausted`] when the participant's quota of leases is used up or too many tickets are
    /// live, and what the driver gives. After an error nothing was granted.
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
    pub fn share_with(&self, to: To, after: After<'_>, options: &ShareOptions) -> Result<Descriptor> {
        self.block.core.share(&self.block, to, after, options)
    }

    /// Makes a block of some of this one's bytes, for an allocator that hands out parts of it. The part is the
    /// allocator's again when [`collect`](crate::Session::collect) returns `token`: when it was dropped and its last lease
    /// has ended. It counts as outstanding on this block, which it keeps.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range that is empty or does not lie in the block, [`Error::Closing`], [`Error::Forked`].
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
        let (whole, core) = (&*self.block, &self.block.core);
        core.check_open()?;
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > whole.len()) {
            return Err(Error::Invalid {
                what: "the part of a block",
                got: format!("{len} bytes at {offset} of {}", whole.len()),
                must: "inside the block, and not empty",
            });
        }
        let piece = Piece { region: whole.region().clone(), offset: whole.offset() + offset, len };
        Ok(SentBlock::new(Block::new(core, piece, Origin::Part { token, _whole: whole.clone() })))
    }

    /// Takes a grant back that nobody has claimed, and says whether it did. A claim of it then gives `Revoked`. A ticket
    /// is ended before its last claim; leases that it gave stay.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] for a descriptor of another session or block, [`Error::Forked`].
    pub fn cancel(&self, descriptor: &Descriptor) -> Result<bool> {
        self.block.core.cancel(&self.block, descriptor)
    }

    /// Names a stream of this process, of any device and vendor, whose queued work touches the block: it is not used
    /// again before that is done.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the per-thread default stream (handle 2): the thread that drops the block may be another;
    /// [`Error::Forked`].
    pub fn used_on(&self, stream: &Stream) -> Result<()> {
        self.block.core.check_fork()?;
        stream.refuse_per_thread()?;
        self.block.note_use(stream);
        Ok(())
    }

    /// Counts the leases that are granted or held; a ticket that can still be claimed counts as one, an unlimited
    /// ticket as none.
    pub fn outstanding(&self) -> usize {
        Arc::strong_count(&self.block) - 1
    }

    /// Waits until no lease on the block is outstanding: backpressure for a producer that writes into it again.
    ///
    /// With a timeout of zero it asks. When the answer is no, the session tells of the release by
    /// [`SessionNotice::TryAgain`](crate::SessionNotice::TryAgain), so that an event loop asks again in time.
    ///
    /// # Errors
    ///
    /// [`Error::Deadline`] when some still are after `timeout` (`None` waits for ever), [`Error::Forked`].
    ///
    /// # Examples
    ///
    /// A frame is written again as soon as nobody looks at it:
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
    /// assert!(pool[0].cancel(&seen)?, "nobody has claimed it");
    /// pool[0].wait_released(None)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait_released(&self, timeout: Option<Duration>) -> Result<()> {
        let core = &self.block.core;
        core.check_fork()?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let released = || {
            core.collect(Effort::Marked);
            let is_released = self.outstanding() == 0;
            // The count is read without an ordering, and each lease's end lowered it with Release: what the consumers did
            // comes before what the producer does next.
            fence(Ordering::Acquire);
            is_released.then_some(())
        };
        core.wait_until(deadline, released).ok_or_else(|| {
            core.watch_release(&self.block);
            Error::Deadline { what: "the consumers of a block" }
        })
    }

    /// Returns the region that it lies in and the offset there, in bytes, as a [snapshot](crate::snapshot) shows them.
    pub fn place(&self) -> (gpu_api::RegionId, u64) {
        (self.block.region().id(), self.block.offset())
    }
}

impl fmt::Debug for SentBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (region, offset) = self.place();
        write!(f, "SentBlock {{ {} bytes of region {} at {offset} }}", self.len(), region.0)
    }
}

impl Drop for SentBlock {
    fn drop(&mut self) {
        // SAFETY: `ManuallyDrop::take` asks that the value is not used again: this is its owner's drop.
        let block = unsafe { ManuallyDrop::take(&mut self.block) };
        if block.core.guard.is_child() {
            // The parent's block: nothing of it may change, its count least of all.
            std::mem::forget(block);
            return;
        }
        trace_point!("drop");
        let core = &block.core;
        block.limbo.store(true, Ordering::SeqCst);
        core.limbo.add(block.len());
        if block.has_tickets.load(Ordering::SeqCst) {
            core.tickets.end_of(&block);
        }
        let used = {
            let mut used = block.used_on.lock().unwrap_or_else(PoisonError::into_inner);
            // Most blocks are shared after nothing: what is empty is not moved.
            if used.is_empty() { None } else { Some(std::mem::take(&mut *used)) }
        };
        let Some(used) = used else {
            core.look_on_drop();
            drop(block);
            return;
        };
        let core = core.clone();
        let owed = |stream: &Stream| core.fences.debt(stream);
        let streams = used.streams.iter().map(|stream| &**stream);
        match core.own_work.wait_for(block, used.proofs, streams, owed) {
            Ok(false) => {}
            // The thread that may block waits for the streams.
            Ok(true) => core.waker.nudge(),
            Err((block, error)) => keep_for_ever(block, &error),
        }
        core.look_on_drop();
    }
}

/// Keeps a dropped block: nobody knows when the queued work ends, so the bytes are never used again.
pub(crate) fn keep_for_ever(block: Arc<Block>, error: &Error) {
    tracing::warn!(bytes = block.len(), %error, "a dropped block is kept for ever: its streams cannot be asked");
    block.leak();
}

/// Refuses what a source cannot give.
pub(crate) fn alloc(core: &Arc<Core>, len: u64) -> Result<SentBlock> {
    if len == 0 {
        return Err(Error::Invalid { what: "the length of a block", got: "0".into(), must: "at least 1 byte" });
    }
    let piece = RegionSource::take(&*core.source, len, core.align)?;
    // The source may round up; the block is what was asked for, and the piece goes back whole.
    Ok(SentBlock::new(Block::new(core, piece, Origin::Source)))
}

//! Blocks: bytes that are shared, kept until the last lease has ended.
//!
//! A block is an [`Arc`]: the producer's [`SentBlock`](crate::SentBlock) holds one, every row of a
//! ledger holds one, and so does every piece of the producer's own work that is not finished. The
//! block's count *is* the number of these, private to this process; the drop of the last gives the
//! bytes back. Between the drop of the `SentBlock` and that moment the block is in limbo.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use allocators::{Piece, Region};
use gpu_api::lock::Acquire;
use gpu_api::{DevicePtr, Error};

use crate::producer::blocks::memory::Memory;
use crate::producer::blocks::pending_work::Proof;
use crate::producer::blocks::tokens::AdoptToken;
use crate::producer::fences::fence::Fences;
use crate::stream::{NamedStream, Stream};
use transport::trace_point;
use transport::wire::message::Extent;

/// Where a block's bytes go when nothing holds them any more.
#[derive(Debug)]
pub(crate) enum Origin {
    /// Back to the session's source.
    Source,
    /// Back to the owner, by its token.
    Adopted(AdoptToken),
    /// Back to the owner of this part, by its token if it has one; the block itself goes on.
    Part {
        token: Option<AdoptToken>,
        _whole: Arc<Block>,
    },
}

/// Streams below which none is looked at whether it is still in use.
const FEW_STREAMS: usize = 8;

/// The producer's own work that may touch a block.
#[derive(Debug, Default)]
pub(crate) struct UsedOn {
    pub streams: Vec<NamedStream>,
    /// Events on streams that the application has let go of.
    pub proofs: Vec<Proof>,
    /// How many streams there are when they are looked at.
    many: usize,
}

impl UsedOn {
    /// Lets go of streams that nobody can queue work on any more: an event stands for what they
    /// have left to do.
    fn prune(&mut self, fences: &Fences) {
        if self.streams.len() < self.many.max(FEW_STREAMS) {
            return;
        }
        self.proofs.retain(|proof| !proof.is_passed());
        self.streams.retain(|stream| {
            let proof = stream
                .is_let_go()
                .then(|| Proof::record(stream, fences.debt(stream)));
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
    memory: Arc<Memory>,
    piece: ManuallyDrop<Piece>,
    origin: Origin,
    /// Streams of the producer whose work may touch the block.
    used_on: Mutex<UsedOn>,
    /// The `SentBlock` was dropped.
    limbo: AtomicBool,
    /// There may be unlimited tickets, which end with the `SentBlock`.
    has_tickets: AtomicBool,
    /// Never used again, and counted as leaked. Only read and set by a swap, which orders nothing
    /// else.
    is_leaked: AtomicBool,
}

impl Block {
    pub(crate) fn new(memory: &Arc<Memory>, piece: Piece, origin: Origin) -> Arc<Block> {
        memory.live.add(piece.len);
        Arc::new(Block {
            memory: memory.clone(),
            piece: ManuallyDrop::new(piece),
            origin,
            used_on: Mutex::default(),
            limbo: AtomicBool::new(false),
            has_tickets: AtomicBool::new(false),
            is_leaked: AtomicBool::new(false),
        })
    }

    pub(crate) fn len(&self) -> u64 {
        self.piece.len
    }

    /// Returns the address of the first byte, in this process.
    pub(crate) fn ptr(&self) -> DevicePtr {
        self.piece.ptr()
    }

    pub(crate) fn piece(&self) -> &Piece {
        &self.piece
    }

    pub(crate) fn offset(&self) -> u64 {
        self.piece.offset
    }

    /// Returns where it lies.
    pub(crate) fn extent(&self) -> Extent {
        Extent {
            region: self.region().id(),
            offset: self.offset(),
            len: self.len(),
        }
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        &self.piece.region
    }

    /// Says whether its `SentBlock` was dropped.
    pub(crate) fn is_in_limbo(&self) -> bool {
        // Both flags SeqCst: `Tickets::issue` sets the other one and reads this, `SentBlock::drop`
        // the reverse.
        self.limbo.load(Ordering::SeqCst)
    }

    /// Notes that there may be unlimited tickets.
    pub(crate) fn note_tickets(&self) {
        self.has_tickets.store(true, Ordering::SeqCst);
    }

    /// Notes that its `SentBlock` is dropped, and says whether there may be unlimited tickets.
    pub(crate) fn enter_limbo(&self) -> bool {
        self.limbo.store(true, Ordering::SeqCst);
        self.memory.limbo.add(self.len());
        self.has_tickets.load(Ordering::SeqCst)
    }

    /// Keeps a block for ever, because the end of its work cannot be observed. Counted once,
    /// however many hold it.
    pub(crate) fn leak(self: Arc<Block>) {
        if !self.is_leaked.swap(true, Ordering::Relaxed) {
            self.memory.leaked.add(self.len());
        }
        std::mem::forget(self);
    }

    /// Notes that work on `stream` may touch the block.
    pub(crate) fn note_use(&self, stream: &Stream, fences: &Fences) {
        let mut used = self.used_on.acquire();
        if !used.streams.iter().any(|s| s.key() == stream.key()) {
            used.prune(fences);
            used.streams.push(stream.name());
        }
    }

    /// Takes what work may touch the block, if there is any.
    pub(crate) fn take_uses(&self) -> Option<UsedOn> {
        let mut used = self.used_on.acquire();
        // Most blocks are shared after nothing: what is empty is not moved.
        let is_any = !used.streams.is_empty() || !used.proofs.is_empty();
        is_any.then(|| std::mem::take(&mut *used))
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (region, offset) = (self.region().id().0, self.offset());
        write!(
            f,
            "Block {{ {} bytes of region {region} at {offset} }}",
            self.len()
        )
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let memory = &self.memory;
        if memory.guard.is_child() {
            return;
        }
        // SAFETY: `ManuallyDrop::take` asks that the value is not used again: this is the block's
        // own drop.
        let piece = unsafe { ManuallyDrop::take(&mut self.piece) };
        let len = piece.len;
        trace_point!("retire");
        // Before the counts, so that who sees in them that a block is gone finds its bytes free.
        match self.origin {
            Origin::Source => {
                if memory
                    .ask_source(|source| source.give_back(piece))
                    .is_none()
                {
                    // Nobody knows whether its bytes are free: it stays counted.
                    memory.leaked.add(len);
                    return;
                }
            }
            Origin::Adopted(token) => memory.return_token(token, Some(piece)),
            // A participant that maps the region may go on: its bytes stay the block's.
            Origin::Part {
                token: Some(token), ..
            } => memory.return_token(token, None),
            Origin::Part { token: None, .. } => {}
        }
        memory.live.sub(len);
        if *self.limbo.get_mut() {
            memory.limbo.sub(len);
        }
    }
}

/// Keeps a dropped block: the end of its queued work is unknown, so the bytes are never used again.
pub(crate) fn keep_for_ever(block: Arc<Block>, error: &Error) {
    tracing::warn!(bytes = block.len(), %error, "a dropped block is kept for ever: its streams cannot be asked");
    block.leak();
}

//! Received blocks: what a claim gives.

use std::fmt;
use std::num::NonZeroU32;
use std::ops::RangeBounds;
use std::time::Duration;

use gpu_api::{Access, DevicePtr, RegionId, Result};

use crate::consumer::claim_error::ClaimError;
use crate::consumer::connection::asking::Patience;
use crate::consumer::connection::link::Link;
use crate::consumer::graph::GraphBlocks;
use crate::consumer::leases::lease::Lease;
use crate::consumer::wait::Wait;
use crate::producer::grants::ticket::Claims;
use crate::producer::share::To;
use crate::range::part_of;
use crate::stream::Stream;
use transport::shared::timeline;
use transport::wire::descriptor::Descriptor;
use transport::wire::message::Heir;

/// What a received block's contents are worth. Closed, so that callers handle each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// The producer's work on it is not finished.
    Pending,
    /// The contents are what the producer shared.
    Ready,
    /// The contents are what the producer shared, and the producer is gone.
    ReadyProducerGone,
    /// The producer died or broke before its work on the block was finished: the contents are
    /// garbage.
    Poisoned,
}

/// A block that this process received: an address to read and write until the last clone is
/// dropped.
///
/// Clones and [slices](ReceivedBlock::slice) share one lease. The drop of the last one never
/// blocks: the lease ends when all work on the streams that were named with
/// [`used_on`](ReceivedBlock::used_on) has finished.
#[derive(Clone)]
pub struct ReceivedBlock {
    lease: Lease,
    ptr: DevicePtr,
    len: u64,
}

impl ReceivedBlock {
    #[inline(always)]
    pub(crate) fn new(lease: Lease, offset: u64, len: u64) -> ReceivedBlock {
        let ptr = lease.held().mapping.base().offset(offset);
        ReceivedBlock { lease, ptr, len }
    }

    /// Returns the address of the first byte, valid in this process while a clone of the block
    /// lives.
    ///
    /// Every stream whose work touches the block must be named with
    /// [`used_on`](ReceivedBlock::used_on) before the last clone is dropped (the one that the claim
    /// waited on is), and work that the CPU does must be over by then. Otherwise the producer may
    /// use the bytes again while that work runs: undefined behaviour that no library can see.
    ///
    /// The address means nothing in a forked child.
    pub fn device_ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Returns the length in bytes.
    #[allow(
        clippy::len_without_is_empty,
        reason = "a block is never empty; a slice of no bytes is refused"
    )]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Says whether the block is only read: it was [shared
    /// so](crate::ShareOptions::read_only), or the participant [maps
    /// so](crate::ParticipantBuilder::read_only). A write to its address faults, on a GPU in a way
    /// that breaks the context.
    pub fn is_read_only(&self) -> bool {
        self.access() == Access::ReadOnly
    }

    pub(crate) fn access(&self) -> Access {
        let held = self.lease.held();
        held.link().facts.access_to(held.mapping.region())
    }

    /// Names a stream of this process whose work touches the block, of any device and vendor.
    ///
    /// The participant's thread polls streams of another device than the participant's.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](gpu_api::Error::Invalid) for the per-thread default stream (handle 2):
    /// the thread that drops the block may be another.
    pub fn used_on(&self, stream: &Stream) -> Result<()> {
        self.link().guard.check("this block")?;
        stream.refuse_per_thread()?;
        self.lease.used_on(stream);
        Ok(())
    }

    /// Returns the link to the producer.
    pub(crate) fn link(&self) -> &Link {
        self.lease.held().link()
    }

    /// Names a stream that is the same on every thread.
    pub(crate) fn note_use(&self, stream: &Stream) {
        self.lease.used_on(stream);
    }

    /// Waits for the producer's work on the block after the claim: for one that was claimed with
    /// [`Wait::None`], or that is used on a further stream. A stream counts as
    /// [used](ReceivedBlock::used_on).
    ///
    /// # Errors
    ///
    /// [`ClaimError::Capturing`] and a stream's [`Error::Mismatch`](gpu_api::Error::Mismatch) as of
    /// a claim, [`ClaimError::Forked`], and [`Error::Deadline`](gpu_api::Error::Deadline) after
    /// `timeout` (`None` waits for ever). The block stays held. The producer's death ends the wait:
    /// ask [`state`](ReceivedBlock::state).
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # use ipc_rc::{After, Participant, Session, State, Stream, To, Wait};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// # let participant = Participant::builder(gpu.clone()).connect(session.socket_path())?;
    /// # let block = session.alloc(4096)?;
    /// # let producers = Stream::create(&gpu)?;
    /// let descriptor = block.share(To::Participant(participant.id()), After::Stream(&producers))?;
    /// let received = participant.claim(descriptor.as_bytes(), Wait::None, None)?;
    /// let (first, second) = (Stream::create(&gpu)?, Stream::create(&gpu)?);
    /// received.wait(Wait::Stream(&first), None)?;
    /// received.wait(Wait::Stream(&second), None)?;
    /// // ... queue kernels on both ...
    /// received.wait(Wait::Host, None)?;
    /// assert_eq!(received.state(), State::Ready);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn wait(&self, wait: Wait<'_>, timeout: Option<Duration>) -> Result<(), ClaimError> {
        let link = self.lease.held().link();
        link.guard.check("this block")?;
        link.check_stream(wait)?;
        if let Wait::Stream(stream) = wait {
            // Before the wait is queued: it needs words that are registered while the block is
            // held.
            self.note_use(stream.ahead()?);
        }
        let patience = Patience::within(timeout);
        match self.lease.fence() {
            Some(fence) => link.wait_after_claim(&fence, wait, patience),
            None => Ok(()),
        }
    }

    /// Drops many blocks at the cost of a few: those that follow each other and were [used
    /// on](ReceivedBlock::used_on) the same streams wait for one event on each, and one batch of
    /// stores ends them.
    ///
    /// Means the same as dropping each, and never blocks. Sort the blocks by their streams if they
    /// were used on several.
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # use ipc_rc::{After, Participant, ReceivedBlock, Session, Stream, To, Wait};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// # let participant = Participant::builder(gpu.clone()).connect(session.socket_path())?;
    /// # let blocks = (0..64).map(|_| session.alloc(4096)).collect::<Result<Vec<_>, _>>()?;
    /// let stream = Stream::create(&gpu)?;
    /// let mut received = Vec::new();
    /// for block in &blocks {
    ///     let descriptor = block.share(To::Participant(participant.id()), After::Done)?;
    ///     let layer = participant.claim(descriptor.as_bytes(), Wait::Stream(&stream), None)?;
    ///     layer.used_on(&stream)?;
    ///     received.push(layer);
    /// }
    /// // ... queue kernels on `stream` that read all of them ...
    /// ReceivedBlock::drop_many(received);
    /// # stream.synchronize()?;
    /// # drop(blocks);
    /// # assert!(session.shutdown(std::time::Duration::from_secs(60)).clean);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn drop_many(blocks: impl IntoIterator<Item = ReceivedBlock>) {
        Lease::drop_many(blocks.into_iter().map(|block| block.lease));
    }

    /// Returns a part of the block, under the same lease.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](gpu_api::Error::Invalid) for a range that is empty or does not lie in the
    /// block, [`Error::Forked`](gpu_api::Error::Forked).
    pub fn slice(&self, range: impl RangeBounds<u64>) -> Result<ReceivedBlock> {
        self.link().guard.check("this block")?;
        let (offset, len) = part_of(self.len, &range)?;
        Ok(ReceivedBlock {
            lease: self.lease.clone(),
            ptr: self.ptr.offset(offset),
            len,
        })
    }

    /// Keeps the block for a graph that is captured with it, until the graph's list is dropped.
    /// Without this a drop while a used stream is being captured keeps the lease until the process
    /// ends.
    pub fn keep_for(&self, graph: &GraphBlocks) {
        graph.keep(self.lease.clone());
    }

    /// Returns the region that it lies in.
    pub fn region(&self) -> RegionId {
        self.lease.held().mapping.region()
    }

    /// Asks the producer for a descriptor of this block, or slice, for another participant of the
    /// same session, or as a ticket for the first that claims it. The new lease does not depend on
    /// this one. Its user bytes are zero.
    ///
    /// Waits for the producer's work on the block first, then for its answer. Work of this process
    /// on the block must be done: the receiver waits for none of it.
    ///
    /// # Errors
    ///
    /// [`ClaimError::Refused`] with the producer's reason, [`ClaimError::ProducerGone`],
    /// [`ClaimError::Forked`], and [`ClaimError::Backend`] with
    /// [`Error::Deadline`](gpu_api::Error::Deadline) after `timeout` (`None` waits for ever): what
    /// the producer may have granted by then lapses unclaimed. [`ClaimError::Stale`] for contents
    /// that were [poisoned](State::Poisoned).
    pub fn forward(&self, to: To, timeout: Option<Duration>) -> Result<Descriptor, ClaimError> {
        self.forward_with(to, &[0; 64], timeout)
    }

    /// Forwards as [`forward`](ReceivedBlock::forward) does, with 64 user bytes.
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # use ipc_rc::{After, Descriptor, Participant, Session, ShareOptions, To, Wait};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// # let first = Participant::builder(gpu.clone()).connect(session.socket_path())?;
    /// # let second = Participant::builder(gpu).connect(session.socket_path())?;
    /// # let block = session.alloc(4096)?;
    /// # let options = ShareOptions::default().user([7; 64]);
    /// # let bytes = *block.share_with(To::Participant(first.id()), After::Done, &options)?.as_bytes();
    /// let received = first.claim(&bytes, Wait::Host, None)?;
    /// let user = *Descriptor::decode(&bytes)?.user();
    /// let onward = received.forward_with(To::Participant(second.id()), &user, None)?;
    /// drop(received); // the forwarded lease goes on
    /// assert_eq!(onward.user(), &[7; 64]);
    /// assert_eq!(second.claim(onward.as_bytes(), Wait::Host, None)?.len(), 4096);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward_with(
        &self,
        to: To,
        user: &[u8; 64],
        timeout: Option<Duration>,
    ) -> Result<Descriptor, ClaimError> {
        let held = self.lease.held();
        let link = held.link();
        link.guard.check("this block")?;
        let patience = Patience::within(timeout);
        if let Some(fence) = self.lease.fence() {
            link.wait_on_host(&fence, patience)?;
        }
        if self.state() == State::Poisoned {
            return Err(ClaimError::Stale);
        }
        let heir = match to {
            To::Participant(id) => Heir::Participant(id),
            To::Ticket(Claims::Once) => Heir::Ticket(NonZeroU32::new(1)),
            To::Ticket(Claims::Times(claims)) => Heir::Ticket(Some(claims)),
            To::Ticket(Claims::Unlimited) => Heir::Ticket(None),
        };
        let part = (self.ptr.0 - held.mapping.base().0, self.len);
        link.forward(held.entry, part, heir, *user, patience)
    }

    /// Says whether the contents are what was shared. After a wait on a stream, ask once the stream
    /// is synchronised.
    pub fn state(&self) -> State {
        let link = self.lease.held().link();
        let seen = self
            .lease
            .fence()
            .map_or(timeline::Fence::Reached, |fence| link.files.look(&fence));
        match seen {
            timeline::Fence::Pending => State::Pending,
            timeline::Fence::Poisoned => State::Poisoned,
            timeline::Fence::Reached if link.is_gone() => State::ReadyProducerGone,
            timeline::Fence::Reached => State::Ready,
        }
    }
}

impl fmt::Debug for ReceivedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceivedBlock")
            .field("ptr", &self.ptr)
            .field("len", &self.len)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

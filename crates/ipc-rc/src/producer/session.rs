//! Sessions: what a producer opens.

use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use allocators::Reclaim;
use gpu_api::lock::Acquire;
use gpu_api::{DevicePtr, Error, Gpu, ParticipantId, Result};

use crate::producer::blocks::adopted::Adopted;
use crate::producer::blocks::block::{Block, Origin};
use crate::producer::blocks::tokens::AdoptToken;
use crate::producer::builder::SessionBuilder;
use crate::producer::core::Core;
use crate::producer::grants::slot_group::Effort;
use crate::producer::loan::Loan;
use crate::producer::notice::SessionNotice;
use crate::producer::report::{ShutdownReport, Stats};
use crate::producer::sent_block::{self, SentBlock};
use crate::producer::share::{After, ShareOptions, To};
use transport::os::socket;
use transport::wire::descriptor::{Descriptor, SessionId};
use transport::wire::message::DepositId;

/// A producer's session: its blocks, their leases, and the moment when each is free.
///
/// Cheap to clone; usable from several threads at once. When the last clone is dropped the socket
/// closes, and its path is free for another session at once; the session's thread goes on until
/// nothing of the session is held, or the process ends.
///
/// # Examples
///
/// ```
/// # use backend_host::{HostBackend, HostConfig};
/// # use gpu_api::{DeviceId, Gpu};
/// # use ipc_rc::{After, Claims, Session, To};
/// # use std::time::Duration;
/// # let dir = tempfile::tempdir()?;
/// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
/// let session = Session::builder(gpu)
///     .socket(dir.path().join("weights"))
///     .time_to_live(Some(Duration::from_secs(10)))
///     .open()?;
/// let block = session.alloc(1 << 20)?;
/// let ticket = block.share(To::Ticket(Claims::Unlimited), After::Done)?;
/// println!("{} bytes at {}", ticket.len(), session.socket_path().display());
/// drop(block); // ends the ticket
/// let report = session.shutdown(Duration::from_secs(60));
/// assert!(report.clean, "still held by {:?}", report.holders);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Session(Arc<Handle>);

struct Handle {
    core: ManuallyDrop<Arc<Core>>,
    path: PathBuf,
    adopted: Adopted,
}

/// How often participants are asked to unmap while an allocation waits.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// What a collect found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Collected {
    /// Blocks that nothing holds any more, adopted ones among them.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Tokens of adopted memory that no process holds or maps any more: its owner may free it.
    pub tokens: Vec<AdoptToken>,
}

impl IntoIterator for Collected {
    type Item = AdoptToken;
    type IntoIter = std::vec::IntoIter<AdoptToken>;

    fn into_iter(self) -> Self::IntoIter {
        self.tokens.into_iter()
    }
}

impl Session {
    /// Begins to open a session on a device.
    pub fn builder(gpu: Gpu) -> SessionBuilder {
        SessionBuilder::new(gpu)
    }

    pub(super) fn of(core: Arc<Core>, path: PathBuf) -> Session {
        Session(Arc::new(Handle {
            core: ManuallyDrop::new(core),
            path,
            adopted: Adopted::new(),
        }))
    }

    fn core(&self) -> &Arc<Core> {
        &self.0.core
    }

    /// Returns the session's number: 128 random bits, in every descriptor.
    pub fn id(&self) -> SessionId {
        self.core().facts.id
    }

    /// Returns the socket that participants connect to.
    pub fn socket_path(&self) -> &Path {
        &self.0.path
    }

    /// Returns the device.
    pub fn gpu(&self) -> &Gpu {
        &self.core().facts.gpu
    }

    /// Takes the oldest unread notice. While there is one, the session's [`AsFd`] is readable.
    pub fn next_notice(&self) -> Option<SessionNotice> {
        let core = self.core();
        if core.is_child() {
            None
        } else {
            core.notices.take()
        }
    }

    /// Accepts a connection that did not come through the session's socket: passed on by another
    /// process, or one end of a socket pair (`SOCK_SEQPACKET`). It is admitted when it says hello.
    ///
    /// Every other process must have closed its copy of the other end: while one is open, the
    /// participant's death is not proven.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for anything but such a socket, [`Gone::Session`](crate::Gone::Session), [`Error::Forked`].
    pub fn accept(&self, connection: impl Into<OwnedFd>) -> Result<()> {
        let core = self.core();
        core.check_open()?;
        let connection = connection.into();
        socket::take_over(&connection)?;
        core.arrivals.acquire().push(connection);
        core.wakeups.thread.wake();
        Ok(())
    }

    /// Allocates a block of `len` bytes, aligned to 256.
    ///
    /// Ended leases are collected before the device is asked for more. When the device has no more,
    /// participants are asked to unmap idle regions, and waited for as long as the arena's
    /// [`patience`](allocators::ArenaOptions::patience): 100 ms for the session's own.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] when there is no room after that, with the holders;
    /// [`Error::Invalid`] for zero bytes, [`Gone::Session`](crate::Gone::Session), [`Error::Forked`].
    pub fn alloc(&self, len: u64) -> Result<SentBlock> {
        let core = self.core();
        core.check_open()?;
        match sent_block::alloc(core, len) {
            Err(Error::OutOfMemory { .. }) if !core.facts.source_collects => {
                core.collect(Effort::Everything);
                sent_block::alloc(core, len)
            }
            done => done,
        }
    }

    /// Allocates a block as [`alloc`](Session::alloc) does, and waits for room: for leases to end,
    /// and for participants to unmap what they do not use, so that whole regions can go back to the
    /// driver. They are asked again as long as it waits, because each can only unmap what it does
    /// not use at that moment.
    ///
    /// # Errors
    ///
    /// As `alloc`; [`Error::OutOfMemory`] when there is no room after `timeout` and the arena's
    /// patience.
    pub fn alloc_within(&self, len: u64, timeout: Duration) -> Result<SentBlock> {
        let core = self.core();
        let mut ask = Instant::now();
        let mut last = None;
        let room = || match self.alloc(len) {
            Err(error @ Error::OutOfMemory { .. }) => {
                let now = Instant::now();
                // An arena has asked already.
                if !core.facts.source_collects && now >= ask {
                    ask = now + ASK_AGAIN;
                    core.ask_to_unmap();
                }
                last = Some(error);
                None
            }
            done => Some(done),
        };
        match core.wakeups.wait_for(Some(timeout), room) {
            Some(done) => done,
            None => Err(last.unwrap_or(Error::deadline("room for a block"))),
        }
    }

    /// Shares several blocks after the same work, each with the participant that it names: one
    /// fence for each participant, in one call of the driver. The descriptors come in the order of
    /// `grants`.
    ///
    /// # Errors
    ///
    /// As [`SentBlock::share`]. After an error nothing is granted.
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # use ipc_rc::{After, Claims, Session, ShareOptions, Stream, To};
    ///
    /// let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// let stream = Stream::create(&gpu)?;
    /// let layers = (0..8).map(|_| session.alloc(4096)).collect::<Result<Vec<_>, _>>()?;
    /// // ... kernels on `stream` fill them ...
    /// let grants: Vec<_> = layers.iter().map(|layer| (layer, To::Ticket(Claims::Once))).collect();
    /// let descriptors = session.share_many(&grants, After::Stream(&stream), &ShareOptions::default())?;
    /// assert_eq!(descriptors.len(), 8);
    /// # stream.synchronize()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn share_many(
        &self,
        grants: &[(&SentBlock, To)],
        after: After<'_>,
        options: &ShareOptions,
    ) -> Result<Vec<Descriptor>> {
        let own = self.own(grants.iter().map(|&(block, to)| (block, to)))?;
        self.core()
            .share_many(&own, |_| &options.user, after, options)
    }

    /// Shares several blocks as [`share_many`](Session::share_many) does, each with 64 user bytes of
    /// its own: a shape, a frame number. Those of `options` are not used.
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
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # use ipc_rc::{After, Claims, Session, ShareOptions, To};
    /// # let session = Session::builder(gpu).socket(dir.path().join("s")).open()?;
    /// let frames = [session.alloc(4096)?, session.alloc(4096)?];
    /// let once = To::Ticket(Claims::Once);
    /// let grants = [(&frames[0], once, &[1; 64]), (&frames[1], once, &[2; 64])];
    /// let descriptors = session.share_many_with(&grants, After::Done, &ShareOptions::default())?;
    /// assert_eq!(descriptors[1].user(), &[2; 64]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn share_many_with(
        &self,
        grants: &[(&SentBlock, To, &[u8; 64])],
        after: After<'_>,
        options: &ShareOptions,
    ) -> Result<Vec<Descriptor>> {
        let own = self.own(grants.iter().map(|&(block, to, _)| (block, to)))?;
        self.core()
            .share_many(&own, |n| grants[n].2, after, options)
    }

    /// Takes grants whose blocks are all of this session.
    fn own<'b>(
        &self,
        grants: impl Iterator<Item = (&'b SentBlock, To)>,
    ) -> Result<Vec<(&'b Arc<Block>, To)>> {
        let own = |(block, to): (&'b SentBlock, To)| {
            if Arc::ptr_eq(block.core(), self.core()) {
                return Ok((block.shared(), to));
            }
            Err(Error::mismatch(
                "the block's session",
                block.core().facts.id,
                self.id(),
                "share blocks with the session that allocated them",
            ))
        };
        grants.map(own).collect()
    }

    /// Takes in memory that other code allocated, so that it can be shared. Its owner keeps it
    /// until [`collect`](Session::collect) returns `token`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for memory that cannot be shared, with the reason and what to change;
    /// [`Error::Invalid`] for a range that does not lie in one allocation.
    ///
    /// # Safety
    ///
    /// - The range stays allocated until a collect of this session returned `token`, or the process
    ///   ends.
    /// - No other block of any session overlaps it.
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # use gpu_api::Sharing;
    /// # use ipc_rc::{Session, AdoptToken};
    ///
    /// let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// let pool = gpu.backend().alloc(gpu.device(), 1 << 20, Sharing::Fd)?; // another allocator's
    /// // SAFETY: `adopt` asks that the range stays allocated until its token is back: it is freed below; and that no
    /// // other block overlaps it: it is the only one.
    /// let block = unsafe { session.adopt(pool.base, 4096, AdoptToken(1)) }?;
    /// // ... share it ...
    /// drop(block);
    /// assert_eq!(session.collect().tokens, [AdoptToken(1)]); // no process holds or maps it
    /// // SAFETY: `free` asks for memory of `alloc` that nothing touches and no process has open: its token is back.
    /// unsafe { gpu.backend().free(pool.base) }?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub unsafe fn adopt(&self, ptr: DevicePtr, len: u64, token: AdoptToken) -> Result<SentBlock> {
        let core = self.core();
        core.check_open()?;
        let piece = self.0.adopted.piece(&core.facts.gpu, ptr, len)?;
        Ok(SentBlock::new(core, piece, Origin::Adopted(token)))
    }

    /// Lends a block, made by [`alloc`](Session::alloc), [`adopt`](Session::adopt) or
    /// [`part`](SentBlock::part): it can be shared again and again until the loan is released. The
    /// work of a stream is marked once, for all that the loan is shared with.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] for a block or a stream of another session or device,
    /// [`Error::Capturing`] for a stream that is being captured, [`Gone::Session`](crate::Gone::Session),
    /// [`Error::Forked`], and the driver's error.
    ///
    /// # Examples
    ///
    /// See [`Loan`].
    pub fn lend(&self, block: SentBlock, after: After<'_>) -> Result<Loan> {
        self.core().check_fork()?;
        if !Arc::ptr_eq(block.core(), self.core()) {
            return Err(Error::mismatch(
                "the block's session",
                block.core().facts.id,
                self.id(),
                "lend blocks of the session that made them",
            ));
        }
        Loan::new(block, after)
    }

    /// Takes a grant back that is not claimed yet, and says whether there was something to take
    /// back. A claim of it then gives `Revoked`.
    ///
    /// Of a ticket, the claims that are left end, and what was granted by it and is unclaimed is
    /// taken back; leases that were claimed stay. Against a claim at the same moment, one of the
    /// two wins.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] for a descriptor of another session, [`Error::Forked`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # use ipc_rc::{After, Claims, Session, To};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # let session = Session::builder(gpu).socket(dir.path().join("s")).open()?;
    /// let descriptor = session.alloc(4096)?.share(To::Ticket(Claims::Once), After::Done)?;
    /// assert!(session.revoke(&descriptor)?);
    /// assert!(!session.revoke(&descriptor)?, "it is taken back already");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn revoke(&self, descriptor: &Descriptor) -> Result<bool> {
        self.core().check_fork()?;
        self.core().revoke(descriptor, None)
    }

    /// Keeps a file descriptor under a name, until a participant or this process fetches it. It
    /// ends with the session.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a name under which a descriptor is kept, [`Gone::Session`](crate::Gone::Session),
    /// [`Error::Forked`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # use ipc_rc::{DepositId, Participant, Session};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// # let participant = Participant::builder(gpu).connect(session.socket_path())?;
    /// let (reader, _writer) = std::io::pipe()?;
    /// let name = DepositId(*b"drawn at random.");
    /// session.deposit(name, reader)?;
    /// let fetched = participant.fetch(name, None)?;
    /// assert!(session.fetch(name).is_err(), "it is the participant's");
    /// # drop(fetched);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn deposit(&self, id: DepositId, file: impl Into<OwnedFd>) -> Result<()> {
        self.core().check_open()?;
        self.core().deposits.keep_own(id, file.into())
    }

    /// Fetches a file descriptor that a participant has
    /// [deposited](crate::Participant::deposit), or this process. Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a name under which nothing is kept, or which a participant is
    /// fetching; [`Error::System`] where this process has no descriptor free: then it stays;
    /// [`Error::Forked`].
    pub fn fetch(&self, id: DepositId) -> Result<OwnedFd> {
        self.core().check_fork()?;
        let file = self.core().deposits.take(id)?;
        // Its depositor may have gone, and have nothing any more.
        self.core().wakeups.thread.wake();
        Ok(file)
    }

    /// Counts the file descriptors that are deposited and not fetched; 0 in a forked child.
    pub fn deposits(&self) -> usize {
        if self.core().is_child() {
            return 0;
        }
        self.core().deposits.table().len()
    }

    /// Lists the connected participants; none in a forked child.
    pub fn participants(&self) -> Vec<ParticipantId> {
        let core = self.core();
        if core.is_child() {
            return Vec::new();
        }
        core.roster.await_seating();
        core.roster
            .peers()
            .iter()
            .flatten()
            .filter(|peer| !peer.gone.load(Ordering::Relaxed))
            .map(|peer| peer.id)
            .collect()
    }

    /// Returns a connected participant's name, or else its command, up to 32 bytes of either; none in
    /// a forked child.
    pub fn participant_name(&self, participant: ParticipantId) -> Option<String> {
        let core = self.core();
        core.check_fork().ok()?;
        // One that has read its welcome may be on its way into the table.
        let peer = core.roster.find(participant).or_else(|| {
            core.roster.await_seating();
            core.roster.find(participant)
        })?;
        Some(peer.name.clone())
    }

    /// Waits until at least `count` participants are connected, and lists them.
    ///
    /// # Errors
    ///
    /// [`Error::Deadline`] when fewer are connected after `timeout`; [`Gone::Session`](crate::Gone::Session), or what
    /// failed, as soon as the session is closed or its thread has failed; [`Error::Forked`].
    pub fn wait_for_participants(
        &self,
        count: usize,
        timeout: Option<Duration>,
    ) -> Result<Vec<ParticipantId>> {
        let core = self.core();
        let enough = || {
            let connected = core.check_open().map(|()| self.participants());
            let waits = matches!(&connected, Ok(connected) if connected.len() < count);
            (!waits).then_some(connected)
        };
        let late = Error::deadline("participants to connect");
        core.check_fork()?;
        core.wakeups.wait_for(timeout, enough).unwrap_or(Err(late))
    }

    /// Finds leases that have ended, frees blocks without holders, and returns the tokens of
    /// adopted memory that its owner has back.
    ///
    /// The cost follows what was released since the last collect, not what is held. The session's
    /// thread collects too; call this to get the tokens, or the memory at once.
    pub fn collect(&self) -> Collected {
        let core = self.core();
        if core.is_child() {
            return Collected::default();
        }
        let reclaimed = core.collect(Effort::Marked);
        let tokens = if core.memory.tokens.is_any() {
            core.take_tokens()
        } else {
            Vec::new()
        };
        Collected {
            blocks: reclaimed.blocks,
            bytes: reclaimed.bytes,
            tokens,
        }
    }

    /// Returns unused, unmapped regions to the driver, and says how many bytes. May block.
    ///
    /// # Errors
    ///
    /// The driver's error; the region is leaked then.
    pub fn trim(&self) -> Result<u64> {
        self.core().check_fork()?;
        self.core().ask_to_unmap();
        self.core().memory.source.trim()
    }

    /// Returns the session's statistics and holders; in a forked child, of an empty session.
    pub fn stats(&self) -> Stats {
        let core = self.core();
        if core.is_child() {
            Stats::default()
        } else {
            core.stats()
        }
    }

    /// Returns the session as a source of memory that an allocator asks when memory is short.
    pub fn reclaim(&self) -> Weak<dyn Reclaim> {
        let core: Arc<dyn Reclaim> = Arc::<Core>::clone(self.core());
        Arc::downgrade(&core)
    }

    /// Shares nothing more, closes the socket, and waits until nothing is held or `timeout` has
    /// passed.
    ///
    /// Participants that are connected can claim what was granted to them until they leave. Tickets
    /// that are left when the last has gone can be claimed by no process, and end.
    ///
    /// What the report lists as held stays safe: the session's thread goes on until it ends. Blocks
    /// that the caller itself has not dropped are held too, and the report counts them apart. What
    /// is leaked never ends, so it is not waited for, and the report is not clean. In a forked child
    /// nothing is done, and the report is not clean.
    pub fn shutdown(&self, timeout: Duration) -> ShutdownReport {
        let core = self.core();
        if core.is_child() {
            return ShutdownReport::default();
        }
        core.close();
        core.wakeups.wait_for(Some(timeout), || {
            core.collect(Effort::Everything);
            core.shutdown_report().is_only_leaked().then_some(())
        });
        core.shutdown_report()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("id", &self.id())
            .field("path", &self.0.path)
            .finish_non_exhaustive()
    }
}

impl AsRawFd for Session {
    /// Returns the raw descriptor of [`AsFd`], for event loops that need one.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Session {
    /// Returns a descriptor that is readable while a [notice](Session::next_notice) is unread.
    ///
    /// An edge-triggered event loop, such as tokio's, must read notices until there is none.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.core().notices.as_fd()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.core.is_child() {
            // The parent's: its socket must stay open here, because that tells its peers that a
            // copy lives.
            return;
        }
        self.core.warn_of_end();
        self.core.close();
        // SAFETY: `ManuallyDrop::drop` asks that the value is not used again: this is its owner's
        // drop.
        unsafe { ManuallyDrop::drop(&mut self.core) };
    }
}

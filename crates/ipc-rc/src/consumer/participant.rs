//! Participants: what a consumer opens.

use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpu_api::{Error, Gpu, ParticipantId, Result};

use crate::consumer::builder::ParticipantBuilder;
use crate::consumer::claim_error::ClaimError;
use crate::consumer::connection::asking::Patience;
use crate::consumer::connection::link::Link;
use crate::consumer::leases::holdings::Holdings;
use crate::consumer::notice::Notice;
use crate::consumer::received_block::ReceivedBlock;
use crate::consumer::wait::Wait;
use transport::wire::descriptor::SessionId;
use transport::wire::message::DepositId;

/// A consumer's connection to one producer's session.
///
/// Cheap to clone; usable from several threads at once. When the last clone is dropped, the
/// participant's thread goes on until every block that it received is dropped and its GPU work
/// done; then it unmaps and says goodbye.
#[derive(Clone)]
pub struct Participant(Arc<Handle>);

struct Handle {
    holdings: ManuallyDrop<Arc<Holdings>>,
}

impl Participant {
    /// Begins to connect from a device.
    pub fn builder(gpu: Gpu) -> ParticipantBuilder {
        ParticipantBuilder::new(gpu)
    }

    pub(super) fn of(holdings: Arc<Holdings>) -> Participant {
        Participant(Arc::new(Handle {
            holdings: ManuallyDrop::new(holdings),
        }))
    }

    fn holdings(&self) -> &Arc<Holdings> {
        &self.0.holdings
    }

    fn link(&self) -> &Link {
        &self.0.holdings.link
    }

    /// Returns the number under which the producer shares with this participant.
    pub fn id(&self) -> ParticipantId {
        self.link().facts.id
    }

    /// Returns the session that it is connected to.
    pub fn session(&self) -> SessionId {
        self.link().facts.session
    }

    /// Returns the device.
    pub fn gpu(&self) -> &Gpu {
        &self.link().facts.gpu
    }

    /// Returns the producer's process id as this process sees it.
    pub fn producer_pid(&self) -> u32 {
        self.link().facts.producer_pid
    }

    /// Says whether the producer is dead or has closed the session.
    pub fn is_producer_gone(&self) -> bool {
        self.link().is_gone()
    }

    /// Claims what a descriptor grants.
    ///
    /// Costs no system call when the block's region is mapped and the grant is addressed; a ticket,
    /// and a region that is not mapped, ask the producer once each, and `timeout` bounds the wait
    /// (`None` waits for ever). When it passes nothing is lost: the same claim can be made again.
    ///
    /// # Errors
    ///
    /// Each variant of [`ClaimError`] says what the caller can do.
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Error, Gpu};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # use std::time::Duration;
    /// # use ipc_rc::{After, Participant, Session, To};
    /// # use ipc_rc::{ClaimError, Wait};
    /// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// # let participant = Participant::builder(gpu).connect(session.socket_path())?;
    /// # let block = session.alloc(4096)?;
    /// # let bytes = *block.share(To::Participant(participant.id()), After::Done)?.as_bytes();
    /// # let mut received = Vec::new();
    /// match participant.claim(&bytes, Wait::Host, Some(Duration::from_secs(10))) {
    ///     Ok(block) => received.push(block),
    ///     Err(ClaimError::Revoked | ClaimError::Stale) => println!("have it shared again"),
    ///     Err(ClaimError::AlreadyClaimed) => println!("clone what the first claim gave"),
    ///     Err(ClaimError::ProducerGone) => println!("connect to its successor"),
    ///     Err(ClaimError::WouldBlock) => unreachable!("only of `try_claim` and `prefetch`"),
    ///     Err(ClaimError::Backend(Error::Deadline { .. })) => println!("claim again: nothing is lost"),
    ///     Err(error @ (ClaimError::Capturing | ClaimError::Forked | ClaimError::Refused { .. })) => panic!("{error}"),
    ///     Err(ClaimError::Backend(error)) => panic!("{error}"),
    /// }
    /// assert!(matches!(participant.claim(&bytes, Wait::Host, None), Err(ClaimError::AlreadyClaimed)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn claim(
        &self,
        bytes: &[u8],
        wait: Wait<'_>,
        timeout: Option<Duration>,
    ) -> Result<ReceivedBlock, ClaimError> {
        self.holdings()
            .claim(bytes, wait, Patience::within(timeout))
    }

    /// Claims what a descriptor grants if that needs no waiting. Otherwise it sends the questions
    /// that the claim needs, which stay for 30 s or until they are
    /// [abandoned](Participant::abandon). When an answer may have come, the participant's [`AsFd`]
    /// is readable and [`next_notice`](Participant::next_notice) gives [`Notice::TryAgain`].
    ///
    /// # Errors
    ///
    /// [`ClaimError::WouldBlock`], and those of [`claim`](Participant::claim).
    ///
    /// # Examples
    ///
    /// An event loop with one descriptor in it:
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # use ipc_rc::{After, Claims, Participant, Session, To};
    /// # use ipc_rc::{ClaimError, Notice, Wait};
    /// use rustix::event::{PollFd, PollFlags, poll};
    /// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// # let block = session.alloc(4096)?;
    /// # let bytes = *block.share(To::Ticket(Claims::Once), After::Done)?.as_bytes();
    /// let participant = Participant::builder(gpu).connect(session.socket_path())?;
    /// let received = loop {
    ///     match participant.try_claim(&bytes, Wait::Host) {
    ///         Err(ClaimError::WouldBlock) => {}
    ///         done => break done?,
    ///     }
    ///     loop {
    ///         poll(&mut [PollFd::new(&participant, PollFlags::IN)], None)?;
    ///         match participant.next_notice() {
    ///             Some(Notice::TryAgain | Notice::ProducerGone) => break,
    ///             _ => {}
    ///         }
    ///     }
    /// };
    /// assert_eq!(received.len(), 4096);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn try_claim(&self, bytes: &[u8], wait: Wait<'_>) -> Result<ReceivedBlock, ClaimError> {
        let link = self.link();
        // Before the attempt, so that what comes while it fails is told.
        link.tries.store(true, Ordering::SeqCst);
        match self.holdings().claim(bytes, wait, Patience::none()) {
            Err(ClaimError::Backend(Error::Deadline { .. })) => Err(ClaimError::WouldBlock),
            done => done,
        }
    }

    /// Claims several descriptors, with one question for up to 56 tickets among them. The results
    /// come in the same order; one that fails does not touch the others.
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # use ipc_rc::{After, Claims, Participant, Session, To, Wait};
    /// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// # let participant = Participant::builder(gpu).connect(session.socket_path())?;
    /// # let blocks = (0..3).map(|_| session.alloc(4096)).collect::<Result<Vec<_>, _>>()?;
    /// # let tickets = blocks.iter().map(|block| block.share(To::Ticket(Claims::Once), After::Done));
    /// # let queue = tickets.map(|ticket| Ok(ticket?.as_bytes().to_vec()));
    /// # let mut queue = queue.collect::<Result<Vec<_>, gpu_api::Error>>()?;
    /// queue.push(b"no descriptor".to_vec());
    /// let claimed = participant.claim_many(&queue, Wait::Host, None);
    /// assert_eq!(claimed.iter().filter(|block| block.is_ok()).count(), queue.len() - 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn claim_many(
        &self,
        descriptors: &[impl AsRef<[u8]>],
        wait: Wait<'_>,
        timeout: Option<Duration>,
    ) -> Vec<Result<ReceivedBlock, ClaimError>> {
        // What cannot be asked ahead is asked by its own claim, which tells why it cannot.
        let _ = self.link().prefetch(descriptors);
        let patience = Patience::within(timeout);
        descriptors
            .iter()
            .map(|bytes| self.holdings().claim(bytes.as_ref(), wait, patience))
            .collect()
    }

    /// Asks ahead for what the claims of these descriptors will need, and does not wait for the
    /// answers: a later [`claim`](Participant::claim) within 30 s finds them there. Skips
    /// descriptors that are not tickets.
    ///
    /// # Errors
    ///
    /// [`ClaimError::ProducerGone`], [`ClaimError::Forked`].
    pub fn prefetch(&self, descriptors: &[impl AsRef<[u8]>]) -> Result<(), ClaimError> {
        self.link().prefetch(descriptors)
    }

    /// Gives up the claim of this descriptor: one that ran out of time, a
    /// [`try_claim`](Participant::try_claim), or a [`prefetch`](Participant::prefetch). Does not
    /// wait.
    ///
    /// What a ticket gave this participant goes back to the producer, also when its answer is still
    /// on its way, and no longer holds the block. The ticket's claim is spent, as if the block had
    /// been claimed and dropped: a later claim gives [`ClaimError::Revoked`] or
    /// [`ClaimError::Stale`]. Of an unlimited ticket the participant may claim again. A ticket that
    /// this participant was not given stays as it is; so do a block that it has claimed, and a
    /// ticket that another thread waits for at this moment.
    ///
    /// An addressed grant stays granted, and can be claimed later. Without this call the questions
    /// of a try end by themselves when the claim was not tried again for 30 s, and what was granted
    /// can be claimed for its time to live.
    pub fn abandon(&self, descriptor: &[u8]) {
        self.holdings().abandon(descriptor);
    }

    /// Has the session keep a file descriptor under a name, until one participant, or the session's own
    /// process, fetches it. It ends with this participant: once its death is proven, or at its
    /// goodbye.
    ///
    /// This hands on memory that has a descriptor and no other handle, beside messages that carry
    /// only bytes. A name is used once; draw it at random. A session keeps up to 256 descriptors for
    /// a participant.
    ///
    /// # Errors
    ///
    /// [`ClaimError::Refused`] for a name under which a descriptor is kept, past the 256, and in a
    /// session that is closing; [`ClaimError::ProducerGone`]; [`ClaimError::Forked`];
    /// [`ClaimError::Backend`] with [`Error::Deadline`] after `timeout` (`None` waits for ever).
    /// After each of them nothing is kept.
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # use ipc_rc::{DepositId, Participant, Session};
    /// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// # let engine = Participant::builder(gpu.clone()).connect(session.socket_path())?;
    /// # let cache = Participant::builder(gpu).connect(session.socket_path())?;
    /// let (reader, writer) = std::io::pipe()?;
    /// let name = DepositId(*b"drawn at random.");
    /// engine.deposit(name, reader, None)?;
    /// let fetched = cache.fetch(name, None)?;
    /// assert!(cache.fetch(name, None).is_err(), "it is fetched once");
    /// # drop(writer);
    /// # assert_eq!(std::io::read_to_string(std::fs::File::from(fetched))?, "");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn deposit(
        &self,
        id: DepositId,
        file: impl Into<OwnedFd>,
        timeout: Option<Duration>,
    ) -> Result<(), ClaimError> {
        let link = self.link();
        link.guard.check("this participant")?;
        link.deposit(id, file.into(), Patience::within(timeout))
    }

    /// Fetches the file descriptor that the session keeps under a name. Of several that ask, one
    /// gets it.
    ///
    /// # Errors
    ///
    /// [`ClaimError::Refused`] where nothing is kept under the name, or another fetch of it is under
    /// way; [`ClaimError::ProducerGone`]; [`ClaimError::Forked`]; [`ClaimError::Backend`] with
    /// [`Error::Deadline`] after `timeout` (`None` waits for ever): then it is there for another.
    ///
    /// # Examples
    ///
    /// See [`deposit`](Participant::deposit).
    pub fn fetch(&self, id: DepositId, timeout: Option<Duration>) -> Result<OwnedFd, ClaimError> {
        let link = self.link();
        link.guard.check("this participant")?;
        link.fetch(id, Patience::within(timeout))
    }

    /// Takes the oldest unread notice. While there is one, the participant's [`AsFd`] is readable.
    pub fn next_notice(&self) -> Option<Notice> {
        if self.link().guard.is_child() {
            None
        } else {
            self.link().notices.take()
        }
    }

    /// Ends the participant and waits until the producer has noted it: every block that it received
    /// is dropped and its GPU work done, everything is unmapped, and goodbye is said and heard.
    /// Call it before the process ends, so that the producer does not take the end for a death.
    ///
    /// A drop does the same and does not wait: the goodbye goes out at once if no block is held,
    /// else from the participant's thread.
    ///
    /// # Errors
    ///
    /// [`Error::Deadline`] after `timeout` (`None` waits for ever), naming what is still held; the
    /// thread goes on. [`Error::Forked`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # use std::time::Duration;
    /// # use ipc_rc::{Participant, Session};
    /// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// let participant = Participant::builder(gpu).connect(session.socket_path())?;
    /// participant.close(Some(Duration::from_secs(60)))?;
    /// assert_eq!(session.stats().deaths, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn close(self, timeout: Option<Duration>) -> Result<()> {
        self.link().guard.check("this participant")?;
        let patience = Patience::within(timeout);
        let holdings = Arc::clone(self.holdings());
        drop(self);
        let link = &holdings.link;
        let left = || {
            (link.farewell.load(Ordering::Relaxed) || link.is_gone())
                && holdings.mappings.is_empty()
        };
        let done = link.wait_until(patience, |questions| {
            (left() && questions.is_at_rest()).then_some(())
        });
        done.ok_or_else(|| {
            Error::deadline(match link.closing.load(Ordering::Relaxed) {
                false => "the drop of the participant's other handles",
                true if holdings.is_any_held() => {
                    "the drop of the participant's blocks and the end of their GPU work"
                }
                true => "the producer to hear the goodbye",
            })
        })
    }

    /// Counts the leases that are kept until this process ends, because the end of the work on
    /// their blocks could not be observed: a driver's error, or a drop while a used stream was
    /// captured.
    pub fn kept_leases(&self) -> u64 {
        self.holdings().queues.kept()
    }

    /// Counts the regions that are mapped.
    pub fn mappings(&self) -> usize {
        self.holdings().mappings.all().len()
    }
}

impl fmt::Debug for Participant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.link().fmt(f)
    }
}

impl AsRawFd for Participant {
    /// Returns the raw descriptor of [`AsFd`], for event loops that need one.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Participant {
    /// Returns a descriptor that is readable while a [notice](Participant::next_notice) is unread.
    ///
    /// An edge-triggered event loop, such as tokio's, must read notices until there is none.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link().notices.as_fd()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let link = &self.holdings.link;
        if link.guard.is_child() {
            // The parent's: its socket must stay open here, because that tells the producer that a
            // copy lives.
            return;
        }
        link.closing.store(true, Ordering::Relaxed);
        // Release: the thread that takes the flag sees why it was set.
        link.wants_idle.store(true, Ordering::Release);
        // At once, if nothing is held: at the end of `main` the thread gets no turn.
        self.holdings.say_goodbye();
        link.waker.wake();
        // SAFETY: `ManuallyDrop::drop` asks that the value is not used again: this is its owner's
        // drop.
        unsafe { ManuallyDrop::drop(&mut self.holdings) };
    }
}

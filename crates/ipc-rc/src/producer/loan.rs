//! Loans: a block that is shared again and again until it is taken back.
//!
//! | state | shares | broadcasts | ends by |
//! |---|---|---|---|
//! | lent | any number, with any addressee | can be claimed, by each participant again and again | [`Loan::release`], [`Loan::into_block`], its drop |
//! | released | none | ended; what they gave and is unclaimed is taken back | the last holder's end: [`Released::wait`] |
//!
//! What else happens to a loan:
//!
//! - **The session closes**: nothing more is shared. What was shared can be claimed by those that
//!   are connected, until the loan is released.
//! - **The producer dies**: holders keep what they hold, and claims give `ProducerGone`.
//! - **A holder dies**: its leases end after the proof of its death, as of any block.
//! - **A grant to one participant, or a ticket of a number of claims**, outlives the loan as it
//!   outlives a block: until it is claimed, lapses or is [revoked](crate::Session::revoke).

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use gpu_api::{Error, Result};

use crate::producer::blocks::block::Block;
use crate::producer::core::Core;
use crate::producer::fences::ticket_event::TicketEvent;
use crate::producer::grants::slot_group::Effort;
use crate::producer::grants::ticket::Claims;
use crate::producer::sent_block::SentBlock;
use crate::producer::share::{After, ShareOptions, To};
use crate::stream::Stream;
use transport::wire::descriptor::Descriptor;

/// A block that is lent: shared any number of times, with any addressee, until it is released.
///
/// Made by [`Session::lend`](crate::Session::lend). A broadcast of a loan (`Claims::Unlimited`) can
/// be claimed as long as the loan lasts, by each participant as often as it likes; no time to live
/// ends it unless the share asks for one.
///
/// # Examples
///
/// ```
/// # use backend_host::{HostBackend, HostConfig};
/// # use gpu_api::{DeviceId, Gpu};
/// # use ipc_rc::{After, ClaimError, Claims, Participant, Session, To, Wait};
/// # let dir = tempfile::tempdir()?;
/// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
/// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
/// # let participant = Participant::builder(gpu).connect(session.socket_path())?;
/// let loan = session.lend(session.alloc(4096)?, After::Done)?;
/// let descriptor = loan.share(To::Ticket(Claims::Unlimited))?;
/// for _ in 0..3 {
///     let received = participant.claim(descriptor.as_bytes(), Wait::Host, None)?;
///     assert_eq!(received.len(), 4096);
/// }
/// loan.release().wait(None)?; // nobody holds it any more
/// let refused = participant.claim(descriptor.as_bytes(), Wait::Host, None);
/// assert!(matches!(refused, Err(ClaimError::Revoked)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Loan {
    block: SentBlock,
    point: Option<Point>,
}

/// The producer's work after which a loan may be read, marked once.
struct Point {
    event: Arc<TicketEvent>,
    passed: AtomicBool,
    /// A stream behind the event, for addressees who claim before it is passed.
    behind: OnceLock<Stream>,
}

impl Point {
    /// Says whether there is something to wait for.
    fn is_ahead(&self) -> Result<bool> {
        if self.passed.load(Ordering::Acquire) {
            return Ok(false);
        }
        let passed = self.event.is_passed()?;
        self.passed.store(passed, Ordering::Release);
        Ok(!passed)
    }

    /// Returns the stream behind the event.
    fn behind(&self, core: &Core) -> Result<&Stream> {
        if let Some(stream) = self.behind.get() {
            return Ok(stream);
        }
        let stream = Stream::create(&core.facts.gpu)?;
        self.event.hold(&stream)?;
        // Another thread may have made one: either is behind the event.
        Ok(self.behind.get_or_init(|| stream))
    }
}

impl Loan {
    /// Lends a block whose contents are there after the work of a stream.
    pub(crate) fn new(block: SentBlock, after: After<'_>) -> Result<Loan> {
        let core = block.core();
        core.check_open()?;
        let point = match after {
            After::Done => None,
            After::Stream(stream) => Some(Point {
                event: core.mark(block.shared(), stream)?,
                passed: AtomicBool::new(false),
                behind: OnceLock::new(),
            }),
        };
        Ok(Loan { block, point })
    }

    /// Grants a lease and returns the descriptor by which it is claimed. The contents are there
    /// after the work that the loan was made after.
    ///
    /// # Errors
    ///
    /// As [`SentBlock::share`].
    pub fn share(&self, to: To) -> Result<Descriptor> {
        self.share_with(to, &ShareOptions::default())
    }

    /// Grants a lease as [`share`](Loan::share) does, with options. A broadcast without a time to
    /// live in them lasts as long as the loan.
    ///
    /// # Errors
    ///
    /// As `share`.
    pub fn share_with(&self, to: To, options: &ShareOptions) -> Result<Descriptor> {
        let (core, block) = (self.block.core(), self.block.shared());
        core.check_open()?;
        let mut options = *options;
        if to == To::Ticket(Claims::Unlimited) {
            options.time_to_live.get_or_insert(None);
        }
        let point = match &self.point {
            Some(point) if point.is_ahead()? => point,
            _ => return core.share(block, block.extent(), to, After::Done, &options),
        };
        match to {
            To::Ticket(claims) => core.share_by_ticket(
                (block, block.extent()),
                claims,
                Some(point.event.clone()),
                &options,
            ),
            To::Participant(_) => core.share(
                block,
                block.extent(),
                to,
                After::Stream(point.behind(core)?),
                &options,
            ),
        }
    }

    /// Returns the block: its address, its length, and how many leases are outstanding.
    pub fn block(&self) -> &SentBlock {
        &self.block
    }

    /// Ends the loan. Its broadcasts end, and what they granted and is unclaimed is taken back; the
    /// memory goes back when the last holder is done, which the result waits for. Dropping the loan
    /// does the same.
    pub fn release(self) -> Released {
        self.released()
    }

    /// Returns what waits for the loan's last holder once the loan is dropped.
    pub fn released(&self) -> Released {
        Released {
            core: self.block.core().clone(),
            block: Arc::downgrade(self.block.shared()),
        }
    }

    /// Ends the loan, and returns the block to be written and lent again; its
    /// [`wait_released`](SentBlock::wait_released) waits for the holders.
    pub fn into_block(self) -> SentBlock {
        let block = self.block;
        if block.core().check_fork().is_ok() {
            block.core().end_broadcasts(block.shared());
        }
        block
    }
}

impl SentBlock {
    /// Lends the block while it stays in hand: as [`Session::lend`](crate::Session::lend), which
    /// takes it. A loan, and what it was shared with, counts as one outstanding on the block. Several
    /// loans of one block end each by itself.
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
    /// # use ipc_rc::{After, Claims, Session, To};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # let session = Session::builder(gpu).socket(dir.path().join("s")).open()?;
    /// let block = session.alloc(4096)?;
    /// let loan = block.lend(After::Done)?;
    /// let descriptor = loan.share(To::Ticket(Claims::Unlimited))?;
    /// assert_eq!((descriptor.len(), block.outstanding()), (4096, 1));
    /// loan.release().wait(None)?;
    /// assert_eq!(block.outstanding(), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn lend(&self, after: After<'_>) -> Result<Loan> {
        Loan::new(self.part_of(0, self.len(), None)?, after)
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loan")
            .field("block", &self.block)
            .finish_non_exhaustive()
    }
}

/// A loan that was released, until its last holder is done. It keeps nothing of it.
pub struct Released {
    core: Arc<Core>,
    block: Weak<Block>,
}

impl Released {
    /// Waits until no process holds the loan, and no grant of it can be claimed.
    ///
    /// # Errors
    ///
    /// [`Error::Deadline`] when some still are after `timeout` (`None` waits for ever),
    /// [`Error::Forked`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        let core = &self.core;
        core.check_fork()?;
        let is_gone = || {
            core.collect(Effort::Marked);
            let is_gone = self.block.strong_count() == 0;
            // The count is read without an ordering, and each lease's end lowered it with Release.
            fence(Ordering::Acquire);
            is_gone.then_some(())
        };
        core.wakeups
            .wait_for(timeout, is_gone)
            .ok_or(Error::deadline("the holders of a loan"))
    }

    /// Says whether nothing holds the loan any more, as far as is known without looking.
    pub fn is_over(&self) -> bool {
        self.block.strong_count() == 0
    }
}

impl fmt::Debug for Released {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Released")
            .field("is_over", &self.is_over())
            .finish_non_exhaustive()
    }
}

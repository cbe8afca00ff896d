//! What a session's handles, blocks and thread share: its parts.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use allocators::RegionSource;
use gpu_api::lock::Acquire;
use gpu_api::{BackendKind, Error, Gpu, ParticipantId, Result};

use crate::gone::Gone;
use crate::notices::Notices;
use crate::producer::blocks::block::Block;
use crate::producer::blocks::memory::Memory;
use crate::producer::blocks::pending_work::PendingWork;
use crate::producer::blocks::releases::Releases;
use crate::producer::deposits::Deposits;
use crate::producer::fences::fence::Fences;
use crate::producer::grants::lapse::NextLapse;
use crate::producer::grants::ticket::Tickets;
use crate::producer::notice::SessionNotice;
use crate::producer::roster::peer::{Leaving, Peer};
use crate::producer::roster::table::Roster;
use crate::producer::wakeups::Wakeups;
use crate::shard::SHARDS;
use transport::os::clock::Tick;
use transport::os::socket::Listener;
use transport::wire::descriptor::{GrantKind, KeptSealer, Names, SealKey, Sealer, SessionId};

/// What never changes about a session.
#[derive(Debug)]
pub(crate) struct Facts {
    pub id: SessionId,
    pub gpu: Gpu,
    /// The device's vendor: written into every descriptor.
    pub backend: BackendKind,
    /// The source of regions asks this session for memory by itself.
    pub source_collects: bool,
    /// `None` for what the device's driver needs.
    pub quarantine: Option<Duration>,
    pub time_to_live: Option<Duration>,
    pub max_slots: u64,
    pub start: Tick,
    /// The key of the session's tickets: known to all its participants.
    pub ticket_key: SealKey,
}

impl Facts {
    /// Returns how long after the proof of a participant's death its blocks are kept from reuse.
    pub fn quarantine_of(&self, peer: &Peer, leaving: &Leaving) -> Duration {
        let needed = || leaving.quarantine(self.gpu.backend().quarantine(peer.is_shown()));
        self.quarantine.unwrap_or_else(needed)
    }

    /// Returns what all descriptors to a participant begin with.
    pub fn names_for(&self, participant: ParticipantId) -> Names {
        Names {
            backend: self.backend,
            kind: GrantKind::Addressed,
            device: self.gpu.uuid(),
            session: self.id,
            participant,
        }
    }
}

/// A session's state. The handles of the user, every [`SentBlock`](crate::SentBlock), and the
/// session's thread each hold one [`Arc`] of it.
pub(crate) struct Core {
    pub facts: Facts,
    /// What the drop of a block needs.
    pub memory: Arc<Memory>,
    /// Dropped blocks that the producer's own work may touch.
    pub pending: PendingWork<Arc<Block>>,
    pub fences: Fences,
    pub tickets: Tickets,
    pub deposits: Deposits,
    pub ticket_sealer: KeptSealer,
    pub next_lapse: NextLapse,
    /// The connected participants.
    pub roster: Roster,
    pub wakeups: Arc<Wakeups>,
    pub releases: Releases,
    pub notices: Notices<SessionNotice>,
    pub tallies: Tallies,
    pub life: Life,
    pub drops: [Drops; SHARDS],
    /// Participants that have gone wait for what streams of ours owe to their words.
    pub settles: AtomicBool,
    /// A region that no participant maps any more goes back to the driver.
    pub trims: AtomicBool,
    /// It was said that very many blocks are in limbo.
    pub warned_of_limbo: AtomicBool,
    /// Connections that the application passed in.
    pub arrivals: Mutex<Vec<OwnedFd>>,
}

/// What happened so far.
#[derive(Debug, Default)]
pub(crate) struct Tallies {
    pub revoked: AtomicU64,
    pub expired: AtomicU64,
    pub deaths: AtomicU64,
    /// Words that were found corrupt in files of participants that are gone.
    pub corrupt_words: AtomicU64,
}

/// How far a session's end has come.
#[derive(Debug, Default)]
pub(crate) struct Life {
    /// No more sharing; the thread ends when nothing is held.
    pub closing: AtomicBool,
    /// The socket, while the thread listens.
    listener: OnceLock<Weak<Listener>>,
    /// The socket's name is removed: once, since a successor may have it by then.
    unlinked: OnceLock<()>,
    /// The thread has panicked.
    has_failed: AtomicBool,
}

impl Life {
    /// Notes the socket that the thread listens on.
    pub fn listens_on(&self, listener: &Arc<Listener>) {
        let first = self.listener.set(Arc::downgrade(listener));
        debug_assert!(first.is_ok(), "a session listens on one socket");
    }

    /// Removes the socket's name, unless that is done. Who comes second waits until it is: after
    /// this call another session may have the path.
    fn unlink(&self) {
        self.unlinked.get_or_init(|| {
            let listener = self.listener.get().and_then(Weak::upgrade);
            if let Some(Err(error)) = listener.map(|listener| listener.unlink()) {
                tracing::warn!(%error, "a session's socket file stays; the next session to open removes it");
            }
        });
    }

    #[inline]
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }
}

/// How many blocks the threads of one shard have dropped, off the other shards' cache lines.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Drops(pub AtomicUsize);

impl Core {
    pub fn new(facts: Facts, source: Arc<dyn RegionSource>) -> Result<Core> {
        let wakeups = Arc::new(Wakeups::new()?);
        Ok(Core {
            memory: Arc::new(Memory::new(facts.id, source, wakeups.clone())?),
            pending: PendingWork::new(facts.gpu.clone()),
            fences: Fences::default(),
            tickets: Tickets::default(),
            deposits: Deposits::new()?,
            ticket_sealer: Sealer::new(
                &facts.ticket_key,
                &facts.names_for(ParticipantId(0)).of_ticket(),
            )
            .into(),
            next_lapse: NextLapse::default(),
            roster: Roster::default(),
            wakeups,
            releases: Releases::default(),
            notices: Notices::new()?,
            tallies: Tallies::default(),
            life: Life::default(),
            drops: Default::default(),
            settles: AtomicBool::new(false),
            trims: AtomicBool::new(false),
            warned_of_limbo: AtomicBool::new(false),
            arrivals: Mutex::default(),
            facts,
        })
    }

    #[inline]
    pub fn is_child(&self) -> bool {
        self.memory.guard.is_child()
    }

    pub fn check_fork(&self) -> Result<()> {
        self.memory.guard.check("this session")
    }

    #[inline]
    pub fn check_open(&self) -> Result<()> {
        self.check_fork()?;
        if self.life.is_closing() {
            Err(self.why_closed())
        } else {
            Ok(())
        }
    }

    #[cold]
    fn why_closed(&self) -> Error {
        // With the store of `closing` that was read: its writer wrote first why.
        fence(Ordering::Acquire);
        if !self.life.has_failed.load(Ordering::Relaxed) {
            return Gone::Session.into();
        }
        let panicked = std::io::Error::other("it panicked");
        Error::system(
            "the session's thread",
            "look for its panic in the log, and open another session",
            panicked,
        )
    }

    /// Begins the end: nothing more is shared, the socket's path is free at once, and the thread
    /// ends when nothing is held.
    pub fn close(&self) {
        // Before the thread may drop the listener.
        self.life.unlink();
        self.life.closing.store(true, Ordering::Relaxed);
        self.wakeups.thread.wake();
        self.wakeups.announce_change();
    }

    /// Refuses every later share: the thread has panicked.
    pub fn fail(&self) {
        self.life.has_failed.store(true, Ordering::Relaxed);
        self.life.closing.store(true, Ordering::Release);
        self.life.unlink();
    }

    /// Says whether a participant holds, maps and has deposited nothing.
    pub fn has_nothing(&self, peer: &Peer) -> bool {
        peer.ledger.is_empty() && peer.mappings() == 0 && self.deposits.table().count(peer.id) == 0
    }

    /// Says whether the application passed connections on that the thread has not taken in.
    pub fn has_arrivals(&self) -> bool {
        !self.arrivals.acquire().is_empty()
    }

    /// Sees to it that the thread looks when a grant lapses. Called after the grant was written
    /// down.
    #[inline]
    pub fn watch_lapse(&self, lapses: Tick) {
        if self.next_lapse.note(lapses) {
            self.wakeups.thread.nudge();
        }
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("id", &self.facts.id)
            .finish_non_exhaustive()
    }
}

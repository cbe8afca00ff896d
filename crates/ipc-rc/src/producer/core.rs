//! What a session's handles, blocks and threads share.

use std::fmt;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use gpu_api::{
    BackendKind, Error, ForkGuard, Gpu, Holder, Lent, Piece, Reclaim, Reclaimed, Region, RegionId, RegionSource, Result,
};

use crate::notices::Notices;
use crate::producer::blocks::adopted::FIRST_ADOPTED;
use crate::producer::blocks::block::{AdoptToken, Block};
use crate::producer::blocks::count::Count;
use crate::producer::blocks::pending_work::PendingWork;
use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::fences::fence::Fences;
use crate::producer::fences::ticket_event::Lanes;
use crate::producer::grants::ledger::{Effort, SHARDS, own_shard};
use crate::producer::grants::ledger_table::LedgerTable;
use crate::producer::grants::ticket::Tickets;
use crate::producer::notice::SessionNotice;
use crate::producer::roster::outbox::Outbox;
use crate::producer::roster::peer::Peer;
use channel::os::clock::Tick;
use channel::os::waker::Waker;
use channel::trace_point;
use channel::wire::descriptor::SessionId;
use channel::wire::lease_address::LeaseAddress;
use channel::wire::message::ToParticipant;

/// Every so many drops one looks at a few dirty words, so many: what is in no near cache costs it as much as all else.
const GLANCES: usize = 4;
const GLANCE: usize = 4;

/// The table of participants, by place.
pub(crate) type Peers = Vec<Option<Arc<Peer>>>;

/// A session's state. The handles of the user, every block, and the session's thread each hold one [`Arc`] of it.
pub(crate) struct Core {
    pub id: SessionId,
    pub gpu: Gpu,
    /// The device's vendor: written into every descriptor.
    pub backend: BackendKind,
    pub guard: ForkGuard,
    pub source: Arc<dyn RegionSource>,
    /// It asks this session for memory by itself.
    pub source_collects: bool,
    pub align: u64,
    pub quarantine: Duration,
    pub time_to_live: Option<Duration>,
    pub max_slots: u64,
    pub start: Tick,
    pub peers: ArcSwap<Peers>,
    /// Held from the moment a welcome is on the wire until its participant is in the table.
    pub seating: Mutex<()>,
    pub places: LedgerTable,
    pub fences: Fences,
    pub tickets: Tickets,
    pub lanes: Lanes,
    pub own_work: PendingWork<Arc<Block>>,
    pub outbox: Outbox,
    pub waker: Waker,
    /// Blocks that exist.
    pub live: Count,
    /// Blocks that were dropped and still exist.
    pub limbo: Count,
    /// Whether it was said that very many blocks are in limbo.
    pub warned_of_limbo: AtomicBool,
    /// Blocks that are kept for ever.
    pub leaked: Count,
    pub revoked: AtomicU64,
    pub expired: AtomicU64,
    pub deaths: AtomicU64,
    /// Words that were found corrupt in files of participants that are gone.
    pub corrupt_words: AtomicU64,
    /// Callers that wait for a change.
    pub waiters: AtomicUsize,
    /// Blocks that an application asked about while they were held: the thread tells it of their release.
    watched: Mutex<Vec<Weak<Block>>>,
    /// There are such blocks. Changed under the lock, read without it.
    pub watches_releases: AtomicBool,
    pub notices: Notices<SessionNotice>,
    /// The thread has removed the socket's name.
    pub is_unlinked: AtomicBool,
    /// The thread has panicked.
    has_failed: AtomicBool,
    /// Participants that have gone wait for what streams of ours owe to their words.
    pub settles: AtomicBool,
    /// No more sharing; the thread ends when nothing is held.
    pub closing: AtomicBool,
    /// When the thread looks after times to live next. Lowered by whoever grants what lapses earlier.
    pub next_lapse: AtomicU64,
    /// A region that nobody maps any more goes back to the driver.
    pub trims: AtomicBool,
    returned: Mutex<Vec<(AdoptToken, Option<Piece>)>>,
    /// How many of those there are. Changed under the lock, read without it.
    returned_count: AtomicUsize,
    drops: [Drops; SHARDS],
    changes: (Mutex<Changes>, Condvar),
    /// Connections that the application passed in.
    pub arrivals: Mutex<Vec<OwnedFd>>,
}

/// How many blocks the threads of one shard have dropped, off the other shards' cache lines.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Drops(AtomicUsize);

/// How often something changed, and how many wait for the next time.
#[derive(Debug, Default)]
struct Changes {
    count: u64,
    waiting: u32,
}

/// What a [`Core`] starts from.
#[derive(Debug)]
pub(crate) struct Settings {
    pub id: SessionId,
    pub gpu: Gpu,
    pub source: Arc<dyn RegionSource>,
    /// It asks this session for memory by itself.
    pub source_collects: bool,
    pub align: u64,
    pub quarantine: Duration,
    pub time_to_live: Option<Duration>,
    pub max_slots: u64,
}

impl Core {
    pub fn new(settings: Settings) -> Result<Core> {
        Ok(Core {
            id: settings.id,
            own_work: PendingWork::new(settings.gpu.clone()),
            backend: settings.gpu.kind(),
            gpu: settings.gpu,
            guard: ForkGuard::new()?,
            source: settings.source,
            source_collects: settings.source_collects,
            align: settings.align,
            quarantine: settings.quarantine,
            time_to_live: settings.time_to_live,
            max_slots: settings.max_slots,
            start: Tick::now(),
            peers: ArcSwap::default(),
            seating: Mutex::default(),
            places: LedgerTable::default(),
            fences: Fences::default(),
            tickets: Tickets::default(),
            lanes: Lanes::default(),
            outbox: Outbox::default(),
            waker: Waker::new()?,
            live: Count::default(),
            limbo: Count::default(),
            warned_of_limbo: AtomicBool::new(false),
            leaked: Count::default(),
            revoked: AtomicU64::new(0),
            expired: AtomicU64::new(0),
            deaths: AtomicU64::new(0),
            corrupt_words: AtomicU64::new(0),
            waiters: AtomicUsize::new(0),
            watched: Mutex::default(),
            watches_releases: AtomicBool::new(false),
            notices: Notices::new()?,
            is_unlinked: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
            settles: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            next_lapse: AtomicU64::new(Tick::NEVER.millis()),
            trims: AtomicBool::new(false),
            returned: Mutex::default(),
            returned_count: AtomicUsize::new(0),
            drops: Default::default(),
            changes: (Mutex::default(), Condvar::new()),
            arrivals: Mutex::default(),
        })
    }

    pub fn check_fork(&self) -> Result<()> {
        if self.guard.is_child() { Err(Error::Forked { what: "this session" }) } else { Ok(()) }
    }

    #[inline]
    pub fn check_open(&self) -> Result<()> {
        self.check_fork()?;
        if self.closing.load(Ordering::Relaxed) { Err(self.why_closed()) } else { Ok(()) }
    }

    #[cold]
    fn why_closed(&self) -> Error {
        if !self.has_failed.load(Ordering::Relaxed) {
            return Error::Closing;
        }
        let panicked = std::io::Error::other("it panicked");
        Error::system("the session's thread", "look for its panic in the log, and open another session", panicked)
    }

    /// Refuses every later share: the thread has panicked.
    pub fn fail(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
        self.closing.store(true, Ordering::Relaxed);
        tracing::error!(session = %self.id, "the session's thread panicked: nothing more is shared, and participants are told");
    }

    /// Asks the source of regions something; `None` when that panics.
    pub fn ask_source<T>(&self, ask: impl FnOnce(&dyn RegionSource) -> T) -> Option<T> {
        let answer = catch_unwind(AssertUnwindSafe(|| ask(&*self.source)));
        answer.inspect_err(|_| tracing::error!(session = %self.id, "the session's source of regions panicked")).ok()
    }

    /// Looks for ended leases and finished work everywhere; the blocks found are given back if these were the last.
    pub fn collect(&self, effort: Effort) -> Reclaimed {
        let mut out = ReclaimedBlocks::new();
        self.places.all().for_each(|ledger| ledger.collect(effort, &mut out));
        self.own_work.poll(&mut out);
        // What was proven just now may be what the thread waits for.
        if self.settles.load(Ordering::Relaxed) {
            self.waker.nudge();
        }
        if !out.is_empty() {
            trace_point!("collect");
        }
        self.retire(&mut out)
    }

    /// What every drop does for the blocks in limbo: looks at a few of them, and has the thread look at all, in a while.
    #[inline]
    pub fn look_on_drop(&self) {
        self.glance();
        self.waker.remind();
    }

    /// Looks at a few dirty words, in one shard of one participant that is free.
    fn glance(&self) {
        let places = self.places.used();
        if places == 0 {
            return;
        }
        let own = own_shard();
        let counted = &self.drops[own].0;
        // Two threads that count at once may count one: it only says when and where to look.
        let drops = counted.load(Ordering::Relaxed).wrapping_add(1);
        counted.store(drops, Ordering::Relaxed);
        if !drops.is_multiple_of(GLANCES) {
            return;
        }
        let turn = drops / GLANCES;
        let Some(ledger) = self.places.get(turn % places) else { return };
        let mut out = ReclaimedBlocks::new();
        ledger.glance(own.wrapping_add(turn / places), GLANCE, &mut out);
        self.retire(&mut out);
    }

    /// Drops what ledgers gave back, with no lock held, and counts the blocks of which these were the last.
    pub fn retire(&self, out: &mut ReclaimedBlocks<Arc<Block>>) -> Reclaimed {
        let mut reclaimed = Reclaimed::default();
        let found = !out.is_empty();
        for block in out.drain() {
            if let Some(block) = Arc::into_inner(block) {
                reclaimed.blocks += 1;
                reclaimed.bytes += block.len();
            }
        }
        // A waiter that registers at this very moment and is not seen looks again by itself within 100 ms.
        if found && self.waiters.load(Ordering::Relaxed) > 0 {
            self.announce_change();
        }
        reclaimed
    }

    /// Has the thread tell the application when nobody holds a block any more.
    pub fn watch_release(&self, block: &Arc<Block>) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if !watched.iter().any(|other| other.as_ptr() == Arc::as_ptr(block)) {
            watched.push(Arc::downgrade(block));
        }
        self.watches_releases.store(true, Ordering::Relaxed);
        drop(watched);
        self.waker.nudge();
    }

    /// Tells the application of blocks that it asked about and that nobody holds any more (thread).
    pub fn tell_of_releases(&self) {
        if !self.watches_releases.load(Ordering::Relaxed) {
            return;
        }
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let before = watched.len();
        // The application's handle counts as one.
        watched.retain(|block| block.strong_count() > 1);
        self.watches_releases.store(!watched.is_empty(), Ordering::Relaxed);
        if watched.len() < before {
            self.notices.push(SessionNotice::TryAgain);
        }
    }

    /// Keeps an adopted block's token until somebody collects. It waits for the unmapping of the piece that comes with it.
    pub fn return_token(&self, token: AdoptToken, piece: Option<Piece>) {
        let mut returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        returned.push((token, piece));
        self.returned_count.store(returned.len(), Ordering::Relaxed);
        drop(returned);
        // The thread has the region unmapped and tells.
        self.waker.nudge();
    }

    /// Tells the application of tokens that it can take, and says which regions keep the others (thread).
    pub fn tell_of_tokens(&self) -> Vec<RegionId> {
        if self.returned_count.load(Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        let returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        let pieces = returned.iter().filter_map(|(_, piece)| piece.as_ref());
        let mapped = pieces.filter(|piece| piece.region.is_pinned());
        let mut mapped: Vec<RegionId> = mapped.map(|piece| piece.region.id()).collect();
        if mapped.len() < returned.len() {
            self.notices.push(SessionNotice::TokensReturned);
        }
        mapped.sort_unstable();
        mapped.dedup();
        mapped
    }

    /// Takes the tokens of adopted blocks that nothing holds any more and that nobody maps.
    pub fn take_tokens(&self) -> Vec<AdoptToken> {
        if self.returned_count.load(Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        let mut returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        let mut tokens = Vec::new();
        // The owner may free the memory as soon as it has the token, so nobody may have it mapped.
        returned.retain(|(token, piece)| {
            let free = piece.as_ref().is_none_or(|piece| !piece.region.is_pinned());
            if free {
                tokens.push(*token);
            }
            !free
        });
        self.returned_count.store(returned.len(), Ordering::Relaxed);
        // Under the lock, as it was told: none is left to tell of.
        self.notices.withdraw(SessionNotice::TokensReturned);
        tokens
    }

    /// Asks participants to unmap the regions of adopted blocks whose tokens wait for that alone.
    pub fn ask_for_returned(&self) {
        if self.returned_count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let waiting: Vec<_> = {
            let returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
            returned.iter().filter_map(|(_, piece)| Some(piece.as_ref()?.region.id())).collect()
        };
        self.ask_to_unmap_these(&waiting);
    }

    /// Asks everybody who maps one of these regions to unmap it.
    pub fn ask_to_unmap_these(&self, regions: &[RegionId]) {
        for peer in self.peers.load().iter().flatten() {
            for region in peer.mapped().into_iter().filter(|region| regions.contains(region)) {
                self.ask_to_unmap_one(peer, region);
            }
        }
    }

    /// Asks a participant to unmap a region once it does not use it, and says whether it could be asked. One who hung
    /// up cannot; its death will end the mapping.
    pub fn ask_to_unmap_one(&self, peer: &Peer, region: RegionId) -> bool {
        self.outbox.push(peer, &ToParticipant::PleaseUnmap { region }, None).is_ok()
    }

    /// Tells a participant that a grant to it was taken back, if it can be told; otherwise its claim tells.
    pub fn tell_revoked(&self, peer: &Peer, lease: LeaseAddress) {
        let _ = self.outbox.push(peer, &ToParticipant::Revoked { lease }, None);
    }

    /// Sees to it that the thread looks when a grant lapses. Called after the grant was written down.
    ///
    /// Relaxed: the lock that the grant was written down under orders this load after a look of the thread that missed it.
    #[inline]
    pub fn watch_lapse(&self, lapses: Tick) {
        if lapses.millis() < self.next_lapse.load(Ordering::Relaxed) {
            self.come_at(lapses);
        }
    }

    #[cold]
    fn come_at(&self, lapses: Tick) {
        self.next_lapse.fetch_min(lapses.millis(), Ordering::Relaxed);
        self.waker.nudge();
    }

    /// Tells those who wait for something about this session to look again. Without a waiter no system call.
    pub fn announce_change(&self) {
        let mut changes = self.changes();
        changes.count += 1;
        if changes.waiting > 0 {
            self.changes.1.notify_all();
        }
    }

    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.changes.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done` gives something, looking again at every change; `None` after the deadline.
    pub fn wait_until<T>(&self, deadline: Option<Instant>, done: impl FnMut() -> Option<T>) -> Option<T> {
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let value = self.wait_as_waiter(deadline, done);
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        value
    }

    fn wait_as_waiter<T>(&self, deadline: Option<Instant>, mut done: impl FnMut() -> Option<T>) -> Option<T> {
        loop {
            let seen = self.changes().count;
            if let Some(value) = done() {
                return Some(value);
            }
            self.waker.nudge();
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            // The thread announces what it finds; the bound here is for a change that only the caller could find.
            let wait = left.unwrap_or(Duration::MAX).min(Duration::from_millis(100));
            let mut changes = self.changes();
            if changes.count != seen {
                continue;
            }
            if wait == Duration::ZERO {
                return None;
            }
            changes.waiting += 1;
            let (mut changes, _) = self.changes.1.wait_timeout(changes, wait).unwrap_or_else(PoisonError::into_inner);
            changes.waiting -= 1;
        }
    }

    /// Tells the source of regions that a participant does not map any more, and that nobody else does.
    pub fn note_unpinned(&self, regions: &[Arc<Region>]) {
        let own = regions.iter().filter(|region| region.id() < FIRST_ADOPTED);
        own.filter(|region| !region.is_pinned()).for_each(|region| self.source.unpinned(region));
    }

    /// Says what a participant holds.
    pub fn holder(&self, peer: &Peer, now: Tick) -> Holder {
        let tally = peer.ledger.tally(now, |block| block.len());
        Holder {
            participant: peer.id,
            pid: peer.pid,
            command: peer.name.clone(),
            leases: tally.in_flight + tally.held + tally.corrupt,
            bytes: tally.bytes,
            mappings: peer.mappings() as u64,
            oldest: tally.oldest,
            dying: peer.gone.load(Ordering::Relaxed),
        }
    }

    /// Says whether something is out that only polling can find: leases, or the producer's own work.
    pub fn has_leases(&self) -> bool {
        self.own_work.waiting() > 0 || self.tickets.live() > 0 || self.places.all().any(|ledger| !ledger.is_empty())
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Reclaim for Core {
    fn collect_all(&self) -> Reclaimed {
        if self.guard.is_child() {
            return Reclaimed::default();
        }
        self.collect(Effort::Everything)
    }

    fn ask_to_unmap(&self) -> usize {
        if self.guard.is_child() {
            return 0;
        }
        self.trims.store(true, Ordering::Relaxed);
        let peers = self.peers.load();
        let asked = peers
            .iter()
            .flatten()
            .map(|peer| peer.mapped().into_iter().filter(|&region| self.ask_to_unmap_one(peer, region)).count());
        asked.sum()
    }

    fn holders(&self) -> Vec<Holder> {
        if self.guard.is_child() {
            return Vec::new();
        }
        let now = Tick::now();
        self.peers.load().iter().flatten().map(|peer| self.holder(peer, now)).collect()
    }

    fn limbo_bytes(&self) -> u64 {
        self.limbo.sum().bytes
    }

    fn lent(&self, most: usize) -> Vec<Lent> {
        let mut lent = Vec::new();
        if self.guard.is_child() {
            return lent;
        }
        for peer in self.peers.load().iter().flatten() {
            peer.ledger.each(|block| {
                if lent.len() < most {
                    let (ptr, len, limbo) = (block.ptr(), block.len(), block.is_in_limbo());
                    lent.push(Lent { ptr, len, participant: peer.id, limbo });
                }
            });
        }
        lent
    }
}

//! What can return memory when an allocator of a device runs out, and the order in which it is
//! asked.
//!
//! 1. Free blocks.
//! 2. What sessions have in limbo and nothing holds any more ([`Reclaim::collect_all`]).
//! 3. More from the driver, for which the allocator gives its own idle regions back if that makes
//!    room.
//! 4. Mappings that consumers do not use ([`Reclaim::ask_to_unmap`]), and idle regions of every
//!    allocator of the device.
//! 5. Waiting: as long as the request allows, and a short time for consumers that were asked to
//!    unmap.
//! 6. An error that names the holders of the memory.
//!
//! Consumers are asked only when the driver has no more, not before every region: each has to map
//! again what it uses next.

// Tests: `crates/allocators/tests/arena.rs`, `crates/allocators/tests/bfc_waiting.rs`.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use gpu_api::lock::Acquire;
use gpu_api::{Error, ParticipantId, Result};

use crate::Reclaim;

use crate::allocator::hand_on;
use crate::request::end_of;
use crate::snapshot::{HolderSnapshot, LentSnapshot, Snapshot};
use crate::{Allocator, Bfc, Placed, Request, SubAllocator, Trim, Work};

/// The default time to wait for consumers that were asked to unmap.
pub(crate) const PATIENCE: Duration = Duration::from_millis(100);
/// How often they are asked.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// How long the first wait between two looks is, and the longest, of one that has neighbours:
/// nobody tells of what those give back.
const NAPS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(16));

/// The most leases of which a snapshot says where their blocks lie.
const LENT: usize = 1 << 16;

/// The sessions and allocators of one device, none of which it keeps alive.
#[derive(Default)]
pub struct Relief {
    sessions: Mutex<Vec<Weak<dyn Reclaim>>>,
    neighbours: Mutex<Vec<Weak<dyn Trim>>>,
}

impl Relief {
    /// Knows nobody yet.
    pub fn new() -> Relief {
        Relief::default()
    }

    /// Adds a session of the device; one that is there is not added again.
    pub fn register(&self, session: Weak<dyn Reclaim>) {
        let mut sessions = self.sessions.acquire();
        sessions.retain(|other| other.strong_count() > 0);
        if !sessions.iter().any(|other| other.ptr_eq(&session)) {
            sessions.push(session);
        }
    }

    /// Adds an allocator of the device.
    pub fn register_neighbour(&self, neighbour: Weak<dyn Trim>) {
        let mut neighbours = self.neighbours.acquire();
        neighbours.retain(|other| other.strong_count() > 0);
        neighbours.push(neighbour);
    }

    /// Lets every session look at every lease; says how many bytes left limbo.
    pub fn collect(&self) -> u64 {
        self.sessions()
            .iter()
            .map(|session| session.collect_all().bytes)
            .sum()
    }

    /// Asks the participants of every session to unmap what they do not use; says how many were
    /// asked.
    pub fn ask_to_unmap(&self) -> usize {
        self.sessions()
            .iter()
            .map(|session| session.ask_to_unmap())
            .sum()
    }

    /// Says whether there is one allocator and no other.
    fn is_alone(&self) -> bool {
        self.neighbours.acquire().len() == 1
    }

    /// Lets every allocator give idle memory back; says how many bytes.
    pub fn trim(&self) -> u64 {
        let neighbours: Vec<Arc<dyn Trim>> = self
            .neighbours
            .acquire()
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        let trim = |neighbour: &Arc<dyn Trim>| {
            neighbour.trim().unwrap_or_else(|error| {
                tracing::warn!(%error, "a region is leaked");
                0
            })
        };
        neighbours.iter().map(trim).sum()
    }

    /// Adds to a snapshot what sessions hold.
    pub fn annotate(&self, snapshot: &mut Snapshot) {
        self.sessions()
            .iter()
            .for_each(|session| add_session(snapshot, &**session));
    }

    /// Adds to a snapshot what sessions hold, and this one whether it is registered or not.
    pub fn annotate_for(&self, asker: &dyn Reclaim, snapshot: &mut Snapshot) {
        add_session(snapshot, asker);
        for session in self
            .sessions()
            .iter()
            .filter(|session| !std::ptr::addr_eq(Arc::as_ptr(session), asker))
        {
            add_session(snapshot, &**session);
        }
    }

    /// Sessions are called with no lock held.
    fn sessions(&self) -> Vec<Arc<dyn Reclaim>> {
        self.sessions
            .acquire()
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }
}

impl fmt::Debug for Relief {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relief")
            .field("sessions", &self.sessions.acquire().len())
            .field("neighbours", &self.neighbours.acquire().len())
            .finish()
    }
}

fn add_session(snapshot: &mut Snapshot, session: &dyn Reclaim) {
    // Sessions number their participants apart.
    let first = snapshot.holders.len();
    snapshot.limbo_bytes += session.limbo_bytes();
    for holder in session
        .holders()
        .into_iter()
        .filter(|holder| holder.leases + holder.mappings > 0)
    {
        if holder.dying {
            snapshot.quarantined_bytes += holder.bytes;
        }
        snapshot.holders.push(HolderSnapshot::from(holder));
    }
    let room = LENT.saturating_sub(snapshot.lent.len());
    let holders = &snapshot.holders;
    let place = |id: ParticipantId| {
        Some(
            first
                + holders[first..]
                    .iter()
                    .position(|holder| holder.participant == id.0)?,
        )
    };
    snapshot.lent.extend(
        session
            .lent(room)
            .into_iter()
            .map(|lent| LentSnapshot::of(lent, place(lent.participant))),
    );
}

/// A request's questions to consumers.
pub(crate) struct Asking<'a> {
    pub(crate) relief: &'a Relief,
    /// How long the first who are asked are waited for; nothing once they were.
    patience: Option<Duration>,
    /// When consumers are asked next.
    next: Instant,
}

impl<'a> Asking<'a> {
    /// Asks nobody yet.
    pub(crate) fn new(relief: &'a Relief, patience: Duration) -> Asking<'a> {
        Asking {
            relief,
            patience: Some(patience),
            next: Instant::now(),
        }
    }

    /// Asks consumers to unmap, if it is time to. Returns until when the request waits, which
    /// waited `until` before.
    pub(crate) fn ask_to_unmap(&mut self, now: Instant, until: Option<Instant>) -> Option<Instant> {
        if now < self.next {
            return until;
        }
        self.next = now + ASK_AGAIN;
        if self.relief.ask_to_unmap() == 0 {
            return until;
        }
        self.patience
            .take()
            .map_or(until, |patience| until.max(Some(end_of(now, patience))))
    }
}

/// A [`Bfc`] that turns to the sessions and the other allocators of its device before it is out of
/// memory.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use allocators::{Bfc, BfcOptions, Relief, Relieved, Request, Simulated};
///
/// let bfc = Bfc::new(BfcOptions::new("device 0").limit(1 << 20), Simulated::new());
/// let relieved = Relieved::new(bfc, Arc::new(Relief::new()));
/// let error = relieved.place(Request::new(2 << 20)).unwrap_err();
/// assert!(error.to_string().contains("limit 1048576"));
/// ```
pub struct Relieved<U: SubAllocator> {
    /// Which neighbours reach by itself: looking for idle memory does not keep the allocator alive.
    bfc: Arc<Bfc<U>>,
    relief: Arc<Relief>,
    patience: Duration,
}

impl<U: SubAllocator> Relieved<U> {
    /// Joins the allocators of a device.
    pub fn new(bfc: Bfc<U>, relief: Arc<Relief>) -> Arc<Relieved<U>> {
        Relieved::with_patience(bfc, relief, PATIENCE)
    }

    /// Joins the allocators of a device, and waits so long for consumers that were asked to unmap.
    pub fn with_patience(bfc: Bfc<U>, relief: Arc<Relief>, patience: Duration) -> Arc<Relieved<U>> {
        let bfc = Arc::new(bfc);
        let weak: Weak<dyn Trim> = Arc::<Bfc<U>>::downgrade(&bfc);
        relief.register_neighbour(weak);
        Arc::new(Relieved {
            bfc,
            relief,
            patience,
        })
    }

    /// Returns the allocator beneath.
    pub fn bfc(&self) -> &Bfc<U> {
        &self.bfc
    }

    /// Returns those that it asks for memory.
    pub fn relief(&self) -> &Arc<Relief> {
        &self.relief
    }

    /// Allocates; when nothing is free, goes through everything that may give some.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] after all that, with the holders of the memory, a histogram and a map
    /// of the regions; as [`Bfc::alloc`] otherwise.
    pub fn place(&self, request: Request) -> Result<Placed<U::Token>> {
        match self.bfc.try_alloc(request)? {
            Some(placed) => Ok(placed),
            None => self.place_slowly(request),
        }
    }

    /// Lists every region and chunk, and the holders of memory of the sessions on the device.
    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = Bfc::snapshot(&self.bfc);
        self.relief.annotate(&mut snapshot);
        snapshot
    }

    #[cold]
    fn place_slowly(&self, request: Request) -> Result<Placed<U::Token>> {
        self.bfc.check_owner()?;
        let mut turn = self.bfc.core.turn(&request, self.bfc.core.fit(&request)?);
        let mut asking = Asking::new(&self.relief, self.patience);
        let mut until = request.until;
        let mut nap = NAPS.0;
        loop {
            let seen = self.bfc.core.seen();
            self.relief.collect();
            if let Some(placed) = turn.try_fit() {
                return Ok(placed);
            }
            let now = Instant::now();
            if until.is_none_or(|until| now >= until) {
                turn.is_last();
            }
            let error = match turn.try_harder() {
                Err(error @ Error::OutOfMemory { .. }) => error,
                other => return other,
            };
            if self.bfc.core.is_hopeless(request.bytes) {
                return Err(self.explain(error));
            }
            until = asking.ask_to_unmap(now, until);
            if self.relief.trim() > 0 {
                match turn.try_harder() {
                    Err(Error::OutOfMemory { .. }) => {}
                    other => return other,
                }
            }
            let Some(end) = until.filter(|&until| now < until) else {
                return Err(self.explain(error));
            };
            let look = if self.relief.is_alone() {
                ASK_AGAIN
            } else {
                nap
            };
            if let Some(placed) = turn.wait(seen, end.min(now + look)) {
                return Ok(placed);
            }
            nap = (2 * nap).min(NAPS.1);
        }
    }

    /// Adds to an error the holders of the memory and where it lies.
    fn explain(&self, error: Error) -> Error {
        self.bfc
            .core
            .explain(error, |snapshot| self.relief.annotate(snapshot))
    }
}

// SAFETY: as the `Bfc` beneath, which hands out and takes back.
unsafe impl<U: SubAllocator> Allocator for Relieved<U> {
    fn name(&self) -> &str {
        &self.bfc.options().name
    }

    fn alloc(&self, request: Request) -> Result<Placed> {
        self.place(request).map(|placed| placed.untied())
    }

    fn free(&self, address: u64) -> Result<()> {
        self.bfc.free(address)
    }

    fn free_after(&self, address: u64, work: Vec<Work>) -> Result<()> {
        self.bfc.free_after_all(address, work)
    }

    fn get(&self, address: u64) -> Option<Placed> {
        Allocator::get(&self.bfc, address)
    }

    fn find(&self, address: u64) -> Option<Placed> {
        Allocator::find(&self.bfc, address)
    }

    fn snapshot(&self) -> Option<Snapshot> {
        Some(Relieved::snapshot(self))
    }

    hand_on!(bfc: record_work, is_wanted, register_keeper, stats, clear_stats, trim, memory, check_owner);
}

impl<U: SubAllocator> fmt::Debug for Relieved<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relieved")
            .field("bfc", &self.bfc)
            .field("relief", &self.relief)
            .finish_non_exhaustive()
    }
}

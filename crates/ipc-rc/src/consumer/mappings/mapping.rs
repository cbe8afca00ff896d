//! A mapping and its uses.
//!
//! **The count of its [`use_count`](crate::consumer::mappings::use_count) is all that keeps a
//! mapping**: while it is not 0 nobody closes the mapping, an open one keeps its home, and the home
//! owns it. So a lease has no count beside this one, and after a leave no thread may touch either:
//! a leave that may have to wake the thread keeps the home first.
//!
//! A mapping's memory stays until the home goes and is used again for other regions; so a claimant
//! may try to enter any that it finds in the table of places, whatever became of it. It looks at
//! the region once more when it has entered: no opening comes while it is there.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use gpu_api::lock::Acquire;
use gpu_api::{DevicePtr, RegionId};

use crate::consumer::connection::link::Link;
use crate::consumer::mappings::use_count::{Cell, Leave, UseCount};
use crate::shard::SHARDS;

/// What owns mappings, and goes when none is open.
pub(crate) trait Home {
    /// Returns its link to the producer.
    fn link(&self) -> &Link;

    /// Ends a span after its last use.
    fn end_span(&self, number: u64);
}

/// The region behind one that is not a piece of a range.
const NONE: u64 = u64::MAX;

/// A region, mapped; or, while it is closed, memory for one.
pub(crate) struct Mapping<H> {
    /// Whose it is. Alive while the mapping is open, by `keeper`, and for holders of the home.
    home: Weak<H>,
    /// Keeps the home while the mapping is open. The circle ends when the participant's thread
    /// unmaps it.
    keeper: Mutex<Option<Arc<H>>>,
    region: AtomicU64,
    base: AtomicU64,
    len: AtomicU64,
    /// The producer is this process: there is nothing to unmap.
    local: AtomicBool,
    /// The region behind, of a piece of a range; else [`NONE`].
    behind: AtomicU64,
    /// The number among the spans, of a [span](crate::consumer::mappings::span); else [`NONE`].
    span: u64,
    uses: UseCount<AtomicU64, SHARDS>,
    /// It was entered since the cache last looked for something to drop.
    touched: AtomicBool,
}

impl<H: Home> Mapping<H> {
    /// Makes one that is closed: the span of this number, or one of a region.
    pub fn closed(home: &Arc<H>, span: Option<u64>) -> Mapping<H> {
        Mapping {
            home: Arc::downgrade(home),
            keeper: Mutex::default(),
            region: AtomicU64::new(0),
            base: AtomicU64::new(0),
            len: AtomicU64::new(0),
            local: AtomicBool::new(false),
            behind: AtomicU64::new(NONE),
            span: span.unwrap_or(NONE),
            uses: UseCount::closed(AtomicU64::new),
            touched: AtomicBool::new(false),
        }
    }

    /// Opens a closed one, which the caller has entered then, by a cell.
    pub fn open(&self, home: Arc<H>, opened: Opened, by: usize) {
        *self.keeper() = Some(home);
        self.region.store(opened.region.0, Ordering::Relaxed);
        self.base.store(opened.base.0, Ordering::Relaxed);
        self.len.store(opened.len, Ordering::Relaxed);
        self.local.store(opened.local, Ordering::Relaxed);
        self.behind.store(
            opened.behind.map_or(NONE, |behind| behind.0),
            Ordering::Relaxed,
        );
        self.touched.store(true, Ordering::Relaxed);
        self.uses.open(by);
    }

    /// Locks what keeps the home.
    pub fn keeper(&self) -> MutexGuard<'_, Option<Arc<H>>> {
        self.keeper.acquire()
    }

    /// Returns the region that is mapped.
    #[inline]
    pub fn region(&self) -> RegionId {
        RegionId(self.region.load(Ordering::Relaxed))
    }

    /// Returns the address of its first byte.
    #[inline]
    pub fn base(&self) -> DevicePtr {
        DevicePtr(self.base.load(Ordering::Relaxed))
    }

    /// Returns its bytes.
    #[inline]
    pub fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// Returns the region that lies behind it, of a piece of a range.
    pub fn behind(&self) -> Option<RegionId> {
        let behind = self.behind.load(Ordering::Relaxed);
        (behind != NONE).then_some(RegionId(behind))
    }

    /// Enters it by a cell, if it is open and of this region.
    #[inline(always)]
    pub fn enter(&self, region: RegionId, by: usize) -> bool {
        if self.region() != region {
            return false;
        }
        if !self.uses.cell(by).enter() || self.region() != region {
            // It is there for longer than this use: who tries to enter has the home.
            Mapping::leave(NonNull::from(self), by);
            return false;
        }
        if !self.touched.load(Ordering::Relaxed) {
            self.touched.store(true, Ordering::Relaxed);
        }
        true
    }

    /// Ends one use. After it, only a caller that keeps the home may touch the mapping or its home.
    ///
    /// By pointer: a reference would promise a mapping until this returns.
    #[inline]
    fn leave(mapping: NonNull<Mapping<H>>, by: usize) {
        // SAFETY: `as_ref` asks for a live mapping: it is until the use that is counted has ended.
        let cell: &Cell<AtomicU64> = unsafe { mapping.as_ref() }.uses.cell(by);
        if cell.leave() == Leave::Watched {
            Mapping::leave_watched(mapping, by);
        }
    }

    #[cold]
    fn leave_watched(mapping: NonNull<Mapping<H>>, by: usize) {
        // SAFETY: `as_ref` asks for a live mapping: as above.
        let left = unsafe { mapping.as_ref() };
        let (span, (cell, home)) = (left.span, left.cell_and_home(by));
        if cell.leave_watched()
            && let Some(home) = home
        {
            if span != NONE {
                home.end_span(span);
            }
            home.link().waker.nudge();
        }
    }

    fn cell_and_home(&self, by: usize) -> (&Cell<AtomicU64>, Option<Arc<H>>) {
        // There is none when the mapping is closed and its home going: then nobody waits either.
        (self.uses.cell(by), self.home.upgrade())
    }

    /// Sets whether the end of the last use wakes the thread (thread).
    pub fn watch(&self, watched: bool) {
        self.uses.watch(watched);
    }

    /// Says whether it is unused at this moment.
    pub fn is_idle(&self) -> bool {
        self.uses.is_idle()
    }

    /// Says whether it was entered since the last call.
    pub fn take_touched(&self) -> bool {
        self.touched.swap(false, Ordering::Relaxed)
    }

    /// Says whether the producer is this process.
    pub fn is_local(&self) -> bool {
        self.local.load(Ordering::Relaxed)
    }

    /// Returns the bytes that it takes from the cache's bound.
    pub fn cached_bytes(&self) -> u64 {
        if self.is_local() { 0 } else { self.len() }
    }

    /// Closes it to further uses, if it has none.
    pub fn close(&self) -> bool {
        self.uses.close()
    }
}

/// A use of a mapping, which is counted in it. Forgotten, it is a use for ever.
pub(crate) struct Entered<H> {
    mapping: NonNull<Mapping<H>>,
    /// The cell that it is counted in.
    by: u32,
}

// SAFETY: it stands for a `&Mapping`, which may go to another thread because a `Mapping` is `Sync`.
unsafe impl<H> Send for Entered<H> where Mapping<H>: Sync {}
// SAFETY: as above.
unsafe impl<H> Sync for Entered<H> where Mapping<H>: Sync {}

impl<H: Home> Entered<H> {
    /// Stands for a use that [`Mapping::enter`] or [`Mapping::open`] has counted, of a mapping that
    /// its home owns.
    #[inline(always)]
    pub fn new(mapping: NonNull<Mapping<H>>, by: usize) -> Entered<H> {
        Entered {
            mapping,
            by: by as u32,
        }
    }

    /// Returns the same use once more, for one of several handles that share it: one of them ends
    /// it.
    pub fn same(&self) -> Entered<H> {
        Entered {
            mapping: self.mapping,
            by: self.by,
        }
    }

    /// Returns the home.
    #[inline]
    pub fn home(&self) -> &H {
        // SAFETY: `&*` of what a `Weak` points to asks that the value is alive: the mapping is
        // open, because this use is counted, and an open mapping keeps its home.
        unsafe { &*self.home.as_ptr() }
    }

    /// Returns the home, to keep it beyond the use.
    pub fn keep_home(&self) -> Arc<H> {
        self.home.upgrade().expect("an open mapping keeps its home")
    }

    /// Ends the use.
    #[inline]
    pub fn leave(self) {
        Mapping::leave(self.mapping, self.by as usize);
    }
}

impl<H> Deref for Entered<H> {
    type Target = Mapping<H>;

    #[inline]
    fn deref(&self) -> &Mapping<H> {
        // SAFETY: `as_ref` asks for a pointer to a live `Mapping`, shared only: the home owns all
        // that it made until it goes, and it does not go while one is open, as this one is because
        // this use is counted.
        unsafe { self.mapping.as_ref() }
    }
}

/// What a mapping is opened with.
#[derive(Debug)]
pub(crate) struct Opened {
    pub region: RegionId,
    pub base: DevicePtr,
    pub len: u64,
    pub local: bool,
    /// The region behind, of a piece of a range.
    pub behind: Option<RegionId>,
}

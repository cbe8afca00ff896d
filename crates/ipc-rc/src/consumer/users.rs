//! A mapping and who uses it.
//!
//! # Counting
//!
//! | step | who | operation |
//! |---|---|---|
//! | enter | claimant | `fetch_add(1)` Acquire; if it finds CLOSING or another region, leave and ask anew |
//! | leave | whoever ends a lease, after its GPU work | CAS to one less, Release; if WATCHED, keep the link, `fetch_sub(1)` Release, wake the thread if it was the last |
//! | watch | thread | `fetch_or(WATCHED)`, and then it looks whether anybody is left |
//! | close | thread, under the desk's lock | CAS 0 to CLOSING, Acquire; from then on nobody enters |
//! | open | who maps | fields, then `fetch_sub(CLOSING)` Release, or one less: its own use |
//!
//! The count is spread over cells, so that threads do not wait for each other's writes: each enters by a cell of its own
//! and leaves by the one that it entered by. All of them are opened, watched and closed; a close that finds one in use
//! opens those again that it had closed. Whoever was turned away meanwhile looks again under the desk's lock.
//!
//! 'leave' pairs with 'close': all use of the mapping happens before the unmapping. 'open' pairs with 'enter': whoever
//! entered reads the fields of that opening.
//!
//! **The count is all that keeps a mapping**: while it is not 0 nobody closes the mapping, an open one keeps its link, and
//! the link owns it. So a lease has no count beside this one, and after 'leave' nobody may touch either: whoever may have
//! to wake the thread keeps the link first, which the CAS makes sure of. A mapping's memory stays until the link goes and
//! is used again for other regions; so a claimant may try to enter any that it finds in the table of places, whatever
//! became of it.

use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use gpu_api::{DevicePtr, RegionId};

use crate::consumer::link::Link;
use crate::producer::ledger::SHARDS;

const CLOSING: u32 = 1 << 31;
/// The thread waits for the last use to end.
const WATCHED: u32 = 1 << 30;

/// A region, mapped; or, while it is closed, memory for one.
pub(crate) struct Mapping {
    /// Whose it is. Alive while the mapping is open, by `keeper`, and for whoever holds the link.
    link: Weak<Link>,
    /// Keeps the link while the mapping is open. The circle ends when the link's thread unmaps it.
    keeper: Mutex<Option<Arc<Link>>>,
    region: AtomicU64,
    base: AtomicU64,
    len: AtomicU64,
    /// The producer is this process: there is nothing to unmap.
    local: AtomicBool,
    users: [Users; SHARDS],
    /// It was entered since the cache last looked for something to drop.
    touched: AtomicBool,
}

/// A cell of a mapping's count.
#[derive(Debug)]
#[repr(align(64))]
struct Users(AtomicU32);

impl Users {
    fn is_idle(&self, order: Ordering) -> bool {
        self.0.load(order) & !WATCHED == 0
    }

    fn close(&self) -> bool {
        let seen = self.0.load(Ordering::Relaxed);
        seen & !WATCHED == 0 && self.0.compare_exchange(seen, CLOSING, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Opens it for so many uses.
    fn open(&self, uses: u32) {
        self.0.fetch_sub(CLOSING - uses, Ordering::Release);
    }
}

// Not derived: the link's table leads back here.
impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping").field("region", &self.region()).field("base", &self.base()).finish_non_exhaustive()
    }
}

impl Mapping {
    /// Makes one that is closed.
    pub fn closed(link: &Arc<Link>) -> Mapping {
        Mapping {
            link: Arc::downgrade(link),
            keeper: Mutex::default(),
            region: AtomicU64::new(0),
            base: AtomicU64::new(0),
            len: AtomicU64::new(0),
            local: AtomicBool::new(false),
            users: std::array::from_fn(|_| Users(AtomicU32::new(CLOSING))),
            touched: AtomicBool::new(false),
        }
    }

    /// Opens a closed one, which the caller has entered then, by a cell.
    pub fn open(&self, link: Arc<Link>, opened: Opened, by: usize) {
        *self.keeper() = Some(link);
        self.region.store(opened.region.0, Ordering::Relaxed);
        self.base.store(opened.base.0, Ordering::Relaxed);
        self.len.store(opened.len, Ordering::Relaxed);
        self.local.store(opened.local, Ordering::Relaxed);
        self.touched.store(true, Ordering::Relaxed);
        for (cell, users) in self.users.iter().enumerate() {
            users.open(u32::from(cell == by));
        }
    }

    /// Locks what keeps the link.
    pub fn keeper(&self) -> MutexGuard<'_, Option<Arc<Link>>> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Enters it by a cell, if it is open and of this region.
    #[inline]
    pub fn enter(&self, region: RegionId, by: usize) -> bool {
        if self.region() != region {
            return false;
        }
        if self.users[by].0.fetch_add(1, Ordering::Acquire) & CLOSING != 0 || self.region() != region {
            self.leave(by);
            return false;
        }
        if !self.touched.load(Ordering::Relaxed) {
            self.touched.store(true, Ordering::Relaxed);
        }
        true
    }

    /// Ends one use. Neither the mapping nor its link may be touched after it by who does not keep the link.
    #[inline]
    fn leave(&self, by: usize) {
        let users = &self.users[by].0;
        let mut seen = users.load(Ordering::Relaxed);
        while seen & WATCHED == 0 {
            match users.compare_exchange_weak(seen, seen - 1, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(changed) => seen = changed,
            }
        }
        self.leave_watched(by);
    }

    #[cold]
    fn leave_watched(&self, by: usize) {
        // There is none when the mapping is closed and its link going: then nobody waits either.
        let link = self.link.upgrade();
        let last = self.users[by].0.fetch_sub(1, Ordering::Release) == WATCHED + 1;
        if let Some(link) = link.filter(|_| last) {
            link.waker.nudge();
        }
    }

    /// Has the thread be woken by whoever ends the last use, or not any more (thread).
    pub fn watch(&self, watched: bool) {
        for users in &self.users {
            if watched {
                users.0.fetch_or(WATCHED, Ordering::Relaxed);
            } else {
                users.0.fetch_and(!WATCHED, Ordering::Relaxed);
            }
        }
    }

    /// Says whether nobody uses it at this moment.
    pub fn is_idle(&self) -> bool {
        self.users.iter().all(|users| users.is_idle(Ordering::Acquire))
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

    /// Keeps everybody out from here on, if nobody uses it.
    pub fn close(&self) -> bool {
        match self.users.iter().position(|users| !users.close()) {
            None => true,
            Some(busy) => {
                self.users[..busy].iter().for_each(|users| users.open(0));
                false
            }
        }
    }
}

/// A use of a mapping, which is counted in it. Forgotten, it is a use for ever.
#[derive(Debug)]
pub(crate) struct Entered {
    mapping: NonNull<Mapping>,
    /// The cell that it is counted in.
    by: u32,
}

// SAFETY: it stands for a `&Mapping`, which may go to another thread because a `Mapping` is `Sync`.
unsafe impl Send for Entered where Mapping: Sync {}
// SAFETY: as above.
unsafe impl Sync for Entered where Mapping: Sync {}

impl Entered {
    /// Stands for a use that [`Mapping::enter`] or [`Mapping::open`] has counted, of a mapping that its link owns.
    #[inline(always)]
    pub fn new(mapping: NonNull<Mapping>, by: usize) -> Entered {
        Entered { mapping, by: by as u32 }
    }

    /// Returns the same use once more, for one of several handles that share it: one of them ends it.
    pub fn same(&self) -> Entered {
        Entered { mapping: self.mapping, by: self.by }
    }

    /// Returns the link.
    #[inline]
    pub fn link(&self) -> &Link {
        // SAFETY: `&*` of what a `Weak` points to asks that the value is alive: the mapping is open, because this use is
        // counted, and an open mapping keeps its link.
        unsafe { &*self.link.as_ptr() }
    }

    /// Returns the link, to keep it beyond the use.
    pub fn keep_link(&self) -> Arc<Link> {
        self.link.upgrade().expect("an open mapping keeps its link")
    }

    /// Ends the use.
    #[inline]
    pub fn leave(self) {
        Mapping::leave(&self, self.by as usize);
    }
}

impl Deref for Entered {
    type Target = Mapping;

    #[inline]
    fn deref(&self) -> &Mapping {
        // SAFETY: `as_ref` asks for a pointer to a live `Mapping`, shared only: the link owns all that it made until it
        // goes, and it does not go while one is open, as this one is because this use is counted.
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
}

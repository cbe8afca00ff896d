//! Mappings: one of each region, however many blocks of it are held.
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
//!
//! # Requests
//!
//! A region that is not mapped is asked for once, by the first who needs it; others wait at the desk. While a region is
//! being unmapped it is on the desk too, so that a new mapping begins only after the producer was told of the end of
//! the old one: its one row for (participant, region) is always true.

use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use arc_swap::ArcSwap;
use gpu_api::{DevicePtr, DeviceUuid, Error, RegionId, Result};

use crate::consumer::link::Link;
use crate::message::{Place, RefusalCode, ToProducer};
use crate::producer::ledger::{Entry, SHARDS, own_shard};
use crate::step::step;

const CLOSING: u32 = 1 << 31;
/// The thread waits for the last use to end.
const WATCHED: u32 = 1 << 30;

/// Places where regions are found without a table: more than most producers have regions.
const PLACES: usize = 256;

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
    fn closed(link: &Arc<Link>) -> Mapping {
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
    fn open(&self, link: Arc<Link>, opened: Opened, by: usize) {
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

    fn keeper(&self) -> MutexGuard<'_, Option<Arc<Link>>> {
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

    #[inline]
    fn enter(&self, region: RegionId, by: usize) -> bool {
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

    /// Returns the bytes that it takes from the cache's bound.
    pub fn cached_bytes(&self) -> u64 {
        if self.local.load(Ordering::Relaxed) { 0 } else { self.len() }
    }

    fn close(&self) -> bool {
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
struct Opened {
    region: RegionId,
    base: DevicePtr,
    len: u64,
    local: bool,
}

/// What the producer said about a region.
#[derive(Debug)]
pub(crate) enum Answer {
    Yes { len: u64, device: DeviceUuid, place: Place, fd: Option<OwnedFd> },
    No { code: RefusalCode, why: String },
}

#[derive(Debug)]
enum Request {
    /// Sent, under this number.
    Asked(u64),
    /// Answered, and nobody has taken the answer.
    Answered(Answer),
    /// Somebody is mapping it.
    Opening,
    /// It is being unmapped.
    Closing,
}

/// How much of a producer's memory a participant keeps mapped that it does not use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cache {
    pub bytes: u64,
    pub regions: usize,
}

impl Cache {
    /// Says whether these mappings are more than the bound.
    pub fn is_exceeded_by(&self, mappings: &[Arc<Mapping>]) -> bool {
        mappings.len() > self.regions || mappings.iter().map(|mapping| mapping.cached_bytes()).sum::<u64>() > self.bytes
    }
}

/// A participant's mappings.
pub(crate) struct Mappings {
    /// The mapping that was last entered of the regions of each place: of those that were made, whatever became of it.
    places: Box<[AtomicPtr<Mapping>]>,
    table: ArcSwap<HashMap<RegionId, Arc<Mapping>>>,
    /// Every one that was made. None goes before all do: `places` points at them.
    made: Mutex<Vec<Arc<Mapping>>>,
    /// Those that are closed.
    spare: Mutex<Vec<Arc<Mapping>>>,
    desk: Mutex<HashMap<RegionId, Request>>,
    next_request: AtomicU32,
}

/// Why a region could not be mapped.
#[derive(Debug)]
pub(crate) enum NotMapped {
    /// The lease that was named is no lease any more.
    NotLeased,
    /// Anything else.
    Failed(Error),
}

impl Default for Mappings {
    fn default() -> Mappings {
        Mappings {
            places: (0..PLACES).map(|_| AtomicPtr::new(null_mut())).collect(),
            table: ArcSwap::default(),
            made: Mutex::default(),
            spare: Mutex::default(),
            desk: Mutex::default(),
            next_request: AtomicU32::new(0),
        }
    }
}

impl fmt::Debug for Mappings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mappings")
            .field("table", &self.table.load())
            .field("desk", &self.desk())
            .finish_non_exhaustive()
    }
}

impl Mappings {
    fn desk(&self) -> MutexGuard<'_, HashMap<RegionId, Request>> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a mapping that exists.
    #[inline(always)]
    pub fn enter(&self, region: RegionId) -> Option<Entered> {
        let found = NonNull::new(self.place(region).load(Ordering::Acquire))?;
        // SAFETY: `as_ref` asks for a pointer to a live `Mapping`, shared only: those in `places` are among `made`.
        let mapping = unsafe { found.as_ref() };
        let by = own_shard();
        if mapping.enter(region, by) {
            return Some(Entered { mapping: found, by: by as u32 });
        }
        self.enter_by_table(region, by)
    }

    #[cold]
    fn enter_by_table(&self, region: RegionId, by: usize) -> Option<Entered> {
        let table = self.table.load();
        let mapping = table.get(&region)?;
        mapping.enter(region, by).then(|| self.settle(mapping, by))
    }

    fn place(&self, region: RegionId) -> &AtomicPtr<Mapping> {
        &self.places[region.0 as usize % PLACES]
    }

    /// Has the next claim of its region find a mapping that was made and entered, at its place.
    fn settle(&self, mapping: &Arc<Mapping>, by: usize) -> Entered {
        let found = Arc::as_ptr(mapping).cast_mut();
        self.place(mapping.region()).store(found, Ordering::Release);
        Entered { mapping: NonNull::from(&**mapping), by: by as u32 }
    }

    /// Opens a mapping, entered.
    fn open(&self, link: &Arc<Link>, opened: Opened, by: usize) -> Arc<Mapping> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mapping = spare.unwrap_or_else(|| {
            let fresh = Arc::new(Mapping::closed(link));
            self.made.lock().unwrap_or_else(PoisonError::into_inner).push(fresh.clone());
            fresh
        });
        mapping.open(link.clone(), opened, by);
        mapping
    }

    /// Lists the mappings.
    pub fn all(&self) -> Vec<Arc<Mapping>> {
        self.table.load().values().cloned().collect()
    }

    /// Says whether nothing is mapped, asked for or being unmapped.
    pub fn is_empty(&self) -> bool {
        self.table.load().is_empty() && self.desk().is_empty()
    }

    /// Takes in the producer's answer.
    pub fn answered(&self, link: &Link, request: u64, region: RegionId, answer: Answer) {
        let mut desk = self.desk();
        if matches!(desk.get(&region), Some(Request::Asked(number)) if *number == request) {
            desk.insert(region, Request::Answered(answer));
        } else {
            tracing::warn!(region = region.0, "an answer that nobody asked for");
        }
        drop(desk);
        link.announce_change();
    }

    /// Enters a region's mapping, making it first if need be, by the right of `lease`.
    #[cold]
    #[inline(never)]
    pub fn map(
        &self,
        link: &Arc<Link>,
        region: RegionId,
        lease: Entry,
        deadline: Option<Instant>,
    ) -> Result<Entered, NotMapped> {
        enum Turn {
            Mapped(Entered),
            Open(Answer),
            Gone,
            Send(u64),
        }
        loop {
            let turn = link.wait_until(deadline, || {
                if let Some(mapping) = self.enter(region) {
                    return Some(Turn::Mapped(mapping));
                }
                if link.is_gone() {
                    return Some(Turn::Gone);
                }
                let mut desk = self.desk();
                // Under the lock nobody closes it, and nobody tries to.
                if !desk.contains_key(&region)
                    && let Some(mapping) = self.enter_by_table(region, own_shard())
                {
                    return Some(Turn::Mapped(mapping));
                }
                match desk.get_mut(&region) {
                    None => {
                        let number = u64::from(self.next_request.fetch_add(1, Ordering::Relaxed));
                        desk.insert(region, Request::Asked(number));
                        Some(Turn::Send(number))
                    }
                    Some(answered @ Request::Answered(_)) => match std::mem::replace(answered, Request::Opening) {
                        Request::Answered(answer) => Some(Turn::Open(answer)),
                        other => {
                            *answered = other;
                            None
                        }
                    },
                    Some(_) => None,
                }
            });
            match turn {
                None => {
                    return Err(NotMapped::Failed(Error::Deadline { what: "the producer's answer about a region" }));
                }
                Some(Turn::Mapped(mapping)) => return Ok(mapping),
                Some(Turn::Gone) => {
                    return Err(NotMapped::Failed(Error::ProducerGone { pid: link.producer_pid }));
                }
                Some(Turn::Send(request)) => {
                    step!("map");
                    let message = ToProducer::MapRegion { request, region, access: link.access, lease };
                    if let Err(error) = link.send(&message, deadline) {
                        self.desk().remove(&region);
                        link.announce_change();
                        return Err(NotMapped::Failed(error));
                    }
                }
                Some(Turn::Open(answer)) => {
                    let opened = open(link, region, answer);
                    let result = match opened {
                        Ok(opened) => {
                            let by = own_shard();
                            let mapping = self.open(link, opened, by);
                            self.table.rcu(|table| {
                                let mut table = HashMap::clone(table);
                                table.insert(region, mapping.clone());
                                table
                            });
                            Ok(self.settle(&mapping, by))
                        }
                        Err(not) => Err(not),
                    };
                    self.desk().remove(&region);
                    if let Err(NotMapped::Failed(_)) = &result {
                        // The producer noted a mapping that did not come about. If it cannot be told, it is dead.
                        let _ = link.send(&ToProducer::Unmapped { region }, None);
                    }
                    link.announce_change();
                    if link.cache.is_exceeded_by(&self.all()) {
                        link.wants_idle.store(true, Ordering::Relaxed);
                    }
                    // If the thread waits for mappings to become idle, it has to watch this one too.
                    link.waker.nudge();
                    return result;
                }
            }
        }
    }

    /// Takes an idle mapping out of the table, so that nobody enters it, for [`unmap`] on a thread that may block.
    pub fn begin_unmap(&self, mapping: &Arc<Mapping>) -> bool {
        let mut desk = self.desk();
        let region = mapping.region();
        if desk.contains_key(&region) || !mapping.close() {
            return false;
        }
        desk.insert(region, Request::Closing);
        self.table.rcu(|table| {
            let mut table = HashMap::clone(table);
            table.remove(&region);
            table
        });
        true
    }

    /// Answers that nobody took: the producer must learn that these regions are not mapped.
    pub fn untaken(&self) -> Vec<RegionId> {
        let mut desk = self.desk();
        let untaken: Vec<RegionId> = desk
            .iter()
            .filter(|(_, request)| matches!(request, Request::Answered(Answer::Yes { .. })))
            .map(|(&region, _)| region)
            .collect();
        for region in &untaken {
            desk.remove(region);
        }
        desk.retain(|_, request| !matches!(request, Request::Answered(_)));
        untaken
    }
}

fn open(link: &Arc<Link>, region: RegionId, answer: Answer) -> Result<Opened, NotMapped> {
    let (len, device, place, fd) = match answer {
        Answer::No { code: RefusalCode::Region, .. } => return Err(NotMapped::NotLeased),
        Answer::No { code, why } => {
            return Err(NotMapped::Failed(Error::Refused { why, remedy: code.remedy() }));
        }
        Answer::Yes { len, device, place, fd } => (len, device, place, fd),
    };
    if device != link.gpu.uuid() {
        return Err(NotMapped::Failed(Error::Mismatch {
            what: "the region's device",
            theirs: device.to_string(),
            ours: link.gpu.uuid().to_string(),
            remedy: "open the participant on the producer's device",
        }));
    }
    let backend = link.gpu.backend();
    let (base, local) = match (place, fd) {
        (Place::Local(ptr), _) => (ptr, true),
        (Place::Handle(handle), _) => {
            let base = backend.open_handle(link.gpu.device(), &handle).map_err(NotMapped::Failed)?;
            // The handle says nothing of its size; the driver does.
            let size = backend.address_range(base).map(|range| range.len);
            if !matches!(size, Ok(size) if size >= len) {
                // SAFETY: `close` asks for a mapping that was not closed and that nothing uses: just opened.
                let _ = unsafe { backend.close(base) };
                let got = size.map_or_else(|error| error.to_string(), |size| format!("{size} bytes"));
                return Err(NotMapped::Failed(Error::Invalid {
                    what: "an opened region",
                    got,
                    must: "as long as the producer says",
                }));
            }
            (base, false)
        }
        (Place::Fd, Some(fd)) => {
            let mapped = backend.import_fd(link.gpu.device(), fd.as_fd(), len, link.access);
            (mapped.map_err(NotMapped::Failed)?, false)
        }
        (Place::Fd, None) => {
            return Err(NotMapped::Failed(Error::Refused {
                why: "the answer came without its file descriptor".into(),
                remedy: "raise RLIMIT_NOFILE",
            }));
        }
    };
    Ok(Opened { region, base, len, local })
}

/// Unmaps what [`Mappings::begin_unmap`] took out, and tells the producer. May block.
pub(crate) fn unmap(link: &Link, mapping: &Arc<Mapping>) {
    step!("unmap");
    let region = mapping.region();
    let closed = if mapping.local.load(Ordering::Relaxed) {
        Ok(())
    } else {
        // SAFETY: `close` asks for
        // - a mapping that was opened and is not closed: `begin_unmap` succeeds once for each;
        // - no unfinished work on it: a lease leaves the mapping only when its GPU work is done.
        unsafe { link.gpu.backend().close(mapping.base()) }
    };
    match closed {
        // The message goes before anybody can ask for the region again: the desk is cleared after it. A producer that
        // cannot be told is gone.
        Ok(()) => drop(link.send(&ToProducer::Unmapped { region }, None)),
        Err(error) => tracing::warn!(%error, region = region.0, "a mapping is leaked; its region stays pinned"),
    }
    // The caller keeps the link; from here on the mapping does not.
    drop(mapping.keeper().take());
    link.mappings.spare.lock().unwrap_or_else(PoisonError::into_inner).push(mapping.clone());
    link.mappings.desk().remove(&region);
    link.announce_change();
    link.waker.wake();
}

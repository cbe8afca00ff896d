//! Mappings: one of each region, however many blocks of it are held.
//!
//! Who uses one is counted in it: [`mapping`](crate::consumer::mapping).
//!
//! # Requests
//!
//! A region that is not mapped is asked for once, by the first who needs it; others wait at the desk. While a region is
//! being unmapped it is on the desk too, so that a new mapping begins only after the producer was told of the end of
//! the old one: its one row for (participant, region) is always true.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwap;
use gpu_api::{DeviceUuid, Error, RegionId, Result};

use crate::consumer::link::Link;
use crate::consumer::mapping::{Entered, Mapping, Opened};
use crate::producer::ledger::own_shard;
use channel::trace_point;
use channel::wire::lease_address::LeaseAddress;
use channel::wire::message::{Place, RefusalCode, ToProducer};

/// LedgerTable where regions are found without a table: more than most producers have regions.
const PLACES: usize = 256;

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
            return Some(Entered::new(found, by));
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
        Entered::new(NonNull::from(&**mapping), by)
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
        lease: LeaseAddress,
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
                    trace_point!("map");
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

    /// Questions that nobody waits for any more, because nothing is claimed from here on: the producer must learn that these
    /// regions are not mapped. One that it has yet to answer may stay without an answer for ever; and if it is heard after
    /// all, the producer hears of the end after the question.
    pub fn unmade(&self) -> Vec<RegionId> {
        let mut unmade = Vec::new();
        self.desk().retain(|&region, request| match request {
            Request::Asked(_) | Request::Answered(Answer::Yes { .. }) => {
                unmade.push(region);
                false
            }
            Request::Answered(Answer::No { .. }) => false,
            Request::Opening | Request::Closing => true,
        });
        unmade
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
    trace_point!("unmap");
    let region = mapping.region();
    let closed = if mapping.is_local() {
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

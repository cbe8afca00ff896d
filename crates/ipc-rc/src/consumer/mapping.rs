//! Mappings: one of each region, however many blocks of it are held.
//!
//! # Counting
//!
//! | step | who | operation |
//! |---|---|---|
//! | enter | claimant | `fetch_add(1)` Acquire; if it finds CLOSING, `fetch_sub(1)` and ask anew |
//! | leave | whoever ends a lease, after its GPU work | `fetch_sub(1)` Release |
//! | close | thread | CAS 0 to CLOSING, Acquire; from then on nobody enters |
//!
//! 'leave' pairs with 'close': all use of the mapping happens before the unmapping.
//!
//! # Requests
//!
//! A region that is not mapped is asked for once, by the first who needs it; others wait at the desk. While a region is
//! being unmapped it is on the desk too, so that a new mapping begins only after the producer was told of the end of
//! the old one: its one row for (participant, region) is always true.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwap;
use gpu_api::{DevicePtr, DeviceUuid, Error, RegionId, Result};

use crate::consumer::link::Link;
use crate::message::{Place, RefusalCode, ToProducer};
use crate::producer::ledger::Entry;
use crate::step::step;

const CLOSING: u32 = 1 << 31;

/// A region, mapped.
pub(crate) struct Mapping {
    /// Whose it is. The link's table holds the mapping in turn; the circle ends when the link's thread unmaps it.
    pub link: Arc<Link>,
    pub region: RegionId,
    pub base: DevicePtr,
    pub len: u64,
    /// The producer is this process: there is nothing to unmap.
    local: bool,
    users: AtomicU32,
    /// It was entered since the cache last looked for something to drop.
    touched: AtomicBool,
}

// Not derived: the link's table leads back here.
impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping").field("region", &self.region).field("base", &self.base).finish_non_exhaustive()
    }
}

impl Mapping {
    fn enter(&self) -> bool {
        if self.users.fetch_add(1, Ordering::Acquire) & CLOSING == 0 {
            if !self.touched.load(Ordering::Relaxed) {
                self.touched.store(true, Ordering::Relaxed);
            }
            return true;
        }
        self.users.fetch_sub(1, Ordering::Release);
        false
    }

    /// Ends one use, and says whether it was the last.
    pub fn leave(&self) -> bool {
        self.users.fetch_sub(1, Ordering::Release) == 1
    }

    /// Says whether nobody uses it at this moment.
    pub fn is_idle(&self) -> bool {
        self.users.load(Ordering::Acquire) == 0
    }

    /// Says whether it was entered since the last call.
    pub fn take_touched(&self) -> bool {
        self.touched.swap(false, Ordering::Relaxed)
    }

    /// Returns the bytes that it takes from the cache's bound.
    pub fn cached_bytes(&self) -> u64 {
        if self.local { 0 } else { self.len }
    }

    fn close(&self) -> bool {
        self.users.compare_exchange(0, CLOSING, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
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
#[derive(Debug, Default)]
pub(crate) struct Mappings {
    table: ArcSwap<HashMap<RegionId, Arc<Mapping>>>,
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

impl Mappings {
    fn desk(&self) -> MutexGuard<'_, HashMap<RegionId, Request>> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a mapping that exists.
    #[inline]
    pub fn enter(&self, region: RegionId) -> Option<Arc<Mapping>> {
        let table = self.table.load();
        let mapping = table.get(&region)?;
        mapping.enter().then(|| mapping.clone())
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
    pub fn map(
        &self,
        link: &Arc<Link>,
        region: RegionId,
        lease: Entry,
        deadline: Option<Instant>,
    ) -> Result<Arc<Mapping>, NotMapped> {
        enum Turn {
            Mapped(Arc<Mapping>),
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
                        Ok(mapping) => {
                            let mapping = Arc::new(mapping);
                            self.table.rcu(|table| {
                                let mut table = HashMap::clone(table);
                                table.insert(region, mapping.clone());
                                table
                            });
                            Ok(mapping)
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
                        link.waker.nudge();
                    }
                    return result;
                }
            }
        }
    }

    /// Takes an idle mapping out of the table, so that nobody enters it, for [`unmap`] on a thread that may block.
    pub fn begin_unmap(&self, mapping: &Arc<Mapping>) -> bool {
        let mut desk = self.desk();
        if desk.contains_key(&mapping.region) || !mapping.close() {
            return false;
        }
        desk.insert(mapping.region, Request::Closing);
        self.table.rcu(|table| {
            let mut table = HashMap::clone(table);
            table.remove(&mapping.region);
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

fn open(link: &Arc<Link>, region: RegionId, answer: Answer) -> Result<Mapping, NotMapped> {
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
    Ok(Mapping {
        link: link.clone(),
        region,
        base,
        len,
        local,
        users: AtomicU32::new(1),
        touched: AtomicBool::new(true),
    })
}

/// Unmaps what [`Mappings::begin_unmap`] took out, and tells the producer. May block.
pub(crate) fn unmap(link: &Link, mapping: &Mapping) {
    step!("unmap");
    let closed = if mapping.local {
        Ok(())
    } else {
        // SAFETY: `close` asks for
        // - a mapping that was opened and is not closed: `begin_unmap` succeeds once for each;
        // - no unfinished work on it: a lease leaves the mapping only when its GPU work is done.
        unsafe { link.gpu.backend().close(mapping.base) }
    };
    match closed {
        // The message goes before anybody can ask for the region again: the desk is cleared after it. A producer that
        // cannot be told is gone.
        Ok(()) => drop(link.send(&ToProducer::Unmapped { region: mapping.region }, None)),
        Err(error) => tracing::warn!(%error, region = mapping.region.0, "a mapping is leaked; its region stays pinned"),
    }
    link.mappings.desk().remove(&mapping.region);
    link.announce_change();
    link.waker.wake();
}

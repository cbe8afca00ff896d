//! Mappings: one of each region, however many blocks of it are held.
//!
//! Who uses one is counted in it: [`mapping`](crate::consumer::mappings::mapping).
//!
//! # Requests
//!
//! A region that is not mapped is asked for by a row of the [table of
//! questions](crate::consumer::connection::questions). **A row of a region that is asked, answered
//! or refused means that the region is not mapped**: the row is made under the table's lock after a
//! look at the mappings, becomes *acting* before anybody maps, and ends after the mapping is to be
//! found; an unmapping begins only where there is no row, under the same lock.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use arc_swap::ArcSwap;
use gpu_api::lock::Acquire;
use gpu_api::{Access, Error, RegionId, Result};

use crate::consumer::connection::asking::{Asking, Patience};
use crate::consumer::connection::link::Link;
use crate::consumer::connection::question::{Answer, Key, No, Question};
use crate::consumer::connection::questions::Look;
use crate::consumer::mappings::mapping::{Entered, Home, Mapping, Opened};
use crate::consumer::mappings::ranges::Ranges;
use crate::consumer::mappings::span::{Pieces, Spans};
use crate::gone::Gone;
use crate::shard::own_shard;
use transport::shared::slot::Claim;
use transport::trace_point;
use transport::wire::lease_address::LeaseAddress;
use transport::wire::message::{RefusalCode, RegionPlace};

/// Places where regions are found without a table: more than most producers have regions.
const PLACES: usize = 256;

/// How much of a producer's memory a participant keeps mapped that it does not use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cache {
    pub bytes: u64,
    pub regions: usize,
}

impl Cache {
    /// Says whether these mappings are more than the bound.
    fn is_exceeded_by<H: Home>(&self, mappings: &[Arc<Mapping<H>>]) -> bool {
        mappings.len() > self.regions
            || mappings
                .iter()
                .map(|mapping| mapping.cached_bytes())
                .sum::<u64>()
                > self.bytes
    }
}

/// A participant's mappings.
pub(crate) struct Mappings<H> {
    cache: Cache,
    /// The mapping that was last entered of the regions of each place: of those that were made,
    /// whatever became of it.
    places: Box<[AtomicPtr<Mapping<H>>; PLACES]>,
    table: ArcSwap<HashMap<RegionId, Arc<Mapping<H>>>>,
    /// Every one that was made. None goes before all do: `places` points at them.
    made: Mutex<Vec<Arc<Mapping<H>>>>,
    /// Those that are closed.
    spare: Mutex<Vec<Arc<Mapping<H>>>>,
    /// Where pieces are mapped.
    pub ranges: Ranges,
    /// Mappings of several pieces.
    pub spans: Spans<H>,
}

/// Why a region could not be mapped.
#[derive(Debug)]
pub(crate) enum NotMapped {
    /// The named lease has ended.
    NotLeased,
    /// The block goes on, but no region follows: the bytes up to there.
    Beyond(u64),
    /// Anything else.
    Failed(Error),
}

impl<H: Home> Mappings<H> {
    /// Makes a table without any.
    pub fn new(cache: Cache) -> Mappings<H> {
        Mappings {
            cache,
            places: Box::new(std::array::from_fn(|_| AtomicPtr::new(null_mut()))),
            table: ArcSwap::default(),
            made: Mutex::default(),
            spare: Mutex::default(),
            ranges: Ranges::default(),
            spans: Spans::new(),
        }
    }

    /// Enters a mapping that exists.
    #[inline(always)]
    pub fn enter(&self, region: RegionId) -> Option<Entered<H>> {
        let found = NonNull::new(self.place(region).load(Ordering::Acquire))?;
        // SAFETY: `as_ref` asks for a pointer to a live `Mapping`, shared only: those in `places`
        // are among `made`.
        let mapping = unsafe { found.as_ref() };
        let by = own_shard();
        if mapping.enter(region, by) {
            return Some(Entered::new(found, by));
        }
        self.enter_by_table(region, by)
    }

    #[cold]
    fn enter_by_table(&self, region: RegionId, by: usize) -> Option<Entered<H>> {
        let table = self.table.load();
        let mapping = table.get(&region)?;
        mapping.enter(region, by).then(|| self.settle(mapping, by))
    }

    fn place(&self, region: RegionId) -> &AtomicPtr<Mapping<H>> {
        &self.places[region.0 as usize % PLACES]
    }

    /// Has the next claim of its region find a mapping that was made and entered, at its place.
    fn settle(&self, mapping: &Arc<Mapping<H>>, by: usize) -> Entered<H> {
        let found = Arc::as_ptr(mapping).cast_mut();
        self.place(mapping.region()).store(found, Ordering::Release);
        Entered::new(NonNull::from(&**mapping), by)
    }

    /// Opens a mapping, entered.
    fn open(&self, home: &Arc<H>, opened: Opened, by: usize) -> Arc<Mapping<H>> {
        let spare = self.spare.acquire().pop();
        let mapping = spare.unwrap_or_else(|| {
            let fresh = Arc::new(Mapping::closed(home, None));
            self.made.acquire().push(fresh.clone());
            fresh
        });
        mapping.open(home.clone(), opened, by);
        mapping
    }

    /// Says whether more is mapped than the cache may keep.
    pub fn is_exceeded(&self) -> bool {
        self.cache.is_exceeded_by(&self.all())
    }

    /// Lists the mappings.
    pub fn all(&self) -> Vec<Arc<Mapping<H>>> {
        self.table.load().values().cloned().collect()
    }

    /// Says whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.table.load().is_empty()
    }

    /// Enters a region's mapping, making it first if need be, by the right of `lease`.
    #[cold]
    #[inline(never)]
    pub fn map(
        &self,
        home: &Arc<H>,
        region: RegionId,
        lease: LeaseAddress,
        patience: Patience,
    ) -> Result<Entered<H>, NotMapped> {
        enum Turn<H> {
            Mapped(Entered<H>),
            Open(Answer),
            Failed(NotMapped),
        }
        let link = home.link();
        let question = Question::Map {
            access: link.facts.access_to(region),
            lease,
        };
        let mut asking = Asking::new(link, Key::Region(region), question, patience);
        trace_point!("map");
        let turn = link.wait_for_answer(patience, |questions| {
            // Under the lock nobody closes it, and nobody tries to.
            if let Some(mapping) = self
                .enter(region)
                .or_else(|| self.enter_by_table(region, own_shard()))
            {
                return Some(Turn::Mapped(mapping));
            }
            if link.is_gone() {
                return Some(Turn::Failed(NotMapped::Failed(
                    Gone::Producer {
                        pid: link.facts.producer_pid,
                    }
                    .into(),
                )));
            }
            match asking.look(questions) {
                Look::Take(answer) => Some(Turn::Open(answer)),
                // A no to somebody else's lease says nothing about this one.
                Look::Refused(_, asked)
                    if asked != Some(lease) && link.files.peek(lease) == Some(Claim::Held) =>
                {
                    asking.ask_anew(questions);
                    None
                }
                Look::Refused(
                    No {
                        code: RefusalCode::Region,
                        ..
                    },
                    _,
                ) => Some(Turn::Failed(NotMapped::NotLeased)),
                Look::Refused(no, _) => Some(Turn::Failed(NotMapped::Failed(no.into()))),
                _ => None,
            }
        });
        asking.kept &= turn.is_none();
        match turn {
            None => Err(NotMapped::Failed(Error::deadline(
                "the producer's answer about a region",
            ))),
            Some(Turn::Mapped(mapping)) => Ok(mapping),
            Some(Turn::Failed(not)) => Err(not),
            Some(Turn::Open(answer)) => {
                let acting = Acting {
                    link,
                    region,
                    ends: Ends::Unmapped,
                };
                let opened = open(&self.ranges, link, region, answer).map_err(NotMapped::Failed)?;
                let by = own_shard();
                let mapping = self.open(home, opened, by);
                self.table.rcu(|table| {
                    let mut table = HashMap::clone(table);
                    table.insert(region, mapping.clone());
                    table
                });
                acting.end(Ends::Mapped);
                if self.is_exceeded() {
                    link.wants_idle.store(true, Ordering::Relaxed);
                }
                // If the thread waits for mappings to become idle, it has to watch this one too.
                link.waker.nudge();
                Ok(self.settle(&mapping, by))
            }
        }
    }

    /// Enters all pieces that a block lies across, from an entered one on and up to `end`, by the
    /// right of `lease`.
    #[cold]
    #[inline(never)]
    pub fn enter_across(
        &self,
        home: &Arc<H>,
        first: Entered<H>,
        end: u64,
        lease: LeaseAddress,
        patience: Patience,
    ) -> Result<Entered<H>, NotMapped> {
        let mut pieces = Pieces::new(first);
        // Each piece that is added has bytes, so this ends.
        while pieces.len() < end {
            let Some(behind) = pieces.next() else {
                return Err(NotMapped::Beyond(pieces.len()));
            };
            let piece = match self.enter(behind) {
                Some(piece) => piece,
                None => self.map(home, behind, lease, patience)?,
            };
            pieces.push(piece).map_err(NotMapped::Failed)?;
        }
        Ok(self.spans.open(home, pieces, own_shard()))
    }

    /// Lists the regions that a claim of a block which begins in this one has asked for, as far as
    /// it has come.
    pub fn asked_across(&self, region: RegionId, end: u64) -> Vec<RegionId> {
        let table = self.table.load();
        let (mut asked, mut len) = (vec![region], 0u64);
        while let Some(mapping) = asked.last().and_then(|region| table.get(region)) {
            len = len.saturating_add(mapping.len());
            match mapping.behind() {
                Some(behind) if len < end && !asked.contains(&behind) => asked.push(behind),
                _ => break,
            }
        }
        asked
    }

    /// Lists the pieces that lie before one that a claim asks for. A claim that is tried again
    /// needs them all at once: if the cache dropped them between two tries, it might never have
    /// them.
    pub fn before_what_is_asked(&self, link: &Link) -> HashSet<RegionId> {
        let table = self.table.load();
        let pieces = table
            .values()
            .filter_map(|mapping| Some((mapping.behind()?, mapping.region())));
        let before: HashMap<RegionId, RegionId> = pieces.collect();
        let mut found = HashSet::new();
        for asked in link.table().asked_regions() {
            let mut region = asked;
            while let Some(&next) = before.get(&region)
                && found.insert(next)
            {
                region = next;
            }
        }
        found
    }

    /// Takes an idle mapping out of the table, so that nobody enters it, for [`unmap`] on a thread
    /// that may block.
    pub fn begin_unmap(&self, link: &Link, mapping: &Arc<Mapping<H>>) -> bool {
        let mut table = link.table();
        let region = mapping.region();
        if !table.begin_unmap(region, Instant::now()) {
            return false;
        }
        if !mapping.close() {
            table.mapped(region);
            return false;
        }
        self.table.rcu(|table| {
            let mut table = HashMap::clone(table);
            table.remove(&region);
            table
        });
        true
    }
}

/// A thread that maps a region, or unmaps it. Whatever happens to it, the region's row goes on.
struct Acting<'a> {
    link: &'a Link,
    region: RegionId,
    ends: Ends,
}

/// How it ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ends {
    /// The region is mapped.
    Mapped,
    /// So is it, for ever.
    Leaked,
    /// It is not, and the producer must note that.
    Unmapped,
}

impl Acting<'_> {
    fn end(mut self, ends: Ends) {
        self.ends = ends;
    }
}

impl Drop for Acting<'_> {
    fn drop(&mut self) {
        let mut table = self.link.table();
        match self.ends {
            Ends::Mapped => table.mapped(self.region),
            Ends::Leaked => table.leaked(self.region),
            Ends::Unmapped => table.unmapped(self.region, Instant::now()),
        }
        table.hand_over();
        self.link.announce_change();
    }
}

fn open(ranges: &Ranges, link: &Link, region: RegionId, answer: Answer) -> Result<Opened> {
    let Answer::Region {
        len,
        device,
        place,
        fd,
    } = answer
    else {
        return Err(Error::invalid(
            "an answer about a region",
            "another answer",
            "a region",
        ));
    };
    if device != link.facts.gpu.uuid() {
        return Err(Error::mismatch(
            "the region's device",
            device,
            link.facts.gpu.uuid(),
            "open the participant on the producer's device",
        ));
    }
    let (backend, access) = (link.facts.gpu.backend(), link.facts.access_to(region));
    let behind = match place {
        RegionPlace::Piece(spot) => Some(spot.behind),
        RegionPlace::LocalPiece(_, behind) => Some(behind),
        _ => None,
    };
    let (base, local) = match (place, fd) {
        (RegionPlace::Local(ptr) | RegionPlace::LocalPiece(ptr, _), _)
            if link.facts.is_own_process =>
        {
            (ptr, true)
        }
        (RegionPlace::Local(_) | RegionPlace::LocalPiece(..), _) => {
            return Err(Error::invalid(
                "the place of a region",
                "an address in the producer's process",
                "a handle or a file descriptor, since this is another process",
            ));
        }
        (RegionPlace::Handle(_), _) if region.access() == Access::ReadOnly => {
            return Err(Error::invalid(
                "the place of a region that is only read",
                "a handle, which is always writable",
                "a file descriptor",
            ));
        }
        (RegionPlace::Handle(handle), _) => {
            let base = backend.open_handle(link.facts.gpu.device(), &handle)?;
            // The handle says nothing of its size; the driver does.
            let size = backend.address_range(base).map(|range| range.len);
            if !matches!(size, Ok(size) if size >= len) {
                // SAFETY: `close` asks for a mapping that was not closed and that nothing uses:
                // just opened.
                let _ = unsafe { backend.close(base) };
                let got =
                    size.map_or_else(|error| error.to_string(), |size| format!("{size} bytes"));
                return Err(Error::invalid(
                    "an opened region",
                    got,
                    "as long as the producer says",
                ));
            }
            (base, false)
        }
        (RegionPlace::Fd, Some(fd)) => (
            backend.import_fd(link.facts.gpu.device(), fd.as_fd(), len, access)?,
            false,
        ),
        (RegionPlace::Piece(spot), Some(fd)) => (
            ranges.map(&link.facts.gpu, fd.as_fd(), len, spot, access)?,
            false,
        ),
        (RegionPlace::Fd | RegionPlace::Piece(_), None) => {
            return Err(Error::refused(
                "the answer came without its file descriptor",
                "raise RLIMIT_NOFILE",
            ));
        }
    };
    Ok(Opened {
        region,
        base,
        len,
        local,
        behind,
    })
}

/// Unmaps what [`Mappings::begin_unmap`] took out of these, and tells the producer. May block.
pub(crate) fn unmap<H: Home>(mappings: &Mappings<H>, link: &Link, mapping: &Arc<Mapping<H>>) {
    trace_point!("unmap");
    let region = mapping.region();
    let acting = Acting {
        link,
        region,
        ends: Ends::Leaked,
    };
    let closed = if mapping.is_local() {
        Ok(())
    } else if mapping.behind().is_some() {
        // SAFETY: `Ranges::unmap` asks for what `close` does below, of a piece.
        unsafe { mappings.ranges.unmap(&link.facts.gpu, mapping.base()) }
    } else {
        // SAFETY: `close` asks for
        // - a mapping that was opened and is not closed: `begin_unmap` succeeds once for each;
        // - no unfinished work on it: a lease leaves the mapping only when its GPU work is done.
        unsafe { link.facts.gpu.backend().close(mapping.base()) }
    };
    // The caller keeps the home; from here on the mapping does not.
    drop(mapping.keeper().take());
    mappings.spare.acquire().push(mapping.clone());
    match closed {
        Ok(()) => acting.end(Ends::Unmapped),
        Err(error) => {
            tracing::warn!(%error, region = region.0, "a mapping is leaked; its region stays pinned");
            drop(acting);
        }
    }
    link.waker.wake();
}

//! Leases that this process holds.
//!
//! A lease is a slot of this participant's own; what its handles share lies in a [`Record`] beside the slot, so a claim
//! takes no memory. Who is the last to hold it is counted there: [`handle_count`](crate::consumer::leases::handle_count).
//!
//! The next claim of the slot comes after the release, through the producer's grant; so records need no more order
//! than the slot gives. A record that is held while its slot is granted again is the producer's fault, and refused.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::consumer::connection::link::{File, Link};
use crate::consumer::leases::handle_count::HandleCount;
use crate::consumer::leases::release_queue::Ending;
use crate::consumer::mappings::mapping::Entered;
use crate::stream::Stream;
use channel::trace_point;
use channel::wire::descriptor::{Fence, NO_FENCE};
use channel::wire::lease_address::LeaseAddress;

/// What the handles of one lease share.
#[derive(Debug)]
pub(crate) struct Record {
    holders: HandleCount<AtomicU64>,
    /// The timeline word that the contents wait for, in the first counter file; or none.
    fence_word: AtomicU32,
    fence_value: AtomicU64,
    /// `used_on` is not empty.
    is_used: AtomicBool,
    used_on: Mutex<Vec<Stream>>,
}

impl Record {
    /// Makes the record of a slot that nobody holds.
    pub const fn new() -> Record {
        Record {
            holders: HandleCount::new(AtomicU64::new(0)),
            fence_word: AtomicU32::new(NO_FENCE),
            fence_value: AtomicU64::new(0),
            is_used: AtomicBool::new(false),
            used_on: Mutex::new(Vec::new()),
        }
    }

    /// Says whether a lease of the slot is still held here.
    #[inline]
    pub fn is_held(&self) -> bool {
        self.holders.is_held()
    }

    /// Is taken by a lease whose slot was just claimed.
    #[inline]
    fn take(&self, fence: Option<Fence>) {
        let word = fence.map_or(NO_FENCE, |fence| fence.word);
        // What was there before is another lease's.
        if word != NO_FENCE || self.fence_word.load(Ordering::Relaxed) != NO_FENCE {
            self.fence_word.store(word, Ordering::Relaxed);
            self.fence_value.store(fence.map_or(0, |fence| fence.value), Ordering::Relaxed);
        }
        self.holders.take();
    }

    /// Keeps an empty list's memory for the streams of a later lease.
    fn give_room(&self, empty: Vec<Stream>) {
        let mut room = self.used_on.lock().unwrap_or_else(PoisonError::into_inner);
        if room.capacity() == 0 {
            *room = empty;
        }
    }
}

/// A lease that this process holds, without the streams that its end waits for.
#[derive(Debug)]
pub(crate) struct Held {
    /// Entered; the link hangs on it.
    pub mapping: Entered,
    pub entry: LeaseAddress,
}

impl Held {
    /// Ends the lease at once: no GPU work on its block is left.
    #[inline]
    pub fn release(self) {
        trace_point!("release");
        let counters = &self.file().counters;
        counters.slot(self.entry.slot).release(self.entry.generation);
        counters.dirty_of(self.entry.slot).mark();
        self.leave();
    }

    /// Says whether a lane has ended it.
    pub fn is_released(&self) -> bool {
        self.file().counters.slot(self.entry.slot).is_released(self.entry.generation)
    }

    /// Returns the link.
    #[inline(always)]
    pub fn link(&self) -> &Link {
        self.mapping.link()
    }

    /// Returns the lease's counter file.
    #[inline(always)]
    pub fn file(&self) -> &File {
        self.link().file(self.entry.file).expect("the claim found the file, and a link never loses one")
    }

    /// Lets go of the mapping, after the end.
    #[inline]
    pub fn leave(self) {
        self.mapping.leave();
    }
}

/// One of the handles of a lease. The drop of the last ends it, once all work on the streams that it was used on has
/// finished.
pub(crate) struct Lease(Held);

impl Lease {
    /// Takes a lease whose slot, with this record, was just claimed.
    #[inline(always)]
    pub fn new(held: Held, record: &Record, fence: Option<Fence>) -> Lease {
        record.take(fence);
        Lease(held)
    }

    /// Returns what is held.
    #[inline]
    pub fn held(&self) -> &Held {
        &self.0
    }

    /// Returns what the contents wait for.
    pub fn fence(&self) -> Option<Fence> {
        let record = self.record();
        let word = record.fence_word.load(Ordering::Relaxed);
        (word != NO_FENCE).then(|| Fence { file: 0, word, value: record.fence_value.load(Ordering::Relaxed) })
    }

    #[inline(always)]
    fn record(&self) -> &Record {
        self.0.file().record(self.0.entry.slot)
    }

    /// Notes that the end waits for the work on a stream.
    pub fn used_on(&self, stream: &Stream) {
        if self.0.link().guard.is_child() {
            // The lease is the parent's, and so may be the lock.
            return;
        }
        let record = self.record();
        let mut used = record.used_on.lock().unwrap_or_else(PoisonError::into_inner);
        if !used.iter().any(|s| s.key() == stream.key()) {
            used.push(stream.clone());
            record.is_used.store(true, Ordering::Relaxed);
        }
    }

    /// Lets go, and returns what a lane has to end: of the last handle of a lease that was used on streams.
    #[inline]
    fn let_go(&self) -> Option<(Held, Vec<Stream>)> {
        if self.0.link().guard.is_child() {
            // The lease is the parent's, and so are the streams.
            return None;
        }
        let record = self.record();
        if !record.holders.let_go() {
            return None;
        }
        if !record.is_used.load(Ordering::Relaxed) {
            self.same().release();
            return None;
        }
        record.is_used.store(false, Ordering::Relaxed);
        let used = std::mem::take(&mut *record.used_on.lock().unwrap_or_else(PoisonError::into_inner));
        Some((self.same(), used))
    }

    /// Drops many. Those that follow each other and were used on the same streams end together.
    pub fn drop_many(leases: impl Iterator<Item = Lease>) {
        let mut together = Together::default();
        for lease in leases {
            let Some((held, mut used)) = ManuallyDrop::new(lease).let_go() else { continue };
            if !together.ending.is_full()
                && together.ending.first().is_some_and(|first| std::ptr::eq(first.link(), held.link()))
                && together.streams.iter().map(Stream::key).eq(used.iter().map(Stream::key))
            {
                // With no lock held: a stream's keeper may be anything.
                used.clear();
                held.file().record(held.entry.slot).give_room(used);
            } else {
                together.end();
                together.streams = used;
            }
            together.ending.push(held);
        }
    }

    fn same(&self) -> Held {
        Held { mapping: self.0.mapping.same(), entry: self.0.entry }
    }
}

impl Clone for Lease {
    fn clone(&self) -> Lease {
        self.record().holders.add();
        Lease(self.same())
    }
}

impl Drop for Lease {
    #[inline]
    fn drop(&mut self) {
        if let Some((held, used)) = self.let_go() {
            let mut ending = Ending::new();
            ending.push(held);
            end_by_lane(&mut ending, used);
        }
    }
}

/// Leases that were used on the same streams, to be ended together: at the latest when this goes, also because the
/// application's iterator panics.
#[derive(Default)]
struct Together {
    ending: Ending,
    streams: Vec<Stream>,
}

impl Together {
    fn end(&mut self) {
        if !self.ending.is_empty() {
            end_by_lane(&mut self.ending, std::mem::take(&mut self.streams));
        }
    }
}

impl Drop for Together {
    fn drop(&mut self) {
        self.end();
    }
}

/// Leaves the end of leases that were used on the same streams to a lane.
#[cold]
fn end_by_lane(ending: &mut Ending, mut used: Vec<Stream>) {
    let (link, first): (Arc<Link>, LeaseAddress) = (ending[0].mapping.keep_link(), ending[0].entry);
    // From here on the slots, and with them the records, may be other leases'; the link keeps the files.
    if link.lanes.end(ending, &mut used) || link.wants_idle.load(Ordering::Relaxed) {
        link.waker.nudge();
    }
    // With no lock held: a stream's keeper may be anything.
    used.clear();
    if let Some(file) = link.file(first.file) {
        file.record(first.slot).give_room(used);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("entry", &self.0.entry).finish_non_exhaustive()
    }
}

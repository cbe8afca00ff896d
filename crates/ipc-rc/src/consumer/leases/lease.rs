//! Leases that this process holds.
//!
//! A lease is a slot of this participant's own; what its handles share lies in a [`Record`] beside
//! the slot. It counts the handles: [`handle_count`](crate::consumer::leases::handle_count).

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrayvec::ArrayVec;

use crate::consumer::leases::holdings::{Held, Holdings};
use crate::consumer::leases::record::Record;
use crate::consumer::leases::release_queue::{Ends, MOST_TOGETHER};
use crate::stream::Stream;
use transport::wire::descriptor::Fence;
use transport::wire::lease_address::LeaseAddress;

/// Leases that end together, by one batch of stores.
type Ending = ArrayVec<Held, MOST_TOGETHER>;

/// One of the handles of a lease. The drop of the last ends it, once all work on the streams that
/// it was used on has finished.
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
        self.record().fence()
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
        self.record().note_use(stream);
    }

    /// Lets go, and returns what a queue has to end: of the last handle of a lease that was used on
    /// streams.
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
        let Some(used) = record.take_uses() else {
            self.0.same().release();
            return None;
        };
        Some((self.0.same(), used))
    }

    /// Drops many. Those that follow each other and were used on the same streams end together.
    pub fn drop_many(leases: impl Iterator<Item = Lease>) {
        let mut together = Together::default();
        for lease in leases {
            let Some((held, mut used)) = ManuallyDrop::new(lease).let_go() else {
                continue;
            };
            if !together.ending.is_full()
                && together
                    .ending
                    .first()
                    .is_some_and(|first| std::ptr::eq(first.home(), held.home()))
                && together
                    .streams
                    .iter()
                    .map(Stream::key)
                    .eq(used.iter().map(Stream::key))
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
}

impl Clone for Lease {
    fn clone(&self) -> Lease {
        self.record().holders.add();
        Lease(self.0.same())
    }
}

impl Drop for Lease {
    #[inline]
    fn drop(&mut self) {
        if let Some((held, used)) = self.let_go() {
            let mut ending = Ending::new();
            ending.push(held);
            end_by_queue(&mut ending, used);
        }
    }
}

/// Leases that were used on the same streams, to be ended together: at the latest when this goes,
/// also because the application's iterator panics.
#[derive(Default)]
struct Together {
    ending: Ending,
    streams: Vec<Stream>,
}

impl Together {
    fn end(&mut self) {
        if !self.ending.is_empty() {
            end_by_queue(&mut self.ending, std::mem::take(&mut self.streams));
        }
    }
}

impl Drop for Together {
    fn drop(&mut self) {
        self.end();
    }
}

/// Leaves the end of leases that were used on the same streams to a queue.
#[cold]
fn end_by_queue(ending: &mut Ending, mut used: Vec<Stream>) {
    let (holdings, first): (Arc<Holdings>, LeaseAddress) =
        (ending[0].mapping.keep_home(), ending[0].entry);
    // From here on the slots, and with them the records, may be other leases'; the link keeps the
    // files.
    let link = &holdings.link;
    if holdings.queues.end(ending, &mut used) || link.wants_idle.load(Ordering::Relaxed) {
        link.waker.nudge();
    }
    // With no lock held: a stream's keeper may be anything.
    used.clear();
    if let Some(file) = link.files.get(first.file) {
        file.record(first.slot).give_room(used);
    }
}

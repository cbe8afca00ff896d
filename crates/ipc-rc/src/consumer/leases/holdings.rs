//! What a participant holds: leases, the mappings that they lie in, and the queues that end them.

use std::sync::atomic::Ordering;
use std::time::Instant;

use gpu_api::StreamOp;

use crate::consumer::connection::files::File;
use crate::consumer::connection::link::Link;
use crate::consumer::leases::release_queue::{Ends, ReleaseQueues};
use crate::consumer::mappings::mapping::{Entered, Home};
use crate::consumer::mappings::mapping_cache::{Cache, Mappings};
use transport::shared::counter_file::{dirty_word, slot_word};
use transport::shared::dirty::MARKED;
use transport::shared::slot::released_word;
use transport::trace_point;
use transport::wire::lease_address::LeaseAddress;

/// A participant's state. Its handles, open mappings and thread each hold one
/// [`Arc`](std::sync::Arc) of it.
pub(crate) struct Holdings {
    pub link: Link,
    pub mappings: Mappings<Holdings>,
    pub queues: ReleaseQueues<Held>,
}

impl Home for Holdings {
    #[inline(always)]
    fn link(&self) -> &Link {
        &self.link
    }

    fn end_span(&self, number: u64) {
        self.mappings.spans.end(number);
    }
}

impl Holdings {
    /// Begins with nothing held.
    pub fn new(link: Link, cache: Cache) -> Holdings {
        Holdings {
            mappings: Mappings::new(cache),
            queues: ReleaseQueues::new(link.facts.gpu.clone()),
            link,
        }
    }

    /// Says whether a lease has yet to end.
    pub fn is_any_held(&self) -> bool {
        !self.queues.are_dry() || !self.mappings.all().iter().all(|mapping| mapping.is_idle())
    }

    /// Says goodbye when the last handle was dropped and every lease has ended. Never blocks.
    ///
    /// The mappings may follow: the producer waits for them, or for the end of this process.
    pub fn say_goodbye(&self) {
        let link = &self.link;
        if !link.closing.load(Ordering::Relaxed) || link.is_gone() || self.is_any_held() {
            return;
        }
        let mut table = link.table();
        if !link.farewell.load(Ordering::Relaxed) {
            table.say_goodbye(Instant::now());
            table.hand_over();
        }
    }

    /// Says whether nothing is left to do: nothing is held or mapped, and the producer has noted
    /// that, or is gone.
    pub fn is_left(&self) -> bool {
        let link = &self.link;
        link.closing.load(Ordering::Relaxed)
            && (link.farewell.load(Ordering::Relaxed) || link.is_gone())
            && self.queues.are_dry()
            && self.mappings.is_empty()
            && link.table().is_at_rest()
    }
}

/// A lease that this process holds, without the streams that its end waits for.
pub(crate) struct Held {
    /// Entered; the holdings hang on it.
    pub mapping: Entered<Holdings>,
    pub entry: LeaseAddress,
}

impl Held {
    /// Returns what it belongs to.
    #[inline(always)]
    pub fn home(&self) -> &Holdings {
        self.mapping.home()
    }

    /// Returns the link.
    #[inline(always)]
    pub fn link(&self) -> &Link {
        &self.home().link
    }

    /// Returns the lease's counter file.
    #[inline(always)]
    pub fn file(&self) -> &File {
        self.link()
            .files
            .get(self.entry.file)
            .expect("the claim found the file, and a link never loses one")
    }

    /// Returns the same once more, for another handle of the lease.
    #[inline]
    pub fn same(&self) -> Held {
        Held {
            mapping: self.mapping.same(),
            entry: self.entry,
        }
    }
}

impl Ends for Held {
    #[inline]
    fn release(self) {
        trace_point!("release");
        let counters = &self.file().counters;
        counters
            .slot(self.entry.slot)
            .release(self.entry.generation);
        counters.dirty_of(self.entry.slot).mark();
        self.leave();
    }

    fn is_released(&self) -> bool {
        self.file()
            .counters
            .slot(self.entry.slot)
            .is_released(self.entry.generation)
    }

    fn stores(&self) -> Option<[StreamOp; 2]> {
        let (file, slot) = (self.file(), self.entry.slot);
        let words = file.registered?;
        let write = |word, value| {
            let word = words.word(word);
            StreamOp::Write { word, value }
        };
        let released = slot_word(file.counters.slot_count(), slot);
        Some([
            write(released, released_word(self.entry.generation)),
            write(dirty_word(slot), MARKED),
        ])
    }

    #[inline]
    fn leave(self) {
        self.mapping.leave();
    }
}

//! What the handles of one lease share: it lies beside the lease's slot, so that a claim takes no
//! memory.
//!
//! The next claim of the slot comes after the release, through the producer's grant; so records
//! need no more order than the slot gives. A record that is held while its slot is granted again is
//! the producer's fault, and refused.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::consumer::leases::handle_count::HandleCount;
use crate::stream::Stream;
use gpu_api::lock::Acquire;
use transport::wire::descriptor::{Fence, NO_FENCE};

/// What the handles of one lease share.
#[derive(Debug)]
pub(crate) struct Record {
    pub holders: HandleCount<AtomicU64>,
    /// The timeline word that the contents wait for, in the first counter file; or none.
    fence_word: AtomicU32,
    fence_value: AtomicU64,
    /// `used_on` is not empty.
    is_used: AtomicBool,
    used_on: Mutex<Vec<Stream>>,
}

impl Record {
    /// Makes the record of an unheld slot.
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
    pub fn take(&self, fence: Option<Fence>) {
        let word = fence.map_or(NO_FENCE, |fence| fence.word);
        // What was there before is another lease's.
        if word != NO_FENCE || self.fence_word.load(Ordering::Relaxed) != NO_FENCE {
            self.fence_word.store(word, Ordering::Relaxed);
            self.fence_value
                .store(fence.map_or(0, |fence| fence.value), Ordering::Relaxed);
        }
        self.holders.take();
    }

    /// Keeps an empty list's memory for the streams of a later lease.
    pub fn give_room(&self, empty: Vec<Stream>) {
        let mut room = self.used_on.acquire();
        if room.capacity() == 0 {
            *room = empty;
        }
    }

    /// Returns what the contents wait for.
    pub fn fence(&self) -> Option<Fence> {
        let word = self.fence_word.load(Ordering::Relaxed);
        (word != NO_FENCE).then(|| Fence {
            file: 0,
            word,
            value: self.fence_value.load(Ordering::Relaxed),
        })
    }

    /// Notes that the lease's end waits for the work on a stream.
    pub fn note_use(&self, stream: &Stream) {
        let mut used = self.used_on.acquire();
        if !used.iter().any(|s| s.key() == stream.key()) {
            used.push(stream.clone());
            self.is_used.store(true, Ordering::Relaxed);
        }
    }

    /// Takes the streams, if the lease was used on any.
    #[inline]
    pub fn take_uses(&self) -> Option<Vec<Stream>> {
        if !self.is_used.load(Ordering::Relaxed) {
            return None;
        }
        self.is_used.store(false, Ordering::Relaxed);
        Some(std::mem::take(&mut *self.used_on.acquire()))
    }
}

//! The sessions and the other allocators of a device, as a request asks them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Relief;
use crate::relief::ASK_AGAIN;
use crate::request::end_of;

/// Who is asked when the heaps are out of memory.
pub(super) struct Relieving {
    pub(super) relief: Arc<Relief>,
    /// How long a request waits for consumers that were asked to unmap.
    pub(super) patience: Duration,
}

/// A request's questions to a device's sessions and other allocators.
pub(super) struct Asking<'a> {
    relief: &'a Relief,
    /// What is left to wait for consumers; nothing once they were asked.
    patience: Option<Duration>,
    /// When consumers are asked next.
    next: Instant,
}

impl<'a> Asking<'a> {
    pub(super) fn new(relieving: &'a Relieving) -> Asking<'a> {
        Asking { relief: &relieving.relief, patience: Some(relieving.patience), next: Instant::now() }
    }

    pub(super) fn collect(&self) -> u64 {
        self.relief.collect()
    }

    pub(super) fn trim(&self) -> u64 {
        self.relief.trim()
    }

    /// Asks consumers to unmap, if it is time to; the first who were asked are waited for.
    pub(super) fn ask_to_unmap(&mut self, until: Option<Instant>) -> Option<Instant> {
        let now = Instant::now();
        if now < self.next {
            return until;
        }
        self.next = now + ASK_AGAIN;
        if self.relief.ask_to_unmap() == 0 {
            return until;
        }
        self.patience.take().map_or(until, |patience| until.max(Some(end_of(now, patience))))
    }
}

//! What is known of a keeper without asking it: for how long it has not answered, and how many
//! descriptors it has. Written by the thread that may wait for it, read by the one that may not.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A keeper's pulse. Numbers for people: no decision about an object rests on them, and none orders
/// another.
#[derive(Debug)]
pub struct Pulse {
    begun: Instant,
    /// When the wait that goes on began, in milliseconds since `begun`, plus 1; 0 for none.
    asked: AtomicU64,
    kept: AtomicU64,
    most: AtomicU64,
    starts: AtomicU64,
}

/// A wait for the keeper; it is over when this is dropped.
#[derive(Debug)]
pub struct Asked<'a>(&'a Pulse);

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.0.asked.store(0, Ordering::Relaxed);
    }
}

impl Pulse {
    pub(super) fn new() -> Pulse {
        Pulse {
            begun: Instant::now(),
            asked: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            most: AtomicU64::new(0),
            starts: AtomicU64::new(0),
        }
    }

    pub(super) fn ask(&self) -> Asked<'_> {
        let now = self.begun.elapsed().as_millis() as u64;
        self.asked.store(now + 1, Ordering::Relaxed);
        Asked(self)
    }

    pub(super) fn count(&self, kept: u64, most: u64, starts: u64) {
        self.kept.store(kept, Ordering::Relaxed);
        self.most.store(most, Ordering::Relaxed);
        self.starts.store(starts, Ordering::Relaxed);
    }

    /// Returns for how long a question has waited for its answer; nothing if none does.
    pub fn silence(&self) -> Option<Duration> {
        let asked = self.asked.load(Ordering::Relaxed).checked_sub(1)?;
        Some(
            self.begun
                .elapsed()
                .saturating_sub(Duration::from_millis(asked)),
        )
    }

    /// Returns how many descriptors it keeps, as it last said.
    pub fn kept(&self) -> u64 {
        self.kept.load(Ordering::Relaxed)
    }

    /// Returns the most that it keeps; 0 if it does not say so.
    pub fn most(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }

    /// Returns how many brokers it has started.
    pub fn starts(&self) -> u64 {
        self.starts.load(Ordering::Relaxed)
    }

    /// Returns how many descriptors it has room for, if it says so.
    pub(super) fn room(&self) -> Option<u64> {
        let most = self.most();
        (most > 0).then(|| most.saturating_sub(self.kept()))
    }
}

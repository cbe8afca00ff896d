//! When the session's thread looks after times to live.

use std::sync::atomic::{AtomicU64, Ordering};

use transport::os::clock::Tick;

/// The time of the next look. A grant that lapses earlier lowers it.
#[derive(Debug)]
pub(crate) struct NextLapse(AtomicU64);

impl Default for NextLapse {
    fn default() -> NextLapse {
        NextLapse(AtomicU64::new(Tick::NEVER.millis()))
    }
}

impl NextLapse {
    /// Returns the time.
    pub fn get(&self) -> Tick {
        Tick::from_millis(self.0.load(Ordering::Relaxed))
    }

    /// Notes when a grant lapses, after it was written down, and says whether the thread has to be
    /// told.
    ///
    /// Relaxed: the lock that the grant was written down under orders this load after a look of the
    /// thread that missed it.
    #[inline]
    #[must_use]
    pub fn note(&self, lapses: Tick) -> bool {
        lapses.millis() < self.0.load(Ordering::Relaxed) && self.lower(lapses)
    }

    #[cold]
    fn lower(&self, lapses: Tick) -> bool {
        self.0.fetch_min(lapses.millis(), Ordering::Relaxed);
        true
    }

    /// Forgets the time, before a look: what is granted behind that lowers it again (thread).
    pub fn reset(&self) {
        self.0.store(Tick::NEVER.millis(), Ordering::Relaxed);
    }
}

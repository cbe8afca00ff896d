//! The time that leases are stamped with.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Milliseconds of the coarse monotonic clock: 5 ns to read, right to a few milliseconds, and it
/// stands still in no process that runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Tick(u64);

impl Tick {
    /// Reads the clock.
    #[inline]
    pub fn now() -> Tick {
        let time = clock_gettime(ClockId::MonotonicCoarse);
        Tick(time.tv_sec.cast_unsigned() * 1_000 + time.tv_nsec.cast_unsigned() / 1_000_000)
    }

    /// Returns the time since `earlier`, or nothing if that is later.
    pub fn since(self, earlier: Tick) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }

    /// Returns the tick `duration` later, rounded up, so that what is due then is never early.
    #[must_use]
    pub fn after(self, duration: Duration) -> Tick {
        let millis = u64::from(duration.subsec_nanos().div_ceil(1_000_000));
        Tick(
            self.0
                .saturating_add(duration.as_secs().saturating_mul(1_000))
                .saturating_add(millis),
        )
    }

    /// A time that never comes.
    pub const NEVER: Tick = Tick(u64::MAX);

    /// Returns the milliseconds, to be kept in an atomic.
    pub fn millis(self) -> u64 {
        self.0
    }

    /// Reads what [`millis`](Tick::millis) gave.
    pub fn from_millis(millis: u64) -> Tick {
        Tick(millis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_due_time_is_never_early() {
        let tick = Tick(10);
        assert_eq!(tick.after(Duration::from_nanos(1)), Tick(11));
        assert_eq!(tick.after(Duration::MAX), Tick::NEVER);
    }
}

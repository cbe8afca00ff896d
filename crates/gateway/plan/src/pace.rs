//! How long a read of an object takes when nothing is in its way, which the plan measures patience
//! by.

use std::time::Duration;

/// What a lease, the memory, a confirmation and the commit take beside the bytes.
const BESIDE: Duration = Duration::from_secs(1);

/// The rate that a read reaches on this network.
///
/// Too low a rate makes hosts wait longer for those that say they are busy; too high a rate makes a
/// read that is well count as slow, and then more are served at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pace {
    /// Bits a second.
    pub bits_per_second: u64,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            bits_per_second: 8_000_000_000,
        }
    }
}

impl Pace {
    /// Returns the time of one read.
    #[must_use]
    pub fn expected(self, bytes: u64) -> Duration {
        let nanoseconds =
            u128::from(bytes) * 8_000_000_000 / u128::from(self.bits_per_second.max(1));
        BESIDE + Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_takes_its_bytes_over_the_rate_and_a_second() {
        let pace = Pace {
            bits_per_second: 100_000_000_000,
        };
        assert_eq!(
            pace.expected(140_000_000_000),
            Duration::from_millis(12_200)
        );
        assert_eq!(pace.expected(0), Duration::from_secs(1));
        assert!(Pace { bits_per_second: 0 }.expected(u64::MAX) > Duration::from_secs(1 << 33));
    }
}

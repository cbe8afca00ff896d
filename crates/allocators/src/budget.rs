//! Bytes that several allocators may take together.

use std::sync::atomic::{AtomicU64, Ordering};

/// A limit that several allocators share: what one takes the others cannot.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    used: AtomicU64,
}

impl Budget {
    /// Allows this many bytes.
    pub fn new(limit: u64) -> Budget {
        Budget { limit, used: AtomicU64::new(0) }
    }

    /// Returns the bytes that are allowed.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the bytes that are taken.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes bytes, all or none; says how many are left when there are too few.
    ///
    /// One compare-and-swap, so that nobody fails because of another's attempt that fails, too.
    ///
    /// # Errors
    ///
    /// The bytes that are left.
    pub fn take(&self, bytes: u64) -> Result<(), u64> {
        let take = |used: u64| used.checked_add(bytes).filter(|&used| used <= self.limit);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => Ok(()),
            Err(used) => Err(self.limit.saturating_sub(used)),
        }
    }

    /// Gives bytes back that were taken.
    pub fn give_back(&self, bytes: u64) {
        let before = self.used.fetch_sub(bytes, Ordering::Relaxed);
        debug_assert!(before >= bytes, "gave back more than was taken");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_all_or_nothing() {
        let budget = Budget::new(100);
        assert_eq!(budget.take(60), Ok(()));
        assert_eq!(budget.take(41), Err(40));
        assert_eq!(budget.take(u64::MAX), Err(40));
        assert_eq!(budget.take(40), Ok(()));
        budget.give_back(60);
        assert_eq!((budget.used(), budget.limit()), (40, 100));
    }

    #[test]
    fn nobody_fails_because_another_does() {
        // Half of the threads ask for what never fits; the others always fit.
        let budget = Budget::new(100);
        std::thread::scope(|scope| {
            for at in 0..4 {
                let budget = &budget;
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        match at % 2 {
                            0 => assert!(budget.take(101).is_err()),
                            _ => {
                                assert_eq!(budget.take(50), Ok(()));
                                budget.give_back(50);
                            }
                        }
                    }
                });
            }
        });
        assert_eq!(budget.used(), 0);
    }
}

//! Bytes that several allocators may take together.

use std::time::Instant;

use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A limit that several allocators share: what one takes the others cannot.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    state: Mutex<State>,
    given_back: Condvar,
}

#[derive(Debug, Default)]
struct State {
    used: u64,
    waiters: u32,
}

impl Budget {
    /// Allows this many bytes.
    pub fn new(limit: u64) -> Budget {
        Budget { limit, state: Mutex::new(State::default()), given_back: Condvar::new() }
    }

    /// Returns the bytes that are allowed.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the bytes that are taken.
    pub fn used(&self) -> u64 {
        self.state().used
    }

    /// Takes bytes, all or none; says how many are left when there are too few.
    ///
    /// Nobody fails because of another's attempt that fails, too.
    ///
    /// # Errors
    ///
    /// The bytes that are left.
    pub fn take(&self, bytes: u64) -> Result<(), u64> {
        self.take_until(bytes, None)
    }

    /// Takes bytes as [`take`](Budget::take), and waits for others to give some back, until then if at all.
    ///
    /// # Errors
    ///
    /// The bytes that are left, after the deadline; at once if they are more than the limit.
    pub fn take_until(&self, bytes: u64, deadline: Option<Instant>) -> Result<(), u64> {
        let mut state = self.state();
        loop {
            let free = self.limit - state.used;
            if bytes <= free {
                state.used += bytes;
                return Ok(());
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let Some(left) = left.filter(|left| !left.is_zero() && bytes <= self.limit) else { return Err(free) };
            state.waiters += 1;
            state = self.given_back.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.waiters -= 1;
        }
    }

    /// Gives bytes back that were taken.
    pub fn give_back(&self, bytes: u64) {
        let mut state = self.state();
        debug_assert!(state.used >= bytes, "gave back more than was taken");
        state.used = state.used.saturating_sub(bytes);
        let waiters = state.waiters;
        drop(state);
        if waiters > 0 {
            self.given_back.notify_all();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

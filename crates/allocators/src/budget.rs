//! Bytes that several allocators may take together.

use std::fmt;
use std::sync::Weak;
use std::time::Instant;

use gpu_api::{DeviceId, Error};

use crate::Trim;
use crate::keepers::Keepers;
use crate::sync::{Acquire, Condvar, Mutex, PoisonError};
use crate::upstream::{RoomListener, RoomListeners};

/// A limit that several allocators share: what one takes the others cannot. Returned bytes wake
/// every request that waits for memory under it.
pub struct Budget {
    limit: u64,
    state: Mutex<BudgetState>,
    given_back: Condvar,
    /// The waiters that may find room when bytes come back.
    listeners: RoomListeners,
    keepers: Keepers,
}

#[derive(Debug, Default)]
struct BudgetState {
    used: u64,
    waiters: u32,
}

impl Budget {
    /// Allows this many bytes.
    pub fn new(limit: u64) -> Budget {
        Budget {
            limit,
            state: Mutex::new(BudgetState::default()),
            given_back: Condvar::new(),
            listeners: RoomListeners::default(),
            keepers: Keepers::default(),
        }
    }

    /// Returns the bytes that are allowed.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the bytes that are taken.
    pub fn used(&self) -> u64 {
        self.state.acquire().used
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

    /// Takes bytes for an allocator of a device, which was asked for `asked`; the error names the
    /// budget, and says of which memory it is.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] when too few are left.
    pub(crate) fn take_for(
        &self,
        device: DeviceId,
        bytes: u64,
        asked: u64,
        of: &str,
    ) -> gpu_api::Result<()> {
        self.take(bytes).map_err(|free| {
            let hint = format!("of a budget of {} bytes{of}", self.limit);
            Error::OutOfMemory {
                device,
                asked,
                free,
                hint,
            }
        })
    }

    /// Takes bytes as [`take`](Budget::take), and waits for others to give some back, until then if
    /// at all.
    ///
    /// # Errors
    ///
    /// The bytes that are left, after the deadline; at once if they are more than the limit.
    pub fn take_until(&self, bytes: u64, deadline: Option<Instant>) -> Result<(), u64> {
        let mut state = self.state.acquire();
        let mut asked_keepers = false;
        loop {
            let free = self.limit - state.used;
            if bytes <= free {
                state.used += bytes;
                return Ok(());
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let Some(left) = left.filter(|left| !left.is_zero() && bytes <= self.limit) else {
                return Err(free);
            };
            state.waiters += 1;
            if !asked_keepers {
                // Not before it is known that somebody waits: what comes back meanwhile would be
                // kept again.
                asked_keepers = true;
                drop(state);
                self.keepers.ask();
                state = self.state.acquire();
                if bytes <= self.limit - state.used {
                    state.waiters -= 1;
                    continue;
                }
            }
            state = self
                .given_back
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            state.waiters -= 1;
        }
    }

    /// Gives bytes back that were taken.
    pub fn give_back(&self, bytes: u64) {
        let mut state = self.state.acquire();
        debug_assert!(state.used >= bytes, "gave back more than was taken");
        state.used = state.used.saturating_sub(bytes);
        let waiters = state.waiters;
        drop(state);
        if waiters > 0 {
            self.given_back.notify_all();
        }
        self.listeners.tell();
    }

    /// Adds a listener that is called whenever bytes come back.
    pub(crate) fn subscribe(&self, listener: Weak<dyn RoomListener>) {
        self.listeners.add(listener);
    }

    /// Says whether a request waits for bytes.
    pub(crate) fn is_wanted(&self) -> bool {
        self.state.acquire().waiters > 0
    }

    /// Adds a keeper of free memory that counts here.
    pub(crate) fn register_keeper(&self, keeper: Weak<dyn Trim>) {
        self.keepers.add(keeper);
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget")
            .field("limit", &self.limit)
            .field("used", &self.used())
            .finish()
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

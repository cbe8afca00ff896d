//! Locks that outlive a panic of their holder.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// Takes a lock, whatever became of the thread that held it before.
///
/// A thread that panics under a lock poisons it, and each later `lock` returns an error. The crates
/// of this workspace go on instead: what their locks guard is consistent between any two statements
/// that can panic, and a panic in one thread must not keep the others from freeing memory.
///
/// # Example
///
/// ```
/// use std::sync::Mutex;
/// use gpu_api::lock::Acquire;
///
/// let count = Mutex::new(0);
/// *count.acquire() += 1;
/// assert_eq!(*count.acquire(), 1);
/// ```
pub trait Acquire {
    /// What the lock guards.
    type Guarded: ?Sized;

    /// Waits until no thread holds the lock, and holds it until the guard is dropped.
    fn acquire(&self) -> MutexGuard<'_, Self::Guarded>;

    /// Holds it if no thread does at this moment.
    fn try_acquire(&self) -> Option<MutexGuard<'_, Self::Guarded>>;
}

impl<T: ?Sized> Acquire for Mutex<T> {
    type Guarded = T;

    fn acquire(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_acquire(&self) -> Option<MutexGuard<'_, T>> {
        match self.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// Waits for a change of what a lock guards, whatever became of the thread that makes it.
pub trait AwaitChange {
    /// Gives the lock up until it is told of a change, or for so long; `None` for ever. As with
    /// [`Condvar::wait`], it may return for no reason.
    fn await_change<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: Option<Duration>,
    ) -> MutexGuard<'a, T>;
}

impl AwaitChange for Condvar {
    fn await_change<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: Option<Duration>,
    ) -> MutexGuard<'a, T> {
        let Some(timeout) = timeout else {
            return self.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        let waited = self.wait_timeout(guard, timeout);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_taken_after_a_panic_of_its_holder() {
        let lock = Mutex::new(1);
        std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _held = lock.acquire();
                panic!("while it holds the lock");
            });
            assert!(holder.join().is_err());
        });
        assert!(lock.is_poisoned());
        assert_eq!(*lock.acquire(), 1);
        let held = lock.try_acquire().expect("no thread holds it");
        assert!(lock.try_acquire().is_none());
        let changed = Condvar::new();
        assert_eq!(*changed.await_change(held, Some(Duration::ZERO)), 1);
    }
}

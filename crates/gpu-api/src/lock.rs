//! Locks that outlive a panic of their holder.

use std::sync::{Mutex, MutexGuard, PoisonError};

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
}

impl<T: ?Sized> Acquire for Mutex<T> {
    type Guarded = T;

    fn acquire(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
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
    }
}

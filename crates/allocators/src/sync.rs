//! Locks and atomics: the standard library's, or those of a model checker.

pub(crate) use std::sync::PoisonError;

cfg_if::cfg_if! {
    if #[cfg(gpu_ipc_loom)] {
        pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64};
        pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

        /// As that of the standard library's locks.
        pub(crate) trait Acquire<T> {
            fn acquire(&self) -> MutexGuard<'_, T>;
        }

        impl<T> Acquire<T> for Mutex<T> {
            fn acquire(&self) -> MutexGuard<'_, T> {
                self.lock().unwrap_or_else(PoisonError::into_inner)
            }
        }
    } else {
        pub(crate) use gpu_api::lock::Acquire;
        pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64};
        pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
    }
}

/// Locks what is held for well under a microsecond at a time, such as the chunks of a heap.
///
/// A thread that finds the lock taken tries again for some 40 microseconds before it sleeps, at
/// growing intervals:
///
/// - To sleep and be woken takes longer than the lock is held. Once one thread sleeps, the standard
///   library's lock also puts the next to sleep without a try, and every unlock is a system call.
/// - What a heap consists of moves between the caches of two processors whenever they take turns.
///   Ten operations of one thread in a row cost less than five turns.
///
/// It is as fair as the standard library's lock, which is not fair either.
#[inline]
pub(crate) fn lock_briefly<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A model checker tries every order of the threads whatever they do.
    #[cfg(not(gpu_ipc_loom))]
    if let Some(guard) = contended::try_lock(mutex).or_else(|| contended::spin(mutex)) {
        return guard;
    }
    mutex.acquire()
}

#[cfg(not(gpu_ipc_loom))]
mod contended {
    use std::hint::spin_loop;
    use std::sync::TryLockError;

    use super::{Mutex, MutexGuard, PoisonError};

    /// The most pauses between two tries. They double from one on; a pause is some 10 to 50 ns.
    const MOST_PAUSES: u32 = 1024;

    /// Tries before a thread sleeps: the holder may have been put off its processor.
    const TRIES: u32 = 12;

    #[inline]
    pub(super) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
        match mutex.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    #[cold]
    pub(super) fn spin<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
        let mut pauses = 1;
        for _ in 0..TRIES {
            (0..pauses).for_each(|_| spin_loop());
            if let Some(guard) = try_lock(mutex) {
                return Some(guard);
            }
            pauses = (2 * pauses).min(MOST_PAUSES);
        }
        None
    }
}

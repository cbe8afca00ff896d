//! The 64-bit atomic words that the protocols are written over.
//!
//! Those between processes ([`slot`](crate::shared::slot), [`dirty`](crate::shared::dirty),
//! [`timeline`](crate::shared::timeline)) are generic over [`Word`], so that a model checker runs the shipped code with
//! its own atomics: those cannot lie in shared memory, and these must. Those between threads (`use_count`,
//! `handle_count` and `count` in `ipc-rc`, [`waker`](crate::os::waker)) are generic over [`Tally`] for the same reason.

use std::sync::atomic::{self, AtomicU64, Ordering};

/// Names an ordering, so that a model checker's run can weaken it: built with `GPU_IPC_WEAKEN=name` under the model
/// checker's cfg, the ordering of that name is Relaxed, and a test must fail. In every other build it is `strong`.
pub const fn ordering(name: &str, strong: Ordering) -> Ordering {
    match option_env!("GPU_IPC_WEAKEN") {
        Some(weakened) if cfg!(gpu_ipc_loom) && is_same(weakened, name) => Ordering::Relaxed,
        _ => strong,
    }
}

const fn is_same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut same = a.len() == b.len();
    let mut at = 0;
    while same && at < a.len() {
        same = a[at] == b[at];
        at += 1;
    }
    same
}

/// A 64-bit word that several processes touch at once.
pub trait Word {
    /// Reads it.
    fn load(&self, order: Ordering) -> u64;
    /// Writes it.
    fn store(&self, value: u64, order: Ordering);
    /// Writes it and returns what was there.
    fn swap(&self, value: u64, order: Ordering) -> u64;
    /// Writes `new` if `current` is there; `Err` holds what is there instead.
    fn compare_exchange(&self, current: u64, new: u64, success: Ordering, failure: Ordering) -> Result<u64, u64>;
}

/// A 64-bit word of this process' own, which its threads count in.
pub trait Tally: Word {
    /// Adds, and returns what was there.
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
    /// Subtracts, and returns what was there.
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64;
    /// Sets bits, and returns what was there.
    fn fetch_or(&self, value: u64, order: Ordering) -> u64;
    /// Keeps only these bits, and returns what was there.
    fn fetch_and(&self, value: u64, order: Ordering) -> u64;
    /// As [`Word::compare_exchange`], but may fail for no reason.
    fn compare_exchange_weak(&self, current: u64, new: u64, success: Ordering, failure: Ordering) -> Result<u64, u64>;
    /// Orders what this thread does before it and after it; Relaxed, as weakened, nothing.
    fn fence(order: Ordering);
}

macro_rules! word {
    ($atomic:ty, $fence:path) => {
        impl Word for $atomic {
            #[inline]
            fn load(&self, order: Ordering) -> u64 {
                <$atomic>::load(self, order)
            }
            #[inline]
            fn store(&self, value: u64, order: Ordering) {
                <$atomic>::store(self, value, order);
            }
            #[inline]
            fn swap(&self, value: u64, order: Ordering) -> u64 {
                <$atomic>::swap(self, value, order)
            }
            #[inline]
            fn compare_exchange(
                &self,
                current: u64,
                new: u64,
                success: Ordering,
                failure: Ordering,
            ) -> Result<u64, u64> {
                <$atomic>::compare_exchange(self, current, new, success, failure)
            }
        }

        impl Tally for $atomic {
            #[inline]
            fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
                <$atomic>::fetch_add(self, value, order)
            }
            #[inline]
            fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
                <$atomic>::fetch_sub(self, value, order)
            }
            #[inline]
            fn fetch_or(&self, value: u64, order: Ordering) -> u64 {
                <$atomic>::fetch_or(self, value, order)
            }
            #[inline]
            fn fetch_and(&self, value: u64, order: Ordering) -> u64 {
                <$atomic>::fetch_and(self, value, order)
            }
            #[inline]
            fn compare_exchange_weak(
                &self,
                current: u64,
                new: u64,
                success: Ordering,
                failure: Ordering,
            ) -> Result<u64, u64> {
                <$atomic>::compare_exchange_weak(self, current, new, success, failure)
            }
            #[inline]
            fn fence(order: Ordering) {
                if !matches!(order, Ordering::Relaxed) {
                    $fence(order);
                }
            }
        }
    };
}

word!(AtomicU64, atomic::fence);
#[cfg(gpu_ipc_loom)]
word!(loom::sync::atomic::AtomicU64, loom::sync::atomic::fence);

//! The 64-bit atomic words that the protocols are written over.
//!
//! Those between processes ([`slot`](crate::shared::slot), [`dirty`](crate::shared::dirty),
//! [`timeline`](crate::shared::timeline), [`journal`](crate::shared::journal)) are generic over
//! [`Word`], so that a model checker runs
//! the shipped code with its own atomics: those cannot lie in shared memory, and these must. Those
//! between threads (`use_count`, `handle_count` and `count` in `ipc-rc`,
//! [`waker`](crate::os::waker)) are generic over [`Tally`] for the same reason.

use std::sync::OnceLock;
use std::sync::atomic::{self, AtomicU64, Ordering};

/// An ordering with a name, by which a model checker's run can weaken it: with
/// `GPU_IPC_WEAKEN=name` in its environment it is Relaxed, and a test must fail. In a build without
/// the model checker it is always the strong one.
#[derive(Clone, Copy, Debug)]
pub struct NamedOrdering {
    name: &'static str,
    strong: Ordering,
}

impl NamedOrdering {
    /// Names an ordering.
    pub const fn new(name: &'static str, strong: Ordering) -> NamedOrdering {
        NamedOrdering { name, strong }
    }

    /// Returns the ordering to use.
    #[inline]
    pub fn get(self) -> Ordering {
        if cfg!(gpu_ipc_loom) && is_weakened(self.name) {
            Ordering::Relaxed
        } else {
            self.strong
        }
    }
}

/// Says whether this run weakens the ordering of that name. Each program of `ci/test/loom` is so built
/// once for all of them.
fn is_weakened(name: &str) -> bool {
    static WEAKENED: OnceLock<Option<String>> = OnceLock::new();
    WEAKENED
        .get_or_init(|| std::env::var("GPU_IPC_WEAKEN").ok())
        .as_deref()
        == Some(name)
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
    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64>;
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
    fn compare_exchange_weak(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64>;
    /// Orders what this thread does before it and after it; Relaxed, as weakened, nothing.
    fn fence(order: Ordering);
}

/// Implements methods by those of the same name that the atomic has itself.
macro_rules! forward {
    ($atomic:ty: $($method:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        #[inline]
        fn $method(&self, $($argument: $type),*) $(-> $result)? {
            <$atomic>::$method(self, $($argument),*)
        }
    )*};
}

macro_rules! word {
    ($atomic:ty, $fence:path) => {
        impl Word for $atomic {
            forward! {
                $atomic:
                load(order: Ordering) -> u64;
                store(value: u64, order: Ordering);
                swap(value: u64, order: Ordering) -> u64;
                compare_exchange(current: u64, new: u64, success: Ordering, failure: Ordering) -> Result<u64, u64>;
            }
        }

        impl Tally for $atomic {
            forward! {
                $atomic:
                fetch_add(value: u64, order: Ordering) -> u64;
                fetch_sub(value: u64, order: Ordering) -> u64;
                fetch_or(value: u64, order: Ordering) -> u64;
                fetch_and(value: u64, order: Ordering) -> u64;
                compare_exchange_weak(current: u64, new: u64, success: Ordering, failure: Ordering) -> Result<u64, u64>;
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

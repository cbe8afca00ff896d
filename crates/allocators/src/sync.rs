//! Locks: the standard library's, or those of a model checker.

pub(crate) use std::sync::PoisonError;

cfg_if::cfg_if! {
    if #[cfg(gpu_ipc_loom)] {
        pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
    } else {
        pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
    }
}

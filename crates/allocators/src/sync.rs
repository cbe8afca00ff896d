//! Locks: the standard library's, or those of a model checker.

pub(crate) use std::sync::PoisonError;
#[cfg(not(gpu_ipc_loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

#[cfg(gpu_ipc_loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

//! What a process has one of: its backends, and the queue of what is left to the interpreter.
//!
//! A forked child starts with fresh ones. The parent's may be locked by a thread that the child
//! does not have, so the child never touches them, and leaks them.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use gpu_ipc::backend::Backends;
use pyo3::prelude::*;

use super::queue::Queue;

/// What a process has one of.
#[derive(Default)]
pub(crate) struct Process {
    pub queue: Queue,
    pub backends: Backends,
}

static CURRENT: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());

/// Returns this process' own.
pub(crate) fn process() -> &'static Process {
    let current = CURRENT.load(Ordering::Acquire);
    // SAFETY: `as_ref` asks for null or a valid value for as long as the reference: what is stored
    // was leaked.
    if let Some(process) = unsafe { current.as_ref() } {
        return process;
    }
    let fresh = Box::into_raw(Box::default());
    match CURRENT.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: `&*` asks for a valid value: it was made above and is never freed.
        Ok(_) => unsafe { &*fresh },
        Err(other) => {
            // SAFETY: `Box::from_raw` asks for what `into_raw` gave and nobody else has: it was not
            // stored.
            drop(unsafe { Box::from_raw(fresh) });
            // SAFETY: `&*` asks for a valid value: another thread stored it, and nothing frees it.
            unsafe { &*other }
        }
    }
}

/// Forgets what belongs to the parent. Called in a forked child, before anything else runs there.
#[pyfunction(name = "_forked")]
pub(crate) fn forked() {
    CURRENT.store(ptr::null_mut(), Ordering::Release);
}

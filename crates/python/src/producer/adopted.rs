//! What keeps the memory that a session adopted: by its token, until that is back.

use std::collections::BTreeMap;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpu_ipc::session::AdoptToken;
use pyo3::prelude::*;

use crate::arrays::view::Owner;
use crate::interpreter::logging;

/// How many storages one look checks.
const LOOK_AT: usize = 64;

/// The owners of the memory that a session adopted.
#[derive(Default)]
pub(crate) struct Adopted {
    last_token: AtomicU64,
    /// By token. None is dropped with the lock held.
    owners: Mutex<BTreeMap<u64, Owner>>,
    /// Where the next look for freed storages begins.
    looked: AtomicU64,
    /// How many were found.
    freed: AtomicU64,
}

impl Adopted {
    /// Draws a token for memory that is to be adopted.
    pub fn draw_token(&self) -> AdoptToken {
        AdoptToken(self.last_token.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Keeps an owner until its token is back.
    pub fn keep(&self, token: AdoptToken, owner: Owner) {
        let before = self.lock().insert(token.0, owner);
        debug_assert!(before.is_none(), "a token is drawn once");
    }

    /// Takes the owners of tokens that are back. The caller drops them with the interpreter's lock.
    pub fn take_back(&self, tokens: &[AdoptToken]) -> Vec<Owner> {
        let mut owners = self.lock();
        tokens
            .iter()
            .filter_map(|token| owners.remove(&token.0))
            .collect()
    }

    /// Says whether nothing is adopted.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Says whether storages of PyTorch's are lent, which may be resized under their leases.
    pub fn has_storages(&self) -> bool {
        self.lock()
            .values()
            .any(|owner| matches!(owner, Owner::Storage { .. }))
    }

    /// Counts the storages that were found to be freed under their leases, so far.
    pub fn freed(&self) -> u64 {
        self.freed.load(Ordering::Relaxed)
    }

    /// Looks at some of the storages that are lent, and reports those that were freed under their
    /// leases.
    pub fn look_for_freed(&self, py: Python<'_>) {
        let from = self.looked.load(Ordering::Relaxed);
        let some =
            |(&token, owner): (&u64, &Owner)| owner.storage(py).map(|storage| (token, storage));
        let lent: Vec<(u64, Owner)> = self
            .lock()
            .range(from..)
            .filter_map(some)
            .take(LOOK_AT)
            .collect();
        let last = lent.last().map(|(token, _)| *token);
        self.looked.store(
            last.filter(|_| lent.len() == LOOK_AT)
                .map_or(0, |last| last + 1),
            Ordering::Relaxed,
        );
        for (token, owner) in lent {
            if self.report_freed(py, &owner)
                && let Some(known) = self.lock().get_mut(&token)
            {
                // Once is enough.
                known.forget_place();
            }
        }
    }

    /// Reports a storage that was freed under its leases, and says whether it was.
    pub fn report_freed(&self, py: Python<'_>, owner: &Owner) -> bool {
        let Some(text) = owner.was_freed(py) else {
            return false;
        };
        self.freed.fetch_add(1, Ordering::Relaxed);
        logging::error(py, text);
        true
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Owner>> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        // The keeper holds the session while something is lent. So this is the end of a process or
        // a forked child, and the references are not this thread's to drop.
        mem::forget(mem::take(
            self.owners
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner),
        ));
    }
}

//! What keeps the memory that a session adopted: once for each range, until every token of it is
//! back.

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
    /// No owner is dropped with the lock held.
    table: Mutex<Table>,
    /// Where the next look for freed storages begins.
    looked: AtomicU64,
    /// How many were found.
    freed: AtomicU64,
}

#[derive(Default)]
struct Table {
    /// By token.
    kept: BTreeMap<u64, Kept>,
    /// The token of each range, by its first byte and length.
    ranges: BTreeMap<(u64, u64), u64>,
}

/// What keeps one range, however often it is adopted.
struct Kept {
    owner: Owner,
    range: (u64, u64),
    /// Adoptions whose token is not back.
    uses: u64,
}

impl Adopted {
    /// Draws a token for memory that is to be adopted.
    pub fn draw_token(&self) -> AdoptToken {
        AdoptToken(self.last_token.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Says whether a range is kept already, by an owner that still has it: another adoption needs
    /// none of its own.
    pub fn keeps(&self, py: Python<'_>, range: (u64, u64), owner: &Owner) -> bool {
        let table = self.lock();
        let known = table
            .ranges
            .get(&range)
            .and_then(|token| table.kept.get(token));
        let Some(known) = known else {
            return false;
        };
        // Whatever else gave the range: its allocator cannot give it out again while it is held.
        // A storage may be resized, and an object may let its memory go.
        let storage = match &known.owner {
            Owner::Object(known) => {
                return matches!(owner, Owner::Object(object) if object.is(known));
            }
            known => known.storage(py),
        };
        drop(table);
        storage.is_none_or(|storage| storage.was_freed(py).is_none())
    }

    /// Counts one more adoption of a range, and returns its token. An owner that is not needed goes
    /// to `left`, which the caller drops with the interpreter's lock.
    pub fn join(
        &self,
        range: (u64, u64),
        owner: Owner,
        is_kept: bool,
        left: &mut Vec<Owner>,
    ) -> AdoptToken {
        let mut table = self.lock();
        if is_kept
            && let Some(&token) = table.ranges.get(&range)
            && let Some(kept) = table.kept.get_mut(&token)
        {
            kept.uses += 1;
            left.push(owner);
            return AdoptToken(token);
        }
        let token = self.draw_token();
        let kept = Kept {
            owner,
            range,
            uses: 1,
        };
        table.kept.insert(token.0, kept);
        table.ranges.insert(range, token.0);
        token
    }

    /// Takes the owners of tokens of which none is out any more. The caller drops them with the
    /// interpreter's lock.
    pub fn take_back(&self, tokens: &[AdoptToken]) -> Vec<Owner> {
        let mut table = self.lock();
        tokens
            .iter()
            .filter_map(|token| {
                let kept = table.kept.get_mut(&token.0)?;
                kept.uses -= 1;
                if kept.uses > 0 {
                    return None;
                }
                let kept = table.kept.remove(&token.0)?;
                // An owner that came later may have the range.
                if table.ranges.get(&kept.range) == Some(&token.0) {
                    table.ranges.remove(&kept.range);
                }
                Some(kept.owner)
            })
            .collect()
    }

    /// Says whether nothing is adopted.
    pub fn is_empty(&self) -> bool {
        self.lock().kept.is_empty()
    }

    /// Says whether storages of PyTorch's are lent, which may be resized under their leases.
    pub fn has_storages(&self) -> bool {
        self.lock()
            .kept
            .values()
            .any(|kept| matches!(kept.owner, Owner::Storage { .. }))
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
            |(&token, kept): (&u64, &Kept)| kept.owner.storage(py).map(|storage| (token, storage));
        let lent: Vec<(u64, Owner)> = self
            .lock()
            .kept
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
                && let Some(known) = self.lock().kept.get_mut(&token)
            {
                // Once is enough.
                known.owner.forget_place();
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

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        // The keeper holds the session while something is lent. So this is the end of a process or
        // a forked child, and the references are not this thread's to drop.
        mem::forget(mem::take(
            self.table.get_mut().unwrap_or_else(PoisonError::into_inner),
        ));
    }
}

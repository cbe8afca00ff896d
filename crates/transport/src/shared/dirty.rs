//! The dirty word: one per group of 64 slots, so that collect looks only where something was
//! released.
//!
//! # Protocol
//!
//! | step | who | operation | ordering |
//! |---|---|---|---|
//! | 1 | consumer | [`Slot::release`](crate::shared::slot::Slot::release) | Release |
//! | 2 | consumer's CPU | swap 1 | [`MARK`] Release |
//! | 2 | consumer's GPU | store 1, in the same batch and after 1 | stream order |
//! | 3 | producer | load; if it is not 0, swap 0 | [`TAKE`] Acquire |
//! | 4 | producer | read the group's slots | Acquire |
//!
//! **A release is never missed.** The producer zeroes the word *before* it reads the slots. If step
//! 2 comes before the zeroing, then so does step 1, and step 4 sees it; if it comes after, the word
//! is 1 again for the next collect.
//!
//! **Why the CPU swaps and does not store.** Two threads may mark one word. A plain store of the
//! second would end the release sequence that the first began: the producer, reading the second's
//! 1, would be ordered after the second's release only, could miss the first's, and would have
//! wiped its mark. A swap continues the sequence. A GPU can only store; its store is ordered by the
//! interconnect, where an earlier mark is visible before the mark that replaces it.
//!
//! **What it does not cover**: a consumer that dies between 1 and 2. Its burial reads every slot.
//!
//! Any value but 0 counts as 1: the word is input.
//!
//! Checked by `tests/loom_dirty.rs`; weakening `MARK` or `TAKE` to Relaxed fails it.

use std::sync::atomic::Ordering;

use crate::shared::word::{NamedOrdering, Word};

/// Pairs with [`TAKE`].
pub const MARK: NamedOrdering = NamedOrdering::new("mark", Ordering::Release);
/// Pairs with [`MARK`].
pub const TAKE: NamedOrdering = NamedOrdering::new("take", Ordering::Acquire);

/// What a GPU stores.
pub const MARKED: u64 = 1;

/// One dirty word.
#[derive(Debug)]
#[repr(transparent)]
pub struct Dirty<W>(W);

impl<W: Word> Dirty<W> {
    /// Wraps a word that holds 0.
    pub const fn new(word: W) -> Dirty<W> {
        Dirty(word)
    }

    /// Writes any value, as the other side could.
    pub fn scribble(&self, word: u64) {
        self.0.store(word, Ordering::Relaxed);
    }

    /// Says that a slot of the group was released (consumer's CPU, after the release).
    #[inline]
    pub fn mark(&self) {
        self.0.swap(MARKED, MARK.get());
    }

    /// Takes the mark; the caller reads the group's slots if there was one (producer).
    #[inline]
    #[must_use]
    pub fn take(&self) -> bool {
        // The load keeps the line shared while nothing happens; the swap alone orders.
        self.0.load(Ordering::Relaxed) != 0 && self.0.swap(0, TAKE.get()) != 0
    }

    /// Says whether there is a mark, without taking it.
    #[inline]
    pub fn is_marked(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }
}

#[cfg(all(test, not(gpu_ipc_loom)))]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn a_mark_is_taken_once() {
        let dirty = Dirty::new(AtomicU64::new(0));
        assert!(!dirty.take());
        dirty.mark();
        dirty.mark();
        assert!(dirty.take());
        assert!(!dirty.take());
    }

    #[test]
    fn a_strange_value_is_a_mark() {
        let dirty = Dirty::new(AtomicU64::new(u64::MAX));
        assert!(dirty.take());
        assert!(!dirty.is_marked());
    }
}

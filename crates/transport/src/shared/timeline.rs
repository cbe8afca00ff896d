//! The timeline word: orders the producer's GPU work before the consumer's.
//!
//! One word for each (participant, producing stream), in the participant's counter file.
//!
//! # Values
//!
//! | value | meaning |
//! |---|---|
//! | 0 | nothing was written yet |
//! | 1 to 2^61 - 1 | the producing stream has finished what was shared with this value or a lower one |
//! | [`POISON`] = 2^62 | the producer is dead or broken: every wait completes, and [`Fence`] says what was received |
//! | any other | written by a hostile or broken process; counts as not reached |
//!
//! A GPU's wait compares cyclically and signed (measured: `word - value >= 0` as `i64`), so every
//! live wait is completed by 2^62 and none by a value from 2^63 on.
//!
//! # Protocol
//!
//! | step | who | operation | ordering |
//! |---|---|---|---|
//! | reach | producer's stream | store `v`, after the work before it | stream order |
//! | look | consumer's CPU | load | [`LOOK`] Acquire |
//! | wait | consumer's stream | wait for `>= v` | stream order |
//! | poison | consumer's CPU, at the producer's death; producer's CPU, when its context is broken | swap `POISON` | [`POISONING`] Acquire |
//!
//! **The poisoning swap tells** what had been reached: it returns the last value. A late store of a
//! dying GPU may replace the poison; so the consumer poisons again until no wait of its own is
//! left.
//!
//! **What it does not order**: the consumer's work before the producer's reuse.
//! [`slot`](crate::shared::slot) does that.
//!
//! Checked by `tests/loom_timeline.rs`; weakening `LOOK` or `POISONING` to Relaxed fails it.

use std::sync::atomic::Ordering;

use crate::shared::word::{NamedOrdering, Word};

/// Completes every wait. Not a value that a live stream writes.
pub const POISON: u64 = 1 << 62;
/// One more than the highest value that a stream writes.
pub const LIMIT: u64 = 1 << 61;

/// Pairs with the producing side's store.
pub const LOOK: NamedOrdering = NamedOrdering::new("look", Ordering::Acquire);
/// Pairs with the producing side's store: what the returned value stands for is there to be read.
pub const POISONING: NamedOrdering = NamedOrdering::new("poison", Ordering::Acquire);

/// What a word says about a fence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Fence {
    /// Not yet.
    Pending,
    /// The work is done and its results are visible.
    Reached,
    /// Poisoned; what had been reached before, the poisoner knows.
    Poisoned,
}

/// One timeline word.
#[derive(Debug)]
#[repr(transparent)]
pub struct Timeline<W>(W);

impl<W: Word> Timeline<W> {
    /// Wraps a word that holds 0.
    pub const fn new(word: W) -> Timeline<W> {
        Timeline(word)
    }

    /// Says whether `value` has been reached.
    #[inline]
    pub fn look(&self, value: u64) -> Fence {
        match self.0.load(LOOK.get()) {
            POISON => Fence::Poisoned,
            word if word >= value && word < LIMIT => Fence::Reached,
            _ => Fence::Pending,
        }
    }

    /// Completes every wait, and returns the value that had been reached, or `None` if the word was
    /// poisoned before or held nothing that a stream writes.
    pub fn poison(&self) -> Option<u64> {
        let before = self.0.swap(POISON, POISONING.get());
        (before < LIMIT).then_some(before)
    }

    /// Says that a host-side producer has reached `value`.
    pub fn reach(&self, value: u64) {
        debug_assert!(value < LIMIT);
        self.0.store(value, Ordering::Release);
    }
}

#[cfg(all(test, not(gpu_ipc_loom)))]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn a_value_counts_only_between_the_fence_and_the_limit() {
        let look = |word: u64, value: u64| Timeline::new(AtomicU64::new(word)).look(value);
        assert_eq!(look(4, 5), Fence::Pending);
        assert_eq!(look(5, 5), Fence::Reached);
        assert_eq!(look(LIMIT - 1, 5), Fence::Reached);
        assert_eq!(look(LIMIT, 5), Fence::Pending);
        assert_eq!(look(POISON, 5), Fence::Poisoned);
        assert_eq!(look(u64::MAX, 5), Fence::Pending);
    }

    #[test]
    fn the_poisoning_swap_tells_what_had_been_reached() {
        let word = Timeline::new(AtomicU64::new(0));
        word.reach(7);
        assert_eq!(word.poison(), Some(7));
        assert_eq!(word.poison(), None);
        assert_eq!(word.look(7), Fence::Poisoned);
    }

    #[test]
    fn poison_completes_every_live_wait() {
        for value in [1, 2, LIMIT - 1] {
            assert!((POISON.wrapping_sub(value)).cast_signed() >= 0);
        }
    }
}

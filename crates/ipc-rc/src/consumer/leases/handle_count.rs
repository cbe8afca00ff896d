//! Finds the last holder of a lease.
//!
//! A lease's handles are counted in a word beside its slot, which outlives it and serves the slot's
//! next lease.
//!
//! | step | who | operation | ordering |
//! |---|---|---|---|
//! | take | claimant, when it has the slot | 0 expected; store 1 | Relaxed |
//! | clone | a holder | `fetch_add(1)` | Relaxed |
//! | let go | a holder | load; if it is 1, this is the last: nobody is left who could clone | [`LAST`] Acquire |
//! | | else | `fetch_sub(1)` | [`LET_GO`] Release |
//! | | and if it was 1 after all | fence | [`LAST_AFTER_ALL`] Acquire |
//! | end | the last, before it releases the slot | store 0 | Relaxed |
//!
//! # Pairings
//!
//! **`LET_GO` with `LAST` and with `LAST_AFTER_ALL`**: whatever a holder did with the lease comes
//! before its end.
//!
//! 'take' and 'clone' hand over nothing: a handle goes to another thread by something that orders,
//! and 'take' comes after the end of the slot's last lease, by the slot's own protocol through the
//! producer's grant.
//!
//! # Not covered here
//!
//! A producer that grants a slot that is held: [`is_held`](HandleCount::is_held) finds it, unless
//! it happens while another claim of the slot is under way. A participant trusts its producer with
//! more than this.
//!
//! Checked by `tests/loom_handle_count.rs`; weakening `LET_GO`, `LAST` or `LAST_AFTER_ALL` to
//! Relaxed fails it.

use std::sync::atomic::Ordering;

use transport::shared::word::{NamedOrdering, Tally};

/// Pairs with [`LAST`] and [`LAST_AFTER_ALL`].
pub const LET_GO: NamedOrdering = NamedOrdering::new("let_go", Ordering::Release);
/// Pairs with [`LET_GO`].
pub const LAST: NamedOrdering = NamedOrdering::new("last", Ordering::Acquire);
/// Pairs with [`LET_GO`].
pub const LAST_AFTER_ALL: NamedOrdering = NamedOrdering::new("last_after_all", Ordering::Acquire);

/// The count of a lease's handles. Only these methods touch the word.
#[derive(Debug)]
#[repr(transparent)]
pub struct HandleCount<W>(W);

impl<W: Tally> HandleCount<W> {
    /// Wraps a word that holds 0: nobody.
    pub const fn new(word: W) -> HandleCount<W> {
        HandleCount(word)
    }

    /// Says whether anybody holds a lease of the slot.
    #[inline]
    pub fn is_held(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    /// Counts the first holder (the thread that claimed the slot).
    #[inline]
    pub fn take(&self) {
        self.0.store(1, Ordering::Relaxed);
    }

    /// Counts one more (a holder).
    ///
    /// Overflowing a 64-bit word with forgotten handles would take centuries.
    #[inline]
    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Lets go, and says whether this was the last holder, which ends the lease (a holder).
    #[inline]
    #[must_use]
    pub fn let_go(&self) -> bool {
        if self.0.load(LAST.get()) != 1 {
            if self.0.fetch_sub(1, LET_GO.get()) != 1 {
                return false;
            }
            W::fence(LAST_AFTER_ALL.get());
        }
        self.0.store(0, Ordering::Relaxed);
        true
    }
}

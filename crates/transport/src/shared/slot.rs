//! The slot: one 64-bit word in shared memory that says where one lease stands.
//!
//! # States
//!
//! The lowest 3 bits are the state, the other 61 the generation, which a slot's next grant raises
//! by one.
//!
//! ```text
//! FREE ──grant──► GRANTED ──claim──► HELD ──release──► RELEASED ──retire──► (FREE, in the producer's ledger)
//!                    └─────revoke──► REVOKED ◄──bury─────┘ (HELD)
//! ```
//!
//! | step | who | operation | ordering |
//! |---|---|---|---|
//! | `grant` | producer | store `GRANTED(g)` | [`GRANT`] Release |
//! | `claim` | consumer | CAS `GRANTED(g)` to `HELD(g)` | [`CLAIM`] Acquire |
//! | `release` | consumer, by CPU or by GPU | store `RELEASED(g)` | [`RELEASE`] Release |
//! | `read` | producer | load | [`READ`] Acquire |
//! | `revoke` | producer | CAS `GRANTED(g)` to `REVOKED(g)` | [`REVOKE`] Relaxed |
//!
//! None loops. Every transition of a word has exactly one party that may make it, and the only
//! race, claim against revoke, is decided by two compare-and-swaps of which one wins.
//!
//! # Pairings
//!
//! - **`GRANT` with `CLAIM`**: what the producer's CPU wrote into the block before the grant is
//!   seen by the claimant.
//! - **`RELEASE` with `READ`**: what the consumer's CPU did to the block happens before the
//!   producer uses its bytes again. A GPU's store of the word comes after the GPU's work by stream
//!   order, and the driver makes it visible.
//! - **`REVOKE` is Relaxed**: it hands over nothing. The loser of the race touched no byte of the
//!   block.
//!
//! # Not ordered here
//!
//! GPU work between the two sides: the [timeline words](crate::shared::timeline) do that.
//!
//! # Not covered here
//!
//! A consumer that dies: its word stays as it is, and the ledger decides by proof of death and
//! quarantine. A word that holds anything but what the ledger expects is reported as
//! [`Seen::Corrupt`] and bars the block from reuse until its holder is proven dead.
//!
//! Checked by `tests/loom_slot.rs`; weakening `GRANT`, `CLAIM`, `RELEASE` or `READ` to Relaxed
//! fails it.

use std::sync::atomic::Ordering;

use crate::shared::word::{NamedOrdering, Word};

/// Pairs with [`CLAIM`].
pub const GRANT: NamedOrdering = NamedOrdering::new("grant", Ordering::Release);
/// Pairs with [`GRANT`].
pub const CLAIM: NamedOrdering = NamedOrdering::new("claim", Ordering::Acquire);
/// Pairs with [`READ`].
pub const RELEASE: NamedOrdering = NamedOrdering::new("release", Ordering::Release);
/// Pairs with [`RELEASE`].
pub const READ: NamedOrdering = NamedOrdering::new("read", Ordering::Acquire);
/// Hands over nothing.
pub const REVOKE: Ordering = Ordering::Relaxed;

/// How often a slot has been granted; 61 bits, so it does not come round.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Generation(u64);

impl Generation {
    /// The generation of a slot that was never granted.
    pub const ZERO: Generation = Generation(0);
    /// The last one.
    pub const MAX: Generation = Generation((1 << 61) - 1);

    /// Reads a generation from a descriptor; `None` for a number of more than 61 bits.
    pub const fn new(number: u64) -> Option<Generation> {
        if number <= Self::MAX.0 {
            Some(Generation(number))
        } else {
            None
        }
    }

    /// Returns the number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the generation of the slot's next grant.
    ///
    /// # Panics
    ///
    /// After 2^61 grants of one slot: at a grant a nanosecond, after 73 years.
    #[must_use]
    pub const fn next(self) -> Generation {
        assert!(self.0 < Self::MAX.0, "a slot was granted 2^61 times");
        Generation(self.0 + 1)
    }
}

/// Where a lease stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum SlotState {
    /// Never granted.
    Free = 0,
    /// Granted, not claimed: the descriptor is on its way.
    Granted = 1,
    /// Claimed: the consumer may be using the block.
    Held = 2,
    /// The consumer is done, its GPU work included.
    Released = 3,
    /// Taken back before it was claimed.
    Revoked = 4,
}

/// Encodes a word.
pub const fn encode(state: SlotState, generation: Generation) -> u64 {
    (generation.0 << 3) | state as u64
}

/// Decodes any word; `None` for the three bit patterns that name no state.
pub const fn decode(word: u64) -> Option<(SlotState, Generation)> {
    let state = match word & 7 {
        0 => SlotState::Free,
        1 => SlotState::Granted,
        2 => SlotState::Held,
        3 => SlotState::Released,
        4 => SlotState::Revoked,
        _ => return None,
    };
    Some((state, Generation(word >> 3)))
}

/// What a claim found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Claim {
    /// The lease is the caller's, who must release it.
    Held,
    /// The producer took the grant back.
    Revoked,
    /// The lease was claimed before.
    AlreadyClaimed,
    /// The slot is at another generation: the lease ended long ago.
    Stale,
}

/// What a revocation found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Revoke {
    /// The grant is taken back: retire the lease.
    Revoked,
    /// The consumer was faster, or is done already: leave the lease to collect.
    TooLate,
}

/// What the producer sees in a slot that it has granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Seen {
    /// Not claimed yet.
    Granted,
    /// In use.
    Held,
    /// Done: retire the lease.
    Released,
    /// Nothing that this protocol writes: bar the block until the holder is proven dead.
    Corrupt(u64),
}

/// One slot. Only these methods touch the word.
#[derive(Debug)]
#[repr(transparent)]
pub struct Slot<W>(W);

impl<W: Word> Slot<W> {
    /// Wraps a word that holds 0.
    pub const fn new(word: W) -> Slot<W> {
        Slot(word)
    }

    /// Writes any value, as the other side could.
    pub fn scribble(&self, word: u64) {
        self.0.store(word, Ordering::Relaxed);
    }

    /// Grants the slot (producer). The ledger says that it is free and which generation comes next.
    #[inline(always)]
    pub fn grant(&self, generation: Generation) {
        self.0
            .store(encode(SlotState::Granted, generation), GRANT.get());
    }

    /// Claims the lease (consumer).
    #[inline(always)]
    pub fn claim(&self, generation: Generation) -> Claim {
        let granted = encode(SlotState::Granted, generation);
        let held = encode(SlotState::Held, generation);
        match self
            .0
            .compare_exchange(granted, held, CLAIM.get(), Ordering::Relaxed)
        {
            Ok(_) => Claim::Held,
            Err(word) => why_not(word, generation),
        }
    }

    /// Says what a claim would find, without claiming (consumer). [`Claim::Held`] means that it
    /// would succeed.
    pub fn peek(&self, generation: Generation) -> Claim {
        let word = self.0.load(Ordering::Relaxed);
        if word == encode(SlotState::Granted, generation) {
            Claim::Held
        } else {
            why_not(word, generation)
        }
    }

    /// Ends a lease that the caller holds (consumer's CPU). A GPU stores [`released_word`] instead.
    #[inline]
    pub fn release(&self, generation: Generation) {
        self.0.store(released_word(generation), RELEASE.get());
    }

    /// Says whether a release that was left to the GPU has happened (consumer). The producer may
    /// have gone on since.
    #[inline]
    pub fn is_released(&self, generation: Generation) -> bool {
        self.0.load(READ.get()) != encode(SlotState::Held, generation)
    }

    /// Reads a slot that the ledger says is granted at `generation` (producer).
    #[inline]
    pub fn read(&self, generation: Generation) -> Seen {
        let word = self.0.load(READ.get());
        const GRANTED: u64 = SlotState::Granted as u64;
        const HELD: u64 = SlotState::Held as u64;
        const RELEASED: u64 = SlotState::Released as u64;
        // Another generation leaves bits above the state's.
        match word ^ encode(SlotState::Free, generation) {
            GRANTED => Seen::Granted,
            HELD => Seen::Held,
            RELEASED => Seen::Released,
            _ => Seen::Corrupt(word),
        }
    }

    /// Takes a grant back that was not claimed (producer).
    #[inline]
    pub fn revoke(&self, generation: Generation) -> Revoke {
        let granted = encode(SlotState::Granted, generation);
        let revoked = encode(SlotState::Revoked, generation);
        match self
            .0
            .compare_exchange(granted, revoked, REVOKE, Ordering::Relaxed)
        {
            Ok(_) => Revoke::Revoked,
            Err(_) => Revoke::TooLate,
        }
    }
}

fn why_not(word: u64, generation: Generation) -> Claim {
    match decode(word) {
        Some((SlotState::Revoked, g)) if g == generation => Claim::Revoked,
        Some((SlotState::Held | SlotState::Released, g)) if g == generation => {
            Claim::AlreadyClaimed
        }
        _ => Claim::Stale,
    }
}

/// The word that ends a lease, for a GPU to store.
pub const fn released_word(generation: Generation) -> u64 {
    encode(SlotState::Released, generation)
}

#[cfg(all(test, not(gpu_ipc_loom)))]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    fn slot(word: u64) -> Slot<AtomicU64> {
        Slot::new(AtomicU64::new(word))
    }

    #[test]
    fn a_lease_goes_through_its_life_once() {
        let slot = slot(0);
        let g = Generation::ZERO.next();
        slot.grant(g);
        assert_eq!(slot.read(g), Seen::Granted);
        assert_eq!(slot.claim(g), Claim::Held);
        assert_eq!(slot.claim(g), Claim::AlreadyClaimed);
        assert_eq!(slot.revoke(g), Revoke::TooLate);
        assert_eq!(slot.read(g), Seen::Held);
        assert!(!slot.is_released(g));
        slot.release(g);
        assert!(slot.is_released(g));
        assert_eq!(slot.read(g), Seen::Released);
        assert_eq!(slot.claim(g), Claim::AlreadyClaimed);
    }

    #[test]
    fn a_revoked_grant_cannot_be_claimed_and_a_stale_one_neither() {
        let slot = slot(0);
        let g = Generation::ZERO.next();
        slot.grant(g);
        assert_eq!(slot.revoke(g), Revoke::Revoked);
        assert_eq!(slot.claim(g), Claim::Revoked);
        slot.grant(g.next());
        assert_eq!(slot.claim(g), Claim::Stale);
        assert_eq!(slot.claim(g.next().next()), Claim::Stale);
        assert_eq!(slot.claim(g.next()), Claim::Held);
    }

    #[test]
    fn decode_is_total_by_class() {
        // 8 state patterns at the generations where arithmetic could go wrong stand for all 2^64
        // words: decode looks at the lowest 3 bits and shifts the rest.
        for generation in [0, 1, 2, (1 << 60) - 1, 1 << 60, (1 << 61) - 1] {
            for state in 0..8u64 {
                let word = (generation << 3) | state;
                match decode(word) {
                    Some((s, g)) => {
                        assert!(state <= 4);
                        assert_eq!(encode(s, g), word);
                    }
                    None => assert!(state > 4),
                }
            }
        }
    }

    #[test]
    fn a_word_that_nobody_of_us_writes_is_corrupt() {
        let g = Generation::new(7).expect("small");
        for word in [
            0,
            5,
            encode(SlotState::Held, g.next()),
            encode(SlotState::Revoked, g),
            u64::MAX,
        ] {
            assert_eq!(slot(word).read(g), Seen::Corrupt(word));
        }
    }
}

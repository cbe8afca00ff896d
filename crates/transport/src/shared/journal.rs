//! An entry of a pool's journal: says of one block of device memory that its contents are whole.
//!
//! A pool's memory is written for as long as its holder lives, and read by the next holder after
//! that one died. The entry of a block is four words of host memory, which holder and broker keep:
//!
//! | word | bits | written by | holds |
//! |---|---|---|---|
//! | 0, 1 | 128 | the holder's CPU | the key: what the application calls the contents |
//! | 2, the head | 63 to 32 | the holder's CPU | the generation of the block: how often it was given up to be filled |
//! | 2 | 31 | the holder's CPU | 1 if the key is of this generation |
//! | 2 | 30 to 0 | the holder's CPU | checksum of block, generation and key; 0 while bit 31 is 0 |
//! | 3, the seal | 64 | **the holder's stream** | the generation whose filling has finished |
//!
//! # States
//!
//! | state | head | seal | listed |
//! |---|---|---|---|
//! | never filled | 0 | 0 | no |
//! | open: may be filled | generation `g`, bit 31 is 0 | below `g` | no |
//! | keyed: the seal is queued | `g`, bit 31, checksum | below `g` | no |
//! | whole | `g`, bit 31, checksum | `g` | yes |
//! | corrupt | anything else | | no |
//!
//! # Protocol
//!
//! | step | who | operation | ordering |
//! |---|---|---|---|
//! | invalidate | holder's CPU, before it queues a filling | store seal 0, store head `g + 1`, fence | [`REOPENED`] Release |
//! | fill | holder's streams | work | after the fence |
//! | key | holder's CPU, once the filling is queued | store the key, store the head | stream order carries them |
//! | seal | holder's stream, behind the filling | store seal `g + 1` | stream order |
//! | look | any CPU | load seal, head, key; fence; load head again | [`LOOKED`] Acquire |
//! | still | a reader's CPU, once it has copied the block | fence, load head | [`LOOKED`] Acquire |
//!
//! A seal that was queued for an earlier generation stores that generation, which equals the head's
//! no more. A holder that dies between any two steps leaves a seal that differs from the head's
//! generation, or no bit 31. Its queued work has ended before another process may be the holder:
//! proof of death covers that.
//!
//! **Readers** beside a living holder copy between `look` and `still`: if `still` says yes, the
//! whole copy is of the generation that `look` found. They must use what they copied only then.
//!
//! **What it does not cover.** The holder orders its fillings of one block: two on unordered streams
//! write the same bytes at once, with or without a journal. A seal orders nothing that the holder
//! did not queue before it on that stream. A process that has the file can write anything, and so
//! can a bit that flips: no value makes a reader panic or read outside of the entry, the checksum
//! finds all but one accident in 2^31, and what is corrupt is not listed. Malice is not found: the
//! file's descriptor is permission to write.
//!
//! A generation is used once: [`LAST`] can be sealed and not be followed.
//!
//! Checked by `tests/loom_journal.rs`: weakening `REOPENED` or `LOOKED` to Relaxed fails it.
//! Deaths at every store, in every order of CPU and streams: `broker`'s `pool/table_tests.rs`.

use std::sync::atomic::Ordering;

use crate::shared::word::{NamedOrdering, Tally};

/// Before a filling: who sees any of its bytes sees the head that was stored before it.
pub const REOPENED: NamedOrdering = NamedOrdering::new("reopened", Ordering::Release);
/// Pairs with the stream's store of the seal, which was loaded before it: what was written before
/// that is there to be read. And what was read before it, a key or a block's bytes, is of the head
/// that is read behind it.
pub const LOOKED: NamedOrdering = NamedOrdering::new("looked", Ordering::Acquire);

/// The last generation of a block.
pub const LAST: u32 = u32::MAX;
/// Words of an entry.
pub const WORDS: usize = 4;
/// The word of an entry that a stream writes.
pub const SEAL_WORD: usize = 3;

const KEYED: u64 = 1 << 31;

/// Names a block's contents: 128 bits of the application's.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Key(pub [u8; 16]);

/// What a look found: a block whose contents are whole.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Whole {
    /// What the contents are called.
    pub key: Key,
    /// Their generation.
    pub generation: u32,
    head: u64,
}

impl Whole {
    /// Makes what a look finds in a block that has this key in this generation.
    pub fn of(block: u32, key: Key, generation: u32) -> Whole {
        Whole {
            key,
            generation,
            head: keyed(block, generation, halves(key)),
        }
    }
}

/// The entry of one block.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Entry<W> {
    key: [W; 2],
    head: W,
    seal: W,
}

impl<W: Tally> Entry<W> {
    /// Makes one of four words that hold 0.
    pub fn new(word: impl Fn() -> W) -> Entry<W> {
        Entry {
            key: [word(), word()],
            head: word(),
            seal: word(),
        }
    }

    /// Returns the generation that the head has, whatever else is there. For a new holder: its own
    /// generations begin above it.
    pub fn generation(&self) -> u32 {
        (self.head.load(Ordering::Relaxed) >> 32) as u32
    }

    /// Gives the contents up. The block may be filled when this has returned.
    pub fn invalidate(&self, next: u32) {
        // What a corrupt seal says must not become true when the generation comes that it names.
        self.seal.store(0, Ordering::Relaxed);
        self.head.store(u64::from(next) << 32, Ordering::Relaxed);
        W::fence(REOPENED.get());
    }

    /// Says what the contents of a generation are called. Returns the value that the stream stores
    /// in the seal behind the filling.
    pub fn key(&self, block: u32, generation: u32, key: Key) -> u64 {
        let halves = halves(key);
        for (word, half) in self.key.iter().zip(halves) {
            word.store(half, Ordering::Relaxed);
        }
        let head = keyed(block, generation, halves);
        self.head.store(head, Ordering::Relaxed);
        u64::from(generation)
    }

    /// Stores the seal as a stream does, on a device whose streams write no words: the caller has
    /// waited for the filling.
    pub fn seal_here(&self, value: u64) {
        self.seal.store(value, Ordering::Release);
    }

    /// Says what the block holds, if that is whole.
    pub fn look(&self, block: u32) -> Option<Whole> {
        let seal = self.seal.load(Ordering::Relaxed);
        let head = self.head.load(Ordering::Relaxed);
        let halves = [0, 1].map(|half: usize| self.key[half].load(Ordering::Relaxed));
        let generation = (head >> 32) as u32;
        let is_sealed = generation > 0 && seal == u64::from(generation);
        let whole = Whole::of(block, key_of(halves), generation);
        // A key of the next generation may have been read.
        (is_sealed && head == whole.head && self.is_still(&whole)).then_some(whole)
    }

    /// Says whether the block was whole all along since the look, so that what was copied between is
    /// what the look found.
    pub fn is_still(&self, found: &Whole) -> bool {
        W::fence(LOOKED.get());
        self.head.load(Ordering::Relaxed) == found.head
    }
}

fn halves(key: Key) -> [u64; 2] {
    let whole = u128::from_le_bytes(key.0);
    [whole as u64, (whole >> 64) as u64]
}

fn key_of([low, high]: [u64; 2]) -> Key {
    Key((u128::from(high) << 64 | u128::from(low)).to_le_bytes())
}

/// Returns the head of an entry that has a key.
fn keyed(block: u32, generation: u32, [low, high]: [u64; 2]) -> u64 {
    let mut bytes = [0; 24];
    bytes[..4].copy_from_slice(&block.to_le_bytes());
    bytes[4..8].copy_from_slice(&generation.to_le_bytes());
    bytes[8..16].copy_from_slice(&low.to_le_bytes());
    bytes[16..].copy_from_slice(&high.to_le_bytes());
    let sum = u64::from(crc32c::crc32c(&bytes)) & (KEYED - 1);
    u64::from(generation) << 32 | KEYED | sum
}

#[cfg(all(test, not(gpu_ipc_loom)))]
mod tests {
    use std::sync::atomic::AtomicU64;

    use proptest::prelude::*;

    use super::*;

    const KEY: Key = Key([7; 16]);

    fn entry(words: [u64; WORDS]) -> Entry<AtomicU64> {
        let [low, high, head, seal] = words.map(AtomicU64::new);
        Entry {
            key: [low, high],
            head,
            seal,
        }
    }

    fn words(entry: &Entry<AtomicU64>) -> [u64; WORDS] {
        let [low, high] = &entry.key;
        [low, high, &entry.head, &entry.seal].map(|word| word.load(Ordering::Relaxed))
    }

    #[test]
    fn a_block_is_whole_from_its_seal_to_the_next_filling() {
        let entry = entry([0; WORDS]);
        assert_eq!(entry.look(5), None, "never filled");
        entry.invalidate(1);
        assert_eq!(entry.look(5), None, "open");
        let value = entry.key(5, 1, KEY);
        assert_eq!(entry.look(5), None, "keyed");
        entry.seal_here(value);
        let found = entry.look(5).expect("whole");
        assert_eq!((found.key, found.generation), (KEY, 1));
        assert!(entry.is_still(&found));
        assert_eq!(entry.look(6), None, "the entry of another block");
        entry.invalidate(2);
        assert!(entry.look(5).is_none() && !entry.is_still(&found));
        // A seal that was queued before comes late.
        entry.seal_here(1);
        let value = entry.key(5, 2, KEY);
        assert_eq!(entry.look(5), None);
        entry.seal_here(value);
        assert_eq!(entry.look(5).map(|found| found.generation), Some(2));
    }

    #[test]
    fn a_seal_that_names_a_generation_to_come_does_not_seal_it() {
        let entry = entry([0, 0, 0, 1]);
        entry.invalidate(1);
        entry.key(0, 1, KEY);
        assert_eq!(entry.look(0), None);
    }

    #[test]
    fn the_last_generation_can_be_sealed() {
        let entry = entry([0; WORDS]);
        entry.invalidate(LAST);
        let value = entry.key(0, LAST, KEY);
        entry.seal_here(value);
        assert_eq!(entry.look(0).map(|found| found.generation), Some(LAST));
        assert_eq!(entry.generation(), LAST);
    }

    proptest! {
        /// Whatever lies in an entry: no panic. One bit that is another in a whole one: not listed.
        #[test]
        fn what_is_corrupt_is_not_listed(
            anything: [u64; WORDS], key: [u8; 16], block: u32, generation in 1u32.., bit in 0usize..64 * WORDS,
        ) {
            let _ = entry(anything).look(block);
            let whole = entry([0; WORDS]);
            let value = whole.key(block, generation, Key(key));
            whole.seal_here(value);
            prop_assert!(whole.look(block).is_some());
            let mut flipped = words(&whole);
            flipped[bit / 64] ^= 1 << (bit % 64);
            prop_assert_eq!(entry(flipped).look(block), None);
        }
    }
}

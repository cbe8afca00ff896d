//! From the address of a chunk in use to its number: five to six bytes a chunk.

use super::chunk::{ChunkId, Chunks};

/// Slots of one bucket: with the header they fill a cache line.
const SLOTS: usize = 15;

/// Slots in use, of a hundred, beyond which the table grows.
const FULLEST: usize = 84;

/// Buckets up to which a table doubles: 4 KiB.
const SMALL: usize = 64;

/// A hash table from addresses to chunks, in buckets of one cache line.
///
/// A slot holds the chunk's number and, in the bits that numbers do not need yet, a part of the
/// address' hash, so that the chunks themselves are only read where that part fits. The address is
/// in the chunk and nowhere else.
///
/// A chunk whose bucket is full goes to the next one with room. Each bucket counts the chunks that
/// had to pass it, so that removing leaves no mark behind and a search ends at a bucket that nobody
/// passed.
#[derive(Default)]
pub(crate) struct Addresses {
    buckets: Vec<Bucket>,
    len: usize,
    /// Bits of a slot that hold the number.
    number_bits: u32,
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Bucket {
    slots: [u32; SLOTS],
    /// A bit for each slot that holds a chunk.
    held: u16,
    /// Chunks that went on to a later bucket because this one was full.
    passed: u16,
}
const _: () = assert!(size_of::<Bucket>() == 64);

const EMPTY: Bucket = Bucket {
    slots: [0; SLOTS],
    held: 0,
    passed: 0,
};

impl Bucket {
    /// Lists the slots that hold a chunk.
    fn held(self) -> impl Iterator<Item = u32> {
        (0..SLOTS)
            .filter(move |slot| self.held >> slot & 1 == 1)
            .map(move |slot| self.slots[slot])
    }
}

impl Addresses {
    /// Notes a chunk under the unit that it starts at.
    #[inline]
    pub(crate) fn insert(&mut self, chunks: &Chunks, id: ChunkId, start: u64) {
        if self.buckets.is_empty()
            || self.len * 100 >= self.buckets.len() * SLOTS * FULLEST
            || id.0 >> self.number_bits != 0
        {
            self.grow(chunks);
        }
        self.place(start, id);
        self.len += 1;
    }

    /// Finds the chunk that starts at this unit, if it was inserted.
    pub(crate) fn get(&self, chunks: &Chunks, start: u64) -> Option<ChunkId> {
        self.find(chunks, start).map(|(_, _, id)| id)
    }

    /// Forgets the chunk that starts at this unit and returns it.
    #[inline]
    pub(crate) fn remove(&mut self, chunks: &Chunks, start: u64) -> Option<ChunkId> {
        let (at, slot, id) = self.find(chunks, start)?;
        self.buckets[at].held &= !(1 << slot);
        let mut passed = self.home(hash(start));
        while passed != at {
            self.buckets[passed].passed -= 1;
            passed = self.after(passed);
        }
        self.len -= 1;
        Some(id)
    }

    pub(crate) fn bookkeeping(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>()
    }

    #[inline]
    fn find(&self, chunks: &Chunks, start: u64) -> Option<(usize, usize, ChunkId)> {
        if self.buckets.is_empty() {
            return None;
        }
        let hash = hash(start);
        let tag = self.tag(hash);
        let mut at = self.home(hash);
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            let mut hits = 0u32;
            for (slot, &entry) in bucket.slots.iter().enumerate() {
                hits |= u32::from(entry >> self.number_bits == tag) << slot;
            }
            hits &= u32::from(bucket.held);
            while hits != 0 {
                let slot = hits.trailing_zeros() as usize;
                hits &= hits - 1;
                let id = ChunkId(bucket.slots[slot] & ((1 << self.number_bits) - 1));
                if chunks[id].start() == start {
                    return Some((at, slot, id));
                }
            }
            if bucket.passed == 0 {
                return None;
            }
            at = self.after(at);
        }
        None
    }

    #[inline]
    fn place(&mut self, start: u64, id: ChunkId) {
        let hash = hash(start);
        let entry = self.tag(hash) << self.number_bits | id.0;
        let mut at = self.home(hash);
        loop {
            let bucket = &mut self.buckets[at];
            let slot = bucket.held.trailing_ones() as usize;
            if slot < SLOTS {
                bucket.slots[slot] = entry;
                bucket.held |= 1 << slot;
                return;
            }
            bucket.passed += 1;
            at = self.after(at);
        }
    }

    /// Makes room, by an eighth once a table is no longer small, and gives numbers the bits that
    /// they need.
    #[cold]
    fn grow(&mut self, chunks: &Chunks) {
        let old = std::mem::take(&mut self.buckets);
        let old_bits = self.number_bits;
        self.number_bits = (usize::BITS - chunks.numbers().leading_zeros()).clamp(12, 31);
        let buckets = if self.len * 100 >= old.len() * SLOTS * FULLEST {
            old.len() + (old.len() / 8).max(old.len().min(SMALL) + 1)
        } else {
            old.len()
        };
        self.buckets = Vec::with_capacity(buckets);
        self.buckets.resize(buckets, EMPTY);
        for entry in old.iter().flat_map(|bucket| bucket.held()) {
            let id = ChunkId(entry & ((1 << old_bits) - 1));
            self.place(chunks[id].start(), id);
        }
    }

    fn home(&self, hash: u64) -> usize {
        (((hash >> 32) * self.buckets.len() as u64) >> 32) as usize
    }

    fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() {
            0
        } else {
            bucket + 1
        }
    }

    fn tag(&self, hash: u64) -> u32 {
        hash as u32 >> self.number_bits
    }
}

/// Spreads addresses, which come in steps and in runs, over 64 bits.
fn hash(start: u64) -> u64 {
    let product = u128::from(start ^ 0x9e37_79b9_7f4a_7c15) * 0xa076_1d64_78bd_642f;
    (product >> 64) as u64 ^ product as u64
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::super::chunk::Chunk;
    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_is_a_map(ops in prop::collection::vec((0u8..5, 0u64..3000), 1..5000)) {
            let (mut chunks, mut addresses) = (Chunks::default(), Addresses::default());
            let mut map = HashMap::new();
            for (what, start) in ops {
                match what {
                    0..=2 => {
                        if let std::collections::hash_map::Entry::Vacant(row) = map.entry(start) {
                            let id = chunks.insert(Chunk::free(start, 0, 1));
                            addresses.insert(&chunks, id, start);
                            row.insert(id);
                        }
                    }
                    3 => {
                        let id = map.remove(&start);
                        prop_assert_eq!(addresses.remove(&chunks, start), id);
                        id.into_iter().for_each(|id| chunks.remove(id));
                    }
                    _ => prop_assert_eq!(addresses.get(&chunks, start), map.get(&start).copied()),
                }
            }
            for (start, id) in map {
                prop_assert_eq!(addresses.remove(&chunks, start), Some(id));
            }
            prop_assert_eq!(addresses.len, 0);
            prop_assert!(addresses.buckets.iter().all(|bucket| bucket.held == 0 && bucket.passed == 0));
        }
    }
}

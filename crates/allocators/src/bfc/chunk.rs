//! The table of chunks: 32 bytes each, linked in the order of their addresses.

use std::ops::{Index, IndexMut};

/// Sizes and addresses are counted in units of this many bytes.
pub(crate) const UNIT: u64 = 256;

/// The most bytes of one chunk: its units fill 32 bits.
pub(crate) const MAX_CHUNK: u64 = u32::MAX as u64 * UNIT;

/// The most bytes that an address may have before it: an address in units fills 48 bits.
pub(crate) const MAX_ADDRESS: u64 = 1 << 56;

/// Numbers a chunk in its table. Used again after the chunk is gone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct ChunkId(pub(crate) u32);

impl ChunkId {
    /// No chunk.
    pub(crate) const NONE: ChunkId = ChunkId(u32::MAX);

    pub(crate) fn is_none(self) -> bool {
        self == ChunkId::NONE
    }
}

/// Where a chunk stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Standing {
    /// In no use; the index of free chunks has it.
    Free,
    /// Handed out.
    Used,
    /// Given back, but work that was queued before may still touch it, or somebody waits for it.
    Pending,
}

/// A piece of a region, as long as its neighbours leave it.
///
/// Half a cache line, since a pool of 80 GiB has millions of them.
#[derive(Clone, Copy)]
pub(crate) struct Chunk {
    /// The first unit in the low 48 bits, the region in the rest.
    place: u64,
    /// The number of the allocation above, the standing in the low two bits.
    number: u64,
    /// Its units.
    pub(crate) units: u32,
    /// Bytes of it beyond what was asked for.
    pub(crate) slack: u32,
    /// The chunk that ends where this begins, in the same region.
    pub(crate) prev: ChunkId,
    /// The chunk that begins where this ends, in the same region.
    pub(crate) next: ChunkId,
}
const _: () = assert!(size_of::<Chunk>() == 32);

impl Chunk {
    /// Describes a free chunk with no neighbours.
    pub(crate) fn free(start: u64, region: u16, units: u32) -> Chunk {
        debug_assert!(start < 1 << 48);
        Chunk {
            place: u64::from(region) << 48 | start,
            number: Standing::Free as u64,
            units,
            slack: 0,
            prev: ChunkId::NONE,
            next: ChunkId::NONE,
        }
    }

    /// Returns its first unit.
    pub(crate) fn start(&self) -> u64 {
        self.place & ((1 << 48) - 1)
    }

    pub(crate) fn region(&self) -> u16 {
        (self.place >> 48) as u16
    }

    pub(crate) fn standing(&self) -> Standing {
        match self.number & 3 {
            0 => Standing::Free,
            1 => Standing::Used,
            _ => Standing::Pending,
        }
    }

    /// Returns the number of the allocation that has or had it, from 1; 0 before the first.
    pub(crate) fn number(&self) -> u64 {
        self.number >> 2
    }

    /// Hands it out as allocation `number` of `asked` bytes.
    pub(crate) fn hand_out(&mut self, number: u64, asked: u64) {
        self.number = number << 2 | Standing::Used as u64;
        self.slack = (self.bytes() - asked) as u32;
    }

    pub(crate) fn set_standing(&mut self, standing: Standing) {
        self.number = self.number & !3 | standing as u64;
    }

    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.units) * UNIT
    }

    /// Returns the bytes that were asked for.
    pub(crate) fn asked(&self) -> u64 {
        self.bytes() - u64::from(self.slack)
    }
}

/// Every chunk of a heap, with the numbers of those that are gone to be used again.
#[derive(Default)]
pub(crate) struct Chunks {
    chunks: Vec<Chunk>,
    /// The first number to use again; the next one is in that chunk's `next`.
    unused: Option<ChunkId>,
}

impl Chunks {
    #[inline(always)]
    pub(crate) fn insert(&mut self, chunk: Chunk) -> ChunkId {
        if let Some(id) = self.unused {
            let place = &mut self[id];
            let next = place.next;
            // Field by field: a processor that has to put a wide load together from narrow stores
            // waits for them.
            place.place = chunk.place;
            place.number = chunk.number;
            place.units = chunk.units;
            place.slack = chunk.slack;
            place.prev = chunk.prev;
            place.next = chunk.next;
            self.unused = (!next.is_none()).then_some(next);
            return id;
        }
        self.append(chunk)
    }

    #[cold]
    fn append(&mut self, chunk: Chunk) -> ChunkId {
        if self.chunks.len() == self.chunks.capacity() {
            // A thirty-second at a time: doubling would leave half of it unused at its largest.
            self.chunks.reserve_exact((self.chunks.len() / 32).max(64));
        }
        // The table of addresses has 31 bits for a number. At 32 bytes a chunk that is 64 GiB of
        // chunks.
        assert!(
            self.chunks.len() < (1 << 31) - 2,
            "more chunks than can be numbered"
        );
        let id = ChunkId(self.chunks.len() as u32);
        self.chunks.push(chunk);
        id
    }

    pub(crate) fn remove(&mut self, id: ChunkId) {
        let next = self.unused.unwrap_or(ChunkId::NONE);
        self[id].next = next;
        self[id].set_standing(Standing::Free);
        self.unused = Some(id);
    }

    /// Returns how many numbers were given out at most at one time.
    pub(crate) fn numbers(&self) -> usize {
        self.chunks.len()
    }

    pub(crate) fn bookkeeping(&self) -> usize {
        self.chunks.capacity() * size_of::<Chunk>()
    }
}

impl Index<ChunkId> for Chunks {
    type Output = Chunk;

    fn index(&self, id: ChunkId) -> &Chunk {
        &self.chunks[id.0 as usize]
    }
}

impl IndexMut<ChunkId> for Chunks {
    fn index_mut(&mut self, id: ChunkId) -> &mut Chunk {
        &mut self.chunks[id.0 as usize]
    }
}

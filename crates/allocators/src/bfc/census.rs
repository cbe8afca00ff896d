//! What a snapshot shows of a heap.

use super::chunk::{Chunk, Standing, UNIT};
use super::core::Core;
use super::heap::Heap;
use super::window::Window;
use crate::SubAllocator;
use crate::snapshot::{ChunkSnapshot, ChunkState, RegionSnapshot, Snapshot};

impl<U: SubAllocator> Core<U> {
    /// Counts the extents, and sums up those that upstream may not free.
    pub(crate) fn regions(&self) -> (u64, u64) {
        let state = self.state();
        let parts = || {
            state
                .heap
                .regions
                .numbers()
                .flat_map(|number| &state.heap.regions[number].parts)
        };
        let kept = parts().filter(|(_, token)| !self.upstream.may_free(token));
        (
            parts().count() as u64,
            kept.map(|(extent, _)| extent.len).sum(),
        )
    }

    /// Lists what upstream said of the extents that these addresses of one region lie in.
    pub(crate) fn tokens(&self, start: u64, end: u64) -> Vec<U::Token> {
        self.state().heap.tokens(start, end)
    }

    /// Says how many chunks there were at most at one time.
    pub(crate) fn numbers(&self) -> usize {
        self.state().heap.chunks.numbers()
    }

    /// Lists the regions without their chunks.
    pub(crate) fn outline(&self) -> Snapshot {
        self.list(|_, _| Vec::new())
    }

    /// Lists every region and chunk as they are at this moment. Holds the lock while it does.
    pub(crate) fn snapshot(&self) -> Snapshot {
        self.list(|heap, number| {
            heap.chunks_of(number)
                .map(|(_, chunk)| describe(chunk))
                .collect()
        })
    }

    fn list(&self, chunks_of: impl Fn(&Heap<U::Token>, u16) -> Vec<ChunkSnapshot>) -> Snapshot {
        let state = self.state();
        let heap = &state.heap;
        let regions = heap.regions.numbers().map(|number| {
            let region = &heap.regions[number];
            RegionSnapshot {
                base: region.start * UNIT,
                len: region.units * UNIT,
                pinned: region
                    .parts
                    .iter()
                    .any(|(_, token)| !self.upstream.may_free(token)),
                chunks: chunks_of(heap, number),
            }
        });
        Snapshot {
            name: self.options.name.clone(),
            stats: state
                .counters
                .stats(self.options.limit, heap.largest_free()),
            asked_bytes: state.counters.asked,
            pending_bytes: state.pending.bytes() + state.window.as_ref().map_or(0, Window::bytes),
            leaked_bytes: state.counters.leaked,
            bookkeeping_bytes: heap.bookkeeping() as u64,
            regions: regions.collect(),
            ..Snapshot::default()
        }
    }
}

fn describe(chunk: &Chunk) -> ChunkSnapshot {
    let state = match chunk.standing() {
        Standing::Free => ChunkState::Free,
        Standing::Used => ChunkState::Used,
        Standing::Pending => ChunkState::Pending,
    };
    let (asked, number) = match state {
        ChunkState::Free => (0, 0),
        ChunkState::Used | ChunkState::Pending => (chunk.asked(), chunk.number()),
    };
    ChunkSnapshot {
        address: chunk.start() * UNIT,
        len: chunk.bytes(),
        asked,
        number,
        state,
    }
}

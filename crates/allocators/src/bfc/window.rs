//! Bytes that are kept together for a request that waits, so that smaller ones cannot starve it.
//!
//! A large request that waits needs neighbouring bytes to be free at the same moment. Small
//! requests that come and go take pieces of what is free over and over. So a request that was woken
//! in vain several times gets a *window*: a run of chunks with as little in use as possible. What
//! is free of it, and what is freed in it, is withheld from others until all of it is there.
//!
//! There is one window at a time. One that nothing came to for a while is given up: the holders of
//! the rest may wait for what is withheld.
//!
//! A request that may not wait, and one at its deadline, *breaks* the window when nothing else is
//! left: it takes free memory rather than fail. Requests that come often enough would so starve the
//! one that waits for ever. After [`PASSERS`] broken windows the next window of the same request is
//! *closed*: it is not broken, and a request that finds nothing else fails, as it would if the
//! waiting request had its memory. A closed window ends as the others do: whole, given up, or with
//! its request. One that was given up is followed by open ones again, up to the same number.

use super::chunk::{Chunk, ChunkId, Standing, UNIT};
use super::heap::Heap;

/// How many windows of a request others break before the next is closed to them.
pub(crate) const PASSERS: u32 = 16;

/// A run of whole chunks of a region.
pub(crate) struct Window {
    /// The ticket of the request it is for.
    ticket: u64,
    /// No other request breaks it.
    closed: bool,
    region: u16,
    /// The first unit, and the one after the last.
    start: u64,
    end: u64,
    /// What is withheld: in no index, and nobody's.
    held: Vec<ChunkId>,
    held_units: u64,
}

impl Window {
    /// Chooses the run of at least `units` units with the least in use, and withholds its free
    /// chunks; `None` when no region is large enough. Allocations up to the number `began` have
    /// outlasted the wait so far; others have `broken` so many windows of the request before.
    pub(crate) fn open<T>(
        heap: &mut Heap<T>,
        ticket: u64,
        units: u64,
        began: u64,
        broken: u32,
    ) -> Option<Window> {
        let (region, start, end) = cheapest(heap, units, began)?;
        let (start, end) = narrow(heap, (region, start, end), units);
        let mut window = Window {
            ticket,
            closed: broken >= PASSERS,
            region,
            start,
            end,
            held: Vec::new(),
            held_units: 0,
        };
        let is_free = |heap: &Heap<T>, id| heap.chunks[id].standing() == Standing::Free;
        let inside: Vec<ChunkId> = heap.chunks_of(region).map(|(id, _)| id).collect();
        for id in inside {
            if window.covers(heap, id) && is_free(heap, id) {
                heap.withhold(id);
                window.keep(heap, id);
            }
        }
        Some(window)
    }

    pub(crate) fn is_of(&self, ticket: u64) -> bool {
        self.ticket == ticket
    }

    /// Says whether requests that may not wait leave it alone.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Says whether a chunk lies in it. Chunks lie in it wholly or not at all: none merges across
    /// its ends.
    pub(crate) fn covers<T>(&self, heap: &Heap<T>, id: ChunkId) -> bool {
        let chunk = &heap.chunks[id];
        chunk.region() == self.region && (self.start..self.end).contains(&chunk.start())
    }

    /// Withholds a chunk that is in no index.
    pub(crate) fn keep<T>(&mut self, heap: &mut Heap<T>, id: ChunkId) {
        let chunk = &mut heap.chunks[id];
        chunk.set_standing(Standing::Pending);
        self.held_units += u64::from(chunk.units);
        self.held.push(id);
    }

    /// Says whether nothing of it is in use.
    pub(crate) fn is_whole(&self) -> bool {
        self.held_units == self.end - self.start
    }

    /// Returns the bytes that are withheld.
    pub(crate) fn bytes(&self) -> u64 {
        self.held_units * UNIT
    }

    /// Makes free what was withheld.
    pub(crate) fn dissolve<T>(self, heap: &mut Heap<T>) {
        for id in self.held {
            heap.release(id);
        }
    }
}

/// Splits the excess off one end of a free run; returns the units that are left.
fn narrow<T>(heap: &mut Heap<T>, (region, start, end): (u16, u64, u64), units: u64) -> (u64, u64) {
    let excess = end - start - units;
    let at_end = |start_of: Option<u64>, end_of: Option<u64>| {
        let is_it = |chunk: &Chunk| {
            let chunk_end = chunk.start() + u64::from(chunk.units);
            start_of.is_none_or(|start| chunk.start() == start)
                && end_of.is_none_or(|end| chunk_end == end)
        };
        let mut chunks = heap.chunks_of(region);
        chunks
            .find(|(_, chunk)| is_it(chunk) && chunk.standing() == Standing::Free)
            .map(|(id, _)| id)
    };
    if excess == 0 {
        (start, end)
    } else if let Some(last) = at_end(None, Some(end)) {
        heap.split(last, heap.chunks[last].units - excess as u32);
        (start, end - excess)
    } else if let Some(first) = at_end(Some(start), None) {
        heap.split(first, excess as u32);
        (start + excess, end)
    } else {
        (start, end)
    }
}

/// How much more a unit counts that has been in use for longer than the request has waited: it may
/// stay for ever.
const OLD: u64 = 1 << 10;

/// Finds the run with the least in use, as a region and its units.
fn cheapest<T>(heap: &Heap<T>, units: u64, began: u64) -> Option<(u16, u64, u64)> {
    let mut best: Option<(u64, (u16, u64, u64))> = None;
    for region in heap
        .regions
        .numbers()
        .filter(|&region| heap.regions[region].units >= units)
    {
        let cost_of = |chunk: &Chunk| match chunk.standing() {
            Standing::Free => 0,
            _ if chunk.number() <= began => u64::from(chunk.units) * OLD,
            _ => u64::from(chunk.units),
        };
        // Start, units, cost.
        let chunks: Vec<(u64, u64, u64)> = heap
            .chunks_of(region)
            .map(|(_, chunk)| (chunk.start(), u64::from(chunk.units), cost_of(chunk)))
            .collect();
        let (mut first, mut length, mut cost) = (0, 0, 0);
        for chunk in &chunks {
            length += chunk.1;
            cost += chunk.2;
            while length - chunks[first].1 >= units {
                length -= chunks[first].1;
                cost -= chunks[first].2;
                first += 1;
            }
            if length >= units && best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, (region, chunks[first].0, chunk.0 + chunk.1)));
            }
        }
    }
    best.map(|(_, run)| run)
}

//! Best fit with coalescing over regions, as numbers and for one thread.

// Tests: `crates/allocators/tests/bfc_model.rs`, `crates/allocators/tests/bfc_conformance.rs`,
// `crates/allocators/tests/streams.rs`.

use super::addresses::Addresses;
use super::chunk::{Chunk, ChunkId, Chunks, MAX_ADDRESS, MAX_CHUNK, Standing, UNIT};
use super::free_chunk::FreeChunk;
use super::index::{Cursor, Index};
use super::region::{Region, Regions};
use crate::Extent;

/// How many chunks that might be aligned by luck are looked at before one that is large enough
/// whatever its address.
const LUCK: u32 = 64;

/// Of a share. A power of two, so that a multiplication is a shift.
const WHOLE: u64 = 1024;

/// What to look for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fit {
    pub(crate) asked: u64,
    units: u32,
    /// In units.
    align: u64,
}

impl Fit {
    /// Rounds `bytes` for a request of `asked` up to units; `None` when no chunk can hold them.
    /// `align` is a power of two.
    #[inline]
    pub(crate) fn new(asked: u64, bytes: u64, align: u64) -> Option<Fit> {
        if align > MAX_CHUNK {
            return None;
        }
        let units = bytes.checked_next_multiple_of(UNIT)? / UNIT;
        Some(Fit {
            asked,
            units: u32::try_from(units).ok()?,
            align: (align / UNIT).max(1),
        })
    }

    pub(crate) fn units(self) -> u32 {
        self.units
    }

    pub(crate) fn align_bytes(self) -> u64 {
        self.align.saturating_mul(UNIT)
    }

    /// Returns the bytes of the smallest chunk that holds it.
    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.units) * UNIT
    }

    /// Returns the bytes that hold it wherever they start; `None` beyond what a number can say.
    pub(crate) fn bytes_anywhere(self) -> Option<u64> {
        self.bytes()
            .checked_add((self.align - 1).checked_mul(UNIT)?)
    }
}

/// A chunk that was handed out or given back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handed {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) asked: u64,
    pub(crate) number: u64,
    pub(crate) region: u16,
}

/// Why a region was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unfit {
    /// It is beyond what addresses can be.
    Far,
    /// It overlaps one that is there.
    Overlap,
    /// It holds no whole unit.
    Small,
    /// There are too many.
    Many,
}

/// Regions, the chunks that they are cut into, and where those are found.
pub(crate) struct Heap<T> {
    pub(crate) chunks: Chunks,
    pub(crate) regions: Regions<T>,
    addresses: Addresses,
    index: Index,
    /// The last allocation's number.
    number: u64,
    /// Bytes from which on slack is cut off whatever the chunk's size.
    max_slack: u64,
    /// The share of what is needed from which on slack is cut off, in parts of [`WHOLE`].
    max_share: u64,
    /// The units of the largest chunk that is cut up.
    max_split: u32,
}

impl<T> Heap<T> {
    pub(crate) fn new(max_slack: u64, max_share: f64, max_split: Option<u64>) -> Heap<T> {
        Heap {
            chunks: Chunks::default(),
            regions: Regions::default(),
            addresses: Addresses::default(),
            index: Index::default(),
            number: 0,
            // Slack has 32 bits in a chunk.
            max_slack: max_slack.clamp(UNIT, u64::from(u32::MAX) - 2 * UNIT),
            max_share: (max_share.clamp(0.0, 1.0) * WHOLE as f64) as u64,
            max_split: max_split
                .and_then(|bytes| u32::try_from(bytes / UNIT).ok())
                .unwrap_or(u32::MAX),
        }
    }

    /// Returns the number of the last allocation.
    pub(crate) fn last_number(&self) -> u64 {
        self.number
    }

    /// Adds what upstream gave, merged with the region before it when `merges`.
    pub(crate) fn add(&mut self, extent: Extent, token: T, merges: bool) -> Result<(), (Unfit, T)> {
        let start = extent.base.div_ceil(UNIT);
        let Some(end) = extent
            .base
            .checked_add(extent.len)
            .filter(|&end| end <= MAX_ADDRESS)
            .map(|end| end / UNIT)
        else {
            return Err((Unfit::Far, token));
        };
        if end <= start {
            return Err((Unfit::Small, token));
        }
        let units = end - start;
        if self.regions.overlaps(start, units) {
            return Err((Unfit::Overlap, token));
        }
        let whole = extent.base.is_multiple_of(UNIT);
        let before = (merges && whole)
            .then(|| self.regions.ends_at(start))
            .flatten();
        let number = match before {
            Some(number) => {
                let region = &mut self.regions[number];
                region.units += units;
                region.parts.push((extent, token));
                number
            }
            None => {
                let (first, last) = (ChunkId::NONE, ChunkId::NONE);
                let region = Region {
                    start,
                    units,
                    first,
                    last,
                    parts: vec![(extent, token)],
                };
                match self.regions.insert(region) {
                    Ok(number) => number,
                    Err(mut region) => {
                        let (_, token) = region.parts.pop().expect("the part that was pushed");
                        return Err((Unfit::Many, token));
                    }
                }
            }
        };
        let mut at = start;
        while at < end {
            let units = (end - at).min(MAX_CHUNK / UNIT);
            self.append(number, at, units as u32);
            at += units;
        }
        Ok(())
    }

    /// Finds the best chunk, splits off the excess, and hands it out.
    #[inline]
    pub(crate) fn take(&mut self, fit: Fit) -> Option<Handed> {
        let (cursor, entry, prefix) = self.find(fit)?;
        let mut id = entry.id();
        if entry.units() > self.max_split && !self.is_for_large(entry.units(), fit.units) {
            // The best is the smallest: all others are larger.
            return None;
        }
        if prefix > 0 {
            let rest = self.cut(id, prefix);
            self.index
                .replace_at(cursor, FreeChunk::of(id, &self.chunks[id]));
            id = rest;
            if self.is_wasted(self.chunks[id].units, fit.units) {
                let rest = self.cut(id, fit.units);
                self.index.insert(FreeChunk::of(rest, &self.chunks[rest]));
            }
        } else if self.is_wasted(entry.units(), fit.units) {
            let rest = self.cut(id, fit.units);
            self.index
                .replace_at(cursor, FreeChunk::of(rest, &self.chunks[rest]));
        } else {
            self.index.remove_at(cursor);
        }
        Some(self.hand_out(id, fit.asked))
    }

    /// Says whether a chunk that is in no index holds a request where it starts, with nothing to
    /// cut off.
    pub(crate) fn fits_whole(&self, entry: FreeChunk, fit: Fit) -> bool {
        entry.start().is_multiple_of(fit.align) && !self.is_wasted(entry.units(), fit.units)
    }

    /// Says whether a chunk that is too large to be cut up serves a request: one that is that large
    /// itself, and not much smaller than the chunk (PyTorch: 20 MiB).
    #[cold]
    fn is_for_large(&self, units: u32, needed: u32) -> bool {
        const SPARE: u32 = ((20 << 20) / UNIT) as u32;
        needed > self.max_split && units - needed < SPARE
    }

    /// Says whether a chunk is so much larger than what is needed that the rest is cut off.
    fn is_wasted(&self, units: u32, needed: u32) -> bool {
        let rest = u64::from(units - needed);
        rest > 0
            && units <= self.max_split
            && (rest * WHOLE >= u64::from(needed) * self.max_share || rest * UNIT >= self.max_slack)
    }

    /// Hands out a chunk that is in no index.
    #[inline(always)]
    pub(crate) fn hand_out(&mut self, id: ChunkId, asked: u64) -> Handed {
        self.number += 1;
        let number = self.number;
        let chunk = &mut self.chunks[id];
        chunk.hand_out(number, asked);
        let handed = handed(chunk);
        self.addresses
            .insert(&self.chunks, id, handed.address / UNIT);
        handed
    }

    /// Takes the chunk at an address out of use, without making it free; `None` for an address that
    /// was not handed out, or was given back.
    #[inline]
    pub(crate) fn withdraw(&mut self, address: u64) -> Option<(ChunkId, Handed)> {
        if !address.is_multiple_of(UNIT) {
            return None;
        }
        let id = self.addresses.remove(&self.chunks, address / UNIT)?;
        Some((id, handed(&self.chunks[id])))
    }

    /// Makes a withdrawn chunk free, and one with its free neighbours.
    #[inline]
    pub(crate) fn release(&mut self, id: ChunkId) {
        let chunk = &self.chunks[id];
        let (mut units, prev, next) = (chunk.units, chunk.prev, chunk.next);
        let mut kept = id;
        // What the neighbours were in the index, before they change.
        let mut after = None;
        let mut before = None;
        if let Some(more) = self.mergeable(next, units) {
            after = Some(FreeChunk::of(next, &self.chunks[next]));
            units += more;
            self.join(kept, next, units);
        }
        if let Some(more) = self.mergeable(prev, units) {
            before = Some(FreeChunk::of(prev, &self.chunks[prev]));
            units += more;
            self.join(prev, kept, units);
            kept = prev;
        }
        let chunk = &mut self.chunks[kept];
        chunk.set_standing(Standing::Free);
        chunk.slack = 0;
        let merged = FreeChunk::of(kept, chunk);
        match (before, after) {
            (None, None) => self.index.insert(merged),
            (Some(only), None) | (None, Some(only)) => self.index.replace(only, merged),
            (Some(before), Some(after)) => {
                // The whole is nearer to the larger.
                self.index.remove(before.min(after));
                self.index.replace(before.max(after), merged);
            }
        }
    }

    /// Splits a free chunk in two, the first of `units` units.
    pub(crate) fn split(&mut self, id: ChunkId, units: u32) {
        self.index.remove(FreeChunk::of(id, &self.chunks[id]));
        let rest = self.cut(id, units);
        for part in [id, rest] {
            self.index.insert(FreeChunk::of(part, &self.chunks[part]));
        }
    }

    /// Takes a free chunk out of the index, and makes it nobody's.
    pub(crate) fn withhold(&mut self, id: ChunkId) {
        self.index.remove(FreeChunk::of(id, &self.chunks[id]));
        self.chunks[id].set_standing(Standing::Pending);
    }

    /// Finds the chunk in use at an address.
    pub(crate) fn get(&self, address: u64) -> Option<Handed> {
        self.id_at(address).map(|id| handed(&self.chunks[id]))
    }

    /// Returns the number of the chunk in use at an address.
    pub(crate) fn id_at(&self, address: u64) -> Option<ChunkId> {
        if !address.is_multiple_of(UNIT) {
            return None;
        }
        self.addresses.get(&self.chunks, address / UNIT)
    }

    /// Finds the chunk in use that an address lies in.
    pub(crate) fn covering(&self, address: u64) -> Option<Handed> {
        let unit = address / UNIT;
        let region = self.regions.covering(unit)?;
        let (_, chunk) = self
            .chunks_of(region)
            .find(|(_, chunk)| unit < chunk.start() + u64::from(chunk.units))?;
        (chunk.standing() == Standing::Used).then(|| handed(chunk))
    }

    /// Returns what upstream said of the extent that a chunk in use starts in.
    #[inline]
    pub(crate) fn token(&self, handed: Handed) -> T
    where
        T: Clone,
    {
        let parts = &self.regions[handed.region].parts;
        let part = match &parts[..] {
            [one] => one,
            several => {
                let behind = several.partition_point(|(extent, _)| extent.base <= handed.address);
                &several[behind.saturating_sub(1)]
            }
        };
        part.1.clone()
    }

    /// Lists what upstream said of the extents that these addresses of one region lie in.
    pub(crate) fn tokens(&self, start: u64, end: u64) -> Vec<T>
    where
        T: Clone,
    {
        let Some(region) = self.regions.covering(start / UNIT) else {
            return Vec::new();
        };
        let parts = self.regions[region].parts.iter();
        parts
            .filter(|(extent, _)| extent.base < end && start < extent.end())
            .map(|(_, token)| token.clone())
            .collect()
    }

    /// Returns the bytes that [`remove_idle`](Heap::remove_idle) and
    /// [`remove_tails`](Heap::remove_tails) would take out.
    pub(crate) fn idle_bytes(&self, may_go: impl Fn(&T) -> bool) -> u64 {
        let of_region = |number| {
            let region = &self.regions[number];
            if self.is_idle(number) && region.parts.iter().all(|(_, token)| may_go(token)) {
                return region.reserved();
            }
            let last = &self.chunks[region.last];
            let is_free = |extent: &Extent| {
                last.standing() == Standing::Free && last.start() <= extent.base / UNIT
            };
            let tail = region.parts[1..].iter().rev();
            tail.take_while(|(extent, token)| is_free(extent) && may_go(token))
                .map(|(extent, _)| extent.len)
                .sum()
        };
        self.regions.numbers().map(of_region).sum()
    }

    /// Takes out the regions that no chunk is in use of and `may_go` agrees to.
    pub(crate) fn remove_idle(
        &mut self,
        mut may_go: impl FnMut(&Region<T>) -> bool,
    ) -> Vec<Region<T>> {
        let idle: Vec<u16> = self
            .regions
            .numbers()
            .filter(|&number| self.is_idle(number) && may_go(&self.regions[number]))
            .collect();
        idle.into_iter()
            .map(|number| self.remove_region(number))
            .collect()
    }

    /// Takes out the parts at the end of merged regions that no chunk is in use of and `may_go`
    /// agrees to.
    pub(crate) fn remove_tails(&mut self, mut may_go: impl FnMut(&T) -> bool) -> Vec<(Extent, T)> {
        let mut gone = Vec::new();
        let numbers: Vec<u16> = self.regions.numbers().collect();
        for number in numbers {
            while let Some((extent, token)) = self.idle_tail(number)
                && may_go(token)
            {
                self.cut_tail(number, extent.base / UNIT);
                gone.extend(self.regions[number].parts.pop());
            }
        }
        gone
    }

    /// Returns how many bytes of a request the free chunk at the very end would hold if more came
    /// behind it: fewer than all, and none where that chunk has no aligned start.
    pub(crate) fn free_at_end(&self, fit: Fit) -> u64 {
        let Some(number) = self.regions.numbers().last() else {
            return 0;
        };
        let last = &self.chunks[self.regions[number].last];
        if last.standing() != Standing::Free {
            return 0;
        }
        let start = last.start().next_multiple_of(fit.align);
        let end = last.start() + u64::from(last.units);
        end.saturating_sub(start).min(u64::from(fit.units) - 1) * UNIT
    }

    /// Returns the last of several parts of a region if it is all free.
    fn idle_tail(&self, number: u16) -> Option<(Extent, &T)> {
        let region = &self.regions[number];
        let [_, .., (extent, token)] = &region.parts[..] else {
            return None;
        };
        let last = &self.chunks[region.last];
        (last.standing() == Standing::Free && last.start() <= extent.base / UNIT)
            .then_some((*extent, token))
    }

    /// Ends a region before a unit of its last chunk, which is free.
    fn cut_tail(&mut self, number: u16, end: u64) {
        let id = self.regions[number].last;
        self.index.remove(FreeChunk::of(id, &self.chunks[id]));
        let chunk = &mut self.chunks[id];
        if chunk.start() == end {
            let prev = chunk.prev;
            self.chunks[prev].next = ChunkId::NONE;
            self.chunks.remove(id);
            self.regions[number].last = prev;
        } else {
            chunk.units = (end - chunk.start()) as u32;
            self.index.insert(FreeChunk::of(id, &self.chunks[id]));
        }
        let region = &mut self.regions[number];
        region.units = end - region.start;
    }

    /// Says whether no chunk of a region is in use or pending.
    pub(crate) fn is_idle(&self, number: u16) -> bool {
        self.chunks_of(number)
            .all(|(_, chunk)| chunk.standing() == Standing::Free)
    }

    /// Lists a region's chunks in the order of their addresses.
    pub(crate) fn chunks_of(&self, number: u16) -> impl Iterator<Item = (ChunkId, &Chunk)> + '_ {
        let mut id = self.regions[number].first;
        std::iter::from_fn(move || {
            let this = (!id.is_none()).then(|| (id, &self.chunks[id]))?;
            id = this.1.next;
            Some(this)
        })
    }

    /// Returns the bytes of the largest free chunk.
    pub(crate) fn largest_free(&self) -> u64 {
        self.index
            .largest()
            .map_or(0, |entry| u64::from(entry.units()) * UNIT)
    }

    /// Returns the bytes of host memory that the tables take.
    pub(crate) fn bookkeeping(&self) -> usize {
        self.chunks.bookkeeping() + self.addresses.bookkeeping() + self.index.bookkeeping()
    }

    #[inline(always)]
    fn find(&self, fit: Fit) -> Option<(Cursor, FreeChunk, u32)> {
        let (mut cursor, mut entry) = self.index.best(fit.units)?;
        if fit.align == 1 {
            return Some((cursor, entry, 0));
        }
        let prefix = |entry: FreeChunk| {
            let prefix = entry.start().next_multiple_of(fit.align) - entry.start();
            (prefix + u64::from(fit.units) <= u64::from(entry.units())).then_some(prefix as u32)
        };
        let mut looked = 0;
        loop {
            if let Some(prefix) = prefix(entry) {
                return Some((cursor, entry, prefix));
            }
            looked += 1;
            if looked == LUCK
                && let Ok(certain) = u32::try_from(u64::from(fit.units) + fit.align - 1)
                && let Some((cursor, entry)) = self.index.best(certain)
            {
                return prefix(entry).map(|prefix| (cursor, entry, prefix));
            }
            (cursor, entry) = self.index.after(cursor)?;
        }
    }

    /// Cuts a chunk that is in no index, so that `units` are left; returns the rest, which is free
    /// and in no index.
    fn cut(&mut self, id: ChunkId, units: u32) -> ChunkId {
        let chunk = &self.chunks[id];
        let (region, next) = (chunk.region(), chunk.next);
        let mut rest = Chunk::free(
            chunk.start() + u64::from(units),
            region,
            chunk.units - units,
        );
        (rest.prev, rest.next) = (id, next);
        let rest = self.chunks.insert(rest);
        self.relink(region, next, rest);
        let chunk = &mut self.chunks[id];
        (chunk.units, chunk.next) = (units, rest);
        rest
    }

    /// Lets `lower` have `units`, which are its own and those of `upper`, which is gone.
    fn join(&mut self, lower: ChunkId, upper: ChunkId, units: u32) {
        let next = self.chunks[upper].next;
        let chunk = &mut self.chunks[lower];
        (chunk.units, chunk.next) = (units, next);
        let region = chunk.region();
        self.relink(region, next, lower);
        self.chunks.remove(upper);
    }

    /// Notes that `before` lies before `next`, or last in its region.
    fn relink(&mut self, region: u16, next: ChunkId, before: ChunkId) {
        if next.is_none() {
            self.regions[region].last = before;
        } else {
            self.chunks[next].prev = before;
        }
    }

    /// Returns the units of a neighbour that is free and with which `units` still make one chunk.
    fn mergeable(&self, neighbour: ChunkId, units: u32) -> Option<u32> {
        if neighbour.is_none() {
            return None;
        }
        let chunk = &self.chunks[neighbour];
        (chunk.standing() == Standing::Free && chunk.units.checked_add(units).is_some())
            .then_some(chunk.units)
    }

    /// Adds a free chunk at the end of a region.
    fn append(&mut self, number: u16, start: u64, units: u32) {
        let last = self.regions[number].last;
        let mut chunk = Chunk::free(start, number, units);
        chunk.prev = last;
        let id = self.chunks.insert(chunk);
        let region = &mut self.regions[number];
        region.last = id;
        if last.is_none() {
            region.first = id;
        } else {
            self.chunks[last].next = id;
        }
        self.release(id);
    }

    fn remove_region(&mut self, number: u16) -> Region<T> {
        let chunks: Vec<ChunkId> = self.chunks_of(number).map(|(id, _)| id).collect();
        for id in chunks {
            self.index.remove(FreeChunk::of(id, &self.chunks[id]));
            self.chunks.remove(id);
        }
        self.regions.remove(number)
    }
}

fn handed(chunk: &Chunk) -> Handed {
    Handed {
        address: chunk.start() * UNIT,
        bytes: chunk.bytes(),
        asked: chunk.asked(),
        number: chunk.number(),
        region: chunk.region(),
    }
}

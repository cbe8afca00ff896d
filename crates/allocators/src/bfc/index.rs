//! Free chunks in the order of size, then address: best fit, and of several the lowest.

use std::hint::select_unpredictable;

use super::free_chunk::FreeChunk;
use super::tree::{Spot, Tree};

/// Bins of an order of size: each holds a thirty-second of it.
const BINS: usize = 32;

/// Orders of size: one for up to 31 units, each of which has a bin of its own, and one for each
/// power of two from 32 on.
const ORDERS: usize = 28;

/// The most entries that a bin has in one piece, and the most with which it returns to that.
const MOST: usize = 64;
const FEW: usize = 24;

/// Every free chunk of a heap, sorted.
///
/// Bins by size, as fine as leaves few chunks in each: finding one takes a shift and two words of
/// bits, where a search among all chunks would take a step, and a wrong guess of the processor's,
/// for each doubling of their number. Bins are made when the first chunk comes that belongs in
/// their order.
#[derive(Default)]
pub(crate) struct Index {
    orders: [Order; ORDERS],
    /// A bit for each order that has entries.
    filled: u32,
}

#[derive(Default)]
struct Order {
    bins: Vec<Bin>,
    /// A bit for each bin that has entries.
    filled: u32,
}

impl Order {
    #[cold]
    fn make_bins(&mut self) {
        self.bins.reserve_exact(BINS);
        self.bins.resize_with(BINS, || Bin::Few(Vec::new()));
    }
}

/// Sorted entries: in one piece, or many.
enum Bin {
    Few(Vec<FreeChunk>),
    Many(Box<Tree>),
}

/// Where a bin is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct BinPlace {
    order: usize,
    bin: usize,
}

/// A place in an [`Index`], good until the index is changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    place: BinPlace,
    spot: Spot,
}

/// Returns the bin of a size.
#[inline]
fn place_of(units: u32) -> BinPlace {
    // Without a branch: which way it goes cannot be foretold.
    let order = (units | (BINS as u32 - 1)).ilog2() as usize - 4;
    BinPlace {
        order,
        bin: (units >> order.saturating_sub(1)) as usize % BINS,
    }
}

/// Counts the entries below `entry`.
///
/// Without a branch on what is compared: which way it goes cannot be foretold.
#[inline]
fn rank(entries: &[FreeChunk], entry: FreeChunk) -> usize {
    let (mut low, mut count) = (0, entries.len());
    while count > 1 {
        let half = count / 2;
        low = select_unpredictable(entries[low + half - 1] < entry, low + half, low);
        count -= half;
    }
    low + usize::from(count == 1 && entries[low] < entry)
}

impl Bin {
    #[inline(always)]
    fn from(&self, entry: FreeChunk) -> Option<(Spot, FreeChunk)> {
        match self {
            Bin::Few(entries) => {
                let at = rank(entries, entry);
                entries.get(at).map(|&found| (Spot { leaf: 0, at }, found))
            }
            Bin::Many(tree) => tree.from(entry),
        }
    }

    #[inline(always)]
    fn first(&self) -> Option<(Spot, FreeChunk)> {
        match self {
            Bin::Few(entries) => entries
                .first()
                .map(|&found| (Spot { leaf: 0, at: 0 }, found)),
            Bin::Many(tree) => tree.first(),
        }
    }

    #[inline(always)]
    fn insert(&mut self, entry: FreeChunk) {
        match self {
            Bin::Few(entries) if entries.len() < MOST => {
                if entries.len() == entries.capacity() {
                    // Doubling would leave half of them unused in most bins.
                    entries.reserve_exact((entries.len() / 2).max(4));
                }
                entries.insert(rank(entries, entry), entry);
            }
            Bin::Few(entries) => {
                let mut tree = Tree::of(entries);
                tree.insert(entry);
                *self = Bin::Many(Box::new(tree));
            }
            Bin::Many(tree) => tree.insert(entry),
        }
    }

    /// Says whether it is empty after that.
    #[inline(always)]
    fn remove_at(&mut self, spot: Spot) -> bool {
        match self {
            Bin::Few(entries) => {
                entries.remove(spot.at);
                if entries.capacity() > 16 && entries.len() < entries.capacity() / 4 {
                    entries.shrink_to(entries.len() * 2);
                }
                entries.is_empty()
            }
            Bin::Many(tree) => {
                tree.remove_at(spot);
                if tree.len() <= FEW {
                    *self = Bin::Few(tree.entries().collect());
                }
                false
            }
        }
    }

    /// Puts an entry of this bin in the place of another.
    #[inline]
    fn replace_at(&mut self, spot: Spot, new: FreeChunk) {
        match self {
            // A bin of one is what the largest chunk mostly has.
            Bin::Few(entries) if entries.len() == 1 => entries[0] = new,
            Bin::Few(entries) => {
                // What lies between the two moves over by one.
                let to = rank(entries, new);
                if to > spot.at {
                    entries.copy_within(spot.at + 1..to, spot.at);
                    entries[to - 1] = new;
                } else {
                    entries.copy_within(to..spot.at, to + 1);
                    entries[to] = new;
                }
            }
            Bin::Many(tree) => tree.replace_at(spot, new),
        }
    }

    fn last(&self) -> Option<FreeChunk> {
        match self {
            Bin::Few(entries) => entries.last().copied(),
            Bin::Many(tree) => tree.last(),
        }
    }

    fn bookkeeping(&self) -> usize {
        match self {
            Bin::Few(entries) => entries.capacity() * size_of::<FreeChunk>(),
            Bin::Many(tree) => size_of::<Tree>() + tree.bookkeeping(),
        }
    }
}

impl Index {
    #[inline]
    pub(crate) fn insert(&mut self, entry: FreeChunk) {
        self.insert_at(place_of(entry.units()), entry);
    }

    fn insert_at(&mut self, place: BinPlace, entry: FreeChunk) {
        let BinPlace { order: number, bin } = place;
        let order = &mut self.orders[number];
        if order.bins.is_empty() {
            order.make_bins();
        }
        order.bins[bin].insert(entry);
        order.filled |= 1 << bin;
        self.filled |= 1 << number;
    }

    /// Takes an entry out.
    ///
    /// # Panics
    ///
    /// If it is not in: the heap would hand out bytes twice.
    #[inline]
    pub(crate) fn remove(&mut self, entry: FreeChunk) {
        self.remove_at(self.find(entry));
    }

    /// Puts an entry in the place of another.
    ///
    /// # Panics
    ///
    /// If that is not in.
    #[inline]
    pub(crate) fn replace(&mut self, old: FreeChunk, new: FreeChunk) {
        self.replace_at(self.find(old), new);
    }

    /// Puts an entry in the place of the one under a cursor: in the same bin if the order allows,
    /// which it mostly does for the largest, from which most are cut and with which most merge.
    #[inline]
    pub(crate) fn replace_at(&mut self, cursor: Cursor, new: FreeChunk) {
        let Cursor { place, spot } = cursor;
        let to = place_of(new.units());
        if to == place {
            self.orders[place.order].bins[place.bin].replace_at(spot, new);
            return;
        }
        self.remove_at(cursor);
        self.insert_at(to, new);
    }

    /// Takes the entry under a cursor out.
    #[inline]
    pub(crate) fn remove_at(&mut self, cursor: Cursor) {
        let Cursor { place, spot } = cursor;
        let order = &mut self.orders[place.order];
        if order.bins[place.bin].remove_at(spot) {
            order.filled &= !(1 << place.bin);
            if order.filled == 0 {
                self.filled &= !(1 << place.order);
            }
        }
    }

    /// Finds the smallest chunk of at least this many units, the lowest of several.
    #[inline(always)]
    pub(crate) fn best(&self, units: u32) -> Option<(Cursor, FreeChunk)> {
        let place = place_of(units);
        if self.orders[place.order].filled & 1 << place.bin != 0
            && let Some((spot, entry)) = self.bin(place).from(FreeChunk::least(units))
        {
            return Some((Cursor { place, spot }, entry));
        }
        self.first_behind(place)
    }

    /// Returns the entry after the one under a cursor.
    pub(crate) fn after(&self, cursor: Cursor) -> Option<(Cursor, FreeChunk)> {
        let Cursor { place, spot } = cursor;
        let after = match self.bin(place) {
            Bin::Few(entries) => {
                let at = spot.at + 1;
                entries.get(at).map(|&entry| (Spot { leaf: 0, at }, entry))
            }
            Bin::Many(tree) => tree.after(spot),
        };
        match after {
            Some((spot, entry)) => Some((Cursor { place, spot }, entry)),
            None => self.first_behind(place),
        }
    }

    /// Returns the largest chunk.
    pub(crate) fn largest(&self) -> Option<FreeChunk> {
        let order = self.filled.checked_ilog2()? as usize;
        let bin = self.orders[order].filled.checked_ilog2()? as usize;
        self.bin(BinPlace { order, bin }).last()
    }

    pub(crate) fn bookkeeping(&self) -> usize {
        let bins = self.orders.iter().flat_map(|order| &order.bins);
        size_of::<Index>()
            + bins
                .map(|bin| size_of::<Bin>() + bin.bookkeeping())
                .sum::<usize>()
    }

    #[inline(always)]
    fn find(&self, entry: FreeChunk) -> Cursor {
        let place = place_of(entry.units());
        let found = self.orders[place.order]
            .bins
            .get(place.bin)
            .and_then(|bin| bin.from(entry));
        let (spot, _) = found
            .filter(|&(_, found)| found == entry)
            .expect("a free chunk is in the index");
        Cursor { place, spot }
    }

    fn bin(&self, place: BinPlace) -> &Bin {
        &self.orders[place.order].bins[place.bin]
    }

    /// Returns the first entry of the bins behind one.
    #[inline(always)]
    fn first_behind(&self, place: BinPlace) -> Option<(Cursor, FreeChunk)> {
        let behind = |filled: u32, at: usize| filled & (!1 << at);
        let (order, filled) = match behind(self.orders[place.order].filled, place.bin) {
            0 => {
                let order = behind(self.filled, place.order);
                let order = (order != 0).then_some(order.trailing_zeros() as usize)?;
                (order, self.orders[order].filled)
            }
            filled => (place.order, filled),
        };
        let place = BinPlace {
            order,
            bin: filled.trailing_zeros() as usize,
        };
        let (spot, entry) = self.bin(place).first()?;
        Some((Cursor { place, spot }, entry))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::super::chunk::{Chunk, ChunkId};
    use super::*;

    fn entry(units: u32, start: u64) -> FreeChunk {
        FreeChunk::of(ChunkId(start as u32), &Chunk::free(start, 0, units))
    }

    /// Few sizes, so that bins fill, or any.
    fn size() -> impl Strategy<Value = u32> {
        prop_oneof![4 => 1u32..4, 2 => 1u32..70, 1 => 1u32..100_000, 1 => any::<u32>()]
    }

    #[test]
    fn bins_are_in_the_order_of_size_and_within_their_tables() {
        let sizes = (0..4096)
            .chain((12..32).flat_map(|bits| [(1u32 << bits) - 1, 1 << bits, (1 << bits) + 1]));
        let places: Vec<BinPlace> = sizes.chain([u32::MAX]).map(place_of).collect();
        assert!(
            places
                .iter()
                .all(|place| place.order < ORDERS && place.bin < BINS)
        );
        assert!(places.is_sorted_by_key(|place| (place.order, place.bin)));
        assert!(
            (0..64)
                .map(place_of)
                .zip((1..65).map(place_of))
                .all(|(one, next)| one != next)
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_is_a_sorted_set(ops in prop::collection::vec((0u8..10, size(), 0u64..400, 0usize..1000), 1..3000)) {
            let (mut index, mut set) = (Index::default(), BTreeSet::new());
            for (what, units, start, which) in ops {
                let new = entry(units, start);
                let old = set.iter().nth(which % set.len().max(1)).copied();
                match (what, old) {
                    (0..=4, _) if set.insert(new) => index.insert(new),
                    (5 | 6, Some(old)) => {
                        set.remove(&old);
                        index.remove(old);
                    }
                    (7 | 8, Some(old)) if !set.contains(&new) => {
                        set.remove(&old);
                        set.insert(new);
                        index.replace(old, new);
                    }
                    _ => {
                        let best = set.range(FreeChunk::least(units)..).next().copied();
                        prop_assert_eq!(index.best(units).map(|(_, entry)| entry), best);
                        if let Some((spot, best)) = index.best(units) {
                            let after = set.range(best..).nth(1).copied();
                            prop_assert_eq!(index.after(spot).map(|(_, entry)| entry), after);
                        }
                    }
                }
                prop_assert_eq!(index.largest(), set.last().copied());
            }
            let mut listed = Vec::new();
            let mut next = index.best(0);
            while let Some((spot, entry)) = next {
                listed.push(entry);
                next = index.after(spot);
            }
            prop_assert_eq!(listed, set.into_iter().collect::<Vec<_>>());
        }
    }
}

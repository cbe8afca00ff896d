//! Free chunks in the order of size, then address: best fit, and of several the lowest.

use super::chunk::{Chunk, ChunkId};

/// Entries of a leaf. Sixteen cache lines: half of them are moved by an insertion, two or three are read by a search.
const LEAF: usize = 64;

/// Entries that a search compares at once, and how many such groups a leaf has.
const GROUP: usize = 8;
const _: () = assert!(LEAF == GROUP * GROUP);

/// A free chunk: its units in the highest 32 bits, its first unit in the 64 below, its number in the lowest 32.
///
/// Compared as one number that is the order of best fit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Entry(u128);

impl Entry {
    /// More than every chunk: what fills a leaf behind its last entry.
    const END: Entry = Entry(u128::MAX);

    pub(crate) fn of(id: ChunkId, chunk: &Chunk) -> Entry {
        Entry(u128::from(chunk.units) << 96 | u128::from(chunk.start()) << 32 | u128::from(id.0))
    }

    /// Returns what is less than every chunk of at least this many units, and more than every smaller one.
    pub(crate) fn least(units: u32) -> Entry {
        Entry(u128::from(units) << 96)
    }

    pub(crate) fn units(self) -> u32 {
        (self.0 >> 96) as u32
    }

    pub(crate) fn start(self) -> u64 {
        (self.0 >> 32) as u64
    }

    pub(crate) fn id(self) -> ChunkId {
        ChunkId(self.0 as u32)
    }
}

/// A place in an [`Index`], good until the index is changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    leaf: usize,
    at: usize,
}

/// Every free chunk of a heap, sorted: a B+ tree of two levels.
///
/// The upper level is one sorted array of what the leaves begin with. It grows by an entry for some 45 chunks, so
/// that half a million free chunks make 11,000 of them, and it is moved only where a leaf is split or merged.
#[derive(Default)]
pub(crate) struct Index {
    /// Not more than any entry of the leaf, and more than any of the leaf before it.
    firsts: Vec<Entry>,
    /// The leaf of each, in `leaves`, and how many entries it has: at least one.
    places: Vec<Place>,
    leaves: Vec<Leaf>,
    unused: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Place {
    leaf: u32,
    len: u32,
}

/// Sorted entries, and `Entry::END` behind them.
type Leaf = [Entry; LEAF];

/// Counts the entries below `entry`.
///
/// Without a branch on what is compared: which way it goes cannot be foretold, and a processor that guesses wrong
/// loses more than sixteen comparisons cost.
fn rank(leaf: &Leaf, entry: Entry) -> usize {
    let groups: usize = (1..GROUP).map(|group| usize::from(leaf[group * GROUP] < entry)).sum();
    let (groups_of_leaf, _) = leaf.as_chunks::<GROUP>();
    groups * GROUP + groups_of_leaf[groups].iter().map(|&other| usize::from(other < entry)).sum::<usize>()
}

impl Index {
    pub(crate) fn insert(&mut self, entry: Entry) {
        if self.firsts.is_empty() {
            let leaf = self.leaf();
            self.leaves[leaf as usize][0] = entry;
            self.firsts.push(entry);
            self.places.push(Place { leaf, len: 1 });
            return;
        }
        let mut upper = self.upper(entry);
        if self.places[upper].len as usize == LEAF {
            self.split(upper);
            upper += usize::from(entry >= self.firsts[upper + 1]);
        }
        let place = &mut self.places[upper];
        let leaf = &mut self.leaves[place.leaf as usize];
        let len = place.len as usize;
        let at = rank(leaf, entry);
        leaf.copy_within(at..len, at + 1);
        leaf[at] = entry;
        place.len += 1;
        // Only the first leaf can get an entry below what it begins with.
        if entry < self.firsts[upper] {
            self.firsts[upper] = entry;
        }
    }

    /// Takes an entry out.
    ///
    /// # Panics
    ///
    /// If it is not in: the heap would hand out bytes twice.
    pub(crate) fn remove(&mut self, entry: Entry) {
        let cursor = self.lower_bound(entry);
        assert!(self.at(cursor).is_some_and(|(_, found)| found == entry), "a free chunk is in the index");
        self.remove_at(cursor);
    }

    /// Puts an entry in the place of another.
    ///
    /// # Panics
    ///
    /// If that is not in.
    pub(crate) fn replace(&mut self, old: Entry, new: Entry) {
        let found = self.at(self.lower_bound(old)).filter(|&(_, found)| found == old);
        let (cursor, _) = found.expect("a free chunk is in the index");
        self.replace_at(cursor, new);
    }

    /// Puts an entry in the place of the one under a cursor: where it stands if the order allows, which it mostly does
    /// for the largest, from which most are cut and with which most merge.
    pub(crate) fn replace_at(&mut self, cursor: Cursor, new: Entry) {
        let Cursor { leaf: upper, at } = cursor;
        let place = self.places[upper];
        let leaf = &mut self.leaves[place.leaf as usize];
        let is_above = match at.checked_sub(1) {
            Some(before) => leaf[before] < new,
            None => self.firsts[upper] <= new,
        };
        let is_below = if at + 1 < place.len as usize {
            new < leaf[at + 1]
        } else {
            self.firsts.get(upper + 1).is_none_or(|&next| new < next)
        };
        if is_above && is_below {
            leaf[at] = new;
            return;
        }
        self.remove_at(cursor);
        self.insert(new);
    }

    /// Takes the entry under a cursor out.
    pub(crate) fn remove_at(&mut self, cursor: Cursor) -> Entry {
        let Cursor { leaf: upper, at } = cursor;
        let place = &mut self.places[upper];
        let len = place.len as usize;
        let leaf = &mut self.leaves[place.leaf as usize];
        let entry = leaf[at];
        leaf.copy_within(at + 1..len, at);
        leaf[len - 1] = Entry::END;
        place.len -= 1;
        match len - 1 {
            0 => self.drop_leaf(upper),
            left if left < LEAF / 4 => self.merge(upper),
            _ => {}
        }
        entry
    }

    /// Finds the smallest chunk of at least this many units, the lowest of several.
    pub(crate) fn best(&self, units: u32) -> Option<(Cursor, Entry)> {
        self.at(self.lower_bound(Entry::least(units)))
    }

    /// Returns the entry after the one under a cursor.
    pub(crate) fn after(&self, cursor: Cursor) -> Option<(Cursor, Entry)> {
        self.at(Cursor { at: cursor.at + 1, ..cursor })
    }

    /// Returns the largest chunk.
    pub(crate) fn largest(&self) -> Option<Entry> {
        self.entries(self.places.len().wrapping_sub(1)).last().copied()
    }

    pub(crate) fn bookkeeping(&self) -> usize {
        self.firsts.capacity() * size_of::<Entry>()
            + self.places.capacity() * size_of::<Place>()
            + self.leaves.capacity() * size_of::<Leaf>()
            + self.unused.capacity() * size_of::<u32>()
    }

    /// Finds the first entry that is not below this one; the cursor may be behind its leaf's last.
    fn lower_bound(&self, entry: Entry) -> Cursor {
        let leaf = self.upper(entry);
        Cursor { leaf, at: self.places.get(leaf).map_or(0, |place| rank(&self.leaves[place.leaf as usize], entry)) }
    }

    /// Returns the entry under a cursor, or the next leaf's first when the cursor is behind its leaf's last.
    fn at(&self, cursor: Cursor) -> Option<(Cursor, Entry)> {
        if let Some(&entry) = self.entries(cursor.leaf).get(cursor.at) {
            return Some((cursor, entry));
        }
        let cursor = Cursor { leaf: cursor.leaf + 1, at: 0 };
        self.entries(cursor.leaf).first().map(|&entry| (cursor, entry))
    }

    /// Returns a leaf's entries; none for a leaf that is not there.
    fn entries(&self, upper: usize) -> &[Entry] {
        self.places.get(upper).map_or(&[], |place| &self.leaves[place.leaf as usize][..place.len as usize])
    }

    /// Returns the leaf that an entry belongs in.
    fn upper(&self, entry: Entry) -> usize {
        let (mut leaf, mut count) = (0, self.firsts.len());
        while count > 1 {
            let half = count / 2;
            leaf += half * usize::from(self.firsts[leaf + half] <= entry);
            count -= half;
        }
        leaf
    }

    /// Returns a leaf to use.
    fn leaf(&mut self) -> u32 {
        self.unused.pop().unwrap_or_else(|| {
            if self.leaves.len() == self.leaves.capacity() {
                self.leaves.reserve_exact(self.leaves.len() / 8 + 1);
            }
            self.leaves.push([Entry::END; LEAF]);
            (self.leaves.len() - 1) as u32
        })
    }

    /// Moves the upper half of a full leaf to one of its own.
    fn split(&mut self, upper: usize) {
        let to = self.leaf();
        let from = self.places[upper].leaf;
        let moved = self.leaves[from as usize];
        self.leaves[from as usize][LEAF / 2..].fill(Entry::END);
        self.leaves[to as usize][..LEAF / 2].copy_from_slice(&moved[LEAF / 2..]);
        self.places[upper].len = LEAF as u32 / 2;
        self.firsts.insert(upper + 1, moved[LEAF / 2]);
        self.places.insert(upper + 1, Place { leaf: to, len: LEAF as u32 / 2 });
    }

    /// Moves a leaf that is nearly empty into a neighbour that has room to spare.
    fn merge(&mut self, upper: usize) {
        let fits = |index: &Index, lower: usize| {
            index.entries(lower).len() + index.entries(lower + 1).len() <= LEAF * 3 / 4
                && lower + 1 < index.places.len()
        };
        let lower = if fits(self, upper) {
            upper
        } else if upper > 0 && fits(self, upper - 1) {
            upper - 1
        } else {
            return;
        };
        let (into, from) = (self.places[lower], self.places[lower + 1]);
        let moved = self.leaves[from.leaf as usize];
        let (len, more) = (into.len as usize, from.len as usize);
        self.leaves[into.leaf as usize][len..len + more].copy_from_slice(&moved[..more]);
        self.places[lower].len += from.len;
        self.drop_leaf(lower + 1);
    }

    fn drop_leaf(&mut self, upper: usize) {
        self.firsts.remove(upper);
        let leaf = self.places.remove(upper).leaf;
        self.leaves[leaf as usize].fill(Entry::END);
        self.unused.push(leaf);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn entry(units: u32, start: u64) -> Entry {
        Entry::of(ChunkId(start as u32), &Chunk::free(start, 0, units))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_is_a_sorted_set(ops in prop::collection::vec((0u8..10, 1u32..60, 0u64..400, 0usize..1000), 1..3000)) {
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
                        let best = set.range(Entry::least(units)..).next().copied();
                        prop_assert_eq!(index.best(units).map(|(_, entry)| entry), best);
                        if let Some((cursor, best)) = index.best(units) {
                            let after = set.range(best..).nth(1).copied();
                            prop_assert_eq!(index.after(cursor).map(|(_, entry)| entry), after);
                        }
                    }
                }
                prop_assert_eq!(index.largest(), set.last().copied());
            }
            let mut listed = Vec::new();
            let mut next = index.best(0);
            while let Some((cursor, entry)) = next {
                listed.push(entry);
                next = index.after(cursor);
            }
            prop_assert_eq!(listed, set.into_iter().collect::<Vec<_>>());
        }
    }
}

//! Many free chunks of about one size, in the order of size, then address.

use super::free_chunk::FreeChunk;

/// Entries of a leaf. Sixteen cache lines: half of them are moved by an insertion, two or three are
/// read by a search.
const LEAF: usize = 64;

/// Entries that a search compares at once, and how many such groups a leaf has.
const GROUP: usize = 8;
const _: () = assert!(LEAF == GROUP * GROUP);

/// A place in a [`Tree`], good until the tree is changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spot {
    pub(crate) leaf: usize,
    pub(crate) at: usize,
}

/// A sorted set: a B+ tree of two levels.
///
/// The upper level is one sorted array of what the leaves begin with. It grows by an entry for some
/// 45 chunks, and it is moved only where a leaf is split or merged.
#[derive(Default)]
pub(crate) struct Tree {
    /// Not more than any entry of the leaf, and more than any of the leaf before it.
    firsts: Vec<FreeChunk>,
    /// The leaf of each, in `leaves`, and how many entries it has: at least one.
    places: Vec<LeafPlace>,
    leaves: Vec<Leaf>,
    unused: Vec<u32>,
    len: usize,
}

#[derive(Clone, Copy)]
struct LeafPlace {
    leaf: u32,
    len: u32,
}

/// Sorted entries, and `FreeChunk::END` behind them.
type Leaf = [FreeChunk; LEAF];

/// Counts the entries below `entry`.
///
/// Without a branch on what is compared: which way it goes cannot be foretold, and a processor that
/// guesses wrong loses more than sixteen comparisons cost.
fn rank(leaf: &Leaf, entry: FreeChunk) -> usize {
    let groups: usize = (1..GROUP)
        .map(|group| usize::from(leaf[group * GROUP] < entry))
        .sum();
    let (groups_of_leaf, _) = leaf.as_chunks::<GROUP>();
    groups * GROUP
        + groups_of_leaf[groups]
            .iter()
            .map(|&other| usize::from(other < entry))
            .sum::<usize>()
}

impl Tree {
    /// Makes one of sorted entries.
    pub(crate) fn of(entries: &[FreeChunk]) -> Tree {
        let mut tree = Tree::default();
        entries.iter().for_each(|&entry| tree.insert(entry));
        tree
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn insert(&mut self, entry: FreeChunk) {
        self.len += 1;
        if self.firsts.is_empty() {
            let leaf = self.leaf();
            self.leaves[leaf as usize][0] = entry;
            self.firsts.push(entry);
            self.places.push(LeafPlace { leaf, len: 1 });
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

    /// Puts an entry in the place of the one under a spot: where it stands if the order allows,
    /// which it mostly does for the largest, from which most are cut and with which most merge.
    pub(crate) fn replace_at(&mut self, spot: Spot, new: FreeChunk) {
        let Spot { leaf: upper, at } = spot;
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
        self.remove_at(spot);
        self.insert(new);
    }

    /// Takes the entry under a spot out.
    pub(crate) fn remove_at(&mut self, spot: Spot) -> FreeChunk {
        let Spot { leaf: upper, at } = spot;
        let place = &mut self.places[upper];
        let len = place.len as usize;
        let leaf = &mut self.leaves[place.leaf as usize];
        let entry = leaf[at];
        leaf.copy_within(at + 1..len, at);
        leaf[len - 1] = FreeChunk::END;
        place.len -= 1;
        self.len -= 1;
        match len - 1 {
            0 => self.drop_leaf(upper),
            left if left < LEAF / 4 => self.merge(upper),
            _ => {}
        }
        entry
    }

    /// Finds the first entry that is not below this one.
    pub(crate) fn from(&self, entry: FreeChunk) -> Option<(Spot, FreeChunk)> {
        self.at(self.lower_bound(entry))
    }

    /// Returns the entry after the one under a spot.
    pub(crate) fn after(&self, spot: Spot) -> Option<(Spot, FreeChunk)> {
        self.at(Spot {
            at: spot.at + 1,
            ..spot
        })
    }

    /// Finds the first entry.
    pub(crate) fn first(&self) -> Option<(Spot, FreeChunk)> {
        self.at(Spot { leaf: 0, at: 0 })
    }

    /// Returns the last entry.
    pub(crate) fn last(&self) -> Option<FreeChunk> {
        self.entries_of(self.places.len().wrapping_sub(1))
            .last()
            .copied()
    }

    /// Lists the entries in their order.
    pub(crate) fn entries(&self) -> impl Iterator<Item = FreeChunk> + '_ {
        (0..self.places.len())
            .flat_map(|upper| self.entries_of(upper))
            .copied()
    }

    pub(crate) fn bookkeeping(&self) -> usize {
        self.firsts.capacity() * size_of::<FreeChunk>()
            + self.places.capacity() * size_of::<LeafPlace>()
            + self.leaves.capacity() * size_of::<Leaf>()
            + self.unused.capacity() * size_of::<u32>()
    }

    /// Finds the first entry that is not below this one; the spot may be behind its leaf's last.
    fn lower_bound(&self, entry: FreeChunk) -> Spot {
        let leaf = self.upper(entry);
        Spot {
            leaf,
            at: self
                .places
                .get(leaf)
                .map_or(0, |place| rank(&self.leaves[place.leaf as usize], entry)),
        }
    }

    /// Returns the entry under a spot, or the next leaf's first when the spot is behind its leaf's
    /// last.
    fn at(&self, spot: Spot) -> Option<(Spot, FreeChunk)> {
        if let Some(&entry) = self.entries_of(spot.leaf).get(spot.at) {
            return Some((spot, entry));
        }
        let spot = Spot {
            leaf: spot.leaf + 1,
            at: 0,
        };
        self.entries_of(spot.leaf)
            .first()
            .map(|&entry| (spot, entry))
    }

    /// Returns a leaf's entries; none for a leaf that is not there.
    fn entries_of(&self, upper: usize) -> &[FreeChunk] {
        self.places.get(upper).map_or(&[], |place| {
            &self.leaves[place.leaf as usize][..place.len as usize]
        })
    }

    /// Returns the leaf that an entry belongs in.
    fn upper(&self, entry: FreeChunk) -> usize {
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
            self.leaves.push([FreeChunk::END; LEAF]);
            (self.leaves.len() - 1) as u32
        })
    }

    /// Moves the upper half of a full leaf to one of its own.
    fn split(&mut self, upper: usize) {
        let to = self.leaf();
        let from = self.places[upper].leaf;
        let moved = self.leaves[from as usize];
        self.leaves[from as usize][LEAF / 2..].fill(FreeChunk::END);
        self.leaves[to as usize][..LEAF / 2].copy_from_slice(&moved[LEAF / 2..]);
        self.places[upper].len = LEAF as u32 / 2;
        self.firsts.insert(upper + 1, moved[LEAF / 2]);
        self.places.insert(
            upper + 1,
            LeafPlace {
                leaf: to,
                len: LEAF as u32 / 2,
            },
        );
    }

    /// Moves a leaf that is nearly empty into a neighbour that has room to spare.
    fn merge(&mut self, upper: usize) {
        let fits = |tree: &Tree, lower: usize| {
            tree.entries_of(lower).len() + tree.entries_of(lower + 1).len() <= LEAF * 3 / 4
                && lower + 1 < tree.places.len()
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
        self.leaves[leaf as usize].fill(FreeChunk::END);
        self.unused.push(leaf);
    }
}

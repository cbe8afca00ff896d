//! The regions of a heap, by number and in the order of their addresses.

// Tests: `crates/allocators/tests/bfc_growing.rs`.

use std::ops::{Index, IndexMut};

use super::chunk::ChunkId;
use crate::Extent;

/// What came from upstream: one extent, or several that lie side by side where upstream lets them
/// merge.
pub(crate) struct Region<T> {
    /// Its first unit.
    pub(crate) start: u64,
    /// Its units.
    pub(crate) units: u64,
    pub(crate) first: ChunkId,
    pub(crate) last: ChunkId,
    /// What to give back, and what upstream said of each.
    pub(crate) parts: Vec<(Extent, T)>,
}

impl<T> Region<T> {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.units
    }

    /// Returns the bytes that upstream gave for it.
    pub(crate) fn reserved(&self) -> u64 {
        self.parts.iter().map(|(extent, _)| extent.len).sum()
    }
}

/// Every region. A number is used again after its region is gone.
pub(crate) struct Regions<T> {
    regions: Vec<Option<Region<T>>>,
    /// The numbers in the order of the addresses.
    order: Vec<u16>,
}

impl<T> Default for Regions<T> {
    fn default() -> Self {
        Regions {
            regions: Vec::new(),
            order: Vec::new(),
        }
    }
}

impl<T> Regions<T> {
    /// The most regions at one time: 16 bits of a chunk name one.
    pub(crate) const MOST: usize = 1 << 16;

    /// Adds a region and returns its number, or gives it back when there are too many.
    pub(crate) fn insert(&mut self, region: Region<T>) -> Result<u16, Region<T>> {
        let number = match self.regions.iter().position(Option::is_none) {
            Some(number) => number,
            None if self.regions.len() < Self::MOST => {
                self.regions.push(None);
                self.regions.len() - 1
            }
            None => return Err(region),
        };
        let at = self.place(region.start);
        self.order.insert(at, number as u16);
        self.regions[number] = Some(region);
        Ok(number as u16)
    }

    pub(crate) fn remove(&mut self, number: u16) -> Region<T> {
        self.order.retain(|&other| other != number);
        self.regions[usize::from(number)]
            .take()
            .expect("a number of a region that is there")
    }

    /// Returns the region that lies directly before this unit.
    pub(crate) fn ends_at(&self, unit: u64) -> Option<u16> {
        let before = *self.order.get(self.place(unit).checked_sub(1)?)?;
        (self[before].end() == unit).then_some(before)
    }

    /// Returns the region that a unit lies in.
    pub(crate) fn covering(&self, unit: u64) -> Option<u16> {
        let at = self
            .order
            .partition_point(|&number| self[number].start <= unit);
        let number = *self.order.get(at.checked_sub(1)?)?;
        (unit < self[number].end()).then_some(number)
    }

    /// Says whether any of these units lies in a region.
    pub(crate) fn overlaps(&self, start: u64, units: u64) -> bool {
        let after = self.place(start);
        let before = after.checked_sub(1).map(|at| &self[self.order[at]]);
        before.is_some_and(|before| before.end() > start)
            || self
                .order
                .get(after)
                .is_some_and(|&after| self[after].start < start + units)
    }

    /// Lists the numbers in the order of the addresses.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u16> + '_ {
        self.order.iter().copied()
    }

    fn place(&self, start: u64) -> usize {
        self.order
            .partition_point(|&number| self[number].start < start)
    }
}

impl<T> Index<u16> for Regions<T> {
    type Output = Region<T>;

    fn index(&self, number: u16) -> &Region<T> {
        self.regions[usize::from(number)]
            .as_ref()
            .expect("a number of a region that is there")
    }
}

impl<T> IndexMut<u16> for Regions<T> {
    fn index_mut(&mut self, number: u16) -> &mut Region<T> {
        self.regions[usize::from(number)]
            .as_mut()
            .expect("a number of a region that is there")
    }
}

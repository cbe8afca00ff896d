//! Blocks whose leases have ended, on their way to being dropped with no lock held.

use arrayvec::ArrayVec;

/// How many there is room for without an allocation: what one group's worth of drops finds.
const NEAR: usize = 16;

/// What a collect found. Takes memory only when that is much.
#[derive(Debug)]
pub struct ReclaimedBlocks<B> {
    near: ArrayVec<B, NEAR>,
    far: Vec<B>,
}

impl<B> ReclaimedBlocks<B> {
    /// Makes an empty list.
    #[inline]
    pub const fn new() -> ReclaimedBlocks<B> {
        ReclaimedBlocks {
            near: ArrayVec::new_const(),
            far: Vec::new(),
        }
    }

    /// Adds a block.
    #[inline]
    pub fn push(&mut self, block: B) {
        if let Err(full) = self.near.try_push(block) {
            self.far.push(full.element());
        }
    }

    /// Counts them.
    #[inline]
    pub fn len(&self) -> usize {
        self.near.len() + self.far.len()
    }

    /// Says whether there is none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.near.is_empty()
    }

    /// Takes all of them out, one after the other.
    #[inline]
    pub fn drain(&mut self) -> impl Iterator<Item = B> {
        std::iter::from_fn(|| self.far.pop().or_else(|| self.near.pop()))
    }
}

impl<B> Extend<B> for ReclaimedBlocks<B> {
    #[inline]
    fn extend<I: IntoIterator<Item = B>>(&mut self, blocks: I) {
        blocks.into_iter().for_each(|block| self.push(block));
    }
}

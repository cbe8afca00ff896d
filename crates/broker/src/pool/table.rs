//! What a holder did with each block.

use gpu_api::{Error, Result};
use transport::shared::journal::{Entry, Key, LAST};
use transport::shared::word::Tally;

/// A block whose contents are whole.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Sealed {
    /// Which block.
    pub block: u32,
    /// What its contents are called.
    pub key: Key,
    /// How often the block was given up before they were written; 1 for the first contents.
    pub generation: u32,
}

/// Lists the blocks that are whole.
pub(crate) fn sealed<W: Tally>(entries: &[Entry<W>]) -> Vec<Sealed> {
    let found = (0u32..).zip(entries).filter_map(|(block, entry)| {
        entry.look(block).map(|found| Sealed {
            block,
            key: found.key,
            generation: found.generation,
        })
    });
    found.collect()
}

/// A block, for its holder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Block {
    generation: u32,
    /// It was given up, and its contents were not called anything since.
    open: bool,
}

/// The generations of all blocks, as this holder gave them. What lies in the journal is believed
/// once, when the holder begins: from then on it is this table that says what may be sealed.
#[derive(Debug)]
pub(crate) struct Table {
    blocks: Vec<Block>,
}

impl Table {
    /// Goes on after the last holder.
    pub(crate) fn of<W: Tally>(entries: &[Entry<W>]) -> Table {
        let block = |entry: &Entry<W>| Block {
            generation: entry.generation(),
            open: false,
        };
        Table {
            blocks: entries.iter().map(block).collect(),
        }
    }

    /// Gives a block's contents up: it may be filled from now on.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a block that the journal has no entry for, [`Error::Exhausted`] for
    /// one that was given up 2^32 - 1 times.
    pub(crate) fn invalidate<W: Tally>(&mut self, entries: &[Entry<W>], block: u32) -> Result<()> {
        let count = entries.len();
        let (Some(of), Some(entry)) = (
            self.blocks.get_mut(block as usize),
            entries.get(block as usize),
        ) else {
            return Err(no_such_block(block, count));
        };
        if of.generation == LAST {
            return Err(Error::Exhausted {
                what: "generations of a pool's block",
                limit: u64::from(LAST),
                remedy: "use another block, or create the pool anew",
            });
        }
        of.generation += 1;
        of.open = true;
        entry.invalidate(of.generation);
        Ok(())
    }

    /// Refuses blocks of which one cannot be sealed now.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a block that the journal has no entry for, that is named twice, or
    /// that was not given up before it was filled.
    pub(crate) fn check(&self, blocks: &[(u32, Key)]) -> Result<()> {
        let mut named: Vec<u32> = blocks.iter().map(|(block, _)| *block).collect();
        named.sort_unstable();
        if let Some(pair) = named.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::Invalid {
                what: "the blocks to seal",
                got: format!("block {} twice", pair[0]),
                must: "each named once",
            });
        }
        for &block in &named {
            match self.blocks.get(block as usize) {
                None => return Err(no_such_block(block, self.blocks.len())),
                Some(of) if !of.open => {
                    return Err(Error::Invalid {
                        what: "a block to seal",
                        got: format!(
                            "block {block}, which was not invalidated since its last seal"
                        ),
                        must: "invalidated, then filled, then sealed",
                    });
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Says what a block's contents are called. Returns what the stream stores behind the filling.
    ///
    /// # Panics
    ///
    /// If [`check`](Table::check) refuses the block.
    pub(crate) fn key<W: Tally>(&mut self, entries: &[Entry<W>], block: u32, key: Key) -> u64 {
        let of = &mut self.blocks[block as usize];
        assert!(of.open, "checked before");
        of.open = false;
        entries[block as usize].key(block, of.generation, key)
    }
}

fn no_such_block(block: u32, count: usize) -> Error {
    Error::Invalid {
        what: "a block of a pool",
        got: format!("block {block} of a journal for {count}"),
        must: "below the number of blocks; create the pool with a longer journal",
    }
}

//! A counter file of tests and of fuzzing.

use std::sync::atomic::AtomicU64;

use transport::shared::counter_file::{GROUP, SlotFile};
use transport::shared::dirty::Dirty;
use transport::shared::slot::Slot;

/// A file in this process' own memory.
#[derive(Debug)]
pub struct HeapFile {
    slots: Vec<Slot<AtomicU64>>,
    dirty: Vec<Dirty<AtomicU64>>,
}

impl HeapFile {
    /// Makes a file of free slots.
    pub fn new(slots: u32) -> HeapFile {
        HeapFile {
            slots: (0..slots).map(|_| Slot::new(AtomicU64::new(0))).collect(),
            dirty: (0..slots / GROUP)
                .map(|_| Dirty::new(AtomicU64::new(0)))
                .collect(),
        }
    }

    /// Writes anything into a slot, as its participant could; numbers past the last go round.
    pub fn scribble_slot(&self, index: usize, word: u64) {
        self.slots[index % self.slots.len()].scribble(word);
    }

    /// Writes anything into a dirty word.
    pub fn scribble_dirty(&self, index: usize, word: u64) {
        self.dirty[index % self.dirty.len()].scribble(word);
    }
}

impl SlotFile for HeapFile {
    type Word = AtomicU64;
    fn slots(&self) -> &[Slot<AtomicU64>] {
        &self.slots
    }
    fn dirty(&self) -> &[Dirty<AtomicU64>] {
        &self.dirty
    }
}

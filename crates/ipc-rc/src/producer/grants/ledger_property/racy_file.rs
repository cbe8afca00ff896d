//! A counter file in which the other side does something between any two of the ledger's own looks
//! at it.
//!
//! Whatever the scheduler could do to a consumer that shares the words is so done on purpose, and
//! again when a failing history is shortened.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use transport::shared::counter_file::{GROUP, SlotFile};
use transport::shared::dirty::Dirty;
use transport::shared::slot::{Claim, Slot};
use transport::shared::word::Word;
use transport::wire::lease_address::LeaseAddress;

thread_local! {
    static MEANWHILE: RefCell<Option<Meanwhile>> = const { RefCell::new(None) };
    static DID: Cell<Option<Did>> = const { Cell::new(None) };
}

/// What the consumer does while the ledger is at work.
pub struct Meanwhile {
    /// After this many of the ledger's accesses.
    pub after: usize,
    pub file: Arc<RacyFile>,
    pub entry: LeaseAddress,
    /// Lets go of what it holds, and marks; else it claims.
    pub releases: bool,
}

/// What came of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Did {
    Claimed(Claim),
    Released,
}

impl Meanwhile {
    fn happen(self) {
        let slot = &self.file.slots[self.entry.slot as usize];
        DID.set(Some(if self.releases {
            slot.release(self.entry.generation);
            self.file.dirty[(self.entry.slot / GROUP) as usize].mark();
            Did::Released
        } else {
            Did::Claimed(slot.claim(self.entry.generation))
        }));
    }
}

/// Runs the ledger's `work` with something happening in its middle, and returns what came of that:
/// nothing if the work was over before.
pub fn interrupted<T>(meanwhile: Option<Meanwhile>, work: impl FnOnce() -> T) -> (T, Option<Did>) {
    MEANWHILE.set(meanwhile);
    let done = work();
    MEANWHILE.set(None);
    (done, DID.take())
}

fn look() {
    let due = MEANWHILE.with_borrow_mut(|meanwhile| match meanwhile {
        Some(it) if it.after > 0 => {
            it.after -= 1;
            None
        }
        _ => meanwhile.take(),
    });
    if let Some(due) = due {
        due.happen();
    }
}

/// A word that is looked at one access at a time.
#[derive(Debug)]
pub struct Racy(AtomicU64);

impl Word for Racy {
    fn load(&self, order: Ordering) -> u64 {
        look();
        self.0.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        look();
        self.0.store(value, order);
    }
    fn swap(&self, value: u64, order: Ordering) -> u64 {
        look();
        self.0.swap(value, order)
    }
    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        look();
        self.0.compare_exchange(current, new, success, failure)
    }
}

/// The file.
#[derive(Debug)]
pub struct RacyFile {
    slots: Vec<Slot<Racy>>,
    dirty: Vec<Dirty<Racy>>,
}

impl RacyFile {
    pub fn new(slots: u32) -> RacyFile {
        RacyFile {
            slots: (0..slots)
                .map(|_| Slot::new(Racy(AtomicU64::new(0))))
                .collect(),
            dirty: (0..slots / GROUP)
                .map(|_| Dirty::new(Racy(AtomicU64::new(0))))
                .collect(),
        }
    }
}

impl SlotFile for RacyFile {
    type Word = Racy;
    fn slots(&self) -> &[Slot<Racy>] {
        &self.slots
    }
    fn dirty(&self) -> &[Dirty<Racy>] {
        &self.dirty
    }
}

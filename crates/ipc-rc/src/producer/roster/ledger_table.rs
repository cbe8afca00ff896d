//! The ledgers of a session's participants, by place.
//!
//! A place's ledger is made when a participant first sits there and stays as long as the session,
//! so a thread that finds one needs no lock and no count to keep it alive: sharing looks a ledger
//! up and takes its shard's lock, which tells whose the ledger is at that moment. A place is given
//! to another participant only when nothing but this table knows the ledger: a grant for the
//! participant before cannot reach the one after.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::producer::blocks::block::Block;
use crate::producer::grants::ledger::Ledger;
use crate::producer::roster::place::MOST_PARTICIPANTS;
use transport::shared::counter_file::CounterFile;

/// A participant's ledger.
pub(crate) type Leases = Ledger<Arc<Block>, CounterFile>;

/// The ledgers.
#[derive(Debug)]
pub(crate) struct LedgerTable {
    ledgers: Box<[OnceLock<Arc<Leases>>]>,
    /// One more than the highest place that was ever taken.
    used: AtomicUsize,
}

impl Default for LedgerTable {
    fn default() -> LedgerTable {
        LedgerTable {
            ledgers: (0..MOST_PARTICIPANTS).map(|_| OnceLock::new()).collect(),
            used: AtomicUsize::new(0),
        }
    }
}

impl LedgerTable {
    /// Says whether this table alone knows a place's ledger.
    pub fn is_vacant(&self, place: usize) -> bool {
        self.ledgers[place]
            .get()
            .is_none_or(|ledger| Arc::strong_count(ledger) == 1)
    }

    /// Returns the ledger of a vacant place, for the next participant. Only the session's thread
    /// calls it.
    pub fn reserve(&self, place: usize) -> Arc<Leases> {
        debug_assert!(self.is_vacant(place));
        self.ledgers[place]
            .get_or_init(|| Arc::new(Ledger::new()))
            .clone()
    }

    /// Counts a place among those that were ever taken. Called by the session's thread alone.
    pub fn note_use(&self, place: usize) {
        // After the ledger is there: a thread that reads the number finds them all.
        self.used.fetch_max(place + 1, Ordering::Release);
    }

    /// Returns a place's ledger, of any participant.
    #[inline]
    pub fn get(&self, place: usize) -> Option<&Leases> {
        self.ledgers.get(place)?.get().map(|ledger| &**ledger)
    }

    /// Counts the places up to the last that was ever taken.
    #[inline]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Acquire)
    }

    /// Lists the ledgers.
    pub fn all(&self) -> impl Iterator<Item = &Leases> {
        self.ledgers[..self.used()]
            .iter()
            .filter_map(OnceLock::get)
            .map(|ledger| &**ledger)
    }
}

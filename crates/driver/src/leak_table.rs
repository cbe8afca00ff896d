//! What a driver was given by its host address and must let go of again, once.

use std::collections::HashMap;
use std::sync::Mutex;

use gpu_api::lock::Acquire;
use gpu_api::{Error, HostPtr, Result};

/// One entry: what is known of it, and whether giving it back failed. Nobody knows then what is
/// left, so it stays, and its context must not be given back.
#[derive(Debug)]
struct Entry<T> {
    known: T,
    leaked: bool,
}

/// Entries by their first address.
#[derive(Debug)]
pub(crate) struct LeakTable<T>(Mutex<HashMap<usize, Entry<T>>>);

impl<T> Default for LeakTable<T> {
    fn default() -> LeakTable<T> {
        LeakTable(Mutex::default())
    }
}

impl<T: Copy> LeakTable<T> {
    /// Says whether everything was given back.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.acquire().is_empty()
    }

    /// Notes an entry.
    pub(crate) fn insert(&self, start: usize, known: T) {
        let leaked = false;
        self.0.acquire().insert(start, Entry { known, leaked });
    }

    /// Takes out what is about to be given back: the address may be handed out again before that
    /// call has returned. `must` says what is asked for.
    pub(crate) fn take(&self, start: HostPtr, must: &'static str) -> Result<T> {
        let mut all = self.0.acquire();
        let state = match all.get(&start.0) {
            Some(Entry {
                known,
                leaked: false,
            }) => {
                let known = *known;
                all.remove(&start.0);
                return Ok(known);
            }
            Some(_) => "which an earlier error leaked",
            None => "which is not such memory",
        };
        Err(Error::invalid(
            "the address",
            format!("{start:?}, {state}"),
            must,
        ))
    }

    /// Puts back what could not be given back, for good; a younger entry stays.
    pub(crate) fn leak(&self, start: HostPtr, known: T) {
        let leaked = true;
        self.0
            .acquire()
            .entry(start.0)
            .or_insert(Entry { known, leaked });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leaked_stays_and_is_never_taken_again() {
        let (table, start) = (LeakTable::default(), HostPtr(0x1000));
        let take = |table: &LeakTable<u8>| table.take(start, "registered");
        assert!(take(&table).is_err(), "nothing is there");
        table.insert(start.0, 1);
        assert_eq!(take(&table).expect("it is there"), 1);
        assert!(table.is_empty());
        table.leak(start, 1);
        assert!(take(&table).is_err() && !table.is_empty());
    }
}

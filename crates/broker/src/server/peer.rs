//! A participant of a broker, and the slots of its write leases.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_api::Result;
use transport::server::Seat;
use transport::shared::counter_file::{CounterFile, FIRST_SLOTS};
use transport::shared::slot::{Generation, Seen};

use crate::server::action::Asker;
use crate::wire::LeaseSlot;

/// One participant.
#[derive(Debug)]
pub(super) struct Peer {
    pub asker: Asker,
    pub command: String,
    /// The name that it gave itself.
    pub name: String,
    pub version: u16,
    pub seat: Arc<Seat>,
    pub slots: Slots,
    /// Its refusals, for the log.
    pub refusals: Refusals,
}

/// How often the refusals of a participant are logged: one that asks in a loop fills no disk.
const BETWEEN_LINES: Duration = Duration::from_secs(1);

/// Which refusals of a participant are logged: one a second, with the number of those before it that
/// were not.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    logged: Cell<Option<Instant>>,
    unlogged: Cell<u64>,
}

impl Refusals {
    /// Notes a refusal. Returns, if it is to be logged, how many before it were not.
    pub(super) fn note(&self, now: Instant) -> Option<u64> {
        let last = self.logged.get();
        if last.is_some_and(|last| now.duration_since(last) < BETWEEN_LINES) {
            self.unlogged.set(self.unlogged.get() + 1);
            return None;
        }
        self.logged.set(Some(now));
        Some(self.unlogged.take())
    }
}

/// The slots of a participant's counter file, and which of them are free. The table is the broker's
/// own: of the shared words one load each is believed, if it is the only legal one.
#[derive(Debug)]
pub(super) struct Slots {
    file: CounterFile,
    /// Of each slot that was ever granted: a participant that only reads takes no memory for them.
    generations: Vec<Generation>,
    /// Those of them that are free.
    free: Vec<u32>,
}

impl Slots {
    pub(super) fn new() -> Result<Slots> {
        Ok(Slots {
            file: CounterFile::create(FIRST_SLOTS)?,
            generations: Vec::new(),
            free: Vec::new(),
        })
    }

    pub(super) fn file(&self) -> &CounterFile {
        &self.file
    }

    /// Grants this many leases, or none.
    pub(super) fn grant(&mut self, count: usize) -> Option<Vec<LeaseSlot>> {
        let fresh = count.saturating_sub(self.free.len());
        let used = self.generations.len();
        if used.checked_add(fresh)? > FIRST_SLOTS as usize {
            return None;
        }
        self.generations.resize(used + fresh, Generation::ZERO);
        self.free.extend(used as u32..(used + fresh) as u32);
        let from = self.free.len() - count;
        let granted = self.free.drain(from..).map(|slot| {
            let generation = &mut self.generations[slot as usize];
            *generation = generation.next();
            self.file.slot(slot).grant(*generation);
            LeaseSlot {
                slot,
                generation: *generation,
            }
        });
        Some(granted.collect())
    }

    /// Says whether all leases have ended.
    pub(super) fn are_released(&self, leases: &[LeaseSlot]) -> bool {
        leases
            .iter()
            .all(|lease| self.file.slot(lease.slot).read(lease.generation) == Seen::Released)
    }

    /// Takes slots back. One that its holder has not released is never granted again: a late
    /// release of it would end the next lease.
    pub(super) fn end(&mut self, leases: &[LeaseSlot]) {
        let released = leases
            .iter()
            .filter(|lease| self.file.slot(lease.slot).read(lease.generation) == Seen::Released);
        self.free.extend(released.map(|lease| lease.slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_logged_once_a_second_and_counted() {
        let refusals = Refusals::default();
        let began = Instant::now();
        assert_eq!(refusals.note(began), Some(0));
        for _ in 0..3 {
            assert_eq!(refusals.note(began + BETWEEN_LINES / 2), None);
        }
        assert_eq!(refusals.note(began + BETWEEN_LINES), Some(3));
        assert_eq!(refusals.note(began + 2 * BETWEEN_LINES), Some(0));
    }
    use transport::shared::slot::Claim;

    #[test]
    fn only_what_was_released_is_granted_again() {
        let mut slots = Slots::new().expect("a memfd");
        assert_eq!(slots.generations.capacity(), 0, "a reader needs none");
        let leases = slots.grant(2).expect("free slots");
        assert!(!slots.are_released(&leases));
        for lease in &leases {
            assert_eq!(
                slots.file.slot(lease.slot).claim(lease.generation),
                Claim::Held
            );
        }
        slots
            .file
            .slot(leases[0].slot)
            .release(leases[0].generation);
        assert!(!slots.are_released(&leases), "one of two");
        let free = slots.free.len();
        slots.end(&leases);
        assert_eq!(slots.free.len(), free + 1);
        let again = slots.grant(1).expect("a free slot");
        assert_eq!(
            (again[0].slot, again[0].generation),
            (leases[0].slot, leases[0].generation.next())
        );
        assert!(slots.are_released(&[]), "no region, no lease");
        assert!(slots.grant(usize::MAX).is_none());
        let rest = FIRST_SLOTS as usize - 2;
        assert_eq!(slots.grant(rest).map(|leases| leases.len()), Some(rest));
        assert!(slots.grant(1).is_none(), "all are granted");
    }
}

//! What one participant was told, so that a question that comes again is answered the same: the
//! producer's half of [`questions`](crate::consumer::connection::questions).
//!
//! | question | first | again |
//! |---|---|---|
//! | `MapRegion` | pins the region, if a lease gives the right, and answers how to map it | the same; a region stays pinned whatever later answers say |
//! | `Unmapped` | unpins, and answers `Noted` | `Noted` |
//! | `Forward` | grants, and answers the descriptor | the same descriptor, until the participant says that the wish is settled |
//! | `Deposit` | keeps the descriptor that came with it, or says no | the same, until the wish is settled; what came again is closed |
//! | `Fetch` | gives what is kept to this fetch, or says no | the same descriptor, until the fetch ends |
//! | `EndDeposit` | lets go of what was deposited or fetched, or keeps it for another fetch, and answers `Noted` | `Noted` |
//! | `ClaimTickets` | grants, by the [tickets](crate::producer::grants::ticket) | the same lease |
//! | `AskFile` | the file, or no | the same |
//! | `GiveBack` | takes back what the ticket gave, if it is unclaimed, and answers `Noted` | `Noted` |
//! | `Bye` | grants nothing more, and answers `Noted` | `Noted` |
//!
//! Every question is answered. An answer that cannot be sent changes nothing: the question comes
//! again. So a pin ends by `Unmapped`, or with the participant, and by nothing else: not by a
//! refusal, because the participant may map by an earlier answer, and not by an answer that was
//! lost.

use std::collections::{BTreeMap, HashMap};

use gpu_api::RegionId;

/// Wishes, to forward or to keep a deposit, that are remembered for one participant: more than its threads can be waiting
/// for.
const MOST_WISHES: usize = 1024;

/// What a wish is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Wish<A> {
    /// Not heard of before: grant, and remember the answer.
    New,
    /// Answered before.
    Again(A),
    /// Nobody waits for the answer any more.
    Settled,
    /// Too many wait for their answers.
    TooMany,
}

/// What one participant was told: regions that it may have mapped, and answers to wishes.
#[derive(Debug)]
pub(crate) struct Told<R, A> {
    mapped: HashMap<RegionId, R>,
    wishes: BTreeMap<u64, A>,
    settled: u64,
}

impl<R, A> Default for Told<R, A> {
    fn default() -> Told<R, A> {
        Told {
            mapped: HashMap::new(),
            wishes: BTreeMap::new(),
            settled: 0,
        }
    }
}

impl<R, A: Clone> Told<R, A> {
    /// Notes that the participant may map a region, before it learns how; `pin` keeps the region.
    pub fn note_mapping(&mut self, region: RegionId, pin: impl FnOnce() -> R) {
        self.mapped.entry(region).or_insert_with(pin);
    }

    /// Notes that it has not mapped a region, and returns what kept it.
    pub fn note_unmapping(&mut self, region: RegionId) -> Option<R> {
        self.mapped.remove(&region)
    }

    /// Lists the regions that it may have mapped.
    pub fn mapped(&self) -> impl ExactSizeIterator<Item = RegionId> {
        self.mapped.keys().copied()
    }

    /// Takes all of them: it is proven dead, or gone.
    pub fn forget_mappings(&mut self) -> impl Iterator<Item = R> {
        self.mapped.drain().map(|(_, region)| region)
    }

    /// Looks a wish up; no wish below `settled` waits for its answer.
    pub fn wish(&mut self, number: u64, settled: u64) -> Wish<A> {
        self.settled = self.settled.max(settled);
        self.wishes = self.wishes.split_off(&self.settled);
        match self.wishes.get(&number) {
            _ if number < self.settled => Wish::Settled,
            Some(answer) => Wish::Again(answer.clone()),
            None if self.wishes.len() >= MOST_WISHES => Wish::TooMany,
            None => Wish::New,
        }
    }

    /// Remembers the answer to a wish.
    pub fn remember(&mut self, number: u64, answer: A) {
        self.wishes.insert(number, answer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_is_granted_once_and_forgotten_when_it_is_settled() {
        let mut told: Told<(), &str> = Told::default();
        assert_eq!(told.wish(3, 3), Wish::New);
        told.remember(3, "three");
        assert_eq!(told.wish(5, 3), Wish::New);
        told.remember(5, "five");
        assert_eq!(told.wish(3, 3), Wish::Again("three"));
        assert_eq!(told.wish(5, 5), Wish::Again("five"));
        // A repeat that was on its way when the answer came.
        assert_eq!(told.wish(3, 3), Wish::Settled);
        assert_eq!(told.wishes.len(), 1);
        let mut number = 6;
        while told.wish(number, 5) == Wish::New {
            told.remember(number, "more");
            number += 1;
        }
        assert_eq!(
            (told.wish(number, 5), told.wishes.len()),
            (Wish::TooMany, MOST_WISHES)
        );
    }
}

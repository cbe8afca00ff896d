//! File descriptors that a session keeps under names of 16 bytes, for the one that fetches each.
//!
//! | state | means | ends |
//! |---|---|---|
//! | kept | only the session has it | given; taken by the session; its depositor ends it, says goodbye or is proven dead: gone |
//! | given | a participant was sent it, and is sent it again for a repeat of that fetch | the fetch ends: gone, or kept again; its fetcher is gone: kept again; its depositor ends it or is gone: left |
//! | left | the same, and no depositor is left | the fetch ends or its fetcher is gone: gone |
//!
//! A name is taken until its row is gone, so that a repeat of a fetch is never given another's
//! descriptor.
//!
//! A deposit and a fetch are named by their participant and the number of its question, so that
//! ending one cannot touch a later one of the same name.

// Tests: `crates/ipc-rc/tests/deposits.rs`, and the model of the questions.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use gpu_api::lock::Acquire;
use gpu_api::{Error, ParticipantId, Result};
use transport::os::closer::{Closer, Foreign};
use transport::wire::message::{DepositId, RefusalCode};

/// The most descriptors that are kept for one participant: each is one of the session's process.
pub(crate) const MOST_OF_ONE: usize = 256;

/// Why a descriptor is not kept or not given, for programs and for people.
pub(crate) type Refused = (RefusalCode, String);

/// A question: its participant and its number.
type Asked = (ParticipantId, u64);

/// A descriptor that is kept.
#[derive(Debug)]
struct Deposit<F> {
    file: Arc<F>,
    /// `None` for one of the session itself.
    by: Option<Asked>,
    given: Option<Asked>,
    /// Its depositor ended it, or is gone, while a fetch had it.
    is_left: bool,
}

/// The table, of descriptors or of what a model has in their place.
#[derive(Debug)]
pub(crate) struct Table<F>(HashMap<DepositId, Deposit<F>>);

impl<F> Default for Table<F> {
    fn default() -> Table<F> {
        Table(HashMap::new())
    }
}

impl<F> Table<F> {
    /// Keeps a descriptor; after an error nothing has changed.
    pub fn keep(&mut self, id: DepositId, by: Option<Asked>, file: F) -> Result<(), Refused> {
        if self.0.contains_key(&id) {
            let why = format!("another descriptor is kept under the name {id}");
            return Err((RefusalCode::Deposit, why));
        }
        if let Some((participant, _)) = by
            && self.count(participant) >= MOST_OF_ONE
        {
            let why =
                format!("{MOST_OF_ONE} descriptors of this participant wait to be fetched already");
            return Err((RefusalCode::Limit, why));
        }
        let deposit = Deposit {
            file: Arc::new(file),
            by,
            given: None,
            is_left: false,
        };
        self.0.insert(id, deposit);
        Ok(())
    }

    /// Gives a descriptor to the one that asks first. A repeat of the same fetch is given it again.
    pub fn give(&mut self, id: DepositId, to: Asked) -> Result<Arc<F>, Refused> {
        let why = match self.0.get_mut(&id) {
            None => format!(
                "no descriptor is kept under the name {id}: it was fetched, or its depositor is gone"
            ),
            Some(deposit) if deposit.given.is_none_or(|given| given == to) => {
                deposit.given = Some(to);
                return Ok(deposit.file.clone());
            }
            Some(_) => format!("the descriptor under the name {id} is being fetched already"),
        };
        Err((RefusalCode::Deposit, why))
    }

    /// Ends a deposit or a fetch. What did not arrive `returns`. What is let go of is returned.
    pub fn end(&mut self, id: DepositId, asked: Asked, returns: bool) -> Option<Arc<F>> {
        let deposit = self.0.get_mut(&id)?;
        if deposit.given == Some(asked) {
            if returns && !deposit.is_left {
                deposit.given = None;
                return None;
            }
        } else if deposit.by != Some(asked) {
            return None;
        } else if deposit.given.is_some() {
            deposit.is_left = true;
            return None;
        }
        self.0.remove(&id).map(|deposit| deposit.file)
    }

    /// Returns a descriptor that no fetch has. It stays.
    fn look(&self, id: DepositId) -> Option<&Arc<F>> {
        let deposit = self.0.get(&id)?;
        deposit.given.is_none().then_some(&deposit.file)
    }

    /// Ends the deposits and the fetches of a participant that is gone.
    pub fn forget(&mut self, participant: ParticipantId) {
        let is_its = |asked: Option<Asked>| asked.is_some_and(|(by, _)| by == participant);
        self.0.retain(|_, deposit| {
            deposit.given = deposit.given.filter(|_| !is_its(deposit.given));
            deposit.is_left |= is_its(deposit.by);
            deposit.given.is_some() || !deposit.is_left
        });
    }

    /// Counts the descriptors of a participant that are not fetched.
    pub fn count(&self, participant: ParticipantId) -> usize {
        let by = |deposit: &&Deposit<F>| deposit.by.is_some_and(|(by, _)| by == participant);
        self.0.values().filter(by).count()
    }

    /// Lists what is kept, and whether it is given.
    #[cfg(test)]
    pub fn kept(&self) -> Vec<(F, bool)>
    where
        F: Clone,
    {
        let one = |deposit: &Deposit<F>| ((*deposit.file).clone(), deposit.given.is_some());
        self.0.values().map(one).collect()
    }

    /// Counts all.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// A session's deposits.
#[derive(Debug)]
pub(crate) struct Deposits {
    closer: Closer,
    table: Mutex<Table<Foreign>>,
}

impl Deposits {
    pub fn new() -> Result<Deposits> {
        Ok(Deposits {
            closer: Closer::new()?,
            table: Mutex::default(),
        })
    }

    /// Locks the table.
    pub fn table(&self) -> MutexGuard<'_, Table<Foreign>> {
        self.table.acquire()
    }

    /// Keeps a descriptor of the session's own process.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a name that is taken.
    pub fn keep_own(&self, id: DepositId, file: OwnedFd) -> Result<()> {
        let file = self.closer.guard(file);
        let kept = self.table().keep(id, None, file);
        kept.map_err(|_| {
            Error::invalid(
                "the name of a deposit",
                id,
                "one under which no other descriptor is kept",
            )
        })
    }

    /// Takes a descriptor out, for the session's own process.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a name under which nothing is kept, or which a fetch has, and
    /// [`Error::System`] without a free descriptor: then it stays.
    pub fn take(&self, id: DepositId) -> Result<OwnedFd> {
        let mut table = self.table();
        let Some(kept) = table.look(id) else {
            return Err(Error::invalid(
                "the name of a deposit",
                id,
                "one under which a descriptor is kept: it was fetched, or its depositor is gone",
            ));
        };
        let file = kept
            .as_fd()
            .try_clone_to_owned()
            .map_err(|e| Error::without_descriptors("dup", e))?;
        table.0.remove(&id);
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: DepositId = DepositId([1; 16]);
    const A: ParticipantId = ParticipantId(1);
    const B: ParticipantId = ParticipantId(2);

    fn table() -> Table<u8> {
        let mut table = Table::default();
        table.keep(ID, Some((A, 5)), 7).expect("keep");
        table
    }

    #[test]
    fn a_descriptor_is_given_to_one_and_again_for_its_repeats() {
        let mut table = table();
        assert_eq!(table.give(ID, (B, 1)).as_deref(), Ok(&7));
        assert_eq!(table.give(ID, (B, 1)).as_deref(), Ok(&7));
        for other in [(B, 2), (A, 1)] {
            let (code, why) = table.give(ID, other).expect_err("it is being fetched");
            assert_eq!(code, RefusalCode::Deposit);
            assert!(why.contains(&ID.to_string()), "{why}");
        }
        assert_eq!(
            table.end(ID, (B, 1), true),
            None,
            "it did not arrive, and is kept"
        );
        assert_eq!(table.give(ID, (A, 1)).as_deref(), Ok(&7));
        assert_eq!(table.end(ID, (B, 1), false), None, "a fetch that has ended");
        assert_eq!(table.end(ID, (A, 1), false).as_deref(), Some(&7));
        assert_eq!(table.len(), 0);
    }

    #[test]
    fn a_depositor_ends_its_own_deposit_alone() {
        let mut table = table();
        for other in [(A, 4), (B, 5)] {
            assert_eq!(table.end(ID, other, false), None);
        }
        assert_eq!(table.end(ID, (A, 5), false).as_deref(), Some(&7));
        table
            .keep(ID, Some((A, 6)), 8)
            .expect("the name is free again");
        assert_eq!(
            table.end(ID, (A, 5), false),
            None,
            "a late end of the first"
        );
        assert_eq!(table.len(), 1);
    }

    /// Else a repeat of the fetch would be given what is deposited next.
    #[test]
    fn a_name_is_taken_until_the_fetch_that_has_its_descriptor_ends() {
        for is_gone in [false, true] {
            let mut table = table();
            assert_eq!(table.give(ID, (B, 1)).as_deref(), Ok(&7));
            if is_gone {
                table.forget(A);
            } else {
                assert_eq!(table.end(ID, (A, 5), false), None);
            }
            let (code, _) = table.keep(ID, Some((A, 6)), 8).expect_err("taken");
            assert_eq!(code, RefusalCode::Deposit);
            assert_eq!(table.give(ID, (B, 1)).as_deref(), Ok(&7), "a repeat");
            assert_eq!(table.end(ID, (B, 1), true).as_deref(), Some(&7));
            table.keep(ID, Some((A, 6)), 8).expect("free again");
        }
    }

    #[test]
    fn a_name_is_taken_once_and_a_participant_has_a_quota() {
        let mut table = Table::default();
        for number in 0..MOST_OF_ONE as u64 {
            let id = DepositId(u128::from(number).to_le_bytes());
            table.keep(id, Some((A, number)), 0).expect("keep");
        }
        let one_more = DepositId([9; 16]);
        let (code, _) = table
            .keep(one_more, Some((A, 999)), 0)
            .expect_err("the quota");
        assert_eq!(code, RefusalCode::Limit);
        table
            .keep(one_more, Some((B, 1)), 0)
            .expect("another has its own");
        let (code, _) = table.keep(one_more, None, 0).expect_err("the name");
        assert_eq!(code, RefusalCode::Deposit);
        table.forget(A);
        assert_eq!((table.count(A), table.len()), (0, 1));
    }

    #[test]
    fn what_was_given_to_one_that_is_gone_is_kept_again() {
        let mut table = table();
        assert_eq!(table.give(ID, (B, 1)).as_deref(), Ok(&7));
        table.forget(B);
        assert_eq!(table.look(ID).map(|file| **file), Some(7));
        table.forget(A);
        assert_eq!(table.len(), 0);
    }
}

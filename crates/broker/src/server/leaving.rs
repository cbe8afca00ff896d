//! Objects on their way out of the keeper, and what waits for that.

use std::collections::HashMap;

use crate::object::identity::{Epoch, Identity};
use crate::server::action::Participant;

/// What waits.
#[derive(Clone, Debug)]
pub(super) enum Leaving {
    /// Nothing: newer epochs came.
    Retired,
    /// A participant that asked for the removal of a name's epoch, by this question.
    Asked {
        participant: Participant,
        request: u64,
        name: String,
        epoch: Epoch,
        /// The last epoch that the name had, for the answer.
        last: Epoch,
        /// The name is forgotten afterwards, so that any user may take it.
        release: bool,
    },
    /// An object for which memory is made when the old epochs are gone.
    Replaced(Identity),
    /// A commit for which the keeper had no room.
    Unkept(Identity),
}

/// All of them, by the number that the keeper's thread answers with.
#[derive(Debug, Default)]
pub(super) struct LeavingTable {
    rows: HashMap<u64, Leaving>,
    last: u64,
}

impl LeavingTable {
    /// Notes what waits, and returns its number.
    pub(super) fn begin(&mut self, leaving: Leaving) -> u64 {
        self.last += 1;
        self.rows.insert(self.last, leaving);
        self.last
    }

    /// Takes what waited.
    pub(super) fn end(&mut self, token: u64) -> Option<Leaving> {
        self.rows.remove(&token)
    }

    /// Answers a removal that is under way to the process that asked last. Says whether there is
    /// one.
    pub(super) fn ask_again(
        &mut self,
        name: &str,
        epoch: Epoch,
        participant: Participant,
        request: u64,
    ) -> bool {
        let same = self.rows.values_mut().find_map(|leaving| match leaving {
            Leaving::Asked {
                participant,
                request,
                name: of,
                epoch: at,
                ..
            } if of == name && *at == epoch => Some((participant, request)),
            _ => None,
        });
        let Some((to, question)) = same else {
            return false;
        };
        (*to, *question) = (participant, request);
        true
    }
}

//! What became of commits whose object has gone.

use std::collections::VecDeque;

use crate::object::identity::{Epoch, Identity};

/// How many are remembered.
const MOST: usize = 4_096;

/// The last commits, oldest first.
#[derive(Debug, Default)]
pub(super) struct Outcomes(VecDeque<(Identity, Epoch)>);

impl Outcomes {
    /// Notes a commit, and forgets the oldest beyond the limit.
    pub(super) fn note(&mut self, identity: Identity, epoch: Epoch) {
        if self.of(identity).is_none() {
            self.0.push_back((identity, epoch));
        }
        while self.0.len() > MOST {
            self.0.pop_front();
        }
    }

    /// Returns the epoch of a commit.
    pub(super) fn of(&self, identity: Identity) -> Option<Epoch> {
        self.0
            .iter()
            .find(|(of, _)| *of == identity)
            .map(|(_, epoch)| *epoch)
    }
}

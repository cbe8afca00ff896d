//! Which history the epochs are of that this client was told.
//!
//! Epochs begin anew when broker and keeper both ended. A number that was learned before that says
//! nothing of what is there now: a watch for what is newer than it is answered with whatever there
//! is, and a commit that expects it is refused.

use std::collections::HashMap;

use crate::object::identity::{Epoch, Lineage};
use crate::wire::{Selector, ToBroker, ToClient};

/// The lineage of what was learned. `None` is that of a broker that does not say it: it is taken for
/// any other.
#[derive(Debug)]
pub(super) struct Histories {
    /// Of all names but those below: that of the first broker, or of the last listing.
    base: Option<Lineage>,
    /// Of the names whose epoch an answer told.
    learned: HashMap<String, Option<Lineage>>,
}

impl Histories {
    pub(super) fn new(base: Option<Lineage>) -> Histories {
        Histories {
            base,
            learned: HashMap::new(),
        }
    }

    /// Notes that an epoch of a name was told.
    pub(super) fn learn(&mut self, name: &str, lineage: Option<Lineage>) {
        if lineage == self.base {
            self.learned.remove(name);
        } else {
            self.learned.insert(name.to_owned(), lineage);
        }
    }

    /// Learns from an answer.
    pub(super) fn hear(&mut self, question: &ToBroker, answer: &ToClient, now: Option<Lineage>) {
        match (question, answer) {
            (
                ToBroker::Open {
                    selector: Selector::Latest(name) | Selector::Epoch(name, _),
                    ..
                },
                ToClient::Opened { .. },
            )
            | (ToBroker::Watch { name, .. }, ToClient::Newer { .. }) => self.learn(name, now),
            (ToBroker::List { .. }, ToClient::Listing { .. }) => {
                self.base = now;
                self.learned.clear();
            }
            _ => {}
        }
    }

    /// Says whether the epochs of a name that were learned last are of this history.
    pub(super) fn are_of(&self, name: &str, now: Option<Lineage>) -> bool {
        let learned = self.learned.get(name).copied().unwrap_or(self.base);
        match (learned, now) {
            (Some(learned), Some(now)) => learned == now,
            _ => true,
        }
    }

    /// Lets a watch for what is newer than an epoch of another history take whatever is there.
    pub(super) fn translate(&self, question: &mut ToBroker, now: Option<Lineage>) {
        if let ToBroker::Watch { seen, name, .. } = question
            && *seen != Epoch(u64::MAX)
            && !self.are_of(name, now)
        {
            *seen = Epoch(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen_of(histories: &Histories, name: &str, now: u8) -> u64 {
        let mut watch = ToBroker::Watch {
            request: 1,
            seen: Epoch(5),
            name: name.into(),
        };
        histories.translate(&mut watch, Some(Lineage([now; 16])));
        match watch {
            ToBroker::Watch { seen, .. } => seen.0,
            _ => unreachable!("it is a watch"),
        }
    }

    #[test]
    fn an_epoch_of_another_history_is_none() {
        let lineage = |byte| Some(Lineage([byte; 16]));
        let mut histories = Histories::new(lineage(1));
        assert_eq!(
            (seen_of(&histories, "a", 1), seen_of(&histories, "a", 2)),
            (5, 0)
        );
        let watch = ToBroker::Watch {
            request: 1,
            seen: Epoch(0),
            name: "a".into(),
        };
        let newer = ToClient::Newer {
            request: 1,
            identity: crate::object::identity::Identity([0; 16]),
            epoch: Epoch(1),
        };
        histories.hear(&watch, &newer, lineage(2));
        assert_eq!(
            (seen_of(&histories, "a", 2), seen_of(&histories, "b", 2)),
            (5, 0)
        );
        let listing = ToClient::Listing {
            request: 2,
            bytes: 1,
        };
        histories.hear(&ToBroker::List { request: 2 }, &listing, lineage(3));
        assert_eq!(
            (seen_of(&histories, "a", 3), seen_of(&histories, "b", 3)),
            (5, 5)
        );
        assert!(
            histories.are_of("a", None),
            "a broker that does not say it is believed"
        );
    }
}

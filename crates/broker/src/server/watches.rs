//! Who waits for a newer epoch of which name.

use std::collections::{BTreeMap, BTreeSet};

use crate::object::identity::Epoch;
use crate::server::action::{Asker, Participant};
use crate::wire::RefusalCode;
use transport::server::Refused;

/// A watch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watch {
    pub asker: Asker,
    /// The question that is answered.
    pub request: u64,
    /// The epoch that was seen.
    pub seen: Epoch,
}

/// All watches, by participant and by name.
#[derive(Debug, Default)]
pub(super) struct Watches {
    rows: BTreeMap<Participant, BTreeMap<String, Watch>>,
    by_name: BTreeMap<String, BTreeSet<Participant>>,
}

impl Watches {
    /// Notes a watch, in place of the one that the participant has for the name.
    ///
    /// # Errors
    ///
    /// A refusal for more than `most` names of one participant.
    pub(super) fn begin(&mut self, name: &str, watch: Watch, most: usize) -> Result<(), Refused> {
        let participant = watch.asker.participant;
        let own = self.rows.entry(participant).or_default();
        if own.len() >= most && !own.contains_key(name) {
            let why = format!("the participant watches {most} names already");
            return Err((RefusalCode::Limit, why));
        }
        own.insert(name.into(), watch);
        self.by_name
            .entry(name.into())
            .or_default()
            .insert(participant);
        Ok(())
    }

    /// Finds a participant's watch of a name.
    pub(super) fn get(&self, participant: Participant, name: &str) -> Option<Watch> {
        self.rows.get(&participant)?.get(name).copied()
    }

    /// Ends a participant's watch of a name.
    pub(super) fn end(&mut self, participant: Participant, name: &str) {
        if let Some(own) = self.rows.get_mut(&participant) {
            own.remove(name);
            if own.is_empty() {
                self.rows.remove(&participant);
            }
        }
        self.forget(participant, name);
    }

    /// Ends all watches of a participant.
    pub(super) fn end_all(&mut self, participant: Participant) {
        for name in self
            .rows
            .remove(&participant)
            .unwrap_or_default()
            .into_keys()
        {
            self.forget(participant, &name);
        }
    }

    /// Lists who watches a name.
    pub(super) fn of(&self, name: &str) -> Vec<Participant> {
        let watchers = self.by_name.get(name).into_iter().flatten();
        watchers.copied().collect()
    }

    fn forget(&mut self, participant: Participant, name: &str) {
        if let Some(watchers) = self.by_name.get_mut(name) {
            watchers.remove(&participant);
            if watchers.is_empty() {
                self.by_name.remove(name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_participant_watches_so_many_names_and_leaves_none_behind() {
        let mut watches = Watches::default();
        let watch = |who| Watch {
            asker: Asker {
                participant: Participant(who),
                uid: 0,
                shared_context: false,
            },
            request: 1,
            seen: Epoch(0),
        };
        for name in ["a", "b", "a"] {
            watches.begin(name, watch(1), 2).expect("two names");
        }
        let (refusal, why) = watches.begin("c", watch(1), 2).expect_err("a third name");
        assert_eq!(
            (refusal, why.as_str()),
            (
                RefusalCode::Limit,
                "the participant watches 2 names already"
            )
        );
        watches
            .begin("a", watch(2), 2)
            .expect("another participant");
        assert_eq!(watches.of("a"), [Participant(1), Participant(2)]);
        watches.end(Participant(1), "a");
        watches.begin("c", watch(1), 2).expect("one was taken back");
        watches.end_all(Participant(1));
        watches.end_all(Participant(2));
        assert!(watches.rows.is_empty() && watches.by_name.is_empty());
    }
}

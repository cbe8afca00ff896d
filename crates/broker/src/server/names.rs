//! The names of a broker: who owns each, which epochs it has, and the last that it ever had.

use std::collections::BTreeMap;

use crate::object::identity::{Epoch, Identity};
use crate::server::action::Refused;
use crate::server::bequest::{Tomb, Tombs};
use crate::wire::Refusal;

/// Names, with those that were removed.
const MOST_NAMES: usize = 65_536;

#[derive(Clone, Debug)]
struct Name {
    owner: u32,
    last: Epoch,
    /// Every epoch up to this one was removed.
    removed: Epoch,
    visible: BTreeMap<Epoch, Identity>,
}

impl Name {
    fn of(owner: u32) -> Name {
        Name { owner, last: Epoch(0), removed: Epoch(0), visible: BTreeMap::new() }
    }
}

/// All names. One that was removed stays: its owner keeps it, and its epochs are never used again.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeMap<String, Name>);

impl Names {
    /// Takes the names that a former broker left.
    pub(super) fn restore(&mut self, tombs: &Tombs) {
        for tomb in &tombs.0 {
            let name = Name { last: tomb.last, removed: tomb.removed, ..Name::of(tomb.owner) };
            self.0.insert(tomb.name.clone(), name);
        }
    }

    /// Says whether an epoch of a name was removed.
    pub(super) fn is_removed(&self, name: &str, epoch: Epoch) -> bool {
        self.0.get(name).is_some_and(|row| epoch <= row.removed)
    }

    /// Refuses a name that belongs to another user.
    pub(super) fn check_owner(&self, name: &str, uid: u32) -> Result<(), Refused> {
        match self.0.get(name) {
            Some(row) if row.owner != uid => {
                Err((Refusal::User, format!("{name} belongs to uid {}, not {uid}", row.owner)))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a name for which there is no room.
    pub(super) fn check_room(&self, name: &str) -> Result<(), Refused> {
        if self.0.len() >= MOST_NAMES && !self.0.contains_key(name) {
            return Err((Refusal::Limit, format!("the broker has {MOST_NAMES} names already")));
        }
        Ok(())
    }

    /// Refuses a name that has another epoch than its writer expects; 0 stands for a name that has none.
    pub(super) fn check_epoch(&self, name: &str, expect: Option<Epoch>) -> Result<(), Refused> {
        let is = self.latest(name).map_or(Epoch(0), |(epoch, _)| epoch);
        match expect {
            Some(expected) if expected != is => {
                Err((Refusal::Conflict, format!("{name} is at epoch {is}, not at {expected} as was expected")))
            }
            _ => Ok(()),
        }
    }

    /// Says whether a name was ever committed.
    pub(super) fn is_known(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Returns the last epoch that a name ever had; 0 for none.
    pub(super) fn last(&self, name: &str) -> Epoch {
        self.0.get(name).map_or(Epoch(0), |row| row.last)
    }

    /// Finds the newest visible epoch of a name.
    pub(super) fn latest(&self, name: &str) -> Option<(Epoch, Identity)> {
        self.0.get(name)?.visible.last_key_value().map(|(epoch, identity)| (*epoch, *identity))
    }

    /// Finds a visible epoch of a name.
    pub(super) fn at(&self, name: &str, epoch: Epoch) -> Option<Identity> {
        self.0.get(name)?.visible.get(&epoch).copied()
    }

    /// Makes an epoch visible. The first user to commit a name owns it.
    pub(super) fn publish(&mut self, name: &str, owner: u32, epoch: Epoch, identity: Identity) {
        let row = self.0.entry(name.to_owned()).or_insert_with(|| Name::of(owner));
        row.last = row.last.max(epoch);
        row.visible.insert(epoch, identity);
    }

    /// Takes one epoch of a name away; all of them, for good, for epoch 0.
    pub(super) fn take(&mut self, name: &str, epoch: Epoch) -> Vec<Identity> {
        let Some(row) = self.0.get_mut(name) else { return Vec::new() };
        if epoch != Epoch(0) {
            return row.visible.remove(&epoch).into_iter().collect();
        }
        row.removed = row.last;
        std::mem::take(&mut row.visible).into_values().collect()
    }

    /// Takes the oldest epochs of a name away, so that no more than `most` are left.
    pub(super) fn take_beyond(&mut self, name: &str, most: usize) -> Vec<Identity> {
        let Some(row) = self.0.get_mut(name) else { return Vec::new() };
        let beyond = row.visible.len().saturating_sub(most);
        (0..beyond).filter_map(|_| row.visible.pop_first()).map(|(_, identity)| identity).collect()
    }

    /// Lists all names.
    pub(super) fn all(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    /// Says what there is of a name in place of an epoch that is not.
    pub(super) fn why_not_found(&self, name: &str) -> String {
        match self.0.get(name) {
            None => "it was never committed".into(),
            Some(row) if row.visible.is_empty() => format!("it was removed; its last epoch was {}", row.last),
            Some(row) => {
                let epochs: Vec<String> = row.visible.keys().map(Epoch::to_string).collect();
                format!("the epochs that are kept: {}", epochs.join(", "))
            }
        }
    }

    /// Returns what must be known of names besides their visible objects.
    pub(super) fn tombs(&self) -> Tombs {
        let rows = self.0.iter().filter(|(_, row)| {
            row.removed > Epoch(0) || row.visible.last_key_value().is_none_or(|(epoch, _)| *epoch < row.last)
        });
        let tomb = |(name, row): (&String, &Name)| Tomb {
            name: name.clone(),
            owner: row.owner,
            last: row.last,
            removed: row.removed,
        };
        Tombs(rows.map(tomb).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_is_never_used_again_and_the_owner_stays() {
        let mut names = Names::default();
        let identity = |byte| Identity([byte; 16]);
        names.publish("model", 7, Epoch(1), identity(1));
        names.publish("model", 7, Epoch(2), identity(2));
        names.publish("model", 7, Epoch(3), identity(3));
        assert_eq!(names.take_beyond("model", 2), [identity(1)]);
        assert_eq!(names.take("model", Epoch(3)), [identity(3)]);
        assert_eq!((names.latest("model"), names.last("model")), (Some((Epoch(2), identity(2))), Epoch(3)));
        assert!(names.check_epoch("model", Some(Epoch(2))).is_ok());
        let tombs = names.tombs();
        assert_eq!(tombs.0.len(), 1, "3 was removed, so that the visible epochs do not say what comes next");
        assert_eq!(names.take("model", Epoch(0)), [identity(2)]);
        let mut next = Names::default();
        next.restore(&names.tombs());
        assert!(next.is_removed("model", Epoch(3)) && !next.is_removed("model", Epoch(4)));
        assert_eq!(next.last("model"), Epoch(3));
        assert_eq!(next.why_not_found("model"), "it was removed; its last epoch was 3");
        let (refusal, why) = next.check_owner("model", 8).expect_err("another user's");
        assert_eq!((refusal, why.as_str()), (Refusal::User, "model belongs to uid 7, not 8"));
        assert!(next.check_owner("other", 8).is_ok(), "nobody's yet");
    }

    #[test]
    fn a_name_beyond_the_limit_is_refused_and_a_known_one_is_not() {
        let mut names = Names::default();
        for number in 0..MOST_NAMES {
            names.publish(&number.to_string(), 0, Epoch(1), Identity([0; 16]));
        }
        assert!(names.check_room("0").is_ok());
        let (refusal, why) = names.check_room("one more").expect_err("full");
        assert_eq!((refusal, why.as_str()), (Refusal::Limit, "the broker has 65536 names already"));
    }
}

//! The names of a broker: who owns each, which epochs it has, and the last that it ever had.

use std::collections::BTreeMap;

use crate::object::identity::{Epoch, Identity};
use crate::object::manifest::Manifest;
use crate::server::bequest::{Tomb, Tombs};
use crate::wire::RefusalCode;
use transport::server::Refused;

/// Names, with those that were removed.
const MOST_NAMES: usize = 65_536;

#[derive(Clone, Debug)]
struct Name {
    owner: u32,
    /// The host that the name is written on; none for this one.
    home: Option<String>,
    last: Epoch,
    /// Every epoch up to this one was removed.
    removed: Epoch,
    visible: BTreeMap<Epoch, Identity>,
}

impl Name {
    fn of(owner: u32, home: Option<&str>) -> Name {
        Name {
            owner,
            home: home.map(str::to_owned),
            last: Epoch(0),
            removed: Epoch(0),
            visible: BTreeMap::new(),
        }
    }
}

/// All names. One that was removed stays: its owner keeps it, and its epochs are never used again.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeMap<String, Name>);

impl Names {
    /// Takes the names that a former broker left.
    pub(super) fn restore(&mut self, tombs: &Tombs) {
        for tomb in &tombs.0 {
            let name = Name {
                last: tomb.last,
                removed: tomb.removed,
                ..Name::of(tomb.owner, tomb.home.as_deref())
            };
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
            Some(row) if row.owner != uid => Err((
                RefusalCode::User,
                format!("{name} belongs to uid {}, not {uid}", row.owner),
            )),
            _ => Ok(()),
        }
    }

    /// Refuses a name that is written on another host: a name has one home. `home` is none for this
    /// host.
    pub(super) fn check_home(&self, name: &str, home: Option<&str>) -> Result<(), Refused> {
        let here = |home: Option<&str>| {
            home.map_or("on this host".to_owned(), |home| format!("on host {home}"))
        };
        match self.0.get(name) {
            Some(row) if row.home.as_deref() != home => {
                let why = format!(
                    "{name} is written {}, and not {}",
                    here(row.home.as_deref()),
                    here(home)
                );
                Err((RefusalCode::Home, why))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a replica's epoch that the name has, had and lost, or would lose at once to those
    /// that are kept.
    pub(super) fn check_replica(
        &self,
        name: &str,
        epoch: Epoch,
        most: usize,
    ) -> Result<(), Refused> {
        let Some(row) = self.0.get(name) else {
            return Ok(());
        };
        let conflict = |why| Err((RefusalCode::Conflict, why));
        if row.visible.contains_key(&epoch) {
            return conflict(format!("another object is epoch {epoch} of {name} already"));
        }
        if epoch <= row.removed {
            return conflict(format!(
                "{name} was removed up to epoch {}, and {epoch} was asked for",
                row.removed
            ));
        }
        match row.visible.first_key_value() {
            Some((oldest, _)) if row.visible.len() >= most && epoch < *oldest => conflict(format!(
                "{most} epochs of {name} are kept, from {oldest} on, and {epoch} is older"
            )),
            _ => Ok(()),
        }
    }

    /// Refuses a name beyond the limit.
    pub(super) fn check_room(&self, name: &str) -> Result<(), Refused> {
        if self.0.len() >= MOST_NAMES && !self.0.contains_key(name) {
            return Err((
                RefusalCode::Limit,
                format!("the broker has {MOST_NAMES} names already"),
            ));
        }
        Ok(())
    }

    /// Refuses a name that has another epoch than its writer expects; 0 stands for a name that has
    /// none.
    pub(super) fn check_epoch(&self, name: &str, expect: Option<Epoch>) -> Result<(), Refused> {
        let is = self.latest(name).map_or(Epoch(0), |(epoch, _)| epoch);
        match expect {
            Some(expected) if expected != is => Err((
                RefusalCode::Conflict,
                format!("{name} is at epoch {is}, not at {expected} as was expected"),
            )),
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
        self.0
            .get(name)?
            .visible
            .last_key_value()
            .map(|(epoch, identity)| (*epoch, *identity))
    }

    /// Counts the visible epochs of a name that are newer than one.
    pub(super) fn rank(&self, name: &str, epoch: Epoch) -> usize {
        use std::ops::Bound::{Excluded, Unbounded};
        self.0.get(name).map_or(0, |row| {
            row.visible.range((Excluded(epoch), Unbounded)).count()
        })
    }

    /// Finds a visible epoch of a name.
    pub(super) fn at(&self, name: &str, epoch: Epoch) -> Option<Identity> {
        self.0.get(name)?.visible.get(&epoch).copied()
    }

    /// Makes an epoch visible. The first user to commit a name owns it.
    pub(super) fn publish(&mut self, manifest: &Manifest, epoch: Epoch) {
        let Manifest {
            name,
            home,
            owner,
            identity,
            ..
        } = manifest;
        let row = self
            .0
            .entry(name.clone())
            .or_insert_with(|| Name::of(*owner, home.as_deref()));
        row.last = row.last.max(epoch);
        row.visible.insert(epoch, *identity);
    }

    /// Takes one epoch of a name away; all of them, for good, for epoch 0.
    pub(super) fn take(&mut self, name: &str, epoch: Epoch) -> Vec<Identity> {
        let Some(row) = self.0.get_mut(name) else {
            return Vec::new();
        };
        if epoch != Epoch(0) {
            return row.visible.remove(&epoch).into_iter().collect();
        }
        row.removed = row.last;
        std::mem::take(&mut row.visible).into_values().collect()
    }

    /// Takes the oldest epochs of a name away, so that no more than `most` are left.
    pub(super) fn take_beyond(&mut self, name: &str, most: usize) -> Vec<Identity> {
        let Some(row) = self.0.get_mut(name) else {
            return Vec::new();
        };
        let beyond = row.visible.len().saturating_sub(most);
        (0..beyond)
            .filter_map(|_| row.visible.pop_first())
            .map(|(_, identity)| identity)
            .collect()
    }

    /// Lists all names.
    pub(super) fn all(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    /// Says what there is of a name in place of an epoch that is not.
    pub(super) fn why_not_found(&self, name: &str) -> String {
        match self.0.get(name) {
            None => "it was never committed".into(),
            Some(row) if row.visible.is_empty() => {
                format!("it was removed; its last epoch was {}", row.last)
            }
            Some(row) => {
                let epochs: Vec<String> = row.visible.keys().map(Epoch::to_string).collect();
                format!("the epochs that are kept: {}", epochs.join(", "))
            }
        }
    }

    /// Returns what must be known of names besides their visible objects.
    pub(super) fn tombs(&self) -> Tombs {
        let rows = self.0.iter().filter(|(_, row)| {
            row.removed > Epoch(0)
                || row
                    .visible
                    .last_key_value()
                    .is_none_or(|(epoch, _)| *epoch < row.last)
        });
        let tomb = |(name, row): (&String, &Name)| Tomb {
            name: name.clone(),
            home: row.home.clone(),
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
    use crate::object::layout::Layout;
    use crate::object::manifest::Readers;
    use gpu_api::{BackendKind, DeviceUuid};

    fn object(name: &str, home: Option<&str>, owner: u32, identity: Identity) -> Manifest {
        Manifest {
            identity,
            name: name.into(),
            epoch: Epoch(0),
            home: home.map(str::to_owned),
            backend: BackendKind::Host,
            device: DeviceUuid([0; 16]),
            owner,
            readers: Readers::Owner,
            granularity: 1,
            layout: Layout::pack([], b"").expect("an empty layout"),
        }
    }

    #[test]
    fn an_epoch_is_never_used_again_and_the_owner_stays() {
        let mut names = Names::default();
        let identity = |byte| Identity([byte; 16]);
        names.publish(&object("model", None, 7, identity(1)), Epoch(1));
        names.publish(&object("model", None, 7, identity(2)), Epoch(2));
        names.publish(&object("model", None, 7, identity(3)), Epoch(3));
        assert_eq!(names.take_beyond("model", 2), [identity(1)]);
        assert_eq!(names.take("model", Epoch(3)), [identity(3)]);
        assert_eq!(
            (names.latest("model"), names.last("model")),
            (Some((Epoch(2), identity(2))), Epoch(3))
        );
        assert!(names.check_epoch("model", Some(Epoch(2))).is_ok());
        let tombs = names.tombs();
        assert_eq!(
            tombs.0.len(),
            1,
            "3 was removed, so that the visible epochs do not say what comes next"
        );
        assert_eq!(names.take("model", Epoch(0)), [identity(2)]);
        let mut next = Names::default();
        next.restore(&names.tombs());
        assert!(next.is_removed("model", Epoch(3)) && !next.is_removed("model", Epoch(4)));
        assert_eq!(next.last("model"), Epoch(3));
        assert_eq!(
            next.why_not_found("model"),
            "it was removed; its last epoch was 3"
        );
        let (refusal, why) = next.check_owner("model", 8).expect_err("another user's");
        assert_eq!(
            (refusal, why.as_str()),
            (RefusalCode::User, "model belongs to uid 7, not 8")
        );
        assert!(next.check_owner("other", 8).is_ok(), "nobody's yet");
    }

    #[test]
    fn a_name_beyond_the_limit_is_refused_and_a_known_one_is_not() {
        let mut names = Names::default();
        for number in 0..MOST_NAMES {
            names.publish(
                &object(&number.to_string(), None, 0, Identity([0; 16])),
                Epoch(1),
            );
        }
        assert!(names.check_room("0").is_ok());
        let (refusal, why) = names.check_room("one more").expect_err("full");
        assert_eq!(
            (refusal, why.as_str()),
            (RefusalCode::Limit, "the broker has 65536 names already")
        );
    }

    #[test]
    fn a_name_has_one_home_and_a_replica_an_epoch_that_the_name_can_keep() {
        let mut names = Names::default();
        names.publish(&object("model", Some("a"), 7, Identity([5; 16])), Epoch(5));
        names.publish(&object("model", Some("a"), 7, Identity([6; 16])), Epoch(6));
        let why = |refused: Result<(), Refused>| refused.expect_err("refused");
        let (refusal, text) = why(names.check_home("model", None));
        assert_eq!(
            (refusal, text.as_str()),
            (
                RefusalCode::Home,
                "model is written on host a, and not on this host"
            )
        );
        assert_eq!(
            why(names.check_home("model", Some("b"))).1,
            "model is written on host a, and not on host b"
        );
        assert!(
            names.check_home("model", Some("a")).is_ok() && names.check_home("other", None).is_ok()
        );
        let (refusal, text) = why(names.check_replica("model", Epoch(5), 2));
        assert_eq!(
            (refusal, text.as_str()),
            (
                RefusalCode::Conflict,
                "another object is epoch 5 of model already"
            )
        );
        assert!(
            why(names.check_replica("model", Epoch(4), 2))
                .1
                .starts_with("2 epochs of model are kept, from 5 on")
        );
        assert!(names.check_replica("model", Epoch(4), 3).is_ok());
        names.take("model", Epoch(0));
        assert!(
            why(names.check_replica("model", Epoch(6), 2))
                .1
                .starts_with("model was removed up to epoch 6")
        );
        let mut next = Names::default();
        next.restore(&names.tombs());
        assert!(
            next.check_home("model", None).is_err(),
            "the home stays when all was removed"
        );
        assert!(
            next.check_replica("model", Epoch(7), 2).is_ok()
                && next.check_replica("model", Epoch(6), 2).is_err()
        );
    }
}

//! The names of a broker: who owns each, which epochs it has, and the last that it ever had.

use std::collections::BTreeMap;

use crate::object::identity::{Epoch, Identity};
use crate::object::manifest::Manifest;
use crate::server::bequest::{Tomb, Tombs};
use crate::wire::RefusalCode;
use transport::server::Refused;

/// Removals that are remembered each by itself. Of older ones the highest epoch alone is known, below
/// which no name begins.
const MOST_TOMBS: usize = 1_024;

#[derive(Clone, Debug)]
struct Name {
    owner: u32,
    /// The host that the name is written on; none for this one.
    home: Option<String>,
    last: Epoch,
    /// Every epoch up to this one was removed.
    removed: Epoch,
    visible: BTreeMap<Epoch, Identity>,
    /// Its place among the tombs, if it has one.
    tomb: Option<u64>,
}

impl Name {
    fn of(owner: u32, home: Option<&str>) -> Name {
        Name {
            owner,
            home: home.map(str::to_owned),
            last: Epoch(0),
            removed: Epoch(0),
            visible: BTreeMap::new(),
            tomb: None,
        }
    }

    /// Says whether its visible epochs do not say all that must be known of it.
    fn needs_tomb(&self) -> bool {
        self.removed > Epoch(0) || !self.ends_visibly()
    }

    /// Says whether its last epoch is visible.
    fn ends_visibly(&self) -> bool {
        let newest = self.visible.last_key_value();
        newest.is_some_and(|(epoch, _)| *epoch >= self.last)
    }
}

/// All names. One that was removed stays for a while: its owner keeps it. No epoch of a name is ever
/// used again.
#[derive(Debug, Default)]
pub(super) struct Names {
    rows: BTreeMap<String, Name>,
    /// The names that need a tomb, those that changed last at the end.
    tombs: BTreeMap<u64, String>,
    next_tomb: u64,
    /// The highest epoch of the names that are forgotten: a name that is not known begins after it.
    floor: Epoch,
    /// How many have a visible epoch.
    visible: usize,
}

impl Names {
    /// Takes the names that a former broker left, and the epoch after which an unknown name begins.
    pub(super) fn restore(&mut self, tombs: &Tombs, floor: Epoch) {
        self.floor = floor;
        for tomb in &tombs.0 {
            let name = Name {
                last: tomb.last,
                removed: tomb.removed,
                ..Name::of(tomb.owner, tomb.home.as_deref())
            };
            self.rows.insert(tomb.name.clone(), name);
            self.entomb(&tomb.name);
        }
    }

    /// Returns the epoch after which a name that is not known begins.
    pub(super) fn floor(&self) -> Epoch {
        self.floor
    }

    /// Counts the names that have a visible epoch.
    pub(super) fn visible(&self) -> usize {
        self.visible
    }

    /// Gives a name that changed its tomb, or takes it away, and forgets the oldest beyond the limit.
    fn entomb(&mut self, name: &str) {
        let Some(row) = self.rows.get_mut(name) else {
            return;
        };
        if let Some(place) = row.tomb.take() {
            self.tombs.remove(&place);
        }
        if row.needs_tomb() {
            self.next_tomb += 1;
            row.tomb = Some(self.next_tomb);
            self.tombs.insert(self.next_tomb, name.into());
        }
        // A name whose last epoch was removed, and others not, cannot be forgotten: there are no
        // more of them than names that have an object. Each is looked at again later.
        for _ in 0..8 {
            if self.tombs.len() <= MOST_TOMBS {
                return;
            }
            let Some((_, oldest)) = self.tombs.pop_first() else {
                return;
            };
            let Some(row) = self.rows.get_mut(&oldest) else {
                continue;
            };
            row.tomb = None;
            if row.visible.is_empty() {
                self.release(&oldest);
            } else if row.ends_visibly() {
                row.removed = Epoch(0);
            } else {
                self.next_tomb += 1;
                row.tomb = Some(self.next_tomb);
                self.tombs.insert(self.next_tomb, oldest);
            }
        }
    }

    /// Forgets a name that has no visible epoch: any user may take it, and its epochs go on above
    /// all that it had.
    pub(super) fn release(&mut self, name: &str) {
        if self
            .rows
            .get(name)
            .is_none_or(|row| !row.visible.is_empty())
        {
            return;
        }
        let Some(row) = self.rows.remove(name) else {
            return;
        };
        if let Some(place) = row.tomb {
            self.tombs.remove(&place);
        }
        // The epochs of a replica are its home's.
        if row.home.is_none() {
            self.floor = self.floor.max(row.last);
        }
    }

    /// Says whether an epoch of a name was removed.
    pub(super) fn is_removed(&self, name: &str, epoch: Epoch) -> bool {
        self.rows.get(name).is_some_and(|row| epoch <= row.removed)
    }

    /// Refuses a name that belongs to another user.
    pub(super) fn check_owner(&self, name: &str, uid: u32) -> Result<(), Refused> {
        match self.rows.get(name) {
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
        match self.rows.get(name) {
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
        let Some(row) = self.rows.get(name) else {
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

    /// Refuses a name beyond those that may have an object.
    pub(super) fn check_room(&self, name: &str, most: usize) -> Result<(), Refused> {
        let has_one = |row: &Name| !row.visible.is_empty();
        if self.visible >= most && !self.rows.get(name).is_some_and(has_one) {
            return Err((
                RefusalCode::Limit,
                format!("{most} names have an object already"),
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

    /// Returns the epoch that the next commit of a name gets.
    pub(super) fn next(&self, name: &str) -> Epoch {
        let last = self.rows.get(name).map_or(self.floor, |row| row.last);
        last.next()
    }

    /// Returns the user that a name belongs to.
    pub(super) fn owner(&self, name: &str) -> Option<u32> {
        self.rows.get(name).map(|row| row.owner)
    }

    /// Says whether a name was ever committed.
    pub(super) fn is_known(&self, name: &str) -> bool {
        self.rows.contains_key(name)
    }

    /// Returns the last epoch that a name ever had; 0 for one that is not known.
    pub(super) fn last(&self, name: &str) -> Epoch {
        self.rows.get(name).map_or(Epoch(0), |row| row.last)
    }

    /// Finds the newest visible epoch of a name.
    pub(super) fn latest(&self, name: &str) -> Option<(Epoch, Identity)> {
        self.rows
            .get(name)?
            .visible
            .last_key_value()
            .map(|(epoch, identity)| (*epoch, *identity))
    }

    /// Counts the visible epochs of a name that are newer than one.
    pub(super) fn rank(&self, name: &str, epoch: Epoch) -> usize {
        use std::ops::Bound::{Excluded, Unbounded};
        self.rows.get(name).map_or(0, |row| {
            row.visible.range((Excluded(epoch), Unbounded)).count()
        })
    }

    /// Lists the visible objects of a name.
    pub(super) fn all_of(&self, name: &str) -> impl Iterator<Item = Identity> + '_ {
        let row = self.rows.get(name).into_iter();
        row.flat_map(|row| row.visible.values().copied())
    }

    /// Lists the visible objects of the first `most` names that have one, but no more than four times
    /// as many objects.
    pub(super) fn first(&self, most: usize) -> impl Iterator<Item = Identity> + '_ {
        let rows = self.rows.values().filter(|row| !row.visible.is_empty());
        let objects = rows
            .take(most)
            .flat_map(|row| row.visible.values().copied());
        objects.take(most.saturating_mul(4))
    }

    /// Finds a visible epoch of a name.
    pub(super) fn at(&self, name: &str, epoch: Epoch) -> Option<Identity> {
        self.rows.get(name)?.visible.get(&epoch).copied()
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
            .rows
            .entry(name.clone())
            .or_insert_with(|| Name::of(*owner, home.as_deref()));
        self.visible += usize::from(row.visible.is_empty());
        row.last = row.last.max(epoch);
        row.visible.insert(epoch, *identity);
        self.entomb(name);
    }

    /// Takes one epoch of a name away; all of them, for good, for epoch 0.
    pub(super) fn take(&mut self, name: &str, epoch: Epoch) -> Vec<Identity> {
        let Some(row) = self.rows.get_mut(name) else {
            return Vec::new();
        };
        let had = !row.visible.is_empty();
        let taken = if epoch == Epoch(0) {
            row.removed = row.last;
            std::mem::take(&mut row.visible).into_values().collect()
        } else {
            row.visible.remove(&epoch).into_iter().collect()
        };
        self.visible -= usize::from(had && row.visible.is_empty());
        self.entomb(name);
        taken
    }

    /// Takes the oldest epochs of a name away, so that no more than `most` are left.
    pub(super) fn take_beyond(&mut self, name: &str, most: usize) -> Vec<Identity> {
        let Some(row) = self.rows.get_mut(name) else {
            return Vec::new();
        };
        let beyond = row.visible.len().saturating_sub(most);
        (0..beyond)
            .filter_map(|_| row.visible.pop_first())
            .map(|(_, identity)| identity)
            .collect()
        // The newest is left: no tomb comes or goes.
    }

    /// Lists all names.
    pub(super) fn all(&self) -> Vec<String> {
        self.rows.keys().cloned().collect()
    }

    /// Says what there is of a name in place of an epoch that is not.
    pub(super) fn why_not_found(&self, name: &str) -> String {
        match self.rows.get(name) {
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
        let tomb = |name: &String| {
            let row = self.rows.get(name)?;
            Some(Tomb {
                name: name.clone(),
                home: row.home.clone(),
                owner: row.owner,
                last: row.last,
                removed: row.removed,
            })
        };
        Tombs(self.tombs.values().filter_map(tomb).collect())
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
        next.restore(&names.tombs(), names.floor());
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
    fn a_name_beyond_the_limit_is_refused_and_a_removed_one_counts_no_more() {
        let mut names = Names::default();
        for number in 0..3 {
            let name = number.to_string();
            names.publish(&object(&name, None, 0, Identity([0; 16])), Epoch(1));
        }
        assert!(names.check_room("0", 3).is_ok(), "it has one");
        let (refusal, why) = names.check_room("one more", 3).expect_err("full");
        assert_eq!(
            (refusal, why.as_str()),
            (RefusalCode::Limit, "3 names have an object already")
        );
        names.take("1", Epoch(0));
        assert!(names.check_room("one more", 3).is_ok() && names.visible() == 2);
        names.take("2", Epoch(1));
        assert!(names.check_room("2", 3).is_ok() && names.visible() == 1);
    }

    #[test]
    fn names_that_were_removed_are_forgotten_and_their_epochs_are_not_used_again() {
        let mut names = Names::default();
        let identity = Identity([1; 16]);
        for number in 0..=MOST_TOMBS as u64 {
            let name = format!("n{number}");
            let epoch = Epoch(if number == 0 { 7 } else { 1 });
            names.publish(&object(&name, None, 7, identity), epoch);
            assert_eq!(names.take(&name, Epoch(0)).len(), 1);
        }
        assert_eq!(names.tombs().0.len(), MOST_TOMBS);
        assert!(!names.is_known("n0") && names.is_known("n1"));
        assert_eq!((names.floor(), names.next("n0")), (Epoch(7), Epoch(8)));
        assert_eq!(names.next("n1"), Epoch(2), "it is remembered by itself");
        let mut next = Names::default();
        next.restore(&names.tombs(), names.floor());
        assert_eq!((next.next("n0"), next.next("n1")), (Epoch(8), Epoch(2)));
        // A name whose last epoch alone was removed stays, though it is the oldest.
        let mut names = Names::default();
        names.publish(&object("half", None, 7, identity), Epoch(1));
        names.publish(&object("half", None, 7, identity), Epoch(2));
        names.take("half", Epoch(2));
        for number in 0..2 * MOST_TOMBS as u64 {
            let name = format!("n{number}");
            names.publish(&object(&name, None, 7, identity), Epoch(1));
            names.take(&name, Epoch(0));
        }
        assert_eq!(names.next("half"), Epoch(3));
        assert!(names.tombs().0.iter().any(|tomb| tomb.name == "half"));
    }

    #[test]
    fn a_released_name_is_anybodys_and_goes_on_above_its_epochs() {
        let mut names = Names::default();
        let identity = Identity([1; 16]);
        names.publish(&object("prod", None, 7, identity), Epoch(4));
        names.release("prod");
        assert!(names.check_owner("prod", 8).is_err(), "it has an object");
        names.take("prod", Epoch(0));
        names.release("prod");
        assert!(names.check_owner("prod", 8).is_ok());
        assert_eq!((names.next("prod"), names.tombs().0.len()), (Epoch(5), 0));
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
        next.restore(&names.tombs(), names.floor());
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

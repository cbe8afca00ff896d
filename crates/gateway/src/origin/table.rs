//! The table of leases. Pure: no clock, no broker, no network.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::message::{
    Again, Ask, Confirm, Grant, Incarnation, LeaseId, LeaseNumber, Release, Renew,
};

/// What other gateways may have at a time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Limits {
    /// Leases in all.
    pub leases: usize,
    /// Leases of one host.
    pub of_host: usize,
    /// Leases of one object, those of slow and dead readers among them: the plan serves fewer at a
    /// time.
    pub of_object: usize,
    /// How long a lease lives without a renewal.
    pub time: Duration,
    /// How long it lives with any number of them.
    pub most_time: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            leases: 64,
            of_host: 4,
            of_object: 8,
            time: Duration::from_secs(30),
            most_time: Duration::from_secs(3_600),
        }
    }
}

/// What a lease held: dropped, it takes the registration back and closes the object.
///
/// Only an ended lease gives it away.
#[derive(PartialEq, Eq, Hash, Debug)]
#[must_use = "dropped in time, or the memory stays"]
pub struct Ended<M>(M);

impl<M> Ended<M> {
    /// Returns what the lease held, which nobody will confirm any more.
    pub fn into_inner(self) -> M {
        self.0
    }
}

/// What becomes of an ask.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Asked {
    /// Open the object and register it, then call [`Table::registered`] with this number, or
    /// [`Table::failed`].
    Open(LeaseNumber),
    /// The lease is there.
    Again(Grant),
    /// The same question is being answered: the object of this lease is not registered yet.
    Wait(LeaseNumber),
    /// There is no room at this moment: somebody else may serve it, or this gateway later.
    Busy(String),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Row<M> {
    asker: Incarnation,
    host: String,
    number: u64,
    since: Duration,
    until: Duration,
    renewed: u64,
    /// What it holds, once it does.
    live: Option<(Grant, M)>,
}

/// The leases of a gateway that other gateways hold. `M` is what a lease holds.
///
/// Times are since any moment, and never go back.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Table<M> {
    incarnation: Incarnation,
    limits: Limits,
    rows: BTreeMap<LeaseNumber, Row<M>>,
}

impl<M> Table<M> {
    /// Makes an empty one.
    pub fn new(incarnation: Incarnation, limits: Limits) -> Table<M> {
        Table {
            incarnation,
            limits,
            rows: BTreeMap::new(),
        }
    }

    /// Takes the question for a lease, which has this number if it is a new one.
    pub fn ask(&mut self, now: Duration, ask: &Ask, number: LeaseNumber) -> Asked {
        let same = |row: &&Row<M>| row.asker == ask.asker && row.number == ask.number;
        if let Some((lease, row)) = self.rows.iter().find(|(_, row)| same(row)) {
            return match &row.live {
                Some((grant, _)) if now < row.until => Asked::Again(*grant),
                Some(_) => Asked::Busy("the lease of this question has ended".into()),
                None => Asked::Wait(*lease),
            };
        }
        let of_host = self
            .rows
            .values()
            .filter(|row| row.host == ask.host)
            .count();
        if self.rows.len() >= self.limits.leases || of_host >= self.limits.of_host {
            let of_host = format!("{of_host} of {} of host {}", self.limits.of_host, ask.host);
            return Asked::Busy(format!(
                "{} of {} leases, {of_host}",
                self.rows.len(),
                self.limits.leases
            ));
        }
        if self.rows.contains_key(&number) {
            return Asked::Busy("another lease has the number that was drawn".into());
        }
        let until = now + self.limits.time;
        let host = ask.host.clone();
        let row = Row {
            asker: ask.asker,
            host,
            number: ask.number,
            since: now,
            until,
            renewed: 0,
            live: None,
        };
        self.rows.insert(number, row);
        Asked::Open(number)
    }

    /// Makes a lease live, from this moment on, however long the registration took. Gives back what
    /// it was to hold where the object has leases enough.
    ///
    /// # Errors
    ///
    /// What it was to hold, whether to ask again, and why.
    pub fn registered(
        &mut self,
        now: Duration,
        lease: LeaseNumber,
        identity: [u8; 16],
        epoch: u64,
        held: M,
    ) -> Result<Grant, (Ended<M>, Again, String)> {
        let of_object = self.rows.values().filter(|row| {
            row.live
                .as_ref()
                .is_some_and(|(g, _)| g.identity == identity)
        });
        if of_object.count() >= self.limits.of_object {
            self.rows.remove(&lease);
            let why = format!("{} gateways read the object already", self.limits.of_object);
            return Err((Ended(held), Again::Busy, why));
        }
        match self.rows.get_mut(&lease) {
            Some(row) if row.live.is_none() => {
                let lease = LeaseId {
                    incarnation: self.incarnation,
                    lease,
                    asker: row.asker,
                };
                let lives_ms = u64::try_from(self.limits.time.as_millis()).unwrap_or(u64::MAX);
                let grant = Grant {
                    lease,
                    identity,
                    epoch,
                    lives_ms,
                };
                (row.since, row.until) = (now, now + self.limits.time);
                row.live = Some((grant, held));
                Ok(grant)
            }
            _ => Err((Ended(held), Again::Later, "the lease was given up".into())),
        }
    }

    /// Forgets a lease whose object could not be opened or registered.
    pub fn failed(&mut self, lease: LeaseNumber) {
        if self.rows.get(&lease).is_some_and(|row| row.live.is_none()) {
            self.rows.remove(&lease);
        }
    }

    /// Finds the row of a lease, if it is of this process and of the asker that is named.
    fn row(&self, lease: LeaseId) -> Option<&Row<M>> {
        self.rows
            .get(&lease.lease)
            .filter(|row| lease.incarnation == self.incarnation && lease.asker == row.asker)
    }

    /// Says whether a lease is live and holds this object.
    pub fn confirm(&self, now: Duration, confirm: &Confirm) -> bool {
        self.row(confirm.lease).is_some_and(|row| {
            now < row.until
                && row
                    .live
                    .as_ref()
                    .is_some_and(|(grant, _)| grant.identity == confirm.identity)
        })
    }

    /// Lets a live lease go on. Says no for one that is not, and for a renewal that is older than
    /// another.
    pub fn renew(&mut self, now: Duration, renew: &Renew) -> bool {
        if self.row(renew.lease).is_none() {
            return false;
        }
        let Some(row) = self.rows.get_mut(&renew.lease.lease) else {
            return false;
        };
        if row.live.is_none() || now >= row.until || renew.number <= row.renewed {
            return false;
        }
        row.renewed = renew.number;
        row.until = (now + self.limits.time)
            .min(row.since + self.limits.most_time)
            .max(row.until);
        true
    }

    /// Ends a lease because its holder says so, and returns what it held.
    pub fn release(&mut self, release: &Release) -> Option<Ended<M>> {
        self.row(release.lease)?.live.as_ref()?;
        let row = self.rows.remove(&release.lease.lease)?;
        row.live.map(|(_, held)| Ended(held))
    }

    /// Ends the leases whose time is over, and returns what they held. The time of one whose object
    /// is not registered has not begun.
    pub fn expire(&mut self, now: Duration) -> Vec<Ended<M>> {
        self.end(|row| row.live.is_some() && now >= row.until)
    }

    /// Ends the leases whose memory cannot be read any more, and returns what they held.
    pub fn lose(&mut self, is_lost: impl Fn(&M) -> bool) -> Vec<Ended<M>> {
        self.end(|row| row.live.as_ref().is_some_and(|(_, held)| is_lost(held)))
    }

    fn end(&mut self, is_over: impl Fn(&Row<M>) -> bool) -> Vec<Ended<M>> {
        let over: Vec<LeaseNumber> = self
            .rows
            .iter()
            .filter(|(_, row)| is_over(row))
            .map(|(lease, _)| *lease)
            .collect();
        let rows = over.iter().filter_map(|lease| self.rows.remove(lease));
        rows.filter_map(|row| row.live)
            .map(|(_, held)| Ended(held))
            .collect()
    }

    /// Returns the live leases: what each is of, which process of which host has it, and how long
    /// it lives yet.
    pub fn live(
        &self,
        now: Duration,
    ) -> impl Iterator<Item = (Grant, Incarnation, &str, Duration)> {
        self.rows.values().filter_map(move |row| {
            let (grant, _) = row.live.as_ref()?;
            Some((
                *grant,
                row.asker,
                row.host.as_str(),
                row.until.saturating_sub(now),
            ))
        })
    }

    /// Looks at what a lease holds that is live and whose time is not over.
    pub fn alive(&self, now: Duration, lease: LeaseId) -> Option<&M> {
        let row = self.row(lease).filter(|row| now < row.until)?;
        row.live.as_ref().map(|(_, held)| held)
    }

    /// Looks at what a live lease holds.
    pub fn of(&self, lease: LeaseNumber) -> Option<&M> {
        self.rows.get(&lease)?.live.as_ref().map(|(_, held)| held)
    }

    /// Looks at what the live leases hold.
    pub fn held(&self) -> impl Iterator<Item = &M> {
        self.rows
            .values()
            .filter_map(|row| row.live.as_ref().map(|(_, held)| held))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Wanted;

    const SECOND: Duration = Duration::from_secs(1);
    const X: [u8; 16] = [7; 16];

    fn ask(asker: u8, number: u64) -> Ask {
        let wanted = Wanted {
            name: "model".into(),
            epoch: None,
            identity: None,
        };
        Ask {
            asker: Incarnation([asker; 16]),
            host: format!("host-{asker}"),
            number,
            wanted,
            others: 0,
            last_resort: false,
        }
    }

    fn table() -> Table<u32> {
        let limits = Limits {
            leases: 3,
            of_host: 2,
            of_object: 2,
            time: SECOND * 30,
            most_time: SECOND * 40,
        };
        Table::new(Incarnation([1; 16]), limits)
    }

    /// Asks with a number of this asker's question.
    fn asked(table: &mut Table<u32>, now: Duration, ask: &Ask) -> Asked {
        let mut number = ask.asker.0;
        number[15] = ask.number as u8;
        table.ask(now, ask, LeaseNumber(number))
    }

    fn granted(table: &mut Table<u32>, now: Duration, ask: &Ask) -> Grant {
        let Asked::Open(lease) = asked(table, now, ask) else {
            panic!("room for {ask:?}")
        };
        table.registered(now, lease, X, 3, 9).expect("in time")
    }

    #[test]
    fn a_lease_is_confirmed_while_it_lives_and_for_its_own_object_and_process() {
        let mut table = table();
        let grant = granted(&mut table, SECOND, &ask(2, 1));
        assert_eq!(
            asked(&mut table, SECOND, &ask(2, 1)),
            Asked::Again(grant),
            "the same question"
        );
        let confirm = Confirm {
            lease: grant.lease,
            identity: X,
            number: 5,
            digest: None,
        };
        assert!(table.confirm(SECOND * 30, &confirm));
        assert!(
            !table.confirm(SECOND * 31, &confirm),
            "its time is over, though no timer has come yet"
        );
        assert!(!table.confirm(
            SECOND,
            &Confirm {
                identity: [8; 16],
                ..confirm
            }
        ));
        let other = LeaseId {
            incarnation: Incarnation([9; 16]),
            ..grant.lease
        };
        assert!(!table.confirm(
            SECOND,
            &Confirm {
                lease: other,
                ..confirm
            }
        ));
        assert_eq!(table.expire(SECOND * 30), []);
        assert_eq!(table.expire(SECOND * 31), [Ended(9)]);
        assert!(!table.confirm(SECOND, &confirm));
    }

    #[test]
    fn an_old_renewal_renews_nothing_and_no_number_of_them_lasts_for_ever() {
        let mut table = table();
        let grant = granted(&mut table, Duration::ZERO, &ask(2, 1));
        let renew = |number| Renew {
            lease: grant.lease,
            number,
        };
        assert!(table.renew(SECOND * 5, &renew(2)));
        assert!(!table.renew(SECOND * 20, &renew(2)) && !table.renew(SECOND * 20, &renew(1)));
        assert_eq!(table.expire(SECOND * 34), []);
        assert!(table.renew(SECOND * 34, &renew(3)));
        assert_eq!(table.expire(SECOND * 40), [Ended(9)], "40 s in all");
        assert!(!table.renew(SECOND * 40, &renew(4)));
    }

    #[test]
    fn more_leases_than_the_limits_are_refused() {
        let mut table = table();
        granted(&mut table, SECOND, &ask(2, 1));
        granted(&mut table, SECOND, &ask(2, 2));
        let Asked::Busy(why) = asked(&mut table, SECOND, &ask(2, 3)) else {
            panic!("a third of one host")
        };
        assert_eq!(why, "2 of 3 leases, 2 of 2 of host host-2");
        let another_process = Ask {
            asker: Incarnation([5; 16]),
            ..ask(2, 1)
        };
        assert!(
            matches!(asked(&mut table, SECOND, &another_process), Asked::Busy(_)),
            "a pull of the same host"
        );
        let Asked::Open(lease) = asked(&mut table, SECOND, &ask(3, 1)) else {
            panic!("a third in all")
        };
        assert_eq!(asked(&mut table, SECOND, &ask(3, 1)), Asked::Wait(lease));
        let (held, again, why) = table
            .registered(SECOND, lease, X, 3, 5)
            .expect_err("a third of one object");
        assert_eq!(
            (held.into_inner(), again, why.as_str()),
            (5, Again::Busy, "2 gateways read the object already")
        );
        assert!(
            matches!(asked(&mut table, SECOND, &ask(3, 2)), Asked::Open(_)),
            "and it takes no place"
        );
        assert!(matches!(
            asked(&mut table, SECOND, &ask(4, 1)),
            Asked::Busy(_)
        ));
    }

    #[test]
    fn a_registration_takes_as_long_as_it_takes_and_a_release_ends_one_lease_once() {
        let mut table = table();
        let Asked::Open(lease) = asked(&mut table, SECOND, &ask(2, 1)) else {
            panic!("room")
        };
        assert_eq!(table.expire(SECOND * 300), []);
        assert_eq!(
            asked(&mut table, SECOND * 300, &ask(2, 1)),
            Asked::Wait(lease),
            "it is not begun anew"
        );
        assert!(table.registered(SECOND * 300, lease, X, 3, 5).is_ok());
        assert_eq!(table.expire(SECOND * 329), []);
        assert_eq!(
            table.expire(SECOND * 330),
            [Ended(5)],
            "its time begins when it is registered"
        );
        assert!(
            table.registered(SECOND * 330, lease, X, 3, 5).is_err(),
            "it was given up"
        );
        let grant = granted(&mut table, SECOND * 31, &ask(2, 2));
        let release = Release { lease: grant.lease };
        let elsewhere = LeaseId {
            incarnation: Incarnation([9; 16]),
            ..grant.lease
        };
        assert_eq!(table.release(&Release { lease: elsewhere }), None);
        let another = LeaseId {
            asker: Incarnation([8; 16]),
            ..grant.lease
        };
        assert_eq!(
            table.release(&Release { lease: another }),
            None,
            "another process' release of it"
        );
        let renewed = |lease| Renew { lease, number: 1 };
        assert!(!table.renew(SECOND * 31, &renewed(another)));
        assert!(table.alive(SECOND * 31, another).is_none());
        let confirmed = |lease| Confirm {
            lease,
            identity: X,
            number: 1,
            digest: None,
        };
        assert!(!table.confirm(SECOND * 31, &confirmed(another)));
        assert!(table.confirm(SECOND * 31, &confirmed(grant.lease)));
        assert_eq!(table.release(&release), Some(Ended(9)));
        assert_eq!(table.release(&release), None);
        table.failed(grant.lease.lease);
        assert_eq!(table.live(SECOND * 31).count(), 0);
    }
}

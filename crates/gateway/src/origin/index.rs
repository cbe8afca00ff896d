//! What this host's broker has, as others are told it. Pure: no clock, no broker, no network.
//!
//! A name is not announced: it is asked for. So nothing is sent for an object that nobody wants,
//! and an answer is of a list that was taken after the question had come: a host that said no did
//! not have the object when it was asked.
//!
//! | question | answered from |
//! |---|---|
//! | a name at an epoch that is known to be here | any list: that object never changes, and a lease is refused for what has gone |
//! | any other name | a list that began after the question came |
//! | what was removed here | a list that began after the question came |
//! | a page of all | the first from a list that began after the question came, the others from any |
//!
//! A list of 20,000 objects takes the broker and this process about 0.2 s, so lists take at most
//! one part in [`SHARE`] of the time, and one list answers all questions that wait.

use std::collections::BTreeMap;
use std::time::Duration;

use gpu_ipc::broker::server::listing::{Listing, Row};

use crate::message::{Find, Home, List, Listed};

/// Lists take one part in so many of the time.
const SHARE: u32 = 4;
/// The most objects on a page.
pub const PAGE: usize = 512;
/// The most bytes of names on a page: an answer has room for them.
const PAGE_BYTES: usize = 256 << 10;

/// Where an object stands in lists: they are in this order, so that a page begins where the former
/// one ended, whatever came and went meanwhile.
type Key = (String, u64);

/// The objects of a host.
#[derive(Debug)]
pub struct Index {
    home: Home,
    objects: BTreeMap<Key, Listed>,
    /// Names of this host that were removed, and up to which epochs.
    removed: BTreeMap<String, u64>,
    /// When the list began that this is.
    began: Option<Duration>,
    /// When the next list may begin.
    rests_until: Duration,
    listing: Option<Duration>,
}

impl Index {
    /// Begins without a list, for a host and its broker.
    pub fn new(home: Home) -> Index {
        Index {
            home,
            objects: BTreeMap::new(),
            removed: BTreeMap::new(),
            began: None,
            rests_until: Duration::ZERO,
            listing: None,
        }
    }

    /// Says whether a list is to be taken at this moment, and if so that one begins.
    pub fn begins(&mut self, now: Duration) -> bool {
        let begins = self.listing.is_none() && now >= self.rests_until;
        if begins {
            self.listing = Some(now);
        }
        begins
    }

    /// Says when the next list may begin; none while one is being taken.
    pub fn next(&self) -> Option<Duration> {
        self.listing.is_none().then_some(self.rests_until)
    }

    /// Takes the list that has begun, or that there is none.
    pub fn listed(&mut self, now: Duration, listing: Option<Listing>) {
        let Some(began) = self.listing.take() else {
            return;
        };
        self.rests_until = now + now.saturating_sub(began) * (SHARE - 1);
        let Some(listing) = listing else { return };
        self.began = Some(began);
        let removed = listing.removed.into_iter().filter(|row| row.home.is_none());
        self.removed = removed.map(|row| (row.name, row.up_to)).collect();
        let listed = listing
            .objects
            .into_iter()
            .filter(|row| row.state == "visible");
        self.objects = listed
            .map(|row| ((row.name.clone(), row.epoch), self.object(row)))
            .collect();
    }

    fn object(&self, row: Row) -> Listed {
        let origin = row.home.is_none();
        let home = match row.home {
            Some(home) => Home::read(&home),
            None => self.home.clone(),
        };
        Listed {
            name: row.name,
            epoch: row.epoch,
            identity: row.identity,
            bytes: row.bytes,
            origin,
            home,
        }
    }

    /// Says whether this list began after a question had come.
    fn is_newer(&self, came: Duration) -> bool {
        self.began.is_some_and(|began| began > came)
    }

    /// Finds the objects of a name, the newest first; none before a newer list must be waited for.
    pub fn find(&self, find: &Find, came: Duration) -> Option<Vec<Listed>> {
        let of_name = |epochs: std::ops::RangeInclusive<u64>| {
            let (first, last) = (*epochs.start(), *epochs.end());
            let range = (find.name.clone(), first)..=(find.name.clone(), last);
            self.objects.range(range).rev().map(|(_, listed)| listed)
        };
        let found: Vec<Listed> = match find.epoch {
            Some(epoch) => of_name(epoch..=epoch).cloned().collect(),
            None => of_name(0..=u64::MAX).take(1).cloned().collect(),
        };
        let is_sure = find.epoch.is_some() && !found.is_empty();
        (is_sure || self.is_newer(came)).then_some(found)
    }

    /// Says which of these names were removed here, and up to which epochs; none before a newer
    /// list must be waited for.
    pub fn removed(&self, names: &[String], came: Duration) -> Option<Vec<(String, u64)>> {
        let removed = |name: &String| Some((name.clone(), *self.removed.get(name)?));
        self.is_newer(came)
            .then(|| names.iter().filter_map(removed).collect())
    }

    /// Returns a page of all objects, and whether more follow; none before a newer list must be
    /// waited for.
    pub fn page(&self, list: &List, came: Duration) -> Option<(Vec<Listed>, bool)> {
        use std::ops::Bound::{Excluded, Unbounded};

        let after = match &list.after {
            None if self.is_newer(came) => Unbounded,
            Some(after) if self.began.is_some() => Excluded(after.clone()),
            _ => return None,
        };
        let mut rest = self.objects.range((after, Unbounded));
        let (mut page, mut bytes) = (Vec::new(), 0);
        for (_, listed) in rest.by_ref().take(PAGE) {
            bytes += listed.name.len() + listed.home.host.len();
            page.push(listed.clone());
            if bytes >= PAGE_BYTES {
                break;
            }
        }
        Some((page, rest.next().is_some()))
    }
}

#[cfg(test)]
mod tests {
    use gpu_ipc::broker::server::listing;

    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    fn home() -> Home {
        Home {
            host: "a".into(),
            broker: [7; 16],
        }
    }

    fn row(name: &str, epoch: u64, state: &str) -> Row {
        Row {
            name: name.into(),
            epoch,
            identity: format!("{name}-{epoch}"),
            bytes: 4_096,
            state: state.into(),
            ..Row::default()
        }
    }

    fn listing(objects: Vec<Row>) -> Option<Listing> {
        let row = |name: &str, home: Option<&str>| listing::Removed {
            name: name.into(),
            home: home.map(str::to_owned),
            up_to: 4,
        };
        Some(Listing {
            objects,
            removed: vec![row("gone", None), row("elsewhere", Some("b"))],
            ..Listing::default()
        })
    }

    fn listed(rows: Vec<Row>) -> Index {
        let mut index = Index::new(home());
        assert!(index.begins(MILLI) && !index.begins(MILLI), "one at a time");
        index.listed(MILLI * 3, listing(rows));
        index
    }

    fn find(name: &str, epoch: Option<u64>) -> Find {
        Find {
            name: name.into(),
            epoch,
        }
    }

    #[test]
    fn a_name_is_found_by_a_list_that_began_after_the_question() {
        let index = listed(vec![
            row("model", 1, "visible"),
            row("model", 2, "visible"),
            row("model", 3, "filling"),
            row("models", 9, "visible"),
        ]);
        let epochs = |name, epoch, came| {
            let found = index.find(&find(name, epoch), came)?;
            Some(found.iter().map(|listed| listed.epoch).collect::<Vec<_>>())
        };
        assert_eq!(epochs("model", None, Duration::ZERO), Some(vec![2]));
        assert_eq!(
            epochs("model", None, MILLI),
            None,
            "asked as the list began"
        );
        assert_eq!(
            epochs("model", Some(1), MILLI * 9),
            Some(vec![1]),
            "it never changes"
        );
        assert_eq!(epochs("model", Some(4), MILLI * 9), None);
        assert_eq!(epochs("model", Some(4), Duration::ZERO), Some(vec![]));
        assert_eq!(epochs("mode", None, Duration::ZERO), Some(vec![]));
    }

    #[test]
    fn lists_take_a_part_of_the_time() {
        let mut index = listed(Vec::new());
        assert_eq!(index.next(), Some(MILLI * 9), "2 ms of 8");
        assert!(!index.begins(MILLI * 8));
        assert!(index.begins(MILLI * 9));
        assert_eq!(index.next(), None);
        index.listed(MILLI * 10, None);
        assert_eq!(
            index.find(&find("model", None), Duration::ZERO),
            Some(vec![]),
            "a list that could not be had leaves the former one"
        );
    }

    #[test]
    fn pages_hold_every_object_once_whatever_comes_and_goes() {
        let names: Vec<String> = (0..2 * PAGE).map(|n| format!("model-{n:05}")).collect();
        let rows = |skip: usize| {
            let kept = names.iter().skip(skip);
            kept.map(|name| row(name, 1, "visible")).collect::<Vec<_>>()
        };
        let mut index = listed(rows(0));
        let (page, more) = index
            .page(&List { after: None }, Duration::ZERO)
            .expect("a page");
        assert_eq!((page.len(), more), (PAGE, true));
        let last = page.last().expect("a page");
        let after = Some((last.name.clone(), last.epoch));
        // The first objects go, and another comes that the first page would have had.
        let mut changed = rows(9);
        changed.push(row("model-00000-b", 1, "visible"));
        assert!(index.begins(MILLI * 9));
        index.listed(MILLI * 10, listing(changed));
        let (second, more) = index.page(&List { after }, MILLI * 99).expect("any list");
        assert_eq!((second.len(), more), (PAGE, false));
        let seen: Vec<&String> = page
            .iter()
            .chain(&second)
            .map(|listed| &listed.name)
            .collect();
        assert_eq!(seen, names.iter().collect::<Vec<_>>());
        assert_eq!(
            index.page(&List { after: None }, MILLI * 99),
            None,
            "a newer list is waited for"
        );
    }

    #[test]
    fn what_was_removed_here_is_told_and_what_another_home_removed_is_not() {
        let index = listed(Vec::new());
        let names = ["gone", "elsewhere", "never"].map(str::to_owned);
        let removed = index.removed(&names, Duration::ZERO).expect("a list");
        assert_eq!(removed, [("gone".to_owned(), 4)]);
        assert_eq!(index.removed(&names, MILLI), None);
    }

    #[test]
    fn a_replica_names_its_home() {
        let mut row = row("model", 1, "visible");
        row.home = Some(home().to_string());
        let index = listed(vec![row]);
        let found = index
            .find(&find("model", None), Duration::ZERO)
            .expect("a list");
        assert_eq!((found[0].origin, &found[0].home), (false, &home()));
    }
}

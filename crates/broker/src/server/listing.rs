//! The list of a broker's objects and their readers, as JSON.

use serde::{Deserialize, Serialize};

/// A broker and its objects. A field that a broker of an older version does not write reads as its
/// default.
#[derive(Clone, Default, Debug, Serialize, Deserialize)]
pub struct Listing {
    /// The broker's process, as it counts itself.
    pub pid: u32,
    /// Seconds since it started.
    pub age_s: u64,
    /// `none`: none was asked for. `fed`: it has every object. `absent`: none answers, or it is
    /// being given the objects, and commits wait. `full`: it has not room for every object.
    /// `silent`: it has not answered for [`Shelf::silent_s`] seconds.
    pub keeper: String,
    /// The keeper in numbers.
    #[serde(default)]
    pub shelf: Shelf,
    /// Which history the epochs belong to, in hexadecimal: drawn anew when a broker starts without
    /// anything that a keeper kept.
    #[serde(default)]
    pub lineage: String,
    /// Bytes of the objects that the asker may know of, which are all objects for the broker's own
    /// user; a region that two epochs share counts once, and after a restart of the broker for
    /// each.
    pub bytes: u64,
    /// The limit of all objects' bytes; `None` without.
    pub limit: Option<u64>,
    /// The limit of one user's bytes; `None` without.
    #[serde(default)]
    pub limit_per_uid: Option<u64>,
    /// What each user's objects take, by uid: all users for the broker's own user, the asker alone
    /// for any other.
    #[serde(default)]
    pub users: Vec<Usage>,
    /// Names that have an object.
    #[serde(default)]
    pub names: u64,
    /// The limit of them.
    #[serde(default)]
    pub names_limit: u64,
    /// Participants that are connected.
    #[serde(default)]
    pub participants: u64,
    /// The limit of them.
    #[serde(default)]
    pub participants_limit: u64,
    /// Objects that were found whole at the start.
    pub restored: u64,
    /// Descriptors that belonged to no whole object, and were closed at the start.
    pub orphans: u64,
    /// Objects and files of another version, which stay in the keeper as they are.
    #[serde(default)]
    pub foreign: u64,
    /// Commits since the start.
    pub commits: u64,
    /// Opens since the start.
    pub opens: u64,
    /// Objects that went because their writer died.
    pub aborted: u64,
    /// Objects that were removed because a limit pressed or their time was over.
    #[serde(default)]
    pub evicted: u64,
    /// Ends of a keeper that this broker has seen.
    #[serde(default)]
    pub keeper_deaths: u64,
    /// From the broker's acceptance of a commit to its answer.
    #[serde(default)]
    pub commit_latency: Latency,
    /// File descriptors that the broker's process has open; 0 before Linux 6.2.
    #[serde(default)]
    pub descriptors: u64,
    /// The most that it may have; 0 without a limit.
    #[serde(default)]
    pub descriptors_limit: u64,
    /// Connections that were refused because it had no descriptor left.
    #[serde(default)]
    pub turned_away: u64,
    /// How often the broker's socket was bound again because its name was removed or replaced.
    #[serde(default)]
    pub rebound: u64,
    /// The options that were read again.
    #[serde(default)]
    pub reread: Reread,
    /// The objects whose sums are in `users`, finished or not; 0 from a broker that does not count
    /// them.
    #[serde(default)]
    pub total: u64,
    /// The objects that the asker may know of; in a sum those of the first names alone.
    pub objects: Vec<Row>,
    /// Removals among the asker's names.
    #[serde(default)]
    pub removed: Vec<Removed>,
}

impl Listing {
    /// Counts the objects: those that are listed are all of them, or of the first names alone.
    pub fn count(&self) -> u64 {
        self.total.max(self.objects.len() as u64)
    }
}

/// What a keeper has, in numbers.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Shelf {
    /// Descriptors that it keeps.
    pub kept: u64,
    /// The most that it keeps; 0 if it has not said so.
    pub most: u64,
    /// Brokers that it has started.
    pub starts: u64,
    /// Visible objects that it does not have.
    pub missing: u64,
    /// Seconds for which it has not answered; 0 if nothing is asked.
    pub silent_s: u64,
    /// Why it has not all of them; empty if it has.
    pub why: String,
}

/// What came of the options that were read again while the broker served.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Reread {
    /// The file that they are read from; empty if the broker was given none.
    pub file: String,
    /// How often they were.
    pub count: u64,
    /// Why the last ones were refused, and those before them hold; empty if they hold.
    pub why: String,
}

/// What one user's objects take.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Usage {
    /// The user.
    pub uid: u32,
    /// Its objects, visible or not.
    pub objects: u64,
    /// Their bytes; a region that two epochs share counts once.
    pub bytes: u64,
}

/// How long something took, as a histogram.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Latency {
    /// How often it was done.
    pub count: u64,
    /// How long it took in all, in microseconds.
    pub sum_us: u64,
    /// How often it took at most so many microseconds: pairs of the bound and the count, which
    /// contains those below, in the order of the bounds.
    pub at_most_us: Vec<(u64, u64)>,
}

impl Latency {
    /// The bounds of [`at_most_us`](Latency::at_most_us).
    pub const BOUNDS_US: [u64; 8] = [
        250, 1_000, 4_000, 16_000, 64_000, 250_000, 1_000_000, 10_000_000,
    ];

    /// Counts one more.
    pub fn note(&mut self, took: std::time::Duration) {
        if self.at_most_us.is_empty() {
            self.at_most_us = Latency::BOUNDS_US.iter().map(|&bound| (bound, 0)).collect();
        }
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.count += 1;
        self.sum_us = self.sum_us.saturating_add(us);
        for (bound, count) in &mut self.at_most_us {
            *count += u64::from(us <= *bound);
        }
    }
}

/// An object.
#[derive(Clone, Default, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Its epoch; 0 before its commit.
    pub epoch: u64,
    /// Its identity, in hexadecimal.
    pub identity: String,
    /// The host that it is a replica from; `None` for an object that was committed here.
    #[serde(default)]
    pub home: Option<String>,
    /// Bytes of memory; a region that two epochs share counts for each.
    pub bytes: u64,
    /// The user that owns it.
    pub owner: u32,
    /// `making`, `filling`, `keeping`, `visible`, `scratch` or `pool`.
    pub state: String,
    /// Seconds since its commit, or since its create while it is not visible.
    #[serde(default)]
    pub age_s: u64,
    /// Its parts.
    #[serde(default)]
    pub parts: u64,
    /// It is never evicted.
    #[serde(default)]
    pub pinned: bool,
    /// It is visible, and the keeper does not have it: it goes with the broker.
    #[serde(default)]
    pub unkept: bool,
    /// Its writer.
    pub writer: Option<Process>,
    /// Its readers.
    pub readers: Vec<Process>,
    /// Who holds it, if it is a pool.
    #[serde(default)]
    pub pool: Option<PoolRow>,
}

/// Who holds a pool.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct PoolRow {
    /// How often it was adopted.
    pub generation: u64,
    /// How the hold before ended: `never`, `closed` or `died`.
    pub previous: String,
    /// The process that holds it; `None` for a pool that may be adopted.
    pub holder: Option<Process>,
    /// Seconds since the hold began, or ended.
    pub age_s: u64,
}

/// A name that was removed up to an epoch, for good.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Removed {
    /// The name.
    pub name: String,
    /// The host that it is written on; `None` for this one.
    pub home: Option<String>,
    /// The last epoch that was removed with all before it.
    pub up_to: u64,
}

/// A participant, for people.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Process {
    /// Its number as the broker sees it; 0 from another namespace.
    pub pid: u32,
    /// The name of its command.
    pub command: String,
    /// The name that it gave itself.
    pub name: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_latency_counts_in_every_bound_that_holds_it() {
        let mut latency = Latency::default();
        for us in [250, 251, 20_000_000] {
            latency.note(Duration::from_micros(us));
        }
        assert_eq!((latency.count, latency.sum_us), (3, 20_000_501));
        let counts: Vec<u64> = latency.at_most_us.iter().map(|(_, count)| *count).collect();
        assert_eq!(counts, [1, 2, 2, 2, 2, 2, 2, 2]);
    }

    #[test]
    fn the_listing_of_an_older_broker_is_read() {
        let text = r#"{"pid":7,"age_s":1,"keeper":"fed","bytes":2,"limit":null,"restored":0,"orphans":0,
            "commits":1,"opens":0,"aborted":0,"objects":[{"name":"a","epoch":1,"identity":"00","bytes":2,
            "owner":0,"state":"visible","writer":null,"readers":[]}]}"#;
        let listing: Listing = serde_json::from_str(text).expect("an older listing");
        assert_eq!(
            (listing.shelf, listing.users),
            (Shelf::default(), Vec::new())
        );
        assert_eq!(listing.objects[0].age_s, 0);
    }
}

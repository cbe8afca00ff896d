//! How far the histories of a property test came: one that never fills a ledger says nothing about a full one.

use std::collections::BTreeSet;

use channel::shared::counter_file::GROUP;
use channel::wire::lease_address::LeaseAddress;

/// What all histories of a run reached together.
#[derive(Debug, Default)]
pub struct Reach {
    /// The most leases at a time.
    pub most_leases: usize,
    /// Groups in which a collect of marks alone found a release: file and group.
    pub groups: BTreeSet<(u32, u32)>,
    /// The places in a group where one was found.
    pub places: BTreeSet<u32>,
    pub top_generation: u64,
    /// The most that one call gave back.
    pub most_at_once: usize,
    pub full: usize,
    pub stale_claims: usize,
    pub lapsed: usize,
    /// Times to live that were not over when a ledger looked.
    pub not_lapsed: usize,
    pub buried_barred: usize,
    pub deaths: usize,
    /// Releases, and claims, in the middle of a call.
    pub raced: [usize; 2],
    /// Threads that took a step.
    pub threads: usize,
}

impl Reach {
    pub fn found(&mut self, entry: LeaseAddress) {
        self.groups.insert((entry.file, entry.slot / GROUP));
        self.places.insert(entry.slot % GROUP);
    }

    /// Fails when a run reached less than it has to, in a ledger of so many slots in so many groups.
    ///
    /// A run reaches several times as much as is asked for here.
    pub fn check(&self, slots: usize, groups: usize) {
        assert_eq!(self.most_leases, slots, "no ledger was full: {self:?}");
        assert_eq!(self.groups.len(), groups, "groups without a release: {self:?}");
        assert_eq!(self.places.len(), GROUP as usize, "places without a release: {self:?}");
        assert!(self.top_generation > 200, "{self:?}");
        assert!(self.most_at_once > 100, "{self:?}");
        let often = [self.full, self.stale_claims, self.lapsed, self.not_lapsed, self.deaths, self.threads];
        assert!(often.iter().all(|&times| times > 50), "{self:?}");
        assert!(self.buried_barred > 10 && self.raced.iter().all(|&times| times > 50), "{self:?}");
    }
}

//! How far the histories of a property test came: one that never fills a ledger says nothing about
//! a full one.

use std::collections::BTreeSet;

use transport::shared::counter_file::GROUP;
use transport::wire::lease_address::LeaseAddress;

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

    /// Says what the histories did not reach in a ledger of this many slots and groups; nothing
    /// when it is enough.
    ///
    /// 256 histories reach several times as much as is asked for here, but for the last groups:
    /// those are in use only while a ledger is nearly full.
    pub fn missing(&self, slots: usize, groups: usize) -> Option<String> {
        let often = [
            self.full,
            self.stale_claims,
            self.lapsed,
            self.not_lapsed,
            self.deaths,
            self.threads,
        ];
        let missing = [
            (self.most_leases == slots, "a full ledger"),
            (self.groups.len() == groups, "a release in each group"),
            (
                self.places.len() == GROUP as usize,
                "a release at each place of a group",
            ),
            (self.top_generation > 200, "200 leases of one slot"),
            (self.most_at_once > 100, "100 leases that end in one call"),
            (
                often.iter().all(|&times| times > 50),
                "50 of each kind of step",
            ),
            (self.buried_barred > 10, "10 burials of a barred lease"),
            (
                self.raced.iter().all(|&times| times > 50),
                "50 releases and claims in the middle of a call",
            ),
        ];
        let missing: Vec<&str> = missing
            .iter()
            .filter(|(reached, _)| !reached)
            .map(|&(_, what)| what)
            .collect();
        (!missing.is_empty()).then(|| format!("never reached: {}; {self:?}", missing.join(", ")))
    }
}

//! Objects that go to make room, or because their time is over: those that no participant reads and
//! that are not pinned, the oldest first. A pool makes no room: its next holder is yet to come.

use std::collections::BTreeSet;
use std::time::Instant;

use super::Catalogue;
use crate::object::identity::Identity;
use crate::server::action::Action;
use crate::server::leaving::Leaving;
use crate::server::ledger::Asked;
use crate::server::object::{Object, Stage};
use transport::server::Refused;

impl<F: Clone> Catalogue<F> {
    /// Compares what is asked for with the limits, and finds the objects that must go for it: none
    /// where there is room, or as few as are enough. Where the user's own limit presses, its own
    /// objects go first.
    pub(super) fn make_room(&self, name: &str, asked: &Asked) -> Result<Vec<Identity>, Refused> {
        let ledger = self.objects.ledger();
        let Err(refused) = ledger.check(&self.limits, asked) else {
            return Ok(Vec::new());
        };
        if !self.limits.evict {
            return Err(refused);
        }
        let mut candidates: Vec<(Identity, &Object<F>)> = self
            .objects
            .idle()
            .filter(|(_, object)| {
                let manifest = object.manifest.as_ref();
                manifest.is_some_and(|of| {
                    of.name != name && !self.limits.is_pinned(&of.name) && of.layout.journal() == 0
                })
            })
            .collect();
        if ledger.presses_user(&self.limits, asked) {
            // Stable: the oldest stay first among a user's own, and among the others.
            candidates.sort_by_key(|(_, object)| {
                object
                    .manifest
                    .as_ref()
                    .is_none_or(|of| of.owner != asked.uid)
            });
        }
        let fits = |count: usize| {
            let victims = candidates.iter().take(count);
            let more = victims.flat_map(|(_, object)| object.numbers.iter().copied());
            let asked = Asked {
                given_up: asked.given_up.iter().copied().chain(more).collect(),
                regions: asked.regions.clone(),
                ..*asked
            };
            ledger.check(&self.limits, &asked).is_ok()
        };
        // More objects that go are never less room: the least that is enough is found by halves.
        let (mut too_few, mut enough) = (0, candidates.len());
        if !fits(enough) {
            return Err(refused);
        }
        while too_few + 1 < enough {
            let middle = usize::midpoint(too_few, enough);
            if fits(middle) {
                enough = middle;
            } else {
                too_few = middle;
            }
        }
        candidates.truncate(enough);
        Ok(candidates
            .into_iter()
            .map(|(identity, _)| identity)
            .collect())
    }

    /// Lets objects go so that a commit fits into a keeper that has `room` for so many descriptors
    /// and refused it, and asks the keeper again; nothing if that is not for want of room, or if what
    /// may go is not enough. Those in `unkept` are not in the keeper, and would make no room there.
    pub fn make_keeper_room(
        &mut self,
        identity: Identity,
        room: u64,
        unkept: &BTreeSet<u64>,
    ) -> Option<Vec<Action<F>>> {
        if !self.limits.evict {
            return None;
        }
        let object = self.objects.get(identity)?;
        let name = &object.manifest.as_ref()?.name;
        let needed = descriptors(object);
        if !matches!(object.stage, Stage::Keeping { .. }) || room >= needed {
            return None;
        }
        let (mut freed, mut victims) = (room, Vec::new());
        for (victim, object) in self.objects.idle() {
            let manifest = object.manifest.as_ref();
            let may_go = manifest.is_some_and(|of| {
                of.name != *name && !self.limits.is_pinned(&of.name) && of.layout.journal() == 0
            });
            if may_go && !unkept.contains(&object.seq) {
                freed += descriptors(object);
                victims.push(victim);
            }
            if freed >= needed {
                break;
            }
        }
        if freed < needed {
            return None;
        }
        let gone = self.evict(&victims);
        Some(vec![self.forget(&gone, Leaving::Unkept(identity), true)])
    }

    /// Takes the names' epochs of objects away that are to go.
    pub(super) fn evict(&mut self, victims: &[Identity]) -> Vec<Identity> {
        let mut gone = Vec::new();
        for victim in victims {
            let manifest = self
                .objects
                .get(*victim)
                .and_then(|object| object.manifest.as_ref());
            if let Some((name, epoch)) = manifest.map(|of| (of.name.clone(), of.epoch)) {
                gone.extend(self.names.take(&name, epoch));
            }
        }
        self.evicted += gone.len() as u64;
        gone
    }

    /// Removes what no participant has read for as long as an object may be idle, and pools that none
    /// has held for as long as a pool may be free.
    pub fn expire(&mut self, now: Instant) -> Vec<Action<F>> {
        let is_over = |object: &Object<F>| {
            let manifest = object.manifest.as_ref();
            let ttl = self.limits.ttl;
            ttl.is_some_and(|ttl| now.saturating_duration_since(object.idle_since) >= ttl)
                && manifest
                    .is_some_and(|of| !self.limits.is_pinned(&of.name) && of.layout.journal() == 0)
        };
        let mut over: Vec<Identity> = self
            .objects
            .idle()
            .filter(|(_, object)| is_over(object))
            .map(|(identity, _)| identity)
            .collect();
        over.extend(self.pools_over(now));
        if over.is_empty() {
            return Vec::new();
        }
        let gone = self.evict(&over);
        vec![self.forget(&gone, Leaving::Retired, true)]
    }
}

/// Counts what a keeper holds of an object: its regions and its manifest.
fn descriptors<F>(object: &Object<F>) -> u64 {
    object.regions.len() as u64 + 1
}

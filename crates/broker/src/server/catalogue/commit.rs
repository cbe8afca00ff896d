//! The commit of an object, and what became of it.

use super::{Catalogue, declined};
use crate::object::identity::{Epoch, Identity};
use crate::server::action::{Action, Answer, Asker, KeepError};
use crate::server::object::{Object, Stage};
use crate::wire::{LeaseSlot, RefusalCode, Standing, Wanted};

impl<F: Clone> Catalogue<F> {
    /// Commits an object whose write leases have all ended, as `released` reads in their slots.
    ///
    /// No answer means: not yet. The asker repeats.
    pub fn commit(
        &mut self,
        asker: Asker,
        request: u64,
        identity: Identity,
        released: impl FnOnce(&[LeaseSlot]) -> bool,
    ) -> Vec<Action<F>> {
        let answer = |answer| vec![Action::Answer(asker.participant, request, answer)];
        if let Some(epoch) = self.outcome_of(identity) {
            return answer(Answer::Committed(epoch));
        }
        let Some(object) = self.objects.get_mut(identity) else {
            return answer(declined(
                RefusalCode::NotWriter,
                "no unfinished object has this identity",
            ));
        };
        if !object.is_written_by(asker.participant) {
            return answer(declined(
                RefusalCode::NotWriter,
                "another participant writes this object",
            ));
        }
        object.request = request;
        let leases = match &object.stage {
            Stage::Filling { leases } => leases.as_slice(),
            Stage::Written => &[],
            Stage::Keeping { .. } => return Vec::new(),
            _ => {
                return answer(declined(
                    RefusalCode::Protocol,
                    "the object has no regions yet",
                ));
            }
        };
        if object.wanted.scratch {
            return answer(declined(
                RefusalCode::Protocol,
                "a scratch object is never committed",
            ));
        }
        // One at a time for a name, so that epochs are given in the order in which they become
        // visible.
        let busy = object
            .manifest
            .as_ref()
            .is_some_and(|manifest| self.keeping.contains(&manifest.name));
        if busy || (self.limits.reads_slots && !released(leases)) {
            return Vec::new();
        }
        let Some(mut manifest) = object.manifest.clone() else {
            return Vec::new();
        };
        // What it replaces was given up before its regions were made.
        let (seq, regions, wanted) = (
            object.seq,
            object.files(),
            Wanted {
                replace: false,
                ..object.wanted
            },
        );
        // Somebody may have become the name's owner, or have committed, since the create.
        if let Err((refusal, why)) = self.check_name(&manifest, asker.uid, wanted) {
            return self.fail(identity, refusal, why);
        }
        let epoch = match manifest.home {
            Some(_) => manifest.epoch,
            None => self.names.next(&manifest.name),
        };
        manifest.epoch = epoch;
        if let Some(object) = self.objects.get_mut(identity) {
            self.keeping.insert(manifest.name.clone());
            let keep = Action::Keep {
                identity,
                seq,
                manifest,
                regions,
            };
            return match std::mem::replace(&mut object.stage, Stage::Keeping { epoch }) {
                Stage::Filling { leases } => {
                    vec![Action::EndLeases(asker.participant, leases), keep]
                }
                _ => vec![keep],
            };
        }
        Vec::new()
    }

    /// Takes the keeper's answer: the object is visible from here on, or was not kept. A pool is
    /// visible once the keeper has its first record too.
    pub fn kept(&mut self, identity: Identity, kept: Result<F, KeepError>) -> Vec<Action<F>> {
        match kept {
            Ok(manifest) if self.is_pool(identity) => self.first_record(identity, manifest),
            kept => self.settle(identity, kept),
        }
    }

    /// Makes an object visible that the keeper has whole, or takes it back to its writer.
    pub(super) fn settle(
        &mut self,
        identity: Identity,
        kept: Result<F, KeepError>,
    ) -> Vec<Action<F>> {
        let Some(object) = self.objects.get_mut(identity) else {
            return Vec::new();
        };
        let Stage::Keeping { epoch } = object.stage else {
            return Vec::new();
        };
        if let Some(manifest) = &object.manifest {
            self.keeping.remove(&manifest.name);
        }
        let file = match kept {
            Ok(file) => file,
            Err(_) if object.writer.is_none() => {
                // Its writer died meanwhile: the commit does not come again.
                self.objects.remove(identity);
                return Vec::new();
            }
            Err(KeepError::Absent) => {
                // The commit comes again.
                object.stage = Stage::Written;
                return Vec::new();
            }
            Err(KeepError::Refused(why)) => {
                object.stage = Stage::Written;
                let answer = Answer::Declined(RefusalCode::Keeper, why);
                return object
                    .writer
                    .map(|w| Action::Answer(w.participant, object.request, answer))
                    .into_iter()
                    .collect();
            }
        };
        let mut actions = Vec::new();
        if let Some(manifest) = &mut object.manifest {
            manifest.epoch = epoch;
        }
        let (writer, request) = (object.writer, object.request);
        object.stage = Stage::Visible { manifest: file };
        self.objects.written(identity);
        let manifest = self
            .objects
            .get(identity)
            .and_then(|object| object.manifest.as_ref());
        let Some(manifest) = manifest else {
            return Vec::new();
        };
        let name = manifest.name.clone();
        self.names.publish(manifest, epoch);
        self.outcomes.note(identity, epoch);
        if let Some(writer) = writer {
            actions.push(Action::Answer(
                writer.participant,
                request,
                Answer::Committed(epoch),
            ));
        }
        let told = self.watches.of(&name);
        for participant in told {
            actions.extend(self.look_for_newer(participant, &name));
        }
        self.retire(&name, &mut actions);
        actions
    }

    /// Asks the keeper again to take a commit.
    pub(super) fn keep_again(&self, identity: Identity) -> Option<Action<F>> {
        let object = self.objects.get(identity)?;
        let Stage::Keeping { epoch } = object.stage else {
            return None;
        };
        let mut manifest = object.manifest.clone()?;
        manifest.epoch = epoch;
        Some(Action::Keep {
            identity,
            seq: object.seq,
            manifest,
            regions: object.files(),
        })
    }

    /// Returns what became of a commit.
    pub fn outcome(&self, identity: Identity) -> Standing {
        match self.outcome_of(identity) {
            Some(epoch) => Standing::Committed(epoch),
            None if self.objects.get(identity).is_some() => Standing::Unfinished,
            None => Standing::Unknown,
        }
    }

    pub(super) fn outcome_of(&self, identity: Identity) -> Option<Epoch> {
        match self.objects.get(identity) {
            Some(Object {
                stage: Stage::Visible { .. },
                manifest: Some(manifest),
                ..
            }) => Some(manifest.epoch),
            Some(_) => None,
            None => self.outcomes.of(identity),
        }
    }
}

//! Objects that go: removed, replaced, or older than the epochs that are kept.

use super::draft::make;
use super::{Catalogue, declined};
use crate::object::identity::{Epoch, Identity};
use crate::server::action::{Action, Answer, Asker, KeepError};
use crate::server::leaving::Leaving;
use crate::server::object::Stage;
use crate::wire::{RefusalCode, UNFINISHED};

impl<F: Clone> Catalogue<F> {
    /// Removes one epoch of a name, all of it, or what is unfinished of it.
    pub fn remove(
        &mut self,
        asker: Asker,
        request: u64,
        name: &str,
        epoch: Epoch,
    ) -> Vec<Action<F>> {
        let answer = |answer| vec![Action::Answer(asker.participant, request, answer)];
        if epoch == UNFINISHED {
            return self.abort_all(asker, request, name);
        }
        let (is_known, is_operator) = (self.names.is_known(name), asker.uid == self.operator);
        if !is_operator && let Err((refusal, why)) = self.names.check_owner(name, asker.uid) {
            return answer(Answer::Declined(refusal, why));
        }
        // A name that the operator frees is unknown before the keeper has answered.
        if (is_known || is_operator)
            && self
                .leaving
                .ask_again(name, epoch, asker.participant, request)
        {
            return Vec::new();
        }
        if !is_known {
            return answer(declined(RefusalCode::NotFound, "it was never committed"));
        }
        // Another user's name that the operator removes as a whole is free for every user.
        let release = is_operator && epoch == Epoch(0) && self.names.owner(name) != Some(asker.uid);
        let gone = self.names.take(name, epoch);
        if gone.is_empty() && !release {
            return answer(Answer::Removed(self.names.last(name)));
        }
        let asked = Leaving::Asked {
            participant: asker.participant,
            request,
            name: name.into(),
            epoch,
            last: self.names.last(name),
            release,
        };
        vec![self.forget(&gone, asked, true)]
    }

    /// Takes objects out of the keeper; before them goes what a successor must know, if it changed.
    pub(super) fn forget(&mut self, gone: &[Identity], then: Leaving, changed: bool) -> Action<F> {
        let objects = self.take_out(gone);
        Action::Forget {
            token: self.leaving.begin(then),
            objects,
            bequest: changed.then(|| self.bequest()),
        }
    }

    /// Goes on with what waited for the keeper: a removal is answered, a replacement is made.
    pub fn forgotten(&mut self, token: u64, forgotten: Result<(), KeepError>) -> Vec<Action<F>> {
        match self.leaving.end(token) {
            Some(Leaving::Asked {
                participant,
                request,
                name,
                epoch,
                last,
                release,
            }) => {
                // The objects are out of the keeper: only then the name may go, which says so.
                if release && forgotten.is_ok() {
                    self.names.release(&name);
                    let asked = Leaving::Asked {
                        participant,
                        request,
                        name,
                        epoch,
                        last,
                        release: false,
                    };
                    return vec![self.forget(&[], asked, true)];
                }
                let answer = match forgotten {
                    Ok(()) => Answer::Removed(last),
                    // It is gone here; a keeper that comes later is not given it.
                    Err(KeepError::Absent) => Answer::Removed(last),
                    Err(KeepError::Refused(why)) => Answer::Declined(RefusalCode::Keeper, why),
                };
                vec![Action::Answer(participant, request, answer)]
            }
            Some(Leaving::Replaced(identity)) => match self.objects.get(identity) {
                Some(object) if matches!(object.stage, Stage::Making) => {
                    make(identity, object).into_iter().collect()
                }
                _ => Vec::new(),
            },
            Some(Leaving::Unkept(identity)) => match forgotten {
                Ok(()) => self.keep_again(identity).into_iter().collect(),
                Err(error) => self.kept(identity, Err(error)),
            },
            Some(Leaving::Retired) | None => Vec::new(),
        }
    }

    /// Keeps the last epochs of a name alone.
    pub(super) fn retire(&mut self, name: &str, actions: &mut Vec<Action<F>>) {
        let gone = self.names.take_beyond(name, self.limits.epochs.max(1));
        if !gone.is_empty() {
            let forget = self.forget(&gone, Leaving::Retired, false);
            actions.push(forget);
        }
    }

    pub(super) fn take_out(&mut self, gone: &[Identity]) -> Vec<(u64, usize)> {
        let records = gone
            .iter()
            .filter_map(|identity| self.take_record(*identity));
        let mut all: Vec<(u64, usize)> = records.collect();
        let taken = gone.iter().filter_map(|identity| {
            let object = self.objects.remove(*identity)?;
            let epoch = object
                .manifest
                .as_ref()
                .map_or(Epoch(0), |manifest| manifest.epoch);
            self.outcomes.note(*identity, epoch);
            Some((object.seq, object.regions.len()))
        });
        // A pool without its record is given to no process: the record goes last.
        let mut taken: Vec<(u64, usize)> = taken.collect();
        taken.append(&mut all);
        taken
    }
}

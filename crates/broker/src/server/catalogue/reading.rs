//! What readers ask for: an object, and word of a newer epoch.

use super::Catalogue;
use crate::object::identity::{Epoch, Identity};
use crate::object::manifest::{Manifest, Readers};
use crate::server::action::{Action, Answer, Asker, Participant};
use crate::server::object::Stage;
use crate::server::watches::Watch;
use crate::wire::{RefusalCode, Selector};

impl<F: Clone> Catalogue<F> {
    /// Leases an object for reading.
    pub fn open(&mut self, asker: Asker, selector: &Selector) -> Answer<F> {
        let found = match selector {
            Selector::Latest(name) => self.names.latest(name).map(|(_, identity)| identity),
            Selector::Epoch(name, epoch) => self.names.at(name, *epoch),
            Selector::Identity(identity) => Some(*identity),
        };
        let object =
            found.and_then(|identity| self.objects.get(identity).map(|object| (identity, object)));
        let Some((identity, object)) = object else {
            return Answer::Declined(RefusalCode::NotFound, self.why_not_found(selector));
        };
        let (Stage::Visible { manifest: file }, Some(manifest)) = (&object.stage, &object.manifest)
        else {
            return Answer::Declined(
                RefusalCode::NotFound,
                "the object is not visible yet".into(),
            );
        };
        let groups = self.groups_of(asker.participant);
        if !manifest.readers.admit(manifest.owner, asker.uid, groups) {
            let why = why_not_admitted("object", manifest, asker.uid);
            return Answer::Declined(RefusalCode::User, why);
        }
        let opened = Answer::Opened {
            identity,
            epoch: manifest.epoch,
            manifest: file.clone(),
            regions: object.files(),
        };
        self.objects.read(identity, asker.participant);
        opened
    }

    fn why_not_found(&self, selector: &Selector) -> String {
        match selector {
            Selector::Latest(name) | Selector::Epoch(name, _) => self.names.why_not_found(name),
            Selector::Identity(_) => {
                "no object of this identity is here; it was removed, or replaced by newer epochs"
                    .into()
            }
        }
    }

    /// Ends a reader's lease.
    pub fn close(&mut self, participant: Participant, identity: Identity) {
        self.objects.unread(identity, participant);
    }

    /// Answers as soon as the name has an epoch newer than `seen`. No epoch is newer than the last
    /// possible one: a watch for that takes the participant's watch of the name back.
    pub fn watch(&mut self, asker: Asker, request: u64, name: &str, seen: Epoch) -> Vec<Action<F>> {
        let answer = |answer| vec![Action::Answer(asker.participant, request, answer)];
        if seen == Epoch(u64::MAX) {
            self.watches.end(asker.participant, name);
            return answer(Answer::Noted);
        }
        let watch = Watch {
            asker,
            request,
            seen,
        };
        if let Err((refusal, why)) = self.watches.begin(name, watch, self.limits.watches) {
            return answer(Answer::Declined(refusal, why));
        }
        self.look_for_newer(asker.participant, name)
            .into_iter()
            .collect()
    }

    pub(super) fn look_for_newer(
        &mut self,
        participant: Participant,
        name: &str,
    ) -> Option<Action<F>> {
        let watch = self.watches.get(participant, name)?;
        let (epoch, identity) = self.names.latest(name)?;
        let manifest = self.objects.get(identity)?.manifest.as_ref()?;
        // Of a pool a reader is told when its holder changed.
        let epoch = self
            .pools
            .get(identity)
            .map_or(epoch, |pool| Epoch(pool.generation));
        let groups = self.groups_of(participant);
        let may_open = manifest
            .readers
            .admit(manifest.owner, watch.asker.uid, groups);
        if epoch <= watch.seen || !may_open {
            return None;
        }
        self.watches.end(participant, name);
        Some(Action::Answer(
            participant,
            watch.request,
            Answer::Newer { identity, epoch },
        ))
    }
}

/// Says why a user may not open what the manifest is of.
pub(super) fn why_not_admitted(what: &str, manifest: &Manifest, uid: u32) -> String {
    let owner = manifest.owner;
    match &manifest.readers {
        Readers::Gids(gids) => format!(
            "the {what} is for uid {owner} and the groups {}, and uid {uid} is in none of them",
            gids.iter()
                .map(u32::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        ),
        _ => format!("the {what} is for uid {owner}, and not for uid {uid}"),
    }
}

//! What readers ask for: an object, and word of a newer epoch.

use super::Catalogue;
use crate::object::identity::{Epoch, Identity};
use crate::server::action::{Action, Answer, Asker, Participant};
use crate::server::object::Stage;
use crate::wire::{RefusalCode, Selector};

impl<F: Clone> Catalogue<F> {
    /// Leases an object for reading.
    pub fn open(&mut self, asker: Asker, selector: &Selector) -> Answer<F> {
        let found = match selector {
            Selector::Latest(name) => self.names.latest(name).map(|(_, identity)| identity),
            Selector::Epoch(name, epoch) => self.names.at(name, *epoch),
            Selector::Identity(identity) => Some(*identity),
        };
        let object = found.and_then(|identity| {
            self.objects
                .get_mut(&identity)
                .map(|object| (identity, object))
        });
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
        if !manifest.readers.admit(manifest.owner, asker.uid) {
            let why = format!(
                "the object is for uid {}, and not for uid {}",
                manifest.owner, asker.uid
            );
            return Answer::Declined(RefusalCode::User, why);
        }
        if !object.readers.contains(&asker.participant) {
            object.readers.push(asker.participant);
        }
        Answer::Opened {
            identity,
            epoch: manifest.epoch,
            manifest: file.clone(),
            regions: object.files(),
        }
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
        if let Some(object) = self.objects.get_mut(&identity) {
            object.readers.retain(|reader| *reader != participant);
        }
    }

    /// Answers as soon as the name has an epoch newer than `seen`.
    pub fn watch(&mut self, asker: Asker, request: u64, name: &str, seen: Epoch) -> Vec<Action<F>> {
        self.watches
            .insert((asker.participant, name.into()), (asker, request, seen));
        self.look_for_newer(asker.participant, name)
            .into_iter()
            .collect()
    }

    pub(super) fn look_for_newer(
        &mut self,
        participant: Participant,
        name: &str,
    ) -> Option<Action<F>> {
        let key = (participant, name.to_owned());
        let &(asker, request, seen) = self.watches.get(&key)?;
        let (epoch, identity) = self.names.latest(name)?;
        let manifest = self.objects.get(&identity)?.manifest.as_ref()?;
        if epoch <= seen || !manifest.readers.admit(manifest.owner, asker.uid) {
            return None;
        }
        self.watches.remove(&key);
        Some(Action::Answer(
            participant,
            request,
            Answer::Newer { identity, epoch },
        ))
    }
}

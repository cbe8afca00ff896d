//! The digests of this host's objects: of each that is leased, made once, beside the thread that
//! serves.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use gpu_ipc::backend::thread;
use gpu_ipc::broker::Reader;

use super::register::Event;
use crate::digest::Digest;
use crate::local::Local;

/// What is known, by identity: nothing while it is being made.
#[derive(Default, Debug)]
pub struct Digests(BTreeMap<[u8; 16], Option<Digest>>);

impl Digests {
    /// Returns an object's digest; nothing while it is being made, which begins here.
    pub fn of(
        &mut self,
        reader: &Arc<Reader>,
        local: &Local,
        sender: &SyncSender<Event>,
    ) -> Option<Digest> {
        let identity = reader.identity().0;
        if let Some(known) = self.0.get(&identity) {
            return *known;
        }
        // Its mapping lives as long as the thread, also if its lease ends and its name is removed.
        let (reader, sender) = (Arc::clone(reader), sender.clone());
        let object = local.spans(reader.regions());
        let work = move || {
            // SAFETY: `Digest::of`: the reader's mapping is readable until it is dropped, after
            // this, and an object never changes.
            let digest = unsafe { Digest::of(&object) };
            drop(reader);
            // A gateway that has ended wants it no more.
            drop(sender.send(Event::Digested(identity, digest)));
        };
        match thread::start("gateway-digests", work) {
            Ok(_) => drop(self.0.insert(identity, None)),
            // It is begun again with the next question.
            Err(error) => tracing::warn!(%error, "an object is not digested"),
        }
        None
    }

    /// Takes what was made; nothing is made again.
    pub fn done(&mut self, identity: [u8; 16], digest: Option<Digest>) {
        match digest {
            Some(digest) => drop(self.0.insert(identity, Some(digest))),
            None => drop(self.0.remove(&identity)),
        }
    }

    /// Keeps those that are wanted yet.
    pub fn retain(&mut self, is_wanted: impl Fn(&[u8; 16]) -> bool) {
        self.0.retain(|identity, _| is_wanted(identity));
    }
}

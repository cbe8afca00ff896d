//! The table of all objects, with what is asked of it by participant and by user kept beside it: a
//! question costs the same however many objects there are.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Instant, SystemTime};

use crate::object::identity::Identity;
use crate::object::manifest::Manifest;
use crate::server::action::Participant;
use crate::server::ledger::Ledger;
use crate::server::object::{Object, Stage};

/// All objects.
#[derive(Debug)]
pub(super) struct Objects<F> {
    rows: HashMap<Identity, Object<F>>,
    /// The memory of those whose manifest is known.
    ledger: Ledger,
    /// Who writes what.
    writing: BTreeSet<(Participant, Identity)>,
    /// Who reads what.
    reading: BTreeSet<(Participant, Identity)>,
    /// What is visible and read by no participant, by number: the oldest first.
    idle: BTreeMap<u64, Identity>,
}

const FIRST: Identity = Identity([0; 16]);
const LAST: Identity = Identity([u8::MAX; 16]);

impl<F> Objects<F> {
    pub(super) fn new() -> Objects<F> {
        Objects {
            rows: HashMap::new(),
            ledger: Ledger::default(),
            writing: BTreeSet::new(),
            reading: BTreeSet::new(),
            idle: BTreeMap::new(),
        }
    }

    pub(super) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub(super) fn get(&self, identity: Identity) -> Option<&Object<F>> {
        self.rows.get(&identity)
    }

    /// Finds an object, to change its stage or its regions: writer, readers and manifest have
    /// methods of their own here.
    pub(super) fn get_mut(&mut self, identity: Identity) -> Option<&mut Object<F>> {
        self.rows.get_mut(&identity)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Identity, &Object<F>)> {
        self.rows.iter()
    }
}

impl<F: Clone> Objects<F> {
    /// Takes an object, whose identity is not there.
    pub(super) fn insert(&mut self, identity: Identity, object: Object<F>) {
        if let Some(writer) = object.writer {
            self.writing.insert((writer.participant, identity));
        }
        if let Some(manifest) = &object.manifest {
            self.ledger
                .add(manifest.owner, manifest.device, object.memory());
        }
        if matches!(object.stage, Stage::Visible { .. }) {
            self.idle.insert(object.seq, identity);
        }
        self.rows.insert(identity, object);
    }

    /// Takes an object out.
    pub(super) fn remove(&mut self, identity: Identity) -> Option<Object<F>> {
        let object = self.rows.remove(&identity)?;
        self.idle.remove(&object.seq);
        if let Some(writer) = object.writer {
            self.writing.remove(&(writer.participant, identity));
        }
        for reader in &object.readers {
            self.reading.remove(&(*reader, identity));
        }
        if let Some(manifest) = &object.manifest {
            self.ledger.remove(manifest.owner, object.memory());
        }
        Some(object)
    }

    /// Notes what an object is, and which memory each of its regions is.
    pub(super) fn describe(
        &mut self,
        identity: Identity,
        manifest: Manifest,
        numbers: Vec<u64>,
    ) -> Option<&mut Object<F>> {
        let object = self.rows.get_mut(&identity)?;
        let (owner, device) = (manifest.owner, manifest.device);
        object.manifest = Some(Box::new(manifest));
        object.numbers = numbers;
        self.ledger.add(owner, device, object.memory());
        Some(object)
    }

    /// Ends the writing of an object, which is visible from now on.
    pub(super) fn written(&mut self, identity: Identity) {
        if let Some(object) = self.rows.get_mut(&identity) {
            object.since = SystemTime::now();
            object.idle_since = Instant::now();
            self.idle.insert(object.seq, identity);
        }
        self.unwritten(identity);
    }

    /// Notes that no participant writes an object any more.
    pub(super) fn unwritten(&mut self, identity: Identity) {
        let object = self.rows.get_mut(&identity);
        if let Some(writer) = object.and_then(|object| object.writer.take()) {
            self.writing.remove(&(writer.participant, identity));
        }
    }

    /// Lists what a participant writes.
    pub(super) fn written_by(
        &self,
        participant: Participant,
    ) -> impl Iterator<Item = Identity> + '_ {
        let range = (participant, FIRST)..=(participant, LAST);
        self.writing.range(range).map(|(_, identity)| *identity)
    }

    /// Lists what is visible and read by no participant, the oldest first.
    pub(super) fn idle(&self) -> impl Iterator<Item = (Identity, &Object<F>)> {
        let found = |identity: &Identity| Some((*identity, self.rows.get(identity)?));
        self.idle.values().filter_map(found)
    }

    /// Lists what is being written.
    pub(super) fn unfinished(&self) -> impl Iterator<Item = Identity> + '_ {
        self.writing.iter().map(|(_, identity)| *identity)
    }

    /// Notes that a participant reads an object.
    pub(super) fn read(&mut self, identity: Identity, reader: Participant) {
        if self.reading.insert((reader, identity))
            && let Some(object) = self.rows.get_mut(&identity)
        {
            object.readers.push(reader);
            self.idle.remove(&object.seq);
        }
    }

    /// Notes that a participant reads an object no more.
    pub(super) fn unread(&mut self, identity: Identity, reader: Participant) {
        if self.reading.remove(&(reader, identity))
            && let Some(object) = self.rows.get_mut(&identity)
        {
            object.readers.retain(|of| *of != reader);
            if object.readers.is_empty() {
                object.idle_since = Instant::now();
                self.idle.insert(object.seq, identity);
            }
        }
    }

    /// Notes that a participant reads nothing any more.
    pub(super) fn unread_all(&mut self, reader: Participant) {
        let range = (reader, FIRST)..=(reader, LAST);
        let read: Vec<Identity> = self
            .reading
            .range(range)
            .map(|(_, identity)| *identity)
            .collect();
        read.into_iter()
            .for_each(|identity| self.unread(identity, reader));
    }
}

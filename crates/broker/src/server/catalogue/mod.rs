//! The catalogue: all objects, their owners, and the progress of each. Pure: no socket, no driver,
//! no keeper.
//!
//! ```text
//! create ─► Drafting ─► Making ─► Filling ─commit─► Keeping ─► Visible ─► (leaving the keeper) ─► gone
//!              │           │         │               ▲  │
//!              │           │         │        commit │  ▼ keeper refuses
//!              │           │         │              Written
//!              │           │         │               │
//!              └───────────┴─────────┴───────────────┴── abort, writer's death ─► gone
//! ```
//!
//! | stage | means | leaves by |
//! |---|---|---|
//! | `Drafting` | the workshop reads the draft | [`drafted`](Catalogue::drafted) |
//! | `Making` | old epochs leave the keeper (`replace`), then the workshop makes the regions | [`made`](Catalogue::made) |
//! | `Filling` | leased to the writer; no time limit | [`commit`](Catalogue::commit), [`abort`](Catalogue::abort), [`writer_died`](Catalogue::writer_died) |
//! | `Keeping` | regions, then manifest go to the keeper | [`kept`](Catalogue::kept) |
//! | `Written` | its leases have ended, and the keeper did not take it | `commit`, `abort`, `writer_died` |
//! | `Visible` | may be opened | [`remove`](Catalogue::remove), retention |
//!
//! Every question of [`ToBroker`](crate::wire::ToBroker) is answered the same however often it
//! comes. A method returns what is to be done as [`Action`]s, in order.
//!
//! In the order of an object's life: `draft`, `commit`, `reading`, `removal`.
//!
//! `F` stands for a descriptor that keeps memory: dropped, it lets go.
//!
//! Checked by the state-machine test in `catalogue_tests.rs`, with messages lost and repeated.

mod commit;
mod draft;
mod reading;
mod removal;

use std::collections::{BTreeMap, HashMap};

use crate::object::identity::{Epoch, Identity};
use crate::server::action::{Action, Answer, Asker, Participant};
use crate::server::bequest::{Inherited, Tombs};
use crate::server::leaving::{Leaving, LeavingTable};
use crate::server::limits::Limits;
use crate::server::names::Names;
use crate::server::object::{Object, Row, Stage};
use crate::server::outcomes::Outcomes;
use crate::wire::{RefusalCode, Wanted};

/// The objects of a broker.
#[derive(Debug)]
pub struct Catalogue<F> {
    limits: Limits,
    names: Names,
    objects: HashMap<Identity, Object<F>>,
    outcomes: Outcomes,
    watches: BTreeMap<(Participant, String), (Asker, u64, Epoch)>,
    /// Removals and replacements that wait for the keeper: the client to answer, or the object to
    /// continue.
    leaving: LeavingTable,
    next_seq: u64,
    next_region: u64,
}

impl<F: Clone> Catalogue<F> {
    /// Makes an empty one.
    pub fn new(limits: Limits) -> Catalogue<F> {
        Catalogue {
            limits,
            names: Names::default(),
            objects: HashMap::new(),
            outcomes: Outcomes::default(),
            watches: BTreeMap::new(),
            leaving: LeavingTable::default(),
            next_seq: 1,
            next_region: 1,
        }
    }

    /// Takes what a keeper kept, and returns what is to be taken out of it: objects whose removal
    /// or retirement was under way.
    pub fn restore(
        &mut self,
        tombs: &Tombs,
        objects: Vec<Inherited<F>>,
        next_seq: u64,
    ) -> Vec<Action<F>> {
        self.next_seq = self.next_seq.max(next_seq);
        self.names.restore(tombs);
        let mut dropped = Vec::new();
        for Inherited {
            seq,
            manifest,
            file,
            regions,
        } in objects
        {
            let (identity, epoch) = (manifest.identity, manifest.epoch);
            self.next_seq = self.next_seq.max(seq + 1);
            if self.names.is_removed(&manifest.name, epoch) || self.objects.contains_key(&identity)
            {
                dropped.push((seq, regions.len()));
                continue;
            }
            self.names.publish(&manifest, epoch);
            let numbers = regions.iter().map(|_| self.region_number()).collect();
            let object = Object {
                seq,
                stage: Stage::Visible { manifest: file },
                writer: None,
                wanted: Wanted::default(),
                request: 0,
                // Memory that two epochs share has two numbers from here on, and counts for each.
                numbers,
                manifest: Some(Box::new(manifest)),
                regions: regions.into_iter().map(Some).collect(),
                readers: Vec::new(),
            };
            self.objects.insert(identity, object);
        }
        let mut actions = Vec::new();
        if !dropped.is_empty() {
            actions.push(Action::Forget {
                token: self.leaving.begin(Leaving::Retired),
                objects: dropped,
                tombs: None,
            });
        }
        self.names
            .all()
            .iter()
            .for_each(|name| self.retire(name, &mut actions));
        actions
    }

    fn region_number(&mut self) -> u64 {
        self.next_region += 1;
        self.next_region
    }

    /// Gives up all unfinished objects of a writer that is proven dead, but for those whose commit
    /// it asked for.
    pub fn writer_died(&mut self, writer: Participant) {
        self.objects
            .retain(|_, object| !object.is_written_by(writer) || !object.is_unfinished());
    }

    /// Ends the reader's leases and watches of a participant that has hung up.
    pub fn hung_up(&mut self, participant: Participant) {
        self.objects
            .values_mut()
            .for_each(|object| object.readers.retain(|reader| *reader != participant));
        self.watches.retain(|(of, _), _| *of != participant);
    }

    /// Says whether a participant writes something.
    pub fn writes(&self, participant: Participant) -> bool {
        self.objects
            .values()
            .any(|object| object.is_written_by(participant))
    }

    /// Returns what must be known of names besides their visible objects.
    pub fn tombs(&self) -> Tombs {
        self.names.tombs()
    }

    /// Returns all visible objects in the order in which they are given to a keeper: the newest epoch
    /// of each name first, then the epochs before them, and of those the latest first.
    pub fn visible(&self) -> Vec<(u64, F, Vec<F>)> {
        let mut all: Vec<_> = self
            .objects
            .values()
            .filter_map(|object| match (&object.stage, &object.manifest) {
                (Stage::Visible { manifest }, Some(of)) => Some((
                    self.names.rank(&of.name, of.epoch),
                    (object.seq, manifest.clone(), object.files()),
                )),
                _ => None,
            })
            .collect();
        all.sort_unstable_by_key(|(rank, (seq, ..))| (*rank, std::cmp::Reverse(*seq)));
        all.into_iter().map(|(_, object)| object).collect()
    }

    /// Returns the bytes of all objects that a user may know of. What two epochs share counts once.
    pub fn bytes(&self, uid: u32) -> u64 {
        let known = self
            .objects
            .values()
            .filter(|object| object.is_known_to(uid));
        let memory: BTreeMap<u64, u64> = known.flat_map(Object::memory).collect();
        memory.values().sum()
    }

    /// Lists all objects that a user may know of.
    pub fn rows(&self, uid: u32) -> Vec<Row> {
        let rows = self
            .objects
            .iter()
            .filter_map(|(identity, object)| object.row(*identity, uid));
        let mut rows: Vec<Row> = rows.collect();
        rows.sort_by(|a, b| (&a.name, a.epoch, a.identity).cmp(&(&b.name, b.epoch, b.identity)));
        rows
    }
}

fn declined<F>(refusal: RefusalCode, why: &str) -> Answer<F> {
    Answer::Declined(refusal, why.into())
}

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
//! | `Keeping` | regions, then manifest go to the keeper; without a writer it goes if they are not taken | [`kept`](Catalogue::kept) |
//! | `Written` | its leases have ended, and the keeper did not take it | `commit`, `abort`, `writer_died` |
//! | `Visible` | may be opened | [`remove`](Catalogue::remove), retention |
//!
//! Every question of [`ToBroker`](crate::wire::ToBroker) is answered the same however often it
//! comes. A method returns what is to be done as [`Action`]s, in order.
//!
//! In the order of an object's life: `draft`, `commit`, `reading`, `removal`, `eviction`. `pools`: an
//! object whose memory stays writable; its first record goes to the keeper before it is visible.
//!
//! `F` stands for a descriptor that keeps memory: dropped, it lets go.
//!
//! Checked by the state-machine test in `catalogue_tests.rs`, with messages lost and repeated.

mod commit;
pub(in crate::server) mod draft;
mod eviction;
mod pools;
mod reading;
mod removal;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Instant;

use crate::object::identity::{Identity, Lineage};
use crate::server::action::{Action, Answer, Asker, Participant};
use crate::server::bequest::{Bequest, History, Inherited};
use crate::server::hold::Pools;
use crate::server::leaving::{Leaving, LeavingTable};
use crate::server::limits::Limits;
use crate::server::listing::Usage;
use crate::server::names::Names;
use crate::server::object::{Object, Row, Stage};
use crate::server::objects::Objects;
use crate::server::outcomes::Outcomes;
use crate::server::watches::Watches;
use crate::wire::{RefusalCode, Wanted};

/// The objects of a broker.
#[derive(Debug)]
pub struct Catalogue<F> {
    limits: Limits,
    /// The broker's own user, who sees and removes everything.
    operator: u32,
    lineage: Lineage,
    names: Names,
    objects: Objects<F>,
    pools: Pools<F>,
    outcomes: Outcomes,
    watches: Watches,
    /// The groups of each participant whose user is in any.
    groups: HashMap<Participant, Vec<u32>>,
    /// The names of which a commit is on its way to the keeper: one at a time.
    keeping: HashSet<String>,
    /// Removals and replacements that wait for the keeper: the client to answer, or the object to
    /// continue.
    leaving: LeavingTable,
    next_seq: u64,
    next_region: u64,
    evicted: u64,
}

impl<F: Clone> Catalogue<F> {
    /// Makes an empty one.
    pub fn new(limits: Limits, operator: u32) -> Catalogue<F> {
        Catalogue {
            limits,
            operator,
            lineage: Lineage::default(),
            names: Names::default(),
            objects: Objects::new(),
            pools: Pools::new(),
            outcomes: Outcomes::default(),
            watches: Watches::default(),
            groups: HashMap::new(),
            keeping: HashSet::new(),
            leaving: LeavingTable::default(),
            next_seq: 1,
            next_region: 1,
            evicted: 0,
        }
    }

    /// Takes what a keeper kept, and returns what is to be taken out of it: objects whose removal
    /// or retirement was under way.
    pub fn restore(
        &mut self,
        bequest: &Bequest,
        objects: Vec<Inherited<F>>,
        next_seq: u64,
    ) -> Vec<Action<F>> {
        self.next_seq = self.next_seq.max(next_seq);
        self.lineage = bequest.history.lineage;
        self.names.restore(&bequest.tombs, bequest.history.floor);
        let mut dropped = Vec::new();
        for Inherited {
            seq,
            manifest,
            file,
            regions,
            since,
        } in objects
        {
            let (identity, epoch) = (manifest.identity, manifest.epoch);
            self.next_seq = self.next_seq.max(seq + 1);
            if self.names.is_removed(&manifest.name, epoch) || self.objects.get(identity).is_some()
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
                since,
                idle_since: Instant::now(),
            };
            self.objects.insert(identity, object);
        }
        let mut actions = Vec::new();
        if !dropped.is_empty() {
            actions.push(Action::Forget {
                token: self.leaving.begin(Leaving::Retired),
                objects: dropped,
                bequest: None,
            });
        }
        self.retire_all(&mut actions);
        actions
    }

    /// Returns what is allowed.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Sets what is allowed from here on. Epochs beyond those that are kept go; what is beyond
    /// another limit stays, and leaves no room for more.
    pub fn change(&mut self, limits: Limits) -> Vec<Action<F>> {
        self.limits = limits;
        let mut actions = Vec::new();
        self.retire_all(&mut actions);
        actions
    }

    fn retire_all(&mut self, actions: &mut Vec<Action<F>>) {
        let names = self.names.all();
        names.iter().for_each(|name| self.retire(name, actions));
    }

    /// Notes the groups of a participant's user.
    pub fn joined(&mut self, participant: Participant, groups: Vec<u32>) {
        if !groups.is_empty() {
            self.groups.insert(participant, groups);
        }
    }

    /// Returns the groups of a participant's user.
    pub fn groups_of(&self, participant: Participant) -> &[u32] {
        self.groups.get(&participant).map_or(&[], Vec::as_slice)
    }

    fn region_number(&mut self) -> u64 {
        self.next_region += 1;
        self.next_region
    }

    /// Gives up all unfinished objects of a writer that is proven dead, but for those on their way to
    /// the keeper: they go if it does not take them, since no commit of them comes again.
    pub fn writer_died(&mut self, writer: Participant) {
        let all: Vec<Identity> = self.objects.written_by(writer).collect();
        for identity in all {
            if self
                .objects
                .get(identity)
                .is_some_and(Object::is_unfinished)
            {
                self.objects.remove(identity);
            } else {
                self.objects.unwritten(identity);
            }
        }
        self.holder_died(writer);
    }

    /// Ends the reader's leases and watches of a participant that has hung up.
    pub fn hung_up(&mut self, participant: Participant) {
        self.objects.unread_all(participant);
        self.watches.end_all(participant);
        self.groups.remove(&participant);
    }

    /// Says whether a participant writes something.
    pub fn writes(&self, participant: Participant) -> bool {
        self.objects.written_by(participant).next().is_some()
    }

    /// Returns what a successor must know besides the visible objects.
    pub fn bequest(&self) -> Bequest {
        Bequest {
            history: History {
                lineage: self.lineage,
                floor: self.names.floor(),
            },
            tombs: self.names.tombs(),
        }
    }

    /// Returns which history the epochs belong to.
    pub fn lineage(&self) -> Lineage {
        self.lineage
    }

    /// Counts the objects that were removed because a limit pressed or their time was over.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Counts the names that have an object.
    pub fn names(&self) -> usize {
        self.names.visible()
    }

    /// Returns all visible objects in the order in which they are given to a keeper: the newest epoch
    /// of each name first, then the epochs before them, and of those the latest first.
    pub fn visible(&self) -> Vec<(u64, F, Vec<F>)> {
        let mut all: Vec<_> = self
            .objects
            .iter()
            .filter_map(|(_, object)| match (&object.stage, &object.manifest) {
                (Stage::Visible { manifest }, Some(of)) => Some((
                    self.names.rank(&of.name, of.epoch),
                    (object.seq, manifest.clone(), object.files()),
                )),
                _ => None,
            })
            .collect();
        all.sort_unstable_by_key(|(rank, (seq, ..))| (*rank, std::cmp::Reverse(*seq)));
        // A pool without its record is given to no process: records go first.
        self.records()
            .chain(all.into_iter().map(|(_, object)| object))
            .collect()
    }

    /// Returns the bytes of all objects that a participant's user may know of. What two epochs share
    /// counts once.
    pub fn bytes(&self, asker: Asker) -> u64 {
        if asker.uid == self.operator {
            return self.objects.ledger().bytes();
        }
        let groups = self.groups_of(asker.participant);
        let known = self.objects.iter().map(|(_, object)| object);
        let known = known.filter(|object| object.is_known_to(asker.uid, groups));
        let memory: BTreeMap<u64, u64> = known.flat_map(Object::memory).collect();
        memory.values().sum()
    }

    /// Lists what the objects of each user take that a user may know of.
    pub fn users(&self, uid: u32) -> Vec<Usage> {
        let ledger = self.objects.ledger();
        if uid == self.operator {
            ledger.users()
        } else {
            vec![ledger.usage(uid)]
        }
    }

    /// Lists all objects that a participant's user may know of.
    pub fn rows(&self, asker: Asker) -> Vec<Row> {
        let all = self.objects.iter();
        self.shown(asker, all.map(|(identity, object)| (*identity, object)))
    }

    /// Lists, of the objects that a participant's user may know of, those of the first `most` names
    /// that have a visible one, and as many that are not visible: it costs the same however many
    /// there are.
    pub fn rows_of_names(&self, asker: Asker, most: usize) -> Vec<Row> {
        let visible = self.names.first(most);
        let unfinished = self.objects.unfinished().take(most);
        let some = visible.chain(unfinished).filter_map(|identity| {
            let object = self.objects.get(identity)?;
            Some((identity, object))
        });
        self.shown(asker, some)
    }

    fn shown<'a>(
        &self,
        asker: Asker,
        objects: impl Iterator<Item = (Identity, &'a Object<F>)>,
    ) -> Vec<Row>
    where
        F: 'a,
    {
        let is_operator = asker.uid == self.operator;
        let groups = self.groups_of(asker.participant);
        let rows = objects
            .filter(|(_, object)| is_operator || object.is_known_to(asker.uid, groups))
            .filter_map(|(identity, object)| object.row(identity));
        let mut rows: Vec<Row> = rows.collect();
        for row in &mut rows {
            row.pinned = self.limits.is_pinned(&row.name);
            let pool = self.pool_row(row.identity);
            row.record = pool.as_ref().map(|(_, record)| *record);
            row.pool = pool.map(|(pool, _)| pool);
        }
        rows.sort_by(|a, b| (&a.name, a.epoch, a.identity).cmp(&(&b.name, b.epoch, b.identity)));
        rows
    }

    /// Counts the visible objects of which a condition holds, by their numbers; a pool is meant, too,
    /// when the record of its hold is.
    pub fn count_visible(&self, mut is_meant: impl FnMut(u64) -> bool) -> u64 {
        let all = self.objects.iter().filter(|(identity, object)| {
            let record = self.pools.get(**identity).and_then(|of| of.record.as_ref());
            matches!(object.stage, Stage::Visible { .. })
                && (is_meant(object.seq) || record.is_some_and(|of| is_meant(of.seq)))
        });
        all.count() as u64
    }
}

fn declined<F>(refusal: RefusalCode, why: &str) -> Answer<F> {
    Answer::Declined(refusal, why.into())
}

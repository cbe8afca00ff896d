//! The catalogue: all objects, their owners, and the progress of each. Pure: no socket, no driver, no keeper.
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
//! Every question of [`ToBroker`](crate::wire::ToBroker) is answered the same however often it comes. A method returns
//! what is to be done as [`Action`]s, in order.
//!
//! `F` stands for a descriptor that keeps memory: dropped, it lets go.
//!
//! Checked by the state-machine test in `catalogue_tests.rs`, with messages lost and repeated.

use std::collections::{BTreeMap, HashMap};

use crate::object::identity::{Epoch, Identity};
use crate::object::manifest::Manifest;
use crate::server::action::{Action, Answer, Asker, Device, KeepError, Participant, Refused, Wanted};
use crate::server::bequest::{Inherited, Tombs};
use crate::server::leaving::{Leaving, LeavingTable};
use crate::server::limits::{Limits, Region};
use crate::server::names::Names;
use crate::server::object::{Object, Row, Stage};
use crate::server::outcomes::Outcomes;
use crate::server::takeover::{self, Former};
use crate::wire::{LeaseSlot, Refusal, Selector, Standing};

/// Unfinished objects of one participant.
const MOST_UNFINISHED: usize = 64;

/// The objects of a broker.
#[derive(Debug)]
pub struct Catalogue<F> {
    limits: Limits,
    names: Names,
    objects: HashMap<Identity, Object<F>>,
    outcomes: Outcomes,
    watches: BTreeMap<(Participant, String), (Asker, u64, Epoch)>,
    /// Removals and replacements that wait for the keeper: the client to answer, or the object to continue.
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

    /// Takes what a keeper kept, and returns what is to be taken out of it: objects whose removal or retirement was
    /// under way.
    pub fn restore(&mut self, tombs: &Tombs, objects: Vec<Inherited<F>>, next_seq: u64) -> Vec<Action<F>> {
        self.next_seq = self.next_seq.max(next_seq);
        self.names.restore(tombs);
        let mut dropped = Vec::new();
        for Inherited { seq, manifest, file, regions } in objects {
            let (identity, epoch) = (manifest.identity, manifest.epoch);
            self.next_seq = self.next_seq.max(seq + 1);
            if self.names.is_removed(&manifest.name, epoch) || self.objects.contains_key(&identity) {
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
            actions.push(Action::Forget { token: self.leaving.begin(Leaving::Retired), objects: dropped, tombs: None });
        }
        self.names.all().iter().for_each(|name| self.retire(name, &mut actions));
        actions
    }

    /// Starts an object (the draft is on its way to the workshop if it says yes).
    ///
    /// # Errors
    ///
    /// The answers that are not yes: none while it is under way, `Created` again, or a refusal.
    pub fn create(
        &mut self,
        asker: Asker,
        request: u64,
        identity: Identity,
        wanted: Wanted,
    ) -> Result<(), Option<Answer<F>>> {
        if let Some(object) = self.objects.get_mut(&identity) {
            if object.writer != Some(asker) {
                return Err(Some(declined(Refusal::Exists, "the identity belongs to another object")));
            }
            object.request = request;
            return Err(match &object.stage {
                Stage::Drafting | Stage::Making => None,
                Stage::Filling { leases } => Some(Answer::Created {
                    granularity: object.manifest.as_ref().map_or(0, |manifest| manifest.granularity),
                    leases: leases.clone(),
                    regions: object.files(),
                }),
                Stage::Keeping { .. } | Stage::Written | Stage::Visible { .. } => {
                    Some(declined(Refusal::Exists, "the object was committed already"))
                }
            });
        }
        if asker.shared_context {
            let why = "the participant is a client of MPS, so its death would not prove that its writes have ended";
            return Err(Some(declined(Refusal::SharedContext, why)));
        }
        let unfinished = self.objects.values().filter(|object| object.is_written_by(asker.participant));
        if unfinished.count() >= MOST_UNFINISHED {
            let why = format!("the participant has {MOST_UNFINISHED} unfinished objects already");
            return Err(Some(Answer::Declined(Refusal::Limit, why)));
        }
        let object = Object {
            seq: self.next_seq,
            stage: Stage::Drafting,
            writer: Some(asker),
            wanted,
            request,
            manifest: None,
            regions: Vec::new(),
            numbers: Vec::new(),
            readers: Vec::new(),
        };
        self.next_seq += 1;
        self.objects.insert(identity, object);
        Ok(())
    }

    /// Takes the draft that the workshop has read and checked, with the granularity of its device.
    pub fn drafted(&mut self, identity: Identity, draft: Result<(Manifest, u64), Refused>) -> Vec<Action<F>> {
        // Aborted meanwhile.
        let Some(object) = self.objects.get(&identity) else { return Vec::new() };
        let (Stage::Drafting, Some(writer)) = (&object.stage, object.writer) else { return Vec::new() };
        let admitted = draft.and_then(|(draft, granularity)| self.admit(identity, writer, draft, granularity));
        let (manifest, former) = match admitted {
            Ok(admitted) => admitted,
            Err((refusal, why)) => return self.fail(identity, refusal, why),
        };
        let numbers = former.iter().map(|former| match former {
            Some((_, number)) => *number,
            None => self.region_number(),
        });
        let numbers = numbers.collect();
        let name = manifest.name.clone();
        let Some(object) = self.objects.get_mut(&identity) else { return Vec::new() };
        object.manifest = Some(Box::new(manifest));
        object.numbers = numbers;
        object.regions = former.into_iter().map(|former| former.map(|(region, _)| region)).collect();
        object.stage = Stage::Making;
        let (replace, make) = (object.wanted.replace, make(identity, object));
        if replace && let Some(action) = self.give_up_epochs(&name, Leaving::Replaced(identity)) {
            return vec![action];
        }
        make.into_iter().collect()
    }

    fn region_number(&mut self) -> u64 {
        self.next_region += 1;
        self.next_region
    }

    /// Checks a draft against names and limits. Returns what becomes of it, and for each region what it takes over.
    fn admit(
        &self,
        identity: Identity,
        writer: Asker,
        draft: Manifest,
        granularity: u64,
    ) -> Result<(Manifest, Vec<Former<F>>), Refused> {
        let object = &self.objects[&identity];
        let is_replica = draft.home.is_some();
        let is_draft = draft.granularity == 0 && draft.owner == 0 && (draft.epoch != Epoch(0)) == is_replica;
        if draft.identity != identity || !is_draft {
            return Err((Refusal::Layout, "the draft is of another identity, or no draft".into()));
        }
        // A replica that went may be pulled again: it has no other contents.
        if !is_replica && self.outcomes.of(identity).is_some() {
            return Err((Refusal::Exists, "the object was committed already".into()));
        }
        let Wanted { scratch, expect, taken, .. } = object.wanted;
        if is_replica && (scratch || expect.is_some() || taken != 0) {
            return Err((
                Refusal::Protocol,
                "a replica is neither scratch nor taken over, and expects no epoch".into(),
            ));
        }
        if !scratch {
            self.names.check_room(&draft.name)?;
            self.check_name(&draft, writer.uid, object.wanted)?;
        }
        let manifest = Manifest { owner: writer.uid, granularity, ..draft };
        let before = self.names.latest(&manifest.name).and_then(|(_, identity)| self.objects.get(&identity));
        let former = takeover::regions(before, &manifest, object.wanted)?;
        let stays = |other: &&Object<F>| {
            // What `replace` gives up is gone before the regions are made.
            !(object.wanted.replace
                && matches!(other.stage, Stage::Visible { .. })
                && other.manifest.as_ref().is_some_and(|other| other.name == manifest.name))
        };
        let there = self.objects.values().filter(stays).flat_map(|other| {
            let owner = other.manifest.as_ref().map_or(0, |manifest| manifest.owner);
            other.memory().map(move |(number, bytes)| Region { owner, number: Some(number), bytes })
        });
        let asked = manifest.mapped_regions().zip(&former).map(|(bytes, former)| {
            let number = former.as_ref().map(|(_, number)| *number);
            Region { owner: writer.uid, number, bytes }
        });
        self.limits.check(asked, writer.uid, there)?;
        Ok((manifest, former))
    }

    /// Refuses an object whose name does not take it: at the create, and again at the commit.
    fn check_name(&self, manifest: &Manifest, uid: u32, wanted: Wanted) -> Result<(), Refused> {
        let Manifest { name, home, epoch, .. } = manifest;
        self.names.check_owner(name, uid)?;
        self.names.check_home(name, home.as_deref())?;
        if home.is_none() {
            return self.names.check_epoch(name, wanted.expect);
        }
        // What `replace` gives up counts as removed.
        if wanted.replace && *epoch <= self.names.last(name) {
            let why = format!("{name} had epoch {} already, and {epoch} cannot replace it", self.names.last(name));
            return Err((Refusal::Conflict, why));
        }
        self.names.check_replica(name, *epoch, self.limits.epochs.max(1))
    }

    /// Takes the regions that the workshop made, or why it could not. `grant` grants a slot for each.
    pub fn made(
        &mut self,
        identity: Identity,
        made: Result<Vec<F>, Refused>,
        grant: impl FnOnce(Participant, usize) -> Option<Vec<LeaseSlot>>,
    ) -> Vec<Action<F>> {
        let Some(object) = self.objects.get_mut(&identity) else { return Vec::new() };
        let (Stage::Making, Some(writer)) = (&object.stage, object.writer) else { return Vec::new() };
        let mut made = match made {
            Ok(made) => made.into_iter(),
            Err((refusal, why)) => return self.fail(identity, refusal, why),
        };
        for region in &mut object.regions {
            *region = region.take().or_else(|| made.next());
        }
        let regions = object.files();
        let Some(leases) = grant(writer.participant, regions.len()) else {
            return self.fail(identity, Refusal::Limit, "the participant has no free slot for a write lease".into());
        };
        object.stage = Stage::Filling { leases: leases.clone() };
        let granularity = object.manifest.as_ref().map_or(0, |manifest| manifest.granularity);
        let answer = Answer::Created { granularity, leases, regions };
        vec![Action::Answer(writer.participant, object.request, answer)]
    }

    /// Ends an object that never became visible, and tells its writer.
    fn fail(&mut self, identity: Identity, refusal: Refusal, why: String) -> Vec<Action<F>> {
        let Some(object) = self.objects.remove(&identity) else { return Vec::new() };
        let Some(writer) = object.writer else { return Vec::new() };
        let mut actions = self.ended_leases(writer.participant, &object);
        actions.push(Action::Answer(writer.participant, object.request, Answer::Declined(refusal, why)));
        actions
    }

    fn ended_leases(&self, writer: Participant, object: &Object<F>) -> Vec<Action<F>> {
        match &object.stage {
            Stage::Filling { leases } => vec![Action::EndLeases(writer, leases.clone())],
            _ => Vec::new(),
        }
    }

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
        let busy = self.objects.get(&identity).and_then(|object| object.manifest.as_ref()).is_some_and(|manifest| {
            let same_name =
                |other: &Object<F>| other.manifest.as_ref().is_some_and(|other| other.name == manifest.name);
            self.objects.values().any(|other| matches!(other.stage, Stage::Keeping { .. }) && same_name(other))
        });
        let Some(object) = self.objects.get_mut(&identity) else {
            return answer(declined(Refusal::NotWriter, "no unfinished object has this identity"));
        };
        if !object.is_written_by(asker.participant) {
            return answer(declined(Refusal::NotWriter, "another participant writes this object"));
        }
        object.request = request;
        let leases = match &object.stage {
            Stage::Filling { leases } => leases.as_slice(),
            Stage::Written => &[],
            Stage::Keeping { .. } => return Vec::new(),
            _ => return answer(declined(Refusal::Protocol, "the object has no regions yet")),
        };
        if object.wanted.scratch {
            return answer(declined(Refusal::Protocol, "a scratch object is never committed"));
        }
        // One at a time for a name, so that epochs are given in the order in which they become visible.
        if busy || (self.limits.reads_slots && !released(leases)) {
            return Vec::new();
        }
        let Some(mut manifest) = object.manifest.clone() else { return Vec::new() };
        // What it replaces was given up before its regions were made.
        let (seq, regions, wanted) = (object.seq, object.files(), Wanted { replace: false, ..object.wanted });
        // Somebody may have become the name's owner, or have committed, since the create.
        if let Err((refusal, why)) = self.check_name(&manifest, asker.uid, wanted) {
            return self.fail(identity, refusal, why);
        }
        let epoch = match manifest.home {
            Some(_) => manifest.epoch,
            None => self.names.last(&manifest.name).next(),
        };
        manifest.epoch = epoch;
        if let Some(object) = self.objects.get_mut(&identity) {
            let keep = Action::Keep { identity, seq, manifest, regions };
            return match std::mem::replace(&mut object.stage, Stage::Keeping { epoch }) {
                Stage::Filling { leases } => vec![Action::EndLeases(asker.participant, leases), keep],
                _ => vec![keep],
            };
        }
        Vec::new()
    }

    /// Takes the keeper's answer: the object is visible from here on, or was not kept.
    pub fn kept(&mut self, identity: Identity, kept: Result<F, KeepError>) -> Vec<Action<F>> {
        let Some(object) = self.objects.get_mut(&identity) else { return Vec::new() };
        let Stage::Keeping { epoch } = object.stage else { return Vec::new() };
        let file = match kept {
            Ok(file) => file,
            Err(KeepError::Absent) => {
                // The commit comes again.
                object.stage = Stage::Written;
                return Vec::new();
            }
            Err(KeepError::Refused(why)) => {
                object.stage = Stage::Written;
                let answer = Answer::Declined(Refusal::Keeper, why);
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
        let (writer, request) = (object.writer.take(), object.request);
        object.stage = Stage::Visible { manifest: file };
        let Some(manifest) = &object.manifest else { return Vec::new() };
        let name = manifest.name.clone();
        self.names.publish(manifest, epoch);
        self.outcomes.note(identity, epoch);
        if let Some(writer) = writer {
            actions.push(Action::Answer(writer.participant, request, Answer::Committed(epoch)));
        }
        let told: Vec<Participant> =
            self.watches.keys().filter(|(_, watched)| *watched == name).map(|(participant, _)| *participant).collect();
        for participant in told {
            actions.extend(self.look_for_newer(participant, &name));
        }
        self.retire(&name, &mut actions);
        actions
    }

    /// Returns what became of a commit.
    pub fn outcome(&self, identity: Identity) -> Standing {
        match self.outcome_of(identity) {
            Some(epoch) => Standing::Committed(epoch),
            None if self.objects.contains_key(&identity) => Standing::Unfinished,
            None => Standing::Unknown,
        }
    }

    fn outcome_of(&self, identity: Identity) -> Option<Epoch> {
        match self.objects.get(&identity) {
            Some(Object { stage: Stage::Visible { .. }, manifest: Some(manifest), .. }) => Some(manifest.epoch),
            Some(_) => None,
            None => self.outcomes.of(identity),
        }
    }

    /// Gives up an unfinished object.
    pub fn abort(&mut self, asker: Asker, identity: Identity) -> Vec<Action<F>> {
        match self.objects.get(&identity) {
            // Too late: the commit was asked for.
            Some(object) if !object.is_unfinished() => Vec::new(),
            Some(object) if object.is_written_by(asker.participant) => {
                let actions = self.ended_leases(asker.participant, object);
                self.objects.remove(&identity);
                actions
            }
            _ => Vec::new(),
        }
    }

    /// Gives up all unfinished objects of a writer that is proven dead, but for those whose commit it asked for.
    pub fn writer_died(&mut self, writer: Participant) {
        self.objects.retain(|_, object| !object.is_written_by(writer) || !object.is_unfinished());
    }

    /// Ends the reader's leases and watches of a participant that has hung up.
    pub fn hung_up(&mut self, participant: Participant) {
        self.objects.values_mut().for_each(|object| object.readers.retain(|reader| *reader != participant));
        self.watches.retain(|(of, _), _| *of != participant);
    }

    /// Says whether a participant writes something.
    pub fn writes(&self, participant: Participant) -> bool {
        self.objects.values().any(|object| object.is_written_by(participant))
    }

    /// Leases an object for reading.
    pub fn open(&mut self, asker: Asker, selector: &Selector) -> Answer<F> {
        let found = match selector {
            Selector::Latest(name) => self.names.latest(name).map(|(_, identity)| identity),
            Selector::Epoch(name, epoch) => self.names.at(name, *epoch),
            Selector::Identity(identity) => Some(*identity),
        };
        let object = found.and_then(|identity| self.objects.get_mut(&identity).map(|object| (identity, object)));
        let Some((identity, object)) = object else {
            return Answer::Declined(Refusal::NotFound, self.why_not_found(selector));
        };
        let (Stage::Visible { manifest: file }, Some(manifest)) = (&object.stage, &object.manifest) else {
            return Answer::Declined(Refusal::NotFound, "the object is not visible yet".into());
        };
        if !manifest.readers.admit(manifest.owner, asker.uid) {
            let why = format!("the object is for uid {}, and not for uid {}", manifest.owner, asker.uid);
            return Answer::Declined(Refusal::User, why);
        }
        if !object.readers.contains(&asker.participant) {
            object.readers.push(asker.participant);
        }
        Answer::Opened { identity, epoch: manifest.epoch, manifest: file.clone(), regions: object.files() }
    }

    fn why_not_found(&self, selector: &Selector) -> String {
        match selector {
            Selector::Latest(name) | Selector::Epoch(name, _) => self.names.why_not_found(name),
            Selector::Identity(_) => {
                "no object of this identity is here; it was removed, or replaced by newer epochs".into()
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
        self.watches.insert((asker.participant, name.into()), (asker, request, seen));
        self.look_for_newer(asker.participant, name).into_iter().collect()
    }

    fn look_for_newer(&mut self, participant: Participant, name: &str) -> Option<Action<F>> {
        let key = (participant, name.to_owned());
        let &(asker, request, seen) = self.watches.get(&key)?;
        let (epoch, identity) = self.names.latest(name)?;
        let manifest = self.objects.get(&identity)?.manifest.as_ref()?;
        if epoch <= seen || !manifest.readers.admit(manifest.owner, asker.uid) {
            return None;
        }
        self.watches.remove(&key);
        Some(Action::Answer(participant, request, Answer::Newer { identity, epoch }))
    }

    /// Removes one epoch of a name, or all of it.
    pub fn remove(&mut self, asker: Asker, request: u64, name: &str, epoch: Epoch) -> Vec<Action<F>> {
        let answer = |answer| vec![Action::Answer(asker.participant, request, answer)];
        if !self.names.is_known(name) {
            return answer(declined(Refusal::NotFound, "it was never committed"));
        }
        if let Err((refusal, why)) = self.names.check_owner(name, asker.uid) {
            return answer(Answer::Declined(refusal, why));
        }
        if self.leaving.ask_again(name, epoch, asker.participant, request) {
            return Vec::new();
        }
        let gone = self.names.take(name, epoch);
        if gone.is_empty() {
            return answer(Answer::Removed(self.names.last(name)));
        }
        let objects = self.take_out(&gone);
        let token = self.leaving.begin(Leaving::Asked(asker.participant, request, name.into(), epoch));
        vec![Action::Forget { token, objects, tombs: Some(self.tombs()) }]
    }

    /// Goes on with what waited for the keeper: a removal is answered, a replacement is made.
    pub fn forgotten(&mut self, token: u64, forgotten: Result<(), KeepError>) -> Vec<Action<F>> {
        match self.leaving.end(token) {
            Some(Leaving::Asked(participant, request, name, _)) => {
                let last = self.names.last(&name);
                let answer = match forgotten {
                    Ok(()) => Answer::Removed(last),
                    // It is gone here; a keeper that comes later is not given it.
                    Err(KeepError::Absent) => Answer::Removed(last),
                    Err(KeepError::Refused(why)) => Answer::Declined(Refusal::Keeper, why),
                };
                vec![Action::Answer(participant, request, answer)]
            }
            Some(Leaving::Replaced(identity)) => match self.objects.get(&identity) {
                Some(object) if matches!(object.stage, Stage::Making) => make(identity, object).into_iter().collect(),
                _ => Vec::new(),
            },
            Some(Leaving::Retired) | None => Vec::new(),
        }
    }

    fn give_up_epochs(&mut self, name: &str, then: Leaving) -> Option<Action<F>> {
        let gone = self.names.take(name, Epoch(0));
        if gone.is_empty() {
            return None;
        }
        let objects = self.take_out(&gone);
        let token = self.leaving.begin(then);
        Some(Action::Forget { token, objects, tombs: Some(self.tombs()) })
    }

    /// Keeps the last epochs of a name alone.
    fn retire(&mut self, name: &str, actions: &mut Vec<Action<F>>) {
        let gone = self.names.take_beyond(name, self.limits.epochs.max(1));
        if !gone.is_empty() {
            let objects = self.take_out(&gone);
            actions.push(Action::Forget { token: self.leaving.begin(Leaving::Retired), objects, tombs: None });
        }
    }

    fn take_out(&mut self, gone: &[Identity]) -> Vec<(u64, usize)> {
        let taken = gone.iter().filter_map(|identity| {
            let object = self.objects.remove(identity)?;
            let epoch = object.manifest.as_ref().map_or(Epoch(0), |manifest| manifest.epoch);
            self.outcomes.note(*identity, epoch);
            Some((object.seq, object.regions.len()))
        });
        taken.collect()
    }

    /// Returns what must be known of names besides their visible objects.
    pub fn tombs(&self) -> Tombs {
        self.names.tombs()
    }

    /// Returns all visible objects, to give them to a keeper.
    pub fn visible(&self) -> Vec<(u64, F, Vec<F>)> {
        let mut all: Vec<_> = self
            .objects
            .values()
            .filter_map(|object| match &object.stage {
                Stage::Visible { manifest } => Some((object.seq, manifest.clone(), object.files())),
                _ => None,
            })
            .collect();
        all.sort_unstable_by_key(|(seq, ..)| *seq);
        all
    }

    /// Returns the bytes of all objects that a user may know of. What two epochs share counts once.
    pub fn bytes(&self, uid: u32) -> u64 {
        let known = self.objects.values().filter(|object| object.is_known_to(uid));
        let memory: BTreeMap<u64, u64> = known.flat_map(Object::memory).collect();
        memory.values().sum()
    }

    /// Lists all objects that a user may know of.
    pub fn rows(&self, uid: u32) -> Vec<Row> {
        let rows = self.objects.iter().filter_map(|(identity, object)| object.row(*identity, uid));
        let mut rows: Vec<Row> = rows.collect();
        rows.sort_by(|a, b| (&a.name, a.epoch, a.identity).cmp(&(&b.name, b.epoch, b.identity)));
        rows
    }
}

/// Asks for the regions that were not taken over.
fn make<F>(identity: Identity, object: &Object<F>) -> Option<Action<F>> {
    let manifest = object.manifest.as_ref()?;
    let device = Device { backend: manifest.backend, uuid: manifest.device };
    let missing = manifest.mapped_regions().zip(&object.regions).filter(|(_, region)| region.is_none());
    Some(Action::Make { identity, device, bytes: missing.map(|(bytes, _)| bytes).collect() })
}

fn declined<F>(refusal: Refusal, why: &str) -> Answer<F> {
    Answer::Declined(refusal, why.into())
}

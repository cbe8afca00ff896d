//! The catalogue: all objects, their owners, and the progress of each. Pure: no socket, no driver, no keeper.
//!
//! ```text
//! create ─► Drafting ─► Making ─► Filling ─commit─► Keeping ─► Visible ─► (leaving the keeper) ─► gone
//!              │           │         │  ▲               │
//!              └───────────┴─────────┴──┼── abort, writer's death ─► gone
//!                                       └── keeper refuses: the commit may come again
//! ```
//!
//! | stage | means | leaves by |
//! |---|---|---|
//! | `Drafting` | the workshop reads the draft | [`drafted`](Catalogue::drafted) |
//! | `Making` | old epochs leave the keeper (`replace`), then the workshop makes the regions | [`made`](Catalogue::made) |
//! | `Filling` | leased to the writer; no time limit | [`commit`](Catalogue::commit), [`abort`](Catalogue::abort), [`writer_died`](Catalogue::writer_died) |
//! | `Keeping` | regions, then manifest go to the keeper | [`kept`](Catalogue::kept) |
//! | `Visible` | may be opened | [`remove`](Catalogue::remove), retention |
//!
//! Every question of [`ToBroker`](crate::wire::ToBroker) is answered the same however often it comes. A method returns
//! what is to be done as [`Action`]s, in order.
//!
//! `F` stands for a descriptor that keeps memory: dropped, it lets go.
//!
//! Checked by the state-machine test in `catalogue_tests.rs`, with messages lost and repeated.

use std::collections::{BTreeMap, HashMap, VecDeque};

use gpu_api::{BackendKind, DeviceUuid};

use crate::object::identity::{Epoch, Identity};
use crate::object::manifest::Manifest;
use crate::server::bequest::{Tomb, Tombs};
use crate::wire::{LeaseSlot, Refusal, Selector, Standing};

/// Outcomes of commits that are remembered after their object has gone.
const MOST_OUTCOMES: usize = 4_096;
/// Unfinished objects of one participant.
const MOST_UNFINISHED: usize = 64;
/// Names, with those that were removed.
const MOST_NAMES: usize = 65_536;

/// Numbers a participant of this broker.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Participant(pub u64);

/// What a broker allows.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of all objects.
    pub bytes: u64,
    /// Bytes of the objects of one user.
    pub bytes_per_uid: u64,
    /// Epochs of a name that are kept.
    pub epochs: usize,
    /// Reads the slots before it publishes; without, the negative control of the tests.
    pub reads_slots: bool,
}

impl Default for Limits {
    /// No limit of bytes; two epochs of each name.
    fn default() -> Limits {
        Limits { bytes: u64::MAX, bytes_per_uid: u64::MAX, epochs: 2, reads_slots: true }
    }
}

/// The client that asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asker {
    /// The participant.
    pub participant: Participant,
    /// Its user, as the kernel says.
    pub uid: u32,
    /// Its death proves nothing.
    pub shared_context: bool,
}

/// A device that regions are made on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Device {
    /// The vendor.
    pub backend: BackendKind,
    /// The device.
    pub uuid: DeviceUuid,
}

/// What an answer says; the descriptors that come with it are beside it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer<F> {
    /// The regions are leased.
    Created { granularity: u64, leases: Vec<LeaseSlot>, regions: Vec<F> },
    /// The object is visible.
    Committed(Epoch),
    /// What became of a commit.
    Outcome(Standing),
    /// It is so.
    Noted,
    /// Manifest and regions.
    Opened { identity: Identity, epoch: Epoch, manifest: F, regions: Vec<F> },
    /// There is a newer epoch.
    Newer { identity: Identity, epoch: Epoch },
    /// The name or epoch is gone; the last epoch of the name.
    Removed(Epoch),
    /// No.
    Declined(Refusal, String),
}

/// What is to be done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action<F> {
    /// Answer a question of a participant.
    Answer(Participant, u64, Answer<F>),
    /// Make regions of these bytes, then call [`Catalogue::made`].
    Make { identity: Identity, device: Device, bytes: Vec<u64> },
    /// Give regions and manifest to the keeper, then call [`Catalogue::kept`].
    Keep { identity: Identity, seq: u64, manifest: Box<Manifest>, regions: Vec<F> },
    /// Take objects out of the keeper, after the tombs have gone there; then call [`Catalogue::forgotten`].
    Forget { token: u64, objects: Vec<(u64, usize)>, tombs: Option<Tombs> },
    /// The write leases have ended: their slots can be granted again.
    EndLeases(Participant, Vec<LeaseSlot>),
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Stage<F> {
    Drafting,
    Making,
    Filling { leases: Vec<LeaseSlot> },
    Keeping { epoch: Epoch },
    Visible { manifest: F },
}

#[derive(Clone, Debug)]
struct Object<F> {
    seq: u64,
    stage: Stage<F>,
    writer: Option<Asker>,
    scratch: bool,
    replace: bool,
    expect: Option<Epoch>,
    /// The last question of its writer that is to be answered when the stage is over.
    request: u64,
    /// Known from `Making` on.
    manifest: Option<Box<Manifest>>,
    regions: Vec<F>,
    readers: Vec<Participant>,
}

impl<F> Object<F> {
    fn bytes(&self) -> u64 {
        self.manifest.as_ref().map_or(0, |manifest| manifest.mapped_bytes())
    }
}

#[derive(Clone, Debug)]
struct Name {
    owner: u32,
    last: Epoch,
    /// Every epoch up to this one was removed.
    removed: Epoch,
    visible: BTreeMap<Epoch, Identity>,
}

/// A whole object that was found in a keeper.
#[derive(Clone, Debug)]
pub struct Inherited<F> {
    /// Its number.
    pub seq: u64,
    /// What its manifest says.
    pub manifest: Manifest,
    /// The manifest itself.
    pub file: F,
    /// Its regions, in order.
    pub regions: Vec<F>,
}

/// Why the keeper did not take something.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KeepError {
    /// It said no, or is full.
    Refused(String),
    /// It is not there; a new one is being fed.
    Absent,
}

/// A row of the listing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Its epoch; 0 if it has none yet.
    pub epoch: Epoch,
    /// Which object.
    pub identity: Identity,
    /// Bytes of memory.
    pub bytes: u64,
    /// The user that owns it.
    pub owner: u32,
    /// `making`, `filling`, `keeping`, `visible` or `scratch`.
    pub state: &'static str,
    /// Its writer, while it is unfinished.
    pub writer: Option<Participant>,
    /// Its readers.
    pub readers: Vec<Participant>,
}

/// The objects of a broker.
#[derive(Debug)]
pub struct Catalogue<F> {
    limits: Limits,
    names: BTreeMap<String, Name>,
    objects: HashMap<Identity, Object<F>>,
    outcomes: VecDeque<(Identity, Epoch)>,
    watches: BTreeMap<(Participant, String), (Asker, u64, Epoch)>,
    /// Removals and replacements that wait for the keeper: the client to answer, or the object to continue.
    leaving: HashMap<u64, Leaving>,
    next_seq: u64,
    next_token: u64,
}

#[derive(Clone, Debug)]
enum Leaving {
    Retired,
    Asked(Participant, u64, String, Epoch),
    Replaced(Identity),
}

impl<F: Clone> Catalogue<F> {
    /// Makes an empty one.
    pub fn new(limits: Limits) -> Catalogue<F> {
        Catalogue {
            limits,
            names: BTreeMap::new(),
            objects: HashMap::new(),
            outcomes: VecDeque::new(),
            watches: BTreeMap::new(),
            leaving: HashMap::new(),
            next_seq: 1,
            next_token: 1,
        }
    }

    /// Takes what a keeper kept, and returns what is to be taken out of it: objects whose removal or retirement was
    /// under way.
    pub fn restore(&mut self, tombs: &Tombs, objects: Vec<Inherited<F>>, next_seq: u64) -> Vec<Action<F>> {
        self.next_seq = self.next_seq.max(next_seq);
        for tomb in &tombs.0 {
            let name = Name { owner: tomb.owner, last: tomb.last, removed: tomb.removed, visible: BTreeMap::new() };
            self.names.insert(tomb.name.clone(), name);
        }
        let mut dropped = Vec::new();
        for Inherited { seq, manifest, file, regions } in objects {
            let (identity, epoch, name) = (manifest.identity, manifest.epoch, manifest.name.clone());
            let row = self.names.entry(name).or_insert(Name {
                owner: manifest.owner,
                last: Epoch(0),
                removed: Epoch(0),
                visible: BTreeMap::new(),
            });
            self.next_seq = self.next_seq.max(seq + 1);
            if epoch <= row.removed || self.objects.contains_key(&identity) {
                dropped.push((seq, regions.len()));
                continue;
            }
            row.last = row.last.max(epoch);
            row.visible.insert(epoch, identity);
            let object = Object {
                seq,
                stage: Stage::Visible { manifest: file },
                writer: None,
                scratch: false,
                replace: false,
                expect: None,
                request: 0,
                manifest: Some(Box::new(manifest)),
                regions,
                readers: Vec::new(),
            };
            self.objects.insert(identity, object);
        }
        let mut actions = Vec::new();
        if !dropped.is_empty() {
            actions.push(Action::Forget { token: self.token(Leaving::Retired), objects: dropped, tombs: None });
        }
        let names: Vec<String> = self.names.keys().cloned().collect();
        names.iter().for_each(|name| self.retire(name, &mut actions));
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
        scratch: bool,
        replace: bool,
        expect: Option<Epoch>,
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
                    regions: object.regions.clone(),
                }),
                Stage::Keeping { .. } | Stage::Visible { .. } => {
                    Some(declined(Refusal::Exists, "the object was committed already"))
                }
            });
        }
        if self.outcome_of(identity).is_some() {
            return Err(Some(declined(Refusal::Exists, "the object was committed already")));
        }
        if asker.shared_context {
            let why = "the participant is a client of MPS, so its death would not prove that its writes have ended";
            return Err(Some(declined(Refusal::SharedContext, why)));
        }
        let unfinished =
            |object: &&Object<F>| object.writer.is_some_and(|writer| writer.participant == asker.participant);
        if self.objects.values().filter(unfinished).count() >= MOST_UNFINISHED {
            let why = format!("the participant has {MOST_UNFINISHED} unfinished objects already");
            return Err(Some(Answer::Declined(Refusal::Limit, why)));
        }
        let object = Object {
            seq: self.next_seq,
            stage: Stage::Drafting,
            writer: Some(asker),
            scratch,
            replace,
            expect,
            request,
            manifest: None,
            regions: Vec::new(),
            readers: Vec::new(),
        };
        self.next_seq += 1;
        self.objects.insert(identity, object);
        Ok(())
    }

    /// Takes the draft that the workshop has read and checked, with the granularity of its device.
    pub fn drafted(&mut self, identity: Identity, draft: Result<(Manifest, u64), (Refusal, String)>) -> Vec<Action<F>> {
        // Aborted meanwhile.
        let Some(object) = self.objects.get(&identity) else { return Vec::new() };
        let (Stage::Drafting, Some(writer)) = (&object.stage, object.writer) else { return Vec::new() };
        let admitted = draft.and_then(|(draft, granularity)| self.admit(identity, writer, draft, granularity));
        let manifest = match admitted {
            Ok(admitted) => admitted,
            Err((refusal, why)) => return self.fail(identity, refusal, why),
        };
        let name = manifest.name.clone();
        let Some(object) = self.objects.get_mut(&identity) else { return Vec::new() };
        let make = make(identity, &manifest);
        let replace = object.replace;
        object.manifest = Some(Box::new(manifest));
        object.stage = Stage::Making;
        if replace && let Some(action) = self.give_up_epochs(&name, Leaving::Replaced(identity)) {
            return vec![action];
        }
        vec![make]
    }

    fn admit(
        &self,
        identity: Identity,
        writer: Asker,
        draft: Manifest,
        granularity: u64,
    ) -> Result<Manifest, (Refusal, String)> {
        let object = &self.objects[&identity];
        if draft.identity != identity || draft.epoch != Epoch(0) || draft.granularity != 0 || draft.owner != 0 {
            return Err((Refusal::Layout, "the draft is of another identity, or no draft".into()));
        }
        if !object.scratch {
            match self.names.get(&draft.name) {
                Some(name) if name.owner != writer.uid => {
                    let why = format!("{} belongs to uid {}, not {}", draft.name, name.owner, writer.uid);
                    return Err((Refusal::User, why));
                }
                None if self.names.len() >= MOST_NAMES => {
                    return Err((Refusal::Limit, format!("the broker has {MOST_NAMES} names already")));
                }
                _ => {}
            }
            self.expected(&draft.name, object.expect)?;
        }
        let manifest = Manifest { owner: writer.uid, granularity, ..draft };
        let asked = manifest.mapped_bytes();
        let given_up = |object: &&Object<F>| {
            // What `replace` gives up is gone before the regions are made.
            !(self.objects[&identity].replace
                && matches!(object.stage, Stage::Visible { .. })
                && object.manifest.as_ref().is_some_and(|other| other.name == manifest.name))
        };
        let (mut all, mut own) = (0u64, 0u64);
        for other in self.objects.values().filter(given_up) {
            all = all.saturating_add(other.bytes());
            if other.manifest.as_ref().is_some_and(|other| other.owner == writer.uid) {
                own = own.saturating_add(other.bytes());
            }
        }
        let limits = &self.limits;
        if all.saturating_add(asked) > limits.bytes {
            let why = format!("asked for {asked} bytes, {all} of the broker's limit of {} are taken", limits.bytes);
            return Err((Refusal::Limit, why));
        }
        if own.saturating_add(asked) > limits.bytes_per_uid {
            let limit = limits.bytes_per_uid;
            return Err((
                Refusal::Limit,
                format!("asked for {asked} bytes, {own} of uid {}'s limit of {limit} are taken", writer.uid),
            ));
        }
        Ok(manifest)
    }

    fn expected(&self, name: &str, expect: Option<Epoch>) -> Result<(), (Refusal, String)> {
        let is =
            self.names.get(name).and_then(|name| name.visible.last_key_value()).map_or(Epoch(0), |(epoch, _)| *epoch);
        match expect {
            Some(expected) if expected != is => {
                Err((Refusal::Conflict, format!("{name} is at epoch {is}, not at {expected} as was expected")))
            }
            _ => Ok(()),
        }
    }

    /// Takes the regions that the workshop made, or why it could not. `grant` grants a slot for each.
    pub fn made(
        &mut self,
        identity: Identity,
        made: Result<Vec<F>, (Refusal, String)>,
        grant: impl FnOnce(Participant, usize) -> Option<Vec<LeaseSlot>>,
    ) -> Vec<Action<F>> {
        let Some(object) = self.objects.get_mut(&identity) else { return Vec::new() };
        let (Stage::Making, Some(writer)) = (&object.stage, object.writer) else { return Vec::new() };
        let regions = match made {
            Ok(regions) => regions,
            Err((refusal, why)) => return self.fail(identity, refusal, why),
        };
        let Some(leases) = grant(writer.participant, regions.len()) else {
            return self.fail(identity, Refusal::Limit, "the participant has no free slot for a write lease".into());
        };
        object.regions = regions.clone();
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
        if object.writer.is_none_or(|writer| writer.participant != asker.participant) {
            return answer(declined(Refusal::NotWriter, "another participant writes this object"));
        }
        object.request = request;
        let leases = match &object.stage {
            Stage::Filling { leases } => leases,
            Stage::Keeping { .. } => return Vec::new(),
            _ => return answer(declined(Refusal::Protocol, "the object has no regions yet")),
        };
        if object.scratch {
            return answer(declined(Refusal::Protocol, "a scratch object is never committed"));
        }
        // One at a time for a name, so that epochs are given in the order in which they become visible.
        if busy || (self.limits.reads_slots && !released(leases)) {
            return Vec::new();
        }
        let Some(mut manifest) = object.manifest.clone() else { return Vec::new() };
        let (seq, regions, expect) = (object.seq, object.regions.clone(), object.expect);
        // Somebody may have become the name's owner, or have committed, since the create.
        let name = self.names.get(&manifest.name);
        let refused = match name {
            Some(name) if name.owner != asker.uid => {
                Err((Refusal::User, format!("{} belongs to uid {}, not {}", manifest.name, name.owner, asker.uid)))
            }
            _ => self.expected(&manifest.name, expect),
        };
        if let Err((refusal, why)) = refused {
            return self.fail(identity, refusal, why);
        }
        let epoch = name.map_or(Epoch(0), |name| name.last).next();
        manifest.epoch = epoch;
        if let Some(object) = self.objects.get_mut(&identity) {
            let Stage::Filling { leases } = std::mem::replace(&mut object.stage, Stage::Keeping { epoch }) else {
                unreachable!("looked at above");
            };
            let ended = Action::EndLeases(asker.participant, leases);
            return vec![ended, Action::Keep { identity, seq, manifest, regions }];
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
                // The commit comes again, and finds no lease that is still held.
                object.stage = Stage::Filling { leases: Vec::new() };
                return Vec::new();
            }
            Err(KeepError::Refused(why)) => {
                object.stage = Stage::Filling { leases: Vec::new() };
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
        let (name, owner) = object.manifest.as_ref().map_or((String::new(), 0), |m| (m.name.clone(), m.owner));
        object.stage = Stage::Visible { manifest: file };
        let none = Name { owner, last: Epoch(0), removed: Epoch(0), visible: BTreeMap::new() };
        let row = self.names.entry(name.clone()).or_insert(none);
        row.last = row.last.max(epoch);
        row.visible.insert(epoch, identity);
        self.outcomes.push_back((identity, epoch));
        if self.outcomes.len() > MOST_OUTCOMES {
            self.outcomes.pop_front();
        }
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
            None => self.outcomes.iter().find(|(of, _)| *of == identity).map(|(_, epoch)| *epoch),
        }
    }

    /// Gives up an unfinished object.
    pub fn abort(&mut self, asker: Asker, identity: Identity) -> Vec<Action<F>> {
        match self.objects.get(&identity) {
            // Too late: the commit was asked for.
            Some(object) if matches!(object.stage, Stage::Keeping { .. } | Stage::Visible { .. }) => Vec::new(),
            Some(object) if object.writer.is_some_and(|writer| writer.participant == asker.participant) => {
                let actions = self.ended_leases(asker.participant, object);
                self.objects.remove(&identity);
                actions
            }
            _ => Vec::new(),
        }
    }

    /// Gives up all unfinished objects of a writer that is proven dead, but for those whose commit it asked for.
    pub fn writer_died(&mut self, writer: Participant) {
        self.objects.retain(|_, object| {
            let theirs = object.writer.is_some_and(|of| of.participant == writer);
            !theirs || matches!(object.stage, Stage::Keeping { .. } | Stage::Visible { .. })
        });
    }

    /// Ends the reader's leases and watches of a participant that has hung up.
    pub fn hung_up(&mut self, participant: Participant) {
        self.objects.values_mut().for_each(|object| object.readers.retain(|reader| *reader != participant));
        self.watches.retain(|(of, _), _| *of != participant);
    }

    /// Says whether a participant writes something.
    pub fn writes(&self, participant: Participant) -> bool {
        self.objects.values().any(|object| object.writer.is_some_and(|writer| writer.participant == participant))
    }

    /// Leases an object for reading.
    pub fn open(&mut self, asker: Asker, selector: &Selector) -> Answer<F> {
        let found = match selector {
            Selector::Latest(name) => self.names.get(name).and_then(|name| name.visible.values().next_back()),
            Selector::Epoch(name, epoch) => self.names.get(name).and_then(|name| name.visible.get(epoch)),
            Selector::Identity(identity) => Some(identity),
        };
        let object = found.and_then(|identity| self.objects.get_mut(identity).map(|object| (*identity, object)));
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
        Answer::Opened { identity, epoch: manifest.epoch, manifest: file.clone(), regions: object.regions.clone() }
    }

    fn why_not_found(&self, selector: &Selector) -> String {
        let (Selector::Latest(name) | Selector::Epoch(name, _)) = selector else {
            return "no object of this identity is here; it was removed, or replaced by newer epochs".into();
        };
        match self.names.get(name) {
            None => "it was never committed".into(),
            Some(row) if row.visible.is_empty() => format!("it was removed; its last epoch was {}", row.last),
            Some(row) => {
                let epochs: Vec<String> = row.visible.keys().map(Epoch::to_string).collect();
                format!("the epochs that are kept: {}", epochs.join(", "))
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
        let (&epoch, &identity) = self.names.get(name)?.visible.last_key_value()?;
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
        let Some(row) = self.names.get_mut(name) else {
            return answer(declined(Refusal::NotFound, "it was never committed"));
        };
        if row.owner != asker.uid {
            let why = format!("{name} belongs to uid {}, not {}", row.owner, asker.uid);
            return answer(Answer::Declined(Refusal::User, why));
        }
        let last = row.last;
        let whole = epoch == Epoch(0);
        let under_way =
            |leaving: &&mut Leaving| matches!(leaving, Leaving::Asked(_, _, of, at) if of == name && *at == epoch);
        if let Some(Leaving::Asked(to, of, ..)) = self.leaving.values_mut().find(under_way) {
            (*to, *of) = (asker.participant, request);
            return Vec::new();
        }
        let gone: Vec<Identity> = if whole {
            std::mem::take(&mut row.visible).into_values().collect()
        } else {
            row.visible.remove(&epoch).into_iter().collect()
        };
        if whole {
            row.removed = last;
        }
        if gone.is_empty() {
            return answer(Answer::Removed(last));
        }
        let objects = self.take_out(&gone);
        let token = self.token(Leaving::Asked(asker.participant, request, name.into(), epoch));
        vec![Action::Forget { token, objects, tombs: Some(self.tombs()) }]
    }

    /// Goes on with what waited for the keeper: a removal is answered, a replacement is made.
    pub fn forgotten(&mut self, token: u64, forgotten: Result<(), KeepError>) -> Vec<Action<F>> {
        match self.leaving.remove(&token) {
            Some(Leaving::Asked(participant, request, name, _)) => {
                let last = self.names.get(&name).map_or(Epoch(0), |row| row.last);
                let answer = match forgotten {
                    Ok(()) => Answer::Removed(last),
                    // It is gone here; a keeper that comes later is not given it.
                    Err(KeepError::Absent) => Answer::Removed(last),
                    Err(KeepError::Refused(why)) => Answer::Declined(Refusal::Keeper, why),
                };
                vec![Action::Answer(participant, request, answer)]
            }
            Some(Leaving::Replaced(identity)) => match self.objects.get(&identity) {
                Some(Object { stage: Stage::Making, manifest: Some(manifest), .. }) => vec![make(identity, manifest)],
                _ => Vec::new(),
            },
            Some(Leaving::Retired) | None => Vec::new(),
        }
    }

    fn give_up_epochs(&mut self, name: &str, then: Leaving) -> Option<Action<F>> {
        let row = self.names.get_mut(name)?;
        let gone: Vec<Identity> = std::mem::take(&mut row.visible).into_values().collect();
        row.removed = row.last;
        if gone.is_empty() {
            return None;
        }
        let objects = self.take_out(&gone);
        let token = self.token(then);
        Some(Action::Forget { token, objects, tombs: Some(self.tombs()) })
    }

    /// Keeps the last epochs of a name alone.
    fn retire(&mut self, name: &str, actions: &mut Vec<Action<F>>) {
        let most = self.limits.epochs.max(1);
        let Some(row) = self.names.get_mut(name) else { return };
        let mut gone = Vec::new();
        while row.visible.len() > most {
            gone.extend(row.visible.pop_first().map(|(_, identity)| identity));
        }
        if !gone.is_empty() {
            let objects = self.take_out(&gone);
            actions.push(Action::Forget { token: self.token(Leaving::Retired), objects, tombs: None });
        }
    }

    fn take_out(&mut self, gone: &[Identity]) -> Vec<(u64, usize)> {
        let taken = gone.iter().filter_map(|identity| {
            let object = self.objects.remove(identity)?;
            let epoch = object.manifest.as_ref().map_or(Epoch(0), |manifest| manifest.epoch);
            if !self.outcomes.iter().any(|(of, _)| of == identity) {
                self.outcomes.push_back((*identity, epoch));
            }
            Some((object.seq, object.regions.len()))
        });
        let taken = taken.collect();
        let beyond = self.outcomes.len().saturating_sub(MOST_OUTCOMES);
        self.outcomes.drain(..beyond);
        taken
    }

    fn token(&mut self, leaving: Leaving) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        self.leaving.insert(token, leaving);
        token
    }

    /// Returns what must be known of names besides their visible objects.
    pub fn tombs(&self) -> Tombs {
        let rows = self.names.iter().filter(|(_, row)| {
            row.removed > Epoch(0) || row.visible.last_key_value().is_none_or(|(epoch, _)| *epoch < row.last)
        });
        let tomb = |(name, row): (&String, &Name)| Tomb {
            name: name.clone(),
            owner: row.owner,
            last: row.last,
            removed: row.removed,
        };
        Tombs(rows.map(tomb).collect())
    }

    /// Returns all visible objects, to give them to a keeper.
    pub fn visible(&self) -> Vec<(u64, F, Vec<F>)> {
        let mut all: Vec<_> = self
            .objects
            .values()
            .filter_map(|object| match &object.stage {
                Stage::Visible { manifest } => Some((object.seq, manifest.clone(), object.regions.clone())),
                _ => None,
            })
            .collect();
        all.sort_unstable_by_key(|(seq, ..)| *seq);
        all
    }

    /// Lists all objects that a user may know of.
    pub fn rows(&self, uid: u32) -> Vec<Row> {
        let mut rows: Vec<Row> = self
            .objects
            .iter()
            .filter_map(|(identity, object)| {
                let manifest = object.manifest.as_ref()?;
                let visible = matches!(object.stage, Stage::Visible { .. });
                let may = manifest.owner == uid || (visible && manifest.readers.admit(manifest.owner, uid));
                may.then(|| Row {
                    name: manifest.name.clone(),
                    epoch: manifest.epoch,
                    identity: *identity,
                    bytes: manifest.mapped_bytes(),
                    owner: manifest.owner,
                    state: match &object.stage {
                        Stage::Drafting | Stage::Making => "making",
                        Stage::Filling { .. } if object.scratch => "scratch",
                        Stage::Filling { .. } => "filling",
                        Stage::Keeping { .. } => "keeping",
                        Stage::Visible { .. } => "visible",
                    },
                    writer: object.writer.map(|writer| writer.participant),
                    readers: object.readers.clone(),
                })
            })
            .collect();
        rows.sort_by(|a, b| (&a.name, a.epoch, a.identity).cmp(&(&b.name, b.epoch, b.identity)));
        rows
    }
}

fn make<F>(identity: Identity, manifest: &Manifest) -> Action<F> {
    let device = Device { backend: manifest.backend, uuid: manifest.device };
    Action::Make { identity, device, bytes: manifest.mapped_regions().collect() }
}

fn declined<F>(refusal: Refusal, why: &str) -> Answer<F> {
    Answer::Declined(refusal, why.into())
}

//! An object before its commit: the create, the draft, the regions, the abort.

use super::{Catalogue, declined};
use std::time::{Instant, SystemTime};

use gpu_api::explain;

use crate::object::identity::{Epoch, Identity, check_new_name};
use crate::object::manifest::Manifest;
use crate::server::action::{Action, Answer, Asker, Device, Participant};
use crate::server::leaving::Leaving;
use crate::server::ledger::Asked;
use crate::server::object::{Object, Stage, journal_of};
use crate::server::takeover::{self, Former};
use crate::wire::{LeaseSlot, RefusalCode, Wanted};
use transport::server::Refused;

/// Unfinished objects of one participant.
const MOST_UNFINISHED: usize = 64;

/// A draft that names and limits take.
struct Admitted<F> {
    manifest: Manifest,
    /// For each region what it takes over.
    former: Vec<Former<F>>,
    /// The objects that go to make room.
    victims: Vec<Identity>,
}

impl<F: Clone> Catalogue<F> {
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
        if let Some(object) = self.objects.get(identity) {
            if object.writer != Some(asker) {
                return Err(Some(declined(
                    RefusalCode::Exists,
                    "the identity belongs to another object",
                )));
            }
            return Err(match &object.stage {
                // Two drafts would have one memory, and the end of either would be the other's.
                Stage::Drafting | Stage::Making | Stage::Filling { .. }
                    if object.request != request =>
                {
                    Some(declined(
                        RefusalCode::Exists,
                        "the participant is filling an object of this identity",
                    ))
                }
                Stage::Drafting | Stage::Making => None,
                Stage::Filling { leases } => Some(Answer::Created {
                    granularity: object
                        .manifest
                        .as_ref()
                        .map_or(0, |manifest| manifest.granularity),
                    leases: leases.clone(),
                    regions: leased(object),
                }),
                Stage::Keeping { .. } | Stage::Written | Stage::Visible { .. } => Some(declined(
                    RefusalCode::Exists,
                    "the object was committed already",
                )),
            });
        }
        if asker.shared_context {
            let why = "the participant is a client of MPS, so its death would not prove that its writes have ended";
            return Err(Some(declined(RefusalCode::SharedContext, why)));
        }
        let unfinished = self.objects.written_by(asker.participant);
        if unfinished.count() >= MOST_UNFINISHED {
            let why = format!("the participant has {MOST_UNFINISHED} unfinished objects already");
            return Err(Some(Answer::Declined(RefusalCode::Limit, why)));
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
            since: SystemTime::now(),
            idle_since: Instant::now(),
        };
        self.next_seq += 1;
        self.objects.insert(identity, object);
        Ok(())
    }

    /// Takes the draft that the workshop has read and checked, with what its device is like.
    pub fn drafted(
        &mut self,
        identity: Identity,
        draft: Result<(Manifest, Site), Refused>,
    ) -> Vec<Action<F>> {
        // Aborted meanwhile.
        let Some(object) = self.objects.get(identity) else {
            return Vec::new();
        };
        let (Stage::Drafting, Some(writer)) = (&object.stage, object.writer) else {
            return Vec::new();
        };
        let admitted = draft.and_then(|(draft, site)| self.admit(identity, writer, draft, site));
        let Admitted {
            manifest,
            former,
            victims,
        } = match admitted {
            Ok(admitted) => admitted,
            Err((refusal, why)) => return self.fail(identity, refusal, why),
        };
        let mut former = former;
        // The journal lies behind the regions.
        former.extend(journal_of(&manifest).map(|_| None));
        let numbers = former.iter().map(|former| match former {
            Some((_, number)) => *number,
            None => self.region_number(),
        });
        let numbers = numbers.collect();
        let name = manifest.name.clone();
        let Some(object) = self.objects.describe(identity, manifest, numbers) else {
            return Vec::new();
        };
        object.regions = former
            .into_iter()
            .map(|former| former.map(|(region, _)| region))
            .collect();
        object.stage = Stage::Making;
        let replace = object.wanted.replace;
        let mut gone = self.evict(&victims);
        if replace {
            gone.extend(self.names.take(&name, Epoch(0)));
        }
        if !gone.is_empty() {
            return vec![self.forget(&gone, Leaving::Replaced(identity), true)];
        }
        let object = self.objects.get(identity);
        object
            .and_then(|object| make(identity, object))
            .into_iter()
            .collect()
    }

    /// Checks a draft against names and limits.
    fn admit(
        &self,
        identity: Identity,
        writer: Asker,
        draft: Manifest,
        site: Site,
    ) -> Result<Admitted<F>, Refused> {
        let wanted = self
            .objects
            .get(identity)
            .map(|object| object.wanted)
            .unwrap_or_default();
        let is_replica = draft.home.is_some();
        let is_draft =
            draft.granularity == 0 && draft.owner == 0 && (draft.epoch != Epoch(0)) == is_replica;
        if draft.identity != identity || !is_draft {
            return Err((
                RefusalCode::Layout,
                "the draft is of another identity, or no draft".into(),
            ));
        }
        // A replica that went may be pulled again: it has no other contents.
        if !is_replica && self.outcomes.of(identity).is_some() {
            return Err((
                RefusalCode::Exists,
                "the object was committed already".into(),
            ));
        }
        let Wanted {
            scratch,
            expect,
            taken,
            ..
        } = wanted;
        if is_replica && (scratch || expect.is_some() || taken != 0) {
            return Err((
                RefusalCode::Protocol,
                "a replica is neither scratch nor taken over, and expects no epoch".into(),
            ));
        }
        let is_pool = draft.layout.journal() > 0;
        if is_pool && (is_replica || wanted != Wanted::default()) {
            return Err((
                RefusalCode::Protocol,
                "a pool is no replica and no scratch, replaces and takes over nothing, and expects no epoch".into(),
            ));
        }
        // A replica has the name that it has at its home.
        if !is_replica {
            check_new_name("the name of an object", &draft.name)
                .map_err(|error| (RefusalCode::Layout, explain(&error)))?;
        }
        if !scratch {
            self.names.check_room(&draft.name, self.limits.names)?;
            self.check_name(&draft, writer.uid, wanted)?;
        }
        let manifest = Manifest {
            owner: writer.uid,
            granularity: site.granularity,
            ..draft
        };
        let before = self
            .names
            .latest(&manifest.name)
            .and_then(|(_, identity)| self.objects.get(identity));
        let former = takeover::regions(before, &manifest, wanted)?;
        let numbers = former
            .iter()
            .map(|former| former.as_ref().map(|(_, number)| *number));
        let asked = Asked {
            uid: writer.uid,
            device: manifest.device,
            device_bytes: site.bytes,
            regions: numbers
                .zip(manifest.mapped_regions())
                .chain(journal_of(&manifest).map(|bytes| (None, bytes)))
                .collect(),
            // What `replace` gives up is gone before the regions are made.
            given_up: if wanted.replace {
                self.regions_of(&manifest.name)
            } else {
                Vec::new()
            },
        };
        let victims = self.make_room(&manifest.name, &asked)?;
        Ok(Admitted {
            manifest,
            former,
            victims,
        })
    }

    /// Lists the regions of a name's visible epochs, once for each epoch.
    fn regions_of(&self, name: &str) -> Vec<u64> {
        let objects = self
            .names
            .all_of(name)
            .filter_map(|identity| self.objects.get(identity));
        objects.flat_map(|object| object.numbers.clone()).collect()
    }

    /// Refuses an object whose name does not take it: at the create, and again at the commit.
    pub(super) fn check_name(
        &self,
        manifest: &Manifest,
        uid: u32,
        wanted: Wanted,
    ) -> Result<(), Refused> {
        let Manifest {
            name, home, epoch, ..
        } = manifest;
        self.names.check_owner(name, uid)?;
        self.check_kind(manifest)?;
        self.names.check_home(name, home.as_deref())?;
        if home.is_none() {
            return self.names.check_epoch(name, wanted.expect);
        }
        // What `replace` gives up counts as removed.
        if wanted.replace && *epoch <= self.names.last(name) {
            let why = format!(
                "{name} had epoch {} already, and {epoch} cannot replace it",
                self.names.last(name)
            );
            return Err((RefusalCode::Conflict, why));
        }
        self.names
            .check_replica(name, *epoch, self.limits.epochs.max(1))
    }

    /// Takes the regions that the workshop made, or why it could not. `grant` grants a slot for
    /// each.
    pub fn made(
        &mut self,
        identity: Identity,
        made: Result<Vec<F>, Refused>,
        grant: impl FnOnce(Participant, usize) -> Option<Vec<LeaseSlot>>,
    ) -> Vec<Action<F>> {
        let Some(object) = self.objects.get_mut(identity) else {
            return Vec::new();
        };
        let (Stage::Making, Some(writer)) = (&object.stage, object.writer) else {
            return Vec::new();
        };
        let mut made = match made {
            Ok(made) => made.into_iter(),
            Err((refusal, why)) => return self.fail(identity, refusal, why),
        };
        for region in &mut object.regions {
            *region = region.take().or_else(|| made.next());
        }
        let regions = leased(object);
        let Some(leases) = grant(writer.participant, regions.len()) else {
            return self.fail(
                identity,
                RefusalCode::Limit,
                "the participant has no free slot for a write lease".into(),
            );
        };
        object.stage = Stage::Filling {
            leases: leases.clone(),
        };
        let granularity = object
            .manifest
            .as_ref()
            .map_or(0, |manifest| manifest.granularity);
        let answer = Answer::Created {
            granularity,
            leases,
            regions,
        };
        vec![Action::Answer(writer.participant, object.request, answer)]
    }

    /// Ends an object that never became visible, and tells its writer.
    pub(super) fn fail(
        &mut self,
        identity: Identity,
        refusal: RefusalCode,
        why: String,
    ) -> Vec<Action<F>> {
        let Some(object) = self.objects.remove(identity) else {
            return Vec::new();
        };
        let Some(writer) = object.writer else {
            return Vec::new();
        };
        let mut actions = self.ended_leases(writer.participant, &object);
        actions.push(Action::Answer(
            writer.participant,
            object.request,
            Answer::Declined(refusal, why),
        ));
        actions
    }

    pub(super) fn ended_leases(&self, writer: Participant, object: &Object<F>) -> Vec<Action<F>> {
        match &object.stage {
            Stage::Filling { leases } => vec![Action::EndLeases(writer, leases.clone())],
            _ => Vec::new(),
        }
    }

    /// Gives up the unfinished objects of a name, whoever fills them, for its owner and for the
    /// broker's own user; not those whose commit was asked for.
    pub(super) fn abort_all(&mut self, asker: Asker, request: u64, name: &str) -> Vec<Action<F>> {
        let is_operator = asker.uid == self.operator;
        let is_meant = |object: &Object<F>| {
            object.is_unfinished()
                && object.manifest.as_ref().is_some_and(|manifest| {
                    manifest.name == name && (is_operator || manifest.owner == asker.uid)
                })
        };
        let all: Vec<Identity> = self
            .objects
            .unfinished()
            .filter(|identity| self.objects.get(*identity).is_some_and(is_meant))
            .collect();
        let why = || format!("{name} was given up by uid {}", asker.uid);
        let mut actions: Vec<Action<F>> = all
            .iter()
            .flat_map(|identity| self.fail(*identity, RefusalCode::NotWriter, why()))
            .collect();
        let answer = if all.is_empty() {
            let why = format!(
                "no unfinished object of that name belongs to uid {}",
                asker.uid
            );
            Answer::Declined(RefusalCode::NotFound, why)
        } else {
            Answer::Removed(self.names.last(name))
        };
        actions.push(Action::Answer(asker.participant, request, answer));
        actions
    }

    /// Gives up an unfinished object.
    pub fn abort(&mut self, asker: Asker, identity: Identity) -> Vec<Action<F>> {
        match self.objects.get(identity) {
            // Too late: the commit was asked for.
            Some(object) if !object.is_unfinished() => Vec::new(),
            Some(object) if object.is_written_by(asker.participant) => {
                let actions = self.ended_leases(asker.participant, object);
                self.objects.remove(identity);
                actions
            }
            _ => Vec::new(),
        }
    }
}

/// What a device is like that regions are made on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Site {
    /// What regions are rounded up to.
    pub granularity: u64,
    /// All of its memory.
    pub bytes: u64,
}

/// Returns the regions that a writer fills before the commit: none of a pool, which is filled by its
/// holders.
fn leased<F: Clone>(object: &Object<F>) -> Vec<F> {
    let is_pool = object.manifest.as_deref().and_then(journal_of).is_some();
    if is_pool { Vec::new() } else { object.files() }
}

/// Asks for the regions that were not taken over.
pub(super) fn make<F>(identity: Identity, object: &Object<F>) -> Option<Action<F>> {
    let manifest = object.manifest.as_ref()?;
    let device = Device {
        backend: manifest.backend,
        uuid: manifest.device,
    };
    let missing = manifest
        .mapped_regions()
        .zip(&object.regions)
        .filter(|(_, region)| region.is_none());
    Some(Action::Make {
        identity,
        device,
        bytes: missing.map(|(bytes, _)| bytes).collect(),
        journal: manifest.layout.journal(),
    })
}

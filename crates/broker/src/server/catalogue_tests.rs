//! A broker's catalogue against a model, with a keeper that refuses, messages that come twice or
//! never, writers that die, and a broker that is killed at every point.

use std::collections::{BTreeMap, BTreeSet};

use gpu_api::{BackendKind, DeviceUuid};
use proptest::prelude::*;
use transport::shared::slot::Generation;

use super::action::{Action, Answer, Asker, KeepError, Participant};
use super::bequest::{Bequest, Inherited, Label, Reading, sort};
use super::catalogue::Catalogue;
use super::catalogue::draft::Site;
use super::limits::Limits;
use crate::object::identity::{Epoch, Identity};
use crate::object::layout::Layout;
use crate::object::manifest::{Manifest, Readers};
use crate::object::part::PartSpec;
use crate::wire::{LeaseSlot, RefusalCode, Selector, Standing, UNFINISHED, Wanted};

/// A descriptor: a region by object and number, or a manifest.
#[derive(Clone, PartialEq, Debug)]
enum Fd {
    Region(Identity, usize),
    Manifest(Box<Manifest>),
    Bequest(Bequest),
}

#[derive(Clone, Debug)]
enum Step {
    /// A writer asks for an object of a name; the same draw asks again.
    Create {
        who: u64,
        name: u8,
        draw: u8,
        expect: Option<u64>,
        replace: bool,
        /// Its region is taken over from the name's newest epoch.
        take: bool,
    },
    /// A gateway asks for a replica; its epoch follows from the draw.
    Replicate {
        who: u64,
        draw: u8,
        replace: bool,
    },
    /// A writer ends its leases.
    Release {
        draw: u8,
    },
    Commit {
        who: u64,
        draw: u8,
    },
    Abort {
        who: u64,
        draw: u8,
    },
    Open {
        who: u64,
        name: u8,
    },
    Remove {
        name: u8,
        epoch: u64,
    },
    /// The other threads do the next of what they were told; the keeper takes it, refuses, or is
    /// away.
    Work {
        keeper: u8,
    },
    Die {
        who: u64,
    },
    /// The broker is killed, after so much of its next job with the keeper was done.
    Kill {
        done: u8,
    },
}

fn any_step() -> impl Strategy<Value = Step> {
    let (who, name, draw, replica) = (|| 1u64..4, || 0u8..3, || 0u8..12, || 8u8..12);
    let expect = proptest::option::weighted(0.2, 0u64..4);
    prop_oneof![
        4 => (who(), name(), 0u8..8, expect, any::<(bool, bool)>()).prop_map(|(who, name, draw, expect, both)| {
            let (replace, take) = both;
            Step::Create { who, name, draw, expect, replace: replace && draw == 0, take: take && draw < 4 }
        }),
        2 => (who(), replica(), proptest::bool::weighted(0.1))
            .prop_map(|(who, draw, replace)| Step::Replicate { who, draw, replace }),
        4 => draw().prop_map(|draw| Step::Release { draw }),
        6 => (who(), draw()).prop_map(|(who, draw)| Step::Commit { who, draw }),
        1 => (who(), draw()).prop_map(|(who, draw)| Step::Abort { who, draw }),
        2 => (who(), name()).prop_map(|(who, name)| Step::Open { who, name }),
        1 => (name(), prop_oneof![Just(0u64), 1u64..6]).prop_map(|(name, epoch)| Step::Remove { name, epoch }),
        12 => (0u8..8).prop_map(|keeper| Step::Work { keeper }),
        1 => who().prop_map(|who| Step::Die { who }),
        1 => (0u8..6).prop_map(|done| Step::Kill { done }),
    ]
}

/// The world around a catalogue.
struct World {
    catalogue: Catalogue<Fd>,
    jobs: Vec<Action<Fd>>,
    keeper: BTreeMap<String, Fd>,
    /// Identities by their draw, in this life of the broker.
    draws: BTreeMap<u8, Identity>,
    next_identity: u8,
    next_tombs: u64,
    released: BTreeSet<Identity>,
    leases: BTreeMap<Identity, Vec<LeaseSlot>>,
    /// The memory of each object that was made.
    memory: BTreeMap<Identity, Fd>,
    /// The memory that each object is to take over.
    to_take: BTreeMap<Identity, Fd>,
    /// What was answered as committed, and never removed since: must be there.
    committed: BTreeMap<Identity, (String, Epoch)>,
    /// Identities whose commit was asked for after all leases had ended: only these may ever be
    /// visible.
    may_be_visible: BTreeSet<Identity>,
    highest: BTreeMap<String, Epoch>,
    gone: BTreeSet<Identity>,
}

fn name_of(name: u8) -> String {
    format!("n{name}")
}

/// A device that is never full.
pub(super) const SITE: Site = Site {
    granularity: 64,
    bytes: u64::MAX,
};

/// The broker's own user, who is no participant of the model.
const OPERATOR: u32 = 0;

/// The name that replicas are of, and where they come from.
const REPLICA: &str = "n2";
const HOME: &str = "elsewhere";

fn of_user(uid: u32) -> Asker {
    Asker {
        participant: Participant(9),
        uid,
        shared_context: false,
    }
}

/// A user's process.
pub(super) fn asker(who: u64) -> Asker {
    Asker {
        participant: Participant(who),
        uid: 1,
        shared_context: false,
    }
}

fn limits() -> Limits {
    Limits {
        epochs: 2,
        ..Limits::default()
    }
}

/// An object of one part that is not committed.
pub(super) fn draft(identity: Identity, name: &str) -> Manifest {
    Manifest {
        identity,
        name: name.into(),
        epoch: Epoch(0),
        home: None,
        backend: BackendKind::Host,
        device: DeviceUuid([0; 16]),
        owner: 0,
        readers: Readers::Owner,
        granularity: 0,
        layout: Layout::pack([PartSpec::bytes("p", 9).expect("a part")], b"").expect("a layout"),
    }
}

impl World {
    fn new() -> World {
        World::with(limits())
    }

    fn with(limits: Limits) -> World {
        World {
            catalogue: Catalogue::new(limits, OPERATOR),
            jobs: Vec::new(),
            keeper: BTreeMap::new(),
            draws: BTreeMap::new(),
            next_identity: 1,
            next_tombs: 0,
            released: BTreeSet::new(),
            leases: BTreeMap::new(),
            memory: BTreeMap::new(),
            to_take: BTreeMap::new(),
            committed: BTreeMap::new(),
            may_be_visible: BTreeSet::new(),
            highest: BTreeMap::new(),
            gone: BTreeSet::new(),
        }
    }

    fn act(&mut self, actions: Vec<Action<Fd>>) {
        for action in actions {
            match action {
                Action::Answer(
                    _,
                    request,
                    Answer::Created {
                        leases, regions, ..
                    },
                ) => {
                    let identity = Identity([request as u8; 16]);
                    let [region] = &regions[..] else {
                        panic!("one region each: {regions:?}")
                    };
                    let expected = self
                        .to_take
                        .get(&identity)
                        .cloned()
                        .unwrap_or(Fd::Region(identity, 0));
                    assert_eq!(*region, expected, "its own memory, or what it takes over");
                    self.memory.insert(identity, expected);
                    let known = self.leases.insert(identity, leases.clone());
                    assert!(
                        known.is_none_or(|known| known == leases),
                        "the same answer to the same question"
                    );
                }
                Action::Answer(_, request, Answer::Committed(epoch)) => {
                    let identity = Identity([request as u8; 16]);
                    assert!(
                        self.may_be_visible.contains(&identity),
                        "committed though its leases were held"
                    );
                    let known = self.committed.get(&identity).map(|(_, epoch)| *epoch);
                    assert!(
                        known.is_none_or(|known| known == epoch),
                        "one epoch for ever"
                    );
                }
                Action::Answer(..) | Action::EndLeases(..) => {}
                job => self.jobs.push(job),
            }
        }
        self.look();
    }

    /// Checks what anybody could see at this moment.
    fn look(&mut self) {
        let mut homes = BTreeMap::new();
        for row in self.catalogue.rows(asker(1)) {
            if row.state == "visible" {
                let home = homes
                    .entry(row.name.clone())
                    .or_insert_with(|| row.home.clone());
                assert_eq!(*home, row.home, "one home for each name");
                assert!(
                    self.may_be_visible.contains(&row.identity),
                    "visible though its leases were held"
                );
                let known = self
                    .committed
                    .insert(row.identity, (row.name.clone(), row.epoch));
                let highest = self.highest.entry(row.name).or_default();
                assert!(
                    known.is_some() || row.home.is_some() || row.epoch > *highest,
                    "epochs rise: {} after {highest}",
                    row.epoch
                );
                *highest = (*highest).max(row.epoch);
            }
        }
    }

    /// Does the next job of the other threads; `keeper` 0 refuses, 1 is away, else it takes all.
    fn work(&mut self, keeper: u8) {
        if self.jobs.is_empty() {
            return;
        }
        match self.jobs.remove(0) {
            Action::Make {
                identity, bytes, ..
            } => {
                let made = (0..bytes.len())
                    .map(|region| Fd::Region(identity, region))
                    .collect();
                let slot = u32::from(identity.0[0]);
                let grant = |_, count| {
                    assert_eq!(count, 1);
                    Some(vec![LeaseSlot {
                        slot,
                        generation: Generation::ZERO.next(),
                    }])
                };
                let actions = self.catalogue.made(identity, Ok(made), grant);
                self.act(actions);
            }
            Action::Keep {
                identity,
                seq,
                manifest,
                regions,
            } => {
                let kept = match keeper {
                    0 => Err(KeepError::Refused("full".into())),
                    1 => Err(KeepError::Absent),
                    _ => {
                        self.store(seq, &manifest, &regions, usize::MAX);
                        Ok(Fd::Manifest(manifest))
                    }
                };
                let actions = self.catalogue.kept(identity, kept);
                self.act(actions);
            }
            Action::Forget {
                token,
                objects,
                bequest,
            } => {
                // A removal that the keeper does not take is answered with no, and its objects come
                // back with the next broker: nothing is promised of them.
                let forgotten = if keeper == 0 {
                    Err(KeepError::Refused("no".into()))
                } else {
                    Ok(())
                };
                if forgotten.is_ok() {
                    self.forget(&objects, bequest.as_ref(), usize::MAX);
                }
                let actions = self.catalogue.forgotten(token, forgotten);
                self.act(actions);
            }
            other => panic!("no job: {other:?}"),
        }
    }

    /// Gives an object to the keeper, the first `steps` steps of it.
    fn store(&mut self, seq: u64, manifest: &Manifest, regions: &[Fd], steps: usize) {
        let all = regions
            .iter()
            .enumerate()
            .map(|(i, region)| (Label::Region(seq, i as u8), region.clone()));
        let last = (
            Label::Manifest(seq),
            Fd::Manifest(Box::new(manifest.clone())),
        );
        self.keeper.extend(
            all.chain([last])
                .take(steps)
                .map(|(label, fd)| (label.to_string(), fd)),
        );
    }

    fn forget(&mut self, objects: &[(u64, usize)], bequest: Option<&Bequest>, steps: usize) {
        let mut left = steps;
        let mut step = || {
            left = left.saturating_sub(1);
            left > 0 || steps == usize::MAX
        };
        if let Some(bequest) = bequest {
            self.next_tombs += 1;
            for label in [
                Label::History(self.next_tombs),
                Label::Tombs(self.next_tombs),
            ] {
                if !step() {
                    return;
                }
                self.keeper
                    .insert(label.to_string(), Fd::Bequest(bequest.clone()));
            }
        }
        for &(seq, regions) in objects {
            let labels = std::iter::once(Label::Manifest(seq))
                .chain((0..regions as u8).map(|i| Label::Region(seq, i)));
            for label in labels {
                if !step() {
                    return;
                }
                self.keeper.remove(&label.to_string());
            }
        }
    }

    /// Kills the broker in the middle of its next job, and starts another from what the keeper has.
    fn kill(&mut self, done: u8) {
        let next = self
            .jobs
            .iter()
            .position(|job| matches!(job, Action::Keep { .. } | Action::Forget { .. }));
        match next.map(|at| self.jobs.remove(at)) {
            Some(Action::Keep {
                seq,
                manifest,
                regions,
                ..
            }) => self.store(seq, &manifest, &regions, usize::from(done)),
            Some(Action::Forget {
                objects, bequest, ..
            }) => self.forget(&objects, bequest.as_ref(), usize::from(done) + 1),
            _ => {}
        }
        self.jobs.clear();
        let (draws, leases) = (
            std::mem::take(&mut self.draws),
            std::mem::take(&mut self.leases),
        );
        drop((draws, leases));
        let store: Vec<(String, Fd)> = self
            .keeper
            .iter()
            .map(|(name, fd)| (name.clone(), fd.clone()))
            .collect();
        let found = sort(store, |label, fd| match (label, fd) {
            (_, Fd::Manifest(manifest)) => Reading::Manifest(manifest.layout.regions().len()),
            (Label::Tombs(_), Fd::Bequest(bequest)) => Reading::Tombs(bequest.tombs.clone()),
            (_, Fd::Bequest(bequest)) => Reading::History(bequest.history),
            _ => Reading::Broken,
        });
        found
            .rest
            .iter()
            .for_each(|name| drop(self.keeper.remove(name)));
        let bequest = Bequest {
            tombs: found.tombs.map(|(_, tombs)| tombs).unwrap_or_default(),
            history: found
                .history
                .map(|(_, history)| history)
                .unwrap_or_default(),
        };
        let objects: Vec<_> = found
            .whole
            .into_iter()
            .map(|(seq, fd, regions)| match fd {
                Fd::Manifest(manifest) => Inherited {
                    seq,
                    manifest: *manifest.clone(),
                    file: Fd::Manifest(manifest),
                    regions,
                    since: std::time::UNIX_EPOCH,
                },
                other => panic!("{other:?}"),
            })
            .collect();
        for Inherited {
            manifest, regions, ..
        } in &objects
        {
            assert_eq!(
                regions,
                std::slice::from_ref(&self.memory[&manifest.identity]),
                "its own memory"
            );
        }
        self.catalogue = Catalogue::new(limits(), OPERATOR);
        let actions = self.catalogue.restore(&bequest, objects, found.next_seq);
        self.act_restored(actions);
    }

    fn act_restored(&mut self, actions: Vec<Action<Fd>>) {
        self.jobs.extend(actions);
        // What a removal took that was never answered may be there again, and so may what the
        // keeper refused to give up.
        for row in self.catalogue.rows(asker(1)) {
            assert!(
                self.may_be_visible.contains(&row.identity),
                "restored though its leases were held"
            );
            self.gone.remove(&row.identity);
            let highest = self.highest.entry(row.name.clone()).or_default();
            *highest = (*highest).max(row.epoch);
            self.committed.insert(row.identity, (row.name, row.epoch));
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Create {
                who,
                name,
                draw,
                expect,
                replace,
                take,
            } => {
                let fresh = self.next_identity;
                let identity = *self
                    .draws
                    .entry(draw)
                    .or_insert_with(|| Identity([fresh; 16]));
                if identity == Identity([fresh; 16]) {
                    self.next_identity = self.next_identity.checked_add(1).unwrap_or(1);
                }
                let request = u64::from(identity.0[0]);
                let wanted = Wanted {
                    replace,
                    expect: expect.map(Epoch),
                    taken: u16::from(take),
                    scratch: false,
                };
                match self.catalogue.create(asker(who), request, identity, wanted) {
                    Ok(()) => {
                        self.to_take.remove(&identity);
                        let newest = self.newest(&name_of(name)).filter(|_| take);
                        self.to_take
                            .extend(newest.map(|newest| (identity, self.memory[&newest].clone())));
                        let actions = self
                            .catalogue
                            .drafted(identity, Ok((draft(identity, &name_of(name)), SITE)));
                        self.act(actions);
                    }
                    Err(Some(answer)) => {
                        self.act(vec![Action::Answer(Participant(who), request, answer)])
                    }
                    Err(None) => {}
                }
            }
            Step::Replicate { who, draw, replace } => {
                let fresh = self.next_identity;
                let identity = *self
                    .draws
                    .entry(draw)
                    .or_insert_with(|| Identity([fresh; 16]));
                if identity == Identity([fresh; 16]) {
                    self.next_identity = self.next_identity.checked_add(1).unwrap_or(1);
                }
                let request = u64::from(identity.0[0]);
                let there = self.visible().contains(&identity);
                let wanted = Wanted {
                    replace,
                    ..Wanted::default()
                };
                match self.catalogue.create(asker(who), request, identity, wanted) {
                    Ok(()) => {
                        assert!(!there, "a second copy of an identity");
                        let epoch = Epoch(u64::from(draw) - 7);
                        let draft = Manifest {
                            epoch,
                            home: Some(HOME.into()),
                            ..draft(identity, REPLICA)
                        };
                        let actions = self.catalogue.drafted(identity, Ok((draft, SITE)));
                        self.act(actions);
                    }
                    Err(Some(answer)) => {
                        self.act(vec![Action::Answer(Participant(who), request, answer)])
                    }
                    Err(None) => {}
                }
            }
            Step::Release { draw } => {
                if let Some(identity) = self
                    .draws
                    .get(&draw)
                    .filter(|identity| self.leases.contains_key(identity))
                {
                    self.released.insert(*identity);
                }
            }
            Step::Commit { who, draw } => {
                let Some(&identity) = self.draws.get(&draw) else {
                    return;
                };
                let ended = self.released.contains(&identity);
                let request = u64::from(identity.0[0]);
                let actions = self
                    .catalogue
                    .commit(asker(who), request, identity, |_| ended);
                if ended {
                    self.may_be_visible.insert(identity);
                }
                self.act(actions);
            }
            Step::Abort { who, draw } => {
                let Some(&identity) = self.draws.get(&draw) else {
                    return;
                };
                let actions = self.catalogue.abort(asker(who), identity);
                self.act(actions);
            }
            Step::Open { who, name } => {
                if let Answer::Opened {
                    identity,
                    epoch,
                    manifest,
                    regions,
                } = self
                    .catalogue
                    .open(asker(who), &Selector::Latest(name_of(name)))
                {
                    let Fd::Manifest(manifest) = manifest else {
                        panic!("a manifest")
                    };
                    assert_eq!((manifest.identity, manifest.epoch), (identity, epoch));
                    assert_eq!(
                        regions,
                        [self.memory[&identity].clone()],
                        "whole, and of one object"
                    );
                    assert_eq!(self.catalogue.outcome(identity), Standing::Committed(epoch));
                }
            }
            Step::Remove { name, epoch } => {
                let actions = self
                    .catalogue
                    .remove(asker(1), 0, &name_of(name), Epoch(epoch));
                self.act(actions);
            }
            Step::Work { keeper } => self.work(keeper),
            Step::Die { who } => {
                self.catalogue.hung_up(Participant(who));
                self.catalogue.writer_died(Participant(who));
                let rows = self.catalogue.rows(asker(1));
                assert!(rows.iter().all(|row| row.writer != Some(Participant(who))));
            }
            Step::Kill { done } => {
                let before: BTreeSet<Identity> = self.visible();
                self.kill(done);
                // Nothing that was visible and not being removed is lost.
                let lost: Vec<_> = before.difference(&self.visible()).copied().collect();
                assert!(lost.is_empty(), "lost with the broker: {lost:?}");
            }
        }
    }

    fn newest(&self, name: &str) -> Option<Identity> {
        let rows = self
            .catalogue
            .rows(asker(1))
            .into_iter()
            .filter(|row| row.state == "visible" && row.name == name);
        rows.max_by_key(|row| row.epoch).map(|row| row.identity)
    }

    fn visible(&self) -> BTreeSet<Identity> {
        let rows = self.catalogue.rows(asker(1)).into_iter();
        rows.filter(|row| row.state == "visible")
            .map(|row| row.identity)
            .collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn whatever_happens_readers_see_whole_objects_and_epochs_rise(
        steps in proptest::collection::vec(any_step(), 1..80),
    ) {
        let mut world = World::new();
        for step in &steps {
            world.step(step);
            for row in world.catalogue.rows(asker(1)) {
                prop_assert!(
                    row.writer.is_some() || matches!(row.state, "keeping" | "visible"),
                    "nothing ends it: {row:?}"
                );
            }
        }
        // In the end all work is done by a good keeper, and what is visible is what the keeper has.
        for _ in 0..200 {
            world.work(7);
        }
        let before = world.visible();
        world.kill(0);
        for _ in 0..200 {
            world.work(7);
        }
        prop_assert!(before.is_subset(&world.visible()) || before == world.visible());
    }
}

/// The first writer asks for an object.
fn create(draw: u8) -> Step {
    Step::Create {
        who: 1,
        name: 0,
        draw,
        expect: None,
        replace: false,
        take: false,
    }
}

/// It asks for an object, fills it and asks for the commit.
fn asked_for(world: &mut World, draw: u8) {
    world.step(&create(draw));
    world.work(7);
    world.step(&Step::Release { draw });
    world.step(&Step::Commit { who: 1, draw });
}

/// The negative control: the model finds a broker that publishes without reading the slots.
#[test]
#[should_panic(expected = "though its leases were held")]
fn the_control_a_broker_that_reads_no_slots_is_found() {
    let mut world = World::with(Limits {
        reads_slots: false,
        ..limits()
    });
    world.step(&create(0));
    world.work(7);
    world.step(&Step::Commit { who: 1, draw: 0 });
    world.work(7);
}

#[test]
fn what_the_keeper_does_not_take_goes_with_its_dead_writer() {
    for keeper in [0, 1] {
        let mut world = World::new();
        asked_for(&mut world, 0);
        world.step(&Step::Die { who: 1 });
        assert_eq!(world.catalogue.rows(asker(1)).len(), 1, "it is on its way");
        world.work(keeper);
        assert_eq!(world.catalogue.rows(asker(1)), []);
        assert_eq!(world.catalogue.bytes(asker(1)), 0);
        committed(&mut world, 1, false, false);
        assert_eq!(world.visible().len(), 1, "the name is free");
    }
}

#[test]
fn a_create_that_comes_again_after_a_refused_commit_is_declined() {
    let mut world = World::new();
    let create = create(0);
    world.step(&create);
    world.work(7);
    world.step(&Step::Release { draw: 0 });
    world.step(&Step::Commit { who: 1, draw: 0 });
    world.work(0);
    let identity = world.draws[&0];
    assert_eq!(
        world.catalogue.outcome(identity),
        Standing::Unfinished,
        "the keeper refused"
    );
    let answer = world
        .catalogue
        .create(asker(1), 1, identity, Wanted::default())
        .expect_err("it is there");
    assert!(
        matches!(answer, Some(Answer::Declined(RefusalCode::Exists, _))),
        "no leases are left to hand out: {answer:?}"
    );
    world.step(&Step::Commit { who: 1, draw: 0 });
    world.work(7);
    assert_eq!(
        world.catalogue.outcome(identity),
        Standing::Committed(Epoch(1))
    );
}

/// Commits an object, whose memory is its own or taken over.
fn committed(world: &mut World, draw: u8, replace: bool, take: bool) {
    world.step(&Step::Create {
        who: 1,
        name: 0,
        draw,
        expect: None,
        replace,
        take,
    });
    world.work(7);
    world.work(7);
    world.step(&Step::Release { draw });
    world.step(&Step::Commit { who: 1, draw });
    world.work(7);
}

#[test]
fn memory_that_epochs_share_counts_once_and_outlasts_the_epoch_it_came_from() {
    let one = draft(Identity([0; 16]), "n0").layout.bytes();
    let mut world = World::with(Limits {
        bytes: one,
        ..limits()
    });
    committed(&mut world, 0, false, false);
    committed(&mut world, 1, false, true);
    assert_eq!(
        (world.visible().len(), world.catalogue.bytes(asker(1))),
        (2, one)
    );
    world.step(&Step::Remove { name: 0, epoch: 1 });
    world.work(7);
    assert_eq!(
        (world.visible().len(), world.catalogue.bytes(asker(1))),
        (1, one),
        "the second epoch has it"
    );
    committed(&mut world, 2, true, true);
    assert_eq!(
        (world.visible().len(), world.catalogue.bytes(asker(1))),
        (1, one),
        "also when the old epochs go first"
    );
    world.step(&Step::Open { who: 2, name: 0 });
    world.step(&create(3));
    assert!(
        !world
            .catalogue
            .rows(asker(1))
            .iter()
            .any(|row| row.state != "visible"),
        "no room for memory of its own"
    );
}

#[test]
fn names_belong_to_the_user_who_committed_them_first() {
    let mut world = World::new();
    let identity = Identity([1; 16]);
    asked_for(&mut world, 0);
    world.work(7);
    assert_eq!(
        world.catalogue.outcome(identity),
        Standing::Committed(Epoch(1))
    );
    let other = Asker {
        participant: Participant(9),
        uid: 2,
        shared_context: false,
    };
    let answer = world.catalogue.open(other, &Selector::Latest("n0".into()));
    assert!(
        matches!(answer, Answer::Declined(RefusalCode::User, _)),
        "{answer:?}"
    );
    let answer = world.catalogue.open(other, &Selector::Identity(identity));
    assert!(
        matches!(answer, Answer::Declined(RefusalCode::User, _)),
        "{answer:?}"
    );
    for epoch in [Epoch(0), Epoch(1)] {
        let actions = world.catalogue.remove(other, 5, "n0", epoch);
        assert!(
            matches!(&actions[..], [Action::Answer(_, 5, Answer::Declined(..))]),
            "{actions:?}"
        );
    }
    world.step(&Step::Remove { name: 0, epoch: 0 });
    world.work(7);
    let second = Identity([2; 16]);
    world
        .catalogue
        .create(other, 6, second, Wanted::default())
        .expect("an identity of its own");
    let actions = world
        .catalogue
        .drafted(second, Ok((draft(second, "n0"), SITE)));
    assert!(
        matches!(
            &actions[..],
            [Action::Answer(_, 6, Answer::Declined(RefusalCode::User, _))]
        ),
        "{actions:?}"
    );
    assert!(world.catalogue.watch(other, 7, "n0", Epoch(0)).is_empty());
    assert!(world.catalogue.rows(of_user(2)).is_empty());
}

/// Does the jobs that are left with a keeper that takes all, and returns the answers.
fn finished(world: &mut World, mut actions: Vec<Action<Fd>>) -> Vec<Answer<Fd>> {
    let mut answers = Vec::new();
    while let Some(action) = actions.pop() {
        match action {
            Action::Answer(_, _, answer) => answers.push(answer),
            Action::Forget {
                token,
                objects,
                bequest,
            } => {
                world.forget(&objects, bequest.as_ref(), usize::MAX);
                actions.extend(world.catalogue.forgotten(token, Ok(())));
            }
            other => panic!("no job: {other:?}"),
        }
    }
    answers
}

#[test]
fn the_brokers_own_user_sees_all_removes_all_and_frees_the_name() {
    let mut world = World::new();
    committed(&mut world, 0, false, false);
    let bytes = world.catalogue.bytes(asker(1));
    assert!(bytes > 0);
    assert_eq!(
        (
            world.catalogue.rows(of_user(OPERATOR)).len(),
            world.catalogue.bytes(of_user(OPERATOR)),
            world.catalogue.rows(of_user(2)).len()
        ),
        (1, bytes, 0)
    );
    let users = world.catalogue.users(OPERATOR);
    assert_eq!(users, world.catalogue.users(1), "one user has all of it");
    assert_eq!(
        (users[0].uid, users[0].objects, users[0].bytes),
        (1, 1, bytes)
    );
    let operator = Asker {
        participant: Participant(9),
        uid: OPERATOR,
        shared_context: false,
    };
    let answer = world
        .catalogue
        .open(operator, &Selector::Latest("n0".into()));
    assert!(
        matches!(answer, Answer::Declined(RefusalCode::User, _)),
        "it opens nothing that is not open to it: {answer:?}"
    );
    let actions = world.catalogue.remove(operator, 5, "n0", Epoch(0));
    let answers = finished(&mut world, actions);
    assert_eq!(answers, [Answer::Removed(Epoch(1))]);
    // A broker that starts from what the keeper has knows that the name is free.
    world.kill(0);
    let other = Asker {
        participant: Participant(8),
        uid: 2,
        shared_context: false,
    };
    let identity = Identity([77; 16]);
    world
        .catalogue
        .create(other, 6, identity, Wanted::default())
        .expect("an identity of its own");
    let actions = world
        .catalogue
        .drafted(identity, Ok((draft(identity, "n0"), SITE)));
    assert!(
        matches!(&actions[..], [Action::Make { .. }]),
        "any user may take it: {actions:?}"
    );
    let slot = |_, _| Some(Vec::new());
    world
        .catalogue
        .made(identity, Ok(vec![Fd::Region(identity, 0)]), slot);
    let actions = world.catalogue.commit(other, 7, identity, |_| true);
    let keep = actions.into_iter().find_map(|action| match action {
        Action::Keep { manifest, .. } => Some(manifest),
        _ => None,
    });
    assert_eq!(
        keep.expect("a commit").epoch,
        Epoch(2),
        "its epochs go on above those that were"
    );
}

#[test]
fn a_removal_that_frees_a_name_is_answered_however_often_it_is_asked_for() {
    let mut world = World::new();
    committed(&mut world, 0, false, false);
    let operator = Asker {
        participant: Participant(9),
        uid: OPERATOR,
        shared_context: false,
    };
    let mut actions = world.catalogue.remove(operator, 5, "n0", Epoch(0));
    for step in ["the objects go", "the name goes"] {
        let [Action::Forget { token, .. }] = actions[..] else {
            panic!("{step}: {actions:?}");
        };
        let again = world.catalogue.remove(operator, 6, "n0", Epoch(0));
        assert_eq!(again, [], "{step}: it is on its way");
        actions = world.catalogue.forgotten(token, Ok(()));
    }
    let removed = Action::Answer(Participant(9), 6, Answer::Removed(Epoch(1)));
    assert_eq!(actions, [removed]);
}

#[test]
fn a_watch_is_taken_back_and_bounded() {
    let mut world = World::with(Limits {
        watches: 2,
        ..limits()
    });
    for name in ["a", "b"] {
        assert!(
            world
                .catalogue
                .watch(asker(1), 1, name, Epoch(0))
                .is_empty()
        );
    }
    let actions = world.catalogue.watch(asker(1), 1, "c", Epoch(0));
    assert!(
        matches!(&actions[..], [Action::Answer(_, _, Answer::Declined(RefusalCode::Limit, why))]
            if why == "the participant watches 2 names already"),
        "{actions:?}"
    );
    let actions = world.catalogue.watch(asker(1), 2, "a", Epoch(u64::MAX));
    assert!(matches!(
        &actions[..],
        [Action::Answer(_, 2, Answer::Noted)]
    ));
    assert!(world.catalogue.watch(asker(1), 1, "c", Epoch(0)).is_empty());
}

#[test]
fn what_cannot_fit_the_device_leaves_the_epoch_that_it_was_to_replace() {
    let mut world = World::new();
    committed(&mut world, 0, false, false);
    let identity = Identity([99; 16]);
    let wanted = Wanted {
        replace: true,
        ..Wanted::default()
    };
    world
        .catalogue
        .create(asker(1), 5, identity, wanted)
        .expect("an identity of its own");
    let small = Site { bytes: 64, ..SITE };
    let actions = world
        .catalogue
        .drafted(identity, Ok((draft(identity, "n0"), small)));
    assert!(
        matches!(
            &actions[..],
            [Action::Answer(
                _,
                5,
                Answer::Declined(RefusalCode::OutOfMemory, _)
            )]
        ),
        "{actions:?}"
    );
    assert_eq!(world.visible().len(), 1, "the good epoch is there");
}

#[test]
fn an_unfinished_object_is_given_up_by_its_owner_and_by_the_operator_alone() {
    let mut world = World::new();
    let of = |uid| Asker {
        participant: Participant(9),
        uid,
        shared_context: false,
    };
    for uid in [1, OPERATOR] {
        world.step(&create(u8::try_from(uid).expect("small")));
        world.work(7);
        let unfinished = world.catalogue.bytes(asker(1));
        assert!(unfinished > 0);
        let actions = world.catalogue.remove(of(2), 5, "n0", UNFINISHED);
        assert!(
            matches!(
                &actions[..],
                [Action::Answer(
                    _,
                    5,
                    Answer::Declined(RefusalCode::NotFound, _)
                )]
            ),
            "{actions:?}"
        );
        assert_eq!(world.catalogue.bytes(asker(1)), unfinished);
        let actions = world.catalogue.remove(of(uid), 5, "n0", UNFINISHED);
        assert!(
            matches!(
                actions.last(),
                Some(Action::Answer(_, 5, Answer::Removed(_)))
            ),
            "{actions:?}"
        );
        assert_eq!(world.catalogue.bytes(asker(1)), 0, "its memory is free");
    }
}

/// Commits an object of a name of its own, and returns its identity.
fn committed_as(world: &mut World, name: u8, draw: u8) -> Identity {
    world.step(&Step::Create {
        who: 1,
        name,
        draw,
        expect: None,
        replace: false,
        take: false,
    });
    for _ in 0..3 {
        world.work(7);
    }
    world.step(&Step::Release { draw });
    world.step(&Step::Commit { who: 1, draw });
    world.work(7);
    world.draws[&draw]
}

#[test]
fn what_no_participant_reads_goes_when_a_limit_presses_the_oldest_first() {
    let one = draft(Identity([0; 16]), "n0").layout.bytes();
    let evicting = |pins: &[&str]| {
        World::with(Limits {
            bytes: 2 * one,
            evict: true,
            pins: pins.iter().map(|&pin| pin.to_owned()).collect(),
            ..limits()
        })
    };
    let mut world = evicting(&[]);
    let oldest = committed_as(&mut world, 0, 0);
    let second = committed_as(&mut world, 1, 1);
    let third = committed_as(&mut world, 2, 2);
    assert_eq!(world.visible(), [second, third].into(), "the oldest went");
    assert_eq!(
        (world.catalogue.outcome(oldest), world.catalogue.evicted()),
        (Standing::Committed(Epoch(1)), 1)
    );
    // What is read stays, and so the third one goes.
    world.step(&Step::Open { who: 2, name: 1 });
    let fourth = committed_as(&mut world, 0, 3);
    assert_eq!(world.visible(), [second, fourth].into());
    assert_eq!(
        world.catalogue.outcome(fourth),
        Standing::Committed(Epoch(2)),
        "no epoch is used again"
    );
    // Both that are there are read: nothing goes, and the create is refused.
    world.step(&Step::Open { who: 3, name: 0 });
    world.step(&Step::Create {
        who: 1,
        name: 2,
        draw: 4,
        expect: None,
        replace: false,
        take: false,
    });
    assert!(world.jobs.is_empty(), "{:?}", world.jobs);
    assert_eq!(world.visible(), [second, fourth].into());
    let mut world = evicting(&["n0"]);
    let pinned = committed_as(&mut world, 0, 0);
    committed_as(&mut world, 1, 1);
    let third = committed_as(&mut world, 2, 2);
    assert_eq!(world.visible(), [pinned, third].into());
}

#[test]
fn what_no_participant_has_read_for_its_time_goes() {
    use std::time::{Duration, Instant};
    let hour = Duration::from_secs(3_600);
    let mut world = World::with(Limits {
        ttl: Some(hour),
        pins: vec!["n2".into()],
        ..limits()
    });
    committed_as(&mut world, 0, 0);
    let read = committed_as(&mut world, 1, 1);
    let pinned = committed_as(&mut world, 2, 2);
    world.step(&Step::Open { who: 2, name: 1 });
    assert!(world.catalogue.expire(Instant::now()).is_empty());
    let actions = world.catalogue.expire(Instant::now() + hour);
    assert!(finished(&mut world, actions).is_empty());
    assert_eq!(world.visible(), [read, pinned].into());
    world.step(&Step::Die { who: 2 });
    let actions = world.catalogue.expire(Instant::now() + hour);
    finished(&mut world, actions);
    assert_eq!(world.visible(), [pinned].into());
}

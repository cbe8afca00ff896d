//! The pools of a catalogue against a model: processes that adopt, fork, release and die, messages
//! that come twice, a keeper that refuses, is away or is replaced, a broker that is killed at every
//! point, removals and the time of a free pool.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use gpu_api::BackendKind;
use proptest::prelude::*;
use transport::shared::slot::Generation;

use super::action::{Action, Answer, KeepError, Participant};
use super::bequest::{Bequest, Inherited, Label, Reading, sort};
use super::catalogue::Catalogue;
use super::catalogue_tests::{SITE, asker, draft};
use super::limits::Limits;
use super::listing::Process;
use super::record::{Kept, Phase, Record};
use crate::object::identity::{Epoch, Identity};
use crate::object::manifest::Manifest;
use crate::pool::Previous;
use crate::wire::{LeaseSlot, RefusalCode, Wanted};

const NAME: &str = "kv";
/// Processes at a time.
const SEATS: usize = 3;
/// How long a pool may be free.
const TTL: Duration = Duration::from_secs(3_600);

/// A descriptor.
#[derive(Clone, PartialEq, Debug)]
enum Fd {
    Region(Identity, usize),
    Manifest(Box<Manifest>),
    Record(Record),
    Bequest(Bequest),
    /// Tells of the end of a process.
    Pid(u64),
    /// Tells of the end of a process and of its child.
    Line(u64),
}

#[derive(Clone, Debug)]
enum Step {
    Create {
        seat: usize,
    },
    /// Asks for the pool, or repeats the last question.
    Adopt {
        seat: usize,
        again: bool,
    },
    Release {
        seat: usize,
    },
    Fork {
        seat: usize,
    },
    /// A process dies; another one takes its seat.
    Die {
        seat: usize,
    },
    /// Every child of a dead process dies.
    ChildrenDie,
    /// The other threads do the next of what they were told; the keeper refuses (0), or takes it.
    Work {
        keeper: u8,
    },
    /// The keeper dies, or the next one is given everything.
    Keeper,
    /// The broker is killed, after so much of its next job with the keeper was done.
    Kill {
        done: u8,
    },
    /// So much time goes by, in parts of what a pool may be free.
    Expire {
        parts: u32,
    },
    Remove,
}

fn any_step() -> impl Strategy<Value = Step> {
    let seat = || 0..SEATS;
    prop_oneof![
        2 => seat().prop_map(|seat| Step::Create { seat }),
        8 => (seat(), any::<bool>()).prop_map(|(seat, again)| Step::Adopt { seat, again }),
        4 => seat().prop_map(|seat| Step::Release { seat }),
        2 => seat().prop_map(|seat| Step::Fork { seat }),
        3 => seat().prop_map(|seat| Step::Die { seat }),
        2 => Just(Step::ChildrenDie),
        14 => (0u8..6).prop_map(|keeper| Step::Work { keeper }),
        2 => Just(Step::Keeper),
        3 => (0u8..6).prop_map(|done| Step::Kill { done }),
        1 => (0u32..3).prop_map(|parts| Step::Expire { parts }),
        1 => Just(Step::Remove),
    ]
}

/// The last process that was told that it holds a pool.
#[derive(Clone, Debug)]
struct Held {
    pid: u64,
    token: Identity,
    generation: u64,
    /// It asked for the end.
    gave_up: bool,
    /// It was told that this was noted.
    noted: bool,
    /// The keeper refused the record of the end: the next broker takes the pool for held.
    unkept: bool,
}

struct World {
    catalogue: Catalogue<Fd>,
    jobs: Vec<Action<Fd>>,
    /// `None` while it is away.
    keeper: Option<BTreeMap<String, Fd>>,
    seats: [u64; SEATS],
    next: u64,
    alive: BTreeSet<u64>,
    /// Whose child lives.
    forked: BTreeSet<u64>,
    /// The last question of each process to adopt.
    tokens: BTreeMap<u64, Identity>,
    /// Who asked what, by the number of the question.
    asked: BTreeMap<u64, (u64, Identity)>,
    held: BTreeMap<Identity, Held>,
    removed: BTreeSet<Identity>,
    /// What the broker waits for of a former one's holds.
    watched: Vec<(Identity, Identity, Fd)>,
    answers: u64,
}

fn limits() -> Limits {
    Limits {
        pool_ttl: Some(TTL),
        ..Limits::default()
    }
}

fn unnamed() -> Process {
    Process {
        pid: 0,
        command: String::new(),
        name: String::new(),
    }
}

fn manifest(identity: Identity) -> Manifest {
    let draft = draft(identity, NAME);
    let layout = draft.layout.with_journal(8_192).expect("a journal");
    Manifest { layout, ..draft }
}

impl World {
    fn new() -> World {
        World {
            catalogue: Catalogue::new(limits(), 0),
            jobs: Vec::new(),
            keeper: Some(BTreeMap::new()),
            seats: [1, 2, 3],
            next: 4,
            alive: (1..4).collect(),
            forked: BTreeSet::new(),
            tokens: BTreeMap::new(),
            asked: BTreeMap::new(),
            held: BTreeMap::new(),
            removed: BTreeSet::new(),
            watched: Vec::new(),
            answers: 0,
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn identity(&mut self) -> Identity {
        Identity(u128::from(self.number()).to_le_bytes())
    }

    /// Says whether a process or its child lives: then it may write to what it holds.
    fn lives(&self, pid: u64) -> bool {
        self.alive.contains(&pid) || self.forked.contains(&pid)
    }

    fn visible(&self) -> BTreeSet<Identity> {
        let rows = self.catalogue.rows(asker(1)).into_iter();
        let rows = rows.filter(|row| row.state == "visible" || row.state == "pool");
        rows.map(|row| row.identity).collect()
    }

    fn act(&mut self, actions: Vec<Action<Fd>>) {
        for action in actions {
            match action {
                Action::Answer(
                    to,
                    request,
                    Answer::Pool {
                        identity,
                        generation,
                        previous,
                        ..
                    },
                ) => {
                    let (pid, token) = self.asked[&request];
                    assert_eq!(to, Participant(pid));
                    self.answers += 1;
                    self.check_answer((pid, token), identity, generation, previous);
                }
                Action::Answer(_, request, Answer::Noted) => {
                    if let Some(&(_, token)) = self.asked.get(&request) {
                        let held = self.held.values_mut();
                        held.filter(|held| held.token == token)
                            .for_each(|held| held.noted = true);
                    }
                }
                Action::Answer(..) | Action::EndLeases(..) => {}
                job => self.jobs.push(job),
            }
        }
    }

    /// The promise: one holder at a time, generations that rise, and the right end of the last hold.
    fn check_answer(
        &mut self,
        (pid, token): (u64, Identity),
        identity: Identity,
        generation: u64,
        previous: Previous,
    ) {
        let held = Held {
            pid,
            token,
            generation,
            gave_up: false,
            noted: false,
            unkept: false,
        };
        let Some(last) = self.held.insert(identity, held) else {
            return;
        };
        if last.token == token {
            assert_eq!(last.generation, generation, "one hold, one generation");
            self.held.insert(identity, last);
            return;
        }
        assert!(
            last.gave_up || !self.lives(last.pid),
            "{pid} holds the pool, and so does {last:?}"
        );
        assert!(generation > last.generation, "{generation} after {last:?}");
        if generation == last.generation + 1 {
            let is_right = match previous {
                Previous::Never => false,
                Previous::Closed => last.gave_up,
                // A removal that the keeper did not take brings a pool back as it was kept.
                Previous::Died => !last.noted || last.unkept || self.removed.contains(&identity),
            };
            assert!(is_right, "{previous} after {last:?}");
        }
    }

    /// Does the next job of the other threads.
    fn work(&mut self, keeper: u8) {
        if self.jobs.is_empty() {
            return;
        }
        let fail = match (&self.keeper, keeper) {
            (None, _) => Some(KeepError::Absent),
            (_, 0) => Some(KeepError::Refused("full".into())),
            _ => None,
        };
        let actions = match self.jobs.remove(0) {
            Action::Make { identity, .. } => {
                let made = (0..2).map(|region| Fd::Region(identity, region)).collect();
                let slot = |slot| LeaseSlot {
                    slot,
                    generation: Generation::ZERO.next(),
                };
                let grant = |_, count| Some((0..count as u32).map(slot).collect());
                self.catalogue.made(identity, Ok(made), grant)
            }
            Action::Keep {
                identity,
                seq,
                manifest,
                regions,
            } => {
                let file = Fd::Manifest(manifest);
                let kept = fail.map_or_else(|| Ok(self.store(seq, file, regions, usize::MAX)), Err);
                self.catalogue.kept(identity, kept)
            }
            Action::KeepRecord {
                seq,
                record,
                processes,
            } => {
                if fail.is_some() && record.phase == Phase::Closed {
                    let held = self.held.get_mut(&record.pool).into_iter();
                    held.for_each(|held| held.unkept = true);
                }
                let file = Fd::Record(record.clone());
                let kept =
                    fail.map_or_else(|| Ok(self.store(seq, file, processes, usize::MAX)), Err);
                self.catalogue.recorded(seq, record, kept)
            }
            Action::Forget {
                token,
                objects,
                bequest,
            } => {
                if fail.is_none() {
                    self.forget(&objects, bequest, usize::MAX);
                }
                self.catalogue.forgotten(token, fail.map_or(Ok(()), Err))
            }
            other => panic!("no job: {other:?}"),
        };
        self.act(actions);
    }

    /// Gives the keeper the first `steps` descriptors of an object or a record.
    fn store(&mut self, seq: u64, file: Fd, regions: Vec<Fd>, steps: usize) -> Fd {
        let labels = (0..).map(|i| Label::Region(seq, i));
        let all = labels
            .zip(regions)
            .chain([(Label::Manifest(seq), file.clone())]);
        let keeper = self.keeper.iter_mut();
        keeper.for_each(|keeper| {
            keeper.extend(
                all.clone()
                    .take(steps)
                    .map(|(label, fd)| (label.to_string(), fd)),
            );
        });
        file
    }

    fn forget(&mut self, objects: &[(u64, usize)], bequest: Option<Bequest>, steps: usize) {
        let number = self.number();
        let Some(keeper) = &mut self.keeper else {
            return;
        };
        if let Some(bequest) = bequest {
            keeper.insert(
                Label::History(number).to_string(),
                Fd::Bequest(bequest.clone()),
            );
            keeper.insert(Label::Tombs(number).to_string(), Fd::Bequest(bequest));
        }
        let labels = objects.iter().flat_map(|&(seq, regions)| {
            let regions = (0..regions as u8).map(move |i| Label::Region(seq, i));
            std::iter::once(Label::Manifest(seq)).chain(regions)
        });
        for label in labels.take(steps) {
            keeper.remove(&label.to_string());
        }
    }

    /// Kills the broker in the middle of its next job, and starts another from what the keeper has.
    fn kill(&mut self, done: u8) {
        let done = usize::from(done);
        let is_of_keeper = |job: &Action<Fd>| !matches!(job, Action::Make { .. });
        if let Some(at) = self.jobs.iter().position(is_of_keeper) {
            match self.jobs.remove(at) {
                Action::Keep {
                    seq,
                    manifest,
                    regions,
                    ..
                } => {
                    self.store(seq, Fd::Manifest(manifest), regions, done);
                }
                Action::KeepRecord {
                    seq,
                    record,
                    processes,
                } => {
                    self.store(seq, Fd::Record(record), processes, done);
                }
                Action::Forget {
                    objects, bequest, ..
                } => self.forget(&objects, bequest, done),
                _ => {}
            }
        }
        self.jobs.clear();
        let keeper = self.keeper.as_mut().expect("both are not killed");
        let store = keeper
            .iter()
            .map(|(name, fd)| (name.clone(), fd.clone()))
            .collect();
        let found = sort(store, |label, fd| match (label, fd) {
            (_, Fd::Manifest(of)) => Reading::Manifest(of.layout.regions().len() + 1),
            (_, Fd::Record(record)) => Reading::Manifest(record.processes),
            (Label::Tombs(_), Fd::Bequest(bequest)) => Reading::Tombs(bequest.tombs.clone()),
            (_, Fd::Bequest(bequest)) => Reading::History(bequest.history),
            _ => Reading::Broken,
        });
        found.rest.iter().for_each(|name| drop(keeper.remove(name)));
        let bequest = Bequest {
            tombs: found.tombs.map(|(_, tombs)| tombs).unwrap_or_default(),
            history: found.history.map(|(_, of)| of).unwrap_or_default(),
        };
        let (mut objects, mut records) = (Vec::new(), Vec::new());
        for (seq, file, regions) in found.whole {
            match &file {
                Fd::Manifest(manifest) => objects.push(Inherited {
                    seq,
                    manifest: *manifest.clone(),
                    file,
                    regions,
                    since: std::time::UNIX_EPOCH,
                }),
                Fd::Record(record) => {
                    let record = record.clone();
                    let kept = Kept {
                        seq,
                        record,
                        file,
                        processes: regions,
                    };
                    records.push((kept, unnamed()));
                }
                other => panic!("{other:?}"),
            }
        }
        self.catalogue = Catalogue::new(limits(), 0);
        let mut actions = self.catalogue.restore(&bequest, objects, found.next_seq);
        actions.extend(self.catalogue.inherit(records));
        self.act(actions);
        self.watched = self.catalogue.inherited_processes();
        self.notice();
    }

    /// Tells the broker of what has ended.
    fn notice(&mut self) {
        let ended = |fd: &Fd| match fd {
            Fd::Pid(pid) => !self.alive.contains(pid),
            Fd::Line(pid) => !self.lives(*pid),
            other => panic!("{other:?}"),
        };
        let watched = self.watched.clone();
        let (over, watched) = watched.into_iter().partition(|(.., fd)| ended(fd));
        self.watched = watched;
        let over: Vec<(Identity, Identity, Fd)> = over;
        for (pool, token, _) in over {
            self.catalogue.process_exited(pool, token);
        }
    }

    /// Proves the death of a process to the broker that it is connected to.
    fn bury(&mut self, pid: u64) {
        if !self.lives(pid) {
            self.catalogue.hung_up(Participant(pid));
            self.catalogue.writer_died(Participant(pid));
        }
    }

    fn adopt(&mut self, pid: u64, again: bool, now: Instant) {
        let fresh = self.identity();
        let token = self
            .tokens
            .get(&pid)
            .copied()
            .filter(|_| again)
            .unwrap_or(fresh);
        self.tokens.insert(pid, token);
        let request = self.number();
        self.asked.insert(request, (pid, token));
        let processes = Ok(vec![Fd::Pid(pid), Fd::Line(pid)]);
        let question = (NAME, token);
        let actions =
            self.catalogue
                .adopt(asker(pid), request, question, processes, unnamed(), now);
        self.act(actions);
    }

    /// When every dead process' work has ended.
    fn later() -> Instant {
        Instant::now() + BackendKind::Host.quarantine_unseen()
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Create { seat } => {
                let (identity, request) = (self.identity(), self.number());
                let of = asker(self.seats[seat]);
                if self
                    .catalogue
                    .create(of, request, identity, Wanted::default())
                    .is_ok()
                {
                    let drafted = Ok((manifest(identity), SITE));
                    let actions = self.catalogue.drafted(identity, drafted);
                    self.act(actions);
                    while self
                        .jobs
                        .iter()
                        .any(|job| matches!(job, Action::Make { .. }))
                    {
                        self.work(7);
                    }
                    let actions = self.catalogue.commit(of, request, identity, |_| true);
                    self.act(actions);
                }
            }
            // While the keeper is away a broker hears neither.
            Step::Adopt { .. } | Step::Release { .. } if self.keeper.is_none() => {}
            Step::Adopt { seat, again } => self.adopt(self.seats[seat], again, World::later()),
            Step::Release { seat } => {
                let pid = self.seats[seat];
                let Some(&token) = self.tokens.get(&pid) else {
                    return;
                };
                let held = self.held.values_mut();
                held.filter(|held| held.token == token)
                    .for_each(|held| held.gave_up = true);
                let request = self.number();
                self.asked.insert(request, (pid, token));
                let actions = self.catalogue.release(asker(pid), request, NAME, token);
                self.act(actions);
                // It shows the token of a hold that ended no more.
                self.tokens.remove(&pid);
            }
            Step::Fork { seat } => {
                self.forked.insert(self.seats[seat]);
            }
            Step::Die { seat } => {
                let next = self.number();
                let pid = std::mem::replace(&mut self.seats[seat], next);
                self.alive.remove(&pid);
                self.alive.insert(next);
                self.bury(pid);
                self.notice();
            }
            Step::ChildrenDie => {
                let dead: Vec<u64> = self.forked.difference(&self.alive).copied().collect();
                for pid in dead {
                    self.forked.remove(&pid);
                    self.bury(pid);
                }
                self.notice();
            }
            Step::Work { keeper } => self.work(keeper),
            Step::Keeper if self.keeper.is_some() => self.keeper = None,
            Step::Keeper => {
                // What was on its way failed before the next one is looked for.
                while !self.jobs.is_empty() {
                    self.work(7);
                }
                self.keeper = Some(BTreeMap::new());
                for (seq, file, regions) in self.catalogue.visible() {
                    self.store(seq, file, regions, usize::MAX);
                }
                let (bequest, number) = (self.catalogue.bequest(), self.number());
                let bequest = || Fd::Bequest(bequest.clone());
                let files = [Label::History(number), Label::Tombs(number)];
                let files = files.map(|label| (label.to_string(), bequest()));
                self.keeper
                    .iter_mut()
                    .for_each(|keeper| keeper.extend(files.clone()));
            }
            Step::Kill { done } => {
                if self.keeper.is_some() {
                    let before = self.visible();
                    self.kill(done);
                    let lost: Vec<_> = before.difference(&self.visible()).copied().collect();
                    let lost = lost.iter().filter(|of| !self.removed.contains(of));
                    assert_eq!(lost.count(), 0, "lost with the broker");
                }
            }
            Step::Expire { parts } => {
                let before = self.visible();
                let actions = self.catalogue.expire(Instant::now() + TTL / 2 * parts);
                for gone in before.difference(&self.visible()) {
                    let held = self.held.get(gone);
                    let is_free = held.is_none_or(|held| held.gave_up || !self.lives(held.pid));
                    assert!(is_free && parts == 2, "{gone} went from {held:?}");
                    self.removed.insert(*gone);
                }
                self.act(actions);
            }
            Step::Remove => {
                self.removed.extend(self.visible());
                let actions = self.catalogue.remove(asker(1), 0, NAME, Epoch(0));
                self.act(actions);
            }
        }
    }

    /// Lets everybody die and all work be done: what is left must be free.
    fn end(&mut self) {
        if self.keeper.is_none() {
            self.step(&Step::Keeper);
        }
        for seat in 0..SEATS {
            self.step(&Step::Die { seat });
        }
        self.step(&Step::ChildrenDie);
        self.finish();
        if self.visible().is_empty() {
            return;
        }
        let answers = self.answers;
        self.adopt(self.seats[0], false, World::later());
        self.finish();
        assert_eq!(
            self.answers,
            answers + 1,
            "a pool stays held: {:?}",
            self.held
        );
    }

    fn finish(&mut self) {
        while !self.jobs.is_empty() {
            self.work(7);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn a_pool_has_one_holder_whatever_happens_and_is_free_in_the_end(
        steps in proptest::collection::vec(any_step(), 1..100),
    ) {
        let mut world = World::new();
        world.step(&Step::Create { seat: 0 });
        world.finish();
        for step in &steps {
            world.step(step);
        }
        world.end();
    }
}

/// A world whose first process holds a pool.
fn held() -> World {
    let mut world = World::new();
    world.step(&Step::Create { seat: 0 });
    world.finish();
    world.step(&Step::Adopt {
        seat: 0,
        again: false,
    });
    world.finish();
    assert_eq!(world.answers, 1);
    world
}

/// Asks for the pool at a time, and says whether it was given.
fn is_given(world: &mut World, seat: usize, now: Instant) -> bool {
    let answers = world.answers;
    world.adopt(world.seats[seat], false, now);
    world.finish();
    world.answers > answers
}

#[test]
fn a_pool_is_given_when_the_quarantine_of_its_dead_holder_is_over() {
    for broker_dies in [false, true] {
        let mut world = held();
        if broker_dies {
            world.step(&Step::Kill { done: 0 });
        }
        world.step(&Step::Die { seat: 0 });
        let quarantine = BackendKind::Host.quarantine_unseen();
        let died = Instant::now();
        assert!(!is_given(
            &mut world,
            1,
            died + quarantine / 2 - Duration::from_millis(1)
        ));
        assert!(is_given(&mut world, 1, died + quarantine));
    }
}

#[test]
fn a_child_of_a_dead_holder_keeps_the_hold() {
    for broker_dies in [false, true] {
        let mut world = held();
        world.step(&Step::Fork { seat: 0 });
        if broker_dies {
            world.step(&Step::Kill { done: 0 });
        }
        world.step(&Step::Die { seat: 0 });
        assert!(!is_given(&mut world, 1, World::later()), "{broker_dies}");
        world.step(&Step::ChildrenDie);
        assert!(is_given(&mut world, 1, World::later()), "{broker_dies}");
    }
}

/// Its close is on its way to the keeper when both die.
#[test]
fn a_holder_that_dies_in_a_close_that_the_keeper_did_not_take_ends_its_hold() {
    for broker_dies in [false, true] {
        let mut world = held();
        if broker_dies {
            world.step(&Step::Kill { done: 0 });
        }
        world.step(&Step::Release { seat: 0 });
        world.step(&Step::Die { seat: 0 });
        world.step(&Step::Keeper);
        world.step(&Step::Keeper);
        assert!(is_given(&mut world, 1, World::later()), "{broker_dies}");
    }
}

/// The negative control: the model finds a broker that takes a pidfd for the whole proof.
#[test]
#[should_panic(expected = "holds the pool, and so does")]
fn the_control_a_broker_that_forgets_children_is_found() {
    let mut world = held();
    world.step(&Step::Fork { seat: 0 });
    let pid = world.seats[0];
    world.step(&Step::Die { seat: 0 });
    world.catalogue.writer_died(Participant(pid));
    is_given(&mut world, 1, World::later());
}

#[test]
fn a_holder_with_too_many_descendants_is_refused() {
    let mut world = held();
    let question = (NAME, Identity([9; 16]));
    world.step(&Step::Release { seat: 0 });
    world.finish();
    let many = Ok((0..17).map(Fd::Pid).collect());
    let now = World::later();
    let actions = world
        .catalogue
        .adopt(asker(2), 1, question, many, unnamed(), now);
    let [Action::Answer(_, 1, Answer::Declined(RefusalCode::Limit, why))] = &actions[..] else {
        panic!("{actions:?}");
    };
    assert!(
        why.starts_with("16 processes have") && why.ends_with("may have 15"),
        "{why}"
    );
}

//! Every order of what can happen to one pull, on the machines that ship: origin's table of leases
//! and replica's pull.
//!
//! A message that was sent stays in the network for ever and may be delivered at any time, any
//! number of times, or never: so it is lost, delayed, repeated and replayed. The origin dies and
//! comes back at the same address, its memory at the same place. Time passes at any moment, which
//! is a stop of either side. The name is removed, and its memory written anew, half by half, as
//! soon as no lease holds it; then another object has the name.
//!
//! Invariant: what is committed is, in both halves, the object that its identity names.

use std::collections::hash_map::DefaultHasher;
use std::collections::{HashSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::time::Duration;

use gateway::digest::Digest;
use gateway::message::{Ask, Confirm, Grant, Incarnation, LeaseNumber, Release, Renew, Wanted};
use gateway::origin::{Asked, Limits, Table};
use gateway::replica::{Action, Again, Event, Outcome, Patience, Pull, Rules};

/// How far time jumps: past the end of a lease, and of everybody's patience.
const JUMP: Duration = Duration::from_secs(20);
const X: u8 = 1;
const Y: u8 = 2;
/// Bytes of no object: something on the way made them.
const ALTERED: u8 = 3;

fn digest(bytes: &[u8]) -> Digest {
    let mut digest = [0; 32];
    digest[..bytes.len()].copy_from_slice(bytes);
    Digest(digest)
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Message {
    Ask(u64),
    Granted(u64, Grant),
    Declined(u64),
    /// The object of this question is being registered yet.
    Registering(u64),
    Confirm(Confirm),
    Confirmed(u64, bool),
    /// The lease was alive, and its object has other bytes.
    Differs(u64),
    /// Nobody was there to confirm.
    Unheard(u64),
    Renew(Renew),
    Renewed(Renew, bool),
    Release(Release),
}

/// How often each thing may happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Left {
    jumps: u8,
    deaths: u8,
    failures: u8,
    /// Halves that something on the way alters.
    altered: u8,
    /// Registrations that take a while.
    slow: u8,
    /// Asks that are delivered: one that comes late opens a lease that nobody uses, again and
    /// again.
    asks: u8,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    now: Duration,
    left: Left,
    origin: Option<Table<u8>>,
    incarnation: u8,
    /// Leases that this incarnation has given.
    leases: u8,
    /// The question and the lease of a registration that goes on, and its object, which it holds.
    registering: Option<(u64, LeaseNumber, u8)>,
    /// Which object has the name at the origin.
    name: Option<u8>,
    /// The origin's memory, in two halves that are read and written one by one.
    memory: [u8; 2],
    pull: Pull,
    grant: Option<Grant>,
    /// What has arrived, while a transfer is under way or has ended.
    arrived: Vec<u8>,
    reading: bool,
    /// The replica says what it has read.
    digests: bool,
    network: Vec<Message>,
    end: Option<Outcome>,
}

#[derive(Default, Debug)]
struct Seen {
    states: usize,
    published: HashSet<u8>,
    thrown_away: usize,
    stuck: usize,
    wrong: usize,
    /// Confirmations that were answered with yes, and came again after their lease had ended.
    replayed: usize,
    /// Confirmations of other bytes.
    differed: usize,
    /// Questions that were asked again, since their object was being registered.
    repeated: usize,
}

fn limits() -> Limits {
    Limits {
        leases: 4,
        of_host: 4,
        of_object: 4,
        time: JUMP,
        most_time: JUMP * 3,
    }
}

impl World {
    fn begin(rules: Rules, left: Left) -> World {
        let patience = Patience {
            answer: JUMP,
            stall: JUMP * 2,
            renew: JUMP,
            busy: JUMP,
            attempts: 2,
        };
        let (pull, actions) = Pull::begin(Duration::ZERO, patience, rules);
        let mut world = World {
            now: Duration::ZERO,
            left,
            origin: Some(Table::new(Incarnation([1; 16]), limits())),
            incarnation: 1,
            leases: 0,
            registering: None,
            name: Some(X),
            memory: [X; 2],
            pull,
            grant: None,
            arrived: Vec::new(),
            reading: false,
            digests: true,
            network: Vec::new(),
            end: None,
        };
        world.act(actions, &mut Seen::default());
        world
    }

    fn send(&mut self, message: Message) {
        if !self.network.contains(&message) {
            self.network.push(message);
        }
    }

    fn act(&mut self, actions: Vec<Action>, seen: &mut Seen) {
        for action in actions {
            match action {
                Action::Ask(number) => self.send(Message::Ask(number)),
                Action::Repeat(number) => {
                    seen.repeated += 1;
                    self.send(Message::Ask(number));
                }
                Action::Create(grant) => {
                    self.grant = Some(grant);
                    self.happened(Event::Created, seen);
                }
                Action::Read(_) => {
                    self.arrived.clear();
                    self.reading = true;
                }
                Action::Flush => self.happened(Event::Flushed, seen),
                Action::Confirm(confirm) => self.send(Message::Confirm(Confirm {
                    digest: self.digests.then(|| digest(&self.arrived)),
                    ..confirm
                })),
                Action::Renew(renew) => self.send(Message::Renew(renew)),
                Action::Commit => {
                    let grant = self.grant.expect("a lease before a commit");
                    let right = self.arrived == [grant.identity[0]; 2];
                    seen.wrong += usize::from(!right);
                    seen.published.insert(grant.identity[0]);
                    self.happened(Event::Committed, seen);
                }
                Action::Drop => {
                    assert!(
                        !self.reading,
                        "memory is given back that a transfer writes to"
                    );
                    seen.thrown_away += 1;
                    self.arrived.clear();
                }
                Action::Release(lease) => self.send(Message::Release(Release { lease })),
                Action::End(outcome) => {
                    seen.stuck += usize::from(matches!(outcome, Outcome::Stuck(_)));
                    self.end = Some(outcome);
                }
            }
        }
    }

    fn happened(&mut self, event: Event, seen: &mut Seen) {
        let actions = self.pull.happened(self.now, event);
        self.act(actions, seen);
    }

    /// Delivers a message, which stays in the network.
    fn deliver(&mut self, message: &Message, seen: &mut Seen) {
        let now = self.now;
        match message {
            Message::Granted(number, grant) => self.happened(Event::Granted(*number, *grant), seen),
            Message::Declined(number) => {
                self.happened(Event::Declined(*number, String::new(), Again::Later), seen)
            }
            Message::Registering(number) => self.happened(Event::Registering(*number), seen),
            Message::Confirmed(number, yes) => self.happened(Event::Confirmed(*number, *yes), seen),
            Message::Differs(number) => {
                seen.differed += 1;
                self.happened(Event::Differs(*number), seen);
            }
            Message::Unheard(number) => self.happened(Event::Unheard(*number), seen),
            Message::Renewed(renew, yes) => self.happened(Event::Renewed(renew.lease, *yes), seen),
            to_origin => {
                let (Some(table), name) = (&mut self.origin, self.name) else {
                    if let Message::Confirm(confirm) = to_origin {
                        self.send(Message::Unheard(confirm.number));
                    }
                    return;
                };
                let answer = match to_origin {
                    Message::Ask(number) => {
                        self.left.asks -= 1;
                        let wanted = Wanted {
                            name: "model".into(),
                            epoch: None,
                            identity: None,
                        };
                        let ask = Ask {
                            last_resort: false,
                            others: 0,
                            asker: Incarnation([9; 16]),
                            host: "b".into(),
                            number: *number,
                            wanted,
                        };
                        let number_of_lease = LeaseNumber([self.leases + 1; 16]);
                        let asked = table.ask(now, &ask, number_of_lease);
                        self.leases += u8::from(matches!(asked, Asked::Open(_)));
                        match (asked, name) {
                            (Asked::Open(lease), Some(object))
                                if self.left.slow > 0 && self.registering.is_none() =>
                            {
                                self.left.slow -= 1;
                                self.registering = Some((*number, lease, object));
                                None
                            }
                            (Asked::Open(lease), Some(object)) => {
                                let granted = table.registered(
                                    now,
                                    lease,
                                    [object; 16],
                                    object.into(),
                                    object,
                                );
                                granted.ok().map(|grant| Message::Granted(*number, grant))
                            }
                            (Asked::Open(lease), None) => {
                                table.failed(lease);
                                Some(Message::Declined(*number))
                            }
                            (Asked::Again(grant), _) => Some(Message::Granted(*number, grant)),
                            (Asked::Wait(_), _) => Some(Message::Registering(*number)),
                            (Asked::Busy(_), _) => None,
                        }
                    }
                    Message::Confirm(confirm) => {
                        let yes = table.confirm(now, confirm);
                        let before = self
                            .network
                            .contains(&Message::Confirmed(confirm.number, true));
                        seen.replayed += usize::from(before && !yes);
                        let own = table
                            .of(confirm.lease.lease)
                            .map(|&object| digest(&[object; 2]));
                        match confirm.digest {
                            Some(said) if yes && own != Some(said) => {
                                Some(Message::Differs(confirm.number))
                            }
                            _ => Some(Message::Confirmed(confirm.number, yes)),
                        }
                    }
                    Message::Renew(renew) => {
                        Some(Message::Renewed(*renew, table.renew(now, renew)))
                    }
                    Message::Release(release) => {
                        table.release(release);
                        None
                    }
                    _ => None,
                };
                answer.into_iter().for_each(|answer| self.send(answer));
            }
        }
    }

    /// Whether memory of an object may be written anew: no name, no lease and no registration holds it.
    fn is_free(&self) -> bool {
        self.name.is_none()
            && self.registering.is_none_or(|(.., object)| object != X)
            && self
                .origin
                .as_ref()
                .is_none_or(|table| !table.held().any(|object| *object == X))
    }

    fn after(&self, step: impl FnOnce(&mut World)) -> World {
        let mut next = self.clone();
        step(&mut next);
        next
    }

    fn next(&self, seen: &mut Seen) -> Vec<World> {
        if self.end.is_some() {
            return Vec::new();
        }
        let mut next: Vec<World> = Vec::new();
        for message in &self.network {
            if self.left.asks == 0 && matches!(message, Message::Ask(_)) {
                continue;
            }
            next.push(self.after(|world| world.deliver(message, seen)));
        }
        if self.reading {
            // Whatever lies there, whether the lease is alive or not: nothing protects it.
            next.push(self.after(|world| {
                world.arrived.push(world.memory[world.arrived.len()]);
                world.happened(Event::Progress(world.arrived.len() as u64), seen);
                if world.arrived.len() == 2 {
                    world.reading = false;
                    world.happened(Event::Read, seen);
                }
            }));
            if self.left.altered > 0 {
                next.push(self.after(|world| {
                    world.left.altered -= 1;
                    world.arrived.push(ALTERED);
                    world.happened(Event::Progress(world.arrived.len() as u64), seen);
                    if world.arrived.len() == 2 {
                        world.reading = false;
                        world.happened(Event::Read, seen);
                    }
                }));
            }
            if self.left.failures > 0 {
                next.push(self.after(|world| {
                    world.left.failures -= 1;
                    world.reading = false;
                    world.happened(Event::ReadFailed(String::new()), seen);
                }));
            }
        }
        next.push(self.after(|world| world.happened(Event::Tick, seen)));
        if self.left.jumps > 0 {
            next.push(self.after(|world| {
                world.left.jumps -= 1;
                world.now += JUMP;
            }));
        }
        if let Some(table) = &self.origin {
            let mut table = table.clone();
            if !table.expire(self.now).is_empty() {
                next.push(self.after(|world| world.origin = Some(table)));
            }
            if let Some((number, lease, object)) = self.registering {
                next.push(self.after(|world| world.send(Message::Registering(number))));
                next.push(self.after(|world| {
                    world.registering = None;
                    let Some(table) = &mut world.origin else {
                        return;
                    };
                    let (now, epoch) = (world.now, object.into());
                    let granted = table.registered(now, lease, [object; 16], epoch, object);
                    world.send(match granted {
                        Ok(grant) => Message::Granted(number, grant),
                        Err(_) => Message::Declined(number),
                    });
                }));
            }
            if self.left.deaths > 0 {
                next.push(self.after(|world| {
                    world.left.deaths -= 1;
                    world.registering = None;
                    world.origin = None;
                }));
            }
        } else {
            next.push(self.after(|world| {
                world.incarnation += 1;
                world.leases = 0;
                world.origin = Some(Table::new(Incarnation([world.incarnation; 16]), limits()));
            }));
        }
        if self.name == Some(X) {
            next.push(self.after(|world| world.name = None));
        }
        if self.is_free() {
            match self.memory {
                [X, X] => next.push(self.after(|world| world.memory[1] = Y)),
                [X, Y] => next.push(self.after(|world| world.memory[0] = Y)),
                _ => next.push(self.after(|world| world.name = Some(Y))),
            }
        }
        next
    }
}

/// Visits every state that can be reached.
fn explore(rules: Rules, left: Left) -> Seen {
    explore_from(World::begin(rules, left))
}

fn explore_from(first: World) -> Seen {
    let mut seen = Seen::default();
    let mut known = HashSet::new();
    let number = |world: &World| {
        let (mut a, mut b) = (DefaultHasher::new(), DefaultHasher::new());
        0u8.hash(&mut a);
        // The order in which messages were sent says nothing.
        let mut network: Vec<u64> = world
            .network
            .iter()
            .map(|message| {
                let mut hasher = DefaultHasher::new();
                message.hash(&mut hasher);
                hasher.finish()
            })
            .collect();
        network.sort_unstable();
        let rest = World {
            network: Vec::new(),
            ..world.clone()
        };
        (&rest, &network).hash(&mut a);
        (&network, &rest).hash(&mut b);
        (a.finish(), b.finish())
    };
    known.insert(number(&first));
    let mut open = VecDeque::from([first]);
    while let Some(world) = open.pop_front() {
        if seen.wrong > 0 {
            break;
        }
        for next in world.next(&mut seen) {
            if known.insert(number(&next)) {
                open.push_back(next);
            }
        }
    }
    seen.states = known.len();
    seen
}

#[test]
fn no_order_of_events_publishes_what_the_identity_does_not_name() {
    let seen = explore(
        Rules::default(),
        Left {
            jumps: 1,
            deaths: 1,
            failures: 1,
            altered: 0,
            slow: 0,
            asks: 3,
        },
    );
    println!("{seen:?}");
    assert_eq!(seen.wrong, 0);
    // The model is worth nothing if these do not happen in it.
    assert_eq!(seen.published, HashSet::from([X, Y]));
    assert!(
        seen.thrown_away > 0 && seen.replayed > 0 && seen.states > 1_000,
        "{seen:?}"
    );
}

#[test]
fn a_registration_that_takes_long_publishes_what_its_identity_names() {
    let left = Left {
        jumps: 1,
        deaths: 0,
        failures: 0,
        altered: 0,
        slow: 1,
        asks: 2,
    };
    let seen = explore(Rules::default(), left);
    println!("{seen:?}");
    assert_eq!(seen.wrong, 0);
    assert_eq!(seen.published, HashSet::from([X, Y]));
    assert!(seen.repeated > 0 && seen.replayed > 0, "{seen:?}");
}

#[test]
fn a_transfer_that_neither_ends_nor_fails_ends_the_process() {
    let seen = explore(
        Rules::default(),
        Left {
            jumps: 2,
            deaths: 0,
            failures: 0,
            altered: 0,
            slow: 0,
            asks: 1,
        },
    );
    println!("{seen:?}");
    assert_eq!(seen.wrong, 0);
    assert!(seen.stuck > 0, "{seen:?}");
}

#[test]
fn a_gateway_that_commits_without_a_confirmation_publishes_a_mixture() {
    let seen = explore(
        Rules { confirms: false },
        Left {
            jumps: 2,
            deaths: 0,
            failures: 0,
            altered: 0,
            slow: 0,
            asks: 2,
        },
    );
    assert!(seen.wrong > 0, "the control must fail: {seen:?}");
}

/// What may happen where bytes are altered.
const ALTERS: Left = Left {
    jumps: 1,
    deaths: 1,
    failures: 0,
    altered: 1,
    slow: 0,
    asks: 2,
};

#[test]
fn bytes_that_are_altered_on_the_way_are_not_published() {
    let seen = explore(Rules::default(), ALTERS);
    println!("{seen:?}");
    assert_eq!(seen.wrong, 0);
    assert!(seen.differed > 0 && seen.published.contains(&X), "{seen:?}");
}

#[test]
fn a_replica_that_does_not_say_what_it_read_publishes_altered_bytes() {
    let first = World {
        digests: false,
        ..World::begin(Rules::default(), ALTERS)
    };
    let seen = explore_from(first);
    assert!(seen.wrong > 0, "the control must fail: {seen:?}");
}

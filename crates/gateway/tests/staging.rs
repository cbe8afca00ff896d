//! Every order of what can happen to two reads through one ring of an origin, on the table of
//! leases and the order of a ring's slots that ship.
//!
//! The ring has one slot of two halves, which are written and read one by one; objects have three
//! pieces. The first reader's lease may end while it reads; then the ring goes to the second
//! reader, whose object is another. Messages are lost, delayed and repeated, as in `protocol.rs`; a
//! reader that says nothing for a while was stopped.
//!
//! Invariant: what is confirmed is, in all halves of all pieces, the reader's own object.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use gateway::message::{Ask, Confirm, Grant, Incarnation, LeaseId, LeaseNumber, Release, Wanted};
use gateway::origin::rings::Order;
use gateway::origin::{Asked, Limits, Table};

/// How far time jumps: past the end of a lease.
const JUMP: Duration = Duration::from_secs(20);
const PIECES: u8 = 3;
const HALVES: usize = 2;

/// What the sides obey. All are true in what ships.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// The origin leaves a slot alone whose number has not risen.
    numbers_rise: bool,
    /// The origin fills under live leases alone.
    lease_lives: bool,
    /// The replica reads when its last question was answered, and no other.
    own_answer: bool,
    /// The replica keeps what was confirmed alone.
    confirms: bool,
}

const SHIPPED: Rules = Rules {
    numbers_rise: true,
    lease_lives: true,
    own_answer: true,
    confirms: true,
};

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
enum Message {
    Fill {
        reader: usize,
        lease: LeaseId,
        number: u64,
        piece: u8,
    },
    Filled {
        reader: usize,
        number: u64,
        yes: bool,
    },
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Stage {
    Waits,
    Reads { piece: u8 },
    Asks { piece: u8, number: u64, times: u8 },
    Confirms,
    Ended { kept: bool },
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Reader {
    grant: Option<Grant>,
    stage: Stage,
    number: u64,
    /// Halves that were read, and whether all were right.
    got: (usize, bool),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    now: Duration,
    jumps: u8,
    table: Table<u8>,
    /// The lease that has the ring, its order and its object.
    lent: Option<(LeaseNumber, Order, u8)>,
    slot: [u8; HALVES],
    /// A piece that is being copied: what goes into each half, from which on.
    copying: Option<(Message, u8, usize)>,
    readers: [Reader; 2],
    network: Vec<Message>,
}

#[derive(Default, Debug)]
struct Seen {
    states: usize,
    kept: HashSet<usize>,
    refused: usize,
    wrong: usize,
}

/// What lies in a piece of a reader's object.
fn right(reader: usize, piece: u8) -> u8 {
    10 * (reader as u8 + 1) + piece
}

impl World {
    fn begin() -> World {
        let limits = Limits {
            leases: 4,
            of_host: 4,
            of_object: 4,
            time: JUMP,
            most_time: JUMP * 3,
        };
        let reader = Reader {
            grant: None,
            stage: Stage::Waits,
            number: 0,
            got: (0, true),
        };
        World {
            now: Duration::ZERO,
            jumps: 1,
            table: Table::new(Incarnation([1; 16]), limits),
            lent: None,
            slot: [0; HALVES],
            copying: None,
            readers: [reader.clone(), reader],
            network: Vec::new(),
        }
    }

    fn send(&mut self, message: Message) {
        if !self.network.contains(&message) {
            self.network.push(message);
        }
    }

    /// The origin grants a lease with the ring, its slot filled with the first piece.
    fn grant(&mut self, reader: usize) {
        let wanted = Wanted {
            name: "model".into(),
            epoch: None,
            identity: None,
        };
        let asker = Incarnation([reader as u8; 16]);
        let ask = Ask {
            asker,
            host: "b".into(),
            number: 1,
            wanted,
            others: 0,
            last_resort: false,
        };
        let Asked::Open(number) = self
            .table
            .ask(self.now, &ask, LeaseNumber([reader as u8; 16]))
        else {
            return;
        };
        let object = reader as u8;
        let grant = self
            .table
            .registered(self.now, number, [object; 16], 1, object)
            .expect("room");
        self.lent = Some((number, Order::new(1), object));
        self.slot = [right(reader, 0); HALVES];
        self.readers[reader] = Reader {
            grant: Some(grant),
            stage: Stage::Reads { piece: 0 },
            number: 0,
            got: (0, true),
        };
    }

    /// Gives the ring back that an ended lease had.
    fn take_back(&mut self) {
        if self
            .lent
            .as_ref()
            .is_some_and(|(number, ..)| self.table.of(*number).is_none())
        {
            self.lent = None;
        }
    }

    fn ask(&mut self, reader: usize, piece: u8, times: u8) {
        let this = &mut self.readers[reader];
        this.number += 1;
        let (number, grant) = (this.number, this.grant.expect("a lease"));
        this.stage = Stage::Asks {
            piece,
            number,
            times,
        };
        self.send(Message::Fill {
            reader,
            lease: grant.lease,
            number,
            piece,
        });
    }

    fn deliver(&mut self, message: Message, rules: Rules, seen: &mut Seen) {
        match message {
            Message::Fill {
                reader,
                lease: of,
                number,
                piece,
            } => {
                let alive = self.table.alive(self.now, of).is_some() || !rules.lease_lives;
                let order = match &mut self.lent {
                    Some((lent, order, _)) if *lent == of.lease => Some(order),
                    // An origin that does not look at leases finds the ring all the same.
                    Some((_, order, _)) if !rules.lease_lives => Some(order),
                    _ => None,
                };
                let rises = order.is_some_and(|order| order.take(0, number) || !rules.numbers_rise);
                if alive && rises {
                    self.copying = Some((message, right(reader, piece), 0));
                } else {
                    seen.refused += 1;
                    self.send(Message::Filled {
                        reader,
                        number,
                        yes: false,
                    });
                }
            }
            Message::Filled {
                reader,
                number,
                yes,
            } => {
                let Stage::Asks {
                    piece,
                    number: mine,
                    ..
                } = self.readers[reader].stage
                else {
                    return;
                };
                if number != mine && rules.own_answer {
                    return;
                }
                self.readers[reader].stage = if yes {
                    Stage::Reads { piece }
                } else {
                    Stage::Ended { kept: false }
                };
            }
        }
    }

    /// Forgets answers that will never count: a reader's number does not go back.
    fn forget(&mut self, rules: Rules) {
        let World {
            network, readers, ..
        } = self;
        network.retain(|message| match *message {
            Message::Fill { .. } => true,
            Message::Filled { reader, number, .. } => match readers[reader].stage {
                Stage::Ended { .. } | Stage::Confirms => false,
                _ => number >= readers[reader].number || !rules.own_answer,
            },
        });
    }

    fn after(&self, step: impl FnOnce(&mut World)) -> World {
        let mut next = self.clone();
        step(&mut next);
        next.network.sort_unstable();
        next
    }

    fn next(&self, rules: Rules, seen: &mut Seen) -> Vec<World> {
        let mut next = Vec::new();
        if let Some((message, value, half)) = self.copying {
            // The origin does nothing else meanwhile: one thread fills, and ends leases.
            next.push(self.after(|world| {
                world.slot[half] = value;
                world.copying = (half + 1 < HALVES).then_some((message, value, half + 1));
                let Message::Fill { reader, number, .. } = message else {
                    unreachable!("only fills are copied")
                };
                if world.copying.is_none() {
                    world.send(Message::Filled {
                        reader,
                        number,
                        yes: true,
                    });
                }
            }));
        } else {
            let mut table = self.table.clone();
            if !table.expire(self.now).is_empty() {
                next.push(self.after(|world| {
                    world.table = table;
                    world.take_back();
                }));
            }
            for (reader, this) in self.readers.iter().enumerate() {
                if this.stage == Stage::Waits && self.lent.is_none() {
                    next.push(self.after(|world| world.grant(reader)));
                }
            }
        }
        for &message in &self.network {
            if self.copying.is_none() || matches!(message, Message::Filled { .. }) {
                next.push(self.after(|world| world.deliver(message, rules, seen)));
            }
        }
        if self.jumps > 0 {
            next.push(self.after(|world| {
                world.jumps -= 1;
                world.now += JUMP;
            }));
        }
        for reader in 0..self.readers.len() {
            next.extend(self.go_on(reader, rules, seen));
        }
        next
    }

    /// What a reader does by itself.
    fn go_on(&self, reader: usize, rules: Rules, seen: &mut Seen) -> Option<World> {
        Some(match self.readers[reader].stage {
            Stage::Waits | Stage::Ended { .. } => return None,
            // Whatever lies there: nothing protects it.
            Stage::Reads { piece } => self.after(|world| {
                let (count, good) = world.readers[reader].got;
                let half = count % HALVES;
                world.readers[reader].got =
                    (count + 1, good && world.slot[half] == right(reader, piece));
                if half + 1 == HALVES {
                    if piece + 1 < PIECES {
                        world.ask(reader, piece + 1, 1);
                    } else {
                        world.readers[reader].stage = Stage::Confirms;
                    }
                }
            }),
            Stage::Asks {
                piece, times: 1, ..
            } if reader == 0 => self.after(|world| world.ask(reader, piece, 2)),
            Stage::Asks { .. } => return None,
            Stage::Confirms if self.copying.is_some() => return None,
            Stage::Confirms => self.after(|world| {
                let grant = world.readers[reader].grant.expect("a lease");
                let confirm = Confirm {
                    lease: grant.lease,
                    identity: grant.identity,
                    number: 9,
                    digest: None,
                };
                let kept = world.table.confirm(world.now, &confirm) || !rules.confirms;
                if kept {
                    let all = usize::from(PIECES) * HALVES;
                    seen.wrong += usize::from(world.readers[reader].got != (all, true));
                    seen.kept.insert(reader);
                }
                world.readers[reader].stage = Stage::Ended { kept };
                let _ended = world.table.release(&Release { lease: grant.lease });
                world.take_back();
            }),
        })
    }
}

/// Visits every state that can be reached.
fn explore(rules: Rules) -> Seen {
    let mut seen = Seen::default();
    let first = World::begin();
    let mut known = HashSet::from([first.clone()]);
    let mut open = VecDeque::from([first]);
    while let Some(world) = open.pop_front() {
        if seen.wrong > 0 {
            break;
        }
        for mut next in world.next(rules, &mut seen) {
            next.forget(rules);
            if known.insert(next.clone()) {
                open.push_back(next);
            }
        }
    }
    seen.states = known.len();
    println!("{rules:?}: {seen:?}");
    seen
}

#[test]
fn no_order_of_events_confirms_another_objects_bytes() {
    let seen = explore(SHIPPED);
    assert_eq!(seen.wrong, 0);
    // The model is worth nothing if these do not happen in it.
    assert_eq!(seen.kept, HashSet::from([0, 1]));
    assert!(seen.refused > 0 && seen.states > 1_000, "{seen:?}");
}

#[test]
fn each_rule_is_needed() {
    let controls = [
        Rules {
            numbers_rise: false,
            ..SHIPPED
        },
        Rules {
            lease_lives: false,
            ..SHIPPED
        },
        Rules {
            own_answer: false,
            ..SHIPPED
        },
        Rules {
            confirms: false,
            ..SHIPPED
        },
    ];
    for rules in controls {
        assert!(explore(rules).wrong > 0, "the control must fail: {rules:?}");
    }
}

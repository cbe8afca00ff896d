//! Every order of what can happen between a gateway and a carrier that obeys nothing, on the table
//! that ships: it answers what was asked and what was not, twice, late, or never, writes to slots as
//! long as it lives, and dies at any moment; reads are given up at any moment.
//!
//! Invariants: two reads never have one slot while a carrier may be writing to it for the first; an
//! answer is taken once, and none of a carrier that has died; what is lent is alive only while the
//! carrier that lends it is.

use std::collections::{HashSet, VecDeque};

use gateway::carrier::table::{Generation, Next, Table};

const SLOTS: usize = 2;

/// How often each thing may happen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Left {
    reads: u8,
    lends: u8,
    deaths: u8,
    /// Answers that come again, or that nobody asked for.
    lies: u8,
}

/// A question, as the gateway sees it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Question {
    generation: Generation,
    number: u64,
    /// Of a read.
    slot: Option<usize>,
    /// The gateway wants it.
    wanted: bool,
    /// The carrier may be writing for it: it was not answered.
    open: bool,
    /// Its answer was taken, and its slot is being copied from.
    copying: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    table: Table<u64>,
    alive: bool,
    left: Left,
    questions: Vec<Question>,
    /// What is lent, by generation and number.
    lent: Vec<(Generation, u64)>,
}

#[derive(Default, Debug)]
struct Seen {
    states: usize,
    taken: usize,
    killed: usize,
    ended_for_nobody: usize,
    full: usize,
    shared: usize,
}

impl World {
    fn begin(careful: bool, left: Left) -> World {
        let table = Table::new(SLOTS);
        let mut world = World {
            table: if careful { table } else { table.careless() },
            alive: false,
            left,
            questions: Vec::new(),
            lent: Vec::new(),
        };
        world.start();
        world
    }

    fn start(&mut self) {
        self.table.started();
        self.alive = true;
    }

    fn die(&mut self) {
        self.table.died();
        self.alive = false;
        for question in &mut self.questions {
            question.open = false;
        }
    }

    /// Whether an answer that was taken counts for anything.
    fn take(&mut self, index: usize, seen: &mut Seen) {
        let question = self.questions[index];
        match self.table.take(question.generation, question.number) {
            Ok(None) => {}
            Err(_) => {
                let present = question.generation == self.table.generation() && self.alive;
                assert!(!present, "an answer is lost: {question:?}");
                self.questions.remove(index);
            }
            Ok(Some(answer)) => {
                assert!(self.alive, "an answer of a carrier that has died");
                assert_eq!(answer, question.number, "another question's answer");
                seen.taken += 1;
                if question.slot.is_some() {
                    self.questions[index].copying = true;
                } else {
                    self.table.lent(question.generation, question.number);
                    self.lent.push((question.generation, question.number));
                    self.questions.remove(index);
                }
            }
        }
    }

    /// The carrier says something.
    fn answer(&mut self, number: u64, seen: &mut Seen) {
        let generation = self.table.generation();
        let open = self
            .questions
            .iter_mut()
            .find(|one| one.number == number && one.generation == generation && one.open);
        let known = open.map(|one| one.open = false).is_some();
        match self.table.answered(generation, number, number) {
            Next::Wake | Next::Nothing => {
                assert!(known || !self.alive, "what nobody asked was answered");
            }
            Next::End(lent) => {
                assert_eq!(lent, number);
                seen.ended_for_nobody += 1;
            }
            Next::Kill => {
                assert!(!known, "a right answer is taken for nonsense");
                seen.killed += 1;
                self.die();
            }
        }
        self.questions.retain(|one| one.wanted || one.open);
    }

    fn read(&mut self, seen: &mut Seen) {
        let Some((number, slot)) = self.table.read() else {
            seen.full += 1;
            return;
        };
        let generation = self.table.generation();
        let is_used = |one: &Question| {
            one.slot == Some(slot) && one.generation == generation && (one.open || one.copying)
        };
        seen.shared += usize::from(self.alive && self.questions.iter().any(is_used));
        self.questions.push(Question {
            generation,
            number,
            slot: Some(slot),
            wanted: true,
            open: true,
            copying: false,
        });
    }

    fn after(&self, step: impl FnOnce(&mut World)) -> World {
        let mut next = self.clone();
        step(&mut next);
        next
    }

    fn next(&self, seen: &mut Seen) -> Vec<World> {
        let mut next = Vec::new();
        for &(generation, number) in &self.lent {
            let is_lent = self.table.is_lent(generation, number);
            let may_be = self.alive && generation == self.table.generation();
            assert!(!is_lent || may_be, "lent by a carrier that has died");
            next.push(self.after(|world| {
                assert_eq!(world.table.end(generation, number), is_lent);
                world.lent.retain(|one| *one != (generation, number));
            }));
        }
        if self.left.reads > 0 {
            next.push(self.after(|world| {
                world.left.reads -= 1;
                world.read(seen);
            }));
        }
        if self.left.lends > 0 {
            next.push(self.after(|world| {
                world.left.lends -= 1;
                let number = world.table.lend();
                world.questions.push(Question {
                    generation: world.table.generation(),
                    number,
                    slot: None,
                    wanted: true,
                    open: true,
                    copying: false,
                });
            }));
        }
        for (index, &question) in self.questions.iter().enumerate() {
            if question.wanted && !question.copying {
                next.push(self.after(|world| world.take(index, seen)));
                next.push(self.after(|world| {
                    let lent = world.table.give_up(question.generation, question.number);
                    seen.ended_for_nobody += usize::from(lent.is_some());
                    world.questions[index].wanted = false;
                    world.questions.retain(|one| one.wanted || one.open);
                }));
            }
            if question.copying {
                next.push(self.after(|world| {
                    if let Some(slot) = question.slot {
                        world.table.free(question.generation, slot);
                    }
                    world.questions.remove(index);
                }));
            }
            if self.alive && question.open {
                next.push(self.after(|world| world.answer(question.number, seen)));
            }
        }
        if self.alive && self.left.lies > 0 {
            // Of every number that was ever used, and of one that was not.
            for number in 0..=u64::from(4 - self.left.reads.min(3)) {
                next.push(self.after(|world| {
                    world.left.lies -= 1;
                    world.answer(number, seen);
                }));
            }
        }
        if self.alive && self.left.deaths > 0 {
            next.push(self.after(|world| {
                world.left.deaths -= 1;
                world.die();
            }));
        }
        if !self.alive {
            next.push(self.after(World::start));
        }
        next
    }
}

fn explore(careful: bool, left: Left) -> Seen {
    let mut seen = Seen::default();
    let first = World::begin(careful, left);
    let mut known = HashSet::from([first.clone()]);
    let mut open = VecDeque::from([first]);
    while let Some(world) = open.pop_front() {
        if seen.shared > 0 {
            break;
        }
        for next in world.next(&mut seen) {
            if known.insert(next.clone()) {
                open.push_back(next);
            }
        }
    }
    seen.states = known.len();
    seen
}

const LEFT: Left = Left {
    reads: 3,
    lends: 1,
    deaths: 1,
    lies: 1,
};

#[test]
fn no_carrier_makes_two_reads_share_a_slot_or_an_answer_count_twice() {
    let seen = explore(true, LEFT);
    println!("{seen:?}");
    assert_eq!(seen.shared, 0);
    // The model is worth nothing if these do not happen in it.
    assert!(
        seen.taken > 0 && seen.killed > 0 && seen.ended_for_nobody > 0 && seen.full > 0,
        "{seen:?}"
    );
    assert!(seen.states > 1_000, "{seen:?}");
}

#[test]
fn a_gateway_that_frees_a_slot_before_the_answer_shares_it() {
    let seen = explore(false, LEFT);
    assert!(seen.shared > 0, "the control must fail: {seen:?}");
}

//! Questions to a carrier, what it lends, and the slots that it reads into. Pure: no process, no
//! socket, no clock.
//!
//! ```text
//! question:  Asked ──answer──► Answered ──taken──► (gone)
//!              │ given up          ▲ none of another carrier's, and no second one
//!              ▼                   │
//!           Unwanted ──answer──► (gone): its slot is free, what it lent is to be ended
//!
//! slot:      Free ──read──► of a question ──answer──► of who asked ──freed──► Free
//! ```
//!
//! A slot is not free before its read was answered: the carrier may be writing to it, whether the
//! answer is wanted or not. With a carrier all its questions, lendings and slots end; the next one
//! has slots of its own.

// Tests: `crates/gateway/tests/carrier.rs`.

use std::collections::{BTreeMap, BTreeSet};

/// Which carrier, counted from 1: an answer of one that has died answers nothing.
pub type Generation = u64;

/// What an answer is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Purpose {
    Call,
    Lend,
    Read { slot: usize },
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Asked<A> {
    purpose: Purpose,
    wanted: bool,
    answer: Option<A>,
}

/// What is to be done because of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use]
pub enum Next {
    /// Somebody waits for it.
    Wake,
    /// It lent something to nobody, which is to be ended.
    End(u64),
    /// Nothing: it was not wanted.
    Nothing,
    /// It answers no question: the carrier makes no sense.
    Kill,
}

/// See the module. `A` is an answer.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Table<A> {
    generation: Generation,
    is_alive: bool,
    number: u64,
    asked: BTreeMap<u64, Asked<A>>,
    lent: BTreeSet<u64>,
    free: BTreeSet<usize>,
    slots: usize,
    careful: bool,
}

impl<A> Table<A> {
    /// Begins without a carrier, and with so many slots for each.
    pub fn new(slots: usize) -> Table<A> {
        Table {
            generation: 0,
            is_alive: false,
            number: 0,
            asked: BTreeMap::new(),
            lent: BTreeSet::new(),
            free: BTreeSet::new(),
            slots,
            careful: true,
        }
    }

    /// Frees a slot as soon as its read is given up: a control of tests.
    #[doc(hidden)]
    pub fn careless(mut self) -> Table<A> {
        self.careful = false;
        self
    }

    /// Begins with a carrier.
    pub fn started(&mut self) -> Generation {
        self.died();
        self.generation += 1;
        self.is_alive = true;
        self.free = (0..self.slots).collect();
        self.generation
    }

    /// Returns which carrier is the present one, or was the last.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Ends with a carrier: no question of it will be answered.
    pub fn died(&mut self) {
        self.is_alive = false;
        self.asked.clear();
        self.lent.clear();
        self.free.clear();
    }

    fn ask(&mut self, purpose: Purpose) -> u64 {
        self.number += 1;
        let asked = Asked {
            purpose,
            wanted: true,
            answer: None,
        };
        self.asked.insert(self.number, asked);
        self.number
    }

    /// Numbers a question.
    pub fn call(&mut self) -> u64 {
        self.ask(Purpose::Call)
    }

    /// Numbers a question to lend.
    pub fn lend(&mut self) -> u64 {
        self.ask(Purpose::Lend)
    }

    /// Numbers a question to read, and takes a slot for it; none if all are taken.
    pub fn read(&mut self) -> Option<(u64, usize)> {
        let slot = self.free.pop_first()?;
        Some((self.ask(Purpose::Read { slot }), slot))
    }

    /// Takes an answer.
    pub fn answered(&mut self, generation: Generation, number: u64, answer: A) -> Next {
        if generation != self.generation || !self.is_alive {
            return Next::Nothing;
        }
        let Some(asked) = self.asked.get_mut(&number) else {
            return Next::Kill;
        };
        if asked.answer.is_some() {
            return Next::Kill;
        }
        if asked.wanted {
            asked.answer = Some(answer);
            return Next::Wake;
        }
        let purpose = asked.purpose;
        self.asked.remove(&number);
        match purpose {
            Purpose::Lend => Next::End(number),
            Purpose::Read { slot } => {
                self.free.insert(slot);
                Next::Nothing
            }
            Purpose::Call => Next::Nothing,
        }
    }

    /// Takes the answer to a question, once.
    ///
    /// # Errors
    ///
    /// [`Gone`] for a question of a carrier that has died.
    pub fn take(&mut self, generation: Generation, number: u64) -> Result<Option<A>, Gone> {
        if generation != self.generation {
            return Err(Gone);
        }
        let asked = self.asked.get_mut(&number).ok_or(Gone)?;
        let answer = asked.answer.take();
        if answer.is_some() {
            self.asked.remove(&number);
        }
        Ok(answer)
    }

    /// Notes that a question to lend was answered with yes.
    pub fn lent(&mut self, generation: Generation, number: u64) {
        if generation == self.generation && self.is_alive {
            self.lent.insert(number);
        }
    }

    /// Frees the slot of a read whose answer was taken.
    pub fn free(&mut self, generation: Generation, slot: usize) {
        if generation == self.generation && self.is_alive {
            self.free.insert(slot);
        }
    }

    /// Wants no answer any more. Returns what was lent by one that nobody took.
    pub fn give_up(&mut self, generation: Generation, number: u64) -> Option<u64> {
        if generation != self.generation {
            return None;
        }
        let asked = self.asked.get_mut(&number)?;
        asked.wanted = false;
        let (purpose, is_answered) = (asked.purpose, asked.answer.is_some());
        if let Purpose::Read { slot } = purpose
            && (is_answered || !self.careful)
        {
            self.free.insert(slot);
        }
        if is_answered {
            self.asked.remove(&number);
        }
        (is_answered && purpose == Purpose::Lend).then_some(number)
    }

    /// Says whether something is lent yet.
    pub fn is_lent(&self, generation: Generation, number: u64) -> bool {
        generation == self.generation && self.lent.contains(&number)
    }

    /// Ends a lending, and says whether the carrier must be told.
    pub fn end(&mut self, generation: Generation, number: u64) -> bool {
        generation == self.generation && self.lent.remove(&number)
    }
}

/// The carrier that was asked has died.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gone;

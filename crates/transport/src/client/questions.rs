//! What a process has asked another, and when each question is sent again.
//!
//! | state of a row | means | ends |
//! |---|---|---|
//! | asked | due at once, then repeated after 100 ms, doubling to 1 s; after 10 ms while the socket has no room | removed, or no longer asked |
//! | not asked | what it holds is its protocol's: an answer, a refusal, an action. Not sent | removed, asked |
//!
//! A row has a key, of which there is one, and a number, which its messages carry and its answer
//! repeats. The number is used once, so an answer to a row that was replaced is known as late.
//!
//! The channel may lose any message, delay it, and deliver it again by a repeat. A connection may be
//! lost: [`ask_all`](Questions::ask_all) sends every open question to the next one.
//!
//! Changes of a row are made by [`get_mut`](Questions::get_mut) and end with
//! [`plan`](Questions::plan). Checked by the model below, and by the models of the protocols that
//! are built on it.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::hash::Hash;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

/// The time after which a question is repeated first, and the longest between two repeats.
const REPEAT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// How long to wait when the socket has no room, or the other side none for the answer.
const SOON: Duration = Duration::from_millis(10);

/// A message that could not be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unsent;

/// What a protocol keeps of a question.
pub trait Row {
    /// Says whether it is sent until this changes.
    fn is_asked(&self) -> bool;

    /// Says when it has to be looked at beside that.
    fn expires(&self) -> Option<Instant> {
        None
    }
}

/// A row, and when it is sent.
#[derive(Debug)]
pub struct Entry<R> {
    /// Its number.
    pub born: u64,
    row: R,
    repeat: Instant,
    pause: Duration,
    /// Where it stands in the schedule.
    due: Option<Due>,
}

impl<R> Entry<R> {
    /// Has the question repeated in a moment: the other side has no room for the answer.
    pub fn repeat_soon(&mut self, now: Instant) {
        self.repeat = now + SOON;
    }
}

impl<R> Deref for Entry<R> {
    type Target = R;

    fn deref(&self) -> &R {
        &self.row
    }
}

impl<R> DerefMut for Entry<R> {
    fn deref_mut(&mut self) -> &mut R {
        &mut self.row
    }
}

/// A time, and the number of the row.
type Due = (Instant, u64);

/// The table.
#[derive(Debug)]
pub struct Questions<K, R> {
    rows: HashMap<K, Entry<R>>,
    schedule: BTreeMap<Due, K>,
    last: u64,
}

impl<K, R> Default for Questions<K, R> {
    fn default() -> Questions<K, R> {
        Questions {
            rows: HashMap::new(),
            schedule: BTreeMap::new(),
            last: 0,
        }
    }
}

impl<K: Copy + Eq + Hash, R: Row> Questions<K, R> {
    /// Returns a number that was not used before.
    pub fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Returns the number that was used last.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Makes a row, which replaces that of the same key. If it is asked it is due at once.
    pub fn begin(&mut self, key: K, born: u64, row: R, now: Instant) {
        self.remove(key);
        let entry = Entry {
            born,
            row,
            repeat: now,
            pause: REPEAT.0,
            due: None,
        };
        self.rows.insert(key, entry);
        self.plan(key);
    }

    /// Ends a row.
    pub fn remove(&mut self, key: K) -> Option<R> {
        let entry = self.rows.remove(&key)?;
        entry.due.map(|due| self.schedule.remove(&due));
        Some(entry.row)
    }

    /// Returns a row.
    pub fn get(&self, key: K) -> Option<&Entry<R>> {
        self.rows.get(&key)
    }

    /// Returns a row, to be changed. Then call [`plan`](Questions::plan).
    pub fn get_mut(&mut self, key: K) -> Option<&mut Entry<R>> {
        self.rows.get_mut(&key)
    }

    /// Brings the schedule up to date with a row.
    pub fn plan(&mut self, key: K) {
        let Some(entry) = self.rows.get_mut(&key) else {
            return;
        };
        let repeat = entry.row.is_asked().then_some(entry.repeat);
        let due = [repeat, entry.row.expires()]
            .into_iter()
            .flatten()
            .min()
            .map(|at| (at, entry.born));
        if entry.due != due {
            entry.due.take().map(|due| self.schedule.remove(&due));
            entry.due = due;
            due.map(|due| self.schedule.insert(due, key));
        }
    }

    /// Lists the rows.
    pub fn iter(&self) -> impl Iterator<Item = (K, &Entry<R>)> {
        self.rows.iter().map(|(&key, entry)| (key, entry))
    }

    /// Lists the rows that are due, the first due first.
    pub fn due(&self, now: Instant) -> impl Iterator<Item = (K, &Entry<R>)> {
        self.schedule
            .iter()
            .take_while(move |((at, _), _)| *at <= now)
            .map(|(_, key)| (*key, &self.rows[key]))
    }

    /// Returns the row that is due first.
    pub fn first_due(&self, now: Instant) -> Option<(K, &Entry<R>)> {
        self.due(now).next()
    }

    /// Says when the next row is due.
    pub fn next_due(&self) -> Option<Instant> {
        self.schedule.first_key_value().map(|(&(at, _), _)| at)
    }

    /// Notes that a question was sent, or that there was no room for it.
    pub fn note_sent(&mut self, key: K, sent: Result<(), Unsent>, now: Instant) {
        let Some(entry) = self.rows.get_mut(&key) else {
            return;
        };
        if sent.is_err() {
            entry.repeat = now + SOON;
        } else {
            entry.repeat = now + entry.pause;
            entry.pause = (entry.pause * 2).min(REPEAT.1);
        }
        self.plan(key);
    }

    /// Has every open question sent at once: the connection is another.
    pub fn ask_all(&mut self, now: Instant) {
        for key in self.rows.keys().copied().collect::<Vec<_>>() {
            if let Some(entry) = self.rows.get_mut(&key) {
                entry.repeat = now;
                entry.pause = REPEAT.0;
            }
            self.plan(key);
        }
    }

    /// Says whether there is no row, and none is due.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.schedule.is_empty()
    }
}

#[cfg(test)]
mod model {
    use super::*;
    use proptest::prelude::*;

    /// A question: open until it is answered.
    #[derive(Debug)]
    struct Open(bool);

    impl Row for Open {
        fn is_asked(&self) -> bool {
            self.0
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Ask(u8),
        /// The time passes, and what is due is sent. The channel has room for so many messages.
        Send(u64, usize),
        /// The other side answers the oldest message on its way, or the latest is lost.
        Arrive(bool),
        /// The answer is read.
        Take(u8),
        /// The connection is lost with all that is on its way, and there is another.
        Reconnect,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0u8..4).prop_map(Step::Ask),
            (0u64..1_500, 0usize..4).prop_map(|(ms, room)| Step::Send(ms, room)),
            any::<bool>().prop_map(Step::Arrive),
            (0u8..4).prop_map(Step::Take),
            Just(Step::Reconnect),
        ]
    }

    struct World {
        questions: Questions<u8, Open>,
        now: Instant,
        /// Keys and numbers on their way.
        channel: Vec<(u8, u64)>,
        /// When each number was sent last, by one connection.
        sent: HashMap<u64, Instant>,
    }

    impl World {
        fn send(&mut self, room: usize) {
            let mut room = room;
            while let Some((key, entry)) = self.questions.first_due(self.now) {
                let born = entry.born;
                let unsent = room == 0;
                if !unsent {
                    room -= 1;
                    let last = self.sent.insert(born, self.now);
                    let pause = last.map(|last| self.now - last);
                    assert!(
                        pause.is_none_or(|pause| pause >= REPEAT.0),
                        "sent again after {pause:?}"
                    );
                    assert!(
                        self.questions.get(key).is_some_and(|entry| entry.0),
                        "an answered question is sent"
                    );
                    self.channel.push((key, born));
                }
                let sent = if unsent { Err(Unsent) } else { Ok(()) };
                self.questions.note_sent(key, sent, self.now);
                if unsent {
                    break;
                }
            }
        }

        fn arrive(&mut self) {
            if self.channel.is_empty() {
                return;
            }
            let (key, born) = self.channel.remove(0);
            let row = self.questions.get_mut(key);
            if let Some(row) = row.filter(|row| row.born == born) {
                row.0 = false;
            }
            self.questions.plan(key);
        }

        fn step(&mut self, step: &Step) {
            match *step {
                // A later question of a key replaces the one before.
                Step::Ask(key) => {
                    let born = self.questions.number();
                    self.questions.begin(key, born, Open(true), self.now);
                }
                Step::Send(ms, room) => {
                    self.now += Duration::from_millis(ms);
                    self.send(room);
                }
                Step::Arrive(true) => self.arrive(),
                Step::Arrive(false) => self.channel.truncate(self.channel.len().saturating_sub(1)),
                Step::Take(key) => {
                    let is_open = self.questions.get(key).is_none_or(|entry| entry.0);
                    if !is_open {
                        self.questions.remove(key);
                    }
                }
                Step::Reconnect => {
                    self.channel.clear();
                    self.sent.clear();
                    self.questions.ask_all(self.now);
                }
            }
        }
    }

    proptest! {
        /// Whatever is lost, no question is sent too often or after its answer, and once the
        /// channel delivers, each is answered within a second.
        #[test]
        fn each_question_is_repeated_until_it_is_answered(
            steps in proptest::collection::vec(step(), 0..80),
        ) {
            let mut world = World {
                questions: Questions::default(),
                now: Instant::now(),
                channel: Vec::new(),
                sent: HashMap::new(),
            };
            for step in &steps {
                world.step(step);
                let open = world.questions.iter().filter(|(_, entry)| entry.0).count();
                prop_assert_eq!(open, world.questions.schedule.len(), "each open question is due once");
                if matches!(step, Step::Reconnect) {
                    prop_assert_eq!(open, world.questions.due(world.now).count(), "a new connection is asked at once");
                }
            }
            world.step(&Step::Send(1_000, usize::MAX));
            while !world.channel.is_empty() {
                world.arrive();
            }
            prop_assert!(world.questions.iter().all(|(_, entry)| !entry.0));
            for key in 0..4 {
                world.step(&Step::Take(key));
            }
            prop_assert!(world.questions.is_empty());
        }
    }
}

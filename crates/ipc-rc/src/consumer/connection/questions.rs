//! What a participant has asked its producer, or an observer a session: one row for each question,
//! with one life.
//!
//! | state | means | ends |
//! |---|---|---|
//! | asked | sent, or about to be; repeated after 100 ms, doubling to 1 s | answered, refused, reset |
//! | answered | the producer's answer is here, until all who wait have read it | acting (a region), reset |
//! | refused | the producer's no is here, likewise | reset |
//! | acting | a thread maps the region, or unmaps it: no message changes the row | reset, or asked: `Unmapped` |
//! | reset | there is no row | asked |
//!
//! | step | who | what | sent |
//! |---|---|---|---|
//! | ask | claimant | joins the row, or makes it; one more waits | the question |
//! | look | claimant | reads the answer; of a region's waiters one takes it and acts | |
//! | renew | claimant of a broadcast | another claim used the answer up: the row is replaced by one that is asked | the question |
//! | leave | claimant | one less waits; of nobody, the row is withdrawn, unless it is kept for a while | |
//! | withdraw | claimant; thread when the while is over | reset; a region's row asks `Unmapped` instead | `Unmapped` |
//! | repeat | thread, or who waits | each row that is due | the same question |
//! | hear | thread, or who waits | asked -> answered, refused or reset | |
//! | mapped | who acted | reset | |
//! | unmapped | who acted | asked: `Unmapped` | `Unmapped` |
//! | abandon | claimant | the row is kept no longer; a ticket's asks `GiveBack` unless a claim waits for it | `GiveBack` |
//! | fetched, withdraw of a deposit or fetch | claimant | asked: `EndDeposit` | `EndDeposit` |
//! | end | thread, when the producer is gone | all rows but those acting are reset | |
//!
//! # Why a region's row is never forgotten in silence
//!
//! The producer pins a region before it says how to map it, so that nobody frees memory that
//! somebody maps. From the first `MapRegion` that may have left until a `Noted` answers `Unmapped`,
//! the producer may have pinned. `MapRegion` and `Unmapped` are therefore two questions of one key:
//! asking one replaces the other, and neither overtakes the other. Refused rows end by `Unmapped`
//! too: the producer may have pinned at an earlier copy of the same question.
//!
//! # A ticket that is abandoned
//!
//! A lease that a ticket gave, and that no claim takes, would hold its block for the time to live.
//! So `abandon` asks the producer to take it back, whether there is a row or not: the answer may be
//! on its way to a claim that gave up before. `ClaimTickets` and `GiveBack` are two questions of one
//! key, like those of a region: a grant for a copy that was sent before is taken back, and a claim
//! that is made again is asked about after it. What is claimed stays, and what was never granted
//! costs no claim. A connection that ends takes back what is unclaimed by itself.
//!
//! A broadcast grants a lease for each question that comes after a claim, also for a repeat that was
//! on its way. An answer without a row therefore asks `GiveBack` if it grants a lease of a
//! broadcast; a claim whose lease that takes back asks again.
//!
//! # A deposit and a fetch
//!
//! The producer keeps what was deposited from the first `Deposit` that may have left, and gives it
//! to one fetch until that is over. So `EndDeposit` follows each fetch, with what became of it, and each
//! deposit that was withdrawn or refused: a later copy of a refused question may have been granted. It names the number of the question that it
//! ends, and has one of its own.
//!
//! # Which answer counts
//!
//! A row is *born* with a number of the participant's one counter, which its messages carry and the
//! answer repeats. An answer counts if its number is the row's. Otherwise a late answer to a
//! question that was withdrawn would map a region that the producer is about to unpin. Tickets are
//! asked for by the batch; a ticket's answer counts from the row's birth on.
//!
//! # What the channel may do
//!
//! Lose any message, delay it, and deliver it again by a repeat. It keeps the order: one socket,
//! and both sides send under a lock (this table's). Reordering is not covered.
//!
//! Checked by `questions_model.rs`: random histories of two claimants, a thread and a producer,
//! with every message lost, delayed, repeated or refused; `ci/mutants.d/question-*.patch` weaken
//! this file, and each fails it.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use gpu_api::RegionId;

use crate::consumer::connection::question::{Answer, File, Key, No, Question};
use transport::client::{self, Entry, Unsent};
use transport::wire::lease_address::LeaseAddress;
use transport::wire::message::{DepositId, MOST_TICKETS, Outcome, ToProducer};

/// How long a question is kept for a claim that would have had to wait.
pub(crate) const KEPT: Duration = Duration::from_secs(30);

/// What a claimant finds.
#[derive(Debug)]
#[must_use]
pub(crate) enum Look {
    /// No answer yet.
    Wait,
    /// A region's answer, which the caller acts on: it ends by [`mapped`](Questions::mapped) or
    /// [`unmapped`](Questions::unmapped). Or what one claimant alone waits for: a descriptor, a
    /// report, a snapshot.
    Take(Answer),
    /// What a ticket gives.
    Ticket(Outcome),
    /// The answer to a question that named this lease, if it named one.
    Refused(No, Option<LeaseAddress>),
    /// The row has ended: check what was wanted, and ask again.
    Gone,
}

/// A claim's interest in an answer, from when it first looks until it leaves.
#[derive(Debug)]
pub(crate) struct Interest {
    key: Key,
    question: Question,
    /// The number of the row that was asked.
    born: Option<u64>,
}

impl Interest {
    /// Begins, and asks nothing yet.
    pub fn new(key: Key, question: Question) -> Interest {
        Interest {
            key,
            question,
            born: None,
        }
    }

    /// Looks for the answer, and asks if no row for it is open.
    pub fn look(&mut self, questions: &mut Questions, now: Instant) -> Look {
        let seen = self
            .born
            .map_or(Look::Gone, |born| questions.look(self.key, born, now));
        if !matches!(seen, Look::Gone) {
            return seen;
        }
        let born = questions.ask(self.key, self.question.clone(), now);
        self.born = Some(born);
        // A thread that joins a row finds the answer that is there.
        questions.look(self.key, born, now)
    }

    /// Asks anew, whatever was answered.
    pub fn ask_anew(&mut self, questions: &mut Questions, now: Instant) {
        if let Some(born) = self.born {
            questions.leave(self.key, born, true, now);
        }
        self.born = Some(questions.ask(self.key, self.question.clone(), now));
    }

    /// Asks once more, because the answer was used up by another claim.
    pub fn renew(&mut self, questions: &mut Questions, now: Instant) {
        if let Some(born) = self.born {
            self.born = Some(questions.renew(self.key, born, self.question.clone(), now));
        }
    }

    /// Ends. A row that is `kept` is there for another try.
    pub fn leave(&self, questions: &mut Questions, kept: bool, now: Instant) {
        if let Some(born) = self.born {
            questions.leave(self.key, born, kept, now);
        }
    }
}

#[derive(Debug)]
enum AskState {
    Asked,
    Answered(Answer),
    Refused(No),
    Acting,
}

#[derive(Debug)]
struct Row {
    question: Question,
    state: AskState,
    /// How many claims wait for it.
    waiting: u32,
    /// Kept until then without a waiting claim.
    kept: Option<Instant>,
}

impl client::Row for Row {
    fn is_asked(&self) -> bool {
        matches!(self.state, AskState::Asked)
    }

    fn expires(&self) -> Option<Instant> {
        self.kept.filter(|_| self.waiting == 0)
    }
}

/// What a participant has asked.
#[derive(Debug, Default)]
pub(crate) struct Questions {
    table: client::Questions<Key, Row>,
    /// Regions that are mapped for ever, because the driver did not unmap them.
    leaked: HashSet<RegionId>,
    ended: bool,
}

impl Questions {
    /// Returns a key for a wish.
    pub fn wish_key(&mut self) -> Key {
        Key::Wish(self.table.number())
    }

    /// Waits for an answer, together with all other waiters for it; returns the row's number.
    pub fn ask(&mut self, key: Key, question: Question, now: Instant) -> u64 {
        let row = self.join(key, question, now);
        row.waiting += 1;
        let born = row.born;
        self.table.plan(key);
        born
    }

    /// Replaces a row whose answer was used up, unless another claim did, and waits for the next
    /// answer. Other claims that waited for the old row find it gone, and join
    /// the new one.
    pub fn renew(&mut self, key: Key, born: u64, question: Question, now: Instant) -> u64 {
        if self.row(key, born).is_some() {
            self.begin(key, question.clone(), AskState::Asked, now);
        }
        self.ask(key, question, now)
    }

    /// Asks ahead, for a claim to come.
    pub fn ask_ahead(&mut self, key: Key, question: Question, now: Instant) {
        self.join(key, question, now).kept = Some(now + KEPT);
        self.table.plan(key);
    }

    /// Asks the producer to note that the participant goes.
    pub fn say_goodbye(&mut self, now: Instant) {
        self.join(Key::Goodbye, Question::Goodbye, now);
    }

    /// Finds the row of a question, or makes it.
    fn join(&mut self, key: Key, question: Question, now: Instant) -> &mut Entry<Row> {
        let joins = self.table.get(key).is_some_and(|row| match row.state {
            // Two questions of one key: the later one replaces the other.
            AskState::Asked => row.question.undoes() == question.undoes(),
            AskState::Answered(_) | AskState::Acting => true,
            AskState::Refused(_) => false,
        });
        if !joins {
            self.begin(key, question, AskState::Asked, now);
        }
        self.table
            .get_mut(key)
            .expect("it was there, or was just made")
    }

    /// Replaces the row there.
    fn begin(&mut self, key: Key, question: Question, state: AskState, now: Instant) {
        let born = match key {
            // Its end is another question: a late answer to the wish must not count for it.
            Key::Wish(number) if !question.undoes() => number,
            _ => self.table.number(),
        };
        let row = Row {
            question,
            state,
            waiting: 0,
            kept: None,
        };
        self.table.begin(key, born, row, now);
    }

    fn row(&mut self, key: Key, born: u64) -> Option<&mut Entry<Row>> {
        self.table.get_mut(key).filter(|row| row.born == born)
    }

    /// Says what became of a question that the caller asked and has not left.
    pub fn look(&mut self, key: Key, born: u64, now: Instant) -> Look {
        let Some(row) = self.row(key, born) else {
            return Look::Gone;
        };
        match (&row.state, &row.question) {
            (AskState::Asked | AskState::Acting, _) => Look::Wait,
            (AskState::Answered(Answer::Ticket(outcome)), _) => Look::Ticket(*outcome),
            (AskState::Refused(no), Question::Map { lease, .. }) => {
                Look::Refused(no.clone(), Some(*lease))
            }
            (AskState::Refused(no), _) => Look::Refused(no.clone(), None),
            (AskState::Answered(_), _) => {
                // A region's answer is acted on. Any other is the end of its question.
                let fetched = match row.question {
                    Question::Fetch { id } => Some(id),
                    _ => None,
                };
                let state = match key {
                    Key::Region(_) => Some(std::mem::replace(&mut row.state, AskState::Acting)),
                    _ => self.table.remove(key).map(|row| row.state),
                };
                self.table.plan(key);
                if let Some(id) = fetched {
                    // It has arrived: the producer keeps it no longer.
                    self.end_deposit(key, id, false, now);
                }
                if let Some(AskState::Answered(answer)) = state {
                    Look::Take(answer)
                } else {
                    Look::Wait
                }
            }
        }
    }

    /// Waits no more: the claim is over, or its deadline; or it would have had to wait, and is
    /// `kept` for another try.
    pub fn leave(&mut self, key: Key, born: u64, kept: bool, now: Instant) {
        let Some(row) = self.row(key, born) else {
            return;
        };
        row.waiting -= 1;
        row.kept = kept
            .then(|| now + KEPT)
            .or(row.kept.filter(|_| row.waiting > 0));
        if row.waiting == 0 && row.kept.is_none() {
            self.withdraw(key, now);
        }
        self.table.plan(key);
    }

    /// Gives a claim up: an answer that was kept for another try is withdrawn, and the producer
    /// takes back what a ticket gave, unless another claim waits for it.
    pub fn abandon(&mut self, key: Key, now: Instant) {
        self.withdraw_kept(key, now);
        let is_ticket = matches!(key, Key::Ticket(_));
        let stays = |row: &Entry<Row>| row.waiting > 0 || row.question == Question::GiveBack;
        if is_ticket && !self.ended && !self.table.get(key).is_some_and(stays) {
            self.begin(key, Question::GiveBack, AskState::Asked, now);
        }
    }

    /// Withdraws an answer that was kept for another try.
    fn withdraw_kept(&mut self, key: Key, now: Instant) {
        let Some(row) = self.table.get_mut(key) else {
            return;
        };
        if row.kept.take().is_some() && row.waiting == 0 {
            self.withdraw(key, now);
        }
        self.table.plan(key);
    }

    /// Withdraws all kept answers: no further try comes.
    pub fn abandon_all(&mut self, now: Instant) {
        let kept = self.table.iter().filter(|(_, row)| row.kept.is_some());
        for key in kept.map(|(key, _)| key).collect::<Vec<_>>() {
            self.withdraw_kept(key, now);
        }
    }

    /// Ends a question that nobody waits for.
    fn withdraw(&mut self, key: Key, now: Instant) {
        let Some(row) = self.table.get(key) else {
            return;
        };
        match (key, &row.state, &row.question) {
            (Key::Region(_), AskState::Acting, _)
            | (
                _,
                _,
                Question::Unmapped
                | Question::GiveBack
                | Question::EndDeposit { .. }
                | Question::Goodbye,
            ) => {}
            (Key::Region(region), ..) => self.unmapped(region, now),
            // Refused too: a later copy of the question may have been granted.
            (_, _, &Question::Fetch { id }) => self.end_deposit(key, id, true, now),
            (_, _, &Question::Deposit { id, .. }) => self.end_deposit(key, id, false, now),
            _ => drop(self.table.remove(key)),
        }
    }

    /// Has the producer note that a deposit or a fetch is over.
    fn end_deposit(&mut self, key: Key, id: DepositId, returns: bool, now: Instant) {
        if self.ended {
            self.table.remove(key);
        } else {
            let question = Question::EndDeposit { id, returns };
            self.begin(key, question, AskState::Asked, now);
        }
    }

    /// Says that the caller acts on a region, unless another does or asks for it.
    #[must_use]
    pub fn begin_unmap(&mut self, region: RegionId, now: Instant) -> bool {
        let free = self.table.get(Key::Region(region)).is_none();
        if free {
            self.begin(
                Key::Region(region),
                Question::Unmapped,
                AskState::Acting,
                now,
            );
        }
        free
    }

    /// Ends a row: the region is mapped, and stays so until its unmapping is reported.
    pub fn mapped(&mut self, region: RegionId) {
        self.table.remove(Key::Region(region));
    }

    /// Ends a row of which a mapping stays for ever: the producer is never told that there is none.
    pub fn leaked(&mut self, region: RegionId) {
        self.leaked.insert(region);
        self.table.remove(Key::Region(region));
    }

    /// Has the producer note that a region is not mapped.
    pub fn unmapped(&mut self, region: RegionId, now: Instant) {
        if self.ended || self.leaked.contains(&region) {
            self.table.remove(Key::Region(region));
        } else {
            self.begin(
                Key::Region(region),
                Question::Unmapped,
                AskState::Asked,
                now,
            );
        }
    }

    /// Takes in the producer's answer to a question, and gives back what was not asked for.
    pub fn hear(
        &mut self,
        request: u64,
        key: Key,
        said: Result<Answer, No>,
        now: Instant,
    ) -> Option<Result<Answer, No>> {
        let Some(row) = self
            .table
            .get_mut(key)
            .filter(|row| matches!(row.state, AskState::Asked))
        else {
            self.give_back_unasked(key, &said, now);
            return Some(said);
        };
        let counts = if row.question == Question::Ticket {
            request >= row.born
        } else {
            request == row.born
        };
        if !counts || !row.question.is_answered_by(&said) {
            return Some(said);
        }
        match said {
            Ok(Answer::Ticket(Outcome::Later)) => row.repeat_soon(now),
            // Who deposits waits for it.
            Ok(Answer::Done) if !matches!(row.question, Question::Deposit { .. }) => {
                self.table.remove(key);
                return None;
            }
            Ok(answer) => row.state = AskState::Answered(answer),
            Err(no) => row.state = AskState::Refused(no),
        }
        if row.waiting == 0 && row.kept.is_none() && !matches!(row.state, AskState::Asked) {
            self.withdraw(key, now);
        }
        self.table.plan(key);
        None
    }

    /// Has the producer take back what a broadcast granted to a copy of a question that was
    /// answered before: each question that comes after a claim gets a lease, and this one has no
    /// claimant.
    fn give_back_unasked(&mut self, key: Key, said: &Result<Answer, No>, now: Instant) {
        let granted = matches!(
            said,
            Ok(Answer::Ticket(Outcome::Granted(granted))) if granted.again
        );
        if granted && !self.ended && self.table.get(key).is_none() {
            self.begin(key, Question::GiveBack, AskState::Asked, now);
        }
    }

    /// Finds the question that a message without a key answers.
    pub fn key_of(&self, request: u64) -> Option<Key> {
        self.table
            .iter()
            .find(|(_, row)| row.born == request)
            .map(|(key, _)| key)
    }

    /// Sends the messages that are due, and withdraws answers that were kept long enough.
    pub fn send_due(
        &mut self,
        now: Instant,
        mut send: impl FnMut(&ToProducer, Option<&File>) -> Result<(), Unsent>,
    ) {
        while let Some((key, row)) = self.table.first_due(now) {
            let born = row.born;
            if row.waiting == 0 && row.kept.is_some_and(|kept| kept <= now) {
                self.withdraw_kept(key, now);
                continue;
            }
            let together = match (key, &row.question) {
                (_, Question::Ticket) => self.tickets_due(now),
                _ => ArrayVec::from_iter([key]),
            };
            let file = match &row.question {
                Question::Deposit { file, .. } => Some(file.clone()),
                _ => None,
            };
            let message = self.message(key, born, &together);
            let sent = send(&message, file.as_ref());
            for key in together {
                self.table.note_sent(key, sent, now);
            }
            if sent.is_err() {
                break;
            }
        }
    }

    /// Lists tickets that are due, as many as a message takes.
    fn tickets_due(&self, now: Instant) -> ArrayVec<Key, MOST_TICKETS> {
        let due = self.table.due(now).filter(|(_, row)| {
            row.question == Question::Ticket && matches!(row.state, AskState::Asked)
        });
        due.map(|(key, _)| key).take(MOST_TICKETS).collect()
    }

    fn message(&mut self, key: Key, born: u64, together: &[Key]) -> ToProducer {
        let question = &self.table.get(key).expect("it is due").question;
        match (key, question) {
            (Key::Region(region), &Question::Map { access, lease }) => ToProducer::MapRegion {
                request: born,
                region,
                access,
                lease,
            },
            (Key::Region(region), _) => ToProducer::Unmapped {
                request: born,
                region,
            },
            (Key::File(index), _) => ToProducer::AskFile {
                request: born,
                index,
            },
            (
                Key::Wish(_),
                Question::Forward {
                    lease,
                    part: (offset, len),
                    heir,
                    user,
                },
            ) => ToProducer::Forward {
                request: born,
                settled: self.settled(),
                lease: *lease,
                offset: *offset,
                len: *len,
                heir: *heir,
                user: **user,
            },
            (Key::Wish(_), &Question::Deposit { id, .. }) => ToProducer::Deposit {
                request: born,
                settled: self.settled(),
                id,
            },
            (Key::Wish(_), &Question::Fetch { id }) => ToProducer::Fetch { request: born, id },
            (Key::Wish(of), &Question::EndDeposit { id, returns }) => ToProducer::EndDeposit {
                request: born,
                id,
                of,
                returns,
            },
            (Key::Wish(_) | Key::Goodbye, _) => ToProducer::Bye { request: born },
            (Key::Report(from), _) => ToProducer::Inspect {
                request: born,
                from,
            },
            (Key::Snapshot, _) => ToProducer::TakeSnapshot { request: born },
            (Key::Ticket(ticket), Question::GiveBack) => ToProducer::GiveBack {
                request: born,
                ticket,
            },
            (Key::Ticket(_), _) => {
                let tickets = together.iter().filter_map(|key| {
                    if let Key::Ticket(id) = key {
                        Some(*id)
                    } else {
                        None
                    }
                });
                let tickets = tickets.collect();
                ToProducer::ClaimTickets {
                    request: self.table.number(),
                    tickets,
                }
            }
        }
    }

    /// Returns the number below which no wish waits for its answer.
    fn settled(&self) -> u64 {
        let open = self.table.iter().filter_map(|(key, _)| {
            if let Key::Wish(number) = key {
                Some(number)
            } else {
                None
            }
        });
        open.min().unwrap_or(self.table.last() + 1)
    }

    /// Says when [`send_due`](Questions::send_due) has something to do.
    pub fn next_due(&self) -> Option<Instant> {
        self.table.next_due()
    }

    /// Says whether nothing is asked about regions, and none is being mapped or unmapped.
    pub fn is_at_rest(&self) -> bool {
        !self
            .table
            .iter()
            .any(|(key, _)| matches!(key, Key::Region(_)))
    }

    /// Lists the regions that claims ask how to map, or were told of and have yet to map.
    pub fn asked_regions(&self) -> impl Iterator<Item = RegionId> + '_ {
        self.table
            .iter()
            .filter_map(|(key, row)| match (key, &row.question, &row.state) {
                (
                    Key::Region(region),
                    Question::Map { .. },
                    AskState::Asked | AskState::Answered(_),
                ) => Some(region),
                _ => None,
            })
    }

    /// Says whether a thread maps or unmaps a region.
    pub fn is_anybody_acting(&self) -> bool {
        self.table
            .iter()
            .any(|(_, row)| matches!(row.state, AskState::Acting))
    }

    /// Ends every question: the producer is gone, and answers nothing any more.
    pub fn end(&mut self) {
        self.ended = true;
        let rows = self
            .table
            .iter()
            .filter(|(_, row)| !matches!(row.state, AskState::Acting));
        for key in rows.map(|(key, _)| key).collect::<Vec<_>>() {
            self.table.remove(key);
        }
    }
}

#[cfg(test)]
#[path = "questions_model.rs"]
mod model;

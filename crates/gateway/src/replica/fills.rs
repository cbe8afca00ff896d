//! The replica's questions to fill slots of the origin's ring: see `rings`.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::message::{Fill, LeaseId};
use crate::net::call::{Answer, Asked, Heard, Lent, Question, ask};
use crate::net::key::Gateway;
use crate::net::session::Session;
use crate::step::pass;
use crate::transport::choice::Way;
use crate::transport::ring::{Source, Times};

/// How often one piece is asked for: an answer may be lost.
const MOST_ASKED: u32 = 3;
/// A question while others wait for their answers asks for a quarter of the ring at least, so that
/// about four are on their way: the origin takes about as long to answer for one slot as for
/// several.
const PARTS: usize = 4;

/// The origin's slots, as the replica asks for them.
pub struct Fills {
    session: Session,
    gateway: Gateway,
    lease: LeaseId,
    way: Way,
    patience: Duration,
    /// Bytes that were there from the beginning, in slots of `slot_bytes`.
    filled: u64,
    slot_bytes: u64,
    /// Slots of one question, at least, while another waits for its answer.
    at_least: usize,
    number: u64,
    /// What the next question asks for.
    noted: Vec<Piece>,
    /// Questions without an answer.
    waiting: Vec<Waiting>,
    /// Why no more bytes come.
    failed: Option<String>,
    times: Arc<Times>,
}

/// A slot, and the piece that is wanted in it.
type Piece = (usize, Range<u64>);

/// A question, and how often its pieces were asked for.
struct Waiting {
    asked: Asked,
    since: Instant,
    times: u32,
    pieces: Vec<Piece>,
}

impl Fills {
    /// Begins to ask for pieces under a lease. An answer is waited for as long as `patience`.
    pub fn new(
        session: Session,
        gateway: Gateway,
        lease: LeaseId,
        lent: &Lent,
        patience: Duration,
        times: Arc<Times>,
    ) -> Fills {
        let Lent {
            way,
            filled,
            slot_bytes,
            ..
        } = *lent;
        let at_least = lent.slots.len().div_ceil(PARTS);
        Fills {
            session,
            gateway,
            lease,
            way,
            patience,
            filled,
            slot_bytes,
            at_least,
            number: 0,
            noted: Vec::new(),
            waiting: Vec::new(),
            failed: None,
            times,
        }
    }

    fn ask(&mut self, pieces: Vec<Piece>, times: u32) -> Result<()> {
        self.number += 1;
        let (lease, way, number) = (self.lease, self.way, self.number);
        let wanted = pieces
            .iter()
            .map(|(slot, bytes)| (*slot, bytes.start, bytes.end - bytes.start))
            .collect();
        let question = Question::Fill(Fill {
            lease,
            way,
            number,
            pieces: wanted,
        });
        match ask(&self.session, &self.gateway, &question, self.patience) {
            Ok(asked) => self.waiting.push(Waiting {
                asked,
                since: Instant::now(),
                times,
                pieces,
            }),
            Err(error) => return Err(self.fail(error.to_string())),
        }
        pass("pull.filling");
        Ok(())
    }

    fn fail(&mut self, why: String) -> Error {
        Error::Transfer {
            why: self.failed.get_or_insert(why).clone(),
        }
    }

    /// Hears what was answered.
    fn hear(&mut self) -> Result<()> {
        for waiting in std::mem::take(&mut self.waiting) {
            match waiting.asked.hear() {
                Heard::Answer(answered) if answered.answer == Answer::Is(true) => {
                    let took =
                        u64::try_from(waiting.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
                    self.times.answers.fetch_add(1, Ordering::Relaxed);
                    self.times.answering.fetch_add(took, Ordering::Relaxed);
                }
                Heard::Answer(_) => {
                    return Err(self.fail(format!(
                        "the gateway of {} fills its ring no more",
                        self.gateway.host
                    )));
                }
                Heard::NotYet if waiting.since.elapsed() < self.patience => {
                    self.waiting.push(waiting)
                }
                Heard::NotYet | Heard::Nothing if waiting.times >= MOST_ASKED => {
                    let times = waiting.times;
                    return Err(self.fail(format!(
                        "the gateway of {} was asked {times} times",
                        self.gateway.host
                    )));
                }
                // The former question may come yet: its number is lower than this one's.
                Heard::NotYet | Heard::Nothing => self.ask(waiting.pieces, waiting.times + 1)?,
            }
        }
        Ok(())
    }
}

impl Source for Fills {
    fn fill(&mut self, slot: usize, bytes: Range<u64>) {
        let there =
            bytes.start == self.slot_bytes.saturating_mul(slot as u64) && bytes.end <= self.filled;
        if !there {
            self.noted.push((slot, bytes));
        }
    }

    fn send(&mut self) -> Result<()> {
        if self.failed.is_some() {
            return Ok(());
        }
        self.hear()?;
        // What is noted while an answer is awaited goes with the next question: that answer comes,
        // or is given up.
        if self.noted.is_empty() || (!self.waiting.is_empty() && self.noted.len() < self.at_least) {
            return Ok(());
        }
        let noted = std::mem::take(&mut self.noted);
        self.ask(noted, 1)
    }

    fn filled(&mut self, slot: usize) -> Result<bool> {
        if let Some(why) = &self.failed {
            return Err(Error::Transfer { why: why.clone() });
        }
        let is_of = |piece: &Piece| piece.0 == slot;
        Ok(!self.noted.iter().any(is_of)
            && !self
                .waiting
                .iter()
                .any(|waiting| waiting.pieces.iter().any(is_of)))
    }
}

//! Questions to the producer about tickets and forwarding, and their answers.
//!
//! A question is sent once; whoever needs the answer waits for it, under its own deadline. When a deadline passes the
//! question stays, so that the answer is there when it is asked for again: nothing is lost.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use arrayvec::ArrayVec;
use gpu_api::Error;

use crate::consumer::claim::ClaimError;
use crate::consumer::link::Link;
use channel::trace_point;
use channel::wire::descriptor::Descriptor;
use channel::wire::lease_address::LeaseAddress;
use channel::wire::message::{Granted, Heir, MOST_TICKETS, Outcome, RefusalCode, TicketAnswer, TicketId, ToProducer};

/// What was asked and what was answered.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    tickets: Mutex<HashMap<TicketId, Option<Outcome>>>,
    forwards: Mutex<HashMap<u64, Option<Forwarded>>>,
    next_request: AtomicU64,
}

/// What the producer said to a wish to forward.
#[derive(Debug)]
pub(crate) enum Forwarded {
    Yes(Box<Descriptor>),
    No(RefusalCode, String),
}

impl Desk {
    fn tickets(&self) -> MutexGuard<'_, HashMap<TicketId, Option<Outcome>>> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forwards(&self) -> MutexGuard<'_, HashMap<u64, Option<Forwarded>>> {
        self.forwards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn number(&self) -> u64 {
        self.next_request.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Takes in what became of tickets. What nobody asked for is passed over.
    pub fn tickets_answered(&self, answers: &[TicketAnswer]) {
        let mut tickets = self.tickets();
        for answer in answers {
            if let Some(asked) = tickets.get_mut(&answer.ticket) {
                *asked = Some(answer.outcome);
            }
        }
    }

    /// Takes in the answer to a wish to forward.
    pub fn forward_answered(&self, request: u64, answer: Forwarded) {
        if let Some(asked) = self.forwards().get_mut(&request) {
            *asked = Some(answer);
        }
    }

    /// Forgets a ticket: it was claimed, or never will be.
    pub fn forget(&self, ticket: TicketId) {
        self.tickets().remove(&ticket);
    }
}

impl Link {
    /// Asks for the leases behind tickets that were not asked for yet, in as few messages as it takes.
    pub fn ask_for_tickets(
        &self,
        tickets: impl IntoIterator<Item = TicketId>,
        deadline: Option<Instant>,
    ) -> Result<(), ClaimError> {
        let mut tickets = tickets.into_iter().peekable();
        while tickets.peek().is_some() {
            let mut ask: ArrayVec<TicketId, MOST_TICKETS> = ArrayVec::new();
            {
                let mut asked = self.desk.tickets();
                while !ask.is_full()
                    && let Some(ticket) = tickets.next()
                {
                    if let std::collections::hash_map::Entry::Vacant(place) = asked.entry(ticket) {
                        place.insert(None);
                        ask.push(ticket);
                    }
                }
            }
            if ask.is_empty() {
                continue;
            }
            trace_point!("ask");
            let message = ToProducer::ClaimTickets { request: self.desk.number(), tickets: ask.clone() };
            if let Err(error) = self.send(&message, deadline) {
                ask.iter().for_each(|ticket| self.desk.forget(*ticket));
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Returns the lease that a ticket gives this participant.
    pub fn redeem(&self, ticket: TicketId, deadline: Option<Instant>) -> Result<Granted, ClaimError> {
        self.ask_for_tickets([ticket], deadline)?;
        let outcome = self.wait_for_answer(deadline, || match self.desk.tickets().get(&ticket) {
            Some(Some(outcome)) => Some(Ok(*outcome)),
            _ if self.is_gone() => Some(Err(ClaimError::ProducerGone)),
            Some(None) => None,
            // Another thread claimed the same ticket and was done first.
            None => Some(Err(ClaimError::AlreadyClaimed)),
        });
        let refused = match outcome {
            None => return Err(Error::Deadline { what: "the producer's answer about a ticket" }.into()),
            Some(Err(error)) => error,
            Some(Ok(Outcome::Granted(granted))) => return Ok(granted),
            Some(Ok(Outcome::Revoked)) => ClaimError::Revoked,
            Some(Ok(Outcome::AlreadyClaimed)) => ClaimError::AlreadyClaimed,
            Some(Ok(Outcome::Stale)) => ClaimError::Stale,
            Some(Ok(Outcome::Limit)) => ClaimError::Refused {
                why: "all lease slots of this participant are in use".into(),
                remedy: "drop some blocks, or raise the producer's `SessionBuilder::max_slots`",
            },
            Some(Ok(Outcome::Failed)) => ClaimError::Refused {
                why: "a call of the producer's driver or system failed".into(),
                remedy: "look at the producer's log, and claim again",
            },
        };
        self.desk.forget(ticket);
        Err(refused)
    }

    /// Asks the producer for a descriptor of a block that this participant holds.
    pub fn forward(
        &self,
        lease: LeaseAddress,
        heir: Heir,
        user: [u8; 64],
        deadline: Option<Instant>,
    ) -> Result<Descriptor, ClaimError> {
        let request = self.desk.number();
        self.desk.forwards().insert(request, None);
        trace_point!("forward");
        let done = self
            .send(&ToProducer::Forward { request, lease, heir, user }, deadline)
            .map_err(ClaimError::from)
            .and_then(|()| {
                let answer = self.wait_for_answer(deadline, || {
                    let mut forwards = self.desk.forwards();
                    match forwards.get_mut(&request).and_then(Option::take) {
                        Some(answer) => Some(Ok(answer)),
                        None => self.is_gone().then_some(Err(ClaimError::ProducerGone)),
                    }
                });
                match answer {
                    None => Err(Error::Deadline { what: "the producer's answer to a wish to forward" }.into()),
                    Some(Err(error)) => Err(error),
                    Some(Ok(Forwarded::Yes(descriptor))) => Ok(*descriptor),
                    Some(Ok(Forwarded::No(code, why))) => Err(ClaimError::Refused { why, remedy: code.remedy() }),
                }
            });
        self.desk.forwards().remove(&request);
        done
    }
}

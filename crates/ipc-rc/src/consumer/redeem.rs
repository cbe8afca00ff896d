//! Tickets, wishes to forward, and deposits: what is asked for by name.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::consumer::claim_error::ClaimError;
use crate::consumer::connection::asking::{Asking, Patience};
use crate::consumer::connection::link::Link;
use crate::consumer::connection::question::{Answer, File, Key, Question};
use crate::consumer::connection::questions::Look;
use transport::trace_point;
use transport::wire::descriptor::Descriptor;
use transport::wire::lease_address::LeaseAddress;
use transport::wire::message::{DepositId, Granted, Heir, Outcome, RefusalCode, TicketId};

/// What a wish about a deposit waits for.
const ABOUT_A_DEPOSIT: &str = "the producer's answer about a deposit";

impl Link {
    /// Begins to ask for the lease that a ticket gives this participant. While the interest is
    /// kept, another try finds the answer here.
    pub fn ask_for(&self, ticket: TicketId, patience: Patience) -> Asking<'_> {
        trace_point!("ask");
        Asking::new(self, Key::Ticket(ticket), Question::Ticket, patience)
    }

    /// Waits for the lease that a ticket gives this participant.
    pub fn redeem(
        &self,
        asking: &mut Asking<'_>,
        patience: Patience,
    ) -> Result<Granted, ClaimError> {
        let what = "the producer's answer about a ticket";
        let outcome = asking.wait_for(patience, what, |look| match look {
            Look::Ticket(outcome) => Some(Ok(outcome)),
            _ => None,
        })?;
        let refused = match outcome {
            Outcome::Granted(granted) => return Ok(granted),
            Outcome::Revoked => ClaimError::Revoked,
            Outcome::AlreadyClaimed => ClaimError::AlreadyClaimed,
            Outcome::Stale => ClaimError::Stale,
            Outcome::Limit => ClaimError::refused(
                "all lease slots of this participant are in use",
                "drop some blocks, or raise the session's `max_slots` (`max_leases` in Python and C)",
            ),
            Outcome::Failed | Outcome::Later => ClaimError::refused(
                "a call of the producer's driver or system failed",
                "look at the producer's log, and claim again",
            ),
        };
        asking.kept = false;
        Err(refused)
    }

    /// Asks the producer for a descriptor of a part of a block that this participant holds: where it begins in
    /// its region, and its bytes.
    pub fn forward(
        &self,
        lease: LeaseAddress,
        part: (u64, u64),
        heir: Heir,
        user: [u8; 64],
        patience: Patience,
    ) -> Result<Descriptor, ClaimError> {
        trace_point!("forward");
        let question = Question::Forward {
            lease,
            part,
            heir,
            user: Box::new(user),
        };
        let what = "the producer's answer to a wish to forward";
        self.wish_for(question, patience, what, |answer| match answer {
            Answer::Forwarded(descriptor) => Some(*descriptor),
            _ => None,
        })
    }

    /// Has the producer keep a descriptor. One that gave up in time is not kept.
    pub fn deposit(
        &self,
        id: DepositId,
        file: OwnedFd,
        patience: Patience,
    ) -> Result<(), ClaimError> {
        let file = File(Arc::new(file));
        let question = Question::Deposit { id, file };
        self.wish_for(question, patience, ABOUT_A_DEPOSIT, |answer| {
            matches!(answer, Answer::Done).then_some(())
        })
    }

    /// Fetches a descriptor that the producer keeps. One that gave up in time leaves it there.
    pub fn fetch(&self, id: DepositId, patience: Patience) -> Result<OwnedFd, ClaimError> {
        let question = Question::Fetch { id };
        self.wish_for(question, patience, ABOUT_A_DEPOSIT, |answer| match answer {
            Answer::Fetched(file) => file,
            _ => None,
        })
    }

    fn wish_for<T>(
        &self,
        question: Question,
        patience: Patience,
        what: &'static str,
        read: impl Fn(Answer) -> Option<T>,
    ) -> Result<T, ClaimError> {
        let key = self.table().wish_key();
        let mut asking = Asking::new(self, key, question, patience);
        asking.wait_for(patience, what, |look| match look {
            Look::Take(answer) => Some(read(answer).ok_or_else(|| {
                ClaimError::refused(
                    "the producer answered with another message, or without a descriptor",
                    RefusalCode::Protocol.remedy(),
                )
            })),
            _ => None,
        })
    }
}

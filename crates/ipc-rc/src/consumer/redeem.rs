//! Tickets, wishes to forward, and deposits: what is asked for by name.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use gpu_api::Error;

use crate::consumer::claim_error::ClaimError;
use crate::consumer::connection::asking::{Asking, Patience};
use crate::consumer::connection::link::Link;
use crate::consumer::connection::question::{Answer, File, Key, Question};
use crate::consumer::connection::questions::Look;
use transport::trace_point;
use transport::wire::descriptor::Descriptor;
use transport::wire::lease_address::LeaseAddress;
use transport::wire::message::{DepositId, Granted, Heir, Outcome, RefusalCode, TicketId};

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
        let outcome = self.wait_for_answer(patience, |questions| match asking.look(questions) {
            Look::Ticket(outcome) => Some(Ok(outcome)),
            _ => self.is_gone().then_some(Err(ClaimError::ProducerGone)),
        });
        let Some(outcome) = outcome.transpose()? else {
            return Err(Error::Deadline {
                what: "the producer's answer about a ticket",
            }
            .into());
        };
        let refused = match outcome {
            Outcome::Granted(granted) => return Ok(granted),
            Outcome::Revoked => ClaimError::Revoked,
            Outcome::AlreadyClaimed => ClaimError::AlreadyClaimed,
            Outcome::Stale => ClaimError::Stale,
            Outcome::Limit => ClaimError::Refused {
                why: "all lease slots of this participant are in use".into(),
                remedy: "drop some blocks, or raise the session's `max_slots` (`max_leases` in Python and C)",
            },
            Outcome::Failed | Outcome::Later => ClaimError::Refused {
                why: "a call of the producer's driver or system failed".into(),
                remedy: "look at the producer's log, and claim again",
            },
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
        let key = self.table().wish_key();
        let mut asking = Asking::new(
            self,
            key,
            Question::Forward {
                lease,
                part,
                heir,
                user: Box::new(user),
            },
            patience,
        );
        let answer = self.wait_for_answer(patience, |questions| match asking.look(questions) {
            Look::Take(Answer::Forwarded(descriptor)) => Some(Ok(*descriptor)),
            Look::Refused(no, _) => Some(Err(ClaimError::Refused {
                why: no.why,
                remedy: no.code.remedy(),
            })),
            _ => self.is_gone().then_some(Err(ClaimError::ProducerGone)),
        });
        answer.unwrap_or_else(|| {
            Err(Error::Deadline {
                what: "the producer's answer to a wish to forward",
            }
            .into())
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
        self.wish_for(Question::Deposit { id, file }, patience, |answer| {
            matches!(answer, Answer::Done).then_some(())
        })
    }

    /// Fetches a descriptor that the producer keeps. One that gave up in time leaves it there.
    pub fn fetch(&self, id: DepositId, patience: Patience) -> Result<OwnedFd, ClaimError> {
        self.wish_for(Question::Fetch { id }, patience, |answer| match answer {
            Answer::Fetched(file) => file,
            _ => None,
        })
    }

    fn wish_for<T>(
        &self,
        question: Question,
        patience: Patience,
        read: impl Fn(Answer) -> Option<T>,
    ) -> Result<T, ClaimError> {
        let key = self.table().wish_key();
        let mut asking = Asking::new(self, key, question, patience);
        let answer = self.wait_for_answer(patience, |questions| match asking.look(questions) {
            Look::Take(answer) => {
                Some(
                    read(answer).ok_or_else(|| ClaimError::Refused {
                        why: "the producer answered with another message, or without a descriptor"
                            .into(),
                        remedy: RefusalCode::Protocol.remedy(),
                    }),
                )
            }
            Look::Refused(no, _) => Some(Err(ClaimError::Refused {
                why: no.why,
                remedy: no.code.remedy(),
            })),
            _ => self.is_gone().then_some(Err(ClaimError::ProducerGone)),
        });
        answer.unwrap_or_else(|| {
            Err(Error::Deadline {
                what: "the producer's answer about a deposit",
            }
            .into())
        })
    }
}

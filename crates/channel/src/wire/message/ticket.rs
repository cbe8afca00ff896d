//! Tickets in messages: which are claimed, and what became of each.

use super::packet::{DecodeError, malformed};
use crate::shared::slot::Generation;
use crate::wire::descriptor::{Fence, LIMIT, NO_FENCE};
use crate::wire::lease_address::LeaseAddress;
use crate::wire::packet::{Reader, Writer};

/// The most tickets that one message claims.
pub const MOST_TICKETS: usize = 64;

/// Names a ticket of a session.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TicketId {
    /// Its place in the producer's table.
    pub number: u32,
    /// How often the place was used before.
    pub generation: Generation,
}

impl TicketId {
    pub(super) fn write(self, w: &mut Writer<'_>) {
        w.put(&self.number.to_le_bytes());
        w.put(&[0; 4]);
        w.put(&self.generation.get().to_le_bytes());
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<TicketId, DecodeError> {
        let number = r.u32()?;
        r.zeros::<4>()?;
        Ok(TicketId { number, generation: r.generation()? })
    }
}

/// The lease that a ticket gave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Granted {
    /// Where it is, in the claimant's own counter files.
    pub lease: LeaseAddress,
    /// After which the contents may be read.
    pub fence: Option<Fence>,
}

/// What became of a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The claimant has a lease.
    Granted(Granted),
    /// The ticket was cancelled, or lapsed, or its block was dropped.
    Revoked,
    /// Others have claimed it as often as it could be.
    AlreadyClaimed,
    /// The producer knows no such ticket (any more).
    Stale,
    /// The claimant's quota of leases is used up.
    Limit,
    /// A call of the producer's driver or system failed.
    Failed,
    /// There is no room for the fence at this moment: ask again.
    Later,
}

/// What became of one ticket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TicketAnswer {
    /// The ticket.
    pub ticket: TicketId,
    /// What became of it.
    pub outcome: Outcome,
}

impl TicketAnswer {
    pub(super) fn write(self, w: &mut Writer<'_>) {
        let outcome: u32 = match self.outcome {
            Outcome::Granted(_) => 0,
            Outcome::Revoked => 1,
            Outcome::AlreadyClaimed => 2,
            Outcome::Stale => 3,
            Outcome::Limit => 4,
            Outcome::Failed => 5,
            Outcome::Later => 6,
        };
        w.put(&self.ticket.number.to_le_bytes());
        w.put(&outcome.to_le_bytes());
        w.put(&self.ticket.generation.get().to_le_bytes());
        let Outcome::Granted(Granted { lease, fence }) = self.outcome else {
            w.put(&[0; 32]);
            return;
        };
        w.lease(lease);
        w.put(&fence.map_or(NO_FENCE, |fence| fence.word).to_le_bytes());
        w.put(&[0; 4]);
        w.put(&fence.map_or(0, |fence| fence.value).to_le_bytes());
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<TicketAnswer, DecodeError> {
        let (number, outcome) = (r.u32()?, r.u32()?);
        let ticket = TicketId { number, generation: r.generation()? };
        let outcome = match outcome {
            0 => {
                let (lease, word) = (r.lease()?, r.u32()?);
                r.zeros::<4>()?;
                let value = r.u64()?;
                let fence = match (word, value) {
                    (NO_FENCE, 0) => None,
                    (NO_FENCE, value) => return Err(malformed("the value of no fence", value, "0")),
                    (_, value) if value == 0 || value >= LIMIT => {
                        return Err(malformed("the fence's value", value, "above 0 and below 2^61"));
                    }
                    (word, value) => Some(Fence { file: 0, word, value }),
                };
                return Ok(TicketAnswer { ticket, outcome: Outcome::Granted(Granted { lease, fence }) });
            }
            1 => Outcome::Revoked,
            2 => Outcome::AlreadyClaimed,
            3 => Outcome::Stale,
            4 => Outcome::Limit,
            5 => Outcome::Failed,
            6 => Outcome::Later,
            _ => return Err(malformed("the outcome of a ticket", outcome, "0 to 6")),
        };
        r.zeros::<32>()?;
        Ok(TicketAnswer { ticket, outcome })
    }
}

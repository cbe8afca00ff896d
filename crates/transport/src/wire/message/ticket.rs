//! Tickets in messages: which are claimed, and what became of each.

use gpu_api::RegionId;

use crate::record;
use crate::shared::slot::Generation;
use crate::wire::descriptor::{Fence, LIMIT, NO_FENCE};
use crate::wire::field::Field;
use crate::wire::lease_address::LeaseAddress;
use crate::wire::packet::{Malformed, Reader, Writer, malformed};

/// The most tickets that one message claims.
pub const MOST_TICKETS: usize = 56;

/// Names a ticket of a session.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TicketId {
    /// Its place in the producer's table.
    pub number: u32,
    /// How often the place was used before.
    pub generation: Generation,
}

record!(TicketId { number [4], generation });

/// Where granted bytes lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// The region that they begin in.
    pub region: RegionId,
    /// Bytes from the region's base.
    pub offset: u64,
    /// Bytes; at least 1, and the end is below 2^64.
    pub len: u64,
}

impl Field for Extent {
    fn write(&self, w: &mut Writer<'_>) {
        self.region.write(w);
        w.u64(self.offset);
        w.u64(self.len);
    }

    fn read(r: &mut Reader<'_>) -> Result<Extent, Malformed> {
        let (region, offset, len) = (Field::read(r)?, r.u64()?, r.u64()?);
        if len == 0 || offset.checked_add(len).is_none() {
            return Err(malformed(
                "the length of what is granted",
                len,
                "at least 1, and such that the end is below 2^64",
            ));
        }
        Ok(Extent {
            region,
            offset,
            len,
        })
    }
}

/// The lease that a ticket gave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Granted {
    /// Where it is, in the claimant's own counter files.
    pub lease: LeaseAddress,
    /// Where the bytes lie.
    pub place: Extent,
    /// After which the contents may be read.
    pub fence: Option<Fence>,
    /// The ticket is a broadcast: the next claim gives another lease once this one is claimed.
    pub again: bool,
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
    /// The fence has no room at this moment: ask again.
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

impl Field for TicketAnswer {
    fn write(&self, w: &mut Writer<'_>) {
        let outcome = match self.outcome {
            Outcome::Granted(granted) if granted.again => 7,
            Outcome::Granted(_) => 0,
            Outcome::Revoked => 1,
            Outcome::AlreadyClaimed => 2,
            Outcome::Stale => 3,
            Outcome::Limit => 4,
            Outcome::Failed => 5,
            Outcome::Later => 6,
        };
        w.u32(self.ticket.number);
        w.u32(outcome);
        self.ticket.generation.write(w);
        let Outcome::Granted(Granted {
            lease,
            place,
            fence,
            ..
        }) = self.outcome
        else {
            return w.put(&[0; 56]);
        };
        lease.write(w);
        place.write(w);
        w.u32(fence.map_or(NO_FENCE, |fence| fence.word));
        w.put(&[0; 4]);
        w.u64(fence.map_or(0, |fence| fence.value));
    }

    fn read(r: &mut Reader<'_>) -> Result<TicketAnswer, Malformed> {
        let (number, outcome, generation) = (r.u32()?, r.u32()?, Field::read(r)?);
        let ticket = TicketId { number, generation };
        let outcome = match outcome {
            0 | 7 => {
                let (lease, place, word) = (Field::read(r)?, Field::read(r)?, r.u32()?);
                r.zeros::<4>()?;
                let fence = match (word, r.u64()?) {
                    (NO_FENCE, 0) => None,
                    (NO_FENCE, value) => {
                        return Err(malformed("the value of no fence", value, "0"));
                    }
                    (_, value) if value == 0 || value >= LIMIT => {
                        return Err(malformed(
                            "the fence's value",
                            value,
                            "above 0 and below 2^61",
                        ));
                    }
                    (word, value) => Some(Fence {
                        file: 0,
                        word,
                        value,
                    }),
                };
                return Ok(TicketAnswer {
                    ticket,
                    outcome: Outcome::Granted(Granted {
                        lease,
                        place,
                        fence,
                        again: outcome == 7,
                    }),
                });
            }
            1 => Outcome::Revoked,
            2 => Outcome::AlreadyClaimed,
            3 => Outcome::Stale,
            4 => Outcome::Limit,
            5 => Outcome::Failed,
            6 => Outcome::Later,
            _ => return Err(malformed("the outcome of a ticket", outcome, "0 to 7")),
        };
        r.zeros::<56>()?;
        Ok(TicketAnswer { ticket, outcome })
    }
}

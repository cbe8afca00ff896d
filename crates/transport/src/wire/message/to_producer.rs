//! What a participant says to its producer.

use std::num::NonZeroU32;

use arrayvec::ArrayVec;
use gpu_api::{Access, BackendKind, DeviceUuid, ParticipantId, RegionId};

use super::deposit::DepositId;
use super::ticket::{MOST_TICKETS, TicketId};
use crate::messages;
use crate::os::process::MOST_DESCENDANTS;
use crate::wire::field::Field;
use crate::wire::lease_address::LeaseAddress;
use crate::wire::packet::{Malformed, Reader, Writer, malformed};

messages! {
    /// What a participant says to its producer.
    #[derive(Clone, PartialEq, Eq, Debug)]
    #[allow(
        clippy::large_enum_variant,
        reason = "it lives for one call on the stack; a box would be an allocation a message"
    )]
    pub enum ToProducer of super::packet::PROTOCOL, "that of a message to a producer" {
        /// The first message. A pidfd that the participant opened of itself comes with it, then one
        /// for each descendant that keeps the device's files open.
        1 Hello [1 + usize::from(*descendants)] {
            /// The participant's vendor.
            backend: BackendKind [1],
            /// How many pidfds follow the first.
            descendants: u16,
            /// The number under which the driver shows the participant's GPU work; 0 for none known.
            sign: u32,
            /// The participant's device.
            device: DeviceUuid,
            /// What the participant calls itself, for people; empty for nothing.
            name: String,
        }
        /// Asks for everything needed to map a region.
        2 MapRegion(request) {
            /// The region.
            region: RegionId,
            /// What the participant wants to do with it.
            access: Access [7],
            /// A lease on a block of the region: the right to ask.
            lease: LeaseAddress,
        }
        /// Asks the producer to note that a region is not mapped, whatever was asked or answered
        /// before.
        3 Unmapped(request) {
            /// The region.
            region: RegionId,
        }
        /// Asks the producer to note that the participant goes: its leases have ended, and it
        /// claims nothing more.
        4 Bye(request) {}
        /// Claims tickets.
        5 ClaimTickets(request) {
            /// Which.
            tickets: ArrayVec<TicketId, MOST_TICKETS>,
        }
        /// Asks for a descriptor of a leased block, for somebody else.
        6 Forward(request) {
            /// No wish of a lower number waits for its answer.
            settled: u64,
            /// The lease that gives the right.
            lease: LeaseAddress,
            /// Where in its region the part begins that is forwarded.
            offset: u64,
            /// Bytes of the part.
            len: u64,
            /// The participant, or the ticket, that it is for.
            heir: Heir,
            /// The user's own bytes.
            user: [u8; 64],
        }
        /// Asks what the session holds and which process holds it.
        7 Inspect(request) {
            /// The place of the first holder to tell of.
            from: u32 [4],
        }
        /// Asks what the session's source of regions looks like.
        8 TakeSnapshot(request) {}
        /// Asks for a counter file once more: it was announced, and is not there.
        9 AskFile(request) {
            /// Its number.
            index: u32 [4],
        }
        /// Gives back what a ticket gave, unless it is claimed.
        10 GiveBack(request) {
            /// Which.
            ticket: TicketId,
        }
        /// Has the producer keep the file descriptor that comes with the message, until it is
        /// fetched or the participant's death is proven.
        11 Deposit(request) [1] {
            /// No wish of a lower number waits for its answer.
            settled: u64,
            /// The name that it is kept under.
            id: DepositId,
        }
        /// Asks for a descriptor that is kept.
        12 Fetch(request) {
            /// Its name.
            id: DepositId,
        }
        /// Ends a deposit, or a fetch: the descriptor has arrived, or is not wanted any more.
        13 EndDeposit(request) {
            /// The name of the descriptor.
            id: DepositId,
            /// The number of the `Deposit` or `Fetch`.
            of: u64,
            /// What was given for a fetch did not arrive, and is kept for another.
            returns: bool [7],
        }
    }
}

impl ToProducer {
    fn check(&self) -> Result<(), Malformed> {
        match self {
            ToProducer::Hello { descendants, .. }
                if usize::from(*descendants) > MOST_DESCENDANTS =>
            {
                Err(malformed(
                    "the number of descendants",
                    *descendants,
                    "at most 200",
                ))
            }
            ToProducer::ClaimTickets { tickets, .. } if tickets.is_empty() => {
                Err(malformed("the number of tickets", 0u64, "1 to 56"))
            }
            _ => Ok(()),
        }
    }
}

/// The recipient of a forwarded lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heir {
    /// One participant of the same session.
    Participant(ParticipantId),
    /// The participants that claim first, up to this number; `None` without limit.
    Ticket(Option<NonZeroU32>),
}

impl Field for Heir {
    fn write(&self, w: &mut Writer<'_>) {
        let (kind, claims, participant) = match self {
            Heir::Participant(id) => (1, 0, id.0),
            Heir::Ticket(claims) => (2, claims.map_or(0, NonZeroU32::get), 0),
        };
        w.put(&[kind, 0, 0, 0]);
        w.u32(claims);
        w.u64(participant);
    }

    fn read(r: &mut Reader<'_>) -> Result<Heir, Malformed> {
        let [kind] = r.array()?;
        r.zeros::<3>()?;
        match (kind, r.u32()?, r.u64()?) {
            (1, 0, id) => Ok(Heir::Participant(ParticipantId(id))),
            (2, claims, 0) => Ok(Heir::Ticket(NonZeroU32::new(claims))),
            (1, claims, _) => Err(malformed("the claims of a participant", claims, "0")),
            (2, _, id) => Err(malformed("the participant of a ticket", id, "0")),
            _ => Err(malformed("the kind of grant", kind, "1 or 2")),
        }
    }
}

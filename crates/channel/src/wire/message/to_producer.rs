//! What a participant says to its producer.

use arrayvec::ArrayVec;
use gpu_api::{Access, BackendKind, DeviceUuid, ParticipantId, RegionId};

use super::packet::{DecodeError, check, malformed, read, start};
use super::ticket::{MOST_TICKETS, TicketId};
use crate::os::process::MOST_DESCENDANTS;
use crate::wire::lease_address::LeaseAddress;
use crate::wire::packet::MOST_BYTES;

const HELLO: u16 = 1;
const MAP_REGION: u16 = 2;
const UNMAPPED: u16 = 3;
const BYE: u16 = 4;
const CLAIM_TICKETS: u16 = 5;
const FORWARD: u16 = 6;
const INSPECT: u16 = 7;
const TAKE_SNAPSHOT: u16 = 8;
const ASK_FILE: u16 = 9;

/// What a participant says to its producer.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "it lives for one call on the stack; a box would be an allocation a message"
)]
pub enum ToProducer {
    /// The first message. A pidfd that the participant opened of itself comes with it, then one for each descendant
    /// that keeps the device's files open.
    Hello {
        /// The participant's vendor.
        backend: BackendKind,
        /// The participant's device.
        device: DeviceUuid,
        /// How many pidfds follow the first.
        descendants: u16,
        /// What the participant calls itself, for people; empty for nothing.
        name: String,
    },
    /// Asks for what it takes to map a region.
    MapRegion {
        /// Repeated by the answer.
        request: u64,
        /// The region.
        region: RegionId,
        /// What the participant wants to do with it.
        access: Access,
        /// A lease on a block of the region: the right to ask.
        lease: LeaseAddress,
    },
    /// Asks the producer to note that a region is not mapped, whatever was asked or answered before.
    Unmapped {
        /// Repeated by the answer.
        request: u64,
        /// The region.
        region: RegionId,
    },
    /// Asks the producer to note that the participant goes: its leases have ended, and it claims nothing more.
    Bye {
        /// Repeated by the answer.
        request: u64,
    },
    /// Claims tickets.
    ClaimTickets {
        /// Repeated by the answer.
        request: u64,
        /// Which.
        tickets: ArrayVec<TicketId, MOST_TICKETS>,
    },
    /// Asks for a descriptor of a leased block, for somebody else.
    Forward {
        /// Repeated by the answer.
        request: u64,
        /// No wish of a lower number waits for its answer.
        settled: u64,
        /// The lease that gives the right.
        lease: LeaseAddress,
        /// For whom.
        heir: Heir,
        /// The user's own bytes.
        user: [u8; 64],
    },
    /// Asks what the session holds and who holds it.
    Inspect {
        /// Repeated by the answer.
        request: u64,
        /// The place of the first holder to tell of.
        from: u32,
    },
    /// Asks what the session's source of regions looks like.
    TakeSnapshot {
        /// Repeated by the answer.
        request: u64,
    },
    /// Asks for a counter file once more: it was announced, and is not there.
    AskFile {
        /// Repeated by the answer.
        request: u64,
        /// Its number.
        index: u32,
    },
}

/// Whom a lease is forwarded to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heir {
    /// One participant of the same session.
    Participant(ParticipantId),
    /// The participants that claim first, up to this number; `None` without limit.
    Ticket(Option<std::num::NonZeroU32>),
}

impl ToProducer {
    /// Returns how many file descriptors go with the message.
    pub fn fds(&self) -> usize {
        match self {
            ToProducer::Hello { descendants, .. } => 1 + usize::from(*descendants),
            _ => 0,
        }
    }

    /// Writes the message down and returns its length.
    pub fn encode(&self, packet: &mut [u8; MOST_BYTES]) -> usize {
        let (number, request) = match self {
            ToProducer::Hello { .. } => (HELLO, 0),
            ToProducer::MapRegion { request, .. } => (MAP_REGION, *request),
            ToProducer::Unmapped { request, .. } => (UNMAPPED, *request),
            ToProducer::Bye { request } => (BYE, *request),
            ToProducer::ClaimTickets { request, .. } => (CLAIM_TICKETS, *request),
            ToProducer::Forward { request, .. } => (FORWARD, *request),
            ToProducer::Inspect { request, .. } => (INSPECT, *request),
            ToProducer::TakeSnapshot { request } => (TAKE_SNAPSHOT, *request),
            ToProducer::AskFile { request, .. } => (ASK_FILE, *request),
        };
        let mut w = start(packet, number, self.fds(), request);
        match self {
            ToProducer::Hello { backend, device, descendants, name } => {
                w.put(&[*backend as u8, 0]);
                w.put(&descendants.to_le_bytes());
                w.put(&[0; 4]);
                w.put(&device.0);
                w.text(name);
            }
            ToProducer::MapRegion { region, access, lease, .. } => {
                w.put(&region.0.to_le_bytes());
                w.put(&[*access as u8, 0, 0, 0, 0, 0, 0, 0]);
                w.lease(*lease);
            }
            ToProducer::Unmapped { region, .. } => w.put(&region.0.to_le_bytes()),
            ToProducer::Bye { .. } | ToProducer::TakeSnapshot { .. } => {}
            ToProducer::ClaimTickets { tickets, .. } => {
                w.put(&(tickets.len() as u32).to_le_bytes());
                w.put(&[0; 4]);
                tickets.iter().for_each(|ticket| ticket.write(&mut w));
            }
            ToProducer::Forward { settled, lease, heir, user, .. } => {
                w.put(&settled.to_le_bytes());
                w.lease(*lease);
                let (kind, claims, participant) = match heir {
                    Heir::Participant(id) => (1, 0, id.0),
                    Heir::Ticket(claims) => (2, claims.map_or(0, |claims| claims.get()), 0),
                };
                w.put(&[kind, 0, 0, 0]);
                w.put(&claims.to_le_bytes());
                w.put(&participant.to_le_bytes());
                w.put(user);
            }
            ToProducer::Inspect { from: number, .. } | ToProducer::AskFile { index: number, .. } => {
                w.put(&number.to_le_bytes());
                w.put(&[0; 4]);
            }
        }
        w.end()
    }

    /// Reads a message that came with `fds` file descriptors.
    pub fn decode(packet: &[u8], fds: usize) -> Result<ToProducer, DecodeError> {
        let (header, mut r) = read(packet)?;
        let message = match header.number {
            HELLO => {
                let backend = r.backend()?;
                r.zeros::<1>()?;
                let descendants = u16::from_le_bytes(r.array()?);
                if usize::from(descendants) > MOST_DESCENDANTS {
                    return Err(malformed("the number of descendants", descendants, "at most 200"));
                }
                r.zeros::<4>()?;
                ToProducer::Hello { backend, device: DeviceUuid(r.array()?), descendants, name: r.text()? }
            }
            MAP_REGION => {
                let (region, access) = (RegionId(r.u64()?), r.access()?);
                r.zeros::<7>()?;
                ToProducer::MapRegion { request: header.request, region, access, lease: r.lease()? }
            }
            UNMAPPED => ToProducer::Unmapped { request: header.request, region: RegionId(r.u64()?) },
            BYE => ToProducer::Bye { request: header.request },
            CLAIM_TICKETS => {
                let count = r.u32()?;
                r.zeros::<4>()?;
                if count == 0 || count as usize > MOST_TICKETS {
                    return Err(malformed("the number of tickets", count, "1 to 64"));
                }
                let tickets = (0..count).map(|_| TicketId::read(&mut r)).collect::<Result<_, _>>()?;
                ToProducer::ClaimTickets { request: header.request, tickets }
            }
            FORWARD => {
                let (settled, lease, [kind]) = (r.u64()?, r.lease()?, r.array()?);
                r.zeros::<3>()?;
                let (claims, participant) = (r.u32()?, r.u64()?);
                let heir = match (kind, claims, participant) {
                    (1, 0, id) => Heir::Participant(ParticipantId(id)),
                    (2, claims, 0) => Heir::Ticket(std::num::NonZeroU32::new(claims)),
                    (1, claims, _) => return Err(malformed("the claims of a participant", claims, "0")),
                    (2, _, id) => return Err(malformed("the participant of a ticket", id, "0")),
                    _ => return Err(malformed("the kind of grant", kind, "1 or 2")),
                };
                ToProducer::Forward { request: header.request, settled, lease, heir, user: r.array()? }
            }
            INSPECT => {
                let from = r.u32()?;
                r.zeros::<4>()?;
                ToProducer::Inspect { request: header.request, from }
            }
            TAKE_SNAPSHOT => ToProducer::TakeSnapshot { request: header.request },
            ASK_FILE => {
                let index = r.u32()?;
                r.zeros::<4>()?;
                ToProducer::AskFile { request: header.request, index }
            }
            number => return Err(malformed("the type", number, "that of a message to a producer")),
        };
        let answers = !matches!(message, ToProducer::Hello { .. });
        check(&header, &r, message.fds(), fds, answers)?;
        Ok(message)
    }
}

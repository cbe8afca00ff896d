//! What a producer says to a participant.

use arrayvec::ArrayVec;
use gpu_api::{Access, DevicePtr, DeviceUuid, MemHandle, ParticipantId, RegionId};

use super::packet::{DecodeError, check, malformed, read, start};
use super::refusal::RefusalCode;
use super::report::ReportPage;
use super::ticket::{MOST_TICKETS, TicketAnswer};
use crate::wire::descriptor::{self, Descriptor, SessionId};
use crate::wire::lease_address::LeaseAddress;
use crate::wire::packet::MOST_BYTES;

const WELCOME: u16 = 129;
const REFUSED: u16 = 130;
const COUNTER_FILE: u16 = 131;
const REGION: u16 = 132;
const NO_REGION: u16 = 133;
const PLEASE_UNMAP: u16 = 134;
const CLOSING: u16 = 135;
const TICKETS: u16 = 136;
const FORWARDED: u16 = 137;
const REPORT: u16 = 138;
const DECLINED: u16 = 139;
const REVOKED: u16 = 140;
const SNAPSHOT: u16 = 141;
const NOTED: u16 = 142;

/// What a producer says to a participant.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "it lives for one call on the stack; a box would be an allocation a message"
)]
pub enum ToParticipant {
    /// The answer to `Hello`. The producer's pidfd and the participant's first counter file come with it.
    Welcome {
        /// The session.
        session: SessionId,
        /// The participant's number in it.
        participant: ParticipantId,
        /// The producer's pid as it sees itself, for reading only.
        pid: u32,
        /// Slots in the first counter file.
        slots: u32,
        /// The most slots that this participant can have in all its files.
        max_slots: u64,
    },
    /// The other answer to `Hello`; the connection ends.
    Refused {
        /// Why, for programs.
        code: RefusalCode,
        /// Why, for people.
        why: String,
    },
    /// A further counter file comes with this message: announced, or asked for.
    CounterFile {
        /// The question's; 0 if nobody asked.
        request: u64,
        /// Its number.
        index: u32,
        /// Slots in it.
        slots: u32,
    },
    /// What it takes to map a region.
    Region {
        /// The question's.
        request: u64,
        /// The region.
        region: RegionId,
        /// Bytes.
        len: u64,
        /// The device that it lies on.
        device: DeviceUuid,
        /// What the participant may do with it.
        access: Access,
        /// How to reach it.
        place: Place,
    },
    /// There is no such region for this participant.
    NoRegion {
        /// The question's.
        request: u64,
        /// The region.
        region: RegionId,
        /// Why, for programs.
        code: RefusalCode,
        /// Why, for people.
        why: String,
    },
    /// The producer would like the mapping of a region to go, once it is not used.
    PleaseUnmap {
        /// The region.
        region: RegionId,
    },
    /// The session shuts down; nothing new comes.
    Closing,
    /// What became of claims of tickets.
    Tickets {
        /// The question's.
        request: u64,
        /// In the question's order.
        answers: ArrayVec<TicketAnswer, MOST_TICKETS>,
    },
    /// The descriptor that was asked for.
    Forwarded {
        /// The question's.
        request: u64,
        /// The descriptor.
        descriptor: Descriptor,
    },
    /// What the session holds.
    Report {
        /// The question's.
        request: u64,
        /// A page of it.
        page: Box<ReportPage>,
    },
    /// What is asked for is not to be had.
    Declined {
        /// The question's.
        request: u64,
        /// Why, for programs.
        code: RefusalCode,
        /// Why, for people.
        why: String,
    },
    /// A grant to this participant was taken back before it was claimed.
    Revoked {
        /// Which.
        lease: LeaseAddress,
    },
    /// What the session's source of regions looks like, as JSON in a sealed memfd that comes with the message.
    Snapshot {
        /// The question's.
        request: u64,
        /// Bytes of it: 1 to [`MOST_SNAPSHOT`].
        len: u64,
    },
    /// What was said has been taken note of: `Unmapped`, `Bye`.
    Noted {
        /// The question's.
        request: u64,
    },
}

/// The most bytes of a snapshot.
pub const MOST_SNAPSHOT: u64 = 16 << 20;

/// How a participant reaches a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// It is the producer itself: the address as it is.
    Local(DevicePtr),
    /// By the vendor's handle.
    Handle(MemHandle),
    /// By the file descriptor that comes with the message.
    Fd,
}

impl ToParticipant {
    /// Returns how many file descriptors go with the message.
    pub fn fds(&self) -> usize {
        match self {
            ToParticipant::Welcome { .. } => 2,
            ToParticipant::CounterFile { .. }
            | ToParticipant::Region { place: Place::Fd, .. }
            | ToParticipant::Snapshot { .. } => 1,
            _ => 0,
        }
    }

    /// Writes the message down and returns its length.
    pub fn encode(&self, packet: &mut [u8; MOST_BYTES]) -> usize {
        let (number, request) = match self {
            ToParticipant::Welcome { .. } => (WELCOME, 0),
            ToParticipant::Refused { .. } => (REFUSED, 0),
            ToParticipant::CounterFile { request, .. } => (COUNTER_FILE, *request),
            ToParticipant::Region { request, .. } => (REGION, *request),
            ToParticipant::NoRegion { request, .. } => (NO_REGION, *request),
            ToParticipant::PleaseUnmap { .. } => (PLEASE_UNMAP, 0),
            ToParticipant::Closing => (CLOSING, 0),
            ToParticipant::Tickets { request, .. } => (TICKETS, *request),
            ToParticipant::Forwarded { request, .. } => (FORWARDED, *request),
            ToParticipant::Report { request, .. } => (REPORT, *request),
            ToParticipant::Declined { request, .. } => (DECLINED, *request),
            ToParticipant::Revoked { .. } => (REVOKED, 0),
            ToParticipant::Snapshot { request, .. } => (SNAPSHOT, *request),
            ToParticipant::Noted { request } => (NOTED, *request),
        };
        let mut w = start(packet, number, self.fds(), request);
        match self {
            ToParticipant::Welcome { session, participant, pid, slots, max_slots } => {
                w.put(&session.0);
                w.put(&participant.0.to_le_bytes());
                w.put(&pid.to_le_bytes());
                w.put(&slots.to_le_bytes());
                w.put(&max_slots.to_le_bytes());
            }
            ToParticipant::Refused { code, why } | ToParticipant::Declined { code, why, .. } => {
                w.put(&(*code as u16).to_le_bytes());
                w.text(why);
            }
            ToParticipant::CounterFile { index, slots, .. } => {
                w.put(&index.to_le_bytes());
                w.put(&slots.to_le_bytes());
            }
            ToParticipant::Region { region, len, device, access, place, .. } => {
                w.put(&region.0.to_le_bytes());
                w.put(&len.to_le_bytes());
                w.put(&device.0);
                let kind = match place {
                    Place::Local(_) => 1,
                    Place::Handle(_) => 2,
                    Place::Fd => 3,
                };
                w.put(&[*access as u8, kind, 0, 0, 0, 0, 0, 0]);
                match place {
                    Place::Local(ptr) => w.put(&ptr.0.to_le_bytes()),
                    Place::Handle(handle) => w.put(&handle.0),
                    Place::Fd => {}
                }
            }
            ToParticipant::NoRegion { region, code, why, .. } => {
                w.put(&region.0.to_le_bytes());
                w.put(&(*code as u16).to_le_bytes());
                w.text(why);
            }
            ToParticipant::PleaseUnmap { region } => w.put(&region.0.to_le_bytes()),
            ToParticipant::Closing | ToParticipant::Noted { .. } => {}
            ToParticipant::Tickets { answers, .. } => {
                w.put(&(answers.len() as u32).to_le_bytes());
                w.put(&[0; 4]);
                answers.iter().for_each(|answer| answer.write(&mut w));
            }
            ToParticipant::Forwarded { descriptor, .. } => w.put(descriptor.as_bytes()),
            ToParticipant::Report { page, .. } => page.write(&mut w),
            ToParticipant::Revoked { lease } => w.lease(*lease),
            ToParticipant::Snapshot { len, .. } => w.put(&len.to_le_bytes()),
        }
        w.end()
    }

    /// Reads a message that came with `fds` file descriptors.
    pub fn decode(packet: &[u8], fds: usize) -> Result<ToParticipant, DecodeError> {
        let (header, mut r) = read(packet)?;
        let request = header.request;
        let message = match header.number {
            WELCOME => ToParticipant::Welcome {
                session: SessionId(r.array()?),
                participant: ParticipantId(r.u64()?),
                pid: r.u32()?,
                slots: r.u32()?,
                max_slots: r.u64()?,
            },
            REFUSED => ToParticipant::Refused { code: r.refusal()?, why: r.text()? },
            COUNTER_FILE => ToParticipant::CounterFile { request, index: r.u32()?, slots: r.u32()? },
            REGION => {
                let (region, len) = (RegionId(r.u64()?), r.u64()?);
                if len == 0 {
                    return Err(malformed("the region's length", 0u64, "at least 1"));
                }
                let device = DeviceUuid(r.array()?);
                let (access, [kind]) = (r.access()?, r.array()?);
                r.zeros::<6>()?;
                let place = match kind {
                    1 => Place::Local(DevicePtr(r.u64()?)),
                    2 => Place::Handle(MemHandle(r.array()?)),
                    3 => Place::Fd,
                    _ => return Err(malformed("the region's place", kind, "1, 2 or 3")),
                };
                ToParticipant::Region { request, region, len, device, access, place }
            }
            NO_REGION => {
                ToParticipant::NoRegion { request, region: RegionId(r.u64()?), code: r.refusal()?, why: r.text()? }
            }
            PLEASE_UNMAP => ToParticipant::PleaseUnmap { region: RegionId(r.u64()?) },
            CLOSING => ToParticipant::Closing,
            TICKETS => {
                let count = r.u32()?;
                r.zeros::<4>()?;
                if count == 0 || count as usize > MOST_TICKETS {
                    return Err(malformed("the number of tickets", count, "1 to 64"));
                }
                let answers = (0..count).map(|_| TicketAnswer::read(&mut r)).collect::<Result<_, _>>()?;
                ToParticipant::Tickets { request, answers }
            }
            FORWARDED => {
                let bytes: [u8; descriptor::BYTES] = r.array()?;
                let descriptor = Descriptor::decode(&bytes).map_err(|_| {
                    malformed("the first byte of the descriptor", bytes[0], "that of a good descriptor")
                })?;
                ToParticipant::Forwarded { request, descriptor }
            }
            REPORT => ToParticipant::Report { request, page: Box::new(ReportPage::read(&mut r)?) },
            DECLINED => ToParticipant::Declined { request, code: r.refusal()?, why: r.text()? },
            REVOKED => ToParticipant::Revoked { lease: r.lease()? },
            SNAPSHOT => {
                let len = r.u64()?;
                if !(1..=MOST_SNAPSHOT).contains(&len) {
                    return Err(malformed("the length of a snapshot", len, "1 to 16,777,216"));
                }
                ToParticipant::Snapshot { request, len }
            }
            NOTED => ToParticipant::Noted { request },
            number => return Err(malformed("the type", number, "that of a message to a participant")),
        };
        let answers = matches!(
            message,
            ToParticipant::Region { .. }
                | ToParticipant::NoRegion { .. }
                | ToParticipant::Tickets { .. }
                | ToParticipant::Forwarded { .. }
                | ToParticipant::Report { .. }
                | ToParticipant::Declined { .. }
                | ToParticipant::Snapshot { .. }
                | ToParticipant::CounterFile { .. }
                | ToParticipant::Noted { .. }
        );
        check(&header, &r, message.fds(), fds, answers)?;
        Ok(message)
    }
}

//! What a producer says to a participant.

use arrayvec::ArrayVec;
use gpu_api::{Access, DevicePtr, DeviceUuid, MemHandle, ParticipantId, RegionId, Spot};

use super::deposit::DepositId;
use super::report::ReportPage;
use super::ticket::{MOST_TICKETS, TicketAnswer};
use crate::messages;
use crate::wire::descriptor::{Descriptor, SealKey, SessionId};
use crate::wire::field::Field;
use crate::wire::lease_address::LeaseAddress;
use crate::wire::packet::{Malformed, Reader, Writer, malformed};
use crate::wire::refusal::RefusalCode;

messages! {
    /// What a producer says to a participant.
    #[derive(Clone, PartialEq, Eq, Debug)]
    #[allow(
        clippy::large_enum_variant,
        reason = "it lives for one call on the stack; a box would be an allocation a message"
    )]
    pub enum ToParticipant of super::packet::PROTOCOL, "that of a message to a participant" {
        /// The answer to `Hello`. The producer's pidfd and the participant's first counter file
        /// come with it.
        129 Welcome [2] {
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
            /// The key of descriptors that are addressed to this participant.
            key: SealKey,
            /// The key of the session's tickets.
            ticket_key: SealKey,
        }
        /// The other answer to `Hello`; the connection ends.
        130 Refused {
            /// Why, for programs.
            code: RefusalCode,
            /// Why, for people.
            why: String,
        }
        /// A further counter file comes with this message: announced, or asked for.
        131 CounterFile(request) [1] {
            /// Its number.
            index: u32,
            /// Slots in it.
            slots: u32,
        }
        /// Everything needed to map a region.
        132 Region(request) [place.fds()] {
            /// The region.
            region: RegionId,
            /// Bytes.
            len: u64,
            /// The device that it lies on.
            device: DeviceUuid,
            /// What the participant may do with it.
            access: Access,
            /// How to reach it.
            place: RegionPlace,
        }
        /// This participant has no such region.
        133 NoRegion(request) {
            /// The region.
            region: RegionId,
            /// Why, for programs.
            code: RefusalCode,
            /// Why, for people.
            why: String,
        }
        /// The producer would like the mapping of a region to go, once it is not used.
        134 PleaseUnmap {
            /// The region.
            region: RegionId,
        }
        /// The session shuts down; nothing new comes.
        135 Closing {}
        /// What became of claims of tickets.
        136 Tickets(request) {
            /// In the question's order.
            answers: ArrayVec<TicketAnswer, MOST_TICKETS>,
        }
        /// The descriptor that was asked for.
        137 Forwarded(request) {
            /// The descriptor.
            descriptor: Descriptor,
        }
        /// What the session holds.
        138 Report(request) {
            /// A page of it.
            page: Box<ReportPage>,
        }
        /// The request is declined.
        139 Declined(request) {
            /// Why, for programs.
            code: RefusalCode,
            /// Why, for people.
            why: String,
        }
        /// A grant to this participant was taken back before it was claimed.
        140 Revoked {
            /// Which.
            lease: LeaseAddress,
        }
        /// What the session's source of regions looks like, as JSON in a sealed memfd that comes
        /// with the message.
        141 Snapshot(request) [1] {
            /// Bytes of it: 1 to [`MOST_SNAPSHOT`].
            len: u64,
        }
        /// What was said was noted.
        142 Noted(request) {}
        /// The descriptor that was asked for comes with this message.
        143 Fetched(request) [1] {
            /// The name that it was kept under.
            id: DepositId,
        }
    }
}

impl ToParticipant {
    fn check(&self) -> Result<(), Malformed> {
        match self {
            ToParticipant::Region { len: 0, .. } => {
                Err(malformed("the region's length", 0u64, "at least 1"))
            }
            ToParticipant::Tickets { answers, .. } if answers.is_empty() => {
                Err(malformed("the number of tickets", 0u64, "1 to 56"))
            }
            ToParticipant::Region {
                len,
                place: RegionPlace::Piece(spot),
                ..
            } if spot
                .offset
                .checked_add(*len)
                .is_none_or(|end| end > spot.range_len) =>
            {
                Err(malformed(
                    "the region's place in its range",
                    spot.offset,
                    "such that it ends within the range",
                ))
            }
            ToParticipant::Snapshot { len, .. } if !(1..=MOST_SNAPSHOT).contains(len) => Err(
                malformed("the length of a snapshot", *len, "1 to 16,777,216"),
            ),
            _ => Ok(()),
        }
    }
}

/// The most bytes of a snapshot.
pub const MOST_SNAPSHOT: u64 = 16 << 20;

/// How a participant reaches a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegionPlace {
    /// It is the producer itself: the address as it is.
    Local(DevicePtr),
    /// By the vendor's handle.
    Handle(MemHandle),
    /// By the file descriptor that comes with the message.
    Fd,
    /// Likewise, at this place of a range that the participant reserves.
    Piece(Spot),
    /// It is the producer itself, and the region that is named lies behind this one.
    LocalPiece(DevicePtr, RegionId),
}

impl RegionPlace {
    fn fds(&self) -> usize {
        usize::from(matches!(self, RegionPlace::Fd | RegionPlace::Piece(_)))
    }
}

impl Field for RegionPlace {
    fn write(&self, w: &mut Writer<'_>) {
        let kind = match self {
            RegionPlace::Local(_) => 1,
            RegionPlace::Handle(_) => 2,
            RegionPlace::Fd => 3,
            RegionPlace::Piece(_) => 4,
            RegionPlace::LocalPiece(..) => 5,
        };
        w.put(&[kind, 0, 0, 0, 0, 0, 0]);
        match self {
            RegionPlace::Local(ptr) => ptr.write(w),
            RegionPlace::Handle(handle) => handle.write(w),
            RegionPlace::Fd => {}
            RegionPlace::Piece(spot) => spot.write(w),
            RegionPlace::LocalPiece(ptr, behind) => {
                ptr.write(w);
                behind.write(w);
            }
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<RegionPlace, Malformed> {
        let [kind] = r.array()?;
        r.zeros::<6>()?;
        match kind {
            1 => Field::read(r).map(RegionPlace::Local),
            2 => Field::read(r).map(RegionPlace::Handle),
            3 => Ok(RegionPlace::Fd),
            4 => Field::read(r).map(RegionPlace::Piece),
            5 => Ok(RegionPlace::LocalPiece(Field::read(r)?, Field::read(r)?)),
            _ => Err(malformed("the region's place", kind, "1 to 5")),
        }
    }
}

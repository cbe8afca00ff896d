//! Control messages between a participant and its producer: one packet each, at most [`MOST_BYTES`] bytes.
//!
//! Every message starts with the same 16 bytes. They, the magic and the greatest length are the same in all versions,
//! so either side of any version can name both versions when they differ.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 2 | magic `GI` |
//! | 2 | 2 | version |
//! | 4 | 2 | type |
//! | 6 | 2 | file descriptors that come with the packet |
//! | 8 | 8 | request, which the answer repeats; 0 where there is none |
//!
//! | type | message | body from byte 16 on | file descriptors |
//! |---|---|---|---|
//! | 1 | `Hello` | backend u8, manual u8, descendants u16, 0 u32, device 16 | own pidfd, descendants' pidfds |
//! | 2 | `MapRegion` | region u64, access u8, 0 in 7, then the lease that gives the right: file u32, slot u32, generation u64 | |
//! | 3 | `Unmapped` | region u64 | |
//! | 4 | `Bye` | | |
//! | 129 | `Welcome` | session 16, participant u64, pid u32, slots u32, most slots u64 | producer's pidfd, counter file 0 |
//! | 130 | `Refused` | code u16, length u16, text | |
//! | 131 | `CounterFile` | index u32, slots u32 | counter file |
//! | 132 | `Region` | region u64, length u64, device 16, access u8, place u8, 0 in 6, then by place: 1 address u64, 2 handle 64, 3 nothing | for place 3: the memory |
//! | 133 | `NoRegion` | region u64, code u16, length u16, text | |
//! | 134 | `PleaseUnmap` | region u64 | |
//! | 135 | `Closing` | | |
//!
//! All numbers are little-endian. Types 5 to 7 are kept for `ClaimTicket`, `Forward` and `Inspect`, 136 to 138 for
//! their answers. Every byte string that decodes has exactly one meaning and every meaning one byte string.

mod packet;
mod refusal;

pub(crate) use packet::{DecodeError, MOST_BYTES};
pub(crate) use refusal::RefusalCode;

use gpu_api::{Access, BackendKind, DevicePtr, DeviceUuid, MemHandle, ParticipantId, RegionId};

use crate::descriptor::SessionId;
use crate::process::MOST_DESCENDANTS;
use crate::slot::Generation;
use packet::{Header, Writer, malformed};

const HELLO: u16 = 1;
const MAP_REGION: u16 = 2;
const UNMAPPED: u16 = 3;
const BYE: u16 = 4;
const WELCOME: u16 = 129;
const REFUSED: u16 = 130;
const COUNTER_FILE: u16 = 131;
const REGION: u16 = 132;
const NO_REGION: u16 = 133;
const PLEASE_UNMAP: u16 = 134;
const CLOSING: u16 = 135;

/// What a participant says to its producer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ToProducer {
    /// The first message. A pidfd that the participant opened of itself comes with it, then one for each descendant
    /// that keeps the device's files open.
    Hello {
        /// The participant's vendor.
        backend: BackendKind,
        /// The participant's device.
        device: DeviceUuid,
        /// How many pidfds follow the first.
        descendants: u16,
        /// The participant has no thread of its own, so it queues no waits.
        manual: bool,
    },
    /// Asks for what it takes to map a region.
    MapRegion {
        /// Repeated by the answer.
        request: u64,
        /// The region.
        region: RegionId,
        /// What the participant wants to do with it.
        access: Access,
        /// The counter file of a lease on a block of the region: the right to ask.
        file: u32,
        /// The slot in it.
        slot: u32,
        /// The slot's generation, below 2^61.
        generation: Generation,
    },
    /// A region's mapping is gone.
    Unmapped {
        /// The region.
        region: RegionId,
    },
    /// The participant goes; its leases have ended.
    Bye,
}

/// What a producer says to a participant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ToParticipant {
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
    /// A further counter file comes with this message.
    CounterFile {
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
}

/// How a participant reaches a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// It is the producer itself: the address as it is.
    Local(DevicePtr),
    /// By the vendor's handle.
    Handle(MemHandle),
    /// By the file descriptor that comes with the message.
    Fd,
}

impl ToProducer {
    /// Returns how many file descriptors go with the message.
    pub(crate) fn fds(&self) -> usize {
        match self {
            ToProducer::Hello { descendants, .. } => 1 + usize::from(*descendants),
            _ => 0,
        }
    }

    /// Writes the message down and returns its length.
    pub(crate) fn encode(&self, packet: &mut [u8; MOST_BYTES]) -> usize {
        let (number, request) = match self {
            ToProducer::Hello { .. } => (HELLO, 0),
            ToProducer::MapRegion { request, .. } => (MAP_REGION, *request),
            ToProducer::Unmapped { .. } => (UNMAPPED, 0),
            ToProducer::Bye => (BYE, 0),
        };
        let mut w = Writer::start(packet, number, self.fds(), request);
        match self {
            ToProducer::Hello { backend, device, descendants, manual } => {
                w.put(&[*backend as u8, u8::from(*manual)]);
                w.put(&descendants.to_le_bytes());
                w.put(&[0; 4]);
                w.put(&device.0);
            }
            ToProducer::MapRegion { region, access, file, slot, generation, .. } => {
                w.put(&region.0.to_le_bytes());
                w.put(&[*access as u8, 0, 0, 0, 0, 0, 0, 0]);
                w.put(&file.to_le_bytes());
                w.put(&slot.to_le_bytes());
                w.put(&generation.get().to_le_bytes());
            }
            ToProducer::Unmapped { region } => w.put(&region.0.to_le_bytes()),
            ToProducer::Bye => {}
        }
        w.len
    }

    /// Reads a message that came with `fds` file descriptors.
    pub(crate) fn decode(packet: &[u8], fds: usize) -> Result<ToProducer, DecodeError> {
        let (header, mut r) = Header::read(packet)?;
        let message = match header.number {
            HELLO => {
                let backend = r.backend()?;
                let manual = r.flag("the mode")?;
                let descendants = u16::from_le_bytes(r.array()?);
                if usize::from(descendants) > MOST_DESCENDANTS {
                    return Err(malformed("the number of descendants", descendants, "at most 200"));
                }
                r.zeros::<4>()?;
                ToProducer::Hello { backend, device: DeviceUuid(r.array()?), descendants, manual }
            }
            MAP_REGION => {
                let (region, access) = (RegionId(r.u64()?), r.access()?);
                r.zeros::<7>()?;
                let (file, slot) = (u32::from_le_bytes(r.array()?), u32::from_le_bytes(r.array()?));
                let number = r.u64()?;
                let Some(generation) = Generation::new(number) else {
                    return Err(malformed("the generation", number, "below 2^61"));
                };
                ToProducer::MapRegion { request: header.request, region, access, file, slot, generation }
            }
            UNMAPPED => ToProducer::Unmapped { region: RegionId(r.u64()?) },
            BYE => ToProducer::Bye,
            number => return Err(malformed("the type", number, "that of a message to a producer")),
        };
        let answers = matches!(message, ToProducer::MapRegion { .. });
        header.check(r, message.fds(), fds, answers)?;
        Ok(message)
    }
}

impl ToParticipant {
    /// Returns how many file descriptors go with the message.
    pub(crate) fn fds(&self) -> usize {
        match self {
            ToParticipant::Welcome { .. } => 2,
            ToParticipant::CounterFile { .. } | ToParticipant::Region { place: Place::Fd, .. } => 1,
            _ => 0,
        }
    }

    /// Writes the message down and returns its length.
    pub(crate) fn encode(&self, packet: &mut [u8; MOST_BYTES]) -> usize {
        let (number, request) = match self {
            ToParticipant::Welcome { .. } => (WELCOME, 0),
            ToParticipant::Refused { .. } => (REFUSED, 0),
            ToParticipant::CounterFile { .. } => (COUNTER_FILE, 0),
            ToParticipant::Region { request, .. } => (REGION, *request),
            ToParticipant::NoRegion { request, .. } => (NO_REGION, *request),
            ToParticipant::PleaseUnmap { .. } => (PLEASE_UNMAP, 0),
            ToParticipant::Closing => (CLOSING, 0),
        };
        let mut w = Writer::start(packet, number, self.fds(), request);
        match self {
            ToParticipant::Welcome { session, participant, pid, slots, max_slots } => {
                w.put(&session.0);
                w.put(&participant.0.to_le_bytes());
                w.put(&pid.to_le_bytes());
                w.put(&slots.to_le_bytes());
                w.put(&max_slots.to_le_bytes());
            }
            ToParticipant::Refused { code, why } => {
                w.put(&(*code as u16).to_le_bytes());
                w.text(why);
            }
            ToParticipant::CounterFile { index, slots } => {
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
            ToParticipant::Closing => {}
        }
        w.len
    }

    /// Reads a message that came with `fds` file descriptors.
    pub(crate) fn decode(packet: &[u8], fds: usize) -> Result<ToParticipant, DecodeError> {
        let (header, mut r) = Header::read(packet)?;
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
            COUNTER_FILE => ToParticipant::CounterFile { index: r.u32()?, slots: r.u32()? },
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
            number => return Err(malformed("the type", number, "that of a message to a participant")),
        };
        let answers = matches!(message, ToParticipant::Region { .. } | ToParticipant::NoRegion { .. });
        header.check(r, message.fds(), fds, answers)?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn device() -> impl Strategy<Value = DeviceUuid> {
        any::<[u8; 16]>().prop_map(DeviceUuid)
    }

    fn region() -> impl Strategy<Value = RegionId> {
        any::<u64>().prop_map(RegionId)
    }

    fn access() -> impl Strategy<Value = Access> {
        prop_oneof![Just(Access::ReadWrite), Just(Access::ReadOnly)]
    }

    fn refusal() -> impl Strategy<Value = (RefusalCode, String)> {
        let plain = any::<char>().prop_map(|c| if c.is_control() { ' ' } else { c });
        // 64 characters of at most 4 bytes: the longest text that no cut touches.
        let text = proptest::collection::vec(plain, 0..=64).prop_map(String::from_iter);
        (proptest::sample::select(RefusalCode::ALL.to_vec()), text)
    }

    fn place() -> impl Strategy<Value = Place> {
        prop_oneof![
            any::<u64>().prop_map(|ptr| Place::Local(DevicePtr(ptr))),
            (any::<[u8; 32]>(), any::<[u8; 32]>()).prop_map(|(a, b)| {
                let mut handle = [0; 64];
                handle[..32].copy_from_slice(&a);
                handle[32..].copy_from_slice(&b);
                Place::Handle(MemHandle(handle))
            }),
            Just(Place::Fd),
        ]
    }

    fn to_producer() -> impl Strategy<Value = ToProducer> {
        let backend = proptest::sample::select(BackendKind::ALL.to_vec());
        prop_oneof![
            (backend, device(), 0..=MOST_DESCENDANTS as u16, any::<bool>()).prop_map(
                |(backend, device, descendants, manual)| ToProducer::Hello { backend, device, descendants, manual }
            ),
            (any::<u64>(), region(), access(), any::<u32>(), any::<u32>(), 0..1u64 << 61).prop_map(
                |(request, region, access, file, slot, generation)| ToProducer::MapRegion {
                    request,
                    region,
                    access,
                    file,
                    slot,
                    generation: Generation::new(generation).expect("in range"),
                }
            ),
            region().prop_map(|region| ToProducer::Unmapped { region }),
            Just(ToProducer::Bye),
        ]
    }

    fn to_participant() -> impl Strategy<Value = ToParticipant> {
        let welcome = (any::<[u8; 16]>(), any::<u64>(), any::<u32>(), any::<u32>(), any::<u64>());
        prop_oneof![
            welcome.prop_map(|(session, participant, pid, slots, max_slots)| ToParticipant::Welcome {
                session: SessionId(session),
                participant: ParticipantId(participant),
                pid,
                slots,
                max_slots,
            }),
            refusal().prop_map(|(code, why)| ToParticipant::Refused { code, why }),
            (any::<u32>(), any::<u32>()).prop_map(|(index, slots)| ToParticipant::CounterFile { index, slots }),
            (any::<u64>(), region(), 1..=u64::MAX, device(), access(), place()).prop_map(
                |(request, region, len, device, access, place)| ToParticipant::Region {
                    request,
                    region,
                    len,
                    device,
                    access,
                    place
                }
            ),
            (any::<u64>(), region(), refusal()).prop_map(|(request, region, (code, why))| ToParticipant::NoRegion {
                request,
                region,
                code,
                why
            }),
            region().prop_map(|region| ToParticipant::PleaseUnmap { region }),
            Just(ToParticipant::Closing),
        ]
    }

    /// What every message of either direction owes.
    macro_rules! check_message {
        ($kind:ident, $message:expr) => {{
            let message = $message;
            let mut packet = [0xff; MOST_BYTES];
            let len = message.encode(&mut packet);
            let fds = message.fds();
            prop_assert_eq!($kind::decode(&packet[..len], fds), Ok(message));
            for end in 0..len {
                prop_assert!($kind::decode(&packet[..end], fds).is_err(), "cut at {}", end);
            }
            prop_assert!($kind::decode(&packet[..len + 1], fds).is_err(), "a byte too many");
            prop_assert!($kind::decode(&packet[..len], fds + 1).is_err(), "a descriptor too many");
            if fds > 0 {
                prop_assert!($kind::decode(&packet[..len], fds - 1).is_err(), "a descriptor too few");
            }
            packet[2..4].copy_from_slice(&7u16.to_le_bytes());
            for end in 16..=len {
                prop_assert_eq!($kind::decode(&packet[..end], 9), Err(DecodeError::Version { theirs: 7 }));
            }
        }};
    }

    proptest! {
        #[test]
        fn what_goes_to_a_producer_arrives(message in to_producer()) {
            check_message!(ToProducer, message);
        }

        #[test]
        fn what_goes_to_a_participant_arrives(message in to_participant()) {
            check_message!(ToParticipant, message);
        }

        #[test]
        fn bytes_without_meaning_never_panic(
            number in prop_oneof![0..8u16, 128..140u16],
            body in proptest::collection::vec(prop_oneof![Just(0), Just(1), any::<u8>()], 0..600),
            fds in 0..4usize,
        ) {
            let mut packet = b"GI\x01\x00".to_vec();
            packet.extend(number.to_le_bytes());
            packet.extend((fds as u16).to_le_bytes());
            packet.extend(body);
            let mut again = [0; MOST_BYTES];
            if let Ok(message) = ToProducer::decode(&packet, fds) {
                let len = message.encode(&mut again);
                prop_assert_eq!(&again[..len], &packet);
            }
            if let Ok(message) = ToParticipant::decode(&packet, fds) {
                let len = message.encode(&mut again);
                prop_assert_eq!(&again[..len], &packet);
            }
            let _ = ToProducer::decode(&packet[4..], fds);
        }

        #[test]
        fn an_altered_byte_changes_the_meaning_or_is_refused(
            message in to_participant(),
            at in 0..MOST_BYTES,
            mask in 1..=u8::MAX,
        ) {
            let mut packet = [0; MOST_BYTES];
            let len = message.encode(&mut packet);
            packet[at % len] ^= mask;
            prop_assert_ne!(ToParticipant::decode(&packet[..len], message.fds()), Ok(message));
        }
    }

    #[test]
    fn the_bytes_are_where_the_tables_say() {
        let mut packet = [0; MOST_BYTES];
        let hello = ToProducer::Hello {
            backend: BackendKind::Cuda,
            device: DeviceUuid(*b"0123456789abcdef"),
            descendants: 3,
            manual: true,
        };
        let len = hello.encode(&mut packet);
        let start = b"GI\x01\0\x01\0\x04\0\0\0\0\0\0\0\0\0";
        assert_eq!(packet[..len], [&start[..], b"\x02\x01\x03\0\0\0\0\0", b"0123456789abcdef"].concat());

        let region = ToParticipant::Region {
            request: 9,
            region: RegionId(2),
            len: 4096,
            device: DeviceUuid(*b"0123456789abcdef"),
            access: Access::ReadOnly,
            place: Place::Fd,
        };
        let len = region.encode(&mut packet);
        let start = b"GI\x01\0\x84\0\x01\0\x09\0\0\0\0\0\0\0";
        let body = b"\x02\0\0\0\0\0\0\0\0\x10\0\0\0\0\0\x000123456789abcdef\x01\x03\0\0\0\0\0\0";
        assert_eq!(packet[..len], [&start[..], body].concat());

        let refused = ToParticipant::Refused { code: RefusalCode::User, why: "uid 7".into() };
        let len = refused.encode(&mut packet);
        let start = b"GI\x01\0\x82\0\0\0\0\0\0\0\0\0\0\0";
        assert_eq!(packet[..len], [&start[..], b"\x02\0\x05\0uid 7"].concat());
    }

    #[test]
    fn the_longest_message_fits() {
        let mut packet = [0; MOST_BYTES];
        let why = "x".repeat(10_000);
        let message = ToParticipant::NoRegion { request: 1, region: RegionId(1), code: RefusalCode::Failed, why };
        let len = message.encode(&mut packet);
        let Ok(ToParticipant::NoRegion { why, .. }) = ToParticipant::decode(&packet[..len], 0) else {
            panic!("the longest message is refused");
        };
        assert_eq!(why.len(), 256);
    }
}

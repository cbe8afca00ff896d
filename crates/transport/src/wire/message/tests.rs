use std::time::Duration;

use super::*;
use crate::os::process::MOST_DESCENDANTS;
use crate::shared::slot::Generation;
use crate::wire::descriptor::{Descriptor, Fence, SealKey, Sealer, SessionId, VERSION};
use crate::wire::lease_address::LeaseAddress;
use crate::wire::packet::Versions;
use crate::wire::table::DecodeError;
use gpu_api::{
    Access, BackendKind, DevicePtr, DeviceUuid, Holder, MemHandle, ParticipantId, RegionId, Spot,
};
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

/// The refusals that a session may send.
fn refusals() -> Vec<RefusalCode> {
    let of_sessions = |code: &RefusalCode| (*code as u16) < 64;
    RefusalCode::ALL
        .iter()
        .copied()
        .filter(of_sessions)
        .collect()
}

fn refusal() -> impl Strategy<Value = (RefusalCode, String)> {
    let plain = any::<char>().prop_map(|c| if c.is_control() { ' ' } else { c });
    // 64 characters of at most 4 bytes: the longest text that no cut touches.
    let text = proptest::collection::vec(plain, 0..=64).prop_map(String::from_iter);
    (proptest::sample::select(refusals()), text)
}

fn place() -> impl Strategy<Value = RegionPlace> {
    prop_oneof![
        any::<u64>().prop_map(|ptr| RegionPlace::Local(DevicePtr(ptr))),
        (any::<[u8; 32]>(), any::<[u8; 32]>()).prop_map(|(a, b)| {
            let mut handle = [0; 64];
            handle[..32].copy_from_slice(&a);
            handle[32..].copy_from_slice(&b);
            RegionPlace::Handle(MemHandle(handle))
        }),
        Just(RegionPlace::Fd),
        // The longest range, so that it ends within whatever its length.
        (any::<u64>(), region()).prop_map(|(range, behind)| RegionPlace::Piece(Spot {
            range,
            range_len: u64::MAX,
            offset: 0,
            behind
        })),
        (any::<u64>(), region())
            .prop_map(|(ptr, behind)| RegionPlace::LocalPiece(DevicePtr(ptr), behind)),
    ]
}

fn lease() -> impl Strategy<Value = LeaseAddress> {
    (any::<u32>(), any::<u32>(), generation()).prop_map(|(file, slot, generation)| LeaseAddress {
        file,
        slot,
        generation,
    })
}

fn generation() -> impl Strategy<Value = Generation> {
    (0..1u64 << 61).prop_map(|number| Generation::new(number).expect("in range"))
}

fn ticket() -> impl Strategy<Value = TicketId> {
    (any::<u32>(), generation()).prop_map(|(number, generation)| TicketId { number, generation })
}

fn extent() -> impl Strategy<Value = Extent> {
    (region(), 0..1u64 << 63, 1..1u64 << 63).prop_map(|(region, offset, len)| Extent {
        region,
        offset,
        len,
    })
}

fn heir() -> impl Strategy<Value = Heir> {
    prop_oneof![
        any::<u64>().prop_map(|id| Heir::Participant(ParticipantId(id))),
        any::<u32>().prop_map(|claims| Heir::Ticket(std::num::NonZeroU32::new(claims))),
    ]
}

fn answer() -> impl Strategy<Value = TicketAnswer> {
    let fence = proptest::option::of((0..u32::MAX, 1..1u64 << 61));
    let outcome = prop_oneof![
        (lease(), extent(), fence, any::<bool>()).prop_map(|(lease, place, fence, again)| {
            let fence = fence.map(|(word, value)| Fence {
                file: 0,
                word,
                value,
            });
            Outcome::Granted(Granted {
                lease,
                place,
                fence,
                again,
            })
        }),
        Just(Outcome::Revoked),
        Just(Outcome::AlreadyClaimed),
        Just(Outcome::Stale),
        Just(Outcome::Limit),
        Just(Outcome::Failed),
        Just(Outcome::Later),
    ];
    (ticket(), outcome).prop_map(|(ticket, outcome)| TicketAnswer { ticket, outcome })
}

fn page() -> impl Strategy<Value = ReportPage> {
    let names = (
        any::<[u8; 16]>(),
        device(),
        proptest::sample::select(BackendKind::ALL.to_vec()),
        any::<u32>(),
    );
    let numbers = proptest::collection::vec(any::<u64>(), NUMBERS);
    let command = "[a-z\u{20ac}]{0,10}";
    let holder = (any::<[u64; 5]>(), any::<u32>(), any::<bool>(), command).prop_map(
        |(numbers, pid, dying, command)| {
            let [participant, leases, bytes, mappings, oldest_ms] = numbers;
            let participant = ParticipantId(participant);
            Holder {
                participant,
                leases,
                bytes,
                mappings,
                oldest: Duration::from_millis(oldest_ms),
                pid,
                dying,
                command,
            }
        },
    );
    let next = proptest::option::of(0..u32::MAX);
    (
        names,
        any::<u64>(),
        numbers,
        next,
        proptest::collection::vec(holder, 0..=MOST_HOLDERS),
    )
        .prop_map(
            |((session, device, backend, pid), age_ms, numbers, next, holders)| ReportPage {
                session: SessionId(session),
                device,
                backend,
                pid,
                age_ms,
                numbers: numbers.try_into().expect("as many"),
                next,
                holders,
            },
        )
}

fn descriptor() -> impl Strategy<Value = Descriptor> {
    (1..1u64 << 40, any::<[u8; 16]>()).prop_map(|(len, session)| {
        let fields = crate::wire::descriptor::Fields {
            backend: BackendKind::Host,
            kind: crate::wire::descriptor::GrantKind::Ticket,
            device: DeviceUuid([1; 16]),
            session: SessionId(session),
            participant: ParticipantId(0),
            file: 0,
            slot: 3,
            generation: 1,
            region: RegionId(2),
            offset: 256,
            len,
            fence: None,
        };
        Sealer::new(&SealKey::from_bytes([6; 16]), &fields.names()).encode(&fields, &[5; 64])
    })
}

fn to_producer() -> impl Strategy<Value = ToProducer> {
    let backend = proptest::sample::select(BackendKind::ALL.to_vec());
    prop_oneof![
        (
            backend,
            device(),
            0..=MOST_DESCENDANTS as u16,
            any::<u32>(),
            "[a-z é]{0,20}"
        )
            .prop_map(
                |(backend, device, descendants, sign, name)| ToProducer::Hello {
                    backend,
                    device,
                    descendants,
                    sign,
                    name
                }
            ),
        (any::<u64>(), region(), access(), lease()).prop_map(|(request, region, access, lease)| {
            ToProducer::MapRegion {
                request,
                region,
                access,
                lease,
            }
        }),
        (
            any::<u64>(),
            proptest::collection::vec(ticket(), 1..=MOST_TICKETS)
        )
            .prop_map(|(request, tickets)| {
                ToProducer::ClaimTickets {
                    request,
                    tickets: tickets.into_iter().collect(),
                }
            }),
        (
            any::<u64>(),
            any::<u64>(),
            lease(),
            any::<(u64, u64)>(),
            heir(),
            any::<[u8; 32]>()
        )
            .prop_map(|(request, settled, lease, (offset, len), heir, half)| {
                let mut user = [0; 64];
                user[16..48].copy_from_slice(&half);
                ToProducer::Forward {
                    request,
                    settled,
                    lease,
                    offset,
                    len,
                    heir,
                    user,
                }
            }),
        (any::<u64>(), any::<u32>())
            .prop_map(|(request, from)| ToProducer::Inspect { request, from }),
        any::<u64>().prop_map(|request| ToProducer::TakeSnapshot { request }),
        (any::<u64>(), region())
            .prop_map(|(request, region)| ToProducer::Unmapped { request, region }),
        any::<u64>().prop_map(|request| ToProducer::Bye { request }),
        (any::<u64>(), any::<u32>())
            .prop_map(|(request, index)| ToProducer::AskFile { request, index }),
        (any::<u64>(), ticket())
            .prop_map(|(request, ticket)| ToProducer::GiveBack { request, ticket }),
        (any::<(u64, u64)>(), any::<[u8; 16]>()).prop_map(|((request, settled), id)| {
            ToProducer::Deposit {
                request,
                settled,
                id: DepositId(id),
            }
        }),
        (any::<u64>(), any::<[u8; 16]>()).prop_map(|(request, id)| ToProducer::Fetch {
            request,
            id: DepositId(id)
        }),
        (any::<(u64, u64, bool)>(), any::<[u8; 16]>()).prop_map(|((request, of, returns), id)| {
            ToProducer::EndDeposit {
                request,
                id: DepositId(id),
                of,
                returns,
            }
        }),
    ]
}

fn to_participant() -> impl Strategy<Value = ToParticipant> {
    let welcome = (
        any::<[u8; 16]>(),
        any::<u64>(),
        any::<u32>(),
        any::<u32>(),
        any::<u64>(),
        any::<([u8; 16], [u8; 16])>(),
    );
    prop_oneof![
        welcome.prop_map(|(session, participant, pid, slots, max_slots, keys)| {
            ToParticipant::Welcome {
                session: SessionId(session),
                participant: ParticipantId(participant),
                pid,
                slots,
                max_slots,
                key: SealKey::from_bytes(keys.0),
                ticket_key: SealKey::from_bytes(keys.1),
            }
        }),
        refusal().prop_map(|(code, why)| ToParticipant::Refused { code, why }),
        (any::<u64>(), any::<u32>(), any::<u32>()).prop_map(|(request, index, slots)| {
            ToParticipant::CounterFile {
                request,
                index,
                slots,
            }
        }),
        any::<u64>().prop_map(|request| ToParticipant::Noted { request }),
        (
            any::<u64>(),
            region(),
            1..=u64::MAX,
            device(),
            access(),
            place()
        )
            .prop_map(|(request, region, len, device, access, place)| {
                ToParticipant::Region {
                    request,
                    region,
                    len,
                    device,
                    access,
                    place,
                }
            }),
        (any::<u64>(), region(), refusal()).prop_map(|(request, region, (code, why))| {
            ToParticipant::NoRegion {
                request,
                region,
                code,
                why,
            }
        }),
        region().prop_map(|region| ToParticipant::PleaseUnmap { region }),
        Just(ToParticipant::Closing {}),
        (
            any::<u64>(),
            proptest::collection::vec(answer(), 1..=MOST_TICKETS)
        )
            .prop_map(|(request, answers)| ToParticipant::Tickets {
                request,
                answers: answers.into_iter().collect()
            }),
        (any::<u64>(), descriptor()).prop_map(|(request, descriptor)| ToParticipant::Forwarded {
            request,
            descriptor
        }),
        (any::<u64>(), page()).prop_map(|(request, page)| ToParticipant::Report {
            request,
            page: Box::new(page)
        }),
        (any::<u64>(), refusal()).prop_map(|(request, (code, why))| ToParticipant::Declined {
            request,
            code,
            why
        }),
        lease().prop_map(|lease| ToParticipant::Revoked { lease }),
        (any::<u64>(), 1..=MOST_SNAPSHOT)
            .prop_map(|(request, len)| ToParticipant::Snapshot { request, len }),
        (any::<u64>(), any::<[u8; 16]>()).prop_map(|(request, id)| ToParticipant::Fetched {
            request,
            id: DepositId(id)
        }),
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
            prop_assert!(
                $kind::decode(&packet[..end], fds).is_err(),
                "cut at {}",
                end
            );
        }
        prop_assert!(
            $kind::decode(&packet[..len + 1], fds).is_err(),
            "a byte too many"
        );
        prop_assert!(
            $kind::decode(&packet[..len], fds + 1).is_err(),
            "a descriptor too many"
        );
        if fds > 0 {
            prop_assert!(
                $kind::decode(&packet[..len], fds - 1).is_err(),
                "a descriptor too few"
            );
        }
        packet[2..4].copy_from_slice(&7u16.to_le_bytes());
        for end in 16..=len {
            prop_assert_eq!(
                $kind::decode(&packet[..end], 9),
                Err(DecodeError::Version {
                    theirs: 7,
                    ours: Versions {
                        lowest: VERSION,
                        highest: VERSION
                    }
                })
            );
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
        number in prop_oneof![0..10u16, 128..143u16],
        body in proptest::collection::vec(prop_oneof![Just(0), Just(1), any::<u8>()], 0..600),
        fds in 0..4usize,
    ) {
        let mut packet = b"GI\x02\x00".to_vec();
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
    let (backend, device) = (BackendKind::Cuda, DeviceUuid(*b"0123456789abcdef"));
    let hello = ToProducer::Hello {
        backend,
        device,
        descendants: 3,
        sign: 0x0403_0201,
        name: "decoder".into(),
    };
    let len = hello.encode(&mut packet);
    let start = b"GI\x02\0\x01\0\x04\0\0\0\0\0\0\0\0\0";
    assert_eq!(
        packet[..len],
        [
            &start[..],
            b"\x02\0\x03\0\x01\x02\x03\x04",
            b"0123456789abcdef",
            b"\x07\0decoder"
        ]
        .concat()
    );

    let region = ToParticipant::Region {
        request: 9,
        region: RegionId(2),
        len: 4096,
        device: DeviceUuid(*b"0123456789abcdef"),
        access: Access::ReadOnly,
        place: RegionPlace::Fd,
    };
    let len = region.encode(&mut packet);
    let start = b"GI\x02\0\x84\0\x01\0\x09\0\0\0\0\0\0\0";
    let body = b"\x02\0\0\0\0\0\0\0\0\x10\0\0\0\0\0\x000123456789abcdef\x01\x03\0\0\0\0\0\0";
    assert_eq!(packet[..len], [&start[..], body].concat());

    let spot = Spot {
        range: 3,
        range_len: 1 << 30,
        offset: 1 << 20,
        behind: RegionId(6),
    };
    let (device, access, place) = (
        DeviceUuid(*b"0123456789abcdef"),
        Access::ReadWrite,
        RegionPlace::Piece(spot),
    );
    let piece = ToParticipant::Region {
        request: 9,
        region: RegionId(2),
        len: 4096,
        device,
        access,
        place,
    };
    let len = piece.encode(&mut packet);
    let start = b"GI\x02\0\x84\0\x01\0\x09\0\0\0\0\0\0\0";
    let body = b"\x02\0\0\0\0\0\0\0\0\x10\0\0\0\0\0\x000123456789abcdef\x00\x04\0\0\0\0\0\0";
    let spot = b"\x03\0\0\0\0\0\0\0\0\0\0\x40\0\0\0\0\0\0\x10\0\0\0\0\0\x06\0\0\0\0\0\0\0";
    assert_eq!(packet[..len], [&start[..], body, spot].concat());

    let generation = Generation::new(7).expect("in range");
    let lease = LeaseAddress {
        file: 5,
        slot: 6,
        generation,
    };
    let map = ToProducer::MapRegion {
        request: 9,
        region: RegionId(2),
        access: Access::ReadOnly,
        lease,
    };
    let len = map.encode(&mut packet);
    let start = b"GI\x02\0\x02\0\0\0\x09\0\0\0\0\0\0\0";
    let body = b"\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x05\0\0\0\x06\0\0\0\x07\0\0\0\0\0\0\0";
    assert_eq!(packet[..len], [&start[..], body].concat());

    let ticket = TicketId {
        number: 4,
        generation,
    };
    let claim = ToProducer::ClaimTickets {
        request: 9,
        tickets: [ticket].into_iter().collect(),
    };
    let len = claim.encode(&mut packet);
    let start = b"GI\x02\0\x05\0\0\0\x09\0\0\0\0\0\0\0";
    let body = b"\x01\0\0\0\0\0\0\0\x04\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0";
    assert_eq!(packet[..len], [&start[..], body].concat());

    let heir = Heir::Participant(ParticipantId(3));
    let forward = ToProducer::Forward {
        request: 9,
        settled: 8,
        lease,
        offset: 256,
        len: 512,
        heir,
        user: [8; 64],
    };
    let len = forward.encode(&mut packet);
    let start = b"GI\x02\0\x06\0\0\0\x09\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0\x05\0\0\0\x06\0\0\0\x07\0\0\0\0\0\0\0";
    let part = b"\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0";
    let body = b"\x01\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0";
    assert_eq!(packet[..len], [&start[..], part, body, &[8; 64]].concat());

    let fence = Some(Fence {
        file: 0,
        word: 2,
        value: 3,
    });
    let answer = TicketAnswer {
        ticket,
        outcome: Outcome::Granted(Granted {
            lease,
            place: Extent {
                region: RegionId(2),
                offset: 256,
                len: 512,
            },
            fence,
            again: false,
        }),
    };
    let tickets = ToParticipant::Tickets {
        request: 9,
        answers: [answer].into_iter().collect(),
    };
    let len = tickets.encode(&mut packet);
    let start = b"GI\x02\0\x88\0\0\0\x09\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0";
    let body = b"\x04\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0\x05\0\0\0\x06\0\0\0\x07\0\0\0\0\0\0\0";
    let place = b"\x02\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0";
    let fence = b"\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0";
    assert_eq!(packet[..len], [&start[..], body, place, fence].concat());

    let (key, ticket_key) = (
        SealKey::from_bytes([0xaa; 16]),
        SealKey::from_bytes([0xbb; 16]),
    );
    let welcome = ToParticipant::Welcome {
        session: SessionId([0xa5; 16]),
        participant: ParticipantId(3),
        pid: 4,
        slots: 64,
        max_slots: 128,
        key,
        ticket_key,
    };
    assert!(
        format!("{welcome:?}").contains("key: SealKey(..), ticket_key: SealKey(..)"),
        "{welcome:?}"
    );
    let len = welcome.encode(&mut packet);
    let start = b"GI\x02\0\x81\0\x02\0\0\0\0\0\0\0\0\0";
    let body = b"\x03\0\0\0\0\0\0\0\x04\0\0\0\x40\0\0\0\x80\0\0\0\0\0\0\0";
    assert_eq!(
        packet[..len],
        [&start[..], &[0xa5; 16], body, &[0xaa; 16], &[0xbb; 16]].concat()
    );

    let snapshot = ToParticipant::Snapshot {
        request: 9,
        len: 4097,
    };
    let len = snapshot.encode(&mut packet);
    let start = b"GI\x02\0\x8d\0\x01\0\x09\0\0\0\0\0\0\0";
    assert_eq!(
        packet[..len],
        [&start[..], b"\x01\x10\0\0\0\0\0\0"].concat()
    );

    let id = DepositId([0xcc; 16]);
    let deposit = ToProducer::Deposit {
        request: 9,
        settled: 8,
        id,
    };
    let len = deposit.encode(&mut packet);
    let start = b"GI\x02\0\x0b\0\x01\0\x09\0\0\0\0\0\0\0";
    let settled = b"\x08\0\0\0\0\0\0\0";
    assert_eq!(packet[..len], [&start[..], settled, &id.0].concat());
    let fetch = ToProducer::Fetch { request: 9, id };
    let len = fetch.encode(&mut packet);
    let start = b"GI\x02\0\x0c\0\0\0\x09\0\0\0\0\0\0\0";
    assert_eq!(packet[..len], [&start[..], &id.0].concat());
    let end = ToProducer::EndDeposit {
        request: 9,
        id,
        of: 8,
        returns: true,
    };
    let len = end.encode(&mut packet);
    let start = b"GI\x02\0\x0d\0\0\0\x09\0\0\0\0\0\0\0";
    let returns = b"\x01\0\0\0\0\0\0\0";
    assert_eq!(
        packet[..len],
        [&start[..], &id.0, settled, returns].concat()
    );
    let fetched = ToParticipant::Fetched { request: 9, id };
    let len = fetched.encode(&mut packet);
    let start = b"GI\x02\0\x8f\0\x01\0\x09\0\0\0\0\0\0\0";
    assert_eq!(packet[..len], [&start[..], &id.0].concat());

    let refused = ToParticipant::Refused {
        code: RefusalCode::User,
        why: "uid 7".into(),
    };
    let len = refused.encode(&mut packet);
    let start = b"GI\x02\0\x82\0\0\0\0\0\0\0\0\0\0\0";
    assert_eq!(packet[..len], [&start[..], b"\x02\0\x05\0uid 7"].concat());
}

#[test]
fn the_longest_message_fits() {
    let mut packet = [0; MOST_BYTES];
    let generation = Generation::new(7).expect("in range");
    let lease = LeaseAddress {
        file: 5,
        slot: 6,
        generation,
    };
    let place = Extent {
        region: RegionId(2),
        offset: 256,
        len: 512,
    };
    let answer = TicketAnswer {
        ticket: TicketId {
            number: 4,
            generation,
        },
        outcome: Outcome::Granted(Granted {
            lease,
            place,
            fence: None,
            again: true,
        }),
    };
    let message = ToParticipant::Tickets {
        request: 1,
        answers: [answer; MOST_TICKETS].into_iter().collect(),
    };
    let len = message.encode(&mut packet);
    assert_eq!(ToParticipant::decode(&packet[..len], 0), Ok(message));
    let why = "x".repeat(10_000);
    let message = ToParticipant::NoRegion {
        request: 1,
        region: RegionId(1),
        code: RefusalCode::Failed,
        why,
    };
    let len = message.encode(&mut packet);
    let Ok(ToParticipant::NoRegion { why, .. }) = ToParticipant::decode(&packet[..len], 0) else {
        panic!("the longest message is refused");
    };
    assert_eq!(why.len(), 256);
}

#[test]
fn a_snapshot_is_neither_empty_nor_longer_than_the_most() {
    let mut packet = [0; MOST_BYTES];
    for len in [0, MOST_SNAPSHOT + 1, u64::MAX] {
        let written = ToParticipant::Snapshot { request: 1, len }.encode(&mut packet);
        let refused = ToParticipant::decode(&packet[..written], 1).expect_err("a bad length");
        assert!(
            refused.to_string().contains("the length of a snapshot"),
            "{refused}"
        );
    }
}

#[test]
fn a_piece_ends_within_its_range() {
    let mut packet = [0; MOST_BYTES];
    let bad = [(4095, 0, 4096), (8192, 4097, 4096), (8192, u64::MAX, 4096)];
    for (range_len, offset, len) in bad {
        let place = RegionPlace::Piece(Spot {
            range: 0,
            range_len,
            offset,
            behind: RegionId(1),
        });
        let (request, region, device, access) =
            (1, RegionId(0), DeviceUuid([0; 16]), Access::ReadWrite);
        let region = ToParticipant::Region {
            request,
            region,
            len,
            device,
            access,
            place,
        };
        let written = region.encode(&mut packet);
        let refused = ToParticipant::decode(&packet[..written], 1).expect_err("beyond the range");
        assert!(
            refused
                .to_string()
                .contains("the region's place in its range"),
            "{refused}"
        );
    }
}

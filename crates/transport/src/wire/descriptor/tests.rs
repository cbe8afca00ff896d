//! What is encoded is decoded, and nothing else.

use gpu_api::{BackendKind, DeviceUuid, RegionId};
use proptest::prelude::*;

use super::layout::*;
use super::*;

fn fields() -> Fields {
    Fields {
        backend: BackendKind::Cuda,
        kind: GrantKind::Addressed,
        device: DeviceUuid(*b"0123456789abcdef"),
        session: SessionId([0xa5; 16]),
        participant: ParticipantId(7),
        file: 1,
        slot: 2,
        generation: 3,
        region: RegionId(4),
        offset: 4096,
        len: 512,
        fence: Some(Fence {
            file: 5,
            word: 6,
            value: 8,
        }),
    }
}

fn encode(fields: &Fields, user: &[u8; 64]) -> Descriptor {
    Sealer::new(&SealKey::from_bytes([7; 16]), &fields.names()).encode(fields, user)
}

fn any_fields() -> impl Strategy<Value = (Fields, [u8; 64])> {
    let names = (
        0..3usize,
        any::<[u8; 16]>(),
        any::<[u8; 16]>(),
        any::<bool>(),
        any::<u64>(),
    );
    let slot = (any::<u32>(), any::<u32>(), 0..LIMIT, any::<u64>());
    let place = (any::<u64>(), 1..=u64::MAX).prop_map(|(offset, len)| {
        if offset.checked_add(len).is_some() {
            (offset, len)
        } else {
            (0, len)
        }
    });
    let fence = proptest::option::of((any::<u32>(), 0..NO_FENCE, 1..LIMIT));
    (names, slot, place, fence, any::<[u8; 32]>()).prop_map(|(names, slot, place, fence, half)| {
        let (backend, device, session, ticket, participant) = names;
        let fields = Fields {
            backend: BackendKind::ALL[backend],
            kind: if ticket {
                GrantKind::Ticket
            } else {
                GrantKind::Addressed
            },
            device: DeviceUuid(device),
            session: SessionId(session),
            participant: ParticipantId(if ticket { 0 } else { participant }),
            file: slot.0,
            slot: slot.1,
            generation: slot.2,
            region: RegionId(slot.3),
            offset: place.0,
            len: place.1,
            fence: fence.map(|(file, word, value)| Fence { file, word, value }),
        };
        let mut user = [0; 64];
        user[16..48].copy_from_slice(&half);
        (fields, user)
    })
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded((fields, user) in any_fields()) {
        let d = encode(&fields, &user);
        let back = Descriptor::decode(d.as_bytes())?;
        prop_assert_eq!(back, d);
        prop_assert_eq!(back.fields(), fields);
        prop_assert_eq!(back.user(), &user);
    }

    #[test]
    fn bytes_without_meaning_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(Descriptor::decode(&bytes).is_err());
    }

    #[test]
    fn edited_bytes_are_refused_or_read_as_they_were_written(
        (fields, user) in any_fields(),
        edits in proptest::collection::vec((AT_BACKEND..BYTES, any::<u8>()), 0..40),
    ) {
        let mut d = encode(&fields, &user);
        for (at, byte) in edits {
            d.0[at] = byte;
        }
        if let Ok(good) = Descriptor::decode(&d.0) {
            let again = encode(&good.fields(), good.user());
            prop_assert_eq!(&again.0[..AT_SUM], &d.0[..AT_SUM]);
        }
    }
}

#[test]
fn the_bytes_are_where_the_table_says() {
    let d = encode(&fields(), &[9; 64]);
    let mut expected = Vec::new();
    expected.extend(b"GIPC\x02\x00\x02\x01");
    expected.extend(b"0123456789abcdef");
    expected.extend([0xa5; 16]);
    expected.extend(7u64.to_le_bytes());
    expected.extend([1, 0, 0, 0, 2, 0, 0, 0]);
    for value in [3u64, 4, 4096, 512] {
        expected.extend(value.to_le_bytes());
    }
    expected.extend([6, 0, 0, 0, 5, 0, 0, 0]);
    expected.extend([8, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([1, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([9; 64]);
    expected.extend([0; 8]);
    assert_eq!(&d.as_bytes()[..AT_SUM], expected);
}

/// Edits a good descriptor and returns what `decode` says.
fn refusal(at: usize, bytes: &[u8]) -> String {
    let mut d = encode(&fields(), &[0; 64]);
    d.0[at..at + bytes.len()].copy_from_slice(bytes);
    Descriptor::decode(&d.0)
        .expect_err("an edit that decode must refuse")
        .to_string()
}

#[test]
fn every_refusal_names_its_field() {
    let max = u64::MAX.to_le_bytes();
    let cases: [(usize, &[u8], &str); 14] = [
        (0, b"GOPC", "the magic is 474f5043, but must be 47495043"),
        (
            AT_VERSION,
            &[3, 0],
            "descriptor version differs: 3 there, 2 here; build both sides from one version",
        ),
        (
            AT_BACKEND,
            &[9],
            "the backend is 9, but must be 1 (host), 2 (cuda) or 3 (hip)",
        ),
        (
            AT_KIND,
            &[3],
            "the kind of grant is 3, but must be 1 (addressed) or 2 (ticket)",
        ),
        (
            AT_KIND,
            &[2],
            "the participant of a ticket is 0x7, but must be 0",
        ),
        (
            AT_GENERATION,
            &max,
            "the generation is 18446744073709551615, but must be below 2^61",
        ),
        (
            AT_LEN,
            &[0; 8],
            "the block's length is 0 bytes, but must be at least 1 byte",
        ),
        (
            AT_LEN,
            &max,
            "the block's end is 4096 + 18446744073709551615, but must be below 2^64",
        ),
        (
            AT_FENCE_WORD,
            &[255; 4],
            "the absent fence is file 5, value 8, but must be file 0, value 0",
        ),
        (
            AT_FENCE_VALUE,
            &[0; 8],
            "the fence's value is 0, but must be above 0 and below 2^61",
        ),
        (AT_FLAGS, &[2], "the flags is 0x2, but must be 0 or 1"),
        (
            AT_FLAGS,
            &[1],
            "the flag of user bytes is 1, but must be 1 with user bytes, and 0 with 64 zeroes",
        ),
        (
            AT_USER,
            &[1],
            "the flag of user bytes is 0, but must be 1 with user bytes, and 0 with 64 zeroes",
        ),
        (
            AT_ZERO,
            &[1],
            "the padding is 0100000000000000, but must be zero",
        ),
    ];
    for (at, bytes, text) in cases {
        let refusal = refusal(at, bytes);
        assert!(refusal.contains(text), "{refusal:?} lacks {text:?}");
    }
}

#[test]
fn a_wrong_length_says_so() {
    let d = encode(&fields(), &[0; 64]);
    let short = Descriptor::decode(&d.as_bytes()[..191]).expect_err("one byte too few");
    assert_eq!(
        short.to_string(),
        "not a descriptor: the length is 191 bytes, but must be 192 bytes; \
         pass the bytes of `share` on whole and unchanged"
    );
}

#[test]
fn logs_show_neither_session_nor_slot() {
    let d = encode(&fields(), &[0; 64]);
    assert_eq!(
        format!("{d:?}"),
        "Descriptor(cuda Addressed, 512 bytes, ..)"
    );
    assert_eq!(
        fields().session.to_string(),
        "a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5"
    );
}

#[test]
fn who_granted_it_and_to_whom_can_be_read() {
    let addressed = encode(&fields(), &[0; 64]);
    assert_eq!(
        (addressed.session(), addressed.addressee()),
        (SessionId([0xa5; 16]), Some(ParticipantId(7)))
    );
    let ticket = Fields {
        kind: GrantKind::Ticket,
        participant: ParticipantId(0),
        ..fields()
    };
    assert_eq!(encode(&ticket, &[0; 64]).addressee(), None);
}

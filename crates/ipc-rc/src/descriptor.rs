//! The bytes that travel from producer to consumer.
//!
//! A descriptor names a grant and says where its bytes lie. It holds no vendor handle and no address, so whoever
//! reads it learns nothing that opens memory: the claim does that, at the producer.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `GIPC` |
//! | 4 | 2 | version |
//! | 6 | 1 | backend |
//! | 7 | 1 | kind of grant: 1 addressed, 2 ticket |
//! | 8 | 16 | device uuid |
//! | 24 | 16 | session |
//! | 40 | 8 | participant; 0 for a ticket |
//! | 48 | 4 | counter file |
//! | 52 | 4 | slot in it, or ticket |
//! | 56 | 8 | generation, below 2^61 |
//! | 64 | 8 | region |
//! | 72 | 8 | offset in the region |
//! | 80 | 8 | length |
//! | 88 | 4 | fence: word; 2^32-1 for no fence, and then the next two are 0 |
//! | 92 | 4 | fence: counter file of the word |
//! | 96 | 8 | fence: value, above 0 and below 2^61 |
//! | 104 | 8 | flags: none is defined, so 0 |
//! | 112 | 64 | the user's own |
//! | 176 | 12 | zero |
//! | 188 | 4 | crc32c of the 188 bytes before |
//!
//! All numbers are little-endian. Every field has exactly one legal encoding, so equal descriptors are equal bytes.

use std::fmt;

use gpu_api::{BackendKind, DeviceUuid, Error, ParticipantId, RegionId, Result};

use crate::checksum;

/// The length of every descriptor.
pub const BYTES: usize = 192;

/// The version of descriptors and messages. Both sides must have the same.
pub const VERSION: u16 = 1;

const MAGIC: [u8; 4] = *b"GIPC";
/// The number of no fence word.
pub(crate) const NO_FENCE: u32 = u32::MAX;
/// Above are the three state bits of a slot word; the poison of timeline words lies there too.
pub(crate) const LIMIT: u64 = 1 << 61;

const AT_VERSION: usize = 4;
const AT_BACKEND: usize = 6;
const AT_KIND: usize = 7;
const AT_DEVICE: usize = 8;
const AT_SESSION: usize = 24;
const AT_PARTICIPANT: usize = 40;
const AT_FILE: usize = 48;
const AT_SLOT: usize = 52;
const AT_GENERATION: usize = 56;
const AT_REGION: usize = 64;
const AT_OFFSET: usize = 72;
const AT_LEN: usize = 80;
const AT_FENCE_WORD: usize = 88;
const AT_FENCE_FILE: usize = 92;
const AT_FENCE_VALUE: usize = 96;
const AT_FLAGS: usize = 104;
const AT_USER: usize = 112;
const AT_ZERO: usize = 176;
const AT_CRC: usize = 188;
/// The bytes that the checksum is of.
pub(crate) const CHECKED: usize = AT_CRC;
const _: () = assert!(AT_CRC + 4 == BYTES && AT_ZERO + 12 == AT_CRC && AT_USER + 64 == AT_ZERO);

/// Identifies a session: 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct SessionId(pub [u8; 16]);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Tells the grants of a session apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct LeaseId {
    file: u32,
    slot: u32,
    generation: u64,
}

impl LeaseId {
    pub(crate) fn new(file: u32, slot: u32, generation: u64) -> LeaseId {
        LeaseId { file, slot, generation }
    }
}

/// Who may claim what a descriptor names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub(crate) enum GrantKind {
    /// One participant, in a slot of its own counter file.
    Addressed = 1,
    /// Whoever asks the producer.
    Ticket = 2,
}

impl GrantKind {
    const fn from_byte(byte: u8) -> Option<GrantKind> {
        match byte {
            1 => Some(GrantKind::Addressed),
            2 => Some(GrantKind::Ticket),
            _ => None,
        }
    }
}

/// The timeline word and value that say when the contents are there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fence {
    /// The counter file of the word.
    pub file: u32,
    /// The word in it.
    pub word: u32,
    /// From which value on the contents are there.
    pub value: u64,
}

/// What a descriptor says, but for the user's own bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fields {
    /// The vendor.
    pub backend: BackendKind,
    /// Who may claim it.
    pub kind: GrantKind,
    /// The device that the memory lies on.
    pub device: DeviceUuid,
    /// The session that granted it.
    pub session: SessionId,
    /// Whom it is addressed to; 0 for a ticket.
    pub participant: ParticipantId,
    /// The addressee's counter file.
    pub file: u32,
    /// The slot in it, or the ticket.
    pub slot: u32,
    /// The slot's generation.
    pub generation: u64,
    /// The region that the block lies in.
    pub region: RegionId,
    /// Bytes from the region's base.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What to wait for; `None` when the contents were there before the share.
    pub fence: Option<Fence>,
}

/// A grant of one block, as plain bytes for any transport.
///
/// Made by sharing a block and given to a claim at the other side. Copies are copies of the same grant: of an
/// addressed one only the first claim succeeds.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Descriptor([u8; BYTES]);

impl Descriptor {
    /// Reads a descriptor from bytes that somebody sent.
    ///
    /// Good bytes say nothing about the grant: it may be revoked, claimed or of another session.
    ///
    /// # Errors
    ///
    /// [`Error::BadDescriptor`] naming the first field that is wrong, [`Error::Mismatch`] for another version.
    pub fn decode(bytes: &[u8]) -> Result<Descriptor> {
        View::decode(bytes).map(|view| Descriptor(*view.0))
    }

    /// Returns the bytes to send.
    pub fn as_bytes(&self) -> &[u8; BYTES] {
        &self.0
    }

    /// Returns the user's own bytes: shape, type, frame number, whatever both sides agree on. Zero unless set.
    pub fn user(&self) -> &[u8; 64] {
        self.0[AT_USER..].first_chunk().expect("64 bytes of the user's lie inside a descriptor")
    }

    /// Returns what tells the grant from others to the same participant.
    pub fn lease(&self) -> LeaseId {
        let fields = self.fields();
        LeaseId::new(fields.file, fields.slot, fields.generation)
    }

    /// Says whether it is a ticket, whose claim asks the producer.
    pub fn is_ticket(&self) -> bool {
        self.fields().kind == GrantKind::Ticket
    }

    /// Returns the bytes of the block that it grants.
    #[allow(clippy::len_without_is_empty, reason = "a block is never empty")]
    pub fn len(&self) -> u64 {
        self.fields().len
    }

    /// Returns the same grant for a part of its bytes.
    pub(crate) fn narrowed(mut self, offset: u64, len: u64) -> Descriptor {
        self.put(AT_OFFSET, offset.to_le_bytes());
        self.put(AT_LEN, len.to_le_bytes());
        self.seal();
        self
    }

    /// Returns the same grant with other bytes of the user's own.
    #[must_use]
    pub fn with_user(mut self, user: [u8; 64]) -> Descriptor {
        self.put(AT_USER, user);
        self.seal();
        self
    }

    /// Writes down a grant.
    ///
    /// # Panics
    ///
    /// In debug builds, if `decode` would refuse the result.
    #[inline]
    pub(crate) fn encode(fields: &Fields, user: &[u8; 64]) -> Descriptor {
        // Eight bytes at a time, as the checksum reads them: what was just stored in smaller parts is slow to read back.
        let both = |low: u32, high: u32| (u64::from(low) | u64::from(high) << 32).to_le_bytes();
        let fence = fields.fence.unwrap_or(Fence { word: NO_FENCE, file: 0, value: 0 });
        let [low, high] = VERSION.to_le_bytes();
        let mut d = Descriptor([0; BYTES]);
        d.put(
            0,
            both(u32::from_le_bytes(MAGIC), u32::from_le_bytes([low, high, fields.backend as u8, fields.kind as u8])),
        );
        d.put(AT_DEVICE, fields.device.0);
        d.put(AT_SESSION, fields.session.0);
        d.put(AT_PARTICIPANT, fields.participant.0.to_le_bytes());
        d.put(AT_FILE, both(fields.file, fields.slot));
        d.put(AT_GENERATION, fields.generation.to_le_bytes());
        d.put(AT_REGION, fields.region.0.to_le_bytes());
        d.put(AT_OFFSET, fields.offset.to_le_bytes());
        d.put(AT_LEN, fields.len.to_le_bytes());
        d.put(AT_FENCE_WORD, both(fence.word, fence.file));
        d.put(AT_FENCE_VALUE, fence.value.to_le_bytes());
        d.put(AT_USER, *user);
        d.seal();
        debug_assert!(View(&d.0).check().is_ok(), "an encoded descriptor is refused: {:?}", View(&d.0).check());
        d
    }

    /// Returns what it says.
    pub(crate) fn fields(&self) -> Fields {
        View(&self.0).fields()
    }

    fn seal(&mut self) {
        self.put(AT_CRC, View(&self.0).crc().to_le_bytes());
    }

    fn put<const N: usize>(&mut self, at: usize, bytes: [u8; N]) {
        self.0[at..at + N].copy_from_slice(&bytes);
    }
}

/// A descriptor's bytes where they lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a>(&'a [u8; BYTES]);

impl<'a> View<'a> {
    /// Looks at bytes that somebody sent, as [`Descriptor::decode`] does, without a copy.
    ///
    /// # Errors
    ///
    /// As there.
    #[inline(always)]
    pub fn decode(bytes: &'a [u8]) -> Result<View<'a>> {
        let Ok(bytes) = <&[u8; BYTES]>::try_from(bytes) else { return Err(bad_length(bytes.len())) };
        let d = View(bytes);
        if d.array(0) != MAGIC {
            return Err(bad("the magic", hex(&bytes[..4]), hex(&MAGIC)));
        }
        let version = u16::from_le_bytes(d.array(AT_VERSION));
        if version != VERSION {
            return Err(Error::Mismatch {
                what: "descriptor version",
                theirs: version.to_string(),
                ours: VERSION.to_string(),
                remedy: "build both sides from one version of gpu-ipc",
            });
        }
        let (found, computed) = (d.u32_at(AT_CRC), d.crc());
        if found != computed {
            return Err(bad("the checksum", format!("{found:#010x}"), format!("{computed:#010x} for these bytes")));
        }
        d.check()?;
        Ok(d)
    }

    /// Returns what it says.
    #[inline(always)]
    pub fn fields(&self) -> Fields {
        let word = self.u32_at(AT_FENCE_WORD);
        Fields {
            backend: BackendKind::from_byte(self.0[AT_BACKEND]).expect("a descriptor's backend was checked"),
            kind: GrantKind::from_byte(self.0[AT_KIND]).expect("a descriptor's kind was checked"),
            device: DeviceUuid(self.array(AT_DEVICE)),
            session: SessionId(self.array(AT_SESSION)),
            participant: ParticipantId(self.u64_at(AT_PARTICIPANT)),
            file: self.u32_at(AT_FILE),
            slot: self.u32_at(AT_SLOT),
            generation: self.u64_at(AT_GENERATION),
            region: RegionId(self.u64_at(AT_REGION)),
            offset: self.u64_at(AT_OFFSET),
            len: self.u64_at(AT_LEN),
            fence: (word != NO_FENCE).then(|| Fence {
                file: self.u32_at(AT_FENCE_FILE),
                word,
                value: self.u64_at(AT_FENCE_VALUE),
            }),
        }
    }

    /// Checks what the checksum cannot: a sender with a good checksum may still send nonsense.
    #[inline(always)]
    fn check(&self) -> Result<()> {
        if BackendKind::from_byte(self.0[AT_BACKEND]).is_none() {
            return Err(bad("the backend", self.0[AT_BACKEND].to_string(), "1 (host), 2 (cuda) or 3 (hip)".into()));
        }
        let Some(kind) = GrantKind::from_byte(self.0[AT_KIND]) else {
            return Err(bad("the kind of grant", self.0[AT_KIND].to_string(), "1 (addressed) or 2 (ticket)".into()));
        };
        let participant = self.u64_at(AT_PARTICIPANT);
        if kind == GrantKind::Ticket && participant != 0 {
            return Err(bad("the participant of a ticket", format!("{participant:#x}"), "0".into()));
        }
        let generation = self.u64_at(AT_GENERATION);
        if generation >= LIMIT {
            return Err(bad("the generation", generation.to_string(), "below 2^61".into()));
        }
        let (offset, len) = (self.u64_at(AT_OFFSET), self.u64_at(AT_LEN));
        if len == 0 {
            return Err(bad("the block's length", "0 bytes".into(), "at least 1 byte".into()));
        }
        if offset.checked_add(len).is_none() {
            return Err(bad("the block's end", format!("{offset} + {len}"), "below 2^64".into()));
        }
        let (word, file) = (self.u32_at(AT_FENCE_WORD), self.u32_at(AT_FENCE_FILE));
        let value = self.u64_at(AT_FENCE_VALUE);
        if word == NO_FENCE {
            if file != 0 || value != 0 {
                return Err(bad("the absent fence", format!("file {file}, value {value}"), "file 0, value 0".into()));
            }
        } else if value == 0 || value >= LIMIT {
            return Err(bad("the fence's value", value.to_string(), "above 0 and below 2^61".into()));
        }
        let flags = self.u64_at(AT_FLAGS);
        if flags != 0 {
            return Err(bad("the flags", format!("{flags:#x}"), "0: this version defines none".into()));
        }
        let zero: [u8; AT_CRC - AT_ZERO] = self.array(AT_ZERO);
        if zero != [0; AT_CRC - AT_ZERO] {
            return Err(bad("the padding", hex(&zero), "zero".into()));
        }
        Ok(())
    }

    #[inline(always)]
    fn crc(&self) -> u32 {
        checksum::crc32c(self.0.first_chunk().expect("a checksum's bytes lie inside a descriptor"))
    }

    #[inline(always)]
    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        *self.0[at..].first_chunk().expect("every field lies inside a descriptor")
    }

    #[inline(always)]
    fn u32_at(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.array(at))
    }

    #[inline(always)]
    fn u64_at(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.array(at))
    }
}

impl AsRef<[u8]> for Descriptor {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A descriptor is a right to claim, so logs show what it is about and not what it is.
        let fields = self.fields();
        write!(f, "Descriptor({} {:?}, {} bytes, ..)", fields.backend, fields.kind, fields.len)
    }
}

#[cold]
fn bad_length(len: usize) -> Error {
    bad("the length", format!("{len} bytes"), format!("{BYTES} bytes"))
}

#[cold]
fn bad(what: &'static str, got: String, must: String) -> Error {
    Error::BadDescriptor { what, got, must }
}

#[cold]
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
            fence: Some(Fence { file: 5, word: 6, value: 8 }),
        }
    }

    fn any_fields() -> impl Strategy<Value = (Fields, [u8; 64])> {
        let names = (0..3usize, any::<[u8; 16]>(), any::<[u8; 16]>(), any::<bool>(), any::<u64>());
        let slot = (any::<u32>(), any::<u32>(), 0..LIMIT, any::<u64>());
        let place = (any::<u64>(), 1..=u64::MAX)
            .prop_map(|(offset, len)| if offset.checked_add(len).is_some() { (offset, len) } else { (0, len) });
        let fence = proptest::option::of((any::<u32>(), 0..NO_FENCE, 1..LIMIT));
        (names, slot, place, fence, any::<[u8; 32]>()).prop_map(|(names, slot, place, fence, half)| {
            let (backend, device, session, ticket, participant) = names;
            let fields = Fields {
                backend: BackendKind::ALL[backend],
                kind: if ticket { GrantKind::Ticket } else { GrantKind::Addressed },
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
            let d = Descriptor::encode(&fields, &user);
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
        fn well_sealed_nonsense_is_refused_or_reads_as_it_was_written(
            (fields, user) in any_fields(),
            edits in proptest::collection::vec((AT_BACKEND..AT_CRC, any::<u8>()), 0..40),
        ) {
            let mut d = Descriptor::encode(&fields, &user);
            for (at, byte) in edits {
                d.0[at] = byte;
            }
            d.seal();
            if let Ok(good) = Descriptor::decode(&d.0) {
                prop_assert_eq!(Descriptor::encode(&good.fields(), good.user()), d);
            }
        }

        #[test]
        fn the_users_bytes_can_be_replaced((fields, user) in any_fields()) {
            let d = Descriptor::encode(&fields, &[0; 64]).with_user(user);
            prop_assert_eq!(d, Descriptor::encode(&fields, &user));
        }
    }

    #[test]
    fn any_altered_byte_is_refused() {
        let good = *Descriptor::encode(&fields(), &[3; 64]).as_bytes();
        // An interpreter takes minutes for all of them.
        let step = if cfg!(miri) { 61 } else { 1 };
        for at in 0..BYTES {
            for mask in (1..=u8::MAX).step_by(step) {
                let mut bytes = good;
                bytes[at] ^= mask;
                assert!(Descriptor::decode(&bytes).is_err(), "byte {at} altered by {mask:#x} was accepted");
            }
        }
    }

    #[test]
    fn the_bytes_are_where_the_table_says() {
        let d = Descriptor::encode(&fields(), &[9; 64]);
        let mut expected = Vec::new();
        expected.extend(b"GIPC\x01\x00\x02\x01");
        expected.extend(b"0123456789abcdef");
        expected.extend([0xa5; 16]);
        expected.extend(7u64.to_le_bytes());
        expected.extend([1, 0, 0, 0, 2, 0, 0, 0]);
        for value in [3u64, 4, 4096, 512] {
            expected.extend(value.to_le_bytes());
        }
        expected.extend([6, 0, 0, 0, 5, 0, 0, 0]);
        expected.extend([8, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend([0; 8]);
        expected.extend([9; 64]);
        expected.extend([0; 12]);
        expected.extend(crc32c::crc32c(&expected).to_le_bytes());
        assert_eq!(d.as_bytes().as_slice(), expected);
    }

    /// Edits a good descriptor, seals it again and returns what `decode` says.
    fn refusal(at: usize, bytes: &[u8]) -> String {
        let mut d = Descriptor::encode(&fields(), &[0; 64]);
        d.0[at..at + bytes.len()].copy_from_slice(bytes);
        d.seal();
        Descriptor::decode(&d.0).expect_err("an edit that decode must refuse").to_string()
    }

    #[test]
    fn every_refusal_names_its_field() {
        let max = u64::MAX.to_le_bytes();
        let cases: [(usize, &[u8], &str); 12] = [
            (0, b"GOPC", "the magic is 474f5043, but must be 47495043"),
            (AT_VERSION, &[2, 0], "descriptor version differs: 2 there, 1 here; build both sides from one version"),
            (AT_BACKEND, &[9], "the backend is 9, but must be 1 (host), 2 (cuda) or 3 (hip)"),
            (AT_KIND, &[3], "the kind of grant is 3, but must be 1 (addressed) or 2 (ticket)"),
            (AT_KIND, &[2], "the participant of a ticket is 0x7, but must be 0"),
            (AT_GENERATION, &max, "the generation is 18446744073709551615, but must be below 2^61"),
            (AT_LEN, &[0; 8], "the block's length is 0 bytes, but must be at least 1 byte"),
            (AT_LEN, &max, "the block's end is 4096 + 18446744073709551615, but must be below 2^64"),
            (AT_FENCE_WORD, &[255; 4], "the absent fence is file 5, value 8, but must be file 0, value 0"),
            (AT_FENCE_VALUE, &[0; 8], "the fence's value is 0, but must be above 0 and below 2^61"),
            (AT_FLAGS, &[1], "the flags is 0x1, but must be 0: this version defines none"),
            (AT_ZERO, &[1], "the padding is 010000000000000000000000, but must be zero"),
        ];
        for (at, bytes, text) in cases {
            let refusal = refusal(at, bytes);
            assert!(refusal.contains(text), "{refusal:?} lacks {text:?}");
        }
    }

    #[test]
    fn a_wrong_length_or_checksum_says_so() {
        let d = Descriptor::encode(&fields(), &[0; 64]);
        let short = Descriptor::decode(&d.as_bytes()[..191]).expect_err("one byte too few");
        assert_eq!(
            short.to_string(),
            "not a descriptor: the length is 191 bytes, but must be 192 bytes; \
             pass the bytes of `share` on whole and unchanged"
        );
        let mut bytes = *d.as_bytes();
        bytes[AT_LEN] ^= 1;
        let altered = Descriptor::decode(&bytes).expect_err("an altered length");
        assert!(matches!(altered, Error::BadDescriptor { what: "the checksum", .. }), "{altered}");
    }

    #[test]
    fn logs_show_neither_session_nor_slot() {
        let d = Descriptor::encode(&fields(), &[0; 64]);
        assert_eq!(format!("{d:?}"), "Descriptor(cuda Addressed, 512 bytes, ..)");
        assert_eq!(fields().session.to_string(), "a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5");
    }
}

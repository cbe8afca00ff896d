//! The bytes that travel from producer to consumer.
//!
//! A descriptor names a grant and says where its bytes lie. It holds no vendor handle and no
//! address, so its bytes alone open no memory: the claim does that, at the producer.
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
//! All numbers are little-endian. Every field has exactly one legal encoding, so equal descriptors
//! are equal bytes.

mod fields;
pub(super) mod layout;
mod view;

pub use fields::{Fence, Fields, GrantKind};
pub use layout::{BYTES, CHECKED, LIMIT, LeaseId, NO_FENCE, SessionId, VERSION};
pub use view::View;

use std::fmt;

use gpu_api::{ParticipantId, Result};

use layout::{
    AT_CRC, AT_DEVICE, AT_FENCE_VALUE, AT_FENCE_WORD, AT_FILE, AT_GENERATION, AT_LEN, AT_OFFSET,
    AT_PARTICIPANT, AT_REGION, AT_SESSION, AT_USER, MAGIC,
};

/// A grant of one block, as plain bytes for any transport.
///
/// Made by sharing a block and given to a claim at the other side. Copies are copies of the same
/// grant: of an addressed one only the first claim succeeds.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Descriptor([u8; BYTES]);

impl Descriptor {
    /// The length of every descriptor.
    pub const BYTES: usize = BYTES;

    /// Reads a descriptor from bytes that somebody sent.
    ///
    /// Good bytes say nothing about the grant: it may be revoked, claimed or of another session.
    ///
    /// # Errors
    ///
    /// [`Error::BadDescriptor`](gpu_api::Error::BadDescriptor) naming the first field that is
    /// wrong, [`Error::Mismatch`](gpu_api::Error::Mismatch) for another version.
    pub fn decode(bytes: &[u8]) -> Result<Descriptor> {
        View::decode(bytes).map(|view| Descriptor(*view.0))
    }

    /// Returns the bytes to send.
    pub fn as_bytes(&self) -> &[u8; BYTES] {
        &self.0
    }

    /// Returns the user's own bytes: shape, type, frame number, whatever both sides agree on. Zero
    /// unless set, by `ShareOptions::user` or [`with_user`](Descriptor::with_user).
    ///
    /// # Examples
    ///
    /// ```
    /// # use transport::wire::descriptor::{Descriptor, Fields, GrantKind, SessionId};
    /// # use gpu_api::{BackendKind, DeviceUuid, ParticipantId, RegionId};
    /// # let fields = Fields {
    /// #     backend: BackendKind::Host, kind: GrantKind::Ticket,
    /// #     device: DeviceUuid([1; 16]), session: SessionId([2; 16]),
    /// #     participant: ParticipantId(0), file: 0, slot: 3, generation: 1, region: RegionId(1), offset: 0, len: 4096,
    /// #     fence: None,
    /// # };
    /// # let granted = Descriptor::encode(&fields, &[0; 64]);
    /// let mut user = [0; 64];
    /// user[..4].copy_from_slice(&17u32.to_le_bytes());
    /// let sent = granted.with_user(user);
    /// // ... the bytes travel ...
    /// let received = Descriptor::decode(sent.as_bytes())?;
    /// assert_eq!(received.user()[..4], 17u32.to_le_bytes());
    /// assert_eq!((received.addressee(), received.len()), (None, 4096));
    /// # Ok::<(), gpu_api::Error>(())
    /// ```
    pub fn user(&self) -> &[u8; 64] {
        self.0[AT_USER..]
            .first_chunk()
            .expect("64 bytes of the user's lie inside a descriptor")
    }

    /// Returns the session that granted it. A process with several participants claims it with the
    /// one of that session (`Participant::session`).
    pub fn session(&self) -> SessionId {
        self.fields().session
    }

    /// Returns the participant that alone can claim it; `None` for a ticket.
    pub fn addressee(&self) -> Option<ParticipantId> {
        let fields = self.fields();
        (fields.kind == GrantKind::Addressed).then_some(fields.participant)
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
    pub fn narrowed(mut self, offset: u64, len: u64) -> Descriptor {
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
    pub fn encode(fields: &Fields, user: &[u8; 64]) -> Descriptor {
        // Eight bytes at a time, as the checksum reads them: what was just stored in smaller parts
        // is slow to read back.
        let both = |low: u32, high: u32| (u64::from(low) | u64::from(high) << 32).to_le_bytes();
        let fence = fields.fence.unwrap_or(Fence {
            word: NO_FENCE,
            file: 0,
            value: 0,
        });
        let [low, high] = VERSION.to_le_bytes();
        let mut d = Descriptor([0; BYTES]);
        d.put(
            0,
            both(
                u32::from_le_bytes(MAGIC),
                u32::from_le_bytes([low, high, fields.backend as u8, fields.kind as u8]),
            ),
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
        debug_assert!(
            View(&d.0).check().is_ok(),
            "an encoded descriptor is refused: {:?}",
            View(&d.0).check()
        );
        d
    }

    /// Returns what it says.
    pub fn fields(&self) -> Fields {
        View(&self.0).fields()
    }

    fn seal(&mut self) {
        self.put(AT_CRC, View(&self.0).crc().to_le_bytes());
    }

    fn put<const N: usize>(&mut self, at: usize, bytes: [u8; N]) {
        self.0[at..at + N].copy_from_slice(&bytes);
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
        write!(
            f,
            "Descriptor({} {:?}, {} bytes, ..)",
            fields.backend, fields.kind, fields.len
        )
    }
}

#[cfg(test)]
mod tests;

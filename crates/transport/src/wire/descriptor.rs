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
//! | 64 | 8 | region; with 2^62 set, to be read only |
//! | 72 | 8 | offset in the region |
//! | 80 | 8 | length |
//! | 88 | 4 | fence: word; 2^32-1 for no fence, and then the next two are 0 |
//! | 92 | 4 | fence: counter file of the word |
//! | 96 | 8 | fence: value, above 0 and below 2^61 |
//! | 104 | 8 | flags: 1 if there are user bytes, else 0 |
//! | 112 | 64 | the user's own; not all zero if there are any |
//! | 176 | 8 | zero |
//! | 184 | 8 | keyed checksum of the 112 bytes before the user's, and of those if there are any |
//!
//! All numbers are little-endian. Every field has exactly one legal encoding, so equal descriptors
//! are equal bytes.
//!
//! A claim goes by the keyed checksum: a carrier, which has no key, can neither make nor alter a
//! descriptor.

mod fields;
mod key;
mod layout;
mod seal;
mod view;

pub use fields::{Fence, Fields, GrantKind, Names};
pub use key::{KEY_BYTES, SealKey};
pub use layout::{BYTES, LIMIT, LeaseId, NO_FENCE, SessionId, VERSION};
pub use seal::{KeptSealer, Sealer, Seals};
pub use view::View;

use std::fmt;

use gpu_api::{Access, ParticipantId, Result};

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
    /// Finds bytes that no producer writes. Good bytes say nothing about the grant: it may be
    /// revoked, claimed or of another session, and a carrier can have written anything; the claim
    /// knows.
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
    /// unless set, by `ShareOptions::user` or `ReceivedBlock::forward_with`.
    pub fn user(&self) -> &[u8; 64] {
        View(&self.0).user()
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

    /// Says whether it grants the block to be read only.
    pub fn is_read_only(&self) -> bool {
        self.fields().region.access() == Access::ReadOnly
    }

    /// Returns the bytes of the block that it grants.
    #[allow(clippy::len_without_is_empty, reason = "a block is never empty")]
    pub fn len(&self) -> u64 {
        self.fields().len
    }

    /// Returns what it says.
    pub fn fields(&self) -> Fields {
        View(&self.0).fields()
    }

    #[inline(always)]
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

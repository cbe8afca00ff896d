//! What a descriptor says, field by field.

use gpu_api::{BackendKind, DeviceUuid, ParticipantId, RegionId};

use super::layout::SessionId;

/// The participants that may claim what a descriptor names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum GrantKind {
    /// One participant, in a slot of its own counter file.
    Addressed = 1,
    /// The participants that ask the producer first.
    Ticket = 2,
}

impl GrantKind {
    pub(super) const fn from_byte(byte: u8) -> Option<GrantKind> {
        match byte {
            1 => Some(GrantKind::Addressed),
            2 => Some(GrantKind::Ticket),
            _ => None,
        }
    }
}

/// The timeline word and value that say when the contents are there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fence {
    /// The counter file of the word.
    pub file: u32,
    /// The word in it.
    pub word: u32,
    /// From which value on the contents are there.
    pub value: u64,
}

/// What the head of a descriptor says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Names {
    /// The vendor.
    pub backend: BackendKind,
    /// The participants that may claim it.
    pub kind: GrantKind,
    /// The device that the memory lies on.
    pub device: DeviceUuid,
    /// The session that granted it.
    pub session: SessionId,
    /// The participant that it is addressed to; 0 for a ticket.
    pub participant: ParticipantId,
}

impl Names {
    /// Returns what the session's tickets say.
    pub fn of_ticket(self) -> Names {
        Names {
            kind: GrantKind::Ticket,
            participant: ParticipantId(0),
            ..self
        }
    }
}

/// A descriptor's fields, except the user's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fields {
    /// The vendor.
    pub backend: BackendKind,
    /// The participants that may claim it.
    pub kind: GrantKind,
    /// The device that the memory lies on.
    pub device: DeviceUuid,
    /// The session that granted it.
    pub session: SessionId,
    /// The participant that it is addressed to; 0 for a ticket.
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

impl Fields {
    /// Returns what the head of the descriptor says.
    pub fn names(&self) -> Names {
        Names {
            backend: self.backend,
            kind: self.kind,
            device: self.device,
            session: self.session,
            participant: self.participant,
        }
    }
}

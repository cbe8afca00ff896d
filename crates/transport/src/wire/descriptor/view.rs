//! A descriptor's bytes as input: every field is checked before it is believed.

use gpu_api::{BackendKind, DeviceUuid, Error, ParticipantId, RegionId, Result};

use super::fields::{Fence, Fields, GrantKind};
use super::layout::{
    AT_BACKEND, AT_DEVICE, AT_FENCE_FILE, AT_FENCE_VALUE, AT_FENCE_WORD, AT_FILE, AT_FLAGS,
    AT_GENERATION, AT_KIND, AT_LEN, AT_OFFSET, AT_PARTICIPANT, AT_REGION, AT_SESSION, AT_SLOT,
    AT_SUM, AT_USER, AT_VERSION, AT_ZERO, BYTES, HAS_USER, LIMIT, MAGIC, NO_FENCE, SessionId,
    VERSION,
};

/// A descriptor's bytes where they lie.
#[derive(Clone, Copy, Debug)]
pub struct View<'a>(pub(super) &'a [u8; BYTES]);

impl<'a> View<'a> {
    /// Looks at bytes that somebody sent, as [`Descriptor::decode`](super::Descriptor::decode)
    /// does, without a copy.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn decode(bytes: &'a [u8]) -> Result<View<'a>> {
        let Ok(bytes) = <&[u8; BYTES]>::try_from(bytes) else {
            return Err(bad_length(bytes.len()));
        };
        let d = View(bytes);
        if d.array(0) != MAGIC {
            return Err(bad("the magic", hex(&bytes[..4]), hex(&MAGIC)));
        }
        let version = u16::from_le_bytes(d.array(AT_VERSION));
        if version != VERSION {
            return Err(Error::mismatch(
                "descriptor version",
                version,
                VERSION,
                "build both sides from one version of gpu-ipc",
            ));
        }
        d.check_head()?;
        d.check_body()?;
        Ok(d)
    }

    /// Returns what it says.
    #[inline(always)]
    pub fn fields(&self) -> Fields {
        let word = self.u32_at(AT_FENCE_WORD);
        Fields {
            backend: BackendKind::from_byte(self.0[AT_BACKEND])
                .expect("a descriptor's backend was checked"),
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

    /// Says whether the byte of the kind is that of a ticket.
    #[inline(always)]
    pub(super) fn is_ticket(&self) -> bool {
        self.0[AT_KIND] == GrantKind::Ticket as u8
    }

    /// Checks what a checksum cannot: a sender with the key may still send nonsense.
    fn check_head(&self) -> Result<()> {
        if BackendKind::from_byte(self.0[AT_BACKEND]).is_none() {
            return Err(bad(
                "the backend",
                self.0[AT_BACKEND],
                "1 (host), 2 (cuda) or 3 (hip)",
            ));
        }
        let Some(kind) = GrantKind::from_byte(self.0[AT_KIND]) else {
            return Err(bad(
                "the kind of grant",
                self.0[AT_KIND],
                "1 (addressed) or 2 (ticket)",
            ));
        };
        let participant = self.u64_at(AT_PARTICIPANT);
        if kind == GrantKind::Ticket && participant != 0 {
            return Err(bad(
                "the participant of a ticket",
                format!("{participant:#x}"),
                "0",
            ));
        }
        Ok(())
    }

    /// Checks what follows the head likewise.
    #[inline(always)]
    pub(super) fn check_body(&self) -> Result<()> {
        let generation = self.u64_at(AT_GENERATION);
        if generation >= LIMIT {
            return Err(bad("the generation", generation, "below 2^61"));
        }
        let (offset, len) = (self.u64_at(AT_OFFSET), self.u64_at(AT_LEN));
        if len == 0 {
            return Err(bad("the block's length", "0 bytes", "at least 1 byte"));
        }
        if offset.checked_add(len).is_none() {
            return Err(bad(
                "the block's end",
                format!("{offset} + {len}"),
                "below 2^64",
            ));
        }
        let (word, file) = (self.u32_at(AT_FENCE_WORD), self.u32_at(AT_FENCE_FILE));
        let value = self.u64_at(AT_FENCE_VALUE);
        if word == NO_FENCE {
            if file != 0 || value != 0 {
                return Err(bad(
                    "the absent fence",
                    format!("file {file}, value {value}"),
                    "file 0, value 0",
                ));
            }
        } else if value == 0 || value >= LIMIT {
            return Err(bad("the fence's value", value, "above 0 and below 2^61"));
        }
        let flags = self.u64_at(AT_FLAGS);
        if flags & !HAS_USER != 0 {
            return Err(bad("the flags", format!("{flags:#x}"), "0 or 1"));
        }
        if self.has_user() != is_any(self.user()) {
            return Err(bad(
                "the flag of user bytes",
                flags,
                "1 with user bytes, and 0 with 64 zeroes",
            ));
        }
        let zero: [u8; AT_SUM - AT_ZERO] = self.array(AT_ZERO);
        if zero != [0; AT_SUM - AT_ZERO] {
            return Err(bad("the padding", hex(&zero), "zero"));
        }
        Ok(())
    }

    /// Says whether its flag says that there are user bytes.
    #[inline(always)]
    pub(super) fn has_user(&self) -> bool {
        self.u64_at(AT_FLAGS) & HAS_USER != 0
    }

    /// Returns the user's own bytes.
    #[inline(always)]
    pub(super) fn user(&self) -> &'a [u8; 64] {
        self.0[AT_USER..]
            .first_chunk()
            .expect("64 bytes of the user's lie inside a descriptor")
    }

    #[inline(always)]
    fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        *self.0[at..]
            .first_chunk()
            .expect("every field lies inside a descriptor")
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

/// Says whether a byte is not zero. Word by word: `==` of this many bytes calls the C library.
#[inline(always)]
pub(super) fn is_any(user: &[u8; 64]) -> bool {
    user.as_chunks()
        .0
        .iter()
        .fold(0, |any, word| any | u64::from_ne_bytes(*word))
        != 0
}

#[cold]
fn bad_length(len: usize) -> Error {
    bad(
        "the length",
        format!("{len} bytes"),
        format!("{BYTES} bytes"),
    )
}

#[cold]
fn bad(what: &'static str, got: impl ToString, must: impl ToString) -> Error {
    Error::bad_descriptor(what, got, must)
}

#[cold]
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

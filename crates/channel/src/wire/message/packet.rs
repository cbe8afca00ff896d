//! The bytes of a packet: the header that all versions share, and the way to put fields in and take them out.

use gpu_api::{Access, BackendKind, Error};

use super::RefusalCode;
use crate::shared::slot::Generation;
use crate::wire::descriptor::VERSION;
use crate::wire::lease_address::LeaseAddress;

/// The most bytes of a message, in every version.
pub const MOST_BYTES: usize = 4096;

/// The most bytes of a text in a message; a longer one is cut.
const MOST_TEXT: usize = 256;

const MAGIC: [u8; 2] = *b"GI";
const HEADER: usize = 16;

/// Why bytes are no message.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    /// A message of another version; nothing but its header can be read.
    #[error("the other side speaks protocol version {theirs}, this side {VERSION}")]
    Version {
        /// The sender's version.
        theirs: u16,
    },
    /// No message of this version.
    #[error("not a control message: {what} is {got}, but must be {must}")]
    Malformed {
        /// Which field.
        what: &'static str,
        /// What it was.
        got: u64,
        /// What it must be.
        must: &'static str,
    },
}

impl From<DecodeError> for Error {
    fn from(e: DecodeError) -> Error {
        match e {
            DecodeError::Version { theirs } => Error::Mismatch {
                what: "protocol version",
                theirs: theirs.to_string(),
                ours: VERSION.to_string(),
                remedy: RefusalCode::Version.remedy(),
            },
            DecodeError::Malformed { what, got, must } => Error::Mismatch {
                what,
                theirs: got.to_string(),
                ours: must.into(),
                remedy: RefusalCode::Protocol.remedy(),
            },
        }
    }
}

pub(super) fn malformed(what: &'static str, got: impl TryInto<u64>, must: &'static str) -> DecodeError {
    DecodeError::Malformed { what, got: got.try_into().unwrap_or(u64::MAX), must }
}

/// The bytes that all messages of all versions start with.
pub(super) struct Header {
    pub(super) number: u16,
    fds: u16,
    pub(super) request: u64,
}

impl Header {
    pub(super) fn read(packet: &[u8]) -> Result<(Header, Reader<'_>), DecodeError> {
        let mut r = Reader { rest: packet };
        let magic = r.array()?;
        if magic != MAGIC {
            return Err(malformed("the magic", u16::from_le_bytes(magic), "18759, the bytes GI"));
        }
        let version = u16::from_le_bytes(r.array()?);
        let header =
            Header { number: u16::from_le_bytes(r.array()?), fds: u16::from_le_bytes(r.array()?), request: r.u64()? };
        if version != VERSION {
            return Err(DecodeError::Version { theirs: version });
        }
        Ok((header, r))
    }

    /// Checks what can only be checked once the body has been read.
    pub(super) fn check(&self, r: Reader<'_>, expected: usize, came: usize, answers: bool) -> Result<(), DecodeError> {
        if !r.rest.is_empty() {
            return Err(malformed("the number of bytes behind the message", r.rest.len(), "0"));
        }
        if usize::from(self.fds) != expected {
            return Err(malformed("the number of file descriptors in the header", self.fds, "what the message needs"));
        }
        if came != expected {
            return Err(malformed("the number of file descriptors that came", came, "what the header says"));
        }
        if !answers && self.request != 0 {
            return Err(malformed("the request", self.request, "0 in a message that has none"));
        }
        Ok(())
    }
}

/// Appends to a packet. Every message fits: the longest has a text.
pub(super) struct Writer<'a> {
    packet: &'a mut [u8; MOST_BYTES],
    pub(super) len: usize,
}
const _: () = assert!(HEADER + 8 + 2 + 2 + MOST_TEXT <= MOST_BYTES);

impl Writer<'_> {
    pub(super) fn start(packet: &mut [u8; MOST_BYTES], number: u16, fds: usize, request: u64) -> Writer<'_> {
        let mut w = Writer { packet, len: 0 };
        w.put(&MAGIC);
        w.put(&VERSION.to_le_bytes());
        w.put(&number.to_le_bytes());
        w.put(&u16::try_from(fds).expect("a message has at most 2^16 descriptors").to_le_bytes());
        w.put(&request.to_le_bytes());
        debug_assert_eq!(w.len, HEADER);
        w
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.packet[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    pub(super) fn lease(&mut self, lease: LeaseAddress) {
        self.put(&lease.file.to_le_bytes());
        self.put(&lease.slot.to_le_bytes());
        self.put(&lease.generation.get().to_le_bytes());
    }

    /// Writes a text as far as it fits. Control characters become `?`: texts end up in errors and logs.
    pub(super) fn text(&mut self, text: &str) {
        let length_at = self.len;
        self.put(&[0; 2]);
        let start = self.len;
        for c in text.chars().map(|c| if c.is_control() { '?' } else { c }) {
            if self.len + c.len_utf8() > start + MOST_TEXT {
                break;
            }
            self.put(c.encode_utf8(&mut [0; 4]).as_bytes());
        }
        let len = u16::try_from(self.len - start).expect("a text is at most 256 bytes");
        self.packet[length_at..start].copy_from_slice(&len.to_le_bytes());
    }
}

/// Takes from a packet, and refuses to take more than there is.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let Some((bytes, rest)) = self.rest.split_first_chunk() else {
            return Err(malformed("the number of bytes left", self.rest.len(), "what the message needs"));
        };
        self.rest = rest;
        Ok(*bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn generation(&mut self) -> Result<Generation, DecodeError> {
        let number = self.u64()?;
        Generation::new(number).ok_or_else(|| malformed("the generation", number, "below 2^61"))
    }

    pub(super) fn lease(&mut self) -> Result<LeaseAddress, DecodeError> {
        Ok(LeaseAddress { file: self.u32()?, slot: self.u32()?, generation: self.generation()? })
    }

    pub(super) fn zeros<const N: usize>(&mut self) -> Result<(), DecodeError> {
        match self.array::<N>()?.into_iter().find(|&byte| byte != 0) {
            None => Ok(()),
            Some(byte) => Err(malformed("the padding", byte, "0")),
        }
    }

    pub(super) fn flag(&mut self, what: &'static str) -> Result<bool, DecodeError> {
        match self.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [byte] => Err(malformed(what, byte, "0 or 1")),
        }
    }

    pub(super) fn backend(&mut self) -> Result<BackendKind, DecodeError> {
        let [byte] = self.array()?;
        BackendKind::from_byte(byte).ok_or_else(|| malformed("the backend", byte, "1, 2 or 3"))
    }

    pub(super) fn access(&mut self) -> Result<Access, DecodeError> {
        let [byte] = self.array()?;
        Access::from_byte(byte).ok_or_else(|| malformed("the access", byte, "0 or 1"))
    }

    pub(super) fn refusal(&mut self) -> Result<RefusalCode, DecodeError> {
        let number = u16::from_le_bytes(self.array()?);
        RefusalCode::from_number(number).ok_or_else(|| malformed("the refusal's code", number, "1 to 13"))
    }

    pub(super) fn text(&mut self) -> Result<String, DecodeError> {
        let len = u16::from_le_bytes(self.array()?);
        if usize::from(len) > MOST_TEXT {
            return Err(malformed("the text's length", len, "at most 256"));
        }
        let Some((bytes, rest)) = self.rest.split_at_checked(usize::from(len)) else {
            return Err(malformed("the text's length", len, "no more than the packet has left"));
        };
        self.rest = rest;
        let text = str::from_utf8(bytes).map_err(|e| malformed("the text's good bytes", e.valid_up_to(), "all"))?;
        // What the other side writes must not steer a terminal.
        if let Some(c) = text.chars().find(|c| c.is_control()) {
            return Err(malformed("a character of the text", u32::from(c), "no control character"));
        }
        Ok(text.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_errors_name_both_sides() {
        let version = DecodeError::Version { theirs: 7 };
        assert_eq!(version.to_string(), "the other side speaks protocol version 7, this side 1");
        assert_eq!(
            Error::from(version).to_string(),
            "protocol version differs: 7 there, 1 here; build both sides from one version of gpu-ipc"
        );
        let magic = Header::read(b"XX").err().expect("no magic");
        assert_eq!(magic.to_string(), "not a control message: the magic is 22616, but must be 18759, the bytes GI");
        assert_eq!(
            Error::from(magic).to_string(),
            "the magic differs: 22616 there, 18759, the bytes GI here; connect to a session of gpu-ipc, from gpu-ipc"
        );
    }

    #[test]
    fn a_text_is_cut_between_characters_and_loses_its_control_characters() {
        let mut packet = [0; MOST_BYTES];
        let mut w = Writer::start(&mut packet, 1, 0, 0);
        w.text(&("a\x1b[2J\n".to_owned() + &"\u{20ac}".repeat(90)));
        let len = w.len;
        let text = Reader { rest: &packet[HEADER..len] }.text().expect("a good text");
        assert_eq!(text, "a?[2J?".to_owned() + &"\u{20ac}".repeat(83));
    }

    #[test]
    fn a_bad_text_is_refused() {
        for bytes in [&b"\x02\0\xff\xff"[..], b"\x01\0\n", b"\x02\0a", b"\x01\x01", b"\x01"] {
            assert!(Reader { rest: bytes }.text().is_err(), "{bytes:?}");
        }
    }
}

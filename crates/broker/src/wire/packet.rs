//! The bytes of a packet: the header that all versions share, and the way to put fields in and take them out.

use gpu_api::Error;

use super::{HIGHEST, LOWEST};
use crate::object::identity::{Epoch, Identity};

/// The most bytes of a message, in every version.
pub const MOST_BYTES: usize = 4096;
/// The most bytes of a text.
const MOST_TEXT: usize = 512;

const MAGIC: [u8; 2] = *b"GO";
const HEADER: usize = 16;

/// Why bytes are no message of the version that was agreed on.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a message of a broker: {what} is {got}, but must be {must}")]
pub struct DecodeError {
    /// Which field.
    pub what: &'static str,
    /// What it was.
    pub got: u64,
    /// What it must be.
    pub must: &'static str,
}

impl From<DecodeError> for Error {
    fn from(e: DecodeError) -> Error {
        Error::Mismatch {
            what: e.what,
            theirs: e.got.to_string(),
            ours: e.must.into(),
            remedy: "connect to a broker of gpu-ipc, with its own client",
        }
    }
}

pub(super) fn malformed(what: &'static str, got: impl TryInto<u64>, must: &'static str) -> DecodeError {
    DecodeError { what, got: got.try_into().unwrap_or(u64::MAX), must }
}

/// Reads the versions that the sender of a hello speaks, whatever they are; `None` if it is no hello.
pub fn version_of_hello(packet: &[u8]) -> Option<(u16, u16)> {
    let word = |at: usize| packet.get(at..at + 2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    (packet.get(..2)? == MAGIC && word(4)? == 1).then_some((word(2)?, word(16)?))
}

/// The bytes that all messages of all versions start with.
pub(super) struct Header {
    pub(super) version: u16,
    pub(super) number: u16,
    fds: u16,
    pub(super) request: u64,
}

impl Header {
    pub(super) fn read(packet: &[u8]) -> Result<(Header, Reader<'_>), DecodeError> {
        let mut r = Reader { rest: packet };
        let magic = r.array()?;
        if magic != MAGIC {
            return Err(malformed("the magic", u16::from_le_bytes(magic), "20295, the bytes GO"));
        }
        let (version, number, fds) = (r.u16()?, r.u16()?, r.u16()?);
        Ok((Header { version, number, fds, request: r.u64()? }, r))
    }

    /// Refuses another version, for messages that depend on it.
    pub(super) fn check_version(&self) -> Result<(), DecodeError> {
        if (LOWEST..=HIGHEST).contains(&self.version) {
            return Ok(());
        }
        Err(malformed("the version", self.version, "the one that was agreed on"))
    }

    /// Checks what can only be checked once the body has been read.
    pub(super) fn check(
        &self,
        r: &Reader<'_>,
        came: usize,
        expected: impl Fn(usize) -> bool,
    ) -> Result<(), DecodeError> {
        if !r.rest.is_empty() {
            return Err(malformed("the number of bytes behind the message", r.rest.len(), "0"));
        }
        if usize::from(self.fds) != came || !expected(came) {
            return Err(malformed("the number of file descriptors", came, "what the message needs and says"));
        }
        Ok(())
    }
}

/// Appends to a packet.
pub(super) struct Writer<'a> {
    packet: &'a mut [u8; MOST_BYTES],
    pub(super) len: usize,
}

impl Writer<'_> {
    pub(super) fn start(
        packet: &mut [u8; MOST_BYTES],
        version: u16,
        number: u16,
        fds: usize,
        request: u64,
    ) -> Writer<'_> {
        let mut w = Writer { packet, len: 0 };
        w.put(&MAGIC);
        w.u16(version);
        w.u16(number);
        w.u16(u16::try_from(fds).expect("the kernel passes at most 253 descriptors"));
        w.u64(request);
        debug_assert_eq!(w.len, HEADER);
        w
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.packet[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    pub(super) fn u16(&mut self, number: u16) {
        self.put(&number.to_le_bytes());
    }

    pub(super) fn u32(&mut self, number: u32) {
        self.put(&number.to_le_bytes());
    }

    pub(super) fn u64(&mut self, number: u64) {
        self.put(&number.to_le_bytes());
    }

    pub(super) fn identity(&mut self, identity: Identity) {
        self.put(&identity.0);
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
        let len = u16::try_from(self.len - start).expect("a text is at most 512 bytes");
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

    pub(super) fn u16(&mut self) -> Result<u16, DecodeError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn epoch(&mut self) -> Result<Epoch, DecodeError> {
        Ok(Epoch(self.u64()?))
    }

    pub(super) fn identity(&mut self) -> Result<Identity, DecodeError> {
        Ok(Identity(self.array()?))
    }

    pub(super) fn zeros<const N: usize>(&mut self) -> Result<(), DecodeError> {
        match self.array::<N>()?.into_iter().find(|&byte| byte != 0) {
            None => Ok(()),
            Some(byte) => Err(malformed("the padding", byte, "0")),
        }
    }

    pub(super) fn text(&mut self) -> Result<String, DecodeError> {
        let len = usize::from(self.u16()?);
        let Some((bytes, rest)) = self.rest.split_at_checked(len).filter(|_| len <= MOST_TEXT) else {
            return Err(malformed("the text's length", len, "at most 512, and what the packet has left"));
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

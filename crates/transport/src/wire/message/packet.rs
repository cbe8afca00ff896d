//! What the messages of sessions have beside other packets: one version.

use gpu_api::Error;

use super::RefusalCode;
use crate::wire::descriptor::VERSION;
use crate::wire::packet::{self, Header, MOST_BYTES, Malformed, Protocol, Reader, Writer};

static PROTOCOL: Protocol = Protocol {
    magic: *b"GI",
    magic_is: "18759, the bytes GI",
    most_text: 256,
    most_text_is: "at most 256",
};

/// Why bytes are not a message.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    /// A message of another version; nothing but its header can be read.
    #[error("the other side speaks protocol version {theirs}, this side {VERSION}")]
    Version {
        /// The sender's version.
        theirs: u16,
    },
    /// No message of this version.
    #[error("not a control message: {0}")]
    Malformed(#[from] Malformed),
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
            DecodeError::Malformed(Malformed { what, got, must }) => Error::Mismatch {
                what,
                theirs: got.to_string(),
                ours: must.into(),
                remedy: RefusalCode::Protocol.remedy(),
            },
        }
    }
}

pub(super) fn malformed(
    what: &'static str,
    got: impl TryInto<u64>,
    must: &'static str,
) -> DecodeError {
    packet::malformed(what, got, must).into()
}

/// Reads the header of a message of this version.
pub(super) fn read(packet: &[u8]) -> Result<(Header, Reader<'_>), DecodeError> {
    let (header, r) = Header::read(&PROTOCOL, packet)?;
    if header.version != VERSION {
        return Err(DecodeError::Version {
            theirs: header.version,
        });
    }
    Ok((header, r))
}

/// Checks what can only be checked once the body has been read.
pub(super) fn check(
    header: &Header,
    r: &Reader<'_>,
    expected: usize,
    came: usize,
    answers: bool,
) -> Result<(), DecodeError> {
    r.end()?;
    if usize::from(header.fds) != expected {
        return Err(malformed(
            "the number of file descriptors in the header",
            header.fds,
            "what the message needs",
        ));
    }
    if came != expected {
        return Err(malformed(
            "the number of file descriptors that came",
            came,
            "what the header says",
        ));
    }
    if !answers && header.request != 0 {
        return Err(malformed(
            "the request",
            header.request,
            "0 in a message that has none",
        ));
    }
    Ok(())
}

/// Starts a message. Every message fits: the longest has a text.
pub(super) fn start(
    packet: &mut [u8; MOST_BYTES],
    number: u16,
    fds: usize,
    request: u64,
) -> Writer<'_> {
    Writer::start(&PROTOCOL, packet, VERSION, number, fds, request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_errors_name_both_sides() {
        let version = DecodeError::Version { theirs: 7 };
        assert_eq!(
            version.to_string(),
            "the other side speaks protocol version 7, this side 1"
        );
        assert_eq!(
            Error::from(version).to_string(),
            "protocol version differs: 7 there, 1 here; build both sides from one version of gpu-ipc"
        );
        let magic = read(b"XX").expect_err("no magic");
        assert_eq!(
            magic.to_string(),
            "not a control message: the magic is 22616, but must be 18759, the bytes GI"
        );
        assert_eq!(
            Error::from(magic).to_string(),
            "the magic differs: 22616 there, 18759, the bytes GI here; connect to a session of gpu-ipc, from gpu-ipc"
        );
    }
}

//! What the messages of brokers have beside other packets: several versions, identities and epochs.

use gpu_api::Error;
use transport::wire::packet::{self, Header, MOST_BYTES, Malformed, Protocol, Reader, Writer};

use super::{HIGHEST, LOWEST};
use crate::object::identity::{Epoch, Identity};

static PROTOCOL: Protocol = Protocol {
    magic: *b"GO",
    magic_is: "20295, the bytes GO",
    most_text: 512,
    most_text_is: "at most 512",
};

/// Why bytes are not a message of the agreed version.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a message of a broker: {0}")]
pub struct DecodeError(#[from] pub Malformed);

impl From<DecodeError> for Error {
    fn from(DecodeError(Malformed { what, got, must }): DecodeError) -> Error {
        Error::Mismatch {
            what,
            theirs: got.to_string(),
            ours: must.into(),
            remedy: "connect to a broker of gpu-ipc, with its own client",
        }
    }
}

pub(super) fn malformed(
    what: &'static str,
    got: impl TryInto<u64>,
    must: &'static str,
) -> DecodeError {
    DecodeError(packet::malformed(what, got, must))
}

/// Reads the versions that the sender of a hello speaks, whatever they are; `None` if it is no
/// hello.
pub fn version_of_hello(packet: &[u8]) -> Option<(u16, u16)> {
    let (header, mut r) = read(packet).ok()?;
    Some((header.version, r.u16().ok()?)).filter(|_| header.number == 1)
}

/// Reads the header of a message of any version.
pub(super) fn read(packet: &[u8]) -> Result<(Header, Reader<'_>), DecodeError> {
    Ok(Header::read(&PROTOCOL, packet)?)
}

/// Refuses another version, for messages that depend on it.
pub(super) fn check_version(header: &Header) -> Result<(), DecodeError> {
    if (LOWEST..=HIGHEST).contains(&header.version) {
        return Ok(());
    }
    Err(malformed(
        "the version",
        header.version,
        "the one that was agreed on",
    ))
}

/// Checks what can only be checked once the body has been read.
pub(super) fn check(
    header: &Header,
    r: &Reader<'_>,
    came: usize,
    expected: impl Fn(usize) -> bool,
) -> Result<(), DecodeError> {
    r.end()?;
    if usize::from(header.fds) != came || !expected(came) {
        return Err(malformed(
            "the number of file descriptors",
            came,
            "what the message needs and says",
        ));
    }
    Ok(())
}

/// Starts a message. Every message fits: the longest has a text and an identity.
pub(super) fn start(
    packet: &mut [u8; MOST_BYTES],
    version: u16,
    number: u16,
    fds: usize,
    request: u64,
) -> Writer<'_> {
    Writer::start(&PROTOCOL, packet, version, number, fds, request)
}

pub(super) fn epoch(r: &mut Reader<'_>) -> Result<Epoch, Malformed> {
    Ok(Epoch(r.u64()?))
}

pub(super) fn identity(r: &mut Reader<'_>) -> Result<Identity, Malformed> {
    Ok(Identity(r.array()?))
}

//! One message between a gateway and its carrier: JSON, bytes behind it, and descriptors, as one
//! packet of a socket pair.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The most bytes of a packet: metadata of one lease, which take some hundred bytes a region.
pub const MOST_BYTES: usize = 128 << 10;
/// The most descriptors: an object has at most 16 regions.
pub const MOST_FILES: usize = 16;

/// What a carrier is told.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// Memory that reads land in, of so many bytes, by one descriptor.
    Slots(u64),
    /// Memory to lend, by as many descriptors.
    Lend(Vec<u64>),
    /// What peers need to read from these lendings.
    Metadata(Vec<u64>),
    /// A lending has ended. No answer.
    End(u64),
    /// A peer's metadata, which come behind.
    Load,
    /// A peer is read from no more. No answer.
    Forget(u64),
    /// Bytes of a peer, to this place of the slots.
    Read {
        /// By the number of its `Load`.
        peer: u64,
        /// The first, as an address of the peer.
        from: u64,
        /// How many.
        bytes: u64,
        /// Where they go.
        at: u64,
    },
}

/// What a carrier says.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Said {
    /// It is caged, and what it lacks of the cage.
    Ready(Vec<String>),
    /// Where peers find what was lent.
    Lent(Vec<u64>),
    /// What they need, which comes behind.
    Metadata,
    /// The peer can be read from.
    Loaded,
    /// The bytes are there.
    Read,
    /// They are not, or whatever was asked for.
    Failed(String),
}

/// A message with its number.
#[derive(Debug, Serialize, Deserialize)]
pub struct Packet<T> {
    /// Of the question.
    pub number: u64,
    /// What is asked or answered.
    pub body: T,
    /// What comes behind.
    #[serde(skip)]
    pub attached: Vec<u8>,
    /// Descriptors.
    #[serde(skip)]
    pub files: Vec<OwnedFd>,
}

impl<T> Packet<T> {
    /// Makes one that has nothing behind it.
    pub fn plain(number: u64, body: T) -> Packet<T> {
        Packet {
            number,
            body,
            attached: Vec::new(),
            files: Vec::new(),
        }
    }
}

/// Makes the two ends.
pub fn pair() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// Sends one packet without waiting: an end that does not take its packets is broken.
///
/// # Errors
///
/// It is too long, or the other end does not take it or has gone.
pub fn send<T: Serialize>(to: BorrowedFd<'_>, packet: &Packet<T>) -> std::io::Result<()> {
    let json = serde_json::to_vec(packet).map_err(std::io::Error::other)?;
    let length = (json.len() as u32).to_le_bytes();
    let bytes = length.len() + json.len() + packet.attached.len();
    if bytes > MOST_BYTES || packet.files.len() > MOST_FILES {
        let files = packet.files.len();
        return Err(std::io::Error::other(format!(
            "{bytes} bytes and {files} descriptors, and may have {MOST_BYTES} and {MOST_FILES}"
        )));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = packet.files.iter().map(AsFd::as_fd).collect();
    if !files.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
    }
    let parts = [
        IoSlice::new(&length),
        IoSlice::new(&json),
        IoSlice::new(&packet.attached),
    ];
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        match sendmsg(to, &parts, &mut ancillary, flags) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Waits for a packet; none at the other end's end.
///
/// # Errors
///
/// What came is none, or had descriptors where `files` allows none. With `waits` unset also
/// [`WouldBlock`](std::io::ErrorKind::WouldBlock) when there is none yet.
pub fn receive<T: DeserializeOwned>(
    from: BorrowedFd<'_>,
    files: bool,
    waits: bool,
) -> std::io::Result<Option<Packet<T>>> {
    let mut bytes = vec![0; MOST_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let mut none = [];
    let mut ancillary =
        RecvAncillaryBuffer::new(if files { &mut space[..] } else { &mut none[..] });
    let mut flags = RecvFlags::CMSG_CLOEXEC;
    flags.set(RecvFlags::DONTWAIT, !waits);
    let received = loop {
        match recvmsg(
            from,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut ancillary,
            flags,
        ) {
            Ok(received) => break received.bytes,
            Err(Errno::INTR) => {}
            // The other end has gone with packets of ours unread.
            Err(Errno::CONNRESET) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    };
    if received == 0 {
        return Ok(None);
    }
    let nonsense = || std::io::Error::other("a packet that makes no sense");
    let (length, rest) = bytes[..received]
        .split_first_chunk::<4>()
        .ok_or_else(nonsense)?;
    let (json, attached) = rest
        .split_at_checked(u32::from_le_bytes(*length) as usize)
        .ok_or_else(nonsense)?;
    let mut packet: Packet<T> = serde_json::from_slice(json).map_err(|_| nonsense())?;
    packet.attached = attached.to_vec();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            packet.files.extend(files);
        }
    }
    Ok(Some(packet))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_arrives_as_it_was_sent_with_its_descriptors() {
        let (here, there) = pair().expect("sockets");
        let (reads, writes) = std::io::pipe().expect("a pipe");
        let sent = Packet {
            number: 7,
            body: Ask::Lend(vec![4096]),
            attached: vec![1, 2, 3],
            files: vec![writes.into()],
        };
        send(here.as_fd(), &sent).expect("room");
        let came: Packet<Ask> = receive(there.as_fd(), true, true)
            .expect("a packet")
            .expect("not the end");
        assert_eq!((came.number, &came.body), (7, &sent.body));
        assert_eq!((came.attached, came.files.len()), (vec![1, 2, 3], 1));
        let again = receive::<Ask>(there.as_fd(), true, false).expect_err("no second");
        assert_eq!(again.kind(), std::io::ErrorKind::WouldBlock);
        drop((here, reads));
        assert!(
            receive::<Ask>(there.as_fd(), true, true)
                .expect("the end")
                .is_none()
        );
    }

    #[test]
    fn what_is_no_packet_is_an_error_and_no_descriptor_comes_uninvited() {
        let (here, there) = pair().expect("sockets");
        for bytes in [
            &b"\x05\0\0\0{}"[..],
            b"1",
            b"\xff\xff\xff\xff{}",
            b"\x02\0\0\0{}",
        ] {
            rustix::io::write(&here, bytes).expect("room");
            receive::<Said>(there.as_fd(), false, true).expect_err("no packet");
        }
        let uninvited = Packet {
            files: vec![std::io::pipe().expect("a pipe").0.into()],
            ..Packet::plain(1, Said::Loaded)
        };
        send(here.as_fd(), &uninvited).expect("room");
        let came: Packet<Said> = receive(there.as_fd(), false, true)
            .expect("a packet")
            .expect("not the end");
        assert!(came.files.is_empty());
    }

    #[test]
    fn an_end_that_takes_nothing_and_a_packet_that_is_too_long_are_errors() {
        let (here, _there) = pair().expect("sockets");
        let long = Packet {
            attached: vec![0; MOST_BYTES],
            ..Packet::plain(1, Ask::Load)
        };
        send(here.as_fd(), &long).expect_err("too long");
        let full =
            (0..1_000_000).find_map(|n| send(here.as_fd(), &Packet::plain(n, Ask::End(n))).err());
        let kind = full.expect("the socket is full at some time").kind();
        assert_eq!(kind, std::io::ErrorKind::WouldBlock);
    }
}

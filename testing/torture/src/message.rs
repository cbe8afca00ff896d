//! What goes from a producer to a consumer, and from there to the next: a datagram, which may be
//! lost.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

/// The most bytes of a message.
const MOST_BYTES: usize = 512;
const HEAD: usize = 32;

/// A grant on its way.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Message {
    /// The grant's number.
    pub grant: u64,
    /// What the block contains: its generation.
    pub stamp: u64,
    /// When the block was allocated, in microseconds.
    pub since: u64,
    /// How often the grant may be claimed; 0 for any number.
    pub most: u32,
    /// Nobody else is ever granted the block.
    pub exclusive: bool,
    /// The block lies across pieces of memory that grows in place.
    pub across: bool,
    /// The descriptor.
    pub bytes: Vec<u8>,
}

impl Message {
    fn encode(&self) -> Vec<u8> {
        let mut packet = Vec::with_capacity(HEAD + self.bytes.len());
        packet.extend(self.grant.to_le_bytes());
        packet.extend(self.stamp.to_le_bytes());
        packet.extend(self.since.to_le_bytes());
        packet.extend(self.most.to_le_bytes());
        packet.extend((u32::from(self.exclusive) | u32::from(self.across) << 1).to_le_bytes());
        packet.extend(&self.bytes);
        packet
    }

    fn decode(packet: &[u8]) -> Option<Message> {
        let (head, bytes) = packet.split_at_checked(HEAD)?;
        let word = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
        let last = word(24)?;
        Some(Message {
            grant: word(0)?,
            stamp: word(8)?,
            since: word(16)?,
            most: last as u32,
            exclusive: last >> 32 & 1 != 0,
            across: last >> 33 & 1 != 0,
            bytes: bytes.to_vec(),
        })
    }
}

/// Where a consumer takes messages in.
fn address(dir: &Path, consumer: u64) -> PathBuf {
    dir.join(format!("c{consumer}"))
}

/// Where a producer's session listens.
pub fn session(dir: &Path, producer: u64) -> PathBuf {
    dir.join(format!("p{producer}"))
}

/// A consumer's box for messages.
#[derive(Debug)]
pub struct Inbox(UnixDatagram);

impl Inbox {
    /// Opens it.
    pub fn open(dir: &Path, consumer: u64) -> io::Result<Inbox> {
        let socket = UnixDatagram::bind(address(dir, consumer))?;
        socket.set_nonblocking(true)?;
        Ok(Inbox(socket))
    }

    /// Takes the next message, if there is one.
    pub fn take(&self) -> Option<Message> {
        let mut packet = [0; MOST_BYTES];
        let len = self.0.recv(&mut packet).ok()?;
        Message::decode(&packet[..len])
    }
}

/// Sends messages.
#[derive(Debug)]
pub struct Outbox {
    socket: UnixDatagram,
    dir: PathBuf,
}

impl Outbox {
    /// Makes one.
    pub fn new(dir: &Path) -> io::Result<Outbox> {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        Ok(Outbox {
            socket,
            dir: dir.to_owned(),
        })
    }

    /// Sends a message, and says whether it is on its way: a consumer may be dead, or stopped with
    /// its box full.
    pub fn send(&self, message: &Message, consumer: u64) -> bool {
        self.socket
            .send_to(&message.encode(), address(&self.dir, consumer))
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_arrives_as_it_was_sent() {
        let dir = tempfile::tempdir().expect("a directory");
        let inbox = Inbox::open(dir.path(), 5).expect("a box");
        let outbox = Outbox::new(dir.path()).expect("a socket");
        for (exclusive, across) in [(true, false), (false, true)] {
            let bytes = vec![7; 256];
            let message = Message {
                grant: 1 << 40,
                stamp: 3,
                since: 9,
                most: 2,
                exclusive,
                across,
                bytes,
            };
            assert!(outbox.send(&message, 5));
            assert!(!outbox.send(&message, 6), "nobody is there");
            assert_eq!(inbox.take(), Some(message));
        }
        assert_eq!(inbox.take(), None);
        assert_eq!(Message::decode(&[0; HEAD - 1]), None);
    }
}

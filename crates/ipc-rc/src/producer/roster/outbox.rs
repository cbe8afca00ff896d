//! Messages to participants, sent at once or, when a participant does not read, kept in order for
//! later.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use gpu_api::lock::Acquire;
use gpu_api::{Error, ParticipantId, Result};

use crate::gone::Gone;
use crate::producer::roster::peer::Peer;
use transport::os::socket::{self, SendOutcome};
use transport::wire::message::{MOST_BYTES, ToParticipant};

/// Messages kept for one participant before it counts as not reading: it is refused more.
const MOST_KEPT: usize = 256;
/// File descriptors kept for one participant: each is one of this process' own, so a participant
/// that asks for regions and does not read could take them all.
const MOST_KEPT_FDS: usize = 16;

#[derive(Debug)]
struct Kept {
    bytes: Vec<u8>,
    fd: Option<OwnedFd>,
}

/// What could not be sent yet.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    kept: Mutex<HashMap<ParticipantId, VecDeque<Kept>>>,
}

impl Outbox {
    /// Sends a message, after those that are kept for the same participant.
    ///
    /// # Errors
    ///
    /// [`Error::Exhausted`] when the participant has not read for [`MOST_KEPT`] messages or
    /// [`MOST_KEPT_FDS`] descriptors, [`Gone::Participant`] when it hung up.
    pub fn push(
        &self,
        peer: &Peer,
        message: &ToParticipant,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<()> {
        let mut bytes = [0; MOST_BYTES];
        let len = message.encode(&mut bytes);
        let mut kept = self.kept.acquire();
        if !kept.contains_key(&peer.id) {
            let fds: &[BorrowedFd<'_>] = fd.as_slice();
            match socket::send(peer.seat.socket.as_fd(), &bytes[..len], fds) {
                Ok(SendOutcome::Sent) => return Ok(()),
                Ok(SendOutcome::HungUp) => {
                    return Err(Gone::Participant(peer.id).into());
                }
                Ok(SendOutcome::Full) => {}
                Err(source) => {
                    return Err(Error::system(
                        "sendmsg",
                        "raise RLIMIT_NOFILE or free memory",
                        source,
                    ));
                }
            }
        }
        let queue = kept.entry(peer.id).or_default();
        if fd.is_some() && queue.iter().filter(|kept| kept.fd.is_some()).count() >= MOST_KEPT_FDS {
            return Err(Error::exhausted(
                "file descriptors kept for a participant that does not read",
                MOST_KEPT_FDS as u64,
                "let the participant run, or end it",
            ));
        }
        let fd = match fd {
            Some(fd) => Some(
                fd.try_clone_to_owned()
                    .map_err(|e| Error::without_descriptors("dup", e))?,
            ),
            None => None,
        };
        if queue.len() >= MOST_KEPT {
            return Err(Error::exhausted(
                "messages kept for a participant that does not read",
                MOST_KEPT as u64,
                "let the participant run, or end it",
            ));
        }
        queue.push_back(Kept {
            bytes: bytes[..len].to_vec(),
            fd,
        });
        Ok(())
    }

    /// Sends the messages kept for a participant, as far as it reads.
    pub fn flush(&self, peer: &Peer) {
        let mut kept = self.kept.acquire();
        let Some(queue) = kept.get_mut(&peer.id) else {
            return;
        };
        while let Some(first) = queue.front() {
            let fd = first.fd.as_ref().map(AsFd::as_fd);
            match socket::send(peer.seat.socket.as_fd(), &first.bytes, fd.as_slice()) {
                Ok(SendOutcome::Sent) => drop(queue.pop_front()),
                Ok(SendOutcome::Full) | Err(_) => return,
                Ok(SendOutcome::HungUp) => break,
            }
        }
        kept.remove(&peer.id);
    }

    /// Says whether something is kept, for anybody.
    pub fn is_waiting(&self) -> bool {
        !self.kept.acquire().is_empty()
    }

    /// Drops the messages kept for a participant.
    pub fn forget(&self, participant: ParticipantId) {
        self.kept.acquire().remove(&participant);
    }
}

//! From a connection to a participant: the check of its hello, and the answer.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use gpu_api::{Error, Result, explain};
use transport::os::socket;
use transport::wire::packet::Versions;
use transport::wire::table;

use crate::server::action::{Asker, Participant, Refused};
use crate::server::peer::{Peer, Proof, Slots, identify};
use crate::wire::{MOST_BYTES, RefusalCode, ToBroker, ToClient, VERSIONS};

/// A process that said a good hello.
pub(super) struct Newcomer {
    uid: u32,
    shared_context: bool,
    name: String,
    version: u16,
    pid: u32,
    command: String,
    pidfd: OwnedFd,
    descendants: Vec<OwnedFd>,
}

impl Newcomer {
    /// Reads the first packet of a connection, and takes the descriptors if it is a good hello.
    pub(super) fn read(
        socket: &OwnedFd,
        bytes: &[u8],
        fds: &mut Vec<OwnedFd>,
        allowed: &[u32],
    ) -> Result<Newcomer, Refused> {
        let protocol = |why: &str| (RefusalCode::Protocol, why.to_owned());
        let uid = socket::credentials(socket.as_fd())
            .map_err(|e| (RefusalCode::Failed, e.to_string()))?
            .uid;
        if uid != rustix::process::geteuid().as_raw() && !allowed.contains(&uid) {
            return Err((
                RefusalCode::User,
                format!("uid {uid} may not connect to this broker"),
            ));
        }
        let hello =
            ToBroker::decode(bytes, fds.len()).map_err(|error| protocol(&error.to_string()))?;
        let ToBroker::Hello {
            lowest,
            highest,
            shared_context,
            name,
            ..
        } = hello
        else {
            return Err(protocol("the first message must be a hello"));
        };
        let theirs = Versions { lowest, highest };
        let Some(version) = VERSIONS.agree(theirs) else {
            let why = format!("the participant speaks versions {theirs}, the broker {VERSIONS}");
            return Err((RefusalCode::Version, why));
        };
        let Some((pid, command)) = identify(fds).map_err(failed)? else {
            return Err(protocol("a descriptor of the hello is not a pidfd"));
        };
        let mut descendants = std::mem::take(fds);
        let pidfd = descendants.remove(0);
        Ok(Newcomer {
            uid,
            shared_context,
            name,
            version,
            pid,
            command,
            pidfd,
            descendants,
        })
    }

    /// Makes it a participant.
    pub(super) fn into_peer(self, participant: Participant, socket: &OwnedFd) -> Result<Peer> {
        Ok(Peer {
            asker: Asker {
                participant,
                uid: self.uid,
                shared_context: self.shared_context,
            },
            pid: self.pid,
            command: self.command,
            name: self.name,
            version: self.version,
            socket: socket
                .try_clone()
                .map_err(|e| Error::system("dup", "raise RLIMIT_NOFILE", e))?,
            pidfd: self.pidfd,
            proof: Proof {
                descendants: self.descendants.len(),
                ..Proof::default()
            },
            descendants: self.descendants,
            slots: Slots::new()?,
        })
    }
}

/// Welcomes a participant: the broker's own pidfd and the participant's counter file go with it.
pub(super) fn welcome(peer: &Peer, incarnation: [u8; 16], own_pidfd: BorrowedFd<'_>) -> Result<()> {
    let file = peer.slots.file();
    let participant = peer.asker.participant.0;
    let welcome = ToClient::Welcome {
        incarnation,
        participant,
        pid: std::process::id(),
        slots: file.slot_count(),
    };
    let mut bytes = [0; MOST_BYTES];
    let len = table::encode(&welcome, &mut bytes, peer.version);
    match socket::send(peer.socket.as_fd(), &bytes[..len], &[own_pidfd, file.fd()]) {
        Ok(socket::SendOutcome::Sent) => Ok(()),
        Ok(_) => Err(Error::Closing),
        Err(e) => Err(Error::system("sendmsg", "raise RLIMIT_NOFILE", e)),
    }
}

/// Refuses a connection. The message is the last: it goes with the socket.
pub(super) fn refuse(socket: &OwnedFd, refusal: RefusalCode, why: String) {
    let mut bytes = [0; MOST_BYTES];
    let refused = ToClient::Refused {
        refusal,
        lowest: VERSIONS.lowest,
        highest: VERSIONS.highest,
        why,
    };
    let len = refused.encode(&mut bytes);
    let _ = socket::send(socket.as_fd(), &bytes[..len], &[]);
}

/// A refusal because something failed at the broker.
pub(super) fn failed(error: Error) -> Refused {
    (RefusalCode::Failed, explain(&error))
}

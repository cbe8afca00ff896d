//! Admission: from a connection to a participant.
//!
//! A connection is watched until it says hello; then its user, version, vendor and device are checked, it gets a number
//! and a counter file, and the welcome goes out. Whoever is refused is told why and what to do.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, PoisonError};

use gpu_api::{Error, Result};

use crate::producer::peer::{Arrival, Peer};
use crate::producer::service::{Service, Watch};
use crate::producer::share::{MOST_PARTICIPANTS, participant_id};
use channel::os::process;
use channel::os::socket::{self, ReceiveOutcome};
use channel::shared::counter_file::bytes_of;
use channel::trace_point;
use channel::wire::message::{DecodeError, MOST_BYTES, RefusalCode, ToParticipant, ToProducer};

/// Connections that have not said hello yet, at most. Who connects says hello at once, so of more than these the one
/// that has been silent for longest goes: otherwise whoever may reach the socket could keep everybody else out.
const MOST_GREETINGS: usize = 256;

/// Connections accepted before the participants get their turn.
const ACCEPTS_A_TURN: usize = 64;

impl Service {
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPTS_A_TURN {
            let Some(listener) = &self.listener else { return };
            match listener.accept() {
                Ok(Some(socket)) => {
                    self.hang_up_on_the_silent();
                    match self.watch(socket.as_fd(), Watch::Greeting) {
                        Ok(key) => drop(self.greetings.insert(key, socket)),
                        Err(error) => tracing::warn!(%error, "a connection is turned away"),
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(%error, "a connection cannot be accepted");
                    return;
                }
            }
        }
    }

    /// Makes room for a connection. What has been said to those that go is heard first, as far as the system tells.
    fn hang_up_on_the_silent(&mut self) {
        while self.greetings.len() >= MOST_GREETINGS {
            let Some((&oldest, _)) = self.greetings.first_key_value() else { return };
            // It may have spoken since epoll was asked.
            self.greet(oldest);
            if let Some(socket) = self.greetings.remove(&oldest) {
                self.unwatch(oldest, socket.as_fd());
                tracing::warn!("too many connections say nothing: the oldest is closed");
            }
        }
    }

    /// Watches the connections that the application passed in.
    pub(super) fn welcome_arrivals(&mut self) {
        let arrivals = std::mem::take(&mut *self.core.arrivals.lock().unwrap_or_else(PoisonError::into_inner));
        for socket in arrivals {
            match self.watch(socket.as_fd(), Watch::Greeting) {
                Ok(key) => drop(self.greetings.insert(key, socket)),
                Err(error) => tracing::warn!(%error, "a connection is turned away"),
            }
        }
    }

    pub(super) fn greet(&mut self, key: u64) {
        let Some(socket) = self.greetings.remove(&key) else { return };
        let mut bytes = [0; MOST_BYTES];
        let mut fds = Vec::new();
        let outcome = socket::receive(socket.as_fd(), &mut bytes, &mut fds);
        let len = match outcome {
            Ok(ReceiveOutcome::Packet(len)) => len,
            Ok(ReceiveOutcome::Empty) => {
                self.greetings.insert(key, socket);
                return;
            }
            Ok(ReceiveOutcome::HungUp) | Err(_) => {
                self.unwatch(key, socket.as_fd());
                return;
            }
        };
        if let Ok(ToProducer::Inspect { request, from }) = ToProducer::decode(&bytes[..len], fds.len())
            && self.may_connect(&socket).is_ok()
        {
            let len = self.core.report(request, from).encode(&mut bytes);
            // Whoever asks reads one answer before it asks again; the room for one is always there.
            let _ = socket::send(socket.as_fd(), &bytes[..len], &[]);
            self.greetings.insert(key, socket);
            return;
        }
        self.unwatch(key, socket.as_fd());
        if let Ok(ToProducer::TakeSnapshot { request }) = ToProducer::decode(&bytes[..len], fds.len())
            && self.may_connect(&socket).is_ok()
        {
            // The last of its connection: who asks again and reads nothing must not pile files up.
            let (answer, file) = self.core.snapshot(request);
            let len = answer.encode(&mut bytes);
            let file: Vec<_> = file.iter().map(AsFd::as_fd).collect();
            let _ = socket::send(socket.as_fd(), &bytes[..len], &file);
            return;
        }
        if let Err((code, why)) = self.admit(&socket, &bytes[..len], fds) {
            let pid =
                socket::peer_pidfd(socket.as_fd()).and_then(|pidfd| process::pid_of(pidfd.as_fd()).ok()).unwrap_or(0);
            tracing::warn!(pid, %why, "a participant is refused");
            let mut bytes = [0; MOST_BYTES];
            let len = ToParticipant::Refused { code, why }.encode(&mut bytes);
            let _ = socket::send(socket.as_fd(), &bytes[..len], &[]);
        }
    }

    fn may_connect(&self, socket: &OwnedFd) -> Result<(), (RefusalCode, String)> {
        let uid = socket::peer_uid(socket.as_fd()).map_err(|e| (RefusalCode::Failed, e.to_string()))?;
        if uid == rustix::process::geteuid().as_raw() || self.allowed.contains(&uid) {
            return Ok(());
        }
        Err((RefusalCode::User, format!("uid {uid} is not allowed; add it with SessionBuilder::allow_uids")))
    }

    fn admit(&mut self, socket: &OwnedFd, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(), (RefusalCode, String)> {
        self.may_connect(socket)?;
        let mut fds = fds;
        let (backend, device) = match ToProducer::decode(bytes, fds.len()) {
            Ok(ToProducer::Hello { backend, device, .. }) => (backend, device),
            Ok(_) => return Err((RefusalCode::Protocol, "the first message must be Hello".into())),
            Err(error @ DecodeError::Version { .. }) => return Err((RefusalCode::Version, error.to_string())),
            Err(error) => return Err((RefusalCode::Protocol, error.to_string())),
        };
        let core = self.core.clone();
        if backend != core.gpu.kind() || device != core.gpu.uuid() {
            let why = format!(
                "the participant opened {backend} device {device}, the session is on {} device {}",
                core.gpu.kind(),
                core.gpu.uuid()
            );
            return Err((RefusalCode::Device, why));
        }
        // The cause goes along: the participant's side has no other way to it.
        let internal = |error: Error| {
            let cause = std::error::Error::source(&error).map_or(String::new(), |cause| format!(": {cause}"));
            (RefusalCode::Failed, format!("{error}{cause}"))
        };
        let place = {
            let peers = core.peers.load();
            let free = |&place: &usize| peers.get(place).is_none_or(Option::is_none) && core.places.is_vacant(place);
            (0..MOST_PARTICIPANTS).find(free)
        };
        let Some(place) = place else {
            return Err((RefusalCode::Limit, format!("the session has {MOST_PARTICIPANTS} participants already")));
        };
        for fd in &fds {
            if !process::is_pidfd(fd.as_fd()).map_err(internal)? {
                return Err((RefusalCode::Protocol, "a descriptor of the hello is no pidfd".into()));
            }
        }
        let pidfd = fds.remove(0);
        let pid = process::pid_of(pidfd.as_fd()).map_err(internal)?;
        let id = participant_id(self.next_serial, place);
        self.next_serial += 1;
        let peer = Peer::new(
            Arrival {
                id,
                pid,
                command: process::command_of(pid),
                local: process::same_process(pidfd.as_fd()).map_err(internal)?,
                socket: socket.try_clone().map_err(|e| internal(Error::system("dup", "raise RLIMIT_NOFILE", e)))?,
                pidfd,
                descendants: fds,
            },
            &core.gpu,
            || core.places.seat(place, id),
        )
        .map_err(internal)?;
        let peer = Arc::new(peer);
        let seat = |occupant: Option<Arc<Peer>>| {
            core.peers.rcu(|peers| {
                let mut peers = Vec::clone(peers);
                peers.resize(peers.len().max(place + 1), None);
                peers[place].clone_from(&occupant);
                peers
            });
        };
        // Before the welcome: whoever has read it can be shared with.
        seat(Some(peer.clone()));
        if let Err(error) = self.welcome(&peer) {
            seat(None);
            // Somebody may have shared with it meanwhile: it is granted nothing, and what it was is taken back.
            self.close(&peer);
            peer.ledger.leave();
            return Err(internal(error));
        }
        trace_point!("welcome");
        tracing::debug!(participant = %id, pid, command = %peer.command, "a participant is connected");
        core.announce_change();
        Ok(())
    }

    fn welcome(&mut self, peer: &Arc<Peer>) -> Result<()> {
        let id = peer.id;
        let mut keys = vec![(self.watch(peer.socket.as_fd(), Watch::Socket(id))?, peer.socket.as_fd())];
        let mut watch_rest = || -> Result<()> {
            keys.push((self.watch(peer.pidfd.as_fd(), Watch::Process(id))?, peer.pidfd.as_fd()));
            for (n, descendant) in peer.descendants.iter().enumerate() {
                keys.push((self.watch(descendant.as_fd(), Watch::Descendant(id, n))?, descendant.as_fd()));
            }
            let first = peer.first_file();
            let message = ToParticipant::Welcome {
                session: self.core.id,
                participant: id,
                pid: std::process::id(),
                slots: first.slot_count(),
                max_slots: self.core.max_slots,
            };
            debug_assert!(first.bytes() == bytes_of(first.slot_count()));
            let mut bytes = [0; MOST_BYTES];
            let len = message.encode(&mut bytes);
            match socket::send(peer.socket.as_fd(), &bytes[..len], &[self.own_pidfd.as_fd(), first.fd()]) {
                Ok(socket::SendOutcome::Sent) => Ok(()),
                Ok(_) => Err(Error::ParticipantGone { participant: id }),
                Err(e) => Err(Error::system("sendmsg", "raise RLIMIT_NOFILE", e)),
            }
        };
        let done = watch_rest();
        if done.is_err() {
            for (key, fd) in keys {
                self.unwatch(key, fd);
            }
            self.unregister(peer.clone());
        }
        done
    }
}

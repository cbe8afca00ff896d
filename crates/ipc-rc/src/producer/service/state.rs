//! The state of the session's thread: what it waits for, and participants that are joining or
//! leaving.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpu_api::{ParticipantId, RegionId, Result};

use crate::gpu_event::GpuEvent;
use crate::producer::blocks::reclaimed::ReclaimedBlocks;
use crate::producer::core::Core;
use crate::producer::fences::ticket_event::TicketStreams;
use crate::producer::roster::peer::Peer;
use transport::os::blocking::Blocking;
use transport::os::closer::{Closer, Foreign};
use transport::os::poller::Poller;
use transport::os::process;
use transport::os::socket::{Credentials, Listener};

/// The shortest and the longest time between two looks at leases.
pub(super) const POLL: (Duration, Duration) =
    (Duration::from_micros(50), Duration::from_millis(10));

/// A connection that has not said hello yet.
#[derive(Debug)]
pub(super) struct Greeting {
    pub socket: Foreign,
    pub of: Credentials,
}

/// What a descriptor that epoll reports stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Watch {
    Listener,
    Waker,
    Greeting,
    Socket(ParticipantId),
    /// The socket of a participant that is not read any more: its hang-up alone is awaited.
    Silenced(ParticipantId),
    Process(ParticipantId),
    Descendant(ParticipantId, usize),
}

/// The thread's state.
#[derive(Debug)]
pub(crate) struct Service {
    pub(super) core: Arc<Core>,
    pub(super) listener: Option<Arc<Listener>>,
    /// Streams that wait for tickets' events.
    pub(super) ticket_streams: TicketStreams,
    pub(super) allowed: Vec<u32>,
    pub(super) own_pidfd: OwnedFd,
    pub(super) poller: Poller,
    pub(super) watches: HashMap<u64, Watch>,
    /// Connections that have not said hello yet, the oldest first.
    pub(super) greetings: BTreeMap<u64, Greeting>,
    /// Closes what others sent.
    pub(super) closer: Closer,
    /// Connections are left in the backlog for a while.
    pub(super) is_deaf: bool,
    next_key: u64,
    pub(super) next_serial: u64,
    pub(super) poll: Duration,
    /// Asked whether the context works. Made at the start: that one cannot be made later says
    /// nothing.
    pub(super) probe: GpuEvent,
    pub(super) broken: bool,
    /// A mapping has gone since the last look.
    pub(super) unmapped: bool,
    pub(super) blocking: Blocking,
    /// Participants that are gone but into whose words a stream of ours may still write.
    pub(super) leaving: Vec<Arc<Peer>>,
    pub(super) asked: Vec<ParticipantId>,
    /// Mapped regions of returned tokens, that participants were asked to unmap.
    pub(super) wanted: Vec<RegionId>,
}

impl Service {
    /// Makes the state.
    pub fn new(core: Arc<Core>, listener: Listener, allowed: Vec<u32>) -> Result<Service> {
        let mut service = Service {
            own_pidfd: process::own_pidfd()?,
            poller: Poller::new()?,
            listener: None,
            ticket_streams: TicketStreams::default(),
            allowed,
            watches: HashMap::new(),
            greetings: BTreeMap::new(),
            closer: Closer::new()?,
            is_deaf: false,
            next_key: 0,
            next_serial: 1,
            poll: POLL.0,
            probe: GpuEvent::new(&core.facts.gpu)?,
            broken: false,
            unmapped: false,
            blocking: Blocking::default(),
            leaving: Vec::new(),
            asked: Vec::new(),
            wanted: Vec::new(),
            core,
        };
        service.watch(listener.as_fd(), Watch::Listener)?;
        let core = service.core.clone();
        service.watch(core.wakeups.thread.fd(), Watch::Waker)?;
        let listener = Arc::new(listener);
        core.life.listens_on(&listener);
        service.listener = Some(listener);
        Ok(service)
    }

    /// Leaves connections in the backlog until fewer wait for their close.
    pub(super) fn pause_listening(&mut self) {
        self.listen(false);
    }

    /// Takes connections again when few wait for their close.
    pub(super) fn listen_again(&mut self) {
        if self.is_deaf && !self.closer.is_crowded() {
            self.listen(true);
        }
    }

    fn listen(&mut self, listens: bool) {
        let Some(listener) = &self.listener else {
            return;
        };
        let key = self
            .watches
            .iter()
            .find(|(_, watch)| **watch == Watch::Listener)
            .map(|(&key, _)| key);
        let Some(key) = key else { return };
        if listens {
            self.poller.resume(listener.as_fd(), key);
        } else {
            self.poller.pause(listener.as_fd(), key);
        }
        self.is_deaf = !listens;
    }

    /// Reads no more of a participant that sent an invalid message or shut its end for writing, and
    /// grants it nothing more. What it sends from here on stays in its socket, and costs one line in
    /// the log.
    pub(super) fn silence(&mut self, key: u64, peer: &Arc<Peer>, why: &dyn fmt::Display) {
        tracing::warn!(
            participant = %peer.id,
            error = %why,
            "a participant sends what is no message; it is granted nothing more and not read again"
        );
        self.poller.pause(peer.socket.as_fd(), key);
        self.watches.insert(key, Watch::Silenced(peer.id));
        self.close(peer);
    }

    pub(super) fn watch(&mut self, fd: BorrowedFd<'_>, watch: Watch) -> Result<u64> {
        let key = self.next_key;
        self.poller.add(fd, key)?;
        self.next_key += 1;
        self.watches.insert(key, watch);
        Ok(key)
    }

    pub(super) fn unwatch(&mut self, key: u64, fd: BorrowedFd<'_>) {
        self.watches.remove(&key);
        self.poller.remove(fd);
    }

    /// Grants nothing more, and takes unclaimed grants back.
    pub(super) fn close(&self, peer: &Arc<Peer>) {
        let mut out = ReclaimedBlocks::new();
        peer.close(&mut out);
        self.core
            .tallies
            .revoked
            .fetch_add(out.len() as u64, Ordering::Relaxed);
        self.core.retire(&mut out);
        self.core.wakeups.announce_change();
    }
}

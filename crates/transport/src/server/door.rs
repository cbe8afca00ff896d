//! What every server has: its listener, the connections that have yet to say hello, and the table
//! of watches.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use gpu_api::{Error, Result};
use rustix::io::Errno;

use super::eviction::most_silent;
use super::seat::{Refused, Seat};
use super::watch::Watch;
use super::watches::Watches;
use crate::os::closer::{Closer, Foreign};
use crate::os::process::own_pidfd;
use crate::os::socket::{self, Credentials, Listener, SendOutcome};
use crate::wire::refusal::RefusalCode;

/// Connections that have not said hello yet, at most.
pub const MOST_GREETINGS: usize = 256;

/// A connection that has not said hello yet.
#[derive(Debug)]
pub struct Greeting {
    /// The connection.
    pub socket: Foreign,
    /// The process that connected, as the kernel reports it.
    pub of: Credentials,
}

/// The listener, the greetings and the watches.
#[derive(Debug)]
pub struct Door<Id> {
    /// What is waited on.
    pub watches: Watches<Id>,
    /// Closes what others sent.
    pub closer: Closer,
    listener: Option<(u64, Arc<Listener>)>,
    allowed: Vec<u32>,
    /// The oldest first.
    pub(super) greetings: BTreeMap<u64, Greeting>,
    is_deaf: bool,
    own_pidfd: OwnedFd,
}

impl<Id: Copy + PartialEq> Door<Id> {
    /// Makes the door of a server whose other threads wake it by `waker`. Users `allowed` may
    /// connect beside this process' own.
    ///
    /// # Errors
    ///
    /// What the kernel refuses.
    pub fn new(
        listener: Arc<Listener>,
        waker: BorrowedFd<'_>,
        allowed: Vec<u32>,
    ) -> Result<Door<Id>> {
        let mut watches = Watches::new()?;
        let key = watches.add(Watch::Listener, listener.as_fd())?;
        watches.add(Watch::Waker, waker)?;
        Ok(Door {
            watches,
            closer: Closer::new()?,
            listener: Some((key, listener)),
            allowed,
            greetings: BTreeMap::new(),
            is_deaf: false,
            own_pidfd: own_pidfd()?,
        })
    }

    /// Says whether connections may come, or have yet to say hello.
    pub fn is_open(&self) -> bool {
        self.listens() || !self.greetings.is_empty()
    }

    /// Says whether connections may come.
    pub fn listens(&self) -> bool {
        self.listener.is_some()
    }

    /// Takes the listener: no connection comes any more.
    pub fn close(&mut self) -> Option<Arc<Listener>> {
        self.listener.take().map(|(_, listener)| listener)
    }

    /// Says whether connections wait in the backlog until fewer descriptors wait for their close.
    /// While it does, [`listen_again`](Door::listen_again) is to be called now and then.
    pub fn is_deaf(&self) -> bool {
        self.is_deaf
    }

    /// Takes connections again when few descriptors wait for their close.
    pub fn listen_again(&mut self) {
        if self.is_deaf && !self.closer.is_crowded() {
            self.listen(true);
        }
    }

    fn listen(&mut self, listens: bool) {
        if let Some((key, listener)) = &self.listener {
            self.watches.pause(*key, listener.as_fd(), !listens);
            self.is_deaf = !listens;
        }
    }

    /// Accepts a connection, if one came.
    pub(super) fn accept(&mut self) -> Option<Foreign> {
        if self.closer.is_crowded() {
            // Each takes a descriptor until it is closed: those that come wait in the backlog.
            self.listen(false);
            return None;
        }
        let (_, listener) = self.listener.as_ref()?;
        match listener.accept() {
            Ok(socket) => socket.map(|socket| self.closer.guard(socket)),
            Err(error) => {
                tracing::warn!(%error, "a connection cannot be accepted");
                None
            }
        }
    }

    /// Identifies the process of a connection. One that may not connect is refused before anything
    /// that it sent is read.
    pub(super) fn identify(&self, socket: &Foreign) -> Result<Credentials, Refused> {
        let of = socket::credentials(socket.as_fd())
            .map_err(|e| (RefusalCode::Failed, e.to_string()))?;
        if of.uid == rustix::process::geteuid().as_raw() || self.allowed.contains(&of.uid) {
            return Ok(of);
        }
        let why = format!("uid {} is not allowed", of.uid);
        Err((RefusalCode::User, why))
    }

    /// Picks the connection that makes room for one more, if there are too many.
    pub(super) fn to_evict(&self) -> Option<u64> {
        let silent = self.greetings.iter().map(|(&key, of)| (key, of.of));
        (self.greetings.len() >= MOST_GREETINGS)
            .then(|| most_silent(silent))
            .flatten()
    }

    /// Waits for the first message of a connection.
    pub(super) fn await_hello(&mut self, greeting: Greeting) -> Result<(), (Foreign, Refused)> {
        match self.watches.add(Watch::Greeting, greeting.socket.as_fd()) {
            Ok(key) => {
                self.greetings.insert(key, greeting);
                Ok(())
            }
            Err(error) => Err((greeting.socket, super::seat::failed(&error))),
        }
    }

    /// Watches a participant: the connection that said hello, its process and its descendants.
    /// After an error [`forget`](Door::forget) it.
    ///
    /// # Errors
    ///
    /// What the kernel refuses.
    pub fn seat(&mut self, key: u64, id: Id, seat: &Seat) -> Result<()> {
        self.watches.become_of(key, Watch::Socket(id));
        self.watches.add(Watch::Process(id), seat.pidfd.as_fd())?;
        for (n, descendant) in seat.descendants.iter().enumerate() {
            self.watches
                .add(Watch::Descendant(id, n), descendant.as_fd())?;
        }
        Ok(())
    }

    /// Sends a welcome: this process' pidfd and the participant's counter file go with it.
    ///
    /// # Errors
    ///
    /// What the kernel refuses; a broken pipe when the participant has gone.
    pub fn welcome(&self, seat: &Seat, packet: &[u8], file: BorrowedFd<'_>) -> Result<()> {
        let fds = [self.own_pidfd.as_fd(), file];
        let failed = match socket::send(seat.socket.as_fd(), packet, &fds) {
            Ok(SendOutcome::Sent) => return Ok(()),
            Ok(SendOutcome::Full | SendOutcome::HungUp) => Errno::PIPE.into(),
            Err(e) => e,
        };
        Err(Error::without_descriptors("sendmsg", failed))
    }

    /// Watches nothing of a participant any more.
    pub fn forget(&mut self, id: Id, seat: &Seat) {
        self.watches.forget(id, seat);
    }
}

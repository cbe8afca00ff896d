//! What every server has: its listener, the connections that have yet to say hello, and the table
//! of watches.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

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

/// How often refusals for want of a descriptor are logged.
const LOG_AGAIN: Duration = Duration::from_secs(1);

/// A connection that has not said hello yet.
#[derive(Debug)]
pub struct Greeting {
    /// The connection.
    pub socket: Foreign,
    /// The process that connected, as the kernel reports it.
    pub of: Credentials,
}

/// Which users beside the server's own may connect.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Allowed {
    /// These users.
    pub uids: Vec<u32>,
    /// Every user of these groups.
    pub gids: Vec<u32>,
}

impl Allowed {
    /// Says whether no other user may.
    pub fn is_empty(&self) -> bool {
        self.uids.is_empty() && self.gids.is_empty()
    }
}

impl From<Vec<u32>> for Allowed {
    fn from(uids: Vec<u32>) -> Allowed {
        Allowed {
            uids,
            gids: Vec::new(),
        }
    }
}

/// Connections that were refused for one kind of reason. They are logged once a second: whoever
/// connects in a loop fills no disk.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct TurnedAway {
    all: u64,
    /// As many of them were in the log, at this time.
    logged: Option<(u64, Instant)>,
}

impl TurnedAway {
    /// Counts one more. Returns how many there were since the last line of the log, if there is to
    /// be another one.
    pub(super) fn note(&mut self, now: Instant) -> Option<u64> {
        self.all += 1;
        let (before, at) = self.logged.unwrap_or((0, now));
        if self.logged.is_some() && now.saturating_duration_since(at) < LOG_AGAIN {
            return None;
        }
        self.logged = Some((self.all, now));
        Some(self.all - before)
    }
}

/// The listener, the greetings and the watches.
#[derive(Debug)]
pub struct Door<Id> {
    /// What is waited on.
    pub watches: Watches<Id>,
    /// Closes what others sent.
    pub closer: Closer,
    listener: Option<(u64, Arc<Listener>)>,
    allowed: Allowed,
    /// For want of a descriptor.
    turned_away: TurnedAway,
    /// For any other reason.
    pub(super) refused: TurnedAway,
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
        allowed: impl Into<Allowed>,
    ) -> Result<Door<Id>> {
        let mut watches = Watches::new()?;
        let key = watches.add(Watch::Listener, listener.as_fd())?;
        watches.add(Watch::Waker, waker)?;
        Ok(Door {
            watches,
            closer: Closer::new()?,
            listener: Some((key, listener)),
            allowed: allowed.into(),
            turned_away: TurnedAway::default(),
            refused: TurnedAway::default(),
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

    /// Listens at another socket from here on: the one before it has lost its name.
    ///
    /// # Errors
    ///
    /// What the kernel refuses; it listens where it did then.
    pub fn listen_at(&mut self, listener: Arc<Listener>) -> Result<()> {
        let key = self.watches.add(Watch::Listener, listener.as_fd())?;
        if let Some((key, before)) = self.listener.replace((key, listener)) {
            self.watches.remove(key, before.as_fd());
        }
        self.is_deaf = false;
        Ok(())
    }

    /// Returns where connections come from.
    pub fn listener(&self) -> Option<&Listener> {
        self.listener.as_ref().map(|(_, listener)| &**listener)
    }

    /// Lets these users connect from here on. A connection that is there stays.
    pub fn allow(&mut self, allowed: Allowed) {
        self.allowed = allowed;
    }

    /// Counts the connections that were refused for want of a descriptor.
    pub fn turned_away(&self) -> u64 {
        self.turned_away.all
    }

    /// Accepts a connection, if one came. One for which no descriptor is left is told so by
    /// `refuse`.
    pub(super) fn accept(
        &mut self,
        refuse: impl FnOnce(BorrowedFd<'_>, Refused),
    ) -> Option<Foreign> {
        if self.closer.is_crowded() {
            // Each takes a descriptor until it is closed: those that come wait in the backlog.
            self.listen(false);
            return None;
        }
        let (_, listener) = self.listener.as_ref()?;
        let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let turn_away = |socket: BorrowedFd<'_>| {
            let most = most.map_or(String::new(), |most| format!(" of its {most}"));
            let why = format!(
                "the process at this socket has no file descriptor left{most}: raise its limit (`ulimit -n`, or \
                 LimitNOFILE= of its unit), or let it hold less"
            );
            refuse(socket, (RefusalCode::Failed, why));
        };
        match listener.accept(turn_away) {
            Ok(socket) => socket.map(|socket| self.closer.guard(socket)),
            Err(error) => {
                if let Some(count) = self.turned_away.note(Instant::now()) {
                    tracing::error!(%error, count, limit = most, "connections are refused");
                }
                None
            }
        }
    }

    /// Identifies the process of a connection. One that may not connect is refused before anything
    /// that it sent is read.
    pub(super) fn identify(&self, socket: &Foreign) -> Result<Credentials, Refused> {
        let of = socket::credentials(socket.as_fd())
            .map_err(|e| (RefusalCode::Failed, e.to_string()))?;
        self.admit(of.uid, || socket::groups(socket.as_fd()))?;
        Ok(of)
    }

    /// Refuses a user that may not connect.
    ///
    /// # Errors
    ///
    /// Why not.
    pub fn admit(
        &self,
        uid: u32,
        groups: impl FnOnce() -> io::Result<Vec<u32>>,
    ) -> Result<(), Refused> {
        let Allowed { uids, gids } = &self.allowed;
        if uid == rustix::process::geteuid().as_raw() || uids.contains(&uid) {
            return Ok(());
        }
        let refuse = |why| Err((RefusalCode::User, why));
        if gids.is_empty() {
            return refuse(format!("uid {uid} is not allowed"));
        }
        let groups = groups().map_err(|e| (RefusalCode::Failed, e.to_string()))?;
        if groups.iter().any(|group| gids.contains(group)) {
            return Ok(());
        }
        let gids: Vec<String> = gids.iter().map(u32::to_string).collect();
        refuse(format!(
            "uid {uid} is not allowed, and is in no group of {}",
            gids.join(", ")
        ))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_counted_and_one_a_second_is_logged() {
        let (mut refused, start) = (TurnedAway::default(), Instant::now());
        assert_eq!(refused.note(start), Some(1));
        for ms in 1..=20 {
            assert_eq!(refused.note(start + Duration::from_millis(ms)), None);
        }
        assert_eq!(refused.note(start + LOG_AGAIN), Some(21));
        assert_eq!(refused.all, 22);
    }
}

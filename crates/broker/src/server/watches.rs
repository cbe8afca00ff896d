//! The descriptors that the service waits on, and what each stands for.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use gpu_api::Result;
use transport::os::poller::Poller;

use crate::server::action::Participant;

/// What a descriptor is watched for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Watch {
    Listener,
    Waker,
    Leash,
    Greeting,
    Socket(Participant),
    Process(Participant),
    Descendant(Participant, usize),
}

/// All of them, by the number that the poller tells.
pub(super) struct Watches {
    poller: Poller,
    watches: HashMap<u64, Watch>,
    next_key: u64,
}

impl Watches {
    pub(super) fn new() -> Result<Watches> {
        Ok(Watches {
            poller: Poller::new()?,
            watches: HashMap::new(),
            next_key: 0,
        })
    }

    /// Waits until something happens to one of them, or the time is over.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> impl Iterator<Item = u64> + use<> {
        self.poller.wait(timeout).into_iter()
    }

    /// Returns what a number stands for; `None` for one that was removed since it was told.
    pub(super) fn of(&self, key: u64) -> Option<Watch> {
        self.watches.get(&key).copied()
    }

    /// Waits on a descriptor from here on.
    pub(super) fn add(&mut self, watch: Watch, fd: BorrowedFd<'_>) -> Result<u64> {
        let key = self.next_key;
        self.next_key += 1;
        self.poller.add(fd, key)?;
        self.watches.insert(key, watch);
        Ok(key)
    }

    /// Waits on all of these, or on none.
    pub(super) fn add_all(&mut self, watched: &[(Watch, BorrowedFd<'_>)]) -> Result<Vec<u64>> {
        let mut keys = Vec::with_capacity(watched.len());
        for &(watch, fd) in watched {
            match self.add(watch, fd) {
                Ok(key) => keys.push(key),
                Err(error) => {
                    keys.iter()
                        .zip(watched)
                        .for_each(|(&key, &(_, fd))| self.remove(key, fd));
                    return Err(error);
                }
            }
        }
        Ok(keys)
    }

    /// Waits for nothing but its hang-up.
    pub(super) fn pause(&mut self, key: u64, fd: BorrowedFd<'_>) {
        self.poller.pause(fd, key);
    }

    pub(super) fn remove(&mut self, key: u64, fd: BorrowedFd<'_>) {
        self.poller.remove(fd);
        self.watches.remove(&key);
    }

    /// Forgets all that stand for a participant.
    pub(super) fn forget(&mut self, participant: Participant, fds: &[BorrowedFd<'_>]) {
        fds.iter().for_each(|&fd| self.poller.remove(fd));
        self.watches.retain(|_, watch| {
            !matches!(watch, Watch::Socket(of) | Watch::Process(of) | Watch::Descendant(of, _) if *of == participant)
        });
    }
}

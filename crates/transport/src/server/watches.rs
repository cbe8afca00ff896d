//! The descriptors that a server waits on, and what each stands for.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use gpu_api::Result;

use super::seat::Seat;
use super::watch::Watch;
use crate::os::poller::Poller;

/// All of them, by the number that the poller reports. A number is used once, so one that was
/// removed after it was reported stands for nothing.
#[derive(Debug)]
pub struct Watches<Id> {
    poller: Poller,
    watches: HashMap<u64, Watch<Id>>,
    next_key: u64,
}

impl<Id: Copy + PartialEq> Watches<Id> {
    pub(super) fn new() -> Result<Watches<Id>> {
        Ok(Watches {
            poller: Poller::new()?,
            watches: HashMap::new(),
            next_key: 0,
        })
    }

    /// Waits until something happens to one of them, or the time is over.
    pub fn wait(&self, timeout: Option<Duration>) -> impl ExactSizeIterator<Item = u64> + use<Id> {
        self.poller.wait(timeout).into_iter()
    }

    /// Returns what a number stands for.
    pub fn get(&self, key: u64) -> Option<Watch<Id>> {
        self.watches.get(&key).copied()
    }

    /// Waits on a descriptor from here on.
    ///
    /// # Errors
    ///
    /// What the kernel refuses.
    pub fn add(&mut self, watch: Watch<Id>, fd: BorrowedFd<'_>) -> Result<u64> {
        let key = self.next_key;
        self.poller.add(fd, key)?;
        self.next_key += 1;
        self.watches.insert(key, watch);
        Ok(key)
    }

    /// Has a number stand for something else.
    pub(super) fn become_of(&mut self, key: u64, watch: Watch<Id>) {
        self.watches.insert(key, watch);
    }

    /// Waits for nothing but its hang-up, or for packets again.
    pub(super) fn pause(&self, key: u64, fd: BorrowedFd<'_>, paused: bool) {
        if paused {
            self.poller.pause(fd, key);
        } else {
            self.poller.resume(fd, key);
        }
    }

    /// Waits on a descriptor no more.
    pub fn remove(&mut self, key: u64, fd: BorrowedFd<'_>) {
        self.watches.remove(&key);
        self.poller.remove(fd);
    }

    /// Waits on nothing of a participant's any more.
    pub(super) fn forget(&mut self, id: Id, seat: &Seat) {
        let poller = &self.poller;
        self.watches.retain(|_, watch| {
            let (of, fd) = match *watch {
                Watch::Socket(of) | Watch::Silenced(of) => (of, &seat.socket),
                Watch::Process(of) => (of, &seat.pidfd),
                Watch::Descendant(of, n) if of == id => (of, &seat.descendants[n]),
                _ => return true,
            };
            if of == id {
                poller.remove(fd.as_fd());
            }
            of != id
        });
    }
}

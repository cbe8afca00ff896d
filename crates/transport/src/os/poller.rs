//! Waiting for descriptors and for a time, by a thread of the library's own.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use arrayvec::ArrayVec;
use gpu_api::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;

/// Descriptors that one call of [`Poller::wait`] tells of.
const MOST_READY: usize = 64;

/// An epoll instance.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    /// Makes one.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the process has no descriptor left.
    pub fn new() -> Result<Poller> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| Error::without_descriptors("epoll_create", e))?;
        Ok(Poller { epoll })
    }

    /// Watches a descriptor for something to read.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the user's limit of watches is reached.
    pub fn add(&self, fd: BorrowedFd<'_>, key: u64) -> Result<()> {
        epoll::add(
            &self.epoll,
            fd,
            epoll::EventData::new_u64(key),
            epoll::EventFlags::IN,
        )
        .map_err(|e| Error::system("epoll_ctl", "raise fs.epoll.max_user_watches", e))
    }

    /// Does not tell of a descriptor until it is resumed, its end excepted.
    pub fn pause(&self, fd: BorrowedFd<'_>, key: u64) {
        self.modify(fd, key, epoll::EventFlags::empty());
    }

    /// Tells of a paused descriptor again, also of what came meanwhile.
    pub fn resume(&self, fd: BorrowedFd<'_>, key: u64) {
        self.modify(fd, key, epoll::EventFlags::IN);
    }

    /// Tells when a descriptor can be written, and no more when it can be read.
    pub fn await_room(&self, fd: BorrowedFd<'_>, key: u64) {
        self.modify(fd, key, epoll::EventFlags::OUT);
    }

    fn modify(&self, fd: BorrowedFd<'_>, key: u64, flags: epoll::EventFlags) {
        // The only failure is a descriptor whose watch has ended: then there is nothing to change.
        let _ = epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(key), flags);
    }

    /// Ends a watch.
    pub fn remove(&self, fd: BorrowedFd<'_>) {
        // The only failure is a descriptor that epoll does not know: that is what is wanted.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits until something can be read, at most so long, and returns the keys of what can.
    pub fn wait(&self, timeout: Option<Duration>) -> ArrayVec<u64, MOST_READY> {
        let empty = epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        };
        let mut events = [empty; MOST_READY];
        let timeout = timeout.map(timespec);
        // An interruption is a wake-up with nothing to read.
        let count = epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()).unwrap_or(0);
        events[..count]
            .iter()
            .map(|event| event.data.u64())
            .collect()
    }
}

/// Polls a few descriptors once, for at most so long.
///
/// # Errors
///
/// [`Errno::INTR`] for an interruption, and what else the kernel says.
pub fn poll_for(fds: &mut [PollFd<'_>], timeout: Option<Duration>) -> Result<usize, Errno> {
    poll(fds, timeout.map(timespec).as_ref())
}

/// Says whether a descriptor is in this state at this moment. In doubt it says no.
pub(super) fn is_now(fd: impl AsFd, state: PollFlags) -> bool {
    loop {
        let mut fds = [PollFd::new(&fd, state)];
        match poll_for(&mut fds, Some(Duration::ZERO)) {
            Ok(_) => return fds[0].revents().contains(state),
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsFd;

    #[test]
    fn what_can_be_read_is_told_by_its_key() {
        let poller = Poller::new().expect("a poller");
        let event = eventfd(1, EventfdFlags::CLOEXEC).expect("an eventfd");
        poller.add(event.as_fd(), 7).expect("watched");
        assert_eq!(poller.wait(None).as_slice(), [7]);
        poller.pause(event.as_fd(), 7);
        assert!(poller.wait(Some(Duration::ZERO)).is_empty());
        poller.await_room(event.as_fd(), 7);
        assert_eq!(poller.wait(None).as_slice(), [7], "it has room");
        poller.pause(event.as_fd(), 7);
        assert!(poller.wait(Some(Duration::ZERO)).is_empty());
        poller.resume(event.as_fd(), 7);
        assert_eq!(poller.wait(None).as_slice(), [7]);
        poller.remove(event.as_fd());
        assert!(poller.wait(Some(Duration::ZERO)).is_empty());
    }
}

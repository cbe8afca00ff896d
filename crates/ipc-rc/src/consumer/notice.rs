//! What a participant tells its application, behind a descriptor that can be polled.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use gpu_api::{Error, RegionId, Result};
use rustix::event::{EventfdFlags, eventfd};

use channel::wire::descriptor::LeaseId;

/// Notices kept for an application that does not read them; what comes on top is dropped, and a claim or a look at the
/// participant still tells.
const MOST_KEPT: usize = 4096;

/// Something an application may want to know at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Notice {
    /// The producer is dead or has closed its session: nothing new comes. What is held stays readable.
    ProducerGone,
    /// The producer is closing its session: nothing new comes, but what was granted can still be claimed.
    Closing,
    /// The producer is short of memory and would like this region unmapped. Nothing has to be done: it is unmapped as
    /// soon as no block of it is held. An application that can drop such blocks helps.
    PleaseUnmap {
        /// The region, as [`ReceivedBlock::region`](crate::ReceivedBlock::region) gives it.
        region: RegionId,
    },
    /// A grant to this participant was taken back before it was claimed; its descriptor can be thrown away.
    Revoked {
        /// The grant, as [`Descriptor::lease`](crate::Descriptor::lease) gives it.
        lease: LeaseId,
    },
    /// What a [`try_claim`](crate::Participant::try_claim) answered with `WouldBlock` waited for may have come.
    TryAgain,
}

/// Notices that were not read yet.
#[derive(Debug)]
pub(crate) struct Notices {
    fd: OwnedFd,
    kept: Mutex<VecDeque<Notice>>,
}

impl Notices {
    /// Makes an empty queue.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the process has no descriptor left.
    pub fn new() -> Result<Notices> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::system("eventfd", "raise RLIMIT_NOFILE or close descriptors", e))?;
        Ok(Notices { fd, kept: Mutex::default() })
    }

    /// Adds an event, unless the same one waits already.
    pub fn push(&self, event: Notice) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let told = !matches!(event, Notice::Revoked { .. }) && kept.contains(&event);
        if told || (kept.len() >= MOST_KEPT && event != Notice::ProducerGone) {
            return;
        }
        kept.push_back(event);
        // The only failure is a counter that is full: then it is readable, which is all that is wanted.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Takes the oldest event. The descriptor is readable while there is one.
    pub fn take(&self) -> Option<Notice> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let event = kept.pop_front();
        if kept.is_empty() {
            // Nothing to read means that it was not readable.
            let _ = rustix::io::read(&self.fd, &mut [0; 8]);
        }
        event
    }
}

impl AsFd for Notices {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn is_readable(events: &Notices) -> bool {
        let mut fds = [PollFd::new(events, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).expect("poll") == 1
    }

    #[test]
    fn the_descriptor_is_readable_while_an_event_waits() {
        let events = Notices::new().expect("a queue");
        assert!(!is_readable(&events) && events.take().is_none());
        events.push(Notice::TryAgain);
        events.push(Notice::ProducerGone);
        events.push(Notice::TryAgain);
        assert_eq!(events.take(), Some(Notice::TryAgain));
        assert!(is_readable(&events));
        assert_eq!(events.take(), Some(Notice::ProducerGone));
        assert!(!is_readable(&events) && events.take().is_none());
    }

    #[test]
    fn who_does_not_read_still_learns_that_the_producer_is_gone() {
        let events = Notices::new().expect("a queue");
        for slot in 0..2 * MOST_KEPT as u32 {
            events.push(Notice::Revoked { lease: LeaseId::new(0, slot, 1) });
        }
        events.push(Notice::ProducerGone);
        let all: Vec<Notice> = std::iter::from_fn(|| events.take()).collect();
        assert_eq!(all.len(), MOST_KEPT + 1);
        assert_eq!(all.last(), Some(&Notice::ProducerGone));
    }
}

//! Notices to an application, behind a descriptor that can be polled.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use gpu_api::lock::Acquire;
use gpu_api::{Error, Result};
use rustix::event::{EventfdFlags, eventfd};

/// Notices kept for an application that does not read them. What comes on top is dropped unless it
/// is vital.
const MOST_KEPT: usize = 4096;

/// Whether a notice is kept for an application that reads none.
pub(crate) trait Vital: Clone + PartialEq {
    /// Says so; few different notices are.
    fn is_vital(&self) -> bool;
}

/// Notices that were not read yet, each once.
#[derive(Debug)]
pub(crate) struct Notices<N> {
    fd: OwnedFd,
    kept: Mutex<VecDeque<N>>,
}

impl<N: Vital> Notices<N> {
    /// Makes an empty queue.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the process has no descriptor left.
    pub fn new() -> Result<Notices<N>> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::without_descriptors("eventfd", e))?;
        Ok(Notices {
            fd,
            kept: Mutex::new(VecDeque::new()),
        })
    }

    /// Adds a notice, unless the same one waits already.
    pub fn push(&self, notice: N) {
        let mut kept = self.kept.acquire();
        if kept.contains(&notice) || (kept.len() >= MOST_KEPT && !notice.is_vital()) {
            return;
        }
        kept.push_back(notice);
        // The only failure is a counter that is full: then it is readable, which is all that is
        // wanted.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Takes the oldest notice. The descriptor is readable while there is one.
    pub fn take(&self) -> Option<N> {
        let mut kept = self.kept.acquire();
        let notice = kept.pop_front();
        self.settle(&kept);
        notice
    }

    /// Takes a notice back: its occasion is over.
    pub fn withdraw(&self, notice: N) {
        let mut kept = self.kept.acquire();
        let before = kept.len();
        kept.retain(|other| *other != notice);
        if kept.len() < before {
            self.settle(&kept);
        }
    }

    /// Has the descriptor not be readable when nothing is left.
    fn settle(&self, kept: &VecDeque<N>) {
        if kept.is_empty() {
            // Nothing to read means that it was not readable.
            let _ = rustix::io::read(&self.fd, &mut [0; 8]);
        }
    }
}

impl<N> AsFd for Notices<N> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consumer::notice::Notice;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use transport::wire::descriptor::LeaseId;

    fn is_readable(notices: &Notices<Notice>) -> bool {
        let mut fds = [PollFd::new(notices, PollFlags::IN)];
        poll(
            &mut fds,
            Some(&Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            }),
        )
        .expect("poll")
            == 1
    }

    #[test]
    fn the_descriptor_is_readable_while_a_notice_waits() {
        let notices = Notices::new().expect("a queue");
        assert!(!is_readable(&notices) && notices.take().is_none());
        notices.push(Notice::TryAgain);
        notices.push(Notice::ProducerGone);
        notices.push(Notice::TryAgain);
        assert_eq!(notices.take(), Some(Notice::TryAgain));
        assert!(is_readable(&notices));
        assert_eq!(notices.take(), Some(Notice::ProducerGone));
        assert!(!is_readable(&notices) && notices.take().is_none());
    }

    #[test]
    fn what_is_withdrawn_is_not_told() {
        let notices = Notices::new().expect("a queue");
        notices.push(Notice::TryAgain);
        notices.push(Notice::Closing);
        notices.withdraw(Notice::TryAgain);
        assert!(is_readable(&notices));
        notices.withdraw(Notice::Closing);
        assert!(!is_readable(&notices) && notices.take().is_none());
        notices.withdraw(Notice::Closing);
        notices.push(Notice::Closing);
        assert!(is_readable(&notices));
    }

    #[test]
    fn an_application_that_does_not_read_still_learns_that_the_producer_is_gone() {
        let notices = Notices::new().expect("a queue");
        for slot in 0..2 * MOST_KEPT as u32 {
            notices.push(Notice::Revoked {
                lease: LeaseId::new(0, slot, 1),
            });
        }
        notices.push(Notice::ProducerGone);
        let all: Vec<Notice> = std::iter::from_fn(|| notices.take()).collect();
        assert_eq!(all.len(), MOST_KEPT + 1);
        assert_eq!(all.last(), Some(&Notice::ProducerGone));
    }
}

//! Wakes a session's or participant's own thread, but only when it sleeps without a time to get up.
//!
//! | step | who | operation |
//! |---|---|---|
//! | 1 | thread | `asleep = true`, SeqCst fence, look once more for work, then wait |
//! | 2 | caller | make work, SeqCst fence, `asleep.swap(false)`: if it was true, write the eventfd |
//!
//! The two fences order 'work made' and 'asleep set' in one total order: either the thread's second look sees the
//! work or the caller sees the thread asleep. A steady stream of work costs no system call.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use gpu_api::{Error, Result};
use rustix::event::{EventfdFlags, eventfd};

/// An eventfd and whether anybody waits for it.
#[derive(Debug)]
pub struct Waker {
    fd: OwnedFd,
    asleep: AtomicBool,
}

impl Waker {
    /// Makes one.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the process has no descriptor left.
    pub fn new() -> Result<Waker> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::system("eventfd", "raise RLIMIT_NOFILE or close descriptors", e))?;
        Ok(Waker { fd, asleep: AtomicBool::new(false) })
    }

    /// Wakes the thread if it sleeps (caller, after it made work).
    #[inline]
    pub fn nudge(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            self.wake();
        }
    }

    /// Wakes the thread, or keeps it from its next sleep.
    pub fn wake(&self) {
        // The only failure is a counter that is full: then it is readable, which is all that is wanted.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Says that the thread is about to sleep (thread). It looks for work once more before it does.
    pub fn doze(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Says that the thread is up, and takes the wake-up (thread).
    pub fn rise(&self) {
        self.asleep.store(false, Ordering::Relaxed);
        let mut count = [0; 8];
        // Nothing to read means that something else woke the thread.
        let _ = rustix::io::read(&self.fd, &mut count);
    }

    /// Returns the descriptor to wait for.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

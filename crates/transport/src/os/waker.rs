//! Wakes a session's or participant's own thread, but only when it sleeps, and for what can wait
//! only when it sleeps long.
//!
//! | step | who | operation | ordering |
//! |---|---|---|---|
//! | 1 | thread | `state = ASLEEP`, fence, look once more for work and for a reminder | [`DOZE`] SeqCst |
//! | 2 | thread | if it will get up soon by itself: `state` ASLEEP -> SOON; then wait | Relaxed |
//! | 3 | caller, urgent work | make work, fence; if `state` is not UP: swap UP, and write the eventfd | [`NUDGE`] SeqCst |
//! | 3' | caller, work that can wait | make work, `reminded = 1`, fence; if `state` is ASLEEP: to UP, and write the eventfd | [`REMIND`] SeqCst |
//! | 4 | thread | `state = UP`, read the eventfd | Relaxed |
//!
//! # Pairings
//!
//! - **`DOZE` with `NUDGE`**: the fences order 'work made' and 'asleep' in one total order: either
//!   the thread's second look sees the work or the caller sees the thread asleep.
//! - **`DOZE` with `REMIND`**: the same, but a caller that sees SOON leaves the work to the look
//!   that comes by itself, and what it reminded of keeps the next sleep short: so a steady stream
//!   of such work costs no system call.
//!
//! Between 1 and 2 nothing is lost: a state that a caller set to UP is not changed to SOON, and the
//! eventfd is readable, or will be as soon as that caller goes on.
//!
//! **What it does not cover**: a reminder that comes while another is being taken may be lost. The
//! work that it was for is seen by the look all the same.
//!
//! Checked by `tests/loom_waker.rs`; weakening `DOZE`, `NUDGE` or `REMIND` to Relaxed, which leaves
//! the fence out, fails it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_api::{Error, Result};
use rustix::event::{EventfdFlags, eventfd};

use crate::shared::word::{NamedOrdering, Tally};

/// Pairs with [`NUDGE`] and [`REMIND`].
pub const DOZE: NamedOrdering = NamedOrdering::new("doze", Ordering::SeqCst);
/// Pairs with [`DOZE`].
pub const NUDGE: NamedOrdering = NamedOrdering::new("nudge", Ordering::SeqCst);
/// Pairs with [`DOZE`].
pub const REMIND: NamedOrdering = NamedOrdering::new("remind", Ordering::SeqCst);

/// The thread works, or was woken.
const UP: u64 = 0;
/// It waits, and gets up within a few milliseconds whatever happens.
const SOON: u64 = 1;
/// It waits.
const ASLEEP: u64 = 2;

/// Whether a thread sleeps. Only these methods touch the words.
#[derive(Debug, Default)]
pub struct Sleep<W> {
    state: W,
    reminded: W,
}

impl<W: Tally> Sleep<W> {
    /// Says whether the thread is to be woken, by this caller alone (caller, after it made work).
    #[inline]
    #[must_use]
    pub fn nudge(&self) -> bool {
        W::fence(NUDGE.get());
        self.state.load(Ordering::Relaxed) != UP && self.state.swap(UP, Ordering::Relaxed) != UP
    }

    /// Says the same for work that can wait until a thread that will be up soon is.
    #[inline]
    #[must_use]
    pub fn remind(&self) -> bool {
        if self.reminded.load(Ordering::Relaxed) == 0 {
            self.reminded.store(1, Ordering::Relaxed);
        }
        W::fence(REMIND.get());
        self.state.load(Ordering::Relaxed) == ASLEEP
            && self
                .state
                .compare_exchange(ASLEEP, UP, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    /// Says whether the thread was reminded since it last asked (thread).
    pub fn take_reminder(&self) -> bool {
        self.reminded.load(Ordering::Relaxed) != 0 && self.reminded.swap(0, Ordering::Relaxed) != 0
    }

    /// Says that the thread is about to sleep (thread). It looks for work once more before it does.
    pub fn doze(&self) {
        self.state.store(ASLEEP, Ordering::Relaxed);
        W::fence(DOZE.get());
    }

    /// Says that the sleep will be short (thread, after it dozed and looked).
    pub fn will_rise_soon(&self) {
        let _ = self
            .state
            .compare_exchange(ASLEEP, SOON, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Says that the thread is up (thread).
    pub fn rise(&self) {
        self.state.store(UP, Ordering::Relaxed);
    }
}

/// An eventfd and whether anybody waits for it.
#[derive(Debug)]
pub struct Waker {
    fd: OwnedFd,
    sleep: Sleep<AtomicU64>,
}

impl Waker {
    /// Makes one.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the process has no descriptor left.
    pub fn new() -> Result<Waker> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::without_descriptors("eventfd", e))?;
        Ok(Waker {
            fd,
            sleep: Sleep::default(),
        })
    }

    /// Wakes the thread if it sleeps (caller, after it made work).
    #[inline]
    pub fn nudge(&self) {
        if self.sleep.nudge() {
            self.wake();
        }
    }

    /// Wakes the thread unless it is up or soon will be (caller, after it made work that can wait
    /// so long).
    #[inline]
    pub fn remind(&self) {
        if self.sleep.remind() {
            self.wake();
        }
    }

    /// Says whether the thread was reminded since it last asked (thread).
    pub fn take_reminder(&self) -> bool {
        self.sleep.take_reminder()
    }

    /// Wakes the thread, or keeps it from its next sleep.
    pub fn wake(&self) {
        // The only failure is a counter that is full: then it is readable, which is all that is
        // wanted.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Says that the thread is about to sleep (thread). It looks for work once more before it does.
    pub fn doze(&self) {
        self.sleep.doze();
    }

    /// Says that the sleep will be short (thread, after it dozed and looked).
    pub fn will_rise_soon(&self) {
        self.sleep.will_rise_soon();
    }

    /// Says that the thread is up, and takes the wake-up (thread).
    pub fn rise(&self) {
        self.sleep.rise();
        let mut count = [0; 8];
        // Nothing to read means that something else woke the thread.
        let _ = rustix::io::read(&self.fd, &mut count);
    }

    /// Returns the descriptor to wait for.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn was_woken(waker: &Waker) -> bool {
        let mut count = [0; 8];
        rustix::io::read(&waker.fd, &mut count).is_ok()
    }

    #[test]
    fn who_sleeps_long_is_woken_by_both_and_once() {
        let waker = Waker::new().expect("a descriptor");
        for call in [Waker::nudge, Waker::remind] {
            call(&waker);
            assert!(!was_woken(&waker), "it is up");
            waker.doze();
            call(&waker);
            assert!(was_woken(&waker));
            call(&waker);
            assert!(!was_woken(&waker), "it was woken before");
            waker.rise();
        }
    }

    #[test]
    fn who_will_rise_soon_is_left_alone_by_what_can_wait() {
        let waker = Waker::new().expect("a descriptor");
        waker.doze();
        waker.will_rise_soon();
        waker.remind();
        assert!(!was_woken(&waker));
        waker.nudge();
        assert!(was_woken(&waker), "the reminder did not hide it");
        waker.rise();
        assert!(waker.take_reminder() && !waker.take_reminder());
        // Woken between the two steps of going to sleep.
        waker.doze();
        waker.remind();
        waker.will_rise_soon();
        assert!(was_woken(&waker));
    }
}

//! Children that are forked, without another program.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::WATCHDOG;
use crate::process::goes_within;

/// Forks this process. The child runs a function and ends with what that returns, or with 101 if it
/// panics; it runs no destructor of its parent's and no handler of its exit.
///
/// # Errors
///
/// The system's, which may have no room for a process.
///
/// # Safety
///
/// In a process with threads the function does only what is safe in a signal handler, or what the
/// C library and the code under test promise to a forked child: another thread may have held any
/// lock.
pub unsafe fn fork(child: impl FnOnce() -> i32) -> io::Result<Forked> {
    // SAFETY: `fork` asks that the child of a process with threads does only what is safe there:
    // the caller promises that of the function, and `_exit` follows it.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let code = catch_unwind(AssertUnwindSafe(child)).unwrap_or(101);
            // SAFETY: `_exit` has no conditions.
            unsafe { libc::_exit(code) }
        }
        pid => Ok(Forked {
            pid: Pid::from_raw(pid).expect("a process has a number"),
            is_waited_for: true,
        }),
    }
}

/// Forks this process for a check that must hold in the child too.
///
/// # Panics
///
/// When the check fails, or the child dies of it or hangs in it.
///
/// # Safety
///
/// As of [`fork`].
#[track_caller]
pub unsafe fn holds_in_a_fork(check: impl FnOnce() -> bool) {
    // SAFETY: the caller's promise.
    let child = unsafe { fork(|| i32::from(!check())) }.expect("room for a process");
    assert_eq!(
        child.code(),
        Some(0),
        "the check fails in a child (1), or kills it (None)"
    );
}

/// A forked child. Killed when dropped.
#[derive(Debug)]
pub struct Forked {
    pid: Pid,
    is_waited_for: bool,
}

impl Forked {
    /// Returns its number.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Says whether it ends in time.
    #[track_caller]
    pub fn ends_within(&self, time: Duration) -> bool {
        goes_within(self.pid, time)
    }

    /// Waits until it has ended, and returns the code that it ended with; `None` when a signal
    /// killed it.
    ///
    /// # Panics
    ///
    /// When it does not end within the [`WATCHDOG`].
    #[track_caller]
    pub fn code(mut self) -> Option<i32> {
        assert!(
            self.ends_within(WATCHDOG),
            "the child {} does not end",
            self.pid()
        );
        self.is_waited_for = false;
        let (_, status) = waitpid(Some(self.pid), WaitOptions::empty())
            .expect("it is a child of this process")
            .expect("it has ended");
        status.exit_status()
    }

    /// Leaves it to itself: it lives on.
    pub fn leave(mut self) {
        self.is_waited_for = false;
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        if self.is_waited_for {
            // It was not waited for, so the number is still its own.
            let _ = kill_process(self.pid, Signal::KILL);
            let _ = waitpid(Some(self.pid), WaitOptions::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_ends_with_what_its_function_returns() {
        for code in [0, 7] {
            // SAFETY: the function does nothing.
            let child = unsafe { fork(|| code) }.expect("room");
            assert_eq!(child.code(), Some(code));
        }
        // SAFETY: `abort` is safe in a signal handler.
        let child = unsafe { fork(|| std::process::abort()) }.expect("room");
        assert_eq!(child.code(), None);
    }

    #[test]
    #[should_panic(expected = "the check fails in a child")]
    fn a_check_that_fails_in_a_child_fails_the_test() {
        // SAFETY: the function does nothing.
        unsafe { holds_in_a_fork(|| false) };
    }

    #[test]
    fn a_child_is_killed_with_its_value() {
        let stand_still = || {
            loop {
                // SAFETY: `pause` has no conditions.
                unsafe { libc::pause() };
            }
        };
        // SAFETY: `pause` is safe in a signal handler.
        let child = unsafe { fork(stand_still) }.expect("room");
        let pid = child.pid;
        drop(child);
        assert!(rustix::process::test_kill_process(pid).is_err());
    }
}

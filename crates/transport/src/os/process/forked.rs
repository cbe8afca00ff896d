//! Forked children for the tests of this module.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A forked child that stands still until the test ends.
pub(super) struct Forked(i32);

impl Forked {
    /// Forks a child that runs `prepare`, which may do only what is safe in a signal handler.
    pub(super) fn start(prepare: impl FnOnce()) -> Forked {
        let (mut ready, tell) = io::pipe().expect("a pipe");
        let tell = tell.as_raw_fd();
        // SAFETY: `fork` in a process with threads lets the child do only what is safe in a signal
        // handler: it makes system calls and nothing else.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            prepare();
            stand_still(tell);
        }
        assert!(pid > 0, "fork: {}", io::Error::last_os_error());
        let child = Forked(pid);
        await_readable(ready.as_fd());
        ready
            .read_exact(&mut [0])
            .expect("the child's word that it is ready");
        child
    }

    /// Takes over a child that the test forked itself.
    pub(super) fn of(pid: i32) -> Forked {
        Forked(pid)
    }

    pub(super) fn pid(&self) -> u32 {
        self.0.unsigned_abs()
    }

    pub(super) fn pidfd(&self) -> OwnedFd {
        pidfd_open(Pid::from_raw(self.0).expect("a pid"), PidfdFlags::empty()).expect("a pidfd")
    }

    pub(super) fn kill(&self) {
        // SAFETY: `kill` has no conditions; the child was not waited for, so the pid is still its
        // own.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        self.kill();
        // SAFETY: `waitpid` with no place for the status writes nothing.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

/// Ends a child's preparation: tells the parent and waits to be killed.
pub(super) fn stand_still(tell: i32) -> ! {
    // SAFETY: `prctl(PR_SET_PDEATHSIG)` takes a signal number.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // SAFETY: `write` reads one byte of a constant.
    unsafe { libc::write(tell, b"!".as_ptr().cast(), 1) };
    loop {
        // SAFETY: `pause` has no conditions.
        unsafe { libc::pause() };
    }
}

/// Waits until a descriptor can be read, under a watchdog.
pub(super) fn await_readable(fd: BorrowedFd<'_>) {
    let watchdog = Timespec {
        tv_sec: 60,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    assert_eq!(
        poll(&mut fds, Some(&watchdog)).expect("poll"),
        1,
        "nothing within 60 s"
    );
}

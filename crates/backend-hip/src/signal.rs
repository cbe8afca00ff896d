//! Keeping SIGPIPE from calls of the runtime that write to sockets.
//!
//! The runtime hands memory out on a socket by a thread of its own, which inherits the signal mask of
//! the thread that exports first, and reads it by `write` on the thread that opens. Neither call
//! asks the kernel to leave SIGPIPE out (rocr, `IPCSendHandle`, `IPCSocketWrite`), so a consumer that
//! dies while it opens would end a C program that exported, and a producer that dies one that opens.

use std::mem::MaybeUninit;
use std::ptr;

/// Runs `call` with SIGPIPE blocked on this thread, and takes out the one that it raised.
pub(crate) fn without_sigpipe<T>(call: impl FnOnce() -> T) -> T {
    let mut pipe = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` asks for a place to write a set to: `pipe` lives on this frame.
    unsafe { libc::sigemptyset(pipe.as_mut_ptr()) };
    // SAFETY: `sigaddset` asks for an initialized set: `sigemptyset` did that.
    unsafe { libc::sigaddset(pipe.as_mut_ptr(), libc::SIGPIPE) };
    let was_pending = is_pending();
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `pthread_sigmask` asks for a set, and a place to write one to: both live on this
    // frame, the first initialized.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, pipe.as_ptr(), before.as_mut_ptr()) };
    let made = call();
    if !was_pending && is_pending() {
        let now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `sigtimedwait` asks for a set and a time: both live on this frame; null asks for
        // nothing back.
        unsafe { libc::sigtimedwait(pipe.as_ptr(), ptr::null_mut(), &raw const now) };
    }
    // SAFETY: `pthread_sigmask` asks for an initialized set: the first call wrote it.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    made
}

/// Says whether SIGPIPE waits for this thread to take it.
fn is_pending() -> bool {
    let mut pending = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `sigpending` asks for a place to write a set to: `pending` lives on this frame, and
    // zeros are a set.
    unsafe { libc::sigpending(pending.as_mut_ptr()) };
    // SAFETY: `sigismember` asks for an initialized set: as above.
    unsafe { libc::sigismember(pending.as_ptr(), libc::SIGPIPE) == 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With the disposition of a C program, which a broken pipe ends.
    #[test]
    fn a_broken_pipe_in_a_call_does_not_end_the_process() {
        // SAFETY: `signal` sets a disposition of this program of tests, which writes to no other
        // broken pipe.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        let inherits = without_sigpipe(|| {
            // SAFETY: `raise` has no conditions: what a `write` to a broken pipe does.
            unsafe { libc::raise(libc::SIGPIPE) };
            let thread = std::thread::spawn(|| {
                let status = std::fs::read_to_string("/proc/thread-self/status");
                let status = status.expect("it is there");
                let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
                u64::from_str_radix(mask.expect("a mask").trim(), 16).expect("hexadecimal")
            });
            thread.join().expect("it ends")
        });
        assert!(!is_pending());
        assert_ne!(
            inherits & 1 << (libc::SIGPIPE - 1),
            0,
            "a thread that the call starts has SIGPIPE blocked"
        );
    }
}

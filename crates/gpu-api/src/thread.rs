//! Threads that the library starts, with the program's signals blocked on them.
//!
//! The kernel delivers a signal that is sent to a process on any thread that does not block it. A
//! program that blocks SIGTERM and reads a `signalfd` is killed by the first thread that the
//! library started before; a handler of the program runs on a stack that it did not size. So every
//! thread of the library's crates is started here: no other place may, as `tests/threads.rs` says.
//!
//! Blocked is all but [`FAULTS`]. A blocked fault kills the process without the handler that prints
//! where it was (a sanitizer's, Python's `faulthandler`, Rust's for a full stack), and the kernel
//! sends one only to the thread whose instruction failed.
//!
//! A process that such a thread starts with [`std::process::Command`] begins with no signal
//! blocked.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use crate::{Error, Result};

/// The signals that an instruction of the thread itself raises: they stay as the program has them.
pub const FAULTS: [libc::c_int; 6] = [
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGSEGV,
    libc::SIGSYS,
    libc::SIGTRAP,
];

/// Runs `run` on a thread of this name, of which the kernel keeps 15 bytes.
///
/// # Errors
///
/// [`Error::System`] when the process may start no more threads.
pub fn start<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let builder = Builder::new().name(name.into());
    blocked(|| builder.spawn(run))
}

/// Runs `run` on a thread of this name with a stack of so many bytes.
///
/// # Errors
///
/// As [`start`].
pub fn start_with_stack<T: Send + 'static>(
    name: &str,
    stack_bytes: usize,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let builder = Builder::new().name(name.into()).stack_size(stack_bytes);
    blocked(|| builder.spawn(run))
}

/// Runs `run` on a thread of this name that ends inside a scope.
///
/// # Errors
///
/// As [`start`].
pub fn start_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    run: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    let builder = Builder::new().name(name.into());
    blocked(|| builder.spawn_scoped(scope, run))
}

/// Starts a thread, which inherits the signal mask of the one that starts it.
fn blocked<H>(start: impl FnOnce() -> io::Result<H>) -> Result<H> {
    let _blocked = Blocked::new();
    let remedy = "raise RLIMIT_NPROC or pids.max of the control group";
    start().map_err(|error| Error::system("starting a thread", remedy, error))
}

/// Keeps signals from the calling thread until it is dropped.
struct Blocked {
    before: libc::sigset_t,
}

impl Blocked {
    fn new() -> Blocked {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigfillset` asks for a place to write a set to: `set` lives on this frame.
        unsafe { libc::sigfillset(set.as_mut_ptr()) };
        for fault in FAULTS {
            // SAFETY: `sigdelset` asks for an initialized set: `sigfillset` did that.
            unsafe { libc::sigdelset(set.as_mut_ptr(), fault) };
        }
        let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: `pthread_sigmask` asks for a set, and a place to write one to: both live on this
        // frame, the first initialized. It fails only for a wrong first argument.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, set.as_ptr(), before.as_mut_ptr()) };
        // SAFETY: `assume_init` asks for a value: zeros are a set, and the call wrote one.
        let before = unsafe { before.assume_init() };
        Blocked { before }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: `pthread_sigmask` asks for an initialized set; null asks for none back.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, ptr::null_mut())
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocked_signals() -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("a status");
        let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
        line.expect("a mask").trim().to_owned()
    }

    /// All 64 but 9 and 19, which nothing blocks, 32 and 33, which the C library keeps for itself,
    /// and [`FAULTS`].
    fn all() -> String {
        let free = FAULTS.into_iter().chain([9, 19, 32, 33]);
        format!(
            "{:016x}",
            free.fold(u64::MAX, |mask, signal| mask & !(1 << (signal - 1)))
        )
    }

    #[test]
    fn signals_are_blocked_on_each_kind_of_thread_and_the_callers_mask_is_as_it_was() {
        // On a thread of the test's own, one signal of which is blocked.
        let caller = std::thread::spawn(|| {
            let mut set = MaybeUninit::<libc::sigset_t>::uninit();
            // SAFETY: `sigemptyset` asks for a place to write a set to.
            unsafe { libc::sigemptyset(set.as_mut_ptr()) };
            // SAFETY: `sigaddset` asks for an initialized set.
            unsafe { libc::sigaddset(set.as_mut_ptr(), libc::SIGUSR2) };
            // SAFETY: `pthread_sigmask` asks for an initialized set; null asks for none back.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, set.as_ptr(), ptr::null_mut()) };
            let before = blocked_signals();
            let one = start("one", blocked_signals).expect("a thread");
            let small = start_with_stack("small", 64 << 10, blocked_signals).expect("a thread");
            let scoped = std::thread::scope(|scope| {
                let scoped = start_scoped(scope, "scoped", blocked_signals).expect("a thread");
                scoped.join().expect("no panic")
            });
            let seen = [one.join(), small.join()].map(|mask| mask.expect("no panic"));
            assert_eq!([&seen[0], &seen[1], &scoped], [&all(), &all(), &all()]);
            assert_eq!(
                (before, blocked_signals()),
                (format!("{:016x}", 1 << 11), format!("{:016x}", 1 << 11))
            );
        });
        caller.join().expect("as expected");
    }

    #[test]
    fn a_thread_that_cannot_be_started_leaves_the_mask_as_it_was_and_says_what_to_raise() {
        let before = blocked_signals();
        // More than the addresses that a process has.
        let failed = start_with_stack("gpu-ipc-test", usize::MAX >> 8, || ());
        let text = failed.expect_err("no such stack").to_string();
        assert!(text.contains("RLIMIT_NPROC"), "{text}");
        assert_eq!(blocked_signals(), before);
    }
}

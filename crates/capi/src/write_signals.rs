//! Writing to a descriptor without the signals that a write can raise.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

/// What a failed write sends to its thread: the reader has gone, the file would be too large.
const RAISED: [libc::c_int; 2] = [libc::SIGPIPE, libc::SIGXFSZ];

/// Keeps the signals of writes from this thread until it is dropped. What was raised meanwhile is
/// taken back, unless the signal was pending before: that one is the program's. The mask is then
/// what it was.
pub(crate) struct WriteSignals {
    mask: libc::sigset_t,
    /// Of [`RAISED`], those that were not pending before.
    own: libc::sigset_t,
}

impl WriteSignals {
    pub fn keep() -> WriteSignals {
        let (mut raised, mut own) = (empty(), empty());
        let pending = pending();
        for signal in RAISED {
            // SAFETY: `sigaddset` asks for an initialized set and a signal: `empty` made one.
            unsafe { libc::sigaddset(&raw mut raised, signal) };
            // SAFETY: `sigismember` asks for an initialized set and a signal.
            if unsafe { libc::sigismember(&raw const pending, signal) } == 0 {
                // SAFETY: as for the first.
                unsafe { libc::sigaddset(&raw mut own, signal) };
            }
        }
        let mut mask = empty();
        // SAFETY: `pthread_sigmask` asks for an initialized set and a place to write one to.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const raised, &raw mut mask) };
        WriteSignals { mask, own }
    }
}

impl Drop for WriteSignals {
    fn drop(&mut self) {
        let now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        loop {
            // SAFETY: `sigtimedwait` asks for an initialized set and a time; null asks for no
            // details.
            let taken =
                unsafe { libc::sigtimedwait(&raw const self.own, ptr::null_mut(), &raw const now) };
            // It takes one at a time, and a handler may interrupt it.
            let error = io::Error::last_os_error();
            if taken < 0 && error.kind() != io::ErrorKind::Interrupted {
                break;
            }
        }
        // SAFETY: `pthread_sigmask` asks for an initialized set; null asks for none back.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.mask, ptr::null_mut()) };
    }
}

fn empty() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` asks for a place to write a set to.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: `assume_init` asks for a value: the call wrote one.
    unsafe { set.assume_init() }
}

fn pending() -> libc::sigset_t {
    let mut set = empty();
    // SAFETY: `sigpending` asks for a place to write a set to.
    unsafe { libc::sigpending(&raw mut set) };
    set
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn is_pending() -> bool {
        let set = pending();
        // SAFETY: `sigismember` asks for an initialized set and a signal.
        unsafe { libc::sigismember(&raw const set, libc::SIGPIPE) == 1 }
    }

    fn mask() -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("a status");
        let line = status.lines().find(|line| line.starts_with("SigBlk:"));
        line.expect("a mask").to_owned()
    }

    fn write_to_no_reader() {
        let (reader, mut writer) = io::pipe().expect("a pipe");
        drop(reader);
        let _kept = WriteSignals::keep();
        let error = writer.write_all(b"line").expect_err("no reader");
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        assert!(is_pending(), "the kernel raises it");
    }

    #[test]
    fn a_write_without_a_reader_raises_nothing_and_leaves_what_was_pending() {
        // On a thread of its own, whose mask and pending signals are its own.
        let done = std::thread::spawn(|| {
            let before = mask();
            write_to_no_reader();
            assert!(!is_pending(), "it was taken back");
            assert_eq!(mask(), before);

            let mut blocked = empty();
            // SAFETY: `sigaddset` asks for an initialized set and a signal.
            unsafe { libc::sigaddset(&raw mut blocked, libc::SIGPIPE) };
            // SAFETY: `pthread_sigmask` asks for an initialized set; null asks for none back.
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const blocked, ptr::null_mut()) };
            let before = mask();
            write_to_no_reader();
            assert!(
                !is_pending(),
                "it was taken back where the program blocks it too"
            );
            // SAFETY: `raise` asks for a signal; it is blocked.
            unsafe { libc::raise(libc::SIGPIPE) };
            write_to_no_reader();
            assert!(is_pending(), "the program's own stays");
            assert_eq!(mask(), before);
        });
        done.join().expect("as expected");
    }
}

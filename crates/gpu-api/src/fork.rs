//! Telling a forked child from the process that made an object.

use std::fmt;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::{Error, Result};

/// Less than any page; the kernel rounds it up.
const BYTES: usize = size_of::<AtomicU32>();

/// A page that the kernel hands to a forked child as zeros: 1 in the process that made it, 0 in its
/// children.
///
/// Asked at every drop and every call, so it costs one load; `getpid` would be a system call each
/// time, and a pid may be used again.
///
/// A child of `vfork` shares the page and reads 1. It may only exec or exit, so nothing of ours
/// runs in it.
///
/// # Examples
///
/// ```
/// let guard = gpu_api::ForkGuard::new()?;
/// assert!(!guard.is_child());
/// guard.check("this session")?;
/// # Ok::<(), gpu_api::Error>(())
/// ```
pub struct ForkGuard {
    word: NonNull<AtomicU32>,
}

// SAFETY: the word is atomic, the mapping is this value's own and belongs to no thread.
unsafe impl Send for ForkGuard {}
// SAFETY: as above.
unsafe impl Sync for ForkGuard {}

impl ForkGuard {
    /// Makes a guard that belongs to this process.
    ///
    /// # Errors
    ///
    /// [`Error::System`] without memory for a page, [`Error::Unsupported`] where the kernel only
    /// pretends.
    pub fn new() -> Result<ForkGuard> {
        refuses_bogus_advice()?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: `mmap_anonymous` without `FIXED` replaces no mapping.
        let page =
            unsafe { mmap_anonymous(ptr::null_mut(), BYTES, protection, flags) }.map_err(|e| {
                Error::system("mmap", "free memory or raise RLIMIT_AS, then open again", e)
            })?;
        let word =
            NonNull::new(page.cast::<AtomicU32>()).expect("a mapping without `FIXED` is not at 0");
        let guard = ForkGuard { word };
        // SAFETY: `madvise` asks that nobody relies on what the advice changes: the page is this
        // guard's own, and a child that finds zeros in it is the purpose.
        unsafe { madvise(page, BYTES, Advice::LinuxWipeOnFork) }
            .map_err(|e| Error::system("madvise(MADV_WIPEONFORK)", "use Linux 4.14 or later", e))?;
        guard.word().store(1, Ordering::Relaxed);
        Ok(guard)
    }

    /// Says whether this is a forked child of the process that made the guard.
    #[inline]
    pub fn is_child(&self) -> bool {
        self.word().load(Ordering::Relaxed) == 0
    }

    /// Fails in a forked child.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`], which names what was asked of the parent.
    #[inline]
    pub fn check(&self, what: &'static str) -> Result<()> {
        if self.is_child() {
            Err(Error::Forked { what })
        } else {
            Ok(())
        }
    }

    #[inline]
    fn word(&self) -> &AtomicU32 {
        // SAFETY: `as_ref` asks for a valid, aligned value for as long as the reference: the page
        // is mapped until the drop, starts at a page, and any bits are an atomic number.
        unsafe { self.word.as_ref() }
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        // SAFETY: `munmap` asks that nothing in the page is used afterwards: no reference outlives
        // the guard.
        let unmapped = unsafe { munmap(self.word.as_ptr().cast(), BYTES) };
        debug_assert!(unmapped.is_ok(), "a mapping of our own: {unmapped:?}");
    }
}

impl fmt::Debug for ForkGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForkGuard")
            .field("is_child", &self.is_child())
            .finish()
    }
}

/// Makes sure that the kernel looks at advice at all: an emulated one that grants everything and
/// does nothing would have a child release its parent's leases.
fn refuses_bogus_advice() -> Result<()> {
    const BOGUS: libc::c_int = 0x6f67;
    // SAFETY: `madvise` of no bytes touches no memory, whatever the address and the advice.
    let answer = unsafe { libc::madvise(ptr::null_mut(), 0, BOGUS) };
    if answer == 0 {
        return Err(Error::Unsupported {
            what: "telling a forked child",
            why: "this kernel accepts advice that does not exist, so its MADV_WIPEONFORK proves nothing".into(),
            remedy: "run on a Linux kernel, not under user-mode emulation",
        });
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EINVAL) => Ok(()),
        _ => Err(Error::system(
            "madvise",
            "allow madvise in this sandbox",
            error,
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Forks; the child exits with what `in_child` says and does nothing else.
    fn exit_code_of_child(in_child: impl FnOnce() -> i32) -> i32 {
        // SAFETY: `fork` in a process with threads lets the child do only what is safe in a signal
        // handler: the closures here load from memory, and `_exit` follows.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let code = in_child();
            // SAFETY: `_exit` has no conditions.
            unsafe { libc::_exit(code) };
        }
        assert!(pid > 0, "fork: {}", io::Error::last_os_error());
        let mut status = 0;
        // SAFETY: `waitpid` asks for a place to write to: `status` lives on this frame.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(waited, pid, "waitpid: {}", io::Error::last_os_error());
        assert!(libc::WIFEXITED(status), "status {status:#x}");
        libc::WEXITSTATUS(status)
    }

    #[test]
    fn a_child_knows_and_its_parent_stays_the_owner() {
        let guard = ForkGuard::new().expect("a guard");
        assert!(!guard.is_child());
        assert_eq!(exit_code_of_child(|| i32::from(guard.is_child())), 1);
        assert!(!guard.is_child());
    }

    #[test]
    fn a_guard_made_in_the_parent_after_another_fork_is_its_own() {
        let first = ForkGuard::new().expect("a guard");
        exit_code_of_child(|| 0);
        let second = ForkGuard::new().expect("a guard");
        assert_eq!(
            exit_code_of_child(|| i32::from(first.is_child()) + 2 * i32::from(second.is_child())),
            3
        );
    }

    #[test]
    fn guards_cross_threads() {
        fn crosses<T: Send + Sync + 'static>() {}
        crosses::<ForkGuard>();
    }
}

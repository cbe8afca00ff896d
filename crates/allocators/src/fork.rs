//! Telling a forked child from the process that made an allocator.

use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use gpu_api::{Error, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Less than any page; the kernel rounds it up.
const BYTES: usize = size_of::<AtomicU32>();

/// A page that reads 1 in the process that made it and, because the kernel wipes it, 0 in a child.
///
/// One load tells: `getpid` would be a system call at every allocation, and a pid may be used again.
pub(crate) struct ForkGuard {
    word: NonNull<AtomicU32>,
}

// SAFETY: the word is atomic, the mapping is this value's own and belongs to no thread.
unsafe impl Send for ForkGuard {}
// SAFETY: as above.
unsafe impl Sync for ForkGuard {}

impl ForkGuard {
    /// Makes a guard that belongs to this process.
    pub(crate) fn new() -> Result<ForkGuard> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: `mmap_anonymous` without `FIXED` replaces no mapping.
        let page = unsafe { mmap_anonymous(ptr::null_mut(), BYTES, protection, flags) }
            .map_err(|e| Error::system("mmap", "free memory or raise RLIMIT_AS", e))?;
        let word = NonNull::new(page.cast::<AtomicU32>()).expect("a mapping without `FIXED` is not at 0");
        let guard = ForkGuard { word };
        // SAFETY: `madvise` asks that nobody relies on what it changes: zeros in a child are the purpose.
        unsafe { madvise(page, BYTES, Advice::LinuxWipeOnFork) }
            .map_err(|e| Error::system("madvise(MADV_WIPEONFORK)", "use Linux 4.14 or later", e))?;
        guard.word().store(1, Ordering::Relaxed);
        Ok(guard)
    }

    /// Fails in a forked child.
    #[inline]
    pub(crate) fn check(&self, what: &'static str) -> Result<()> {
        if self.word().load(Ordering::Relaxed) == 0 { Err(Error::Forked { what }) } else { Ok(()) }
    }

    #[inline]
    fn word(&self) -> &AtomicU32 {
        // SAFETY: `as_ref` asks for a valid, aligned value for as long as the reference: the page is mapped until the
        // drop, starts at a page, and any bits are an atomic number.
        unsafe { self.word.as_ref() }
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        // SAFETY: `munmap` asks that nothing in the page is used afterwards: no reference outlives the guard.
        let unmapped = unsafe { munmap(self.word.as_ptr().cast(), BYTES) };
        debug_assert!(unmapped.is_ok(), "a mapping of our own: {unmapped:?}");
    }
}

impl fmt::Debug for ForkGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ForkGuard")
    }
}

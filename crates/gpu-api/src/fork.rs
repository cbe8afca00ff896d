//! Telling a forked child from the process that made an object.
//!
//! A process has a *generation*, a number that no process which it descends from by `fork` has had.
//! It stands in a page that the kernel hands to a forked child as zeros, so no handler runs in a
//! child and no call can be missed, `clone` without the C library included. An object keeps the
//! generation of the process that made it; where that differs from the page, this is a child.
//!
//! | step | by | operation |
//! |---|---|---|
//! | map the page, advise the kernel, publish its address | the first guard of a process and its ancestors | compare-exchange, `AcqRel` |
//! | take a generation | the first guard of a process | `LAST` + 1, then compare-exchange of the page's 0, `Relaxed` |
//! | ask | every guard | load of the page, `Relaxed` |
//!
//! `Relaxed` is enough for the generation: nothing is published with it, and all threads of one
//! process read the same value from when its first guard exists. There is no lock, since a child
//! may inherit one that a thread which it lacks holds. Checked by the tests below.
//!
//! A child of `vfork` shares the page and passes for its parent. It may only exec or exit, so none
//! of this library runs in it.

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::{Error, Result};

/// Less than any page; the kernel rounds it up.
const BYTES: usize = size_of::<AtomicU64>();

/// The page's word: the process' generation, or 0 in a process without a guard of its own. Never
/// unmapped once it is here.
static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());

/// The last generation taken, by this process or by those that it descends from.
static LAST: AtomicU64 = AtomicU64::new(0);

/// Remembers which process made an object: 16 bytes, copied freely.
///
/// Asked at every call and every drop, so it costs one load; `getpid` would be a system call each
/// time, and a pid may be used again.
///
/// # Examples
///
/// ```
/// let guard = gpu_api::ForkGuard::new()?;
/// assert!(!guard.is_child());
/// guard.check("this session")?;
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ForkGuard {
    page: &'static AtomicU64,
    generation: u64,
}

impl ForkGuard {
    /// Makes a guard that belongs to this process.
    ///
    /// # Errors
    ///
    /// Only where the process and its ancestors have made none yet: [`Error::System`] without
    /// memory for a page, [`Error::Unsupported`] where the kernel only pretends.
    pub fn new() -> Result<ForkGuard> {
        let page = page()?;
        let generation = match page.load(Ordering::Relaxed) {
            0 => {
                let next = LAST.fetch_add(1, Ordering::Relaxed) + 1;
                let taken = page.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed);
                taken.map_or_else(|first| first, |_| next)
            }
            generation => generation,
        };
        Ok(ForkGuard { page, generation })
    }

    /// Says whether this is a forked child of the process that made the guard.
    #[inline]
    pub fn is_child(&self) -> bool {
        self.page.load(Ordering::Relaxed) != self.generation
    }

    /// Fails in a forked child.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`], which names what was asked of the parent.
    #[inline]
    pub fn check(&self, what: &'static str) -> Result<()> {
        if self.is_child() {
            Err(Error::forked(what))
        } else {
            Ok(())
        }
    }
}

/// Returns the page, which the first call maps.
fn page() -> Result<&'static AtomicU64> {
    let known = PAGE.load(Ordering::Acquire);
    let page = if known.is_null() { map()? } else { known };
    // SAFETY: `as_ref` asks for null, or for a valid, aligned value for as long as the reference:
    // what `map` publishes is mapped until the process ends, starts at a page, and any bits are an
    // atomic number.
    Ok(unsafe { page.as_ref() }.expect("a mapping without `FIXED` is not at 0"))
}

/// Maps the page, or returns that of a thread that was faster.
fn map() -> Result<*mut AtomicU64> {
    refuses_bogus_advice()?;
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: `mmap_anonymous` without `FIXED` replaces no mapping.
    let made = unsafe { mmap_anonymous(ptr::null_mut(), BYTES, protection, flags) }
        .map_err(|e| Error::system("mmap", "free memory or raise RLIMIT_AS, then open again", e))?;
    let unmap = || {
        // SAFETY: `munmap` asks that nothing in the page is used afterwards: it was not published.
        let unmapped = unsafe { munmap(made, BYTES) };
        debug_assert!(unmapped.is_ok(), "a mapping of our own: {unmapped:?}");
    };
    // SAFETY: `madvise` asks that nothing relies on what the advice changes: the page is not
    // published, and a child that finds zeros in it is the purpose.
    if let Err(error) = unsafe { madvise(made, BYTES, Advice::LinuxWipeOnFork) } {
        unmap();
        let (call, remedy) = ("madvise(MADV_WIPEONFORK)", "use Linux 4.14 or later");
        return Err(Error::system(call, remedy, error));
    }
    let word = made.cast();
    let published =
        PAGE.compare_exchange(ptr::null_mut(), word, Ordering::AcqRel, Ordering::Acquire);
    Ok(published.map_or_else(
        |first| {
            unmap();
            first
        },
        |_| word,
    ))
}

/// Makes sure that the kernel looks at advice at all: an emulated one that grants everything and
/// does nothing would have a child release its parent's leases.
fn refuses_bogus_advice() -> Result<()> {
    const BOGUS: libc::c_int = 0x6f67;
    // SAFETY: `madvise` of no bytes touches no memory, whatever the address and the advice.
    let answer = unsafe { libc::madvise(ptr::null_mut(), 0, BOGUS) };
    if answer == 0 {
        return Err(Error::unsupported(
            "telling a forked child",
            "this kernel accepts advice that does not exist, so its MADV_WIPEONFORK proves nothing",
            "run on a Linux kernel, not under user-mode emulation",
        ));
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
        // handler, or to use glibc's allocator and threads, which it keeps usable there: the
        // closures here do no more.
        let child = unsafe { harness::fork(in_child) }.expect("room for a process");
        child.code().expect("no signal")
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
    fn a_child_has_guards_of_its_own_and_its_children_are_told_from_it() {
        let parents = ForkGuard::new().expect("a guard");
        let code = exit_code_of_child(|| {
            let Ok(own) = ForkGuard::new() else { return 64 };
            let below = exit_code_of_child(|| {
                // Made here first, so that this process has a generation.
                let lowest = ForkGuard::new().map(|lowest| i32::from(lowest.is_child()));
                4 * i32::from(own.is_child())
                    + 8 * i32::from(parents.is_child())
                    + lowest.unwrap_or(64)
            });
            below + i32::from(own.is_child()) + 2 * i32::from(parents.is_child())
        });
        assert_eq!(code, 4 + 8 + 2);
        assert!(!parents.is_child());
    }

    #[test]
    fn threads_that_ask_first_at_once_get_one_generation() {
        let code = exit_code_of_child(|| {
            // In the child the page is blank, as at a program's start.
            let ask = || ForkGuard::new().expect("a guard").generation;
            std::thread::scope(|scope| {
                let asked: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
                let own = ask();
                let same = asked
                    .into_iter()
                    .all(|thread| thread.join().is_ok_and(|generation| generation == own));
                i32::from(!same)
            })
        });
        assert_eq!(code, 0);
    }

    #[test]
    fn guards_cross_threads() {
        fn crosses<T: Send + Sync + 'static>() {}
        crosses::<ForkGuard>();
    }
}

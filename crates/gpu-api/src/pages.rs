//! Host memory from the kernel, on any NUMA node or on one: what a backend has where its driver has
//! no say.

use std::ffi::{c_long, c_ulong, c_void};
use std::io;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::{Error, Result};

/// Zeroed memory of this process' own, unmapped when it is dropped unless it is kept.
///
/// # Examples
///
/// ```
/// let pages = gpu_api::KernelPages::map(10_000, None)?;
/// assert_eq!(pages.as_ptr() as usize % 64, 0);
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Debug)]
pub struct KernelPages {
    start: NonNull<c_void>,
    len: usize,
}

// SAFETY: the mapping is this value's own and belongs to no thread; it is reached through raw
// pointers alone.
unsafe impl Send for KernelPages {}
// SAFETY: as above.
unsafe impl Sync for KernelPages {}

impl KernelPages {
    /// Maps this many bytes, bound to a node if one is given.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the kernel has none, or cannot bind it to that node.
    pub fn map(len: usize, node: Option<u32>) -> Result<KernelPages> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: `mmap_anonymous` asks that a fixed address replace nothing in use: none is asked
        // for.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), len, protection, MapFlags::PRIVATE) };
        let start = start
            .map_err(|error| Error::system("mmap", "free host memory, or ask for less", error))?;
        let start = NonNull::new(start)
            .expect("the kernel places no mapping of its own choice at address zero");
        let pages = KernelPages { start, len };
        if let Some(node) = node {
            pages.bind(node)?;
        }
        Ok(pages)
    }

    fn bind(&self, node: u32) -> Result<()> {
        let bits = c_long::BITS as usize;
        let mut mask = vec![0 as c_ulong; node as usize / bits + 1];
        mask[node as usize / bits] |= 1 << (node as usize % bits);
        // The kernel takes one bit less than it is told.
        let bits_given = mask.len() * bits + 1;
        // SAFETY: `mbind` reads a mask of as many bits as it is told, and changes where pages of a
        // range of ours are placed; the range is `self`'s.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start.as_ptr(),
                self.len,
                libc::MPOL_BIND as c_ulong,
                mask.as_ptr(),
                bits_given,
                0,
            )
        };
        if result == 0 {
            return Ok(());
        }
        Err(Error::system(
            "mbind",
            "name a NUMA node that has memory (`numactl --hardware`), or none",
            io::Error::last_os_error(),
        ))
    }

    /// Returns the address of the first byte.
    pub fn as_ptr(&self) -> *mut c_void {
        self.start.as_ptr()
    }

    /// Returns the bytes that were asked for.
    #[allow(
        clippy::len_without_is_empty,
        reason = "the kernel maps nothing for no bytes"
    )]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Gives the memory to the caller, who calls [`unmap`](KernelPages::unmap) at its end.
    pub fn keep(self) -> NonNull<c_void> {
        let start = self.start;
        std::mem::forget(self);
        start
    }

    /// Unmaps what was kept.
    ///
    /// # Errors
    ///
    /// [`Error::System`]: what is left then is leaked.
    ///
    /// # Safety
    ///
    /// `start` and `len` are those of memory that was kept and is not yet unmapped, and nothing
    /// touches it.
    pub unsafe fn unmap(start: *mut c_void, len: usize) -> Result<()> {
        // SAFETY: `munmap` asks that nothing use the whole mapping: our caller vouches for that.
        let result = unsafe { munmap(start, len) };
        result.map_err(|error| Error::system("munmap", "report it: the mapping was our own", error))
    }
}

impl Drop for KernelPages {
    fn drop(&mut self) {
        // SAFETY: `munmap` asks that nothing use the mapping: every user of `as_ptr` kept `self`
        // alive.
        let result = unsafe { munmap(self.start.as_ptr(), self.len) };
        debug_assert!(result.is_ok(), "a mapping of our own can be unmapped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This many mappings of 4 GiB each do not fit in an address space at once.
    const TOO_MANY: usize = 40_000;
    const LARGE: usize = 4 << 30;

    #[test]
    fn pages_are_zeroed_and_kept() {
        let pages = KernelPages::map(10_000, None).expect("room");
        let kept = pages.keep().as_ptr();
        // SAFETY: `from_raw_parts`: as many bytes were mapped and kept, and nobody writes to them.
        let bytes = unsafe { std::slice::from_raw_parts(kept.cast::<u8>(), 10_000) };
        assert!(bytes.iter().all(|&byte| byte == 0));
        // SAFETY: `unmap`: kept above, and nothing uses it any more.
        unsafe { KernelPages::unmap(kept, 10_000) }.expect("our own");
    }

    #[test]
    fn pages_go_with_their_owner() {
        for _ in 0..TOO_MANY {
            drop(KernelPages::map(LARGE, None).expect("room, as nothing is left"));
        }
        for _ in 0..TOO_MANY {
            let kept = KernelPages::map(LARGE, None)
                .expect("room, as nothing is left")
                .keep();
            // SAFETY: `unmap`: kept above, and nothing uses it.
            unsafe { KernelPages::unmap(kept.as_ptr(), LARGE) }.expect("our own");
        }
    }

    #[test]
    fn a_node_that_is_not_there_is_an_error_and_leaves_nothing() {
        for _ in 0..TOO_MANY {
            let error = KernelPages::map(LARGE, Some(1023)).expect_err("no such node");
            assert!(
                matches!(error, Error::System { call: "mbind", .. }),
                "{error:?}"
            );
        }
    }
}

//! What a carrier maps: slots to write, and what is lent to read, until zeroes take its place.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::null_mut;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Addresses that stay taken by leases that have ended.
const MOST_BYTES: u64 = 16 << 40;
/// And how many ranges of them: a process may have 65,530 mappings by default.
const MOST_RANGES: usize = 16_384;
/// What mappings begin and end at.
const PAGE: u64 = 4096;

/// How memory is mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// To read.
    ReadOnly,
    /// To read and write.
    ReadWrite,
}

/// Memory that is mapped until this is dropped.
#[derive(Debug)]
pub struct Mapped {
    at: *mut c_void,
    bytes: u64,
}

// SAFETY: a mapping belongs to the process, and not to a thread.
unsafe impl Send for Mapped {}
// SAFETY: what a shared reference gives is an address, and using it is unsafe.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Makes a file of memory that nobody can truncate under those who map it.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn file(bytes: u64) -> std::io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("gpu-ipc-slots", flags)?;
        ftruncate(&file, bytes)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals)?;
        Ok(file)
    }

    /// Maps the first bytes of a file; none of 0 bytes.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn map(file: BorrowedFd<'_>, bytes: u64, access: Access) -> std::io::Result<Mapped> {
        let protection = match access {
            Access::ReadOnly => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        let length = length(bytes)?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: `mmap` without a fixed address replaces nothing.
        let at = unsafe { mmap(null_mut(), length, protection, flags, file, 0) }?;
        Ok(Mapped { at, bytes })
    }

    /// Returns an address within.
    pub fn at(&self, offset: u64) -> *mut u8 {
        self.at.cast::<u8>().wrapping_add(offset as usize)
    }

    /// Maps zeroes in its place, in one step: a read that is under way finds one or the other.
    fn forget(&self) -> std::io::Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let length = length(self.bytes)?;
        // SAFETY: `mmap_anonymous` at a fixed address asks that nobody use what it replaces as what
        // it was: reads of peers alone do, which are to find zeroes.
        unsafe { mmap_anonymous(self.at, length, ProtFlags::READ, flags) }?;
        Ok(())
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Ok(length) = length(self.bytes) {
            // SAFETY: `munmap` asks that nobody use the range: it was mapped here, and its owner
            // drops it.
            let _ = unsafe { munmap(self.at, length) };
        }
    }
}

fn length(bytes: u64) -> std::io::Result<usize> {
    bytes
        .max(1)
        .checked_next_multiple_of(PAGE)
        .and_then(|bytes| usize::try_from(bytes).ok())
        .ok_or_else(|| std::io::Error::other(format!("{bytes} bytes are too many to map")))
}

/// Addresses of leases that have ended, the oldest first.
#[derive(Default, Debug)]
pub struct Retired {
    ranges: VecDeque<Mapped>,
    bytes: u64,
}

impl Retired {
    /// Maps zeroes in place of memory, whose addresses stay taken.
    pub fn retire(&mut self, memory: Mapped) {
        if let Err(error) = memory.forget() {
            // A late read then ends this process, which is what it is there for.
            tracing::warn!(%error, "no zeroes in place of what was lent");
            return;
        }
        self.bytes = self.bytes.saturating_add(memory.bytes);
        self.ranges.push_back(memory);
        while self.ranges.len() > MOST_RANGES || self.bytes > MOST_BYTES {
            let Some(oldest) = self.ranges.pop_front() else {
                return;
            };
            self.bytes -= oldest.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn first(memory: &Mapped) -> u8 {
        // SAFETY: `read_volatile`: it is mapped, and was made of one page at least.
        unsafe { memory.at(0).read_volatile() }
    }

    #[test]
    fn what_is_retired_is_zero_at_the_same_address_and_its_memory_comes_back() {
        let file = Mapped::file(PAGE).expect("memory");
        rustix::io::pwrite(&file, &[7; 64], 0).expect("its memory");
        let memory = Mapped::map(file.as_fd(), PAGE, Access::ReadOnly).expect("mapped");
        let at = memory.at(0);
        assert_eq!(first(&memory), 7);
        let mut retired = Retired::default();
        retired.retire(memory);
        // SAFETY: `read_volatile`: zeroes were mapped there, and are as long as `retired` lives.
        assert_eq!(unsafe { at.read_volatile() }, 0);
        let maps = std::fs::read_to_string("/proc/self/maps").expect("its own");
        let line = maps
            .lines()
            .find(|line| line.starts_with(&format!("{:x}-", at as usize)));
        assert!(
            line.is_some_and(|line| !line.contains("gpu-ipc-slots")),
            "{line:?}"
        );
    }

    #[test]
    fn the_oldest_addresses_go_when_too_many_are_kept() {
        let file = Mapped::file(PAGE).expect("memory");
        let mut retired = Retired::default();
        for _ in 0..8 {
            let memory = Mapped::map(file.as_fd(), PAGE, Access::ReadOnly).expect("mapped");
            retired.retire(memory);
        }
        assert_eq!((retired.ranges.len(), retired.bytes), (8, 8 * PAGE));
        retired.bytes = MOST_BYTES;
        let memory = Mapped::map(file.as_fd(), PAGE, Access::ReadOnly).expect("mapped");
        retired.retire(memory);
        assert_eq!(retired.ranges.len(), 8, "the oldest has gone");
    }

    #[test]
    fn what_is_lent_cannot_be_made_writable() {
        let file = Mapped::file(PAGE).expect("memory");
        let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let read_only = std::fs::File::open(again).expect("the file again");
        Mapped::map(read_only.as_fd(), PAGE, Access::ReadWrite)
            .expect_err("it is to be read alone");
        let memory = Mapped::map(read_only.as_fd(), PAGE, Access::ReadOnly).expect("mapped");
        let flags = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
        // SAFETY: `mprotect` of a range that is this test's own.
        unsafe { rustix::mm::mprotect(memory.at, 4096, flags) }.expect_err("it stays so");
    }
}

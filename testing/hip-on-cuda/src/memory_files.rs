//! Memory files where HIP has virtual memory: files for physical memory, and mappings of them on
//! reserved addresses.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::ptr;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use crate::machine::{INVALID_VALUE, Outcome, UNKNOWN};
use crate::settings::{Fault, Settings};

pub(crate) const OUT_OF_MEMORY: u32 = 2;

pub(crate) const GRANULARITY: usize = 2 << 20;

/// Physical memory: a file.
struct Physical {
    file: OwnedFd,
    len: usize,
    device: i32,
    /// Handles and mappings of it in this process.
    times: u32,
    own: bool,
}

/// A mapping of physical memory.
struct Mapping {
    len: usize,
    handle: u64,
}

/// The physical memory that this process has a handle or a mapping of, and the addresses that it
/// reserved.
#[derive(Default)]
pub(crate) struct MemoryFiles {
    physical: HashMap<u64, Physical>,
    mappings: BTreeMap<u64, Mapping>,
    reserved: HashMap<u64, usize>,
    next: u64,
}

fn at(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

impl MemoryFiles {
    /// Sums up the physical memory of a device that this process made.
    pub(crate) fn used(&self, device: i32) -> usize {
        self.physical
            .values()
            .filter(|p| p.own && p.device == device)
            .map(|p| p.len)
            .sum()
    }

    /// Finds the mapping that an address lies in: its base, its length and its device.
    pub(crate) fn find(&self, ptr: u64) -> Option<(u64, usize, i32)> {
        let (base, mapping) = self.inside(ptr)?;
        let device = self
            .physical
            .get(&mapping.handle)
            .map_or(0, |physical| physical.device);
        Some((base, mapping.len, device))
    }

    pub(crate) fn create(&mut self, device: i32, len: usize) -> Outcome<u64> {
        let file = rustix::fs::memfd_create("hip-on-host", rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(|_| UNKNOWN)?;
        rustix::fs::ftruncate(&file, len as u64).map_err(|_| OUT_OF_MEMORY)?;
        Ok(self.insert(file, len, device, true))
    }

    /// Gives a handle or a mapping of physical memory back.
    pub(crate) fn release(&mut self, handle: u64) -> Outcome {
        let physical = self.physical.get_mut(&handle).ok_or(INVALID_VALUE)?;
        physical.times -= 1;
        if physical.times == 0 {
            if physical.own && Settings::get().has(Fault::ExportDies) {
                rustix::fs::ftruncate(&physical.file, 0).map_err(|_| UNKNOWN)?;
            }
            self.physical.remove(&handle);
        }
        Ok(())
    }

    pub(crate) fn reserve(&mut self, len: usize) -> Outcome<u64> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: `mmap_anonymous` without a fixed address has no conditions.
        let start =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), flags) };
        let base = start.map_err(|_| OUT_OF_MEMORY)?.expose_provenance() as u64;
        self.reserved.insert(base, len);
        Ok(base)
    }

    pub(crate) fn unreserve(&mut self, base: u64, len: usize) -> Outcome {
        if self.reserved.get(&base) != Some(&len) || self.mappings.contains_key(&base) {
            return Err(INVALID_VALUE);
        }
        self.reserved.remove(&base);
        // SAFETY: `munmap` asks that nobody use the range: it was reserved here and nothing is
        // mapped on it.
        unsafe { rustix::mm::munmap(at(base), len) }.map_err(|_| UNKNOWN)
    }

    pub(crate) fn map(&mut self, base: u64, len: usize, handle: u64) -> Outcome {
        let physical = self.physical.get_mut(&handle).ok_or(INVALID_VALUE)?;
        if self.reserved.get(&base) != Some(&len)
            || self.mappings.contains_key(&base)
            || physical.len != len
        {
            return Err(INVALID_VALUE);
        }
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: `mmap` at a fixed address asks that nobody use what lies there: a reservation,
        // and nothing on it.
        let mapped = unsafe {
            rustix::mm::mmap(at(base), len, ProtFlags::empty(), flags, &physical.file, 0)
        };
        mapped.map_err(|_| UNKNOWN)?;
        physical.times += 1;
        self.mappings.insert(base, Mapping { len, handle });
        Ok(())
    }

    /// Takes a mapping down.
    ///
    /// # Safety
    ///
    /// Nobody uses it.
    pub(crate) unsafe fn unmap(&mut self, base: u64, len: usize) -> Outcome {
        let mapping = self
            .mappings
            .get(&base)
            .filter(|mapping| mapping.len == len)
            .ok_or(INVALID_VALUE)?;
        let handle = mapping.handle;
        self.mappings.remove(&base);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: `mmap_anonymous` at a fixed address asks that nobody use what lies there: our
        // caller vouches for it.
        unsafe { rustix::mm::mmap_anonymous(at(base), len, ProtFlags::empty(), flags) }
            .map_err(|_| UNKNOWN)?;
        self.release(handle)
    }

    pub(crate) fn grant(&self, base: u64, len: usize, write: bool) -> Outcome {
        if self
            .mappings
            .get(&base)
            .is_none_or(|mapping| mapping.len != len)
        {
            return Err(INVALID_VALUE);
        }
        let flags = if write {
            MprotectFlags::READ | MprotectFlags::WRITE
        } else {
            MprotectFlags::READ
        };
        // SAFETY: `mprotect` asks for a range whose rights nobody relies on: it is one that was
        // mapped here.
        unsafe { rustix::mm::mprotect(at(base), len, flags) }.map_err(|_| UNKNOWN)
    }

    pub(crate) fn export(&self, handle: u64) -> Outcome<i32> {
        let physical = self.physical.get(&handle).ok_or(INVALID_VALUE)?;
        Ok(physical
            .file
            .try_clone()
            .map_err(|_| UNKNOWN)?
            .into_raw_fd())
    }

    pub(crate) fn import(&mut self, fd: BorrowedFd<'_>, device: i32) -> Outcome<u64> {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
            .map_err(|_| INVALID_VALUE)?;
        if !link.to_string_lossy().starts_with("/memfd:hip-on-host") {
            return Err(INVALID_VALUE);
        }
        let file = fd.try_clone_to_owned().map_err(|_| UNKNOWN)?;
        let len = rustix::fs::fstat(file.as_fd())
            .map_err(|_| UNKNOWN)?
            .st_size as usize;
        Ok(self.insert(file, len, device, false))
    }

    /// Returns one more handle of the physical memory behind an address.
    pub(crate) fn retain(&mut self, ptr: u64) -> Outcome<u64> {
        let handle = self.inside(ptr).ok_or(INVALID_VALUE)?.1.handle;
        self.physical.get_mut(&handle).ok_or(INVALID_VALUE)?.times += 1;
        Ok(handle)
    }

    fn insert(&mut self, file: OwnedFd, len: usize, device: i32, own: bool) -> u64 {
        self.next += 16;
        self.physical.insert(
            self.next,
            Physical {
                file,
                len,
                device,
                times: 1,
                own,
            },
        );
        self.next
    }

    fn inside(&self, ptr: u64) -> Option<(u64, &Mapping)> {
        let (&base, mapping) = self.mappings.range(..=ptr).next_back()?;
        (ptr - base < mapping.len as u64).then_some((base, mapping))
    }
}

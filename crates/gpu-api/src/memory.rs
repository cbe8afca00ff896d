//! Addresses, allocations, and the handles by which another process reaches them.

use std::fmt;
use std::os::fd::OwnedFd;

use rustix::io::FdFlags;

use crate::{DeviceId, Error, Result};

/// An address in device memory, valid in this process only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// Returns the address `bytes` further on.
    ///
    /// # Panics
    ///
    /// If the address space ends before: an offset that was not checked against its allocation.
    #[must_use]
    pub fn offset(self, bytes: u64) -> DevicePtr {
        DevicePtr(
            self.0
                .checked_add(bytes)
                .expect("an offset inside its allocation"),
        )
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// An address in host memory, valid in this process only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct HostPtr(pub usize);

impl fmt::Debug for HostPtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// How memory is handed to another process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
#[non_exhaustive]
pub enum Sharing {
    /// By a 64-byte handle (`cuIpcGetMemHandle`, `hipIpcGetMemHandle`). Always read-write.
    Handle = 1,
    /// By a file descriptor (CUDA VMM, memfd), read-write or read-only.
    Fd = 2,
}

impl Sharing {
    /// Reads the byte that messages carry.
    pub const fn from_byte(byte: u8) -> Option<Sharing> {
        match byte {
            1 => Some(Sharing::Handle),
            2 => Some(Sharing::Fd),
            _ => None,
        }
    }
}

/// What a consumer may do with memory that it maps.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[repr(u8)]
pub enum Access {
    /// Read and write.
    #[default]
    ReadWrite = 0,
    /// Read only; a write faults.
    ReadOnly = 1,
}

impl Access {
    /// Reads the byte that messages carry.
    pub const fn from_byte(byte: u8) -> Option<Access> {
        match byte {
            0 => Some(Access::ReadWrite),
            1 => Some(Access::ReadOnly),
            _ => None,
        }
    }
}

/// What `alloc` gave: all of it belongs to the caller until `free`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allocation {
    /// The first byte.
    pub base: DevicePtr,
    /// Bytes, rounded up from what was asked for to the device's granularity.
    pub len: u64,
}

/// The allocation that an address lies in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddressRange {
    /// Its first byte.
    pub base: DevicePtr,
    /// Its bytes.
    pub len: u64,
}

/// A vendor's handle of an allocation: 64 bytes that another process opens.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct MemHandle(pub [u8; 64]);
const _: () = assert!(size_of::<MemHandle>() == 64);

impl fmt::Debug for MemHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A handle is a bearer token: any process that has its bytes can open the memory, so logs
        // never show them.
        f.write_str("MemHandle(..)")
    }
}

/// The origin of an address that other code allocated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Plain device memory that has a 64-byte handle (`cuMemAlloc`, `hipMalloc`).
    Plain,
    /// Memory from the virtual memory management calls (`cuMemCreate`), shared by file descriptor.
    Virtual,
    /// A piece of a range that this process reserved
    /// ([`GpuRanges::map_memory`](crate::GpuRanges::map_memory)).
    Piece,
    /// Memory from a stream-ordered pool (`cudaMallocAsync`).
    Pool,
    /// Managed memory, which migrates between host and device.
    Managed,
    /// Host memory known to the driver (pinned or registered).
    Host,
    /// Memory that this process opened from another process.
    Imported,
    /// An address that the driver does not know.
    Unknown,
}

/// What the driver knows of an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PointerInfo {
    /// Where it comes from.
    pub kind: MemoryKind,
    /// The allocation that it lies in, where the driver tells.
    pub range: Option<AddressRange>,
    /// The device it belongs to, where there is one.
    pub device: Option<DeviceId>,
    /// How it can be shared; `None` when it cannot.
    pub sharing: Option<Sharing>,
}

/// What kind of host memory to allocate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HostMemory {
    /// Pinned: the device can reach it, and copies to and from it do not stage.
    pub pinned: bool,
    /// The NUMA node to bind it to; `None` leaves the choice to the kernel.
    pub numa_node: Option<u32>,
}

/// Rounds a length up to what a driver allocates.
///
/// # Errors
///
/// [`Error::Invalid`] for no bytes, and for more than the address space holds.
pub fn round_up(len: u64, granularity: u64) -> Result<usize> {
    let invalid = || {
        Error::invalid(
            "the length",
            len,
            "at least 1, and within the address space",
        )
    };
    if len == 0 {
        return Err(invalid());
    }
    let rounded = len
        .checked_next_multiple_of(granularity)
        .ok_or_else(invalid)?;
    // The kernel half of the address space is nobody's: the driver need not be asked.
    usize::try_from(rounded)
        .ok()
        .filter(|&size| size <= isize::MAX as usize)
        .ok_or_else(invalid)
}

/// Takes in a descriptor that a driver made: no manual says that it is closed on exec, and a
/// program started beside this one would keep the memory.
///
/// # Errors
///
/// [`Error::System`] where the system does not let it be changed; the descriptor is closed.
pub fn close_on_exec(fd: OwnedFd) -> Result<OwnedFd> {
    rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC)
        .map_err(|error| Error::system("fcntl(F_SETFD)", "allow fcntl in this sandbox", error))?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_rounded_up_and_never_wraps() {
        assert_eq!(round_up(1, 4096).ok(), Some(4096));
        assert_eq!(round_up(4096, 4096).ok(), Some(4096));
        assert_eq!(round_up(4097, 4096).ok(), Some(8192));
        assert!(round_up(0, 4096).is_err());
        assert!(round_up(u64::MAX, 4096).is_err());
        assert!(round_up(1 << 63, 4096).is_err());
    }

    #[test]
    fn a_handle_never_prints_its_bytes() {
        assert_eq!(format!("{:?}", MemHandle([7; 64])), "MemHandle(..)");
    }

    #[test]
    fn bytes_name_what_they_came_from() {
        for sharing in [Sharing::Handle, Sharing::Fd] {
            assert_eq!(Sharing::from_byte(sharing as u8), Some(sharing));
        }
        for access in [Access::ReadWrite, Access::ReadOnly] {
            assert_eq!(Access::from_byte(access as u8), Some(access));
        }
        assert_eq!(Sharing::from_byte(0), None);
        assert_eq!(Access::from_byte(2), None);
    }
}

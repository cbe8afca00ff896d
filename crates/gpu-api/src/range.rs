//! Memory apart from addresses: made and exported without a context, and mapped where the caller
//! says.
//!
//! [`GpuStore`] makes physical memory, which has no address. [`GpuRanges`] reserves addresses and
//! maps it on them, piece by piece. A region that grows in place and an object at a fixed address
//! are a range with pieces in it; a process that owns memory and does nothing with its bytes needs
//! the store alone.
//!
//! ```text
//! create ─► export ┄┄┄ descriptor ┄┄┄► import ─► map ◄─┐
//!    └────► release                reserve ─────┘      └─► unmap ─► release, release_range
//! ```
//!
//! Physical memory stays while anything keeps it: a handle, a mapping, or an open descriptor, in
//! whatever process. The driver frees it when the last of them is gone (measured on driver 580:
//! within a second of the last close).

use std::os::fd::{BorrowedFd, OwnedFd};

#[cfg(doc)]
use crate::Error;
use crate::{Access, AddressRange, DeviceId, DevicePtr, Result};

/// A handle of physical memory, which has no address; of this process only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawMemory {
    /// The device that it lies on, or that reaches it.
    pub device: DeviceId,
    /// The driver's handle (`CUmemGenericAllocationHandle`), as a number.
    pub handle: u64,
    /// Its bytes, a multiple of [`Caps::granularity`](crate::Caps::granularity).
    pub len: u64,
}

/// Physical memory: make it, hand it on as a descriptor, let go of it.
///
/// No call of this group makes or needs a context of the driver's, so a process that only keeps
/// memory costs the device no more than that memory (measured: a context takes about 520 MiB). A
/// creation can stall for seconds while the driver clears memory: call it on a thread that may
/// block.
///
/// # Safety
///
/// For implementors: `create_memory` returns memory that is nobody else's, and memory stays while a
/// handle, a mapping or a descriptor of it does.
pub unsafe trait GpuStore {
    /// Makes physical memory of at least `len` bytes that can be exported.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] when there is no room, [`Error::Invalid`] for a length of zero.
    fn create_memory(&self, device: DeviceId, len: u64) -> Result<RawMemory>;

    /// Exports memory as a file descriptor, which is closed on exec and keeps the memory. It is
    /// permission to write: no driver gives one that only reads.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the process has no descriptor left.
    ///
    /// # Safety
    ///
    /// `memory` was created or imported on this backend and is not yet released.
    unsafe fn export_memory(&self, memory: RawMemory) -> Result<OwnedFd>;

    /// Takes the memory behind a descriptor, of which this process wants to map `len` bytes: all of
    /// it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a descriptor of anything but device memory. A backend whose driver
    /// does not tell the length finds a wrong one in [`map_memory`](GpuRanges::map_memory).
    fn import_memory(&self, device: DeviceId, fd: BorrowedFd<'_>, len: u64) -> Result<RawMemory>;

    /// Lets go of a handle. Mappings and descriptors keep the memory.
    ///
    /// # Safety
    ///
    /// `memory` was created or imported on this backend and is not yet released.
    unsafe fn release_memory(&self, memory: RawMemory) -> Result<()>;
}

/// Ranges of addresses, and physical memory on them.
///
/// # Safety
///
/// For implementors: `reserve_range` returns addresses that nothing else in the process has until
/// `release_range`, and after `map_memory` they reach the memory, read-only if so asked, until
/// `unmap_memory`.
pub unsafe trait GpuRanges {
    /// Reserves at least `len` bytes of addresses, at `at` if that is given.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when something else lies at `at`, for an address or length that cannot be
    /// had; what the driver gives when there are no addresses left.
    fn reserve_range(
        &self,
        device: DeviceId,
        len: u64,
        at: Option<DevicePtr>,
    ) -> Result<AddressRange>;

    /// Maps all of `memory` at `at`, for its device and those that reach it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for imported memory of another length than was said. Nothing is mapped
    /// then.
    ///
    /// # Safety
    ///
    /// - `memory` was created or imported on this backend and is not yet released.
    /// - The `memory.len` bytes from `at` on lie in one range that `reserve_range` gave, `at` is a
    ///   multiple of the granularity from its base, and nothing is mapped on them.
    unsafe fn map_memory(&self, at: DevicePtr, memory: RawMemory, access: Access) -> Result<()>;

    /// Unmaps what `map_memory` mapped at `at`, all of it. The addresses stay reserved.
    ///
    /// # Safety
    ///
    /// - `at` was given to `map_memory` on this backend and is not yet unmapped.
    /// - No unfinished GPU work of this process touches it, and none is queued before something is
    ///   mapped there again.
    unsafe fn unmap_memory(&self, at: DevicePtr) -> Result<()>;

    /// Gives addresses back.
    ///
    /// # Safety
    ///
    /// `range` is what `reserve_range` gave, not yet given back, and nothing is mapped on it.
    unsafe fn release_range(&self, range: AddressRange) -> Result<()>;
}

//! Memory in other processes: handles and file descriptors.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::{Access, DeviceId, DevicePtr, MemHandle, Result};
#[cfg(doc)]
use crate::{Caps, Error};

/// Sharing by 64-byte handle.
///
/// # Safety
///
/// For implementors: what a handle opens is the memory that it was made for, and stays mapped until
/// `close`.
pub unsafe trait GpuHandles {
    /// Gets the 64-byte handle of the allocation that starts at `base`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for memory that has none, with what to change.
    fn export_handle(&self, base: DevicePtr) -> Result<MemHandle>;

    /// Maps another process' allocation; the address is its base.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] when the handle's allocation is gone, or when this process exported it
    /// (CUDA's code 201).
    fn open_handle(&self, device: DeviceId, handle: &MemHandle) -> Result<DevicePtr>;

    /// Says whether a handle that was exported of `base` can be opened now.
    ///
    /// `false` while the backend exports it again, on a thread of its own, because what handed it
    /// out has gone. Ask once more then, before the handle is given to another process.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a device that is none, and the driver's.
    fn is_served(&self, base: DevicePtr) -> Result<bool>;
}

/// Sharing by file descriptor.
///
/// # Safety
///
/// For implementors: what a descriptor maps is the memory that it was made for, of the length that
/// was asked for, and stays mapped until `close`.
pub unsafe trait GpuDescriptors {
    /// Exports the allocation that starts at `base` as a file descriptor, which is closed on exec.
    /// An open descriptor keeps the memory.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for memory that was not made to be shared that way.
    fn export_fd(&self, base: DevicePtr) -> Result<OwnedFd>;

    /// Maps `len` bytes of another process' allocation from its file descriptor.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when the descriptor holds fewer than `len` bytes or is no device memory.
    fn import_fd(
        &self,
        device: DeviceId,
        fd: BorrowedFd<'_>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr>;

    /// Maps several of another process' allocations side by side, `len` bytes of each, as one: what
    /// `close` and `address_range` are told is the whole.
    ///
    /// A descriptor is asked for when the one before it is mapped, and closed once it is itself, so
    /// no more than one of them need be open at a time.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] on a device that cannot, [`Error::Invalid`] as
    /// [`import_fd`](GpuDescriptors::import_fd), for no descriptor at all, and for a length that is
    /// not a multiple of [`Caps::granularity`]; a descriptor's own `Err`.
    fn import_fds(
        &self,
        device: DeviceId,
        fds: &mut dyn ExactSizeIterator<Item = Result<OwnedFd>>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr>;

    /// Says whether an imported descriptor can be mapped read-only.
    fn maps_read_only(&self, device: DeviceId) -> Result<bool>;

    /// Makes, of a descriptor that [`export_fd`](GpuDescriptors::export_fd) or
    /// [`GpuStore::export_memory`](crate::GpuStore::export_memory) gave, one of the same memory that
    /// the kernel lets its holder map read-only alone; `None` where descriptors have no such form.
    /// There the importer is trusted to ask for [`Access::ReadOnly`].
    ///
    /// # Errors
    ///
    /// What the kernel refuses.
    fn read_only_fd(&self, device: DeviceId, fd: BorrowedFd<'_>) -> Result<Option<OwnedFd>> {
        let _ = (device, fd);
        Ok(None)
    }
}

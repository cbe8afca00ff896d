//! Memory of devices, and of the host for them.

#[cfg(doc)]
use crate::Error;
use crate::{
    AddressRange, Allocation, DeviceId, DevicePtr, HostMemory, HostPtr, PointerInfo, Result,
    Sharing,
};

/// Device memory: where it comes from, and how it goes back.
///
/// # Safety
///
/// For implementors: `alloc` returns memory that overlaps nothing that is not yet freed.
pub unsafe trait GpuMemory {
    /// Allocates at least `len` bytes of device memory that can be shared the way `sharing` says.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] when there is no room, [`Error::Unsupported`] when the device cannot
    /// share that way, [`Error::Invalid`] for a length of zero.
    fn alloc(&self, device: DeviceId, len: u64, sharing: Sharing) -> Result<Allocation>;

    /// Returns an allocation to the driver. May block.
    ///
    /// # Safety
    ///
    /// - `base` came from `alloc` or [`alloc_managed`](crate::GpuManaged::alloc_managed) on this
    ///   backend and is not yet freed.
    /// - No unfinished GPU work of any process touches it, and none is queued later.
    /// - No process has its handle open (for file descriptors the driver itself keeps the memory
    ///   until the last mapping is gone).
    unsafe fn free(&self, base: DevicePtr) -> Result<()>;

    /// Unmaps what `open_handle`, `import_fd` or `import_fds` mapped. May block.
    ///
    /// # Safety
    ///
    /// - `base` came from one of those three on this backend and is not yet closed.
    /// - No unfinished GPU work of this process touches it, and none is queued later.
    unsafe fn close(&self, base: DevicePtr) -> Result<()>;
}

/// What an address is.
///
/// # Safety
///
/// For implementors: the answer about an address is true of the memory at it.
pub unsafe trait GpuPointers {
    /// Finds the allocation that an address lies in.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an address in no allocation that the driver knows.
    fn address_range(&self, ptr: DevicePtr) -> Result<AddressRange>;

    /// Says where an address comes from and how it can be shared. An unknown address is an answer,
    /// not an error.
    fn classify(&self, ptr: DevicePtr) -> Result<PointerInfo>;
}

/// Host memory that devices reach.
///
/// # Safety
///
/// For implementors: `host_alloc` returns memory that overlaps nothing that is not yet freed.
pub unsafe trait GpuHostMemory {
    /// Allocates host memory, aligned to at least 64 bytes and zeroed.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the kernel has none, or cannot bind it to the node that was asked
    /// for.
    fn host_alloc(&self, device: DeviceId, len: usize, memory: HostMemory) -> Result<HostPtr>;

    /// Returns host memory. May block.
    ///
    /// # Safety
    ///
    /// - `ptr` came from `host_alloc` on this backend and is not yet freed.
    /// - Nothing, the device included, touches it any more.
    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()>;
}

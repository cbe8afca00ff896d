//! The driver's own pools, whose memory comes and goes in a stream's order.
//!
//! ```text
//! create_pool ─► pool_alloc on a stream ─► work on that stream ─► pool_free on a stream ─► destroy_pool
//! ```
//!
//! Such memory has no handle and no descriptor, so it cannot be shared with another process.

#[cfg(doc)]
use crate::Error;
use crate::{Allocation, DeviceId, DevicePtr, RawStream, Result};

/// A pool of the driver's (`CUmemoryPool`, `hipMemPool_t`), of this process only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawPool {
    /// The device that its memory lies on.
    pub device: DeviceId,
    /// The driver's handle, as a number.
    pub handle: u64,
}

/// What a pool holds, in bytes, as the driver counts them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolUsage {
    /// Taken from the device.
    pub reserved: u64,
    /// The most of that at any time.
    pub most_reserved: u64,
    /// Handed out, and given back by work that has not run yet.
    pub used: u64,
}

/// Pools of the driver's.
///
/// # Safety
///
/// For implementors: `pool_alloc` returns memory that overlaps nothing that is
/// not yet freed. Memory of a pool is handed out again only where the work that was queued before
/// its free has finished, or comes first in the order of the stream that it is handed out on.
pub unsafe trait GpuPools {
    /// Makes a pool. While it has more than `keep` bytes of the device, it gives back what nobody
    /// uses, whenever a stream, an event or the device is synchronised. No allocation of it waits
    /// for another stream's work.
    fn create_pool(&self, device: DeviceId, keep: u64) -> Result<RawPool>;

    /// Ends a pool. Memory of it that is not yet freed stays until it is; then it goes back to the
    /// device.
    ///
    /// # Safety
    ///
    /// `pool` was created on this backend and is not yet destroyed.
    unsafe fn destroy_pool(&self, pool: RawPool) -> Result<()>;

    /// Allocates at least `len` bytes, aligned to 256, for work that is queued on `stream` from
    /// here on. Work of other streams has to be ordered after this call first, such as by an event.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] when there is no room, [`Error::Invalid`] for a length of zero, and
    /// [`Error::Capturing`] for a stream that is being captured: the graph would own the memory.
    ///
    /// # Safety
    ///
    /// - `pool` was created on this backend and is not yet destroyed.
    /// - `stream` is alive and of the pool's device.
    unsafe fn pool_alloc(&self, pool: RawPool, stream: RawStream, len: u64) -> Result<Allocation>;

    /// Gives memory back once the work that is queued on `stream` has finished. Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`] for a stream that is being captured; the memory stays then.
    ///
    /// # Safety
    ///
    /// - `base` came from `pool_alloc` on this backend and is not yet freed.
    /// - `stream` is alive and of its device.
    /// - All work that touches the memory is queued on `stream`, or ordered before it, or has
    ///   finished.
    unsafe fn pool_free(&self, stream: RawStream, base: DevicePtr) -> Result<()>;

    /// Asks the driver what a pool holds.
    ///
    /// # Safety
    ///
    /// As [`destroy_pool`](GpuPools::destroy_pool).
    unsafe fn pool_usage(&self, pool: RawPool) -> Result<PoolUsage>;

    /// Gives memory that nobody uses back to the device, until the pool has no more than `keep`
    /// bytes. May block.
    ///
    /// # Safety
    ///
    /// As [`destroy_pool`](GpuPools::destroy_pool).
    unsafe fn trim_pool(&self, pool: RawPool, keep: u64) -> Result<()>;
}

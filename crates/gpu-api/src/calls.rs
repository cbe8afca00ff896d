//! The calls of groups that a device may lack, for a caller with a `dyn GpuBackend`: each asks the
//! accessor, and says what the device lacks.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::backend::{GpuBackend, GpuDescriptors, GpuHandles, Group};
#[cfg(doc)]
use crate::backend::{GpuCaptures, GpuEventHandles, GpuHostFunctions, GpuManaged, GpuPeers};
use crate::{
    Access, AddressRange, Allocation, CaptureStatus, DeviceId, DevicePtr, EventHandle, GpuPools,
    GpuRanges, GpuStore, MemHandle, PoolUsage, RawEvent, RawMemory, RawPool, RawStream, Result,
    StreamOp,
};

/// The calls of groups that a device may lack: each fails with what the backend says of that, and
/// else as its trait's.
impl dyn GpuBackend + '_ {
    /// Returns the calls of a group that `device` has.
    fn need<T>(&self, found: Option<T>, group: Group, device: DeviceId) -> Result<T> {
        found.ok_or_else(|| self.lacks(group, device))
    }

    /// Returns the calls of a group that any device has: for what some device of the backend made.
    fn any<T>(&self, group: Group, find: impl Fn(DeviceId) -> Option<T>) -> Result<T> {
        let count = self.device_count()?;
        let found = (0..count).map(DeviceId).find_map(find);
        self.need(found, group, DeviceId(0))
    }

    /// Returns the calls that share by handle.
    pub fn handles_of(&self, device: DeviceId) -> Result<&dyn GpuHandles> {
        self.need(self.handles(device), Group::Handles, device)
    }

    /// Returns the calls that share by file descriptor.
    pub fn descriptors_of(&self, device: DeviceId) -> Result<&dyn GpuDescriptors> {
        self.need(self.descriptors(device), Group::Descriptors, device)
    }

    /// Returns the calls about physical memory.
    pub fn store_of(&self, device: DeviceId) -> Result<&dyn GpuStore> {
        self.need(self.store(device), Group::Store, device)
    }

    /// Returns the calls about ranges of addresses.
    pub fn ranges_of(&self, device: DeviceId) -> Result<&dyn GpuRanges> {
        self.need(self.ranges(device), Group::Ranges, device)
    }

    /// Returns the calls about the driver's pools.
    pub fn pools_of(&self, device: DeviceId) -> Result<&dyn GpuPools> {
        self.need(self.pools(device), Group::Pools, device)
    }

    /// [`GpuHandles::export_handle`].
    pub fn export_handle(&self, base: DevicePtr) -> Result<MemHandle> {
        self.any(Group::Handles, |device| self.handles(device))?
            .export_handle(base)
    }

    /// [`GpuHandles::is_served`].
    pub fn is_served(&self, base: DevicePtr) -> Result<bool> {
        self.any(Group::Handles, |device| self.handles(device))?
            .is_served(base)
    }

    /// [`GpuHandles::open_handle`].
    pub fn open_handle(&self, device: DeviceId, handle: &MemHandle) -> Result<DevicePtr> {
        self.handles_of(device)?.open_handle(device, handle)
    }

    /// [`GpuDescriptors::export_fd`].
    pub fn export_fd(&self, base: DevicePtr) -> Result<OwnedFd> {
        self.any(Group::Descriptors, |device| self.descriptors(device))?
            .export_fd(base)
    }

    /// [`GpuDescriptors::import_fd`].
    pub fn import_fd(
        &self,
        device: DeviceId,
        fd: BorrowedFd<'_>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        self.descriptors_of(device)?
            .import_fd(device, fd, len, access)
    }

    /// [`GpuDescriptors::import_fds`].
    pub fn import_fds(
        &self,
        device: DeviceId,
        fds: &mut dyn ExactSizeIterator<Item = Result<OwnedFd>>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        self.descriptors_of(device)?
            .import_fds(device, fds, len, access)
    }

    /// [`GpuDescriptors::maps_read_only`].
    pub fn maps_read_only(&self, device: DeviceId) -> Result<bool> {
        self.descriptors_of(device)?.maps_read_only(device)
    }

    /// [`GpuDescriptors::read_only_fd`].
    pub fn read_only_fd(&self, device: DeviceId, fd: BorrowedFd<'_>) -> Result<Option<OwnedFd>> {
        self.descriptors_of(device)?.read_only_fd(device, fd)
    }

    /// [`GpuEventHandles::event_handle`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn event_handle(&self, event: RawEvent) -> Result<EventHandle> {
        let calls = self.any(Group::EventHandles, |device| self.event_handles(device))?;
        // SAFETY: `event_handle` asks for what our caller vouches for.
        unsafe { calls.event_handle(event) }
    }

    /// [`GpuEventHandles::open_event`].
    pub fn open_event(&self, device: DeviceId, handle: &EventHandle) -> Result<RawEvent> {
        self.need(self.event_handles(device), Group::EventHandles, device)?
            .open_event(device, handle)
    }

    /// [`GpuStore::create_memory`].
    pub fn create_memory(&self, device: DeviceId, len: u64) -> Result<RawMemory> {
        self.store_of(device)?.create_memory(device, len)
    }

    /// [`GpuStore::export_memory`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn export_memory(&self, memory: RawMemory) -> Result<OwnedFd> {
        let calls = self.store_of(memory.device)?;
        // SAFETY: `export_memory` asks for what our caller vouches for.
        unsafe { calls.export_memory(memory) }
    }

    /// [`GpuStore::import_memory`].
    pub fn import_memory(
        &self,
        device: DeviceId,
        fd: BorrowedFd<'_>,
        len: u64,
    ) -> Result<RawMemory> {
        self.store_of(device)?.import_memory(device, fd, len)
    }

    /// [`GpuStore::release_memory`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn release_memory(&self, memory: RawMemory) -> Result<()> {
        let calls = self.store_of(memory.device)?;
        // SAFETY: `release_memory` asks for what our caller vouches for.
        unsafe { calls.release_memory(memory) }
    }

    /// [`GpuRanges::reserve_range`].
    pub fn reserve_range(
        &self,
        device: DeviceId,
        len: u64,
        at: Option<DevicePtr>,
    ) -> Result<AddressRange> {
        self.ranges_of(device)?.reserve_range(device, len, at)
    }

    /// [`GpuRanges::map_memory`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn map_memory(
        &self,
        at: DevicePtr,
        memory: RawMemory,
        access: Access,
    ) -> Result<()> {
        let calls = self.ranges_of(memory.device)?;
        // SAFETY: `map_memory` asks for what our caller vouches for.
        unsafe { calls.map_memory(at, memory, access) }
    }

    /// [`GpuRanges::unmap_memory`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn unmap_memory(&self, at: DevicePtr) -> Result<()> {
        let calls = self.any(Group::Ranges, |device| self.ranges(device))?;
        // SAFETY: `unmap_memory` asks for what our caller vouches for.
        unsafe { calls.unmap_memory(at) }
    }

    /// [`GpuRanges::release_range`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn release_range(&self, range: AddressRange) -> Result<()> {
        let calls = self.any(Group::Ranges, |device| self.ranges(device))?;
        // SAFETY: `release_range` asks for what our caller vouches for.
        unsafe { calls.release_range(range) }
    }

    /// [`GpuPools::create_pool`].
    pub fn create_pool(&self, device: DeviceId, keep: u64) -> Result<RawPool> {
        self.pools_of(device)?.create_pool(device, keep)
    }

    /// [`GpuPools::destroy_pool`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn destroy_pool(&self, pool: RawPool) -> Result<()> {
        let calls = self.pools_of(pool.device)?;
        // SAFETY: `destroy_pool` asks for what our caller vouches for.
        unsafe { calls.destroy_pool(pool) }
    }

    /// [`GpuPools::pool_alloc`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn pool_alloc(
        &self,
        pool: RawPool,
        stream: RawStream,
        len: u64,
    ) -> Result<Allocation> {
        let calls = self.pools_of(pool.device)?;
        // SAFETY: `pool_alloc` asks for what our caller vouches for.
        unsafe { calls.pool_alloc(pool, stream, len) }
    }

    /// [`GpuPools::pool_free`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn pool_free(&self, stream: RawStream, base: DevicePtr) -> Result<()> {
        let calls = self.pools_of(stream.device)?;
        // SAFETY: `pool_free` asks for what our caller vouches for.
        unsafe { calls.pool_free(stream, base) }
    }

    /// [`GpuPools::pool_usage`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn pool_usage(&self, pool: RawPool) -> Result<PoolUsage> {
        let calls = self.pools_of(pool.device)?;
        // SAFETY: `pool_usage` asks for what our caller vouches for.
        unsafe { calls.pool_usage(pool) }
    }

    /// [`GpuPools::trim_pool`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn trim_pool(&self, pool: RawPool, keep: u64) -> Result<()> {
        let calls = self.pools_of(pool.device)?;
        // SAFETY: `trim_pool` asks for what our caller vouches for.
        unsafe { calls.trim_pool(pool, keep) }
    }

    /// [`GpuManaged::alloc_managed`].
    pub fn alloc_managed(&self, device: DeviceId, len: u64) -> Result<Allocation> {
        self.need(self.managed(device), Group::Managed, device)?
            .alloc_managed(device, len)
    }

    /// [`GpuPeers::enable_peer_access`].
    pub fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        self.need(self.peers(device), Group::Peers, device)?
            .enable_peer_access(device, peer)
    }

    /// [`GpuHostFunctions::host_function`].
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn host_function(
        &self,
        stream: RawStream,
        function: Box<dyn FnOnce() + Send>,
    ) -> Result<()> {
        let found = self.host_functions(stream.device);
        let calls = self.need(found, Group::HostFunctions, stream.device)?;
        // SAFETY: `host_function` asks for what our caller vouches for.
        unsafe { calls.host_function(stream, function) }
    }

    /// [`GpuCaptures::capture_status`]; a stream that cannot be captured is not.
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        match self.captures(stream.device) {
            // SAFETY: `capture_status` asks for what our caller vouches for.
            Some(calls) => unsafe { calls.capture_status(stream) },
            None => Ok(CaptureStatus::None),
        }
    }

    /// [`GpuCaptures::batch_uncaptured`]; a plain batch on a stream that cannot be captured.
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn batch_uncaptured(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        match self.captures(stream.device) {
            // SAFETY: `batch_uncaptured` asks for what our caller vouches for.
            Some(calls) => unsafe { calls.batch_uncaptured(stream, ops) },
            // SAFETY: `stream_batch` asks for what our caller vouches for.
            None => unsafe { self.stream_batch(stream, ops) },
        }
    }

    /// [`GpuCaptures::batch_behind`]; without a look at captures on streams that have none.
    ///
    /// # Safety
    ///
    /// As there.
    pub unsafe fn batch_behind(
        &self,
        stream: RawStream,
        others: &[(RawEvent, RawStream)],
        ops: &[StreamOp],
    ) -> Result<()> {
        if let Some(calls) = self.captures(stream.device) {
            // SAFETY: `batch_behind` asks for what our caller vouches for.
            return unsafe { calls.batch_behind(stream, others, ops) };
        }
        for &(event, other) in others {
            // SAFETY: `record_event` asks for both alive and of one device: our caller vouches.
            unsafe { self.record_event(event, other) }?;
            // SAFETY: `stream_wait_event` asks for both alive: as above.
            unsafe { self.stream_wait_event(stream, event) }?;
        }
        // SAFETY: `stream_batch` asks for what our caller vouches for.
        unsafe { self.stream_batch(stream, ops) }
    }
}

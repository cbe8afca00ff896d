//! The backend itself: the trait, method by method, over the modules that do the work.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, RwLock};

use cudarc::driver::sys::is_culib_present;
use gpu_api::{
    Access, AddressRange, Allocation, BackendKind, Caps, CaptureStatus, DeviceId, DeviceInfo, DevicePtr, EventHandle,
    EventKind, ForkGuard, GpuBackend, HostMemory, HostPtr, MemHandle, MemoryInfo, PointerInfo, RawEvent, RawStream,
    Result, Sharing, StreamInfo, StreamOp, WordPtr,
};

use crate::device::Driver;
use crate::error;
use crate::event::Events;
use crate::host::Hosts;
use crate::memory::{Memory, Origin, Way};
use crate::peer::Reach;
use crate::stream::Streams;
use crate::sys::Symbols;
use crate::word::Registrations;

/// NVIDIA's driver, loaded at run time.
///
/// Each device's primary context is retained when something first needs it, so memory, streams and events are the
/// same ones that the CUDA runtime, PyTorch and cudarc see. Dropped, the backend gives the contexts back if nothing
/// that was made in them is left; else they stay until the process ends.
///
/// # Portability
///
/// - `import_fd` maps all of the memory behind a descriptor or nothing: its length must be what `alloc` gave, or any
///   other that rounds up to that.
/// - A driver before CUDA 12.0 does not number streams; only streams of this backend have an identity there.
/// - `Caps::shared_context` is `true` also where an MPS daemon's control file is found but its device says nothing.
#[derive(Debug)]
pub struct CudaBackend {
    pub(crate) driver: Driver,
    pub(crate) memory: Memory,
    pub(crate) hosts: Hosts,
    pub(crate) events: Events,
    pub(crate) streams: Streams,
    pub(crate) registrations: Registrations,
    pub(crate) peers: RwLock<Vec<Reach>>,
    /// A forked child must not call the driver.
    fork: ForkGuard,
}

impl CudaBackend {
    /// Loads the driver and starts it.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](gpu_api::Error::Unavailable) with what is missing and what to do about it: no library,
    /// the toolkit's stub of it, no device, a module and a library of different versions.
    ///
    /// # Examples
    ///
    /// ```
    /// use backend_cuda::CudaBackend;
    /// use gpu_api::{Error, GpuBackend};
    ///
    /// match CudaBackend::load() {
    ///     Ok(cuda) => println!("{} devices", cuda.device_count()?),
    ///     Err(Error::Unavailable { why, remedy, .. }) => println!("no CUDA here: {why}; {remedy}"),
    ///     Err(other) => return Err(other),
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    pub fn load() -> Result<Arc<CudaBackend>> {
        let fork = ForkGuard::new()?;
        // SAFETY: `is_culib_present` runs the initialisers of the libraries that it tries: the driver's have no
        // conditions.
        if !unsafe { is_culib_present() } {
            return Err(error::no_library());
        }
        // SAFETY: `Symbols::load` asks that the library can be loaded: it just was.
        let symbols = unsafe { Symbols::load() };
        Ok(Arc::new(CudaBackend {
            driver: Driver::start(symbols)?,
            memory: Memory::default(),
            hosts: Hosts::default(),
            events: Events::default(),
            streams: Streams::default(),
            registrations: Registrations::default(),
            peers: RwLock::default(),
            fork,
        }))
    }

    /// Returns the version of CUDA that the driver speaks, as it writes it: 13000 is 13.0.
    pub fn driver_version(&self) -> u32 {
        self.driver.version()
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // First of all: in a forked child another thread of the parent's may hold a table's lock for good.
        if self.fork.is_child() {
            return;
        }
        let nothing_left = self.memory.is_empty()
            && self.hosts.is_empty()
            && self.events.is_empty()
            && self.streams.is_empty()
            && self.registrations.is_empty();
        if nothing_left {
            // SAFETY: `Driver::release` asks that nothing made in the contexts be left, and that nobody call
            // afterwards: the tables are empty, and this is the last that anybody does with `self`.
            unsafe { self.driver.release() };
        }
    }
}

// SAFETY: the three conditions of `GpuBackend`:
// - `alloc` hands on what `cuMemAlloc`, or `cuMemAddressReserve` and `cuMemMap`, gave; the driver gives no address twice.
// - `query_event` and `query_stream` say `true` on success only, which the manual gives to work that has completed.
// - `stream_batch` writes with the barrier that the manual describes as the default: after all work before it.
unsafe impl GpuBackend for CudaBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Cuda
    }

    fn device_count(&self) -> Result<u32> {
        Ok(self.driver.count() as u32)
    }

    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo> {
        self.driver.info(device)
    }

    fn pci_address(&self, device: DeviceId) -> Result<Option<String>> {
        self.driver.pci_address(device)
    }

    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        self.driver.memory(device)
    }

    fn caps(&self, device: DeviceId) -> Result<Caps> {
        self.driver.caps(device)
    }

    fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        self.enable_peer(device, peer)
    }

    fn device_files(&self) -> &[&'static str] {
        &["/dev/nvidia"]
    }

    fn alloc(&self, device: DeviceId, len: u64, sharing: Sharing) -> Result<Allocation> {
        match sharing {
            Sharing::Handle => self.alloc_plain(device, len),
            Sharing::Fd => self.alloc_virtual(device, len),
            _ => Err(self.unsupported("memory that is shared in that way")),
        }
    }

    unsafe fn free(&self, base: DevicePtr) -> Result<()> {
        let entry = self.memory.take(base, Way::Free)?;
        let result = match entry.origin {
            // SAFETY: `free_plain` asks for a base out of the table that nothing touches: our caller vouches for it.
            Origin::Plain => unsafe { self.free_plain(base, entry.device) },
            // SAFETY: `unmap_virtual` asks for an entry out of the table that nothing touches: our caller vouches.
            _ => unsafe { self.unmap_virtual(base, &entry) },
        };
        if result.is_err() {
            self.memory.leak(base, entry);
        }
        result
    }

    fn address_range(&self, ptr: DevicePtr) -> Result<AddressRange> {
        self.range_of(ptr)
    }

    fn classify(&self, ptr: DevicePtr) -> Result<PointerInfo> {
        self.kind_of(ptr)
    }

    fn host_alloc(&self, device: DeviceId, len: usize, memory: HostMemory) -> Result<HostPtr> {
        self.host_allocate(device, len, memory)
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: `host_release` asks that nothing touch the memory: our caller vouches for it.
        unsafe { self.host_release(ptr) }
    }

    fn export_handle(&self, base: DevicePtr) -> Result<MemHandle> {
        self.export_plain(base)
    }

    fn open_handle(&self, device: DeviceId, handle: &MemHandle) -> Result<DevicePtr> {
        self.open_plain(device, handle)
    }

    fn export_fd(&self, base: DevicePtr) -> Result<OwnedFd> {
        self.export_virtual(base)
    }

    fn import_fd(&self, device: DeviceId, fd: BorrowedFd<'_>, len: u64, access: Access) -> Result<DevicePtr> {
        self.import_virtual(device, fd, len, access)
    }

    fn import_fds(
        &self,
        device: DeviceId,
        fds: &mut dyn ExactSizeIterator<Item = Result<OwnedFd>>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        self.import_several(device, fds, len, access)
    }

    unsafe fn close(&self, base: DevicePtr) -> Result<()> {
        let entry = self.memory.take(base, Way::Close)?;
        let result = match entry.origin {
            // SAFETY: `close_plain` asks for a base out of the table that nothing touches: our caller vouches for it.
            Origin::Opened { .. } => unsafe { self.close_plain(base, entry.device) },
            // SAFETY: `unmap_virtual` asks for an entry out of the table that nothing touches: our caller vouches.
            _ => unsafe { self.unmap_virtual(base, &entry) },
        };
        if result.is_err() {
            self.memory.leak(base, entry);
        }
        result
    }

    fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent> {
        self.event_create(device, kind)
    }

    unsafe fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        // SAFETY: `event_record` has our conditions.
        unsafe { self.event_record(event, stream) }
    }

    unsafe fn query_event(&self, event: RawEvent) -> Result<bool> {
        // SAFETY: `event_query` has our condition.
        unsafe { self.event_query(event) }
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        // SAFETY: `event_await` has our conditions.
        unsafe { self.event_await(stream, event) }
    }

    unsafe fn event_handle(&self, event: RawEvent) -> Result<EventHandle> {
        // SAFETY: `event_export` has our condition.
        unsafe { self.event_export(event) }
    }

    fn open_event(&self, device: DeviceId, handle: &EventHandle) -> Result<RawEvent> {
        self.event_open(device, handle)
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
        // SAFETY: `event_destroy` has our conditions.
        unsafe { self.event_destroy(event) }
    }

    fn create_stream(&self, device: DeviceId) -> Result<RawStream> {
        self.stream_create(device)
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        // SAFETY: `stream_destroy` has our conditions.
        unsafe { self.stream_destroy(stream) }
    }

    unsafe fn query_stream(&self, stream: RawStream) -> Result<bool> {
        // SAFETY: `stream_query` has our condition.
        unsafe { self.stream_query(stream) }
    }

    unsafe fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        // SAFETY: `stream_synchronize` has our condition.
        unsafe { self.stream_synchronize(stream) }
    }

    unsafe fn stream_info(&self, stream: RawStream) -> Result<StreamInfo> {
        // SAFETY: `stream_describe` has our condition.
        unsafe { self.stream_describe(stream) }
    }

    unsafe fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        // SAFETY: `stream_capture` has our condition.
        unsafe { self.stream_capture(stream) }
    }

    unsafe fn host_function(&self, stream: RawStream, function: Box<dyn FnOnce() + Send>) -> Result<()> {
        // SAFETY: `stream_host_function` has our conditions.
        unsafe { self.stream_host_function(stream, function) }
    }

    unsafe fn register_words(&self, start: HostPtr, len: usize) -> Result<WordPtr> {
        // SAFETY: `words_register` has our condition.
        unsafe { self.words_register(start, len) }
    }

    unsafe fn unregister_words(&self, start: HostPtr) -> Result<()> {
        // SAFETY: `words_unregister` has our conditions.
        unsafe { self.words_unregister(start) }
    }

    unsafe fn stream_batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: `words_batch` has our conditions.
        unsafe { self.words_batch(stream, ops, false) }
    }

    unsafe fn batch_uncaptured(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: `words_batch` has our conditions.
        unsafe { self.words_batch(stream, ops, true) }
    }

    unsafe fn batch_behind(&self, stream: RawStream, others: &[(RawEvent, RawStream)], ops: &[StreamOp]) -> Result<()> {
        // SAFETY: `words_behind` has our conditions.
        unsafe { self.words_behind(stream, others, ops) }
    }

    unsafe fn copy_to_device(&self, stream: RawStream, to: DevicePtr, from: *const u8, len: usize) -> Result<()> {
        // SAFETY: `copy_in` has our conditions.
        unsafe { self.copy_in(stream, to, from, len) }
    }

    unsafe fn copy_to_host(&self, stream: RawStream, to: *mut u8, from: DevicePtr, len: usize) -> Result<()> {
        // SAFETY: `copy_out` has our conditions.
        unsafe { self.copy_out(stream, to, from, len) }
    }

    unsafe fn copy(&self, stream: RawStream, to: DevicePtr, from: DevicePtr, len: u64) -> Result<()> {
        // SAFETY: `copy_within` has our conditions.
        unsafe { self.copy_within(stream, to, from, len) }
    }

    unsafe fn fill(&self, stream: RawStream, to: DevicePtr, byte: u8, len: u64) -> Result<()> {
        // SAFETY: `fill_with` has our conditions.
        unsafe { self.fill_with(stream, to, byte, len) }
    }
}

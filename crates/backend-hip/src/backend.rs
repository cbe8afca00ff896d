//! The backend itself: the trait, method by method, over the modules that do the work.

use std::mem::ManuallyDrop;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, RwLock};

use gpu_api::{
    Access, AddressRange, Allocation, BackendKind, Caps, CaptureStatus, DeviceId, DeviceInfo, DevicePtr, Error,
    EventHandle, EventKind, GpuBackend, GpuRanges, GpuStore, HostMemory, HostPtr, MemHandle, MemoryInfo, PointerInfo,
    RawEvent, RawStream, Result, Sharing, StreamInfo, StreamOp, WordPtr,
};

use crate::device::{self, Descriptor, Driver};
use crate::event::Events;
use crate::host::Hosts;
use crate::library;
use crate::memory::{Memory, Origin};
use crate::peer::Reach;
use crate::proof::{Proof, Step};
use crate::stream::Streams;
use crate::sys::{Symbols, Version};
use crate::vmm;
use crate::word::Registrations;

/// What a runtime says of itself, which needs no device.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Inspection {
    /// Its version.
    pub version: Version,
    /// The functions that it lacks, of those that this backend would call.
    pub missing: Vec<&'static str>,
}

/// AMD's runtime, loaded at run time.
///
/// Beyond plain memory with 64-byte handles, waits on the host and functions that streams call, it does only what a
/// [`Proof`] says was seen to work: see [`probe`](crate::probe).
///
/// # Portability
///
/// - Only streams of this backend and adopted ones have an identity where the runtime does not number streams.
/// - `classify` offers no memory for sharing that this backend did not allocate or adopt: the runtime does not tell
///   which of it can be exported.
/// - `export_handle` asks the runtime once for each allocation, and gives the same bytes again afterwards.
/// - A stream's wait compares words as unsigned numbers on some runtimes, which is the same as the trait's comparison
///   as long as word and value are below 2^63.
/// - A batch of operations on words is queued one by one: after an error its beginning may be queued.
/// - `close` of a handle waits for all work of the device, whichever stream it is on.
#[derive(Debug)]
pub struct HipBackend {
    pub(crate) driver: Driver,
    pub(crate) memory: Memory,
    pub(crate) hosts: Hosts,
    pub(crate) events: Events,
    pub(crate) streams: Streams,
    pub(crate) registrations: Registrations,
    pub(crate) peers: RwLock<Vec<Reach>>,
}

impl HipBackend {
    /// Loads the runtime and starts it, with the proof that [`PROOF`](crate::PROOF) holds.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] with what is missing and what to do about it: no library, a
    /// library that is not AMD's, no device. [`Error::Invalid`] when the variable holds what is
    /// no proof.
    ///
    /// # Examples
    ///
    /// ```
    /// use backend_hip::HipBackend;
    /// use gpu_api::{Error, GpuBackend};
    ///
    /// match HipBackend::load() {
    ///     Ok(hip) => println!("HIP {}: {} devices", hip.version(), hip.device_count()?),
    ///     Err(Error::Unavailable { why, remedy, .. }) => println!("no HIP here: {why}; {remedy}"),
    ///     Err(other) => return Err(other),
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    pub fn load() -> Result<Arc<HipBackend>> {
        let proof = Proof::from_env()?;
        HipBackend::start(|version| proof.filter(|proof| proof.is_of(version)))
    }

    /// Loads the runtime and starts it, with a proof, or with none.
    ///
    /// # Errors
    ///
    /// As [`load`](HipBackend::load), and [`Error::Mismatch`] for a proof of another runtime or
    /// kernel.
    pub fn load_with(proof: Option<Proof>) -> Result<Arc<HipBackend>> {
        let hip = HipBackend::start(|version| proof.clone().filter(|proof| proof.is_of(version)))?;
        match (&proof, hip.proof()) {
            (Some(given), None) => Err(Error::Mismatch {
                what: "the proof",
                theirs: given.to_string(),
                ours: Proof::new(hip.version(), []).to_string(),
                remedy: "run the probe again (`gpu-ipc doctor`)",
            }),
            _ => Ok(hip),
        }
    }

    /// Loads the runtime and takes some steps for proved: for the probe, which is to find out.
    pub(crate) fn load_assuming(steps: &[Step]) -> Result<Arc<HipBackend>> {
        HipBackend::start(|version| Some(Proof::new(version, steps.iter().copied())))
    }

    /// Loads the runtime and asks what it is, without starting it.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] without a library, or with one that is not AMD's.
    ///
    /// # Examples
    ///
    /// ```
    /// match backend_hip::HipBackend::inspect() {
    ///     Ok(found) => println!("HIP {}, without {:?}", found.version, found.missing),
    ///     Err(error) => println!("{error}"),
    /// }
    /// ```
    pub fn inspect() -> Result<Inspection> {
        let symbols = HipBackend::symbols()?;
        Ok(Inspection { version: device::version(&symbols)?, missing: symbols.missing() })
    }

    fn symbols() -> Result<Symbols> {
        // Never unloaded: the runtime has threads of its own, and its functions and names are used until the end.
        let library = ManuallyDrop::new(library::load()?);
        // SAFETY: `Symbols::find` asks for a HIP runtime, which the library's name says it is, that stays loaded.
        Ok(unsafe { Symbols::find(&library) })
    }

    fn start(choose: impl FnOnce(Version) -> Option<Proof>) -> Result<Arc<HipBackend>> {
        let symbols = HipBackend::symbols()?;
        Ok(Arc::new(HipBackend {
            driver: Driver::start(symbols, choose)?,
            memory: Memory::default(),
            hosts: Hosts::default(),
            events: Events::default(),
            streams: Streams::default(),
            registrations: Registrations::default(),
            peers: RwLock::default(),
        }))
    }

    /// Returns the runtime's version.
    pub fn version(&self) -> Version {
        self.driver.version()
    }

    /// Returns the proof that is in force: `None` without one, or with one of another runtime or kernel.
    pub fn proof(&self) -> Option<&Proof> {
        self.driver.proof()
    }

    /// Lists the functions that the runtime lacks, of those that this backend would call.
    pub fn missing_functions(&self) -> Vec<&'static str> {
        self.driver.symbols.missing()
    }
}

// SAFETY: `GpuStore`: it gives none until its virtual memory is proved to hold.
unsafe impl GpuStore for HipBackend {}
// SAFETY: `GpuRanges`: it gives none, as above.
unsafe impl GpuRanges for HipBackend {}

// SAFETY: the three conditions of `GpuBackend`:
// - `alloc` hands on what `hipMalloc`, or `hipMemAddressReserve` and `hipMemMap`, gave; the runtime gives no address
//   twice.
// - `query_event` and `query_stream` say `true` on success only, which the manual gives to work that has completed.
// - `stream_batch` writes by `hipStreamWriteValue64`, which the manual puts after all work queued before, and only where
//   a probe saw it there.
unsafe impl GpuBackend for HipBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Hip
    }

    fn device_count(&self) -> Result<u32> {
        Ok(self.driver.count() as u32)
    }

    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo> {
        self.driver.info(device)
    }

    fn pci_address(&self, device: DeviceId) -> Result<Option<String>> {
        self.driver.place(self.driver.ordinal(device)?).map(Some)
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
        self.driver.device_files()
    }

    fn alloc(&self, device: DeviceId, len: u64, sharing: Sharing) -> Result<Allocation> {
        match sharing {
            Sharing::Handle => self.alloc_plain(device, len, Origin::Plain),
            Sharing::Fd => match self.driver.descriptor(device)? {
                Some(Descriptor::Vmm) => self.alloc_virtual(device, len),
                Some(Descriptor::DmaBuf) => self.alloc_plain(device, len, Origin::DmaBuf),
                None => Err(vmm::no_descriptors()),
            },
            _ => Err(self.unsupported("memory that is shared in that way")),
        }
    }

    unsafe fn free(&self, base: DevicePtr) -> Result<()> {
        let entry = self.memory.take(base, true)?;
        let result = match entry.origin {
            // SAFETY: `unmap_virtual` asks for an entry out of the table that nothing touches: our caller vouches.
            Origin::Virtual { handle } => unsafe { self.unmap_virtual(base, &entry, handle) },
            // SAFETY: `free_plain` asks for a base out of the table that nothing touches: our caller vouches for it.
            _ => unsafe { self.free_plain(base, entry.device) },
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
        let found = self.memory.find(base).filter(|(range, entry)| range.base == base && !entry.leaked);
        match found.map(|(_, entry)| (entry, entry.origin)) {
            Some((entry, Origin::Virtual { handle })) => self.export_virtual(base, &entry, handle),
            Some((entry, Origin::DmaBuf)) => self.export_dma_buf(base, &entry),
            _ => Err(self.refusal(base, "a file descriptor of this memory")),
        }
    }

    fn import_fd(&self, device: DeviceId, fd: BorrowedFd<'_>, len: u64, access: Access) -> Result<DevicePtr> {
        match self.driver.descriptor(device)? {
            Some(Descriptor::Vmm) => self.import_virtual(device, fd, len, access),
            Some(Descriptor::DmaBuf) => self.import_dma_buf(device, fd, len, access),
            None => Err(vmm::no_descriptors()),
        }
    }

    unsafe fn close(&self, base: DevicePtr) -> Result<()> {
        let entry = self.memory.take(base, false)?;
        let result = match entry.origin {
            // SAFETY: `unmap_virtual` asks for an entry out of the table that nothing touches: our caller vouches.
            Origin::Imported { handle, .. } => unsafe { self.unmap_virtual(base, &entry, handle) },
            // SAFETY: `close_dma_buf` asks for an object out of the table that nothing touches: our caller vouches.
            Origin::External { object } => unsafe { self.close_dma_buf(entry.device, object) },
            // SAFETY: `close_plain` asks for a base out of the table that nothing touches: our caller vouches for it.
            _ => unsafe { self.close_plain(base, entry.device) },
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
        unsafe { self.words_batch(stream, ops) }
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

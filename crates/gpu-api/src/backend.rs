//! The trait that a vendor implements, and a device of it to work with.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use crate::{
    Access, AddressRange, Allocation, BackendKind, Caps, CaptureStatus, DeviceId, DeviceInfo, DevicePtr, DeviceUuid,
    Error, EventHandle, EventKind, GpuRanges, GpuStore, HostMemory, HostPtr, MemHandle, MemoryInfo, PointerInfo,
    RawEvent, RawStream, Result, Sharing, StreamIdentity, StreamOp, WordPtr,
};

/// What one GPU vendor provides for sharing memory between processes.
///
/// A backend does what the driver does and nothing else: it keeps no counts, caches nothing, never retries and
/// never decides when to free. Leases and limbo live in `ipc-rc`, sub-allocation in `allocators`; both see only
/// this trait. Its arguments and results are plain data, so one process can hold several vendors at once.
///
/// ```text
/// producer  alloc ─► export ┄┄┄ write words in stream order ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄► free
/// consumer                  open / import ─► wait for words ─► use ─► record ─► wait ─► write ─► close
/// ```
///
/// # Calls under an application's stream capture
///
/// A backend makes every call in the driver's *relaxed* capture mode on the calling thread and restores the mode
/// afterwards, so that no call of ours destroys a capture that the application has under way. It also leaves the
/// thread's current context as it found it.
///
/// # Streams
///
/// A [`RawStream`] brings its device, and only the device's primary context counts: a call resolves the default streams
/// there, never in what is current on the calling thread. A stream of another context is found by
/// [`stream_info`](GpuBackend::stream_info), which is asked once, before anything else is done with a stream that
/// somebody else made; so "the stream is alive" below means: and `stream_info` took it. [`RawStream::PER_THREAD`] is
/// another stream on every thread: each call means the calling thread's.
///
/// # Portability
///
/// - Opening a handle in the process that exported it is refused by CUDA and HIP, and so by the host backend.
/// - `close`, `free`, `host_free` and `unregister_words` may block while any stream of the process waits for a word
///   (measured on CUDA), or for the whole device (HIP). Call them on a thread that may block.
/// - An event of a process that died never completes (measured on CUDA). No fence rests on one.
///
/// # Errors
///
/// Every method gives [`Error::Driver`] for a code that the driver returned; what else it gives is said there.
/// After an `Err` from a method that acquires something, nothing was acquired. After an `Err` from one that gives
/// something back nobody knows whether it was given back: leak it, never give it back twice.
///
/// # Safety
///
/// For implementors. Safe code relies on these; breaking one is undefined behaviour in a program that has no
/// `unsafe` of its own:
///
/// - `alloc` returns memory that overlaps nothing that is not yet freed.
/// - `query_event` and `query_stream` say `true` only once all work before has finished.
/// - A word that `stream_batch` writes changes only after all work queued before it on that stream has finished.
pub unsafe trait GpuBackend: GpuStore + GpuRanges + fmt::Debug + Send + Sync + 'static {
    // Devices.

    /// Names the vendor.
    fn kind(&self) -> BackendKind;

    /// Counts the devices that this process may use.
    fn device_count(&self) -> Result<u32>;

    /// Describes a device.
    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo>;

    /// Returns where a device lies on the PCI bus, as the kernel names it (`0000:03:00.0`); `None` for one that lies on none.
    fn pci_address(&self, device: DeviceId) -> Result<Option<String>> {
        let _ = device;
        Ok(None)
    }

    /// Asks the driver how much memory is free.
    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo>;

    /// Says what a device can do.
    fn caps(&self, device: DeviceId) -> Result<Caps>;

    /// Lets `device` reach memory of `peer` directly. Enabling it twice is no error.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the two have no direct way to each other.
    ///
    /// # Portability
    ///
    /// Another process' memory is reached if it was imported by file descriptor. Memory that was opened by a 64-byte handle
    /// is reached from the device that it was opened on alone: a kernel of another device faults on it, whether access
    /// was enabled before or after (CUDA, driver 580, measured on two H200).
    fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        let _ = (device, peer);
        Err(self.unsupported("peer access"))
    }

    /// Names the files by which a process keeps its GPU work alive: prefixes of what links in `/proc/PID/fd` read.
    ///
    /// A forked child that inherits such a file keeps a dead parent's kernels running (measured on CUDA: for as long
    /// as the child lives), so proof of a process' death asks for the death of such children too.
    fn device_files(&self) -> &[&'static str];

    /// Names files that are there for as long as GPU work of a process may run, where the driver shows such. The pid is as
    /// this process sees it.
    ///
    /// The kernel's own signs of a death come first (its pidfd, its socket, the children that hold device files). Where a
    /// driver takes a dead process' queues down later still, the end of what is named here is a further sign. Asked for
    /// while the process lives; what is not there then is not waited for.
    fn signs_of_life(&self, pid: u32) -> Vec<PathBuf> {
        let _ = pid;
        Vec::new()
    }

    // Memory.

    /// Allocates at least `len` bytes of device memory that can be shared the way `sharing` says.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] when there is no room, [`Error::Unsupported`] when the device cannot share that way,
    /// [`Error::Invalid`] for a length of zero.
    fn alloc(&self, device: DeviceId, len: u64, sharing: Sharing) -> Result<Allocation>;

    /// Returns an allocation to the driver. May block.
    ///
    /// # Safety
    ///
    /// - `base` came from `alloc` on this backend and is not yet freed.
    /// - No unfinished GPU work of any process touches it, and none is queued later.
    /// - No process has its handle open (for file descriptors the driver itself keeps the memory until the last
    ///   mapping is gone).
    unsafe fn free(&self, base: DevicePtr) -> Result<()>;

    /// Finds the allocation that an address lies in.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an address in no allocation that the driver knows.
    fn address_range(&self, ptr: DevicePtr) -> Result<AddressRange>;

    /// Says where an address comes from and how it can be shared. An unknown address is an answer, not an error.
    fn classify(&self, ptr: DevicePtr) -> Result<PointerInfo>;

    /// Allocates host memory, aligned to at least 64 bytes and zeroed.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the kernel has none, or cannot bind it to the node that was asked for.
    fn host_alloc(&self, device: DeviceId, len: usize, memory: HostMemory) -> Result<HostPtr>;

    /// Returns host memory. May block.
    ///
    /// # Safety
    ///
    /// - `ptr` came from `host_alloc` on this backend and is not yet freed.
    /// - Nothing, the device included, touches it any more.
    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()>;

    // Memory in other processes.

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
    /// [`Error::Driver`] when the handle's allocation is gone, or when this process exported it (CUDA's code 201).
    fn open_handle(&self, device: DeviceId, handle: &MemHandle) -> Result<DevicePtr>;

    /// Exports the allocation that starts at `base` as a file descriptor, which is closed on exec. An open descriptor
    /// keeps the memory.
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
    fn import_fd(&self, device: DeviceId, fd: BorrowedFd<'_>, len: u64, access: Access) -> Result<DevicePtr>;

    /// Maps several of another process' allocations side by side, `len` bytes of each, as one: what `close` and
    /// `address_range` are told is the whole.
    ///
    /// A descriptor is asked for when the one before it is mapped, and closed once it is itself, so no more than one of
    /// them need be open at a time.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] on a backend that cannot, [`Error::Invalid`] as [`import_fd`](GpuBackend::import_fd), for
    /// no descriptor at all, and for a length that is no multiple of [`Caps::granularity`]; what a descriptor's own
    /// `Err` says.
    fn import_fds(
        &self,
        device: DeviceId,
        fds: &mut dyn ExactSizeIterator<Item = Result<OwnedFd>>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        let _ = (device, fds, len, access);
        Err(self.unsupported("one mapping of several allocations"))
    }

    /// Unmaps what `open_handle`, `import_fd` or `import_fds` mapped. May block.
    ///
    /// # Safety
    ///
    /// - `base` came from one of those three on this backend and is not yet closed.
    /// - No unfinished GPU work of this process touches it, and none is queued later.
    unsafe fn close(&self, base: DevicePtr) -> Result<()>;

    // Events.

    /// Makes an event.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for an interprocess event on a device without them.
    fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent>;

    /// Lets the event stand for all work that is in the stream at this moment.
    ///
    /// # Safety
    ///
    /// `event` and `stream` are alive and of one device.
    unsafe fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Says whether the work that the event stands for has finished. An event never recorded has.
    ///
    /// # Safety
    ///
    /// `event` is alive.
    unsafe fn query_event(&self, event: RawEvent) -> Result<bool>;

    /// Holds up the stream until what the event stands for *at this moment* has finished; the event may be recorded
    /// again at once.
    ///
    /// # Safety
    ///
    /// `event` and `stream` are alive.
    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Gets the handle of an interprocess event.
    ///
    /// # Safety
    ///
    /// `event` is alive.
    unsafe fn event_handle(&self, event: RawEvent) -> Result<EventHandle>;

    /// Opens another process' event. Its owner must not have destroyed it.
    fn open_event(&self, device: DeviceId, handle: &EventHandle) -> Result<RawEvent>;

    /// Destroys an event, made or opened. Waits that were queued for it stay good.
    ///
    /// # Safety
    ///
    /// `event` is alive, and nobody uses it afterwards.
    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()>;

    // Streams.

    /// Makes a stream that waits for no other.
    fn create_stream(&self, device: DeviceId) -> Result<RawStream>;

    /// Destroys a stream; what is queued on it still runs.
    ///
    /// # Safety
    ///
    /// `stream` is alive, and nobody uses it afterwards.
    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()>;

    /// Says whether all that was queued on the stream has finished.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn query_stream(&self, stream: RawStream) -> Result<bool>;

    /// Blocks until all that was queued on the stream has finished.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn synchronize_stream(&self, stream: RawStream) -> Result<()>;

    /// Returns the stream's number that is never used again, the device it queues on, and the driver's context.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] for a stream that is not of its device's primary context, and for a default stream while
    /// another context of the device is current on the calling thread: that context's own is meant then, and calls would
    /// go to the primary one's.
    ///
    /// # Safety
    ///
    /// `stream` is alive, whatever its context.
    unsafe fn stream_info(&self, stream: RawStream) -> Result<StreamInfo>;

    /// Says whether the stream is being captured into a graph.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus>;

    /// Queues a call of `function` on a thread of the driver's; the stream waits for it. The function must not call
    /// the driver.
    ///
    /// # Safety
    ///
    /// - `stream` is alive.
    /// - No thread begins to capture it during the call: what goes into a graph may be called more than once, and the
    ///   function cannot.
    unsafe fn host_function(&self, stream: RawStream, function: Box<dyn FnOnce() + Send>) -> Result<()>;

    // Words in shared memory.

    /// Registers `len` bytes of shared memory, so that streams of every device can write and wait for its words.
    ///
    /// Returns the address of the first word as streams see it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an address or length that is no multiple of the page size.
    ///
    /// # Safety
    ///
    /// The bytes are mapped, readable and writable, and stay so until `unregister_words`.
    unsafe fn register_words(&self, start: HostPtr, len: usize) -> Result<WordPtr>;

    /// Ends a registration. May block.
    ///
    /// # Safety
    ///
    /// - `start` was registered and is not yet unregistered.
    /// - No operation on its words is unfinished on any stream of this process.
    unsafe fn unregister_words(&self, start: HostPtr) -> Result<()>;

    /// Queues up to [`MAX_BATCH`](crate::MAX_BATCH) operations on registered words, in order.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an empty or longer batch, [`Error::Unsupported`] for a write on a device
    /// without [`Caps::stream_writes`], and for a wait on one without [`Caps::stream_waits`].
    ///
    /// # Safety
    ///
    /// `stream` is alive, and every word lies in a registration that outlives the operation.
    unsafe fn stream_batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()>;

    /// As [`stream_batch`](GpuBackend::stream_batch), for a stream that the application may be capturing.
    ///
    /// A backend whose calls are dear asks and queues in one go.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`] while the stream is being captured: nothing was queued.
    ///
    /// # Safety
    ///
    /// `stream` is alive, and every word lies in a registration that outlives the operation.
    unsafe fn batch_uncaptured(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: `capture_status` asks for a live stream: so do we.
        refuse_capture(stream, unsafe { self.capture_status(stream) }?)?;
        // SAFETY: `stream_batch` has our conditions.
        unsafe { self.stream_batch(stream, ops) }
    }

    /// Queues operations on a stream behind what is on others at this moment: records each event on its stream, lets
    /// `stream` wait for it, and queues the batch.
    ///
    /// A backend whose calls are dear does all of it in one go.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`] while one of the others is being captured, and as
    /// [`stream_batch`](GpuBackend::stream_batch): the batch was not queued, though `stream` may wait for some of them.
    ///
    /// # Safety
    ///
    /// All streams and events are alive and of one device, and every word lies in a registration that outlives the operation.
    unsafe fn batch_behind(&self, stream: RawStream, others: &[(RawEvent, RawStream)], ops: &[StreamOp]) -> Result<()> {
        for &(event, other) in others {
            // SAFETY: `capture_status` asks for a live stream: so do we.
            refuse_capture(other, unsafe { self.capture_status(other) }?)?;
            // SAFETY: `record_event` asks for both alive and of one device: so do we.
            unsafe { self.record_event(event, other) }?;
            // SAFETY: `stream_wait_event` asks for both alive: so do we.
            unsafe { self.stream_wait_event(stream, event) }?;
        }
        // SAFETY: `stream_batch` has our conditions.
        unsafe { self.stream_batch(stream, ops) }
    }

    // Copies, in stream order.

    /// Copies `len` bytes from host memory to the device.
    ///
    /// # Safety
    ///
    /// `stream` is alive; both ranges are valid for `len` bytes until the copy has finished.
    unsafe fn copy_to_device(&self, stream: RawStream, to: DevicePtr, from: *const u8, len: usize) -> Result<()>;

    /// Copies `len` bytes from the device to host memory.
    ///
    /// # Safety
    ///
    /// `stream` is alive; both ranges are valid for `len` bytes until the copy has finished.
    unsafe fn copy_to_host(&self, stream: RawStream, to: *mut u8, from: DevicePtr, len: usize) -> Result<()>;

    /// Copies `len` bytes within device memory.
    ///
    /// # Safety
    ///
    /// `stream` is alive; both ranges are valid for `len` bytes until the copy has finished.
    unsafe fn copy(&self, stream: RawStream, to: DevicePtr, from: DevicePtr, len: u64) -> Result<()>;

    /// Sets `len` bytes of device memory to `byte`.
    ///
    /// # Safety
    ///
    /// `stream` is alive; the range is valid for `len` bytes until the fill has finished.
    unsafe fn fill(&self, stream: RawStream, to: DevicePtr, byte: u8, len: u64) -> Result<()>;

    /// Makes the error of a method that this backend does not have. Not meant to be overridden.
    #[doc(hidden)]
    fn unsupported(&self, what: &'static str) -> Error {
        Error::Unsupported {
            what,
            why: format!("the {} backend has no such operation", self.kind()),
            remedy: "choose another backend",
        }
    }
}

/// Refuses a stream whose work goes into a graph.
///
/// # Errors
///
/// [`Error::Capturing`].
pub fn refuse_capture(stream: RawStream, status: CaptureStatus) -> Result<()> {
    match status {
        CaptureStatus::None => Ok(()),
        _ => {
            Err(Error::Capturing { stream: stream.handle, remedy: "do it before the capture begins or after it ended" })
        }
    }
}

// Object-safe on purpose: one process may hold several vendors at once.
const _: Option<&dyn GpuBackend> = None;

/// What the driver knows of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StreamInfo {
    /// A number that is never used again in this process.
    pub identity: StreamIdentity,
    /// The device it queues on.
    pub device: DeviceId,
    /// The driver's context (`CUcontext`), or 0 where there is no such thing.
    pub context: u64,
}

/// One device of one backend: what sessions, participants and allocators are opened on.
///
/// Cheap to clone.
#[derive(Clone, Debug)]
pub struct Gpu {
    backend: Arc<dyn GpuBackend>,
    info: Arc<DeviceInfo>,
    caps: Caps,
}

/// Equal if they are one device by one backend object: handles of one mean the same to the other.
impl PartialEq for Gpu {
    fn eq(&self, other: &Gpu) -> bool {
        Arc::ptr_eq(&self.backend, &other.backend) && self.info.device == other.info.device
    }
}

impl Eq for Gpu {}

impl Gpu {
    /// Takes a device of a backend, asking once for what it is and what it can do.
    ///
    /// # Errors
    ///
    /// What [`GpuBackend::device_info`] and [`GpuBackend::caps`] give.
    pub fn new(backend: Arc<dyn GpuBackend>, device: DeviceId) -> Result<Gpu> {
        let info = Arc::new(backend.device_info(device)?);
        let caps = backend.caps(device)?;
        Ok(Gpu { backend, info, caps })
    }

    /// Finds the device with this identity, whatever its number is in this process.
    ///
    /// # Errors
    ///
    /// [`Error::NoDevice`] when this process cannot see it.
    pub fn with_uuid(backend: Arc<dyn GpuBackend>, uuid: DeviceUuid) -> Result<Gpu> {
        for ordinal in 0..backend.device_count()? {
            if backend.device_info(DeviceId(ordinal))?.uuid == uuid {
                return Gpu::new(backend, DeviceId(ordinal));
            }
        }
        Err(Error::NoDevice { backend: backend.kind(), uuid })
    }

    /// Returns the backend.
    pub fn backend(&self) -> &Arc<dyn GpuBackend> {
        &self.backend
    }

    /// Names the vendor.
    pub fn kind(&self) -> BackendKind {
        self.backend.kind()
    }

    /// Returns the device's number in this process.
    pub fn device(&self) -> DeviceId {
        self.info.device
    }

    /// Returns the device's identity in every process.
    pub fn uuid(&self) -> DeviceUuid {
        self.info.uuid
    }

    /// Describes the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Says what the device can do.
    pub fn caps(&self) -> &Caps {
        &self.caps
    }

    /// Chooses how regions are shared when nobody says: by file descriptor where the device can, else by handle.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] on a device that can do neither.
    pub fn default_sharing(&self) -> Result<Sharing> {
        if self.caps.fd {
            Ok(Sharing::Fd)
        } else if self.caps.handle {
            Ok(Sharing::Handle)
        } else {
            Err(Error::Unsupported {
                what: "sharing memory with another process",
                why: format!("{} ({}) exports neither file descriptors nor handles", self.info.name, self.info.device),
                remedy: "run `gpu-ipc doctor` for the reason, or choose another device",
            })
        }
    }
}

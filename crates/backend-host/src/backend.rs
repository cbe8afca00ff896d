//! The backend: the tables of this process, behind [`GpuBackend`].

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use gpu_api::groups::*;
use gpu_api::{
    Access, AddressRange, Allocation, BackendKind, Caps, CaptureStatus, DeviceId, DeviceInfo, DevicePtr, DeviceUuid,
    Error, EventHandle, EventKind, HostMemory, HostPtr, KernelPages, MAX_BATCH, MemHandle, MemoryInfo, PointerInfo,
    RawEvent, RawStream, Result, Sharing, StreamIdentity, StreamInfo, StreamOp, WordPtr, refuse_capture,
};

use crate::config::HostConfig;
use crate::current::{self, Entered};
use crate::error::{CAPTURE_UNSUPPORTED, ILLEGAL_ADDRESS, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, driver};
use crate::event::Event;
use crate::late_write::Helper;
use crate::memory::{self, GRANULARITY, Memories};
use crate::pool::Pools;
use crate::range::Ranges;
use crate::stream::{Stream, Waits};

const PAGE: usize = 4096;

/// Above the handles of default streams.
const FIRST_NUMBER: u64 = 16;

#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) memories: Memories,
    pub(crate) ranges: Ranges,
    pub(crate) pools: Pools,
    streams: HashMap<u64, Arc<Stream>>,
    /// The handles of the default streams, made when first used: of a device, and of one of its threads.
    default_streams: HashMap<(DeviceId, Option<ThreadId>), u64>,
    events: HashMap<u64, Arc<Event>>,
    words: BTreeMap<usize, usize>,
    host: HashMap<usize, KernelPages>,
    helper: Option<Helper>,
}

/// The host backend.
pub struct HostBackend {
    config: HostConfig,
    tables: Mutex<Tables>,
    waits: Arc<Waits>,
    broken: Vec<Arc<AtomicBool>>,
    /// The next stream's or event's number; none is used twice.
    next: AtomicU64,
    /// Kept open, as a driver keeps its device files: a forked child that has it may keep GPU work alive.
    _device_file: OwnedFd,
}

/// Its tables grow with what is allocated, and are nobody's to read.
impl fmt::Debug for HostBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostConfig { devices, bytes, .. } = &self.config;
        f.debug_struct("HostBackend").field("devices", devices).field("bytes", bytes).finish_non_exhaustive()
    }
}

impl HostBackend {
    /// Opens the backend.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the process has no file descriptor left.
    pub fn new(config: HostConfig) -> Result<Arc<HostBackend>> {
        let tables = Tables {
            memories: Memories::new(config.devices, config.bytes),
            ranges: Ranges::default(),
            pools: Pools::default(),
            streams: HashMap::new(),
            default_streams: HashMap::new(),
            events: HashMap::new(),
            words: BTreeMap::new(),
            host: HashMap::new(),
            helper: None,
        };
        let broken = (0..config.devices).map(|_| Arc::default()).collect();
        let (tables, waits) = (Mutex::new(tables), Arc::default());
        let _device_file = memory::shared_file(GRANULARITY)?;
        Ok(Arc::new(HostBackend { config, tables, waits, broken, next: AtomicU64::new(FIRST_NUMBER), _device_file }))
    }

    /// Sets what [`GpuStreams::capture_status`] says of a stream.
    ///
    /// While it is not [`CaptureStatus::None`] nothing can be queued on the stream: a GPU would put it into a graph,
    /// and this library never wants that.
    pub fn set_capture(&self, stream: RawStream, status: CaptureStatus) {
        if let Ok((_, stream)) = self.find_stream("set_capture", stream) {
            stream.set_capture(status);
        }
    }

    /// Makes a device current on the calling thread, as an application does with `cudaSetDevice`; `None` leaves it
    /// without one.
    ///
    /// No call of [`GpuBackend`] depends on it: a stream brings its device.
    pub fn set_current_device(device: Option<DeviceId>) {
        current::set(device);
    }

    /// Returns the device that is current on the calling thread.
    pub fn current_device() -> Option<DeviceId> {
        current::current()
    }

    /// Breaks a device's context, as an illegal access of a kernel does: every later call on it gives code 700, and
    /// nothing that is queued runs any more.
    pub fn break_device(&self, device: DeviceId) {
        if let Some(broken) = self.broken.get(device.0 as usize) {
            broken.store(true, Ordering::Release);
        }
    }

    /// Counts the pieces of memory that are registered for streams: for tests that look whether each is ended.
    pub fn registered_words(&self) -> usize {
        self.tables().words.len()
    }

    /// Arms a write that happens only if this process dies, so long after its death: what a GPU's unfinished kernel
    /// does.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`] for an address in no allocation, [`Error::Invalid`] for more than 64 bytes,
    /// [`Error::Exhausted`] for more than 32 writes, [`Error::System`] when the helper process cannot be started.
    pub fn arm_late_write(&self, ptr: DevicePtr, bytes: &[u8], delay: Duration) -> Result<()> {
        let mut tables = self.tables();
        let in_range = tables.ranges.file_at(ptr);
        let (file, offset) = in_range.unwrap_or_else(|| tables.memories.file_at(ptr))?;
        let mut helper = match tables.helper.take() {
            Some(helper) => helper,
            None => Helper::start()?,
        };
        let armed = helper.arm(&file, offset, bytes, delay);
        tables.helper = Some(helper);
        armed
    }

    pub(crate) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn check_device(&self, call: &'static str, device: DeviceId) -> Result<()> {
        match self.broken.get(device.0 as usize) {
            None => Err(driver(call, device, INVALID_DEVICE)),
            Some(broken) if broken.load(Ordering::Acquire) => Err(driver(call, device, ILLEGAL_ADDRESS)),
            Some(_) => Ok(()),
        }
    }

    /// Finds a stream of a device that is not broken.
    fn stream(&self, call: &'static str, stream: RawStream) -> Result<Arc<Stream>> {
        Ok(self.find_stream(call, stream)?.1)
    }

    /// Finds a stream, and its number.
    fn find_stream(&self, call: &'static str, stream: RawStream) -> Result<(u64, Arc<Stream>)> {
        self.check_device(call, stream.device)?;
        let _here = Entered::new(stream.device);
        let number = if stream.is_default() { self.default_stream(call, stream.handle)? } else { stream.handle };
        let found = self.tables().streams.get(&number).filter(|found| found.device == stream.device).cloned();
        Ok((number, found.ok_or_else(|| driver(call, stream.device, INVALID_VALUE))?))
    }

    /// Finds a default stream of the current device, or makes it.
    fn default_stream(&self, call: &'static str, handle: u64) -> Result<u64> {
        let device = current::current().ok_or_else(|| driver(call, DeviceId(0), INVALID_CONTEXT))?;
        let thread = (handle == RawStream::PER_THREAD).then(|| thread::current().id());
        let mut tables = self.tables();
        if let Some(&made) = tables.default_streams.get(&(device, thread)) {
            return Ok(made);
        }
        let stream = Stream::start(device, self.broken[device.0 as usize].clone())?;
        let number = self.number();
        tables.streams.insert(number, stream);
        tables.default_streams.insert((device, thread), number);
        Ok(number)
    }

    /// Finds a stream that work can be queued on.
    fn queue(&self, call: &'static str, stream: RawStream) -> Result<Arc<Stream>> {
        let found = self.stream(call, stream)?;
        if found.capture() == CaptureStatus::None {
            Ok(found)
        } else {
            Err(driver(call, found.device, CAPTURE_UNSUPPORTED))
        }
    }

    /// Returns the number of a stream that is not captured.
    pub(crate) fn queue_number(&self, call: &'static str, stream: RawStream) -> Result<u64> {
        let (number, found) = self.find_stream(call, stream)?;
        refuse_capture(stream, found.capture())?;
        Ok(number)
    }

    /// Queues an operation on a stream.
    pub(crate) fn push(&self, call: &'static str, stream: RawStream, op: impl FnOnce() + Send + 'static) -> Result<()> {
        self.queue(call, stream)?.push(op);
        Ok(())
    }

    fn event(&self, call: &'static str, event: RawEvent) -> Result<Arc<Event>> {
        // An event has no device here; a broken one breaks all, as a process with one context sees it.
        self.check_device(call, DeviceId(0))?;
        self.tables().events.get(&event.0).cloned().ok_or_else(|| driver(call, DeviceId(0), INVALID_VALUE))
    }

    pub(crate) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn block_while_waiting(&self) {
        if self.config.blocking_waits {
            self.waits.block();
        }
    }
}

/// Points at a registered word.
fn word(word: WordPtr) -> *const AtomicU64 {
    word.0 as *const AtomicU64
}

// SAFETY: `GpuDevices`: what is promised is done.
unsafe impl GpuDevices for HostBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Host
    }

    fn device_count(&self) -> Result<u32> {
        Ok(self.config.devices)
    }

    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo> {
        if device.0 >= self.config.devices {
            return Err(driver("device_info", device, INVALID_DEVICE));
        }
        let mut uuid = *b"gpu-ipc-host\0\0\0\0";
        uuid[12..].copy_from_slice(&device.0.to_be_bytes());
        let name = format!("shared memory {}", device.0);
        Ok(DeviceInfo { device, uuid: DeviceUuid(uuid), name, total_bytes: self.config.bytes })
    }

    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        self.check_device("memory_info", device)?;
        let mut guard = self.tables();
        let tables = &mut *guard;
        tables.pools.settle(&mut tables.memories);
        Ok(MemoryInfo { free_bytes: tables.memories.free_bytes(device), total_bytes: self.config.bytes })
    }

    fn caps(&self, device: DeviceId) -> Result<Caps> {
        self.check_device("caps", device)?;
        Ok(Caps {
            handle: true,
            fd: true,
            read_only: true,
            event_ipc: true,
            stream_writes: self.config.stream_writes,
            stream_waits: self.config.stream_waits,
            ranges: true,
            pools: true,
            managed: true,
            shared_context: self.config.shared_context,
            granularity: GRANULARITY,
        })
    }

    fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        self.check_device("enable_peer_access", device)?;
        self.check_device("enable_peer_access", peer)
    }

    fn device_files(&self) -> &[&'static str] {
        &["/memfd:gpu-ipc-host"]
    }

    fn signs_of_life(&self, pid: u32) -> Vec<PathBuf> {
        self.config.signs_of_life.iter().map(|folder| folder.join(pid.to_string())).collect()
    }
}

// SAFETY: `GpuMemory`: `alloc` maps a fresh memfd each time, at an address where nothing is mapped.
unsafe impl GpuMemory for HostBackend {
    fn alloc(&self, device: DeviceId, len: u64, sharing: Sharing) -> Result<Allocation> {
        self.check_device("alloc", device)?;
        self.tables().memories.alloc(device, len, sharing)
    }

    unsafe fn free(&self, base: DevicePtr) -> Result<()> {
        self.check_device("free", DeviceId(0))?;
        self.block_while_waiting();
        let unmapped = self.tables().memories.free(base)?;
        drop(unmapped);
        Ok(())
    }

    unsafe fn close(&self, base: DevicePtr) -> Result<()> {
        self.check_device("close", DeviceId(0))?;
        self.block_while_waiting();
        let unmapped = self.tables().memories.close(base)?;
        drop(unmapped);
        Ok(())
    }
}

// SAFETY: `GpuPointers`: what is told is in the tables.
unsafe impl GpuPointers for HostBackend {
    fn address_range(&self, ptr: DevicePtr) -> Result<AddressRange> {
        let tables = self.tables();
        tables.ranges.range(ptr).map_or_else(|| tables.memories.range(ptr), Ok)
    }

    fn classify(&self, ptr: DevicePtr) -> Result<PointerInfo> {
        let tables = self.tables();
        let host = tables
            .host
            .iter()
            .find(|(start, pages)| (**start as u64..**start as u64 + pages.len() as u64).contains(&ptr.0));
        if let Some((&start, pages)) = host {
            let range = Some(AddressRange { base: DevicePtr(start as u64), len: pages.len() as u64 });
            return Ok(PointerInfo { kind: gpu_api::MemoryKind::Host, range, device: None, sharing: None });
        }
        Ok(tables.ranges.classify(ptr).unwrap_or_else(|| tables.memories.classify(ptr)))
    }
}

// SAFETY: `GpuHostMemory`: `host_alloc` maps fresh pages each time.
unsafe impl GpuHostMemory for HostBackend {
    fn host_alloc(&self, device: DeviceId, len: usize, memory: HostMemory) -> Result<HostPtr> {
        self.check_device("host_alloc", device)?;
        if len == 0 {
            return Err(Error::Invalid { what: "the length of host memory", got: "0".into(), must: "at least 1 byte" });
        }
        let pages = KernelPages::map(len, memory.numa_node)?;
        let start = pages.as_ptr() as usize;
        self.tables().host.insert(start, pages);
        Ok(HostPtr(start))
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        self.block_while_waiting();
        match self.tables().host.remove(&ptr.0) {
            Some(_) => Ok(()),
            None => Err(driver("host_free", DeviceId(0), INVALID_VALUE)),
        }
    }
}

// SAFETY: `GpuHandles`: a handle names its file by inode, which is compared.
unsafe impl GpuHandles for HostBackend {
    fn export_handle(&self, base: DevicePtr) -> Result<MemHandle> {
        self.tables().memories.export_handle(base)
    }

    fn open_handle(&self, device: DeviceId, handle: &MemHandle) -> Result<DevicePtr> {
        self.check_device("open_handle", device)?;
        self.tables().memories.open(device, handle)
    }
}

// SAFETY: `GpuDescriptors`: a descriptor is the file itself, sealed and long enough.
unsafe impl GpuDescriptors for HostBackend {
    fn export_fd(&self, base: DevicePtr) -> Result<OwnedFd> {
        self.tables().memories.export_fd(base)
    }

    fn import_fd(&self, device: DeviceId, fd: BorrowedFd<'_>, len: u64, access: Access) -> Result<DevicePtr> {
        self.check_device("import_fd", device)?;
        self.tables().memories.import(device, fd, len, access)
    }

    fn import_fds(
        &self,
        device: DeviceId,
        fds: &mut dyn ExactSizeIterator<Item = Result<OwnedFd>>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        self.check_device("import_fds", device)?;
        let files = fds.collect::<Result<_>>()?;
        self.tables().memories.import_several(device, files, len, access)
    }
}

// SAFETY: `GpuEvents`: `query_event` compares with a number that the stream's worker sets after all operations before
// it.
unsafe impl GpuEvents for HostBackend {
    fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent> {
        self.check_device("create_event", device)?;
        let event = Arc::new(Event::new(kind)?);
        let number = self.number();
        self.tables().events.insert(number, event);
        Ok(RawEvent(number))
    }

    unsafe fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let (event, stream) = (self.event("record_event", event)?, self.queue("record_event", stream)?);
        let number = event.record();
        stream.push(move || event.complete(number));
        Ok(())
    }

    unsafe fn query_event(&self, event: RawEvent) -> Result<bool> {
        let event = self.event("query_event", event)?;
        Ok(event.is_complete(event.last()))
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        let (event, stream) = (self.event("stream_wait_event", event)?, self.queue("stream_wait_event", stream)?);
        let number = event.last();
        let waits = self.waits.clone();
        stream.push(move || waits.wait(|| event.is_complete(number)));
        Ok(())
    }

    unsafe fn event_handle(&self, event: RawEvent) -> Result<EventHandle> {
        self.event("event_handle", event)?.handle().unwrap_or_else(|| {
            Err(Error::Unsupported {
                what: "the handle of a local event",
                why: "only interprocess events have one".into(),
                remedy: "create it with `EventKind::Interprocess`",
            })
        })
    }

    fn open_event(&self, device: DeviceId, handle: &EventHandle) -> Result<RawEvent> {
        self.check_device("open_event", device)?;
        let event = Arc::new(Event::open(device, handle)?);
        let number = self.number();
        self.tables().events.insert(number, event);
        Ok(RawEvent(number))
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
        match self.tables().events.remove(&event.0) {
            Some(_) => Ok(()),
            None => Err(driver("destroy_event", DeviceId(0), INVALID_VALUE)),
        }
    }
}

// SAFETY: `GpuStreams`: a stream is idle when its queue is empty and its worker waits.
unsafe impl GpuStreams for HostBackend {
    fn create_stream(&self, device: DeviceId) -> Result<RawStream> {
        self.check_device("create_stream", device)?;
        let stream = Stream::start(device, self.broken[device.0 as usize].clone())?;
        let number = self.number();
        self.tables().streams.insert(number, stream);
        Ok(RawStream::new(device, number))
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        let mut tables = self.tables();
        // The default streams have another number than their handles: they are nobody's to destroy.
        match tables.streams.get(&stream.handle).filter(|found| found.device == stream.device) {
            Some(found) => {
                found.destroy();
                tables.streams.remove(&stream.handle);
                Ok(())
            }
            None => Err(driver("destroy_stream", stream.device, INVALID_VALUE)),
        }
    }

    unsafe fn query_stream(&self, stream: RawStream) -> Result<bool> {
        Ok(self.stream("query_stream", stream)?.is_idle())
    }

    unsafe fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        let stream = self.stream("synchronize_stream", stream)?;
        stream.synchronize();
        self.check_device("synchronize_stream", stream.device)
    }

    unsafe fn stream_info(&self, stream: RawStream) -> Result<StreamInfo> {
        let other = self.tables().streams.get(&stream.handle).map(|found| found.device);
        if let Some(other) = other.filter(|other| *other != stream.device) {
            return Err(Error::Mismatch {
                what: "the stream's device",
                theirs: other.to_string(),
                ours: stream.device.to_string(),
                remedy: "pass a stream of the device that the session or participant was opened on",
            });
        }
        let (number, found) = self.find_stream("stream_info", stream)?;
        Ok(StreamInfo { identity: StreamIdentity(number), device: found.device, context: 0 })
    }

    unsafe fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        Ok(self.stream("capture_status", stream)?.capture())
    }

    unsafe fn host_function(&self, stream: RawStream, function: Box<dyn FnOnce() + Send>) -> Result<()> {
        self.queue("host_function", stream)?.push(function);
        Ok(())
    }
}

// SAFETY: `GpuCopies`: a copy writes the range that it was given.
unsafe impl GpuCopies for HostBackend {
    unsafe fn copy_to_device(&self, stream: RawStream, to: DevicePtr, from: *const u8, len: usize) -> Result<()> {
        let from = from as usize;
        self.queue("copy_to_device", stream)?.push(move || move_bytes(from, to.0 as usize, len));
        Ok(())
    }

    unsafe fn copy_to_host(&self, stream: RawStream, to: *mut u8, from: DevicePtr, len: usize) -> Result<()> {
        let to = to as usize;
        self.queue("copy_to_host", stream)?.push(move || move_bytes(from.0 as usize, to, len));
        Ok(())
    }

    unsafe fn copy(&self, stream: RawStream, to: DevicePtr, from: DevicePtr, len: u64) -> Result<()> {
        self.queue("copy", stream)?.push(move || move_bytes(from.0 as usize, to.0 as usize, len as usize));
        Ok(())
    }

    unsafe fn fill(&self, stream: RawStream, to: DevicePtr, byte: u8, len: u64) -> Result<()> {
        self.queue("fill", stream)?.push(move || {
            // SAFETY: `write_bytes` asks for a range that is valid for writes: the caller of `fill` keeps it so until
            // the fill is done. Other processes may touch it at once, as with any device memory; nothing here reads
            // it, and no reference to it exists.
            unsafe { std::ptr::write_bytes(to.0 as *mut u8, byte, len as usize) };
        });
        Ok(())
    }
}

// SAFETY: `GpuWords`: words are written by the stream's worker, in the order of its queue.
unsafe impl GpuWords for HostBackend {
    unsafe fn register_words(&self, start: HostPtr, len: usize) -> Result<WordPtr> {
        if !start.0.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) || len == 0 {
            let got = format!("{len} bytes at {start:?}");
            return Err(Error::Invalid { what: "memory to register", got, must: "whole pages" });
        }
        match self.tables().words.entry(start.0) {
            std::collections::btree_map::Entry::Occupied(_) => {
                Err(driver("register_words", DeviceId(0), (712, "already registered")))
            }
            std::collections::btree_map::Entry::Vacant(entry) => {
                entry.insert(len);
                Ok(WordPtr(start.0 as u64))
            }
        }
    }

    unsafe fn unregister_words(&self, start: HostPtr) -> Result<()> {
        self.block_while_waiting();
        match self.tables().words.remove(&start.0) {
            Some(_) => Ok(()),
            None => Err(driver("unregister_words", DeviceId(0), (713, "not registered"))),
        }
    }

    unsafe fn stream_batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        if ops.is_empty() || ops.len() > MAX_BATCH {
            let got = format!("{} operations", ops.len());
            return Err(Error::Invalid { what: "a batch", got, must: "1 to 255 operations" });
        }
        let is_there = |op: &StreamOp| match op {
            StreamOp::Write { .. } => self.config.stream_writes,
            StreamOp::WaitGeq { .. } => self.config.stream_waits,
        };
        if !ops.iter().all(is_there) {
            return Err(Error::Unsupported {
                what: "writing or waiting for words on a stream",
                why: "the backend was set up without".into(),
                remedy: "ask `Caps::stream_writes` and `Caps::stream_waits` first",
            });
        }
        let stream = self.queue("stream_batch", stream)?;
        {
            let tables = self.tables();
            for op in ops {
                let (StreamOp::Write { word, .. } | StreamOp::WaitGeq { word, .. }) = *op;
                let at = word.0 as usize;
                let inside = tables.words.range(..=at).next_back().is_some_and(|(start, len)| at + 8 <= start + len);
                if !inside || !at.is_multiple_of(8) {
                    let got = format!("{at:#x}");
                    return Err(Error::Invalid { what: "a stream's word", got, must: "in a registration" });
                }
            }
        }
        let (ops, waits) = (ops.to_vec(), self.waits.clone());
        stream.push(move || {
            for op in ops {
                match op {
                    StreamOp::Write { word: at, value } => {
                        // SAFETY: `&*` of an `AtomicU64`: the caller of `stream_batch` keeps the registered memory,
                        // the word was found aligned and inside, and every process touches it as an atomic.
                        let word = unsafe { &*word(at) };
                        word.store(value, Ordering::Release);
                    }
                    StreamOp::WaitGeq { word: at, value } => {
                        // SAFETY: as above.
                        let word = unsafe { &*word(at) };
                        waits.wait(|| word.load(Ordering::Acquire).wrapping_sub(value).cast_signed() >= 0);
                    }
                }
            }
        });
        Ok(())
    }
}

impl Drop for HostBackend {
    fn drop(&mut self) {
        let tables = self.tables.get_mut().unwrap_or_else(PoisonError::into_inner);
        for stream in tables.streams.values() {
            stream.destroy();
        }
    }
}

fn move_bytes(from: usize, to: usize, len: usize) {
    // SAFETY: `ptr::copy` asks for two ranges that are valid for `len` bytes: the caller of the copy keeps them so
    // until it is done. Other processes may touch device memory at once; no reference to it exists.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len) };
}

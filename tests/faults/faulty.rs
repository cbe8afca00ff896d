//! A backend whose n-th call fails, and that keeps a ledger of what it gave and what it was given back.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use gpu_ipc::backend::groups::*;
use gpu_ipc::backend::{
    Access, AddressRange, Allocation, Caps, CaptureStatus, DeviceId, DeviceInfo, DevicePtr, DriverError, EventHandle,
    EventKind, HostMemory, HostPtr, MemHandle, MemoryInfo, PointerInfo, PoolUsage, RawEvent, RawMemory, RawPool,
    RawStream, Sharing, StreamInfo, StreamOp, WordPtr,
};
use gpu_ipc::{BackendKind, Error, Result};

/// The code of a call that was made to fail.
pub const FAULT: u32 = 9999;

/// What a backend can give.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Thing {
    /// Device memory.
    Memory(u64),
    /// Host memory.
    HostMemory(usize),
    /// Another process' memory.
    Mapping(u64),
    /// Physical memory.
    Physical(u64),
    /// Reserved addresses.
    Range(u64),
    /// A piece of such.
    Piece(u64),
    /// An event.
    Event(u64),
    /// A stream.
    Stream(u64),
    /// Registered words.
    Words(usize),
    /// A pool of the driver's.
    Pool(u64),
    /// Memory of one.
    Pooled(u64),
}

#[derive(Debug, Default)]
struct Ledger {
    /// Calls so far; `None` while nothing is counted and nothing fails.
    calls: Option<u32>,
    /// The call that fails.
    nth: u32,
    /// Its name, once it has failed.
    failed: Option<&'static str>,
    /// What was given and not given back: how often, and whether a call that gives it back has failed.
    given: BTreeMap<Thing, (u32, bool)>,
    /// What must not happen.
    faults: Vec<String>,
}

/// Passes every call on to another backend, but for one.
///
/// A call that fails has done nothing, which is the worst that a failed `free` can mean: who tries again succeeds, and
/// is found out.
pub struct Faulty<B> {
    backend: Arc<B>,
    ledger: Mutex<Ledger>,
    gate: Mutex<Gate>,
    opened: Condvar,
    capture: Mutex<Option<AfterQuestion<B>>>,
}

/// What happens when a participant's thread has asked whether a stream is captured.
type AfterQuestion<B> = Box<dyn FnOnce(&B) + Send>;

/// Before a mapping of another process' memory.
#[derive(Debug, Default)]
struct Gate {
    is_shut: bool,
    waiting: usize,
}

impl<B: fmt::Debug> fmt::Debug for Faulty<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faulty").field("backend", &self.backend).finish_non_exhaustive()
    }
}

impl<B: GpuBackend> Faulty<B> {
    /// Wraps a backend, which fails at nothing yet.
    pub fn new(backend: Arc<B>) -> Arc<Faulty<B>> {
        let (ledger, gate, opened, capture) = (Mutex::default(), Mutex::default(), Condvar::new(), Mutex::new(None));
        Arc::new(Faulty { backend, ledger, gate, opened, capture })
    }

    /// Does something as soon as a participant's own thread has been told that a stream is not captured.
    pub fn after_question_of_capture(&self, act: impl FnOnce(&B) + Send + 'static) {
        *self.capture.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(act));
    }

    /// Returns the backend below.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Holds up the calls that map another process' memory, or lets them go on.
    pub fn hold_mappings(&self, is_shut: bool) {
        self.gate().is_shut = is_shut;
        self.opened.notify_all();
    }

    /// Says how many calls are held up.
    pub fn held_mappings(&self) -> usize {
        self.gate().waiting
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass_gate(&self) {
        let mut gate = self.gate();
        gate.waiting += 1;
        gate = self.opened.wait_while(gate, |gate| gate.is_shut).unwrap_or_else(PoisonError::into_inner);
        gate.waiting -= 1;
    }

    /// Makes the n-th call from here on fail; the first is 1.
    pub fn fail_at(&self, nth: u32) {
        let mut ledger = self.ledger();
        (ledger.calls, ledger.nth, ledger.failed) = (Some(0), nth, None);
    }

    /// Fails nothing more, and names the call that failed.
    pub fn heal(&self) -> Option<&'static str> {
        let mut ledger = self.ledger();
        ledger.calls = None;
        ledger.failed
    }

    /// Lists what was given, not given back, and did not refuse to be.
    pub fn outstanding(&self) -> Vec<Thing> {
        let ledger = self.ledger();
        ledger.given.iter().filter(|(_, (_, refused))| !refused).map(|(&thing, _)| thing).collect()
    }

    /// Lists what was done that must not be done.
    pub fn wrongs(&self) -> Vec<String> {
        self.ledger().faults.clone()
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails if it is this call's turn.
    fn turn(&self, call: &'static str) -> Result<()> {
        let mut ledger = self.ledger();
        let Some(calls) = &mut ledger.calls else { return Ok(()) };
        *calls += 1;
        if *calls != ledger.nth {
            return Ok(());
        }
        ledger.failed = Some(call);
        let source = DriverError { backend: self.backend.kind(), code: FAULT, name: "made to fail".into() };
        Err(Error::Driver { call, device: DeviceId(0), source })
    }

    fn gives(&self, call: &'static str, thing: impl FnOnce() -> Result<Thing>) -> Result<()> {
        self.turn(call)?;
        let thing = thing()?;
        self.ledger().given.entry(thing).or_insert((0, false)).0 += 1;
        Ok(())
    }

    fn takes(&self, call: &'static str, thing: Thing, take: impl FnOnce() -> Result<()>) -> Result<()> {
        {
            let mut ledger = self.ledger();
            match ledger.given.get(&thing) {
                None => ledger.faults.push(format!("{call} of {thing:?}, which was not given or was given back")),
                Some((_, true)) => ledger.faults.push(format!("{call} of {thing:?}, whose {call} has failed before")),
                Some(_) => {}
            }
        }
        if let Err(error) = self.turn(call) {
            if let Some(entry) = self.ledger().given.get_mut(&thing) {
                entry.1 = true;
            }
            return Err(error);
        }
        // Before it is gone: its number may be given again at once.
        let mut ledger = self.ledger();
        if let Some(entry) = ledger.given.get_mut(&thing) {
            entry.0 -= 1;
            if entry.0 == 0 {
                ledger.given.remove(&thing);
            }
        }
        drop(ledger);
        take()
    }
}

// SAFETY: `GpuStore`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuStore for Faulty<B> {
    fn create_memory(&self, device: DeviceId, len: u64) -> Result<RawMemory> {
        let mut made = RawMemory { device, handle: 0, len };
        self.gives("create_memory", || {
            made = self.backend.create_memory(device, len)?;
            Ok(Thing::Physical(made.handle))
        })?;
        Ok(made)
    }

    unsafe fn export_memory(&self, memory: RawMemory) -> Result<OwnedFd> {
        self.turn("export_memory")?;
        // SAFETY: `export_memory`: the caller's own promise.
        unsafe { self.backend.export_memory(memory) }
    }

    fn import_memory(&self, device: DeviceId, fd: BorrowedFd<'_>, len: u64) -> Result<RawMemory> {
        let mut made = RawMemory { device, handle: 0, len };
        self.gives("import_memory", || {
            made = self.backend.import_memory(device, fd, len)?;
            Ok(Thing::Physical(made.handle))
        })?;
        Ok(made)
    }

    unsafe fn release_memory(&self, memory: RawMemory) -> Result<()> {
        let thing = Thing::Physical(memory.handle);
        // SAFETY: `release_memory`: the caller's own promise.
        self.takes("release_memory", thing, || unsafe { self.backend.release_memory(memory) })
    }
}

// SAFETY: `GpuRanges`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuRanges for Faulty<B> {
    fn reserve_range(&self, device: DeviceId, len: u64, at: Option<DevicePtr>) -> Result<AddressRange> {
        let mut made = AddressRange { base: DevicePtr(0), len };
        self.gives("reserve_range", || {
            made = self.backend.reserve_range(device, len, at)?;
            Ok(Thing::Range(made.base.0))
        })?;
        Ok(made)
    }

    unsafe fn map_memory(&self, at: DevicePtr, memory: RawMemory, access: Access) -> Result<()> {
        self.gives("map_memory", || {
            // SAFETY: `map_memory`: the caller's own promise.
            unsafe { self.backend.map_memory(at, memory, access) }?;
            Ok(Thing::Piece(at.0))
        })
    }

    unsafe fn unmap_memory(&self, at: DevicePtr) -> Result<()> {
        // SAFETY: `unmap_memory`: the caller's own promise.
        self.takes("unmap_memory", Thing::Piece(at.0), || unsafe { self.backend.unmap_memory(at) })
    }

    unsafe fn release_range(&self, range: AddressRange) -> Result<()> {
        let thing = Thing::Range(range.base.0);
        // SAFETY: `release_range`: the caller's own promise.
        self.takes("release_range", thing, || unsafe { self.backend.release_range(range) })
    }
}

// SAFETY: `GpuPools`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuPools for Faulty<B> {
    fn create_pool(&self, device: DeviceId, keep: u64) -> Result<RawPool> {
        let mut made = RawPool { device, handle: 0 };
        self.gives("create_pool", || {
            made = self.backend.create_pool(device, keep)?;
            Ok(Thing::Pool(made.handle))
        })?;
        Ok(made)
    }

    unsafe fn destroy_pool(&self, pool: RawPool) -> Result<()> {
        // SAFETY: `destroy_pool`: the caller's own promise.
        self.takes("destroy_pool", Thing::Pool(pool.handle), || unsafe { self.backend.destroy_pool(pool) })
    }

    unsafe fn pool_alloc(&self, pool: RawPool, stream: RawStream, len: u64) -> Result<Allocation> {
        let mut made = Allocation { base: DevicePtr(0), len };
        self.gives("pool_alloc", || {
            // SAFETY: `pool_alloc`: the caller's own promise.
            made = unsafe { self.backend.pool_alloc(pool, stream, len) }?;
            Ok(Thing::Pooled(made.base.0))
        })?;
        Ok(made)
    }

    unsafe fn pool_free(&self, stream: RawStream, base: DevicePtr) -> Result<()> {
        // SAFETY: `pool_free`: the caller's own promise.
        self.takes("pool_free", Thing::Pooled(base.0), || unsafe { self.backend.pool_free(stream, base) })
    }

    unsafe fn pool_usage(&self, pool: RawPool) -> Result<PoolUsage> {
        self.turn("pool_usage")?;
        // SAFETY: `pool_usage`: the caller's own promise.
        unsafe { self.backend.pool_usage(pool) }
    }

    unsafe fn trim_pool(&self, pool: RawPool, keep: u64) -> Result<()> {
        self.turn("trim_pool")?;
        // SAFETY: `trim_pool`: the caller's own promise.
        unsafe { self.backend.trim_pool(pool, keep) }
    }

    fn alloc_managed(&self, device: DeviceId, len: u64) -> Result<Allocation> {
        let mut made = Allocation { base: DevicePtr(0), len };
        self.gives("alloc_managed", || {
            made = self.backend.alloc_managed(device, len)?;
            Ok(Thing::Memory(made.base.0))
        })?;
        Ok(made)
    }
}

// SAFETY: `GpuDevices`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuDevices for Faulty<B> {
    fn kind(&self) -> BackendKind {
        self.backend.kind()
    }

    fn device_count(&self) -> Result<u32> {
        self.turn("device_count")?;
        self.backend.device_count()
    }

    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo> {
        self.turn("device_info")?;
        self.backend.device_info(device)
    }

    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        self.turn("memory_info")?;
        self.backend.memory_info(device)
    }

    fn caps(&self, device: DeviceId) -> Result<Caps> {
        self.turn("caps")?;
        self.backend.caps(device)
    }

    fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        self.turn("enable_peer_access")?;
        self.backend.enable_peer_access(device, peer)
    }

    fn device_files(&self) -> &[&'static str] {
        self.backend.device_files()
    }
}

// SAFETY: `GpuMemory`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuMemory for Faulty<B> {
    fn alloc(&self, device: DeviceId, len: u64, sharing: Sharing) -> Result<Allocation> {
        let mut made = Allocation { base: DevicePtr(0), len: 0 };
        self.gives("alloc", || {
            made = self.backend.alloc(device, len, sharing)?;
            Ok(Thing::Memory(made.base.0))
        })?;
        Ok(made)
    }

    unsafe fn free(&self, base: DevicePtr) -> Result<()> {
        // SAFETY: `free`: the caller's own promise.
        self.takes("free", Thing::Memory(base.0), || unsafe { self.backend.free(base) })
    }

    unsafe fn close(&self, base: DevicePtr) -> Result<()> {
        // SAFETY: `close`: the caller's own promise.
        self.takes("close", Thing::Mapping(base.0), || unsafe { self.backend.close(base) })
    }
}

// SAFETY: `GpuPointers`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuPointers for Faulty<B> {
    fn address_range(&self, ptr: DevicePtr) -> Result<AddressRange> {
        self.turn("address_range")?;
        self.backend.address_range(ptr)
    }

    fn classify(&self, ptr: DevicePtr) -> Result<PointerInfo> {
        self.turn("classify")?;
        self.backend.classify(ptr)
    }
}

// SAFETY: `GpuHostMemory`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuHostMemory for Faulty<B> {
    fn host_alloc(&self, device: DeviceId, len: usize, memory: HostMemory) -> Result<HostPtr> {
        let mut made = HostPtr(0);
        self.gives("host_alloc", || {
            made = self.backend.host_alloc(device, len, memory)?;
            Ok(Thing::HostMemory(made.0))
        })?;
        Ok(made)
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: `host_free`: the caller's own promise.
        self.takes("host_free", Thing::HostMemory(ptr.0), || unsafe { self.backend.host_free(ptr) })
    }
}

// SAFETY: `GpuHandles`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuHandles for Faulty<B> {
    fn export_handle(&self, base: DevicePtr) -> Result<MemHandle> {
        self.turn("export_handle")?;
        self.backend.export_handle(base)
    }

    fn open_handle(&self, device: DeviceId, handle: &MemHandle) -> Result<DevicePtr> {
        let mut made = DevicePtr(0);
        self.gives("open_handle", || {
            self.pass_gate();
            made = self.backend.open_handle(device, handle)?;
            Ok(Thing::Mapping(made.0))
        })?;
        Ok(made)
    }
}

// SAFETY: `GpuDescriptors`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuDescriptors for Faulty<B> {
    fn export_fd(&self, base: DevicePtr) -> Result<OwnedFd> {
        self.turn("export_fd")?;
        self.backend.export_fd(base)
    }

    fn import_fd(&self, device: DeviceId, fd: BorrowedFd<'_>, len: u64, access: Access) -> Result<DevicePtr> {
        let mut made = DevicePtr(0);
        self.gives("import_fd", || {
            self.pass_gate();
            made = self.backend.import_fd(device, fd, len, access)?;
            Ok(Thing::Mapping(made.0))
        })?;
        Ok(made)
    }

    fn import_fds(
        &self,
        device: DeviceId,
        fds: &mut dyn ExactSizeIterator<Item = Result<OwnedFd>>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        let mut made = DevicePtr(0);
        self.gives("import_fds", || {
            made = self.backend.import_fds(device, fds, len, access)?;
            Ok(Thing::Mapping(made.0))
        })?;
        Ok(made)
    }
}

// SAFETY: `GpuEvents`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuEvents for Faulty<B> {
    fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent> {
        let mut made = RawEvent(0);
        self.gives("create_event", || {
            made = self.backend.create_event(device, kind)?;
            Ok(Thing::Event(made.0))
        })?;
        Ok(made)
    }

    unsafe fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.turn("record_event")?;
        // SAFETY: `record_event`: the caller's own promise.
        unsafe { self.backend.record_event(event, stream) }
    }

    unsafe fn query_event(&self, event: RawEvent) -> Result<bool> {
        self.turn("query_event")?;
        // SAFETY: `query_event`: the caller's own promise.
        unsafe { self.backend.query_event(event) }
    }

    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        self.turn("stream_wait_event")?;
        // SAFETY: `stream_wait_event`: the caller's own promise.
        unsafe { self.backend.stream_wait_event(stream, event) }
    }

    unsafe fn event_handle(&self, event: RawEvent) -> Result<EventHandle> {
        self.turn("event_handle")?;
        // SAFETY: `event_handle`: the caller's own promise.
        unsafe { self.backend.event_handle(event) }
    }

    fn open_event(&self, device: DeviceId, handle: &EventHandle) -> Result<RawEvent> {
        let mut made = RawEvent(0);
        self.gives("open_event", || {
            made = self.backend.open_event(device, handle)?;
            Ok(Thing::Event(made.0))
        })?;
        Ok(made)
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
        // SAFETY: `destroy_event`: the caller's own promise.
        self.takes("destroy_event", Thing::Event(event.0), || unsafe { self.backend.destroy_event(event) })
    }
}

// SAFETY: `GpuStreams`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuStreams for Faulty<B> {
    fn create_stream(&self, device: DeviceId) -> Result<RawStream> {
        let mut made = RawStream::new(device, 0);
        self.gives("create_stream", || {
            made = self.backend.create_stream(device)?;
            Ok(Thing::Stream(made.handle))
        })?;
        Ok(made)
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        // SAFETY: `destroy_stream`: the caller's own promise.
        self.takes("destroy_stream", Thing::Stream(stream.handle), || unsafe { self.backend.destroy_stream(stream) })
    }

    unsafe fn query_stream(&self, stream: RawStream) -> Result<bool> {
        self.turn("query_stream")?;
        // SAFETY: `query_stream`: the caller's own promise.
        unsafe { self.backend.query_stream(stream) }
    }

    unsafe fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        self.turn("synchronize_stream")?;
        // SAFETY: `synchronize_stream`: the caller's own promise.
        unsafe { self.backend.synchronize_stream(stream) }
    }

    unsafe fn stream_info(&self, stream: RawStream) -> Result<StreamInfo> {
        self.turn("stream_info")?;
        // SAFETY: `stream_info`: the caller's own promise.
        unsafe { self.backend.stream_info(stream) }
    }

    unsafe fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        self.turn("capture_status")?;
        // SAFETY: `capture_status`: the caller's own promise.
        let status = unsafe { self.backend.capture_status(stream) };
        if std::thread::current().name() == Some("gpu-ipc-participant")
            && let Some(act) = self.capture.lock().unwrap_or_else(PoisonError::into_inner).take()
        {
            act(&self.backend);
        }
        status
    }

    unsafe fn host_function(&self, stream: RawStream, function: Box<dyn FnOnce() + Send>) -> Result<()> {
        self.turn("host_function")?;
        // SAFETY: `host_function`: the caller's own promise.
        unsafe { self.backend.host_function(stream, function) }
    }
}

// SAFETY: `GpuCopies`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuCopies for Faulty<B> {
    unsafe fn copy_to_device(&self, stream: RawStream, to: DevicePtr, from: *const u8, len: usize) -> Result<()> {
        self.turn("copy_to_device")?;
        // SAFETY: `copy_to_device`: the caller's own promise.
        unsafe { self.backend.copy_to_device(stream, to, from, len) }
    }

    unsafe fn copy_to_host(&self, stream: RawStream, to: *mut u8, from: DevicePtr, len: usize) -> Result<()> {
        self.turn("copy_to_host")?;
        // SAFETY: `copy_to_host`: the caller's own promise.
        unsafe { self.backend.copy_to_host(stream, to, from, len) }
    }

    unsafe fn copy(&self, stream: RawStream, to: DevicePtr, from: DevicePtr, len: u64) -> Result<()> {
        self.turn("copy")?;
        // SAFETY: `copy`: the caller's own promise.
        unsafe { self.backend.copy(stream, to, from, len) }
    }

    unsafe fn fill(&self, stream: RawStream, to: DevicePtr, byte: u8, len: u64) -> Result<()> {
        self.turn("fill")?;
        // SAFETY: `fill`: the caller's own promise.
        unsafe { self.backend.fill(stream, to, byte, len) }
    }
}

// SAFETY: `GpuWords`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuWords for Faulty<B> {
    unsafe fn register_words(&self, start: HostPtr, len: usize) -> Result<WordPtr> {
        let mut made = WordPtr(0);
        self.gives("register_words", || {
            // SAFETY: `register_words`: the caller's own promise.
            made = unsafe { self.backend.register_words(start, len) }?;
            Ok(Thing::Words(start.0))
        })?;
        Ok(made)
    }

    unsafe fn unregister_words(&self, start: HostPtr) -> Result<()> {
        // SAFETY: `unregister_words`: the caller's own promise.
        self.takes("unregister_words", Thing::Words(start.0), || unsafe { self.backend.unregister_words(start) })
    }

    unsafe fn stream_batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        self.turn("stream_batch")?;
        // SAFETY: `stream_batch`: the caller's own promise.
        unsafe { self.backend.stream_batch(stream, ops) }
    }
}

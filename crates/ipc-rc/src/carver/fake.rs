//! A device of which only `alloc`, `free` and exporting exist, with numbers for memory, for the carver's tests.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use gpu_api::*;

/// What the device holds and how it misbehaves.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Length by base.
    pub live: BTreeMap<u64, u64>,
    pub allocs: usize,
    /// Bytes that may be live at once.
    pub room: u64,
    pub refuses_free: bool,
    pub refuses_export: bool,
    /// Bases lie between multiples of 256.
    pub misaligned: bool,
    next: u64,
}

/// Called at the start of every `alloc`, with no lock held.
type Gate = Box<dyn Fn() + Send + Sync>;

#[derive(Default)]
pub(super) struct Fake {
    state: Mutex<State>,
    gate: Option<Gate>,
}

impl std::fmt::Debug for Fake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fake")
    }
}

impl Fake {
    pub(super) fn new(room: u64) -> Arc<Fake> {
        Fake::with_gate(room, None)
    }

    pub(super) fn with_gate(room: u64, gate: Option<Gate>) -> Arc<Fake> {
        Arc::new(Fake { state: Mutex::new(State { room, next: 1 << 40, ..State::default() }), gate })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test panics under it")
    }

    pub(super) fn gpu(self: &Arc<Fake>) -> Gpu {
        Gpu::new(self.clone(), DeviceId(0)).expect("a device")
    }

    fn failure(call: &'static str) -> Error {
        let source = DriverError { backend: BackendKind::Host, code: 700, name: "made to fail".into() };
        Error::Driver { call, device: DeviceId(0), source }
    }

    fn used(state: &State) -> u64 {
        state.live.values().sum()
    }
}

// SAFETY: `GpuBackend` asks that live allocations do not overlap: bases only rise. There is neither an event nor a
// stream.
unsafe impl GpuBackend for Fake {
    fn kind(&self) -> BackendKind {
        BackendKind::Host
    }
    fn device_count(&self) -> Result<u32> {
        Ok(1)
    }
    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo> {
        Ok(DeviceInfo { device, uuid: DeviceUuid([0; 16]), name: "fake".into(), total_bytes: self.state().room })
    }
    fn memory_info(&self, _: DeviceId) -> Result<MemoryInfo> {
        let state = self.state();
        Ok(MemoryInfo { free_bytes: state.room - Fake::used(&state), total_bytes: state.room })
    }
    fn caps(&self, _: DeviceId) -> Result<Caps> {
        Ok(Caps { handle: true, fd: true, granularity: 4096, ..Caps::default() })
    }
    fn device_files(&self) -> &[&'static str] {
        &[]
    }
    fn alloc(&self, device: DeviceId, len: u64, _: Sharing) -> Result<Allocation> {
        if let Some(gate) = &self.gate {
            gate();
        }
        let mut state = self.state();
        let free = state.room - Fake::used(&state);
        let Some(rounded) = len.checked_next_multiple_of(4096).filter(|&rounded| rounded <= free) else {
            return Err(Error::OutOfMemory { device, asked: len, free, hint: "the fake is full".into() });
        };
        let base = state.next + if state.misaligned { 64 } else { 0 };
        // Bases are aligned to 256 bytes and to no more.
        state.next += rounded.next_multiple_of(8192) + 256;
        state.live.insert(base, rounded);
        state.allocs += 1;
        Ok(Allocation { base: DevicePtr(base), len: rounded })
    }
    unsafe fn free(&self, base: DevicePtr) -> Result<()> {
        let mut state = self.state();
        if state.refuses_free {
            return Err(Fake::failure("free"));
        }
        state.live.remove(&base.0).map(|_| ()).ok_or_else(|| panic!("{base} was freed twice"))
    }
    fn export_handle(&self, base: DevicePtr) -> Result<MemHandle> {
        if self.state().refuses_export {
            return Err(Fake::failure("export"));
        }
        let mut handle = [0; 64];
        handle[..8].copy_from_slice(&base.0.to_le_bytes());
        Ok(MemHandle(handle))
    }
    fn export_fd(&self, _: DevicePtr) -> Result<OwnedFd> {
        let (end, _) = std::io::pipe().expect("a pipe");
        Ok(end.into())
    }

    fn address_range(&self, _: DevicePtr) -> Result<AddressRange> {
        unreachable!()
    }
    fn classify(&self, _: DevicePtr) -> Result<PointerInfo> {
        unreachable!()
    }
    fn host_alloc(&self, _: DeviceId, _: usize, _: HostMemory) -> Result<HostPtr> {
        unreachable!()
    }
    unsafe fn host_free(&self, _: HostPtr) -> Result<()> {
        unreachable!()
    }
    fn open_handle(&self, _: DeviceId, _: &MemHandle) -> Result<DevicePtr> {
        unreachable!()
    }
    fn import_fd(&self, _: DeviceId, _: BorrowedFd<'_>, _: u64, _: Access) -> Result<DevicePtr> {
        unreachable!()
    }
    unsafe fn close(&self, _: DevicePtr) -> Result<()> {
        unreachable!()
    }
    fn create_event(&self, _: DeviceId, _: EventKind) -> Result<RawEvent> {
        unreachable!()
    }
    unsafe fn record_event(&self, _: RawEvent, _: RawStream) -> Result<()> {
        unreachable!()
    }
    unsafe fn query_event(&self, _: RawEvent) -> Result<bool> {
        unreachable!()
    }
    unsafe fn stream_wait_event(&self, _: RawStream, _: RawEvent) -> Result<()> {
        unreachable!()
    }
    unsafe fn event_handle(&self, _: RawEvent) -> Result<EventHandle> {
        unreachable!()
    }
    fn open_event(&self, _: DeviceId, _: &EventHandle) -> Result<RawEvent> {
        unreachable!()
    }
    unsafe fn destroy_event(&self, _: RawEvent) -> Result<()> {
        unreachable!()
    }
    fn create_stream(&self, _: DeviceId) -> Result<RawStream> {
        unreachable!()
    }
    unsafe fn destroy_stream(&self, _: RawStream) -> Result<()> {
        unreachable!()
    }
    unsafe fn query_stream(&self, _: RawStream) -> Result<bool> {
        unreachable!()
    }
    unsafe fn synchronize_stream(&self, _: RawStream) -> Result<()> {
        unreachable!()
    }
    unsafe fn stream_info(&self, _: RawStream) -> Result<StreamInfo> {
        unreachable!()
    }
    unsafe fn capture_status(&self, _: RawStream) -> Result<CaptureStatus> {
        unreachable!()
    }
    unsafe fn host_function(&self, _: RawStream, _: Box<dyn FnOnce() + Send>) -> Result<()> {
        unreachable!()
    }
    unsafe fn register_words(&self, _: HostPtr, _: usize) -> Result<WordPtr> {
        unreachable!()
    }
    unsafe fn unregister_words(&self, _: HostPtr) -> Result<()> {
        unreachable!()
    }
    unsafe fn stream_batch(&self, _: RawStream, _: &[StreamOp]) -> Result<()> {
        unreachable!()
    }
    unsafe fn copy_to_device(&self, _: RawStream, _: DevicePtr, _: *const u8, _: usize) -> Result<()> {
        unreachable!()
    }
    unsafe fn copy_to_host(&self, _: RawStream, _: *mut u8, _: DevicePtr, _: usize) -> Result<()> {
        unreachable!()
    }
    unsafe fn copy(&self, _: RawStream, _: DevicePtr, _: DevicePtr, _: u64) -> Result<()> {
        unreachable!()
    }
    unsafe fn fill(&self, _: RawStream, _: DevicePtr, _: u8, _: u64) -> Result<()> {
        unreachable!()
    }
}

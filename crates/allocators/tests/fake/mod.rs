//! A device with numbers for memory, and host memory that says which node it was asked for.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use gpu_api::*;

/// Bytes that a real driver rounds up to.
pub const GRANULARITY: u64 = 4096;

/// What the device holds and how it misbehaves.
#[derive(Debug, Default)]
pub struct FakeState {
    /// Length by base.
    pub live: BTreeMap<u64, u64>,
    pub allocs: usize,
    /// Bytes that may be live at once.
    pub room: u64,
    pub refuses_free: bool,
    pub refuses_export: bool,
    /// Whether its memory can be shared in no way.
    pub shares_nothing: bool,
    /// Which call of `alloc` or of an export fails, counted from 1; none for 0.
    pub fails_at: usize,
    /// Of how many calls in a row one fails; none for 0.
    pub fails_each: usize,
    /// How many there were.
    pub calls: usize,
    /// The nodes that host memory can be bound to; any when `None`.
    pub nodes: Option<Vec<u32>>,
    /// What host memory was asked for, in order.
    pub host: Vec<HostMemory>,
    /// What went back, in order: the bytes of device memory, the kind of host memory.
    pub freed: Vec<Freed>,
    /// Live host memory by address.
    host_live: BTreeMap<usize, (HostMemory, Box<[u64]>)>,
    /// Pools and streams that are there.
    pub pools: usize,
    pub streams: usize,
    next: u64,
}

/// What went back to the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Freed {
    Device(u64),
    Host(HostMemory),
}

impl FakeState {
    pub fn host_live(&self) -> usize {
        self.host_live.len()
    }
}

#[derive(Debug)]
pub struct Fake {
    state: Mutex<FakeState>,
    devices: u32,
}

impl Fake {
    pub fn new(room: u64) -> Arc<Fake> {
        Fake::with_devices(room, 1)
    }

    pub fn with_devices(room: u64, devices: u32) -> Arc<Fake> {
        Arc::new(Fake {
            state: Mutex::new(FakeState {
                room,
                next: 1 << 40,
                ..FakeState::default()
            }),
            devices,
        })
    }

    pub fn state(&self) -> MutexGuard<'_, FakeState> {
        self.state.lock().expect("no test panics under it")
    }

    pub fn live_bytes(&self) -> u64 {
        self.state().live.values().sum()
    }

    pub fn gpu(self: &Arc<Fake>) -> Gpu {
        self.device(0)
    }

    pub fn device(self: &Arc<Fake>, ordinal: u32) -> Gpu {
        Gpu::new(self.clone(), DeviceId(ordinal)).expect("a device")
    }

    /// Counts a call; the one that is to fail does.
    fn call(&self, call: &'static str) -> Result<()> {
        let mut state = self.state();
        state.calls += 1;
        let fails = state.calls == state.fails_at
            || state.fails_each > 0 && state.calls.is_multiple_of(state.fails_each);
        if fails {
            Err(Fake::failure(call))
        } else {
            Ok(())
        }
    }

    fn failure(call: &'static str) -> Error {
        let source = DriverError {
            backend: BackendKind::Host,
            code: 700,
            name: "made to fail".into(),
        };
        Error::Driver {
            call,
            device: DeviceId(0),
            source,
        }
    }
}

impl GpuBackend for Fake {
    fn handles(&self, _: DeviceId) -> Option<&dyn GpuHandles> {
        (!self.state().shares_nothing).then_some(self)
    }

    fn descriptors(&self, _: DeviceId) -> Option<&dyn GpuDescriptors> {
        (!self.state().shares_nothing).then_some(self)
    }

    fn event_handles(&self, _: DeviceId) -> Option<&dyn GpuEventHandles> {
        None
    }

    fn store(&self, _: DeviceId) -> Option<&dyn GpuStore> {
        None
    }

    fn ranges(&self, _: DeviceId) -> Option<&dyn GpuRanges> {
        None
    }

    fn pools(&self, _: DeviceId) -> Option<&dyn GpuPools> {
        Some(self)
    }

    fn managed(&self, _: DeviceId) -> Option<&dyn GpuManaged> {
        None
    }

    fn peers(&self, _: DeviceId) -> Option<&dyn GpuPeers> {
        None
    }

    fn host_functions(&self, _: DeviceId) -> Option<&dyn GpuHostFunctions> {
        None
    }

    fn captures(&self, _: DeviceId) -> Option<&dyn GpuCaptures> {
        None
    }

    fn lacks(&self, group: Group, device: DeviceId) -> Error {
        group.absent(BackendKind::Host, device)
    }
}

// SAFETY: `GpuPools`: live allocations do not overlap, since bases only rise, and none is handed
// out twice.
unsafe impl GpuPools for Fake {
    fn create_pool(&self, device: DeviceId, _: u64) -> Result<RawPool> {
        self.call("create_pool")?;
        self.state().pools += 1;
        Ok(RawPool { device, handle: 1 })
    }

    unsafe fn destroy_pool(&self, _: RawPool) -> Result<()> {
        self.state().pools -= 1;
        Ok(())
    }

    unsafe fn pool_alloc(&self, pool: RawPool, _: RawStream, len: u64) -> Result<Allocation> {
        self.alloc(pool.device, len, Sharing::Handle)
    }

    unsafe fn pool_free(&self, _: RawStream, base: DevicePtr) -> Result<()> {
        // SAFETY: `free`: the caller's own promise.
        unsafe { self.free(base) }
    }

    unsafe fn pool_usage(&self, _: RawPool) -> Result<PoolUsage> {
        let used = self.live_bytes();
        Ok(PoolUsage {
            reserved: used,
            most_reserved: used,
            used,
        })
    }

    unsafe fn trim_pool(&self, _: RawPool, _: u64) -> Result<()> {
        self.call("trim_pool")
    }
}

// SAFETY: `GpuDevices`: live allocations do not overlap, since bases only rise; there is nothing
// else that could break it.
unsafe impl GpuDevices for Fake {
    fn kind(&self) -> BackendKind {
        BackendKind::Host
    }

    fn device_count(&self) -> Result<u32> {
        Ok(self.devices)
    }

    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo> {
        let uuid = DeviceUuid([device.0 as u8; 16]);
        Ok(DeviceInfo {
            device,
            uuid,
            name: "fake".into(),
            total_bytes: self.state().room,
        })
    }

    fn memory_info(&self, _: DeviceId) -> Result<MemoryInfo> {
        let used = self.live_bytes();
        let room = self.state().room;
        Ok(MemoryInfo {
            free_bytes: room - used,
            total_bytes: room,
        })
    }

    fn pci_address(&self, _: DeviceId) -> Result<Option<String>> {
        Ok(None)
    }

    fn host_numa_node(&self, _: DeviceId) -> Result<Option<u32>> {
        Ok(None)
    }

    fn granularity(&self, _: DeviceId) -> Result<u64> {
        Ok(GRANULARITY)
    }

    fn shared_context(&self, _: DeviceId) -> Result<bool> {
        Ok(false)
    }

    fn own_sign(&self, _: DeviceId) -> Result<u32> {
        Ok(0)
    }

    fn signs_of_life(&self, _: u32, _: u32) -> Vec<PathBuf> {
        Vec::new()
    }

    fn quarantine(&self, _: bool) -> Duration {
        QUARANTINE
    }

    fn device_files(&self) -> &[&'static str] {
        &[]
    }
}

// SAFETY: `GpuMemory`: live allocations do not overlap, since bases only rise; there is nothing
// else that could break it.
unsafe impl GpuMemory for Fake {
    fn alloc(&self, device: DeviceId, len: u64, _: Sharing) -> Result<Allocation> {
        self.call("alloc")?;
        let mut state = self.state();
        let free = state.room - state.live.values().sum::<u64>();
        let Some(rounded) = len
            .checked_next_multiple_of(GRANULARITY)
            .filter(|&rounded| rounded <= free)
        else {
            return Err(Error::OutOfMemory {
                device,
                asked: len,
                free,
                hint: "the fake is full".into(),
            });
        };
        let base = state.next;
        // Bases are aligned to 256 bytes and to no more.
        state.next += rounded.next_multiple_of(2 * GRANULARITY) + 256;
        state.live.insert(base, rounded);
        state.allocs += 1;
        Ok(Allocation {
            base: DevicePtr(base),
            len: rounded,
        })
    }

    unsafe fn free(&self, base: DevicePtr) -> Result<()> {
        let mut state = self.state();
        if state.refuses_free {
            return Err(Fake::failure("free"));
        }
        let len = state
            .live
            .remove(&base.0)
            .unwrap_or_else(|| panic!("{base} was freed twice"));
        state.freed.push(Freed::Device(len));
        Ok(())
    }

    unsafe fn close(&self, _: DevicePtr) -> Result<()> {
        unreachable!()
    }
}

// SAFETY: `GpuPointers`: live allocations do not overlap, since bases only rise; there is nothing
// else that could break it.
unsafe impl GpuPointers for Fake {
    fn address_range(&self, _: DevicePtr) -> Result<AddressRange> {
        unreachable!()
    }

    fn classify(&self, _: DevicePtr) -> Result<PointerInfo> {
        unreachable!()
    }
}

// SAFETY: `GpuHostMemory`: live allocations do not overlap, since bases only rise; there is nothing
// else that could break it.
unsafe impl GpuHostMemory for Fake {
    fn host_alloc(&self, _: DeviceId, len: usize, memory: HostMemory) -> Result<HostPtr> {
        let mut state = self.state();
        state.host.push(memory);
        if let (Some(node), Some(nodes)) = (memory.numa_node, &state.nodes)
            && !nodes.contains(&node)
        {
            return Err(Error::system(
                "mbind",
                "ask for another",
                std::io::Error::from_raw_os_error(libc::EINVAL),
            ));
        }
        let mut words = vec![0u64; len.div_ceil(8) + 8].into_boxed_slice();
        let start = words.as_mut_ptr().expose_provenance();
        state.host_live.insert(start, (memory, words));
        Ok(HostPtr(start.next_multiple_of(64)))
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        let mut state = self.state();
        let start = state
            .host_live
            .range(..=ptr.0)
            .next_back()
            .map(|(&start, _)| start);
        let start = start
            .filter(|start| start.next_multiple_of(64) == ptr.0)
            .expect("memory that is out");
        let freed = state
            .host_live
            .remove(&start)
            .map(|(memory, _)| Freed::Host(memory));
        state.freed.extend(freed);
        Ok(())
    }
}

// SAFETY: `GpuHandles`: live allocations do not overlap, since bases only rise; there is nothing
// else that could break it.
unsafe impl GpuHandles for Fake {
    fn is_served(&self, _: DevicePtr) -> Result<bool> {
        Ok(true)
    }

    fn export_handle(&self, base: DevicePtr) -> Result<MemHandle> {
        self.call("export")?;
        if self.state().refuses_export {
            return Err(Fake::failure("export"));
        }
        let mut handle = [0; 64];
        handle[..8].copy_from_slice(&base.0.to_le_bytes());
        Ok(MemHandle(handle))
    }

    fn open_handle(&self, _: DeviceId, _: &MemHandle) -> Result<DevicePtr> {
        unreachable!()
    }
}

// SAFETY: `GpuDescriptors`: live allocations do not overlap, since bases only rise; there is
// nothing else that could break it.
unsafe impl GpuDescriptors for Fake {
    fn export_fd(&self, _: DevicePtr) -> Result<OwnedFd> {
        let (end, _) = std::io::pipe().expect("a pipe");
        Ok(end.into())
    }

    fn import_fd(&self, _: DeviceId, _: BorrowedFd<'_>, _: u64, _: Access) -> Result<DevicePtr> {
        unreachable!()
    }

    fn import_fds(
        &self,
        _: DeviceId,
        _: &mut dyn ExactSizeIterator<Item = Result<OwnedFd>>,
        _: u64,
        _: Access,
    ) -> Result<DevicePtr> {
        unreachable!()
    }

    fn maps_read_only(&self, _: DeviceId) -> Result<bool> {
        Ok(false)
    }
}

// SAFETY: `GpuEvents`: live allocations do not overlap, since bases only rise; there is nothing
// else that could break it.
unsafe impl GpuEvents for Fake {
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

    unsafe fn destroy_event(&self, _: RawEvent) -> Result<()> {
        unreachable!()
    }
}

// SAFETY: `GpuStreams`: live allocations do not overlap, since bases only rise; there is nothing
// else that could break it.
unsafe impl GpuStreams for Fake {
    fn create_stream(&self, device: DeviceId) -> Result<RawStream> {
        self.call("create_stream")?;
        self.state().streams += 1;
        Ok(RawStream::new(device, 16))
    }

    unsafe fn destroy_stream(&self, _: RawStream) -> Result<()> {
        self.state().streams -= 1;
        Ok(())
    }

    unsafe fn query_stream(&self, _: RawStream) -> Result<bool> {
        unreachable!()
    }

    unsafe fn synchronize_stream(&self, _: RawStream) -> Result<()> {
        self.call("synchronize_stream")
    }

    unsafe fn stream_info(&self, _: RawStream) -> Result<StreamInfo> {
        unreachable!()
    }
}

// SAFETY: `GpuCopies`: live allocations do not overlap, since bases only rise; there is nothing
// else that could break it.
unsafe impl GpuCopies for Fake {
    unsafe fn copy_to_device(
        &self,
        _: RawStream,
        _: DevicePtr,
        _: *const u8,
        _: usize,
    ) -> Result<()> {
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

// SAFETY: `GpuWords`: live allocations do not overlap, since bases only rise; there is nothing else
// that could break it.
unsafe impl GpuWords for Fake {
    fn word_ops(&self, _: DeviceId) -> Result<WordOps> {
        Ok(WordOps::default())
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
}

//! The backend: the tables of this process, and what it says of its devices. `memory_calls`,
//! `stream_calls` and `pool_calls` are the other groups of [`GpuBackend`]'s calls.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use gpu_api::groups::*;
use gpu_api::lock::Acquire;
use gpu_api::{
    BackendKind, CaptureStatus, DeviceId, DeviceInfo, DeviceUuid, Error, Group, KernelPages,
    MemoryInfo, QUARANTINE, RawEvent, RawStream, Result, refuse_capture,
};

use crate::config::HostConfig;
use crate::current::{self, Entered};
use crate::error::{
    CAPTURE_UNSUPPORTED, ILLEGAL_ADDRESS, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, driver,
};
use crate::event::Event;
use crate::memory::{self, GRANULARITY, Memories};
use crate::pool::Pools;
use crate::range::Ranges;
use crate::stream::{Stream, Waits};

/// Above the handles of default streams.
const FIRST_NUMBER: u64 = 16;
/// The quarantine of a process whose life is not shown, where that of others is: longer than any
/// test.
const HIDDEN: Duration = Duration::from_secs(3600);

#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) memories: Memories,
    pub(crate) ranges: Ranges,
    pub(crate) pools: Pools,
    pub(crate) streams: HashMap<u64, Arc<Stream>>,
    /// The handles of the default streams, made when first used: of a device, and of one of its
    /// threads.
    default_streams: HashMap<(DeviceId, Option<ThreadId>), u64>,
    pub(crate) events: HashMap<u64, Arc<Event>>,
    pub(crate) words: BTreeMap<usize, usize>,
    pub(crate) host: HashMap<usize, KernelPages>,
    /// The process that writes after this one's death.
    #[cfg(feature = "faults")]
    pub(crate) helper: Option<crate::late_write::Helper>,
}

/// The host backend.
pub struct HostBackend {
    pub(crate) config: HostConfig,
    tables: Mutex<Tables>,
    pub(crate) waits: Arc<Waits>,
    pub(crate) broken: Vec<Arc<AtomicBool>>,
    /// The next stream's or event's number; none is used twice.
    next: AtomicU64,
    /// Kept open, as a driver keeps its device files: a forked child that has it may keep GPU work
    /// alive.
    _device_file: OwnedFd,
}

/// Its tables grow with what is allocated, and are nobody's to read.
impl fmt::Debug for HostBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostConfig { devices, bytes, .. } = &self.config;
        f.debug_struct("HostBackend")
            .field("devices", devices)
            .field("bytes", bytes)
            .finish_non_exhaustive()
    }
}

impl HostBackend {
    /// Opens the backend.
    ///
    /// # Errors
    ///
    /// [`System`](gpu_api::Error::System) when the process has no file descriptor left.
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
            #[cfg(feature = "faults")]
            helper: None,
        };
        let broken = (0..config.devices).map(|_| Arc::default()).collect();
        let (tables, waits) = (Mutex::new(tables), Arc::default());
        let _device_file = memory::shared_file(GRANULARITY)?;
        Ok(Arc::new(HostBackend {
            config,
            tables,
            waits,
            broken,
            next: AtomicU64::new(FIRST_NUMBER),
            _device_file,
        }))
    }

    /// Sets what [`GpuCaptures::capture_status`] says of a stream.
    ///
    /// While it is not [`CaptureStatus::None`] nothing can be queued on the stream: a GPU would put
    /// it into a graph, and this library never wants that.
    pub fn set_capture(&self, stream: RawStream, status: CaptureStatus) {
        if let Ok((_, stream)) = self.find_stream("set_capture", stream) {
            stream.set_capture(status);
        }
    }

    /// Makes a device current on the calling thread, as an application does with `cudaSetDevice`;
    /// `None` leaves it without one.
    ///
    /// No call of [`GpuBackend`] depends on it: a stream brings its device.
    pub fn set_current_device(device: Option<DeviceId>) {
        current::set(device);
    }

    /// Returns the device that is current on the calling thread.
    pub fn current_device() -> Option<DeviceId> {
        current::current()
    }

    pub(crate) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.acquire()
    }

    pub(crate) fn check_device(&self, call: &'static str, device: DeviceId) -> Result<()> {
        match self.broken.get(device.0 as usize) {
            None => Err(driver(call, device, INVALID_DEVICE)),
            Some(broken) if broken.load(Ordering::Acquire) => {
                Err(driver(call, device, ILLEGAL_ADDRESS))
            }
            Some(_) => Ok(()),
        }
    }

    /// Finds a stream of a device that is not broken.
    pub(crate) fn stream(&self, call: &'static str, stream: RawStream) -> Result<Arc<Stream>> {
        Ok(self.find_stream(call, stream)?.1)
    }

    /// Finds a stream, and its number.
    pub(crate) fn find_stream(
        &self,
        call: &'static str,
        stream: RawStream,
    ) -> Result<(u64, Arc<Stream>)> {
        self.check_device(call, stream.device)?;
        let _here = Entered::new(stream.device);
        let number = if stream.is_default() {
            self.default_stream(call, stream.handle)?
        } else {
            stream.handle
        };
        let found = self
            .tables()
            .streams
            .get(&number)
            .filter(|found| found.device == stream.device)
            .cloned();
        Ok((
            number,
            found.ok_or_else(|| driver(call, stream.device, INVALID_VALUE))?,
        ))
    }

    /// Finds a default stream of the current device, or makes it.
    fn default_stream(&self, call: &'static str, handle: u64) -> Result<u64> {
        let device =
            current::current().ok_or_else(|| driver(call, DeviceId(0), INVALID_CONTEXT))?;
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
    pub(crate) fn queue(&self, call: &'static str, stream: RawStream) -> Result<Arc<Stream>> {
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
    pub(crate) fn push(
        &self,
        call: &'static str,
        stream: RawStream,
        op: impl FnOnce() + Send + 'static,
    ) -> Result<()> {
        self.queue(call, stream)?.push(op);
        Ok(())
    }

    pub(crate) fn event(&self, call: &'static str, event: RawEvent) -> Result<Arc<Event>> {
        // An event has no device here; a broken one breaks all, as a process with one context sees
        // it.
        self.check_device(call, DeviceId(0))?;
        self.tables()
            .events
            .get(&event.0)
            .cloned()
            .ok_or_else(|| driver(call, DeviceId(0), INVALID_VALUE))
    }

    pub(crate) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn block_while_waiting(&self) {
        if self.config.blocking_waits {
            self.waits.block();
        }
    }
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
        Ok(DeviceInfo {
            device,
            uuid: DeviceUuid(uuid),
            name,
            total_bytes: self.config.bytes,
        })
    }

    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        self.check_device("memory_info", device)?;
        let mut guard = self.tables();
        let tables = &mut *guard;
        tables.pools.settle(&mut tables.memories);
        Ok(MemoryInfo {
            free_bytes: tables.memories.free_bytes(device),
            total_bytes: self.config.bytes,
        })
    }

    fn pci_address(&self, device: DeviceId) -> Result<Option<String>> {
        self.check_device("pci_address", device).map(|()| None)
    }

    fn host_numa_node(&self, device: DeviceId) -> Result<Option<u32>> {
        self.check_device("host_numa_node", device).map(|()| None)
    }

    fn granularity(&self, device: DeviceId) -> Result<u64> {
        self.check_device("granularity", device)?;
        Ok(GRANULARITY)
    }

    fn shared_context(&self, _: DeviceId) -> Result<bool> {
        Ok(self.config.shared_context)
    }

    fn device_files(&self) -> &[&'static str] {
        &["/memfd:gpu-ipc-host"]
    }

    fn own_sign(&self, device: DeviceId) -> Result<u32> {
        self.check_device("own_sign", device).map(|()| 0)
    }

    fn signs_of_life(&self, pid: u32, sign: u32) -> Vec<PathBuf> {
        let folder = self.config.signs_of_life.iter();
        let names = folder.flat_map(|folder| [pid, sign].map(|name| folder.join(name.to_string())));
        names.collect()
    }

    fn quarantine(&self, is_shown: bool) -> Duration {
        if is_shown || self.config.signs_of_life.is_none() {
            QUARANTINE
        } else {
            HIDDEN
        }
    }
}

impl GpuBackend for HostBackend {
    fn handles(&self, _: DeviceId) -> Option<&dyn GpuHandles> {
        Some(self)
    }

    fn descriptors(&self, _: DeviceId) -> Option<&dyn GpuDescriptors> {
        Some(self)
    }

    fn event_handles(&self, _: DeviceId) -> Option<&dyn GpuEventHandles> {
        Some(self)
    }

    fn store(&self, _: DeviceId) -> Option<&dyn GpuStore> {
        Some(self)
    }

    fn ranges(&self, _: DeviceId) -> Option<&dyn GpuRanges> {
        Some(self)
    }

    fn pools(&self, _: DeviceId) -> Option<&dyn GpuPools> {
        Some(self)
    }

    fn managed(&self, _: DeviceId) -> Option<&dyn GpuManaged> {
        Some(self)
    }

    fn peers(&self, _: DeviceId) -> Option<&dyn GpuPeers> {
        Some(self)
    }

    fn host_functions(&self, _: DeviceId) -> Option<&dyn GpuHostFunctions> {
        Some(self)
    }

    fn captures(&self, _: DeviceId) -> Option<&dyn GpuCaptures> {
        Some(self)
    }

    fn lacks(&self, group: Group, device: DeviceId) -> Error {
        group.absent(BackendKind::Host, device)
    }
}

// SAFETY: `GpuPeers`: all memory is the host's, which every device reaches.
unsafe impl GpuPeers for HostBackend {
    fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        self.check_device("enable_peer_access", device)?;
        self.check_device("enable_peer_access", peer)
    }
}

impl Drop for HostBackend {
    fn drop(&mut self) {
        let tables = self
            .tables
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        for stream in tables.streams.values() {
            stream.destroy();
        }
    }
}

//! What NVIDIA's driver does otherwise than others.

use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::is_culib_present;
use driver::calls::{MemoryHandle, Stream};
use driver::code::Code;
use driver::device::attribute;
use driver::{Backend, Descriptor, DmaBuf, Driver, Quirks, Scope, Vendor, Words};
use gpu_api::{
    AddressRange, BackendKind, DeviceId, DevicePtr, DeviceUuid, DriverError, Error, ForkGuard,
    MemHandle, MemoryKind, PointerInfo, RawStream, Result, StreamInfo, StreamOp, WordOps,
};

use crate::cuda::Cuda;
use crate::sys::{self, MEMORY_GLOBAL, attribute as property};
use crate::{call, error, mps, pointer, start};

/// NVIDIA's driver, loaded at run time.
///
/// Each device's primary context is retained when something first needs it, so memory, streams and
/// events are the same ones that the CUDA runtime, PyTorch and cudarc see. Dropped, the backend
/// gives the contexts back if nothing that was made in them is left; else they stay until the
/// process ends.
///
/// # Portability
///
/// - `import_fd` maps all of the memory behind a descriptor or nothing: its length must be what
///   `alloc` gave, or any other that rounds up to that.
/// - A driver before CUDA 12.0 does not number streams; only streams of this backend have an
///   identity there.
/// - `Caps::shared_context` is `true` also where an MPS daemon's control file is found but its
///   device says nothing.
///
/// # Examples
///
/// ```
/// use backend_cuda::CudaBackend;
/// use gpu_api::{Error, GpuDevices};
///
/// match CudaBackend::load() {
///     Ok(cuda) => println!("{} devices", cuda.device_count()?),
///     Err(Error::Unavailable { why, remedy, .. }) => println!("no CUDA here: {why}; {remedy}"),
///     Err(other) => return Err(other),
/// }
/// # Ok::<(), Error>(())
/// ```
pub type CudaBackend = Backend<Cuda>;

/// What every driver of NVIDIA's does (measured on 535 to 580).
const QUIRKS: Quirks = Quirks {
    // `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
    open_flags: 1,
    granularity_flag: 0,
    least_granularity: 1,
    keeps_handles: false,
    imports_by_value: true,
    keeps_descriptors: false,
    tells_failed_mappings: true,
    maps_unchecked: false,
    destroy_waits: false,
    tail: 0,
};

impl Cuda {
    /// Says whether a device has a property.
    pub(crate) fn has(&self, ordinal: c_int, property: u32) -> bool {
        attribute(self, ordinal, property).is_some_and(|value| value != 0)
    }

    fn device_has(&self, device: DeviceId, property: u32) -> bool {
        self.ordinal(device)
            .is_ok_and(|ordinal| self.has(ordinal, property))
    }

    /// Returns the driver's number of a device that has virtual memory.
    fn virtual_memory(&self, device: DeviceId) -> Result<c_int> {
        let (ordinal, calls) = (self.ordinal(device)?, &self.driver.calls);
        let has = self.has(ordinal, property::VIRTUAL_MEMORY)
            && self.has(ordinal, property::HANDLE_POSIX_FD)
            && calls.memory_create.function.is_some()
            && calls.memory_import.function.is_some();
        if has {
            return Ok(ordinal);
        }
        Err(self.unsupported("memory that is shared by file descriptor", device))
    }
}

impl Vendor for Cuda {
    const KIND: BackendKind = BackendKind::Cuda;
    const NAME: &'static str = "CudaBackend";
    const WORDS: Words = Words {
        topology: "share within one device, or see `nvidia-smi topo -p2p r`",
        plain: "cuMemAlloc",
        virtual_memory: "cuMemCreate",
        managed: "cudaMallocManaged",
        host: "cudaMallocHost, cudaHostRegister",
        pool: "cudaMallocAsync",
        instead: "allocate it with cuMemAlloc (cudaMalloc), or with `Session::alloc`",
    };

    type Thread = call::Pushed;

    fn load() -> Result<Arc<Cuda>> {
        let fork = ForkGuard::new()?;
        // SAFETY: `is_culib_present` runs the initialisers of the libraries that it tries: the
        // driver's have no conditions.
        if !unsafe { is_culib_present() } {
            return Err(error::no_library());
        }
        // SAFETY: `sys::find` asks that the library can be loaded: it just was.
        let (calls, own) = unsafe { sys::find() };
        let (version, devices) = start::start(&own)?;
        Ok(Arc::new(Cuda {
            driver: Driver::new(calls),
            own,
            version,
            devices,
            fork,
        }))
    }

    fn closes(&self) -> bool {
        !self.fork.is_child()
    }

    unsafe fn release(&self) {
        // SAFETY: `release_contexts` has our conditions.
        unsafe { self.release_contexts() };
    }

    fn driver(&self) -> &Driver {
        &self.driver
    }

    fn quirks(&self) -> &Quirks {
        &QUIRKS
    }

    fn code(&self, code: Code) -> DriverError {
        self.own.error(code)
    }

    fn missing(&self, name: &'static str) -> Error {
        error::missing(name)
    }

    fn unsupported(&self, what: &'static str, device: DeviceId) -> Error {
        error::unsupported(what, device)
    }

    fn out_of_memory_hint(&self) -> &'static str {
        "collect or drop blocks, trim, or see `nvidia-smi` for other processes on the device"
    }

    fn on_device(&self, device: DeviceId) -> Result<Scope<'_, Cuda>> {
        self.enter_device(self.relaxed()?, device)
    }

    fn anywhere(&self) -> Result<Scope<'_, Cuda>> {
        self.enter_any()
    }

    fn beside_stream(&self, stream: RawStream) -> Result<Scope<'_, Cuda>> {
        self.enter_beside(stream)
    }

    fn asking_stream(&self, stream: RawStream) -> Result<Scope<'_, Cuda>> {
        // `cuStreamIsCapturing` asks about captures and ends none, and takes what it needs from the
        // stream that it is given. A default stream is that of a context.
        if stream.is_default() {
            self.on_device(stream.device)
        } else {
            Ok(Scope::untouched(self, Some(stream.device)))
        }
    }

    fn without_context(&self, device: DeviceId) -> Result<Scope<'_, Cuda>> {
        let mut scope = self.relaxed()?;
        scope.device = Some(device);
        Ok(scope)
    }

    fn leave(&self, pushed: &mut call::Pushed) {
        self.pop(pushed);
    }

    fn current_device(&self, _: &Scope<'_, Cuda>) -> Option<DeviceId> {
        self.device_number().ok()
    }

    fn count(&self) -> usize {
        self.devices.len()
    }

    fn ordinal(&self, device: DeviceId) -> Result<c_int> {
        self.device(device)?.ordinal.map_err(|code| Error::Driver {
            call: "cuDeviceGet",
            device,
            source: self.own.error(code),
        })
    }

    fn numbered(&self, ordinal: c_int) -> Option<DeviceId> {
        let found = self
            .devices
            .iter()
            .position(|device| device.ordinal == Ok(ordinal))?;
        Some(DeviceId(found as u32))
    }

    fn uuid(&self, device: DeviceId) -> Result<DeviceUuid> {
        self.device_uuid(device)
    }

    fn pci_address(&self, device: DeviceId) -> Result<Option<String>> {
        self.place(device)
    }

    fn host_numa_node(&self, device: DeviceId) -> Result<Option<u32>> {
        // The driver says -1 on a machine of one node.
        let node = attribute(self, self.ordinal(device)?, property::HOST_NUMA_NODE);
        Ok(node.and_then(|node| u32::try_from(node).ok()))
    }

    fn shares_handles(&self, device: DeviceId) -> bool {
        self.driver.calls.handle_get.function.is_some()
            && self.device_has(device, property::UNIFIED_ADDRESSING)
    }

    fn shares_events(&self, device: DeviceId) -> bool {
        let Ok(ordinal) = self.ordinal(device) else {
            return false;
        };
        // Drivers before 12.0 cannot be asked; where addresses are unified they had interprocess
        // events. A driver that cannot be asked either says in the call itself what is wrong.
        attribute(self, ordinal, property::IPC_EVENTS)
            .or_else(|| attribute(self, ordinal, property::UNIFIED_ADDRESSING))
            .is_none_or(|value| value != 0)
    }

    fn maps_read_only(&self, device: DeviceId) -> bool {
        self.virtual_memory(device).is_ok()
    }

    fn word_ops(&self, device: DeviceId) -> WordOps {
        let has = self.own.cuStreamBatchMemOp.function.is_some()
            && self.device_has(device, property::STREAM_MEMORY_OPERATIONS_64);
        WordOps {
            writes: has,
            waits: has,
        }
    }

    fn has_managed(&self, device: DeviceId) -> bool {
        self.own.cuMemAllocManaged.function.is_some()
            && self.device_has(device, property::CONCURRENT_MANAGED_ACCESS)
    }

    fn shared_context(&self, device: DeviceId) -> Result<bool> {
        let told = attribute(self, self.ordinal(device)?, property::MPS);
        Ok(told.is_some_and(|value| value != 0) || mps::daemon_answers())
    }

    fn descriptor(&self, device: DeviceId) -> Result<Option<Descriptor>> {
        match self.virtual_memory(device) {
            Ok(_) => Ok(Some(Descriptor::Vmm)),
            Err(Error::Unsupported { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn require_ranges(&self, device: DeviceId) -> Result<()> {
        self.virtual_memory(device).map(drop)
    }

    fn require_pools(&self, device: DeviceId) -> Result<()> {
        let call = &self.driver.calls.pool_alloc;
        if call.function.is_none() {
            return Err(error::missing(call.name));
        }
        if self.has(self.ordinal(device)?, property::MEMORY_POOLS) {
            return Ok(());
        }
        Err(self.unsupported("a pool of the driver's", device))
    }

    fn device_files(&self) -> &[&'static str] {
        &["/dev/nvidia"]
    }

    fn own_sign(&self, _: DeviceId) -> Result<u32> {
        Ok(0)
    }

    fn signs_of_life(&self, _: u32, _: u32) -> Vec<PathBuf> {
        Vec::new()
    }

    fn quarantine(&self, _: bool) -> Duration {
        gpu_api::QUARANTINE
    }

    fn open_way(&self, scope: &Scope<'_, Cuda>, peer: DeviceId) -> Result<(&'static str, Code)> {
        let symbol = &self.own.cuCtxEnablePeerAccess;
        let context = self.primary(scope, peer)?;
        let code = scope.code(symbol, |function| {
            // SAFETY: `cuCtxEnablePeerAccess` asks for a context that is alive: the peer's primary
            // one, retained until the backend is dropped. Its flags are 0.
            unsafe { function(context, 0) }
        })?;
        Ok((symbol.name, code))
    }

    fn stream(raw: RawStream) -> Stream {
        ptr::with_exposed_provenance_mut(raw.handle as usize)
    }

    unsafe fn stream_info(&self, stream: RawStream) -> Result<StreamInfo> {
        // SAFETY: `identify_stream` has our condition.
        unsafe { self.identify_stream(stream) }
    }

    unsafe fn call_back(&self, _: &Scope<'_, Cuda>, _: RawStream, _: *mut c_void) -> Result<()> {
        Err(error::missing("cuLaunchHostFunc"))
    }

    unsafe fn queue_words(
        &self,
        scope: &Scope<'_, Cuda>,
        stream: RawStream,
        ops: &[StreamOp],
    ) -> Result<()> {
        // SAFETY: `batch` has our conditions.
        unsafe { self.batch(scope, stream, ops) }
    }

    fn classify(&self, scope: &Scope<'_, Cuda>, ptr: DevicePtr) -> Result<PointerInfo> {
        self.classify_foreign(scope, ptr)
    }

    fn refusal(&self, kind: MemoryKind) -> Option<(&'static str, &'static str)> {
        pointer::refusal(kind)
    }

    fn export_handle(self: &Arc<Self>, base: DevicePtr) -> Result<MemHandle> {
        self.plain_handle(base)
    }

    fn open_handle(self: &Arc<Self>, device: DeviceId, handle: &MemHandle) -> Result<AddressRange> {
        let scope = self.on_device(device)?;
        driver::plain::open(&scope, handle)?
            .map_err(|code| scope.error(self.driver.calls.handle_open.name, code))
    }

    fn check_imported(&self, scope: &Scope<'_, Cuda>, handle: MemoryHandle) -> Result<()> {
        self.check_location(scope, handle)
    }

    fn dma_buf(&self) -> Option<&dyn DmaBuf> {
        None
    }

    fn alloc_managed(&self, device: DeviceId, size: u64) -> Result<DevicePtr> {
        let scope = self.on_device(device)?;
        let mut base = 0;
        scope.allocate(&self.own.cuMemAllocManaged, size, |function| {
            // SAFETY: `cuMemAllocManaged` writes one address: `base` is one.
            unsafe { function(&raw mut base, size as usize, MEMORY_GLOBAL) }
        })?;
        Ok(DevicePtr(base))
    }
}

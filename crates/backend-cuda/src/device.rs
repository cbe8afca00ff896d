//! The driver once it runs: its functions, its devices, and their primary contexts.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use gpu_api::{BackendKind, Caps, DeviceId, DeviceInfo, DeviceUuid, Error, GpuDevices, MemoryInfo, Result};

use crate::backend::CudaBackend;
use crate::call::Scope;
use crate::error::{self, SUCCESS};
use crate::mps;
use crate::sys::{CUcontext, CUdevice, CUuuid, Code, Symbol, Symbols, attribute};

/// What physical memory is rounded up to where the driver does not say: the page size of large device mappings.
const LARGE_PAGE: u64 = 2 << 20;

/// A driver that runs.
pub(crate) struct Driver {
    pub(crate) symbols: Symbols,
    version: u32,
    devices: Vec<Device>,
}

/// One device of the driver's.
struct Device {
    /// The driver's own number, or the code that it gave instead of one.
    ordinal: std::result::Result<CUdevice, Code>,
    /// The primary context as an address, once something needed it.
    context: OnceLock<usize>,
    /// Held while the context is retained, so that it is retained once.
    retaining: Mutex<()>,
}

impl Driver {
    /// Starts the driver.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] with the reason and what to do about it.
    pub(crate) fn start(symbols: Symbols) -> Result<Driver> {
        start_call(&symbols, &symbols.cuInit, |function| {
            // SAFETY: `cuInit` asks for 0.
            unsafe { function(0) }
        })?;
        let mut version: c_int = 0;
        start_call(&symbols, &symbols.cuDriverGetVersion, |function| {
            // SAFETY: `cuDriverGetVersion` writes one integer: `version` is one.
            unsafe { function(&raw mut version) }
        })?;
        let mut count: c_int = 0;
        start_call(&symbols, &symbols.cuDeviceGetCount, |function| {
            // SAFETY: `cuDeviceGetCount` writes one integer: `count` is one.
            unsafe { function(&raw mut count) }
        })?;
        if count <= 0 {
            return Err(symbols.unavailable("cuDeviceGetCount", 100));
        }
        let mut devices = Vec::new();
        for number in 0..count {
            let get = symbols.cuDeviceGet.function.ok_or_else(|| no_driver(&symbols.cuDeviceGet))?;
            let mut ordinal: CUdevice = 0;
            // SAFETY: `cuDeviceGet` writes one integer: `ordinal` is one.
            let code = unsafe { get(&raw mut ordinal, number) };
            // A device that fails keeps its number, and hides no other.
            let ordinal = if code == SUCCESS { Ok(ordinal) } else { Err(code) };
            devices.push(Device { ordinal, context: OnceLock::new(), retaining: Mutex::new(()) });
        }
        Ok(Driver { symbols, version: version.unsigned_abs(), devices })
    }

    /// Returns the version of CUDA that the driver speaks, as it writes it: 13000 is 13.0.
    pub(crate) fn version(&self) -> u32 {
        self.version
    }

    /// Counts the devices.
    pub(crate) fn count(&self) -> usize {
        self.devices.len()
    }

    /// Returns the first device whose primary context is retained.
    pub(crate) fn retained(&self) -> Option<DeviceId> {
        let found = self.devices.iter().position(|device| device.context.get().is_some())?;
        Some(DeviceId(found as u32))
    }

    /// Returns the driver's own number of a device.
    pub(crate) fn ordinal(&self, device: DeviceId) -> Result<CUdevice> {
        let ordinal = self.device(device)?.ordinal;
        ordinal.map_err(|code| Error::Driver { call: "cuDeviceGet", device, source: self.symbols.error(code) })
    }

    /// Finds our number of a device by the driver's.
    pub(crate) fn numbered(&self, ordinal: CUdevice) -> Option<DeviceId> {
        let found = self.devices.iter().position(|device| device.ordinal == Ok(ordinal))?;
        Some(DeviceId(found as u32))
    }

    /// Returns the number of the device whose context is current in `scope`.
    pub(crate) fn device_number(&self, scope: &Scope<'_>) -> Result<DeviceId> {
        let function = self.symbols.cuCtxGetDevice.function.ok_or_else(|| error::missing("cuCtxGetDevice"))?;
        let mut ordinal: CUdevice = 0;
        // SAFETY: `cuCtxGetDevice` writes one integer: `ordinal` is one.
        let code = unsafe { function(&raw mut ordinal) };
        match (code, self.numbered(ordinal)) {
            (SUCCESS, Some(device)) => Ok(device),
            // The scope must not ask for its device once more: this is what answers it.
            _ => Err(Error::Driver {
                call: "cuCtxGetDevice",
                device: DeviceId(0),
                source: scope.driver.symbols.error(code),
            }),
        }
    }

    /// Returns a device's primary context, retained on first use and kept until the backend is dropped.
    pub(crate) fn primary(&self, scope: &Scope<'_>, device: DeviceId) -> Result<CUcontext> {
        let (entry, ordinal) = (self.device(device)?, self.ordinal(device)?);
        if let Some(context) = entry.context.get() {
            return Ok(ptr::with_exposed_provenance_mut(*context));
        }
        let _retaining = entry.retaining.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = entry.context.get() {
            return Ok(ptr::with_exposed_provenance_mut(*context));
        }
        let mut context: CUcontext = ptr::null_mut();
        scope.call(&self.symbols.cuDevicePrimaryCtxRetain, |function| {
            // SAFETY: `cuDevicePrimaryCtxRetain` writes one pointer: `context` is one. The ordinal is the driver's.
            unsafe { function(&raw mut context, ordinal) }
        })?;
        let _ = entry.context.set(context.expose_provenance());
        Ok(context)
    }

    /// Gives the primary contexts back.
    ///
    /// # Safety
    ///
    /// Nothing that was made in them is left, and nobody calls this driver afterwards.
    pub(crate) unsafe fn release(&self) {
        let Ok(scope) = self.relaxed() else { return };
        for device in &self.devices {
            if let (Some(_), Ok(ordinal)) = (device.context.get(), device.ordinal) {
                // Nobody is left to be told of an error, and a context that stays is no worse than one unreleased.
                let _ = scope.code(&self.symbols.cuDevicePrimaryCtxRelease, |function| {
                    // SAFETY: `cuDevicePrimaryCtxRelease` asks for a context that was retained: `primary` did so once.
                    unsafe { function(ordinal) }
                });
            }
        }
    }

    /// Describes a device.
    pub(crate) fn info(&self, device: DeviceId) -> Result<DeviceInfo> {
        let ordinal = self.ordinal(device)?;
        let scope = self.relaxed()?;
        let mut name = [0 as c_char; 256];
        scope.call(&self.symbols.cuDeviceGetName, |function| {
            // SAFETY: `cuDeviceGetName` writes at most the number of bytes that it is told: one less than `name` has.
            unsafe { function(name.as_mut_ptr(), name.len() as c_int - 1, ordinal) }
        })?;
        // SAFETY: `CStr::from_ptr` asks for a zero within the array: its last byte was not offered to the driver.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut total_bytes = 0;
        scope.call(&self.symbols.cuDeviceTotalMem, |function| {
            // SAFETY: `cuDeviceTotalMem` writes one size: `total_bytes` is one.
            unsafe { function(&raw mut total_bytes, ordinal) }
        })?;
        let uuid = self.uuid(&scope, ordinal)?;
        Ok(DeviceInfo { device, uuid, name, total_bytes: total_bytes as u64 })
    }

    /// Returns free and total memory of a device.
    pub(crate) fn memory(&self, device: DeviceId) -> Result<MemoryInfo> {
        let (free_bytes, total_bytes) = self.on_device(device)?.memory_info()?;
        Ok(MemoryInfo { free_bytes, total_bytes })
    }

    /// Says what a device can do.
    pub(crate) fn caps(&self, device: DeviceId) -> Result<Caps> {
        let ordinal = self.ordinal(device)?;
        let has = |attribute| self.attribute(ordinal, attribute).is_some_and(|value| value != 0);
        let unified = has(attribute::UNIFIED_ADDRESSING);
        let fd = self.has_virtual_memory(ordinal);
        let words = has(attribute::STREAM_MEMORY_OPERATIONS_64) && self.symbols.cuStreamBatchMemOp.function.is_some();
        Ok(Caps {
            handle: unified && self.symbols.cuIpcGetMemHandle.function.is_some(),
            fd,
            read_only: fd,
            // Drivers before 12.0 cannot be asked; where addresses are unified they had interprocess events.
            event_ipc: self.attribute(ordinal, attribute::IPC_EVENTS).map_or(unified, |value| value != 0),
            stream_writes: words,
            stream_waits: words,
            ranges: fd,
            pools: has(attribute::MEMORY_POOLS) && self.symbols.cuMemAllocFromPoolAsync.function.is_some(),
            // Where host and device may not touch it at once, a host access beside a kernel ends the process.
            managed: has(attribute::CONCURRENT_MANAGED_ACCESS) && self.symbols.cuMemAllocManaged.function.is_some(),
            shared_context: match self.attribute(ordinal, attribute::MPS) {
                Some(value) => value != 0 || mps::daemon_answers(),
                None => mps::daemon_answers(),
            },
            granularity: if fd { self.granularity(device)? } else { LARGE_PAGE },
        })
    }

    /// Returns what physical memory of a device is rounded up to.
    pub(crate) fn granularity(&self, device: DeviceId) -> Result<u64> {
        let ordinal = self.ordinal(device)?;
        if !self.has_virtual_memory(ordinal) {
            return Ok(LARGE_PAGE);
        }
        let scope = self.relaxed()?;
        let mut granularity = 0;
        let properties = crate::vmm::properties(ordinal);
        scope.call(&self.symbols.cuMemGetAllocationGranularity, |function| {
            // SAFETY: `cuMemGetAllocationGranularity` writes one size and reads the properties: both live here.
            unsafe { function(&raw mut granularity, &raw const properties, crate::sys::GRANULARITY_MINIMUM) }
        })?;
        // A granularity of zero would be a broken driver; rounding by it must not be a division by zero.
        Ok((granularity as u64).max(1))
    }

    /// Says whether a device has memory that is exported as file descriptors.
    pub(crate) fn has_virtual_memory(&self, ordinal: CUdevice) -> bool {
        let has = |attribute| self.attribute(ordinal, attribute).is_some_and(|value| value != 0);
        has(attribute::VIRTUAL_MEMORY)
            && has(attribute::HANDLE_POSIX_FD)
            && self.symbols.cuMemCreate.function.is_some()
            && self.symbols.cuMemImportFromShareableHandle.function.is_some()
    }

    /// Says whether one device can reach the memory of another.
    pub(crate) fn can_access(&self, scope: &Scope<'_>, device: CUdevice, peer: CUdevice) -> Result<bool> {
        let mut can: c_int = 0;
        scope.call(&self.symbols.cuDeviceCanAccessPeer, |function| {
            // SAFETY: `cuDeviceCanAccessPeer` writes one integer: `can` is one. The ordinals are the driver's.
            unsafe { function(&raw mut can, device, peer) }
        })?;
        Ok(can != 0)
    }

    /// Returns where a device lies on the PCI bus. Its function is 0: CUDA counts devices, not functions.
    pub(crate) fn pci_address(&self, device: DeviceId) -> Result<Option<String>> {
        let ordinal = self.ordinal(device)?;
        let part = |attribute| self.attribute(ordinal, attribute);
        let place = (part(attribute::PCI_DOMAIN), part(attribute::PCI_BUS), part(attribute::PCI_DEVICE));
        let (Some(domain), Some(bus), Some(device)) = place else { return Ok(None) };
        Ok(Some(format!("{domain:04x}:{bus:02x}:{device:02x}.0")))
    }

    /// Returns the host's NUMA node that a device is closest to; the driver says -1 on a machine of one node.
    pub(crate) fn host_numa_node(&self, device: DeviceId) -> Result<Option<u32>> {
        let ordinal = self.ordinal(device)?;
        Ok(self.attribute(ordinal, attribute::HOST_NUMA_NODE).and_then(|node| u32::try_from(node).ok()))
    }

    /// Asks for a property; `None` where the driver does not know it.
    fn attribute(&self, ordinal: CUdevice, attribute: u32) -> Option<c_int> {
        let function = self.symbols.cuDeviceGetAttribute.function?;
        let mut value: c_int = 0;
        // SAFETY: `cuDeviceGetAttribute` writes one integer: `value` is one. Unknown attributes are refused.
        let code = unsafe { function(&raw mut value, attribute, ordinal) };
        (code == SUCCESS).then_some(value)
    }

    fn uuid(&self, scope: &Scope<'_>, ordinal: CUdevice) -> Result<DeviceUuid> {
        // The older function names the whole device where the younger one names its partition (MIG).
        let symbol = match self.symbols.cuDeviceGetUuid.function {
            Some(_) => &self.symbols.cuDeviceGetUuid,
            None => &self.symbols.cuDeviceGetUuidOld,
        };
        let mut uuid = CUuuid { bytes: [0; 16] };
        scope.call(symbol, |function| {
            // SAFETY: `cuDeviceGetUuid` writes 16 bytes: `uuid` has as many.
            unsafe { function(&raw mut uuid, ordinal) }
        })?;
        Ok(DeviceUuid(uuid.bytes.map(|byte| byte as u8)))
    }

    fn device(&self, device: DeviceId) -> Result<&Device> {
        self.devices.get(device.0 as usize).ok_or_else(|| error::no_device(device, self.devices.len()))
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("version", &self.version)
            .field("devices", &self.devices.len())
            .finish_non_exhaustive()
    }
}

/// Calls a function that starts the driver: whatever goes wrong, the driver is unavailable.
fn start_call<F: Copy>(symbols: &Symbols, symbol: &Symbol<F>, run: impl FnOnce(F) -> Code) -> Result<()> {
    match run(symbol.function.ok_or_else(|| no_driver(symbol))?) {
        SUCCESS => Ok(()),
        code => Err(symbols.unavailable(symbol.name, code)),
    }
}

/// Refuses a library without a function that every driver has.
fn no_driver<F>(symbol: &Symbol<F>) -> Error {
    Error::Unavailable {
        backend: BackendKind::Cuda,
        why: format!("the library that was loaded has no {}", symbol.name),
        remedy: "it is not NVIDIA's: see LD_LIBRARY_PATH, or install the NVIDIA driver",
    }
}

// SAFETY: the condition of `GpuDevices`: what is promised is what the driver says of the device.
unsafe impl GpuDevices for CudaBackend {
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

    fn host_numa_node(&self, device: DeviceId) -> Result<Option<u32>> {
        self.driver.host_numa_node(device)
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
}

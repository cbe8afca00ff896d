//! What the driver says of a device.

use std::ffi::{CStr, c_char, c_int};

use gpu_api::{
    BackendKind, Caps, DeviceId, DeviceInfo, DeviceUuid, GpuDevices, MemoryInfo, Result,
};

use crate::backend::CudaBackend;
use crate::call::Scope;
use crate::driver::Driver;
use crate::mps;
use crate::sys::{AllocationProperties, CUdevice, CUuuid, GRANULARITY_MINIMUM, attribute};

/// What physical memory is rounded up to where the driver does not say: the page size of large
/// device mappings.
const LARGE_PAGE: u64 = 2 << 20;

impl Driver {
    /// Describes a device.
    pub(crate) fn info(&self, device: DeviceId) -> Result<DeviceInfo> {
        let ordinal = self.ordinal(device)?;
        let scope = self.relaxed()?;
        let mut name = [0 as c_char; 256];
        scope.call(&self.symbols.cuDeviceGetName, |function| {
            // SAFETY: `cuDeviceGetName` writes at most the number of bytes that it is told: one
            // less than `name` has.
            unsafe { function(name.as_mut_ptr(), name.len() as c_int - 1, ordinal) }
        })?;
        // SAFETY: `CStr::from_ptr` asks for a zero within the array: its last byte was not offered
        // to the driver.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }
            .to_string_lossy()
            .into_owned();
        let mut total_bytes = 0;
        scope.call(&self.symbols.cuDeviceTotalMem, |function| {
            // SAFETY: `cuDeviceTotalMem` writes one size: `total_bytes` is one.
            unsafe { function(&raw mut total_bytes, ordinal) }
        })?;
        let uuid = self.uuid(&scope, ordinal)?;
        Ok(DeviceInfo {
            device,
            uuid,
            name,
            total_bytes: total_bytes as u64,
        })
    }

    /// Returns free and total memory of a device.
    pub(crate) fn memory(&self, device: DeviceId) -> Result<MemoryInfo> {
        let (free_bytes, total_bytes) = self.on_device(device)?.memory_info()?;
        Ok(MemoryInfo {
            free_bytes,
            total_bytes,
        })
    }

    /// Says what a device can do.
    pub(crate) fn caps(&self, device: DeviceId) -> Result<Caps> {
        let ordinal = self.ordinal(device)?;
        let has = |attribute| {
            self.attribute(ordinal, attribute)
                .is_some_and(|value| value != 0)
        };
        let unified = has(attribute::UNIFIED_ADDRESSING);
        let fd = self.has_virtual_memory(ordinal);
        let words = has(attribute::STREAM_MEMORY_OPERATIONS_64)
            && self.symbols.cuStreamBatchMemOp.function.is_some();
        Ok(Caps {
            handle: unified && self.symbols.cuIpcGetMemHandle.function.is_some(),
            fd,
            read_only: fd,
            // Drivers before 12.0 cannot be asked; where addresses are unified they had
            // interprocess events.
            event_ipc: self
                .attribute(ordinal, attribute::IPC_EVENTS)
                .map_or(unified, |value| value != 0),
            stream_writes: words,
            stream_waits: words,
            ranges: fd,
            pools: has(attribute::MEMORY_POOLS)
                && self.symbols.cuMemAllocFromPoolAsync.function.is_some(),
            // Where host and device may not touch it at once, a host access beside a kernel ends
            // the process.
            managed: has(attribute::CONCURRENT_MANAGED_ACCESS)
                && self.symbols.cuMemAllocManaged.function.is_some(),
            shared_context: match self.attribute(ordinal, attribute::MPS) {
                Some(value) => value != 0 || mps::daemon_answers(),
                None => mps::daemon_answers(),
            },
            granularity: if fd {
                self.granularity(device)?
            } else {
                LARGE_PAGE
            },
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
        let properties = AllocationProperties::exportable(ordinal);
        scope.call(&self.symbols.cuMemGetAllocationGranularity, |function| {
            // SAFETY: `cuMemGetAllocationGranularity` writes one size and reads the properties:
            // both live here.
            unsafe {
                function(
                    &raw mut granularity,
                    &raw const properties,
                    GRANULARITY_MINIMUM,
                )
            }
        })?;
        // A granularity of zero would be a broken driver; rounding by it must not be a division by
        // zero.
        Ok((granularity as u64).max(1))
    }

    /// Says whether one device can reach the memory of another.
    pub(crate) fn can_access(
        &self,
        scope: &Scope<'_>,
        device: CUdevice,
        peer: CUdevice,
    ) -> Result<bool> {
        let mut can: c_int = 0;
        scope.call(&self.symbols.cuDeviceCanAccessPeer, |function| {
            // SAFETY: `cuDeviceCanAccessPeer` writes one integer: `can` is one. The ordinals are
            // the driver's.
            unsafe { function(&raw mut can, device, peer) }
        })?;
        Ok(can != 0)
    }

    /// Returns where a device lies on the PCI bus. Its function is 0: CUDA counts devices, not
    /// functions.
    pub(crate) fn pci_address(&self, device: DeviceId) -> Result<Option<String>> {
        let ordinal = self.ordinal(device)?;
        let part = |attribute| self.attribute(ordinal, attribute);
        let place = (
            part(attribute::PCI_DOMAIN),
            part(attribute::PCI_BUS),
            part(attribute::PCI_DEVICE),
        );
        let (Some(domain), Some(bus), Some(device)) = place else {
            return Ok(None);
        };
        Ok(Some(format!("{domain:04x}:{bus:02x}:{device:02x}.0")))
    }

    /// Returns the host's NUMA node that a device is closest to; the driver says -1 on a machine of
    /// one node.
    pub(crate) fn host_numa_node(&self, device: DeviceId) -> Result<Option<u32>> {
        let ordinal = self.ordinal(device)?;
        Ok(self
            .attribute(ordinal, attribute::HOST_NUMA_NODE)
            .and_then(|node| u32::try_from(node).ok()))
    }

    fn uuid(&self, scope: &Scope<'_>, ordinal: CUdevice) -> Result<DeviceUuid> {
        // The older function names the whole device where the younger one names its partition
        // (MIG).
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

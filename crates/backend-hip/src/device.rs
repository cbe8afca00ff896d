//! What the runtime says of a device, and what may be used of it.

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use std::time::Duration;

use gpu_api::{
    BackendKind, Caps, DeviceId, DeviceInfo, DeviceUuid, Error, GpuDevices, MemoryInfo, Result,
};

use crate::backend::HipBackend;
use crate::call::Scope;
use crate::driver::Driver;
use crate::error::SUCCESS;
use crate::proof::Step;
use crate::sys::{
    ATTRIBUTE_HOST_NUMA_NODE, ATTRIBUTE_VIRTUAL_MEMORY, AllocationProperties,
    GRANULARITY_RECOMMENDED, Uuid,
};

/// The quarantine where the kernel shows when a dead process' queues are gone.
const SHOWN: Duration = Duration::from_millis(100);

/// The quarantine where it does not. Kernels from 6.0 to 6.18 remove queues on a work queue some
/// time after the process' end, within no bound (amdkfd; guessed from the dates of both patches):
/// long beside any delay of a work queue that is not stuck.
const UNSEEN: Duration = Duration::from_secs(5);

/// What every allocation is rounded up to at least: handles of some other sizes were refused
/// (ROCm/hip#2257), and pieces below are leaked by the runtime's older way of sharing
/// (ROCm/rocm-systems#6407).
const LARGE_PAGE: u64 = 2 << 20;

/// How file descriptors of memory are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Descriptor {
    /// From virtual memory.
    Vmm,
    /// From plain memory.
    DmaBuf,
}

impl Driver {
    /// Asks every device for its identity. One that fails is asked again, for the reason, by those
    /// who want it: it hides no other.
    pub(crate) fn identified(mut self) -> Driver {
        self.identities = (0..self.count() as c_int)
            .map(|ordinal| self.identify(ordinal).ok())
            .collect();
        self
    }

    /// Finds a device's identity: AMD's own 16 bytes, or, where there are none, its place on the
    /// PCI bus.
    fn identify(&self, ordinal: c_int) -> Result<DeviceUuid> {
        let scope = self.anywhere()?;
        let mut uuid = Uuid { bytes: [0; 16] };
        if self.symbols.hipDeviceGetUuid.function.is_some() {
            let code = scope.code(&self.symbols.hipDeviceGetUuid, |function| {
                // SAFETY: `hipDeviceGetUuid` writes 16 bytes: `uuid` has as many.
                unsafe { function(&raw mut uuid, ordinal) }
            })?;
            // GPUs without a number of their own all say "XX".
            let tells = |byte: c_char| !matches!(byte as u8, 0 | b'0' | b'X');
            if code == SUCCESS && uuid.bytes.iter().any(|&byte| tells(byte)) {
                return Ok(DeviceUuid(uuid.bytes.map(|byte| byte as u8)));
            }
        }
        let place = self.place(ordinal)?;
        // "0000:03:00.0" has twelve characters: with the mark in front it is exactly as long as an
        // identity.
        let mut bytes = *b"pci-............";
        for (to, from) in bytes[4..].iter_mut().zip(place.bytes()) {
            *to = from;
        }
        Ok(DeviceUuid(bytes))
    }

    /// Describes a device.
    pub(crate) fn info(&self, device: DeviceId) -> Result<DeviceInfo> {
        let ordinal = self.ordinal(device)?;
        let uuid = match self.identities[device.0 as usize] {
            Some(uuid) => uuid,
            None => self.identify(ordinal)?,
        };
        if self
            .identities
            .iter()
            .filter(|other| **other == Some(uuid))
            .count()
            > 1
        {
            return Err(Error::Unsupported {
                what: "a device that cannot be told from another",
                why: format!("the runtime gives {device} and another one the identity {uuid}"),
                remedy: "show each process one of them (ROCR_VISIBLE_DEVICES), or do not partition the GPU",
            });
        }
        let scope = self.anywhere()?;
        let mut name = [0 as c_char; 256];
        scope.call(&self.symbols.hipDeviceGetName, |function| {
            // SAFETY: `hipDeviceGetName` writes at most the number of bytes that it is told: one
            // less than `name` has.
            unsafe { function(name.as_mut_ptr(), name.len() as c_int - 1, ordinal) }
        })?;
        let mut total_bytes = 0;
        scope.call(&self.symbols.hipDeviceTotalMem, |function| {
            // SAFETY: `hipDeviceTotalMem` writes one size: `total_bytes` is one.
            unsafe { function(&raw mut total_bytes, ordinal) }
        })?;
        Ok(DeviceInfo {
            device,
            uuid,
            name: text(&name),
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

    /// Says what a device can do: what the runtime has, and of that what a probe proved.
    pub(crate) fn caps(&self, device: DeviceId) -> Result<Caps> {
        let symbols = &self.symbols;
        let descriptor = self.descriptor(device)?;
        Ok(Caps {
            handle: symbols.hipIpcGetMemHandle.function.is_some()
                && symbols.hipIpcOpenMemHandle.function.is_some(),
            fd: descriptor.is_some(),
            read_only: descriptor == Some(Descriptor::Vmm) && self.proved(Step::ReadOnly),
            event_ipc: self.proved(Step::Events) && symbols.hipIpcGetEventHandle.function.is_some(),
            stream_writes: self.proved(Step::Words)
                && symbols.hipStreamWriteValue64.function.is_some(),
            stream_waits: self.proved(Step::Words)
                && self.proved(Step::Waits)
                && symbols.hipStreamWaitValue64.function.is_some(),
            // Its virtual memory is not known to hold on every runtime.
            ranges: false,
            pools: self.require_pools().is_ok(),
            managed: false,
            shared_context: false,
            granularity: self.granularity(device)?,
        })
    }

    /// Says how file descriptors of a device's memory are made, if at all.
    pub(crate) fn descriptor(&self, device: DeviceId) -> Result<Option<Descriptor>> {
        self.ordinal(device)?;
        if self.proved(Step::Vmm) && self.has_virtual_memory(device)? {
            return Ok(Some(Descriptor::Vmm));
        }
        let dma_buf = self.proved(Step::DmaBuf)
            && self
                .symbols
                .hipMemGetHandleForAddressRange
                .function
                .is_some();
        Ok(dma_buf.then_some(Descriptor::DmaBuf))
    }

    /// Returns what memory of a device is rounded up to.
    pub(crate) fn granularity(&self, device: DeviceId) -> Result<u64> {
        if self.descriptor(device)? != Some(Descriptor::Vmm) {
            return Ok(LARGE_PAGE);
        }
        let scope = self.anywhere()?;
        let mut granularity = 0;
        let properties = AllocationProperties::exportable(self.ordinal(device)?);
        scope.call(&self.symbols.hipMemGetAllocationGranularity, |function| {
            // SAFETY: `hipMemGetAllocationGranularity` writes one size and reads the properties:
            // both live here.
            unsafe {
                function(
                    &raw mut granularity,
                    &raw const properties,
                    GRANULARITY_RECOMMENDED,
                )
            }
        })?;
        Ok((granularity as u64).max(LARGE_PAGE))
    }

    /// Says whether one device can reach the memory of another.
    pub(crate) fn can_access(&self, scope: &Scope<'_>, device: c_int, peer: c_int) -> Result<bool> {
        let mut can: c_int = 0;
        scope.call(&self.symbols.hipDeviceCanAccessPeer, |function| {
            // SAFETY: `hipDeviceCanAccessPeer` writes one integer: `can` is one. It refuses what is
            // no device.
            unsafe { function(&raw mut can, device, peer) }
        })?;
        Ok(can != 0)
    }

    fn has_virtual_memory(&self, device: DeviceId) -> Result<bool> {
        let ordinal = self.ordinal(device)?;
        let symbols = &self.symbols;
        let Some(ask) = symbols.hipDeviceGetAttribute.function else {
            return Ok(false);
        };
        let mut value: c_int = 0;
        // SAFETY: `hipDeviceGetAttribute` writes one integer: `value` is one. Unknown attributes
        // are refused.
        let code = unsafe { ask(&raw mut value, ATTRIBUTE_VIRTUAL_MEMORY, ordinal) };
        Ok(self.version().has_virtual_memory()
            && code == SUCCESS
            && value != 0
            && symbols.hipMemCreate.function.is_some()
            && symbols.hipMemImportFromShareableHandle.function.is_some())
    }

    /// Returns the host's NUMA node that a device is closest to, which runtimes from 7.2 on tell.
    pub(crate) fn host_numa_node(&self, device: DeviceId) -> Result<Option<u32>> {
        let ordinal = self.ordinal(device)?;
        let Some(ask) = self
            .symbols
            .hipDeviceGetAttribute
            .function
            .filter(|_| self.version().tells_numa_nodes())
        else {
            return Ok(None);
        };
        let mut node: c_int = -1;
        // SAFETY: `hipDeviceGetAttribute` writes one integer: `node` is one. Unknown attributes are
        // refused.
        let code = unsafe { ask(&raw mut node, ATTRIBUTE_HOST_NUMA_NODE, ordinal) };
        Ok(u32::try_from(node).ok().filter(|_| code == SUCCESS))
    }

    /// Returns where a device lies on the PCI bus (`0000:03:00.0`).
    pub(crate) fn place(&self, ordinal: c_int) -> Result<String> {
        let scope = self.anywhere()?;
        let mut place = [0 as c_char; 64];
        scope.call(&self.symbols.hipDeviceGetPCIBusId, |function| {
            // SAFETY: `hipDeviceGetPCIBusId` writes at most the number of bytes that it is told:
            // one less than `place` has.
            unsafe { function(place.as_mut_ptr(), place.len() as c_int - 1, ordinal) }
        })?;
        Ok(text(&place))
    }
}

/// Reads a text that the runtime wrote into an array whose last byte it was not offered.
fn text(bytes: &[c_char]) -> String {
    // SAFETY: `CStr::from_ptr` asks for a zero within the array: its last byte is one, see above.
    unsafe { CStr::from_ptr(bytes.as_ptr()) }
        .to_string_lossy()
        .into_owned()
}

// SAFETY: the condition of `GpuDevices`: what is promised is what the runtime has, and of that what
// a probe saw.
unsafe impl GpuDevices for HipBackend {
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
        self.driver.device_files()
    }

    fn signs_of_life(&self, pid: u32) -> Vec<PathBuf> {
        self.driver
            .signs()
            .iter()
            .map(|folder| folder.join(pid.to_string()))
            .collect()
    }

    fn quarantine(&self) -> Duration {
        if self.driver.signs().is_some() {
            SHOWN
        } else {
            UNSEEN
        }
    }
}

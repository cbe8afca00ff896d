//! What the driver says of a device.

use driver::calls::Uuid;
use driver::device::{attribute as ask, granularity};
use driver::{Scope, Vendor};
use gpu_api::{Caps, DeviceId, DeviceUuid, Result};

use crate::cuda::Cuda;
use crate::mps;
use crate::sys::attribute;

impl Cuda {
    /// Says what a device can do.
    pub(crate) fn device_caps(&self, device: DeviceId) -> Result<Caps> {
        let ordinal = self.ordinal(device)?;
        let has = |attribute| self.has(ordinal, attribute);
        let unified = has(attribute::UNIFIED_ADDRESSING);
        let fd = self.descriptor(device)?.is_some();
        let words = has(attribute::STREAM_MEMORY_OPERATIONS_64)
            && self.own.cuStreamBatchMemOp.function.is_some();
        Ok(Caps {
            handle: unified && self.driver().calls.handle_get.function.is_some(),
            fd,
            read_only: fd,
            // Drivers before 12.0 cannot be asked; where addresses are unified they had
            // interprocess events.
            event_ipc: ask(self, ordinal, attribute::IPC_EVENTS)
                .map_or(unified, |value| value != 0),
            stream_writes: words,
            stream_waits: words,
            ranges: fd,
            pools: has(attribute::MEMORY_POOLS)
                && self.driver().calls.pool_alloc.function.is_some(),
            // Where host and device may not touch it at once, a host access beside a kernel ends
            // the process.
            managed: has(attribute::CONCURRENT_MANAGED_ACCESS)
                && self.own.cuMemAllocManaged.function.is_some(),
            shared_context: match ask(self, ordinal, attribute::MPS) {
                Some(value) => value != 0 || mps::daemon_answers(),
                None => mps::daemon_answers(),
            },
            granularity: granularity(self, device)?,
        })
    }

    /// Returns where a device lies on the PCI bus. Its function is 0: CUDA counts devices, not
    /// functions.
    pub(crate) fn place(&self, device: DeviceId) -> Result<Option<String>> {
        let ordinal = self.ordinal(device)?;
        let part = |attribute| ask(self, ordinal, attribute);
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

    pub(crate) fn device_uuid(&self, device: DeviceId) -> Result<DeviceUuid> {
        let (ordinal, calls) = (self.ordinal(device)?, &self.driver().calls);
        let scope: Scope<'_, Cuda> = self.relaxed()?;
        // The older function names the whole device where the younger one names its partition
        // (MIG).
        let symbol = match calls.device_uuid.function {
            Some(_) => &calls.device_uuid,
            None => &self.own.uuid_of_whole,
        };
        let mut uuid = Uuid { bytes: [0; 16] };
        scope.call(symbol, |function| {
            // SAFETY: `cuDeviceGetUuid` writes 16 bytes: `uuid` has as many.
            unsafe { function(&raw mut uuid, ordinal) }
        })?;
        Ok(DeviceUuid(uuid.bytes.map(|byte| byte as u8)))
    }
}

//! What the driver says of a device.

use driver::calls::Uuid;
use driver::device::attribute as ask;
use driver::{Scope, Vendor};
use gpu_api::{DeviceId, DeviceUuid, Result};

use crate::cuda::Cuda;
use crate::sys::attribute;

impl Cuda {
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

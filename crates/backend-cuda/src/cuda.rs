//! The running driver and its devices.

use std::fmt;

use driver::Driver;
use gpu_api::{DeviceId, ForkGuard, Result};

use crate::start;
use crate::sys::Own;

/// What CUDA's driver has beyond the calls that drivers have in common.
pub struct Cuda {
    pub(crate) driver: Driver,
    pub(crate) own: Own,
    pub(crate) version: u32,
    pub(crate) devices: Vec<start::Device>,
    /// A forked child must not call the driver.
    pub(crate) fork: ForkGuard,
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda")
            .field("version", &self.version)
            .field("devices", &self.devices.len())
            .finish_non_exhaustive()
    }
}

impl Cuda {
    /// Returns the version of CUDA that the driver speaks, as it writes it: 13000 is 13.0.
    pub fn driver_version(&self) -> u32 {
        self.version
    }

    /// Finds a device.
    pub(crate) fn device(&self, device: DeviceId) -> Result<&start::Device> {
        self.devices
            .get(device.0 as usize)
            .ok_or_else(|| driver::device::no_device(device, self.devices.len()))
    }
}

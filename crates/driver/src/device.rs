//! What the driver says of a device.

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use std::time::Duration;

use gpu_api::{BackendKind, DeviceId, DeviceInfo, Error, GpuDevices, MemoryInfo, Result};

use crate::backend::Backend;
use crate::calls::AllocationProperties;
use crate::code::SUCCESS;
use crate::vendor::{Descriptor, Vendor};

/// What memory is rounded up to where it is not virtual: the page size of large device mappings.
pub const LARGE_PAGE: u64 = 2 << 20;

// SAFETY: the condition of `GpuDevices`: what is promised is what the vendor's driver says of the
// device.
unsafe impl<V: Vendor> GpuDevices for Backend<V> {
    fn kind(&self) -> BackendKind {
        V::KIND
    }

    fn device_count(&self) -> Result<u32> {
        Ok(self.count() as u32)
    }

    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo> {
        let (ordinal, uuid) = (self.ordinal(device)?, self.uuid(device)?);
        let (calls, scope) = (&self.driver().calls, self.without_context(device)?);
        let mut name = [0 as c_char; 256];
        scope.call(&calls.device_name, |function| {
            // SAFETY: `device_name` writes at most the number of bytes that it is told: one less
            // than `name` has.
            unsafe { function(name.as_mut_ptr(), name.len() as c_int - 1, ordinal) }
        })?;
        let mut total_bytes = 0;
        scope.call(&calls.device_total, |function| {
            // SAFETY: `device_total` writes one size: `total_bytes` is one.
            unsafe { function(&raw mut total_bytes, ordinal) }
        })?;
        Ok(DeviceInfo {
            device,
            uuid,
            name: text(&name),
            total_bytes: total_bytes as u64,
        })
    }

    fn pci_address(&self, device: DeviceId) -> Result<Option<String>> {
        Vendor::pci_address(&**self, device)
    }

    fn host_numa_node(&self, device: DeviceId) -> Result<Option<u32>> {
        Vendor::host_numa_node(&**self, device)
    }

    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        let (free_bytes, total_bytes) = self.on_device(device)?.memory_info()?;
        Ok(MemoryInfo {
            free_bytes,
            total_bytes,
        })
    }

    fn granularity(&self, device: DeviceId) -> Result<u64> {
        granularity(&**self, device)
    }

    fn shared_context(&self, device: DeviceId) -> Result<bool> {
        Vendor::shared_context(&**self, device)
    }

    fn device_files(&self) -> &[&'static str] {
        Vendor::device_files(&**self)
    }

    fn own_sign(&self, device: DeviceId) -> Result<u32> {
        Vendor::own_sign(&**self, device)
    }

    fn signs_of_life(&self, pid: u32, sign: u32) -> Vec<PathBuf> {
        Vendor::signs_of_life(&**self, pid, sign)
    }

    fn quarantine(&self, is_shown: bool) -> Duration {
        Vendor::quarantine(&**self, is_shown)
    }
}

/// Makes the error of a device that this process does not have.
pub fn no_device(device: DeviceId, count: usize) -> Error {
    Error::invalid(
        "the device",
        format!("{device} of {count}"),
        "one that `device_count` counts",
    )
}

/// Returns what memory of a device is rounded up to.
///
/// # Errors
///
/// The driver's.
pub fn granularity<V: Vendor>(vendor: &V, device: DeviceId) -> Result<u64> {
    if vendor.descriptor(device)? != Some(Descriptor::Vmm) {
        return Ok(LARGE_PAGE);
    }
    let (quirks, scope) = (vendor.quirks(), vendor.without_context(device)?);
    let properties = AllocationProperties::exportable(vendor.ordinal(device)?);
    let mut granularity = 0;
    scope.call(&vendor.driver().calls.granularity, |function| {
        // SAFETY: `granularity` writes one size and reads the properties: both live here.
        unsafe {
            function(
                &raw mut granularity,
                &raw const properties,
                quirks.granularity_flag,
            )
        }
    })?;
    // A granularity of zero would be a broken driver; rounding by it must not be a division by zero.
    Ok((granularity as u64).max(quirks.least_granularity).max(1))
}

/// Asks for a property of a device; `None` where the driver does not know it.
pub fn attribute<V: Vendor>(vendor: &V, ordinal: c_int, attribute: u32) -> Option<c_int> {
    let function = vendor.driver().calls.device_attribute.function?;
    let mut value: c_int = 0;
    // SAFETY: `device_attribute` writes one integer: `value` is one. Unknown attributes are refused.
    let code = unsafe { function(&raw mut value, attribute, ordinal) };
    (code == SUCCESS).then_some(value)
}

/// Reads a text that the driver wrote into an array whose last byte it was not offered.
pub fn text(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|&byte| byte as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map_or_else(
        |_| String::from_utf8_lossy(&bytes).into_owned(),
        |text| text.to_string_lossy().into_owned(),
    )
}

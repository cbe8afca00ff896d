//! Where a device lies in its machine.

use std::fs;
use std::path::Path;

use crate::{Gpu, Result};

impl Gpu {
    /// Returns the NUMA node that the device is attached to: what the driver says
    /// (`CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID`, `hipDeviceAttributeHostNumaId`), else what the kernel
    /// says of its place on the PCI bus; `None` for a device on no bus, and where neither says.
    ///
    /// # Errors
    ///
    /// What [`host_numa_node`](crate::GpuDevices::host_numa_node) and
    /// [`pci_address`](crate::GpuDevices::pci_address) give.
    pub fn numa_node(&self) -> Result<Option<u32>> {
        if let Some(node) = self.backend().host_numa_node(self.device())? {
            return Ok(Some(node));
        }
        let address = self.backend().pci_address(self.device())?;
        Ok(address.and_then(|address| node_of(Path::new("/sys/bus/pci/devices"), &address)))
    }
}

/// Reads the node of a device from sysfs. The kernel writes -1 where there is none.
fn node_of(devices: &Path, address: &str) -> Option<u32> {
    // It becomes a part of a path.
    if !address
        .bytes()
        .all(|byte| byte.is_ascii_hexdigit() || matches!(byte, b':' | b'.'))
        || address.contains("..")
    {
        return None;
    }
    let read = |address: &str| fs::read_to_string(devices.join(address).join("numa_node")).ok();
    // sysfs writes the digits small; HIP's are large on some versions.
    read(&address.to_ascii_lowercase())?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_is_what_the_kernel_says() {
        let devices = std::env::temp_dir().join(format!("gpu-api-pci-{}", std::process::id()));
        for (address, node) in [
            ("0000:3b:00.0", "1\n"),
            ("0000:03:00.0", "-1\n"),
            ("0000:04:00.0", ""),
        ] {
            fs::create_dir_all(devices.join(address)).expect("a folder");
            fs::write(devices.join(address).join("numa_node"), node).expect("a file");
        }
        assert_eq!(node_of(&devices, "0000:3B:00.0"), Some(1));
        for nowhere in ["0000:03:00.0", "0000:04:00.0", "0000:05:00.0", "../..", ""] {
            assert_eq!(node_of(&devices, nowhere), None, "{nowhere}");
        }
        fs::remove_dir_all(devices).expect("it was ours");
    }
}

//! Devices as a program numbers them, several of which may lie on one GPU.

use std::collections::BTreeMap;
use std::fmt;

use gpu_api::{BackendKind, DeviceId, Error, Result};

/// Numbers a device as the program sees it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct VirtualDevice(pub u32);

impl fmt::Display for VirtualDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "virtual device {}", self.0)
    }
}

/// Names a device of one backend.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct PhysicalDevice {
    /// The vendor.
    pub backend: BackendKind,
    /// The device's number in this process.
    pub device: DeviceId,
}

impl fmt::Display for PhysicalDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.backend, self.device)
    }
}

/// On which device each virtual device lies.
///
/// # Examples
///
/// ```
/// use allocators::{PhysicalDevice, VirtualDevice, VirtualDevices};
/// use gpu_api::{BackendKind, DeviceId};
///
/// let gpu = PhysicalDevice { backend: BackendKind::Cuda, device: DeviceId(0) };
/// let mut devices = VirtualDevices::new();
/// devices.map(VirtualDevice(0), gpu)?;
/// devices.map(VirtualDevice(1), gpu)?;
/// assert_eq!(devices.on(gpu), [VirtualDevice(0), VirtualDevice(1)]);
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct VirtualDevices {
    map: BTreeMap<VirtualDevice, PhysicalDevice>,
}

impl VirtualDevices {
    /// Maps nothing yet.
    pub fn new() -> VirtualDevices {
        VirtualDevices::default()
    }

    /// Puts a virtual device on a device. Doing it again is no error.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for one that lies on another device already.
    pub fn map(&mut self, device: VirtualDevice, on: PhysicalDevice) -> Result<()> {
        match self.map.insert(device, on) {
            Some(before) if before != on => {
                self.map.insert(device, before);
                Err(Error::invalid(
                    "the device of a virtual device",
                    format!("{on} for {device}, which lies on {before}"),
                    "the same for as long as the process lives",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Returns the device that a virtual device lies on.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for one that was not mapped.
    pub fn physical(&self, device: VirtualDevice) -> Result<PhysicalDevice> {
        self.map.get(&device).copied().ok_or_else(|| {
            Error::invalid(
                "a virtual device",
                device.0,
                "one that was mapped to a device",
            )
        })
    }

    /// Lists the virtual devices on a device.
    pub fn on(&self, physical: PhysicalDevice) -> Vec<VirtualDevice> {
        self.iter()
            .filter(|&(_, on)| on == physical)
            .map(|(device, _)| device)
            .collect()
    }

    /// Lists all of them.
    pub fn iter(&self) -> impl Iterator<Item = (VirtualDevice, PhysicalDevice)> + '_ {
        self.map.iter().map(|(&device, &on)| (device, on))
    }

    /// Says whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(backend: BackendKind, device: u32) -> PhysicalDevice {
        PhysicalDevice {
            backend,
            device: DeviceId(device),
        }
    }

    #[test]
    fn basic() {
        let mut devices = VirtualDevices::new();
        devices
            .map(VirtualDevice(0), gpu(BackendKind::Cuda, 5))
            .expect("the first");
        devices
            .map(VirtualDevice(1), gpu(BackendKind::Cuda, 3))
            .expect("another");
        assert_eq!(
            devices.physical(VirtualDevice(0)).expect("mapped"),
            gpu(BackendKind::Cuda, 5)
        );
        assert_eq!(
            devices.physical(VirtualDevice(1)).expect("mapped"),
            gpu(BackendKind::Cuda, 3)
        );
    }

    #[test]
    fn the_same_again_is_no_error() {
        let mut devices = VirtualDevices::new();
        for _ in 0..2 {
            devices
                .map(VirtualDevice(0), gpu(BackendKind::Cuda, 5))
                .expect("the same");
        }
        assert_eq!(devices.iter().count(), 1);
    }

    #[test]
    fn several_on_one() {
        let mut devices = VirtualDevices::new();
        for at in [2, 0] {
            devices
                .map(VirtualDevice(at), gpu(BackendKind::Cuda, 5))
                .expect("another");
        }
        devices
            .map(VirtualDevice(1), gpu(BackendKind::Cuda, 6))
            .expect("another");
        assert_eq!(
            devices.on(gpu(BackendKind::Cuda, 5)),
            [VirtualDevice(0), VirtualDevice(2)]
        );
        assert_eq!(devices.on(gpu(BackendKind::Cuda, 7)), []);
    }

    #[test]
    fn another_device_is_refused_and_changes_nothing() {
        let mut devices = VirtualDevices::new();
        devices
            .map(VirtualDevice(0), gpu(BackendKind::Cuda, 5))
            .expect("the first");
        let error = devices
            .map(VirtualDevice(0), gpu(BackendKind::Cuda, 6))
            .expect_err("another");
        assert_eq!(
            error.to_string(),
            "the device of a virtual device is cuda device 6 for virtual device 0, which lies on cuda device 5, but \
             must be the same for as long as the process lives"
        );
        assert_eq!(
            devices.physical(VirtualDevice(0)).expect("mapped"),
            gpu(BackendKind::Cuda, 5)
        );
    }

    #[test]
    fn one_that_is_missing_is_an_error() {
        let error = VirtualDevices::new()
            .physical(VirtualDevice(7))
            .expect_err("not mapped");
        assert_eq!(
            error.to_string(),
            "a virtual device is 7, but must be one that was mapped to a device"
        );
    }

    #[test]
    fn vendors_number_apart() {
        let mut devices = VirtualDevices::new();
        devices
            .map(VirtualDevice(0), gpu(BackendKind::Cuda, 0))
            .expect("the first");
        devices
            .map(VirtualDevice(1), gpu(BackendKind::Hip, 0))
            .expect("another vendor's");
        assert_eq!(devices.on(gpu(BackendKind::Hip, 0)), [VirtualDevice(1)]);
    }
}

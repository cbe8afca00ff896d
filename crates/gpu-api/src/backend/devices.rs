//! Devices: what there is, and what it can do.

use std::path::PathBuf;
use std::time::Duration;

use crate::{BackendKind, Caps, DeviceId, DeviceInfo, Error, MemoryInfo, Result};

/// What there is, and what it can do.
///
/// # Safety
///
/// For implementors: `caps` promises nothing that the device does not do.
pub unsafe trait GpuDevices {
    /// Names the vendor.
    fn kind(&self) -> BackendKind;

    /// Counts the devices that this process may use.
    fn device_count(&self) -> Result<u32>;

    /// Describes a device.
    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo>;

    /// Returns where a device lies on the PCI bus, as the kernel names it (`0000:03:00.0`); `None`
    /// for one that lies on none.
    fn pci_address(&self, device: DeviceId) -> Result<Option<String>> {
        let _ = device;
        Ok(None)
    }

    /// Returns the NUMA node of the host that the driver says a device is attached to; `None` where
    /// it does not tell. [`Gpu::numa_node`](crate::Gpu::numa_node) asks the kernel then.
    fn host_numa_node(&self, device: DeviceId) -> Result<Option<u32>> {
        let _ = device;
        Ok(None)
    }

    /// Asks the driver how much memory is free.
    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo>;

    /// Says what a device can do.
    fn caps(&self, device: DeviceId) -> Result<Caps>;

    /// Lets `device` reach memory of `peer` directly. Enabling it twice is no error.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the two have no direct way to each other.
    ///
    /// # Portability
    ///
    /// Another process' memory is reached if it was imported by file descriptor. Memory that was
    /// opened by a 64-byte handle is reached from the device that it was opened on alone: a kernel
    /// of another device faults on it, whether access was enabled before or after (CUDA, driver
    /// 580, measured on two H200).
    fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<()> {
        let _ = (device, peer);
        Err(self.unsupported("peer access"))
    }

    /// Names the files by which a process keeps its GPU work alive: prefixes of what links in
    /// `/proc/PID/fd` read.
    ///
    /// A forked child that inherits such a file keeps a dead parent's kernels running (measured on
    /// CUDA: for as long as the child lives), so proof of a process' death asks for the death of
    /// such children too.
    fn device_files(&self) -> &[&'static str];

    /// Names files that are there for as long as GPU work of a process may run, where the driver
    /// shows such. The pid is as this process sees it.
    ///
    /// The kernel's own signs of a death come first (its pidfd, its socket, the children that hold
    /// device files). Where a driver takes a dead process' queues down later still, the end of what
    /// is named here is a further sign. Asked for while the process lives; what is not there then
    /// is not waited for.
    fn signs_of_life(&self, pid: u32) -> Vec<PathBuf> {
        let _ = pid;
        Vec::new()
    }

    /// Returns for how long GPU work of a dead process may go on after all signs of its life are
    /// gone: what a session waits before it uses the process' blocks again by default.
    ///
    /// 100 ms, ten times the longest that was measured on CUDA (H200), where a driver does not say
    /// more.
    fn quarantine(&self) -> Duration {
        Duration::from_millis(100)
    }

    /// Makes the error of a method that this backend does not have. Not meant to be overridden.
    #[doc(hidden)]
    fn unsupported(&self, what: &'static str) -> Error {
        Error::Unsupported {
            what,
            why: format!("the {} backend has no such operation", self.kind()),
            remedy: "choose another backend",
        }
    }
}

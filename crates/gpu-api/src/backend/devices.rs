//! Devices: what there is, and what it can do.

use std::path::PathBuf;
use std::time::Duration;

use crate::{BackendKind, DeviceId, DeviceInfo, MemoryInfo, Result};

/// A quarantine for drivers that say nothing of it: ten times the longest that GPU work of a dead
/// process was measured to go on, on CUDA (H200).
pub const QUARANTINE: Duration = Duration::from_millis(100);

/// What there is, and what it can do.
///
/// # Safety
///
/// For implementors: what is said of a device is true of it.
pub unsafe trait GpuDevices {
    /// Names the vendor.
    fn kind(&self) -> BackendKind;

    /// Counts the devices that this process may use.
    fn device_count(&self) -> Result<u32>;

    /// Describes a device.
    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo>;

    /// Returns where a device lies on the PCI bus, as the kernel names it (`0000:03:00.0`); `None`
    /// for one that lies on none.
    fn pci_address(&self, device: DeviceId) -> Result<Option<String>>;

    /// Returns the NUMA node of the host that the driver says a device is attached to; `None` where
    /// it does not tell. [`Gpu::numa_node`](crate::Gpu::numa_node) asks the kernel then.
    fn host_numa_node(&self, device: DeviceId) -> Result<Option<u32>>;

    /// Asks the driver how much memory is free.
    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo>;

    /// Returns what allocations of a device are rounded up to.
    fn granularity(&self, device: DeviceId) -> Result<u64>;

    /// Says whether the driver shares a device between processes in one context (NVIDIA MPS), so
    /// that the death of a process proves nothing about its GPU work.
    fn shared_context(&self, device: DeviceId) -> Result<bool>;

    /// Names the files by which a process keeps its GPU work alive: prefixes of what links in
    /// `/proc/PID/fd` read.
    ///
    /// A forked child that inherits such a file keeps a dead parent's kernels running (measured on
    /// CUDA: for as long as the child lives), so proof of a process' death asks for the death of
    /// such children too.
    fn device_files(&self) -> &[&'static str];

    /// Returns the number under which the driver shows this process's GPU work, which its hello
    /// carries to a producer that cannot tell it from the pid. 0 where the driver shows none, or
    /// where the number was not found.
    ///
    /// Drivers number processes by the first PID namespace. Finding the number in another namespace
    /// may allocate memory of the device and give it back.
    fn own_sign(&self, device: DeviceId) -> Result<u32>;

    /// Names files that are there for as long as GPU work of a process may run, where the driver
    /// shows such. The pid is as this process sees it, `sign` what the process gave as its
    /// [`own_sign`](GpuDevices::own_sign): any number, if it lies.
    ///
    /// The kernel's own signs of a death come first (its pidfd, its socket, the children that hold
    /// device files). Where a driver takes a dead process' queues down later still, the end of what
    /// is named here is a further sign. Asked for while the process lives; what is not there then
    /// is not waited for.
    fn signs_of_life(&self, pid: u32, sign: u32) -> Vec<PathBuf>;

    /// Returns for how long GPU work of a dead process may go on after all signs of its life are
    /// gone: what a session waits before it uses the process' blocks again by default. `is_shown`
    /// says whether there was a sign to wait for.
    ///
    /// [`QUARANTINE`], where a driver does not say more.
    fn quarantine(&self, is_shown: bool) -> Duration;
}

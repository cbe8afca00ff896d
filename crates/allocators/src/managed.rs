//! Managed memory: more than a device has, which the driver moves between host and device.

use std::fs;
use std::sync::{Arc, OnceLock, Weak};

use gpu_api::{DevicePtr, Error, Gpu, Result};

use crate::{Budget, DeviceBytes, Extent, Memory, RoomListener, SubAllocator};

/// Managed memory of a device (`cudaMallocManaged`), of this process alone.
///
/// There may be more of it than the device has: what does not fit lies in the host's memory, and
/// comes over when a kernel touches it. Its limits:
///
/// - It is never more than the device and the host had free when this was made. Beyond that the
///   kernel would end processes, since managed pages take memory at their first touch and nobody
///   can refuse them then.
/// - What a kernel touches beyond the device's own memory is moved at the bus' speed, page by page.
/// - It has no handle and no descriptor, so no other process can map it.
///
/// # Examples
///
/// ```
/// use allocators::{Bfc, BfcOptions, ManagedMemory, Request};
/// use backend_host::{HostBackend, HostConfig};
/// use gpu_api::{DeviceId, Gpu};
///
/// let gpu = Gpu::new(HostBackend::new(HostConfig::default().bytes_per_device(1 << 20))?, DeviceId(0))?;
/// let bfc = Bfc::new(BfcOptions::new("managed"), ManagedMemory::new(gpu)?);
/// // Four times what the device has.
/// let placed = bfc.alloc(Request::new(4 << 20))?;
/// bfc.free(placed.address)?;
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Debug)]
pub struct ManagedMemory {
    gpu: Gpu,
    /// What there is at most, and what somebody else allows.
    budgets: Vec<Arc<Budget>>,
    bytes: OnceLock<Arc<DeviceBytes>>,
}

impl ManagedMemory {
    /// Takes managed memory of this device.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] on a device without [`Caps::managed`](gpu_api::Caps::managed); the
    /// driver's error when it is asked what is free; [`Error::Forked`] in a forked child of the
    /// process that found the device.
    pub fn new(gpu: Gpu) -> Result<ManagedMemory> {
        if !gpu.caps().managed {
            return Err(Error::unsupported(
                "managed memory",
                format!(
                    "{} has none that host and device may touch at once",
                    gpu.device()
                ),
                "use `DeviceMemory`, and a limit that the device can keep",
            ));
        }
        let free = gpu.backend().memory_info(gpu.device())?.free_bytes;
        let most = Arc::new(Budget::new(free.saturating_add(available_on_host())));
        Ok(ManagedMemory {
            gpu,
            budgets: vec![most],
            bytes: OnceLock::new(),
        })
    }

    /// Takes no more than a budget allows, either.
    #[must_use]
    pub fn budget(mut self, budget: Arc<Budget>) -> ManagedMemory {
        self.budgets.push(budget);
        self
    }

    /// Takes bytes of all budgets, or of none.
    fn afford(&self, bytes: u64, asked: u64) -> Result<()> {
        for (at, budget) in self.budgets.iter().enumerate() {
            if let Err(error) =
                budget.take_for(self.gpu.device(), bytes, asked, " of managed memory")
            {
                self.budgets[..at]
                    .iter()
                    .for_each(|taken| taken.give_back(bytes));
                return Err(error);
            }
        }
        Ok(())
    }

    fn forgo(&self, bytes: u64) {
        self.budgets
            .iter()
            .for_each(|budget| budget.give_back(bytes));
    }
}

// SAFETY: `SubAllocator` asks that extents overlap nothing that is not yet freed, which
// `GpuPools::alloc_managed` promises, and that `memory` reaches them: it copies on the device that
// they are of.
unsafe impl SubAllocator for ManagedMemory {
    type Token = ();

    fn alloc(&self, len: u64, _align: u64) -> Result<(Extent, ())> {
        self.check_owner()?;
        let rounded = len
            .checked_next_multiple_of(self.granularity())
            .unwrap_or(u64::MAX);
        self.afford(rounded, len)?;
        let allocated = self.gpu.backend().alloc_managed(self.gpu.device(), rounded);
        let allocation = allocated.inspect_err(|_| self.forgo(rounded))?;
        // A driver that rounds up to more than it says has that from nobody: it is not handed out.
        Ok((
            Extent {
                base: allocation.base.0,
                len: rounded,
            },
            (),
        ))
    }

    fn free(&self, extent: Extent, (): ()) -> Result<()> {
        self.check_owner()?;
        // SAFETY: `GpuMemory::free` asks for
        // - a base from `alloc_managed`, not yet freed: `SubAllocator::free` gets each extent once;
        // - no GPU work that touches it: the free of its last piece stated that its bytes may be
        //   used again;
        // - no process with its handle open: there is none.
        let freed = unsafe { self.gpu.backend().free(DevicePtr(extent.base)) };
        // What failed is leaked and stays counted.
        if freed.is_ok() {
            self.forgo(extent.len);
        }
        freed
    }

    fn granularity(&self) -> u64 {
        self.gpu.caps().granularity.max(1)
    }

    fn capacity(&self) -> u64 {
        self.budgets
            .iter()
            .map(|budget| budget.limit())
            .min()
            .unwrap_or(0)
    }

    fn subscribe(&self, listener: Weak<dyn RoomListener>) {
        self.budgets
            .iter()
            .for_each(|budget| budget.subscribe(listener.clone()));
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        if let Some(bytes) = self.bytes.get() {
            return Ok(Arc::<DeviceBytes>::clone(bytes));
        }
        let bytes = Arc::new(DeviceBytes::new(self.gpu.clone())?);
        Ok(Arc::<DeviceBytes>::clone(self.bytes.get_or_init(|| bytes)))
    }

    fn check_owner(&self) -> Result<()> {
        self.gpu.check_fork()
    }
}

/// Returns the bytes of host memory that can be taken without swapping: what the kernel says, and
/// no more than the control group of this process has left; 0 where neither tells.
pub(crate) fn available_on_host() -> u64 {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let group = |name: &str| {
        read(&format!("/sys/fs/cgroup/memory.{name}"))
            .trim()
            .parse::<u64>()
            .ok()
    };
    let left = group("max").map_or(u64::MAX, |most| {
        most.saturating_sub(group("current").unwrap_or(0))
    });
    available(&read("/proc/meminfo")).unwrap_or(0).min(left)
}

/// Reads `MemAvailable` of `/proc/meminfo`.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_has_left_is_read() {
        assert_eq!(
            available("MemTotal:  9 kB\nMemAvailable:   17 kB\nBuffers: 1 kB\n"),
            Some(17 << 10)
        );
        for nothing in [
            "",
            "MemAvailable:",
            "MemAvailable: x kB",
            "MemAvailable: 17 MB",
            "MemAvailable: 99999999999999999999 kB",
        ] {
            assert_eq!(available(nothing), None, "{nothing}");
        }
        assert!(available_on_host() > 0, "this machine has memory");
    }
}

//! How the allocators of a process are set up.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gpu_api::{Result, Sharing};

use super::{AllocatorKey, MemoryLimit, VirtualDevice, VirtualDevices};
use crate::relief::PATIENCE;
use crate::{Allocator, Growth, PoolOptions};

/// Puts wrappers over an allocator when it is made.
pub type Wrap = Arc<dyn Fn(AllocatorKey, Arc<dyn Allocator>) -> Result<Arc<dyn Allocator>> + Send + Sync>;

/// How a [`ProcessState`](crate::ProcessState) makes its allocators.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use allocators::{MemoryLimit, ProcessOptions, Tracking};
///
/// let options = ProcessOptions::default()
///     .limit(MemoryLimit::Fraction(0.5))
///     .wrap(|_, allocator| Ok(Arc::new(Tracking::new(allocator))));
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct ProcessOptions {
    /// Which virtual device lies where; each device is one when nothing is mapped.
    pub devices: VirtualDevices,
    /// How much of its device a virtual device may take.
    pub limit: MemoryLimit,
    /// The same for single ones.
    pub limits: BTreeMap<VirtualDevice, MemoryLimit>,
    /// How much device memory is taken at a time.
    pub growth: Growth,
    /// How much shareable memory is taken at a time.
    pub arena_growth: Growth,
    /// How shareable memory is shared.
    pub sharing: Option<Sharing>,
    /// How long an arena waits for memory.
    pub wait: Duration,
    /// How long allocators wait for consumers that were asked to unmap.
    pub patience: Duration,
    /// Which NUMA node host memory for a virtual device comes from.
    pub numa_nodes: BTreeMap<VirtualDevice, u32>,
    /// The most pinned memory of a node.
    pub pinned_limit: u64,
    /// How plain host memory is kept.
    pub cpu_pool: PoolOptions,
    /// What is put over every allocator but arenas.
    pub wrap: Option<Wrap>,
}

impl Default for ProcessOptions {
    /// Most of what is free of each device, growth from 2 MiB, regions of 32 MiB for sharing, at most 128 GiB of pinned
    /// memory a node, no wrappers.
    fn default() -> ProcessOptions {
        ProcessOptions {
            devices: VirtualDevices::new(),
            limit: MemoryLimit::Most,
            limits: BTreeMap::new(),
            growth: Growth::DEFAULT,
            arena_growth: Growth::Fixed(32 << 20),
            sharing: None,
            wait: Duration::ZERO,
            patience: PATIENCE,
            numa_nodes: BTreeMap::new(),
            pinned_limit: 128 << 30,
            cpu_pool: PoolOptions::new("cpu"),
            wrap: None,
        }
    }
}

impl ProcessOptions {
    /// Says which virtual device lies where.
    #[must_use]
    pub fn devices(mut self, devices: VirtualDevices) -> ProcessOptions {
        self.devices = devices;
        self
    }

    /// Sets how much of its device a virtual device may take.
    #[must_use]
    pub fn limit(mut self, limit: MemoryLimit) -> ProcessOptions {
        self.limit = limit;
        self
    }

    /// Sets how much one virtual device may take.
    #[must_use]
    pub fn limit_of(mut self, device: VirtualDevice, limit: MemoryLimit) -> ProcessOptions {
        self.limits.insert(device, limit);
        self
    }

    /// Sets how much device memory is taken at a time.
    #[must_use]
    pub fn growth(mut self, growth: Growth) -> ProcessOptions {
        self.growth = growth;
        self
    }

    /// Sets how much shareable memory is taken at a time.
    #[must_use]
    pub fn arena_growth(mut self, growth: Growth) -> ProcessOptions {
        self.arena_growth = growth;
        self
    }

    /// Sets how shareable memory is shared.
    #[must_use]
    pub fn sharing(mut self, sharing: Sharing) -> ProcessOptions {
        self.sharing = Some(sharing);
        self
    }

    /// Sets how long an arena waits for memory.
    #[must_use]
    pub fn wait(mut self, time: Duration) -> ProcessOptions {
        self.wait = time;
        self
    }

    /// Sets how long allocators wait for consumers that were asked to unmap.
    #[must_use]
    pub fn patience(mut self, time: Duration) -> ProcessOptions {
        self.patience = time;
        self
    }

    /// Takes host memory for a virtual device from a NUMA node.
    #[must_use]
    pub fn numa_node(mut self, device: VirtualDevice, node: u32) -> ProcessOptions {
        self.numa_nodes.insert(device, node);
        self
    }

    /// Sets the most pinned memory of a node.
    #[must_use]
    pub fn pinned_limit(mut self, bytes: u64) -> ProcessOptions {
        self.pinned_limit = bytes;
        self
    }

    /// Sets how plain host memory is kept.
    #[must_use]
    pub fn cpu_pool(mut self, options: PoolOptions) -> ProcessOptions {
        self.cpu_pool = options;
        self
    }

    /// Puts wrappers over every allocator but arenas, when it is made. `wrap` must not call the process state, whose lock
    /// is held.
    #[must_use]
    pub fn wrap(
        mut self,
        wrap: impl Fn(AllocatorKey, Arc<dyn Allocator>) -> Result<Arc<dyn Allocator>> + Send + Sync + 'static,
    ) -> ProcessOptions {
        self.wrap = Some(Arc::new(wrap));
        self
    }
}

impl fmt::Debug for ProcessOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessOptions")
            .field("devices", &self.devices)
            .field("limit", &self.limit)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

//! How the allocators of a process are set up.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gpu_api::{Result, Sharing};

use super::{AllocatorKey, MemoryLimit, VirtualDevice, VirtualDevices};
use crate::bfc::Divisions;
use crate::relief::PATIENCE;
use crate::{Allocator, Extent, Growth, PoolOptions, RegionVisitor};

/// Puts wrappers over an allocator when it is made.
pub type Wrap =
    Arc<dyn Fn(AllocatorKey, Arc<dyn Allocator>) -> Result<Arc<dyn Allocator>> + Send + Sync>;

/// What memory of a process is kept by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AllocatorKind {
    /// Best fit with coalescing ([`Bfc`](crate::Bfc)).
    BestFit,
    /// The same with this many heaps, so that threads do not take turns at one lock
    /// ([`ThreadHeaps`](crate::ThreadHeaps)). A heap for each processor is enough.
    ThreadHeaps(NonZeroUsize),
    /// Buffers kept for the next request of the same size ([`Pool`](crate::Pool)).
    Pool,
    /// Nothing: each request is one of the driver's or the system's ([`Direct`](crate::Direct)).
    Direct,
    /// The driver's own stream-ordered pool. Device memory alone has one.
    Driver,
}

/// Is told of every region of a process state that comes and goes.
pub trait KeyedVisitor: Send + Sync + 'static {
    /// As [`RegionVisitor::region_came`](crate::RegionVisitor::region_came).
    fn region_came(&self, key: AllocatorKey, region: Extent);

    /// As [`RegionVisitor::region_goes`](crate::RegionVisitor::region_goes).
    fn region_goes(&self, key: AllocatorKey, region: Extent);
}

/// One allocator's part of a visitor.
pub(crate) struct KeyedRegions {
    pub(crate) key: AllocatorKey,
    pub(crate) visitor: Arc<dyn KeyedVisitor>,
}

impl RegionVisitor for KeyedRegions {
    fn region_came(&self, region: Extent) {
        self.visitor.region_came(self.key, region);
    }

    fn region_goes(&self, region: Extent) {
        self.visitor.region_goes(self.key, region);
    }
}

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
    /// Which NUMA node host memory for a virtual device comes from, when it is not the device's
    /// own.
    pub numa_nodes: BTreeMap<VirtualDevice, u32>,
    /// What device memory for this process alone is kept by.
    pub device_kind: AllocatorKind,
    /// What pinned memory is kept by.
    pub pinned_kind: AllocatorKind,
    /// What plain host memory is kept by.
    pub cpu_kind: AllocatorKind,
    /// The most pinned memory of a node.
    pub pinned_limit: u64,
    /// How much pinned memory is taken at a time. What is pinned is nobody else's, so it is apart
    /// from the devices' growth.
    pub pinned_growth: Growth,
    /// The most plain host memory of a node, where it is kept by best fit.
    pub cpu_limit: u64,
    /// How a pool of device memory is kept.
    pub device_pool: PoolOptions,
    /// How a pool of pinned memory is kept.
    pub pinned_pool: PoolOptions,
    /// How a pool of plain host memory is kept.
    pub cpu_pool: PoolOptions,
    /// Whether regions of private device memory lie side by side and grow in place.
    pub grows_in_place: bool,
    /// Whether private device memory is managed, so that limits may go beyond what a device has.
    pub managed: bool,
    /// The largest chunk of device memory that is cut up
    /// ([`BfcOptions::max_split`](crate::BfcOptions::max_split)).
    pub max_split: Option<u64>,
    /// From which share of its limit on device memory gives idle regions back before it grows.
    pub collect_from: Option<f64>,
    /// Whether idle regions of device memory go back when a request does not fit.
    pub collect_regions: bool,
    /// Into how many steps sizes between two powers of two are rounded up.
    pub round_up_divisions: Option<Divisions>,
    /// Where a heap that ran out of memory is written down: the first part of the files' names.
    pub memory_dump: Option<PathBuf>,
    /// The visitor that is told of every new and returned region, with its allocator.
    pub visitor: Option<Arc<dyn KeyedVisitor>>,
    /// What is put over every allocator but arenas.
    pub wrap: Option<Wrap>,
}

impl Default for ProcessOptions {
    /// Most of what is free of each device, growth from 2 MiB, regions of 32 MiB for sharing, at
    /// most 128 GiB of pinned memory a node, no wrappers.
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
            device_kind: AllocatorKind::BestFit,
            pinned_kind: AllocatorKind::BestFit,
            cpu_kind: AllocatorKind::Pool,
            pinned_limit: 128 << 30,
            pinned_growth: Growth::DEFAULT,
            cpu_limit: 64 << 30,
            device_pool: PoolOptions::new("device"),
            pinned_pool: PoolOptions::new("pinned host memory"),
            cpu_pool: PoolOptions::new("cpu"),
            grows_in_place: false,
            managed: false,
            max_split: None,
            collect_from: None,
            collect_regions: true,
            round_up_divisions: None,
            memory_dump: None,
            visitor: None,
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

    /// Sets what device memory for this process alone is kept by.
    #[must_use]
    pub fn device_kind(mut self, kind: AllocatorKind) -> ProcessOptions {
        self.device_kind = kind;
        self
    }

    /// Sets what pinned memory is kept by.
    #[must_use]
    pub fn pinned_kind(mut self, kind: AllocatorKind) -> ProcessOptions {
        self.pinned_kind = kind;
        self
    }

    /// Sets what plain host memory is kept by.
    #[must_use]
    pub fn cpu_kind(mut self, kind: AllocatorKind) -> ProcessOptions {
        self.cpu_kind = kind;
        self
    }

    /// Sets the most plain host memory of a node, where it is kept by best fit.
    #[must_use]
    pub fn cpu_limit(mut self, bytes: u64) -> ProcessOptions {
        self.cpu_limit = bytes;
        self
    }

    /// Sets how much pinned memory is taken at a time.
    #[must_use]
    pub fn pinned_growth(mut self, growth: Growth) -> ProcessOptions {
        self.pinned_growth = growth;
        self
    }

    /// Lets private device memory grow in place, where the device can.
    #[must_use]
    pub fn grows_in_place(mut self, grows: bool) -> ProcessOptions {
        self.grows_in_place = grows;
        self
    }

    /// Makes private device memory managed ([`ManagedMemory`](crate::ManagedMemory)), so that a
    /// limit may go beyond what the device has: in bytes, or as a fraction above 1.
    #[must_use]
    pub fn managed(mut self, managed: bool) -> ProcessOptions {
        self.managed = managed;
        self
    }

    /// Tells somebody of every region that comes and goes, such as to register it with a network
    /// card.
    #[must_use]
    pub fn visitor(mut self, visitor: Arc<dyn KeyedVisitor>) -> ProcessOptions {
        self.visitor = Some(visitor);
        self
    }

    /// Writes a heap that ran out of memory to files whose names begin with this.
    #[must_use]
    pub fn memory_dump(mut self, prefix: impl Into<PathBuf>) -> ProcessOptions {
        self.memory_dump = Some(prefix.into());
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

    /// Puts wrappers over every allocator but arenas, when it is made. `wrap` must not call the
    /// process state, whose lock is held.
    #[must_use]
    pub fn wrap(
        mut self,
        wrap: impl Fn(AllocatorKey, Arc<dyn Allocator>) -> Result<Arc<dyn Allocator>>
        + Send
        + Sync
        + 'static,
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

//! The allocators that were made, and how each is made of the options.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use gpu_api::{Error, Gpu, HostMemory, Result};

use super::options::KeyedRegions;
use super::{
    AllocatorKey, AllocatorKind, MemoryLimit, PhysicalDevice, ProcessOptions, VirtualDevice,
};
use crate::managed::available_on_host;
use crate::{
    Allocator, Arena, BasicCpu, Bfc, BfcOptions, Budget, DeviceMemory, Direct, DriverPool,
    GrowingMemory, HostHeap, HostPages, Limit, ManagedMemory, NodePages, Pool, PoolOptions,
    RegionVisitor, Relief, Relieved, SubAllocator, ThreadHeaps, Trim, Visited,
};

/// Where memory of devices and pinned memory come from: one type, so that what is put over it is
/// compiled once.
type AnyMemory = Box<dyn SubAllocator<Token = ()>>;

/// An allocator that was made.
pub(super) enum Made {
    Allocator(Arc<dyn Allocator>),
    Arena(Arc<Arena>),
}

/// What a device's allocators have in common.
#[derive(Default)]
pub(super) struct Shared {
    /// By virtual device.
    pub(super) budgets: BTreeMap<VirtualDevice, Arc<Budget>>,
    /// By device.
    pub(super) reliefs: BTreeMap<PhysicalDevice, Arc<Relief>>,
}

pub(super) struct Inner {
    pub(super) gpus: Vec<Gpu>,
    pub(super) options: ProcessOptions,
    /// Whether an allocator was ever made: from then on options stay.
    pub(super) used: bool,
    pub(super) made: BTreeMap<AllocatorKey, Made>,
    pub(super) shared: Shared,
}

impl Inner {
    pub(super) fn gpu(&self, on: PhysicalDevice) -> Result<&Gpu> {
        self.gpus
            .iter()
            .find(|gpu| physical(gpu) == on)
            .ok_or_else(|| Error::invalid("a device", on, "one that the process state was given"))
    }

    pub(super) fn physical(&self, device: VirtualDevice) -> Result<PhysicalDevice> {
        if self.options.devices.is_empty()
            && let Some(gpu) = self.gpus.get(device.0 as usize)
        {
            return Ok(physical(gpu));
        }
        self.options.devices.physical(device)
    }

    pub(super) fn made(&mut self, key: AllocatorKey) -> Result<Arc<dyn Allocator>> {
        if let Some(Made::Allocator(allocator)) = self.made.get(&key) {
            return Ok(allocator.clone());
        }
        let mut allocator = self.make(key)?;
        if let Some(wrap) = &self.options.wrap {
            allocator = wrap(key, allocator)?;
        }
        self.used = true;
        self.made.insert(key, Made::Allocator(allocator.clone()));
        Ok(allocator)
    }

    fn make(&mut self, key: AllocatorKey) -> Result<Arc<dyn Allocator>> {
        match key {
            AllocatorKey::Device(device) => self.make_device(key, device),
            AllocatorKey::Pinned(backend, node) => {
                let gpu = self.gpus.iter().find(|gpu| gpu.kind() == backend);
                let gpu = gpu.ok_or_else(|| no_device(backend.name()))?.clone();
                let device = gpu.device();
                let pinned = HostMemory {
                    pinned: true,
                    numa_node: node,
                };
                let pages: AnyMemory = Box::new(HostPages::new(gpu, pinned)?);
                let pages = Visited::maybe(pages, self.visitor(key));
                let options = &self.options;
                let name = name("pinned host memory", node);
                match options.pinned_kind {
                    kind @ (AllocatorKind::BestFit | AllocatorKind::ThreadHeaps(_)) => {
                        let bfc = BfcOptions::new(name)
                            .device(device)
                            .limit(options.pinned_limit)
                            .growth(options.pinned_growth)
                            .memory_dump(options.memory_dump.clone());
                        Ok(best_fit(kind, bfc, pages))
                    }
                    kind => limited(
                        kind,
                        name,
                        &options.pinned_pool,
                        Direct::new("pinned", pages),
                        options.pinned_limit,
                    ),
                }
            }
            AllocatorKey::Cpu(node) => {
                let options = &self.options;
                let name = name(&options.cpu_pool.name, node);
                match (options.cpu_kind, node) {
                    (kind @ (AllocatorKind::BestFit | AllocatorKind::ThreadHeaps(_)), None) => {
                        let heap = Visited::maybe(HostHeap::new()?, self.visitor(key));
                        Ok(best_fit(kind, self.cpu(name), heap))
                    }
                    (
                        kind @ (AllocatorKind::BestFit | AllocatorKind::ThreadHeaps(_)),
                        Some(node),
                    ) => {
                        let pages = Visited::maybe(NodePages::new(node)?, self.visitor(key));
                        Ok(best_fit(kind, self.cpu(name), pages))
                    }
                    (kind, node) => limited(
                        kind,
                        name,
                        &options.cpu_pool,
                        BasicCpu::visited(node, self.visitor(key))?,
                        u64::MAX,
                    ),
                }
            }
            AllocatorKey::Arena(_) => unreachable!("arenas are made by `arena`"),
        }
    }

    fn make_device(
        &mut self,
        key: AllocatorKey,
        device: VirtualDevice,
    ) -> Result<Arc<dyn Allocator>> {
        let on = self.physical(device)?;
        let gpu = self.gpu(on)?.clone();
        let budget = self.budget(device)?;
        let relief = self.shared.reliefs.entry(on).or_default().clone();
        let options = &self.options;
        let bfc = BfcOptions::new(device.to_string())
            .device(gpu.device())
            .limit(budget.limit())
            .growth(options.growth)
            .max_split(options.max_split)
            .collect_from(options.collect_from)
            .collect_regions(options.collect_regions)
            .round_up_divisions(options.round_up_divisions)
            .memory_dump(options.memory_dump.clone());
        let has_regions = matches!(
            options.device_kind,
            AllocatorKind::BestFit | AllocatorKind::ThreadHeaps(_)
        );
        let memory: AnyMemory =
            if options.grows_in_place && !options.managed && has_regions && gpu.caps().ranges {
                Box::new(GrowingMemory::new(gpu)?.budget(budget))
            } else if options.device_kind == AllocatorKind::Driver {
                let pool = DriverPool::new(device.to_string(), gpu, budget.limit())?;
                return Ok(Arc::new(pool.budget(budget).relief(relief)));
            } else if options.managed {
                Box::new(ManagedMemory::new(gpu)?.budget(budget))
            } else {
                Box::new(DeviceMemory::new(gpu)?.budget(budget))
            };
        let memory = Visited::maybe(memory, self.visitor(key));
        self.keep_device(device, bfc, memory, relief)
    }

    /// Puts what device memory is kept by over where it comes from.
    fn keep_device(
        &self,
        device: VirtualDevice,
        bfc: BfcOptions,
        memory: Visited<AnyMemory>,
        relief: Arc<Relief>,
    ) -> Result<Arc<dyn Allocator>> {
        let options = &self.options;
        match options.device_kind {
            AllocatorKind::BestFit => {
                let bfc = Bfc::new(bfc, memory);
                Ok(Relieved::with_patience(bfc, relief, options.patience))
            }
            AllocatorKind::ThreadHeaps(heaps) => {
                let heaps = ThreadHeaps::new(bfc, heaps, memory);
                Ok(Arc::new(heaps.relief(relief, options.patience)))
            }
            AllocatorKind::Pool => {
                let mut pool = options.device_pool.clone();
                pool.name = device.to_string();
                let pool = Arc::new(Pool::new(pool, Direct::new("device", memory))?);
                let weak: Weak<dyn Trim> = Arc::<Pool<_>>::downgrade(&pool);
                relief.register_neighbour(weak);
                Ok(pool)
            }
            AllocatorKind::Direct => Ok(Arc::new(Direct::new(device.to_string(), memory))),
            AllocatorKind::Driver => Err(no_driver_pool(&device.to_string())),
        }
    }

    fn cpu(&self, name: String) -> BfcOptions {
        BfcOptions::new(name)
            .limit(self.options.cpu_limit)
            .memory_dump(self.options.memory_dump.clone())
    }

    pub(super) fn visitor(&self, key: AllocatorKey) -> Option<Arc<dyn RegionVisitor>> {
        let visitor = self.options.visitor.clone()?;
        Some(Arc::new(KeyedRegions { key, visitor }))
    }

    /// Returns the limit of a virtual device, shared by its private memory and its arena, and kept
    /// when they are torn down.
    pub(super) fn budget(&mut self, device: VirtualDevice) -> Result<Arc<Budget>> {
        if let Some(budget) = self.shared.budgets.get(&device) {
            return Ok(budget.clone());
        }
        let on = self.physical(device)?;
        let gpu = self.gpu(on)?;
        let memory = gpu.backend().memory_info(gpu.device())?;
        let options = &self.options;
        let own = |device| options.limits.get(&device).copied();
        let host = if options.managed {
            available_on_host()
        } else {
            0
        };
        let bytes = |limit: MemoryLimit| {
            if options.managed {
                limit.managed_bytes(memory, host)
            } else {
                limit.bytes(memory)
            }
        };
        let together = options.devices.on(on);
        if together.len() > 1 {
            let mut sum = 0u64;
            for other in together {
                // 'All but a reserve' of each would be most of it several times over.
                let limit = own(other).unwrap_or(options.limit);
                if matches!(limit, MemoryLimit::AllBut(_) | MemoryLimit::Most) {
                    return Err(Error::invalid(
                        "the memory limit",
                        format!("{limit:?} for {other}, which shares {on}"),
                        "in bytes or a fraction where several virtual devices lie on one device",
                    ));
                }
                sum = sum.saturating_add(bytes(limit)?);
            }
            if sum > memory.total_bytes.saturating_add(host) {
                return Err(Error::invalid(
                    "the memory limit",
                    format!(
                        "{sum} bytes of the {} of {on}, summed over its virtual devices",
                        memory.total_bytes
                    ),
                    "no more than the device has",
                ));
            }
        }
        let budget = Arc::new(Budget::new(bytes(own(device).unwrap_or(options.limit))?));
        self.shared.budgets.insert(device, budget.clone());
        Ok(budget)
    }
}

impl Made {
    pub(super) fn another(&self) -> Made {
        match self {
            Made::Allocator(allocator) => Made::Allocator(allocator.clone()),
            Made::Arena(arena) => Made::Arena(arena.clone()),
        }
    }
}

pub(super) fn physical(gpu: &Gpu) -> PhysicalDevice {
    PhysicalDevice {
        backend: gpu.kind(),
        device: gpu.device(),
    }
}

fn name(what: &str, node: Option<u32>) -> String {
    node.map_or_else(|| what.to_owned(), |node| format!("{what} of node {node}"))
}

/// Puts one heap over where memory comes from, or one for each thread.
fn best_fit(
    kind: AllocatorKind,
    options: BfcOptions,
    upstream: impl SubAllocator,
) -> Arc<dyn Allocator> {
    match kind {
        AllocatorKind::ThreadHeaps(heaps) => Arc::new(ThreadHeaps::new(options, heaps, upstream)),
        _ => Arc::new(Bfc::new(options, upstream)),
    }
}

/// Puts a pool over an allocator, or nothing, within a limit.
fn limited(
    kind: AllocatorKind,
    name: String,
    pool: &PoolOptions,
    inner: impl Allocator,
    limit: u64,
) -> Result<Arc<dyn Allocator>> {
    let inner: Arc<dyn Allocator> = match limit {
        u64::MAX => Arc::new(inner),
        limit => Arc::new(Limit::new(inner, Arc::new(Budget::new(limit)))),
    };
    match kind {
        AllocatorKind::Direct => Ok(inner),
        AllocatorKind::Driver => Err(no_driver_pool(&name)),
        _ => Ok(Arc::new(Pool::new(
            PoolOptions {
                name,
                ..pool.clone()
            },
            inner,
        )?)),
    }
}

fn no_driver_pool(of: &str) -> Error {
    Error::unsupported(
        "the driver's own pool",
        format!("{of} has none here"),
        "choose `AllocatorKind::BestFit`",
    )
}

fn no_device(of: &str) -> Error {
    Error::invalid(
        "the devices of the process state",
        format!("none of {of}"),
        "at least one",
    )
}

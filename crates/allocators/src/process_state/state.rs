//! The owner of every allocator.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use gpu_api::{BackendKind, Error, Gpu, HostMemory, Reclaim, RegionSource, Result};

use super::options::KeyedRegions;
use super::{AllocatorAttributes, AllocatorKind, MemoryLimit, PhysicalDevice, ProcessOptions, VirtualDevice};
use crate::managed::available_on_host;
use crate::{
    Allocator, Arena, ArenaOptions, BasicCpu, Bfc, BfcOptions, Budget, DeviceMemory, Direct, DriverPool, GrowingMemory,
    HostHeap, HostPages, Limit, ManagedMemory, NodePages, Placed, Pool, PoolOptions, RegionVisitor, Relief, Relieved,
    Snapshot, SubAllocator, Trim, Visited,
};

/// Names an allocator of a [`ProcessState`]. In this order they are destroyed: device memory first, while host memory
/// that the device might still read exists.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum AllocatorKey {
    /// Memory of a virtual device for this process alone.
    Device(VirtualDevice),
    /// Memory of a virtual device for blocks of sessions.
    Arena(VirtualDevice),
    /// Pinned host memory that a vendor's devices reach, of a NUMA node or of any.
    Pinned(BackendKind, Option<u32>),
    /// Plain host memory of a NUMA node or of any.
    Cpu(Option<u32>),
}

/// An allocator that was made.
enum Made {
    Allocator(Arc<dyn Allocator>),
    Arena(Arc<Arena>),
}

/// What a device's allocators have in common.
struct Shared {
    /// By virtual device.
    budgets: BTreeMap<VirtualDevice, Arc<Budget>>,
    /// By device.
    reliefs: BTreeMap<PhysicalDevice, Arc<Relief>>,
}

struct Inner {
    gpus: Vec<Gpu>,
    options: ProcessOptions,
    /// Whether an allocator was ever made: from then on options stay.
    used: bool,
    made: BTreeMap<AllocatorKey, Made>,
    shared: Shared,
}

/// Owns every allocator of a process: makes each when it is first asked for, and destroys them in order.
///
/// An allocator is asked for by device and [`AllocatorAttributes`]. Each virtual device has a limit that its private
/// memory and its arena share. When one of them runs out, the sessions and the other allocators of the same device are
/// asked for what they do not need ([`Relief`]).
///
/// # Dropping
///
/// Destroys what nobody else holds, in the order of [`AllocatorKey`]. In a forked child it does nothing.
///
/// # Examples
///
/// ```
/// use allocators::{AllocatorAttributes, AllocatorKey, MemoryLimit, ProcessOptions, ProcessState};
/// use allocators::{Request, VirtualDevice};
/// use backend_host::{HostBackend, HostConfig};
/// use gpu_api::{DeviceId, Gpu};
///
/// let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
/// let state = ProcessState::new([gpu]);
/// state.configure(ProcessOptions::default().limit(MemoryLimit::Bytes(64 << 20)))?;
/// let device = state.allocator(VirtualDevice(0), AllocatorAttributes::default())?;
/// let placed = device.alloc(Request::new(1 << 20))?;
/// device.free(placed.address)?;
/// drop(device);
/// assert_eq!(state.tear_down(AllocatorKey::Device(VirtualDevice(0)))?, 2 << 20);
/// # Ok::<(), gpu_api::Error>(())
/// ```
pub struct ProcessState {
    inner: Mutex<Inner>,
}

/// The owner of the memory at an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Owner {
    /// The allocator, which says the kind of memory too.
    pub key: AllocatorKey,
    /// The allocation that the address lies in.
    pub placed: Placed,
}

impl ProcessState {
    /// Makes no allocator yet. Unless options say otherwise, each device is a virtual device, in this order.
    pub fn new(gpus: impl IntoIterator<Item = Gpu>) -> ProcessState {
        let inner = Inner {
            gpus: gpus.into_iter().collect(),
            options: ProcessOptions::default(),
            used: false,
            made: BTreeMap::new(),
            shared: Shared { budgets: BTreeMap::new(), reliefs: BTreeMap::new() },
        };
        ProcessState { inner: Mutex::new(inner) }
    }

    /// Sets how allocators are made.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] once one was made: what was made already would not heed it; and for a virtual device on a
    /// device that is not here.
    pub fn configure(&self, options: ProcessOptions) -> Result<()> {
        let mut inner = self.inner();
        if inner.used {
            return Err(Error::Invalid {
                what: "options of the process state",
                got: "given after an allocator was made".into(),
                must: "given before",
            });
        }
        for (_, on) in options.devices.iter() {
            inner.gpu(on)?;
        }
        inner.options = options;
        Ok(())
    }

    /// Returns the devices.
    pub fn gpus(&self) -> Vec<Gpu> {
        self.inner().gpus.clone()
    }

    /// Adds devices that are not there yet, as virtual devices behind those that are; says how many.
    pub fn add_devices(&self, gpus: impl IntoIterator<Item = Gpu>) -> usize {
        let mut inner = self.inner();
        let before = inner.gpus.len();
        for gpu in gpus {
            if !inner.gpus.iter().any(|other| physical(other) == physical(&gpu)) {
                inner.gpus.push(gpu);
            }
        }
        inner.gpus.len() - before
    }

    /// Finds the allocation that an address lies in, at its start or inside, and its owner. It may look through all
    /// allocations.
    pub fn owner_of(&self, address: u64) -> Option<Owner> {
        let inner = self.inner();
        inner.made.iter().find_map(|(&key, made)| {
            let placed = match made {
                Made::Allocator(allocator) => allocator.find(address),
                Made::Arena(arena) => arena.find(address),
            };
            placed.map(|placed| Owner { key, placed })
        })
    }

    /// Returns the allocator of memory that does what is asked, for use with a device; makes it if need be.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a virtual device that is not mapped, and for limits that the device cannot keep;
    /// what a backend gives when an allocator is made.
    pub fn allocator(&self, device: VirtualDevice, attributes: AllocatorAttributes) -> Result<Arc<dyn Allocator>> {
        let mut inner = self.inner();
        let on = inner.physical(device)?;
        let node = match inner.options.numa_nodes.get(&device) {
            Some(&node) => Some(node),
            // Asked for each time, since nothing is made of it until there is an allocator.
            None if attributes.on_host => inner.gpu(on)?.numa_node()?,
            None => None,
        };
        let key = match attributes {
            AllocatorAttributes { on_host: false, .. } => AllocatorKey::Device(device),
            AllocatorAttributes { gpu_compatible: false, nic_compatible: false, .. } => AllocatorKey::Cpu(node),
            _ => AllocatorKey::Pinned(on.backend, node),
        };
        inner.made(key)
    }

    /// Returns the allocator of host memory of a NUMA node, pinned for one vendor's devices or plain; makes it if need
    /// be.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for memory pinned for a vendor without a device here; what a backend gives when an allocator
    /// is made. Plain memory needs no device.
    pub fn host_allocator(&self, pinned_for: Option<BackendKind>, node: Option<u32>) -> Result<Arc<dyn Allocator>> {
        let key = pinned_for.map_or(AllocatorKey::Cpu(node), |backend| AllocatorKey::Pinned(backend, node));
        self.inner().made(key)
    }

    /// Returns the memory for sessions of a device; makes it if need be.
    ///
    /// # Errors
    ///
    /// As [`allocator`](ProcessState::allocator), and [`Error::Unsupported`] on a device whose memory cannot be shared.
    pub fn arena(&self, device: VirtualDevice) -> Result<Arc<Arena>> {
        let mut inner = self.inner();
        let key = AllocatorKey::Arena(device);
        if let Some(Made::Arena(arena)) = inner.made.get(&key) {
            return Ok(arena.clone());
        }
        let on = inner.physical(device)?;
        let budget = inner.budget(device)?;
        let relief = inner.shared.reliefs.entry(on).or_default().clone();
        let options = &inner.options;
        let mut arena = ArenaOptions::default()
            .name(format!("arena of {device}"))
            .limit(budget.limit())
            .growth(options.arena_growth)
            .wait(options.wait)
            .patience(options.patience)
            .budget(budget)
            .relief(relief);
        arena.sharing = options.sharing;
        arena.visitor = inner.visitor(key);
        let arena = Arena::new(inner.gpu(on)?.clone(), arena)?;
        inner.used = true;
        inner.made.insert(key, Made::Arena(arena.clone()));
        Ok(arena)
    }

    /// Adds a session to those that the allocators of its device turn to when they are out of memory.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a virtual device that is not mapped.
    pub fn register(&self, device: VirtualDevice, session: Weak<dyn Reclaim>) -> Result<()> {
        let mut inner = self.inner();
        let on = inner.physical(device)?;
        inner.shared.reliefs.entry(on).or_default().register(session);
        Ok(())
    }

    /// Destroys an allocator, and says how many bytes went back; the next request for it makes a fresh one. May block.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] while somebody holds it, memory of it is in use or still worked on, or others may have it
    /// mapped: what still needs it would not know. What the driver gives, which leaks what it did not take; the next
    /// call destroys the allocator. One that was not made is no error.
    pub fn tear_down(&self, key: AllocatorKey) -> Result<u64> {
        // Held all the while, so that nobody builds it again before its memory is back.
        let mut inner = self.inner();
        let (Some(made), refuse) = (inner.made.get(&key), |got: String| Error::Invalid {
            what: "an allocator to be torn down",
            got: format!("{key:?} with {got}"),
            must: "one without handles and without memory in use",
        }) else {
            return Ok(0);
        };
        let (handles, in_use, mapped) = match made {
            Made::Allocator(allocator) => {
                allocator.check_owner()?;
                let stats = allocator.stats();
                (Arc::strong_count(allocator), stats.bytes_in_use, 0)
            }
            Made::Arena(arena) => {
                arena.check_owner()?;
                let usage = arena.usage();
                (Arc::strong_count(arena), usage.in_use, usage.pinned)
            }
        };
        if in_use > 0 {
            return Err(refuse(format!("{in_use} bytes in use")));
        }
        if mapped > 0 {
            return Err(refuse(format!("{mapped} bytes that others may have mapped")));
        }
        // New handles come from here alone, under this lock.
        if handles > 1 {
            return Err(refuse(format!("{} handles elsewhere", handles - 1)));
        }
        // While it is still there: what does not go back has to stay somebody's.
        let (freed, left) = match made {
            Made::Allocator(allocator) => (allocator.trim()?, allocator.stats().bytes_reserved),
            Made::Arena(arena) => (arena.trim()?, arena.usage().reserved),
        };
        if left > 0 {
            return Err(refuse(format!("{left} bytes that were freed after work that is not done")));
        }
        inner.made.remove(&key);
        Ok(freed)
    }

    /// Destroys every allocator, in the order of [`AllocatorKey`], and says how many bytes went back. After that it is
    /// as if nothing had been made: it can be [configured](ProcessState::configure) anew. May block.
    ///
    /// # Errors
    ///
    /// As [`tear_down`](ProcessState::tear_down), for the first that refuses; those before it are gone, and it and
    /// those behind it stay.
    pub fn tear_down_all(&self) -> Result<u64> {
        let mut freed = 0;
        loop {
            let mut inner = self.inner();
            let Some(&key) = inner.made.keys().next() else {
                // What it shared goes too: limits are those of the next options.
                inner.shared = Shared { budgets: BTreeMap::new(), reliefs: BTreeMap::new() };
                inner.used = false;
                return Ok(freed);
            };
            drop(inner);
            freed += self.tear_down(key)?;
        }
    }

    /// Lists what was made, with every region and chunk of those that have regions.
    pub fn snapshots(&self) -> Vec<(AllocatorKey, Option<Snapshot>)> {
        let made: Vec<(AllocatorKey, Made)> =
            self.inner().made.iter().map(|(&key, made)| (key, made.another())).collect();
        // With no lock of ours held: sessions are asked what they hold.
        let snapshot = |made: &Made| match made {
            Made::Allocator(allocator) => allocator.snapshot(),
            Made::Arena(arena) => Some(arena.snapshot()),
        };
        made.iter().map(|(key, made)| (*key, snapshot(made))).collect()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn gpu(&self, on: PhysicalDevice) -> Result<&Gpu> {
        self.gpus.iter().find(|gpu| physical(gpu) == on).ok_or_else(|| Error::Invalid {
            what: "a device",
            got: on.to_string(),
            must: "one that the process state was given",
        })
    }

    fn physical(&self, device: VirtualDevice) -> Result<PhysicalDevice> {
        if self.options.devices.is_empty()
            && let Some(gpu) = self.gpus.get(device.0 as usize)
        {
            return Ok(physical(gpu));
        }
        self.options.devices.physical(device)
    }

    fn made(&mut self, key: AllocatorKey) -> Result<Arc<dyn Allocator>> {
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
                let pages = HostPages::new(gpu, HostMemory { pinned: true, numa_node: node })?;
                let pages = Visited::maybe(pages, self.visitor(key));
                let options = &self.options;
                let name = name("pinned host memory", node);
                match options.pinned_kind {
                    AllocatorKind::BestFit => {
                        let bfc = BfcOptions::new(name)
                            .device(device)
                            .limit(options.pinned_limit)
                            .growth(options.pinned_growth)
                            .memory_dump(options.memory_dump.clone());
                        Ok(Arc::new(Bfc::new(bfc, pages)))
                    }
                    kind => {
                        limited(kind, name, &options.pinned_pool, Direct::new("pinned", pages), options.pinned_limit)
                    }
                }
            }
            AllocatorKey::Cpu(node) => {
                let options = &self.options;
                let name = name(&options.cpu_pool.name, node);
                match (options.cpu_kind, node) {
                    (AllocatorKind::BestFit, None) => {
                        let heap = Visited::maybe(HostHeap::new()?, self.visitor(key));
                        Ok(Arc::new(Bfc::new(self.cpu(name), heap)))
                    }
                    (AllocatorKind::BestFit, Some(node)) => {
                        let pages = Visited::maybe(NodePages::new(node)?, self.visitor(key));
                        Ok(Arc::new(Bfc::new(self.cpu(name), pages)))
                    }
                    (kind, node) => limited(kind, name, &options.cpu_pool, BasicCpu::new(node)?, u64::MAX),
                }
            }
            AllocatorKey::Arena(_) => unreachable!("arenas are made by `arena`"),
        }
    }

    fn make_device(&mut self, key: AllocatorKey, device: VirtualDevice) -> Result<Arc<dyn Allocator>> {
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
            .round_up_divisions(options.round_up_divisions)
            .memory_dump(options.memory_dump.clone());
        let grows = options.grows_in_place && !options.managed && options.device_kind == AllocatorKind::BestFit;
        if grows && gpu.caps().ranges {
            let memory = Visited::maybe(GrowingMemory::new(gpu)?.budget(budget), self.visitor(key));
            return Ok(Relieved::with_patience(Bfc::new(bfc, memory), relief, options.patience));
        }
        if options.device_kind == AllocatorKind::Driver {
            let pool = DriverPool::new(device.to_string(), gpu, budget.limit())?;
            return Ok(Arc::new(pool.budget(budget).relief(relief)));
        }
        if options.managed {
            let memory = Visited::maybe(ManagedMemory::new(gpu)?.budget(budget), self.visitor(key));
            return self.keep_device(device, bfc, memory, relief);
        }
        let memory = Visited::maybe(DeviceMemory::new(gpu)?.budget(budget), self.visitor(key));
        self.keep_device(device, bfc, memory, relief)
    }

    /// Puts what device memory is kept by over where it comes from.
    fn keep_device(
        &self,
        device: VirtualDevice,
        bfc: BfcOptions,
        memory: impl SubAllocator,
        relief: Arc<Relief>,
    ) -> Result<Arc<dyn Allocator>> {
        let options = &self.options;
        match options.device_kind {
            AllocatorKind::BestFit => {
                let bfc = Bfc::new(bfc, memory);
                Ok(Relieved::with_patience(bfc, relief, options.patience))
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
        BfcOptions::new(name).limit(self.options.cpu_limit).memory_dump(self.options.memory_dump.clone())
    }

    fn visitor(&self, key: AllocatorKey) -> Option<Arc<dyn RegionVisitor>> {
        let visitor = self.options.visitor.clone()?;
        Some(Arc::new(KeyedRegions { key, visitor }))
    }

    /// Returns the limit of a virtual device, shared by its private memory and its arena, and kept when they are torn
    /// down.
    fn budget(&mut self, device: VirtualDevice) -> Result<Arc<Budget>> {
        if let Some(budget) = self.shared.budgets.get(&device) {
            return Ok(budget.clone());
        }
        let on = self.physical(device)?;
        let gpu = self.gpu(on)?;
        let memory = gpu.backend().memory_info(gpu.device())?;
        let options = &self.options;
        let own = |device| options.limits.get(&device).copied();
        let host = if options.managed { available_on_host() } else { 0 };
        let bytes = |limit: MemoryLimit| {
            if options.managed { limit.managed_bytes(memory, host) } else { limit.bytes(memory) }
        };
        let together = options.devices.on(on);
        if together.len() > 1 {
            let mut sum = 0u64;
            for other in together {
                // 'All but a reserve' of each would be most of it several times over.
                let limit = own(other).unwrap_or(options.limit);
                if matches!(limit, MemoryLimit::AllBut(_) | MemoryLimit::Most) {
                    return Err(Error::Invalid {
                        what: "the memory limit",
                        got: format!("{limit:?} for {other}, which shares {on}"),
                        must: "in bytes or a fraction where several virtual devices lie on one device",
                    });
                }
                sum = sum.saturating_add(bytes(limit)?);
            }
            if sum > memory.total_bytes.saturating_add(host) {
                return Err(Error::Invalid {
                    what: "the memory limit",
                    got: format!("{sum} bytes of the {} of {on}, summed over its virtual devices", memory.total_bytes),
                    must: "no more than the device has",
                });
            }
        }
        let budget = Arc::new(Budget::new(bytes(own(device).unwrap_or(options.limit))?));
        self.shared.budgets.insert(device, budget.clone());
        Ok(budget)
    }
}

impl Made {
    fn another(&self) -> Made {
        match self {
            Made::Allocator(allocator) => Made::Allocator(allocator.clone()),
            Made::Arena(arena) => Made::Arena(arena.clone()),
        }
    }
}

fn physical(gpu: &Gpu) -> PhysicalDevice {
    PhysicalDevice { backend: gpu.kind(), device: gpu.device() }
}

fn name(what: &str, node: Option<u32>) -> String {
    node.map_or_else(|| what.to_owned(), |node| format!("{what} of node {node}"))
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
        _ => Ok(Arc::new(Pool::new(PoolOptions { name, ..pool.clone() }, inner)?)),
    }
}

fn no_driver_pool(of: &str) -> Error {
    Error::Unsupported {
        what: "the driver's own pool",
        why: format!("{of} has none here"),
        remedy: "choose `AllocatorKind::BestFit`",
    }
}

fn no_device(of: &str) -> Error {
    Error::Invalid { what: "the devices of the process state", got: format!("none of {of}"), must: "at least one" }
}

impl Drop for ProcessState {
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        // The map has no order of destruction of its own that it promises.
        while let Some((key, made)) = inner.made.pop_first() {
            tracing::trace!(?key, "destroyed");
            drop(made);
        }
    }
}

impl fmt::Debug for ProcessState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inner = self.inner();
        f.debug_struct("ProcessState")
            .field("gpus", &inner.gpus.len())
            .field("made", &inner.made.keys().collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

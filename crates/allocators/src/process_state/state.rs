//! The owner of every allocator.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use gpu_api::lock::Acquire;
use gpu_api::{BackendKind, Error, ForkGuard, Gpu, Result};

use crate::{Reclaim, RegionSource};

use super::made::{Inner, Made, Shared, physical};
use super::{AllocatorAttributes, AllocatorKey, ProcessOptions, VirtualDevice};
use crate::{Allocator, Arena, ArenaOptions, Placed, Snapshot};

/// Owns every allocator of a process: makes each when it is first asked for, and destroys them in
/// order.
///
/// An allocator is asked for by device and [`AllocatorAttributes`]. Each virtual device has a limit
/// that its private memory and its arena share. When one of them runs out, the sessions and the
/// other allocators of the same device are asked for what they do not need
/// ([`Relief`](crate::Relief)).
///
/// # Dropping
///
/// Destroys what nobody else holds, in the order of [`AllocatorKey`]. In a forked child it does
/// nothing.
///
/// # Forks
///
/// In a forked child every call that can fail gives [`Error::Forked`] before any lock, and the
/// others answer as of a process state without devices and allocators.
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
    /// `None` where forked children cannot be told apart: no device is found there either.
    fork: Option<ForkGuard>,
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
    /// Makes no allocator yet. Unless options say otherwise, each device is a virtual device, in
    /// this order.
    pub fn new(gpus: impl IntoIterator<Item = Gpu>) -> ProcessState {
        let inner = Inner {
            gpus: gpus.into_iter().collect(),
            options: ProcessOptions::default(),
            used: false,
            made: BTreeMap::new(),
            shared: Shared::default(),
        };
        ProcessState {
            inner: Mutex::new(inner),
            fork: ForkGuard::new().ok(),
        }
    }

    /// Sets how allocators are made.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] once one was made: what was made already would not heed it; and for a
    /// virtual device on a device that is not here.
    pub fn configure(&self, options: ProcessOptions) -> Result<()> {
        let mut inner = self.own()?;
        if inner.used {
            return Err(Error::invalid(
                "options of the process state",
                "given after an allocator was made",
                "given before",
            ));
        }
        for (_, on) in options.devices.iter() {
            inner.gpu(on)?;
        }
        inner.options = options;
        Ok(())
    }

    /// Returns the devices.
    pub fn gpus(&self) -> Vec<Gpu> {
        self.own()
            .map_or_else(|_| Vec::new(), |inner| inner.gpus.clone())
    }

    /// Adds devices that are not there yet, as virtual devices behind those that are; says how
    /// many.
    pub fn add_devices(&self, gpus: impl IntoIterator<Item = Gpu>) -> usize {
        let Ok(mut inner) = self.own() else { return 0 };
        let before = inner.gpus.len();
        for gpu in gpus {
            if !inner
                .gpus
                .iter()
                .any(|other| physical(other) == physical(&gpu))
            {
                inner.gpus.push(gpu);
            }
        }
        inner.gpus.len() - before
    }

    /// Finds the allocation that an address lies in, at its start or inside, and its owner. It may
    /// look through all allocations.
    pub fn owner_of(&self, address: u64) -> Option<Owner> {
        let inner = self.own().ok()?;
        inner.made.iter().find_map(|(&key, made)| {
            let placed = match made {
                Made::Allocator(allocator) => allocator.find(address),
                Made::Arena(arena) => arena.find(address),
            };
            placed.map(|placed| Owner { key, placed })
        })
    }

    /// Returns the allocator of memory that does what is asked, for use with a device; makes it if
    /// need be.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a virtual device that is not mapped, and for limits that the device
    /// cannot keep; what a backend gives when an allocator is made.
    pub fn allocator(
        &self,
        device: VirtualDevice,
        attributes: AllocatorAttributes,
    ) -> Result<Arc<dyn Allocator>> {
        let mut inner = self.own()?;
        let on = inner.physical(device)?;
        let node = match inner.options.numa_nodes.get(&device) {
            Some(&node) => Some(node),
            // Asked for each time, since nothing is made of it until there is an allocator.
            None if attributes.on_host => inner.gpu(on)?.numa_node()?,
            None => None,
        };
        let key = match attributes {
            AllocatorAttributes { on_host: false, .. } => AllocatorKey::Device(device),
            AllocatorAttributes {
                gpu_compatible: false,
                nic_compatible: false,
                ..
            } => AllocatorKey::Cpu(node),
            _ => AllocatorKey::Pinned(on.backend, node),
        };
        inner.made(key)
    }

    /// Returns the allocator of host memory of a NUMA node, pinned for one vendor's devices or
    /// plain; makes it if need be.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for memory pinned for a vendor without a device here; what a backend
    /// gives when an allocator is made. Plain memory needs no device.
    pub fn host_allocator(
        &self,
        pinned_for: Option<BackendKind>,
        node: Option<u32>,
    ) -> Result<Arc<dyn Allocator>> {
        let key = pinned_for.map_or(AllocatorKey::Cpu(node), |backend| {
            AllocatorKey::Pinned(backend, node)
        });
        self.own()?.made(key)
    }

    /// Returns the memory for sessions of a device; makes it if need be.
    ///
    /// # Errors
    ///
    /// As [`allocator`](ProcessState::allocator), and [`Error::Unsupported`] on a device whose
    /// memory cannot be shared.
    pub fn arena(&self, device: VirtualDevice) -> Result<Arc<Arena>> {
        let mut inner = self.own()?;
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

    /// Adds a session to those that the allocators of its device turn to when they are out of
    /// memory.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a virtual device that is not mapped.
    pub fn register(&self, device: VirtualDevice, session: Weak<dyn Reclaim>) -> Result<()> {
        let mut inner = self.own()?;
        let on = inner.physical(device)?;
        inner
            .shared
            .reliefs
            .entry(on)
            .or_default()
            .register(session);
        Ok(())
    }

    /// Destroys an allocator, and says how many bytes went back; the next request for it makes a
    /// fresh one. May block.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] while somebody holds it, memory of it is in use or still worked on, or
    /// others may have it mapped: what still needs it would not know. What the driver gives, which
    /// leaks what it did not take; the next call destroys the allocator. One that was not made is
    /// no error.
    pub fn tear_down(&self, key: AllocatorKey) -> Result<u64> {
        // Held all the while, so that nobody builds it again before its memory is back.
        let mut inner = self.own()?;
        let (Some(made), refuse) = (inner.made.get(&key), |got: String| {
            Error::invalid(
                "an allocator to be torn down",
                format!("{key:?} with {got}"),
                "one without handles and without memory in use",
            )
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
            return Err(refuse(format!(
                "{mapped} bytes that others may have mapped"
            )));
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
            return Err(refuse(format!(
                "{left} bytes that were freed after work that is not done"
            )));
        }
        inner.made.remove(&key);
        Ok(freed)
    }

    /// Destroys every allocator, in the order of [`AllocatorKey`], and says how many bytes went
    /// back. After that it is as if nothing had been made: it can be
    /// [configured](ProcessState::configure) anew. May block.
    ///
    /// # Errors
    ///
    /// As [`tear_down`](ProcessState::tear_down), for the first that refuses; those before it are
    /// gone, and it and those behind it stay.
    pub fn tear_down_all(&self) -> Result<u64> {
        let mut freed = 0;
        loop {
            let mut inner = self.own()?;
            let Some(&key) = inner.made.keys().next() else {
                // What it shared goes too: limits are those of the next options.
                inner.shared = Shared::default();
                inner.used = false;
                return Ok(freed);
            };
            drop(inner);
            freed += self.tear_down(key)?;
        }
    }

    /// Lists what was made, with every region and chunk of those that have regions.
    pub fn snapshots(&self) -> Vec<(AllocatorKey, Option<Snapshot>)> {
        let Ok(inner) = self.own() else {
            return Vec::new();
        };
        let another = inner.made.iter().map(|(&key, made)| (key, made.another()));
        let made: Vec<(AllocatorKey, Made)> = another.collect();
        drop(inner);
        // With no lock of ours held: sessions are asked what they hold.
        let snapshot = |made: &Made| match made {
            Made::Allocator(allocator) => allocator.snapshot(),
            Made::Arena(arena) => Some(arena.snapshot()),
        };
        made.iter()
            .map(|(key, made)| (*key, snapshot(made)))
            .collect()
    }

    /// Fails in a forked child of the process that made this.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`].
    pub fn check_fork(&self) -> Result<()> {
        self.fork
            .map_or(Ok(()), |fork| fork.check("this process state"))
    }

    /// Locks it, in its own process alone.
    fn own(&self) -> Result<MutexGuard<'_, Inner>> {
        self.check_fork()?;
        Ok(self.inner.acquire())
    }
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
        let Ok(inner) = self.own() else {
            return f.write_str("ProcessState { of a parent process }");
        };
        f.debug_struct("ProcessState")
            .field("gpus", &inner.gpus.len())
            .field("made", &inner.made.keys().collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

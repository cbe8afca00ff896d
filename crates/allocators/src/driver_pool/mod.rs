//! The driver's own stream-ordered pool, as an allocator (`cudaMallocAsync`, `hipMallocAsync`).
//!
//! The pool is this allocator's alone. It works on a stream of its own, on which nothing else is
//! ever queued: what is allocated there is usable by anybody once that stream has passed it, which
//! takes the host microseconds.
//!
//! ```text
//! alloc                 ─► the own stream, passed       free                  ─► the own stream
//! alloc on a known one  ─► that stream, in its order    free after its work   ─► that stream, in its order
//!                                                       free after other work ─► pending ─ done ─► the own stream
//! ```
//!
//! A stream is known once it was [named](DriverPool::know_stream). The driver's order then replaces
//! our waiting for its work. Whatever else work is, memory of it is kept until the work says that
//! it is done.

mod core;

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use gpu_api::{Gpu, PoolUsage, RawStream, Result, StreamIdentity, thread};

use self::core::Core;
use crate::request::foreign;
use crate::{
    Allocator, AllocatorStats, Budget, DeviceBytes, Memory, Placed, Relief, Request, Trim, Work,
};

/// An allocator over a pool of the driver's own.
///
/// It counts, refuses foreign addresses, keeps to a budget and waits as the other allocators do;
/// the most that it had reserved is the driver's count, which `clear_stats` leaves. What it does
/// not have is regions: the driver says nothing of them, so there is no snapshot, and visitors hear
/// of none. Its memory cannot be shared with another process. For a process that shares memory or
/// wants to see how it lies, best fit is the better choice.
///
/// # Examples
///
/// ```
/// use allocators::{Allocator, DriverPool, Request};
/// use backend_host::{HostBackend, HostConfig};
/// use gpu_api::{DeviceId, Gpu};
///
/// let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
/// let pool = DriverPool::new("driver", gpu, u64::MAX)?;
/// let placed = pool.alloc(Request::new(1000))?;
/// assert_eq!((placed.asked, placed.bytes), (1000, 1024));
/// pool.free(placed.address)?;
/// # Ok::<(), gpu_api::Error>(())
/// ```
pub struct DriverPool {
    core: Arc<Core>,
}

impl DriverPool {
    /// Makes a pool of the driver's on this device. Once it has more than `keep` bytes of the
    /// device, what nobody uses goes back; `u64::MAX` keeps everything until it is trimmed.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](gpu_api::Error::Unsupported) on a device without
    /// [`Caps::pools`](gpu_api::Caps::pools); what the driver gives.
    pub fn new(name: impl Into<String>, gpu: Gpu, keep: u64) -> Result<DriverPool> {
        let pool = gpu.backend().create_pool(gpu.device(), keep)?;
        let order = gpu.backend().create_stream(gpu.device()).inspect_err(|_| {
            // SAFETY: `destroy_pool` asks for a live pool: just made.
            if let Err(error) = unsafe { gpu.backend().destroy_pool(pool) } {
                tracing::warn!(%error, "a pool is leaked");
            }
        })?;
        let (name, state, bytes) = (name.into(), Mutex::default(), OnceLock::new());
        let core = Core {
            name,
            gpu,
            pool,
            order,
            budget: None,
            relief: None,
            state,
            bytes,
        };
        Ok(DriverPool {
            core: Arc::new(core),
        })
    }

    /// Hands out no more than a budget allows, at one time.
    ///
    /// # Panics
    ///
    /// If anybody has looked for idle memory of it by now: to be called before
    /// [`relief`](DriverPool::relief).
    #[must_use]
    pub fn budget(mut self, budget: Arc<Budget>) -> DriverPool {
        self.own().budget = Some(budget);
        self
    }

    /// Joins the allocators of a device: turns to them when it is out of memory, and they to it.
    ///
    /// # Panics
    ///
    /// If it was called before.
    #[must_use]
    pub fn relief(mut self, relief: Arc<Relief>) -> DriverPool {
        self.own().relief = Some(relief.clone());
        let weak: Weak<dyn Trim> = Arc::<Core>::downgrade(&self.core);
        relief.register_neighbour(weak);
        self
    }

    fn own(&mut self) -> &mut Core {
        Arc::get_mut(&mut self.core).expect("options come before anybody else knows of it")
    }

    /// Names a stream, so that [`Request::on`] allocates in its order and memory that is given back
    /// after work of it alone goes back in its order. Without that its work is waited for by what
    /// stands for the work.
    ///
    /// # Errors
    ///
    /// What [`stream_info`](gpu_api::GpuStreams::stream_info) gives.
    ///
    /// # Safety
    ///
    /// `stream` is alive and of this device, until [`forget_stream`](DriverPool::forget_stream) or
    /// for as long as this allocator is used, and is not captured while memory is taken or given
    /// back in its order.
    pub unsafe fn know_stream(&self, stream: RawStream) -> Result<StreamIdentity> {
        self.core.check()?;
        // SAFETY: `stream_info` asks for a live stream: our caller vouches for it.
        let info = unsafe { self.core.gpu.backend().stream_info(stream) }?;
        self.core.state().streams.insert(info.identity, stream);
        Ok(info.identity)
    }

    /// Forgets a stream before it is destroyed.
    pub fn forget_stream(&self, stream: StreamIdentity) {
        self.core.state().streams.remove(&stream);
    }

    /// Asks the driver what the pool holds.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn usage(&self) -> Result<PoolUsage> {
        self.core.check()?;
        self.core.usage()
    }

    /// Returns the bytes that the driver failed to take back. They are neither used nor freed
    /// again.
    pub fn leaked_bytes(&self) -> u64 {
        self.core.state().counters.leaked
    }
}

// SAFETY: `Allocator` asks that what is handed out does not overlap: each is an allocation of the
// driver's of its own, which goes back once. `memory` reaches it: it copies on the device that the
// pool lies on.
unsafe impl Allocator for DriverPool {
    fn name(&self) -> &str {
        &self.core.name
    }

    fn alloc(&self, request: Request) -> Result<Placed> {
        self.core.alloc(request)
    }

    fn free(&self, address: u64) -> Result<()> {
        self.core.free_after(address, Vec::new())
    }

    fn free_after(&self, address: u64, work: Vec<Work>) -> Result<()> {
        self.core.free_after(address, work)
    }

    fn record_work(&self, address: u64, work: Work) -> Result<()> {
        self.core.check()?;
        let mut state = self.core.state();
        let live = state
            .live
            .get_mut(&address)
            .ok_or_else(|| foreign(address))?;
        live.work.push(work);
        Ok(())
    }

    fn get(&self, address: u64) -> Option<Placed> {
        self.core.state().live.get(&address).map(|live| live.placed)
    }

    fn find(&self, address: u64) -> Option<Placed> {
        let state = self.core.state();
        let (_, live) = state.live.range(..=address).next_back()?;
        Some(live.placed).filter(|placed| placed.covers(address))
    }

    fn stats(&self) -> AllocatorStats {
        // In a forked child, or when the driver does not answer, it is nothing.
        let usage = self
            .core
            .check()
            .and_then(|()| self.core.usage())
            .unwrap_or_default();
        let mut counters = self.core.state().counters;
        (counters.reserved, counters.peak_reserved) = (usage.reserved, usage.most_reserved);
        counters.stats(
            self.core
                .budget
                .as_ref()
                .map_or(u64::MAX, |budget| budget.limit()),
            0,
        )
    }

    fn clear_stats(&self) {
        self.core.state().counters.clear();
    }

    fn trim(&self) -> Result<u64> {
        self.core.trim()
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        if let Some(bytes) = self.core.bytes.get() {
            return Ok(Arc::<DeviceBytes>::clone(bytes));
        }
        let bytes = Arc::new(DeviceBytes::new(self.core.gpu.clone())?);
        Ok(Arc::<DeviceBytes>::clone(
            self.core.bytes.get_or_init(|| bytes),
        ))
    }

    fn check_owner(&self) -> Result<()> {
        self.core.check()
    }
}

impl Drop for DriverPool {
    fn drop(&mut self) {
        // In a forked child the pool is the parent's.
        if self.core.check().is_err() {
            return;
        }
        self.core.settle(usize::MAX);
        let (in_use, is_busy) = {
            let state = self.core.state();
            (state.counters.in_use, !state.pending.is_empty())
        };
        let name = &self.core.name;
        if in_use > 0 {
            tracing::warn!(
                allocator = name,
                in_use,
                "dropped while memory of it is in use"
            );
        }
        if is_busy {
            // The work may end long after this, and a drop must not wait for it.
            let late = self.core.clone();
            let spawned = thread::start("gpu-ipc-late", move || late.finish());
            if let Err(error) = spawned {
                tracing::warn!(allocator = name, %error, "memory is leaked: no thread waits for its work");
            }
        }
    }
}

impl fmt::Debug for DriverPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.core.state();
        f.debug_struct("DriverPool")
            .field("name", &self.core.name)
            .field("gpu", &self.core.gpu)
            .field("in_use", &state.counters.in_use)
            .field("pending", &state.pending.len())
            .finish_non_exhaustive()
    }
}

//! The driver's own stream-ordered pool, as an allocator (`cudaMallocAsync`, `hipMallocAsync`).
//!
//! The pool is this allocator's alone. It works on a stream of its own, on which nothing else is ever queued: what is
//! allocated there is usable by anybody once that stream has passed it, which takes the host microseconds.
//!
//! ```text
//! alloc                 ─► the own stream, passed       free                  ─► the own stream
//! alloc on a known one  ─► that stream, in its order    free after its work   ─► that stream, in its order
//!                                                       free after other work ─► pending ─ done ─► the own stream
//! ```
//!
//! A stream is known once it was [named](DriverPool::know_stream). The driver's order then replaces our waiting for its
//! work. Whatever else work is, memory of it is kept until the work says that it is done.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use gpu_api::{DevicePtr, Error, ForkGuard, Gpu, PoolUsage, RawPool, RawStream, Result, StreamIdentity};

use crate::bfc::Counters;
use crate::request::foreign;
use crate::{Allocator, AllocatorStats, Budget, DeviceBytes, Memory, Placed, Relief, Request, Trim, Work};

/// What the driver aligns to, and lengths are rounded up to.
const GRANULE: u64 = 256;

/// How many pieces of pending memory an allocation asks about before it asks the driver.
const QUESTIONS: usize = 16;

/// How long a request that may wait naps between two looks, at first and at most.
const NAPS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(16));

/// How long the thread of a dropped allocator naps between two looks at the work, at first and at most.
const LATE_NAPS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(128));

/// An allocator over a pool of the driver's own.
///
/// It counts, refuses foreign addresses, keeps to a budget and waits as the other allocators do; the most that it had
/// reserved is the driver's count, which `clear_stats` leaves. What it does not have
/// is regions: the driver says nothing of them, so there is no snapshot, and visitors hear of none. Its memory cannot
/// be shared with another process. For a process that shares memory or wants to see how it lies, best fit is the better
/// choice.
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

/// A [`DriverPool`] but for its drop, which may have to leave it to a thread that waits for work.
struct Core {
    name: String,
    gpu: Gpu,
    pool: RawPool,
    /// The stream of its own.
    order: RawStream,
    budget: Option<Arc<Budget>>,
    relief: Option<Arc<Relief>>,
    fork: ForkGuard,
    state: Mutex<State>,
    bytes: OnceLock<Arc<DeviceBytes>>,
}

#[derive(Default)]
struct State {
    live: BTreeMap<u64, Live>,
    /// Given back, with work that is not known to have finished.
    pending: Vec<Pending>,
    streams: HashMap<StreamIdentity, RawStream>,
    counters: Counters,
    number: u64,
}

/// Memory that is handed out.
struct Live {
    placed: Placed,
    piece: Piece,
    /// Noted by [`Allocator::record_work`].
    work: Vec<Work>,
}

/// Memory of the pool, as the driver gave it.
#[derive(Clone, Copy)]
struct Piece {
    base: DevicePtr,
    len: u64,
}

struct Pending {
    piece: Piece,
    work: Vec<Work>,
}

impl DriverPool {
    /// Makes a pool of the driver's on this device. Once it has more than `keep` bytes of the device, what nobody uses
    /// goes back; `u64::MAX` keeps everything until it is trimmed.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] on a device without [`Caps::pools`](gpu_api::Caps::pools); what the driver gives;
    /// [`Error::System`] when the kernel has no page for the fork guard.
    pub fn new(name: impl Into<String>, gpu: Gpu, keep: u64) -> Result<DriverPool> {
        let fork = ForkGuard::new()?;
        let pool = gpu.backend().create_pool(gpu.device(), keep)?;
        let order = gpu.backend().create_stream(gpu.device()).inspect_err(|_| {
            // SAFETY: `destroy_pool` asks for a live pool: just made.
            if let Err(error) = unsafe { gpu.backend().destroy_pool(pool) } {
                tracing::warn!(%error, "a pool is leaked");
            }
        })?;
        let (name, state, bytes) = (name.into(), Mutex::default(), OnceLock::new());
        let core = Core { name, gpu, pool, order, budget: None, relief: None, fork, state, bytes };
        Ok(DriverPool { core: Arc::new(core) })
    }

    /// Hands out no more than a budget allows, at one time.
    ///
    /// # Panics
    ///
    /// If anybody has looked for idle memory of it by now: to be called before [`relief`](DriverPool::relief).
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

    /// Names a stream, so that [`Request::on`] allocates in its order and memory that is given back after work of it
    /// alone goes back in its order. Without that its work is waited for by what stands for the work.
    ///
    /// # Errors
    ///
    /// What [`stream_info`](gpu_api::GpuStreams::stream_info) gives.
    ///
    /// # Safety
    ///
    /// `stream` is alive and of this device, until [`forget_stream`](DriverPool::forget_stream) or for as long as this
    /// allocator is used, and is not captured while memory is taken or given back in its order.
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
    /// What the driver gives.
    pub fn usage(&self) -> Result<PoolUsage> {
        self.core.check()?;
        self.core.usage()
    }

    /// Returns the bytes that the driver failed to take back. They are neither used nor freed again.
    pub fn leaked_bytes(&self) -> u64 {
        self.core.state().counters.leaked
    }
}

impl Core {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> Result<()> {
        self.fork.check("this allocator")
    }

    fn usage(&self) -> Result<PoolUsage> {
        // SAFETY: `pool_usage` asks for a live pool: it is destroyed by the drop alone.
        unsafe { self.gpu.backend().pool_usage(self.pool) }
    }

    fn alloc(&self, request: Request) -> Result<Placed> {
        request.check()?;
        self.check()?;
        self.settle(QUESTIONS);
        let Some(len) = len_for(&request) else {
            return Err(self.out_of_memory(request.bytes, "no allocation is that large or so aligned, ask for less"));
        };
        self.afford(len, &request)?;
        let on = request.stream.and_then(|stream| self.state().streams.get(&stream).copied());
        match self.take(len, on, &request) {
            Ok(base) => Ok(self.hand_out(Piece { base, len }, &request)),
            Err(error) => {
                self.forgo(len);
                Err(self.explain(error))
            }
        }
    }

    /// Takes bytes of the budget; where they are too few, after what is pending and everybody else has given theirs.
    fn afford(&self, len: u64, request: &Request) -> Result<()> {
        let Some(budget) = &self.budget else { return Ok(()) };
        if budget.take(len).is_ok() {
            return Ok(());
        }
        self.settle(usize::MAX);
        if let Some(relief) = &self.relief {
            relief.collect();
            relief.trim();
        }
        let mut nap = NAPS.0;
        loop {
            let now = Instant::now();
            let look = request.until.filter(|&until| now < until).map(|until| until.min(now + nap));
            match budget.take_until(len, look) {
                Ok(()) => return Ok(()),
                Err(free) if look.is_none() || len > budget.limit() => {
                    let hint = format!("of a budget of {} bytes", budget.limit());
                    return Err(Error::OutOfMemory { device: self.gpu.device(), asked: request.bytes, free, hint });
                }
                // Work that finishes wakes nobody.
                Err(_) => self.settle(usize::MAX),
            };
            nap = (2 * nap).min(NAPS.1);
        }
    }

    fn forgo(&self, len: u64) {
        if let Some(budget) = &self.budget {
            budget.give_back(len);
        }
    }

    /// Asks the driver, and where it has no room everybody who may have some.
    fn take(&self, len: u64, on: Option<RawStream>, request: &Request) -> Result<DevicePtr> {
        let mut error = match self.ask(len, on) {
            Err(error @ Error::OutOfMemory { .. }) => error,
            other => return other,
        };
        let mut nap = NAPS.0;
        loop {
            self.trim()?;
            if let Some(relief) = &self.relief {
                relief.collect();
                relief.trim();
            }
            let asked = match self.ask(len, on) {
                Err(Error::OutOfMemory { .. }) => self.relief.as_ref().map_or(0, |relief| relief.ask_to_unmap()),
                other => return other,
            };
            let now = Instant::now();
            let Some(until) = request.until.filter(|&until| now < until && len <= self.gpu.info().total_bytes) else {
                if asked > 0
                    && let Some(relief) = &self.relief
                {
                    relief.trim();
                    error = match self.ask(len, on) {
                        Err(error @ Error::OutOfMemory { .. }) => error,
                        other => return other,
                    };
                }
                return Err(error);
            };
            thread::sleep(nap.min(until - now));
            nap = (2 * nap).min(NAPS.1);
        }
    }

    /// Asks the driver once.
    fn ask(&self, len: u64, on: Option<RawStream>) -> Result<DevicePtr> {
        let backend = self.gpu.backend();
        let stream = on.unwrap_or(self.order);
        // SAFETY: `pool_alloc` asks for a live pool, which it is until the drop, and a live stream of its device: our
        // own, or one that `know_stream` has its caller's word for.
        let allocation = unsafe { backend.pool_alloc(self.pool, stream, len) }?;
        if on.is_some() {
            return Ok(allocation.base);
        }
        // SAFETY: `synchronize_stream` asks for a live stream: our own, until the drop.
        let passed = unsafe { backend.synchronize_stream(self.order) };
        if let Err(error) = passed {
            // SAFETY: `pool_free` asks for memory of `pool_alloc`, once, that nothing uses: nobody has seen it yet.
            if let Err(error) = unsafe { backend.pool_free(self.order, allocation.base) } {
                tracing::warn!(%error, "memory of a pool is leaked");
            }
            return Err(error);
        }
        Ok(allocation.base)
    }

    fn hand_out(&self, piece: Piece, request: &Request) -> Placed {
        let address = piece.base.0.next_multiple_of(request.align.max(1));
        let mut state = self.state();
        state.number += 1;
        let bytes = request.bytes.next_multiple_of(GRANULE);
        let placed = Placed { address, bytes, asked: request.bytes, number: state.number, token: () };
        state.live.insert(address, Live { placed, piece, work: Vec::new() });
        state.counters.allocated(bytes, request.bytes);
        placed
    }

    fn free_after(&self, address: u64, work: Vec<Work>) -> Result<()> {
        self.check()?;
        let (piece, work, in_order) = {
            let mut state = self.state();
            let live = state.live.remove(&address).ok_or_else(|| foreign(address))?;
            state.counters.freed(live.placed.bytes, live.placed.asked);
            let mut all = live.work;
            all.extend(work);
            let first = all.first().and_then(Work::stream);
            let only = first.filter(|_| all.iter().all(|work| work.stream() == first));
            (live.piece, all, only.and_then(|stream| state.streams.get(&stream).copied()))
        };
        if let Some(stream) = in_order {
            match self.give_back(piece, stream) {
                // It is captured: its work so far is waited for instead.
                Err(Error::Capturing { .. }) => {}
                other => return other,
            }
        }
        if in_order.is_none() && work.iter().all(Work::is_done) {
            return self.give_back(piece, self.order);
        }
        self.state().pending.push(Pending { piece, work });
        Ok(())
    }

    /// Hands a piece to the driver, for reuse behind the work of a stream.
    fn give_back(&self, piece: Piece, stream: RawStream) -> Result<()> {
        // SAFETY: `pool_free` asks for memory of `pool_alloc`, once: the table had it and it was taken out; for a live
        // stream: our own, or one that `know_stream` has its caller's word for; and that other work on the memory has
        // finished: all of it was asked, or is that stream's.
        let freed = unsafe { self.gpu.backend().pool_free(stream, piece.base) };
        match &freed {
            Ok(()) => self.forgo(piece.len),
            Err(Error::Capturing { .. }) => {}
            // What failed is leaked and stays counted.
            Err(_) => self.state().counters.leaked += piece.len,
        }
        freed
    }

    /// Hands what is no longer worked on to the driver; asks about `most` pieces.
    fn settle(&self, most: usize) {
        let mut asked = {
            let mut state = self.state();
            if state.pending.is_empty() {
                return;
            }
            let most = most.min(state.pending.len());
            let rest = state.pending.split_off(most);
            mem::replace(&mut state.pending, rest)
        };
        // With no lock held: what stands for work is the caller's.
        asked.retain(|pending| {
            let is_done = pending.work.iter().all(Work::is_done);
            if is_done && let Err(error) = self.give_back(pending.piece, self.order) {
                tracing::warn!(allocator = self.name, %error, "memory of a pool is leaked");
            }
            !is_done
        });
        self.state().pending.append(&mut asked);
    }

    fn out_of_memory(&self, asked: u64, hint: &str) -> Error {
        Error::OutOfMemory { device: self.gpu.device(), asked, free: 0, hint: hint.into() }
    }

    /// Adds what the pool holds to an error.
    #[cold]
    fn explain(&self, error: Error) -> Error {
        let Error::OutOfMemory { device, asked, free, hint } = error else { return error };
        let usage = self.usage().unwrap_or_default();
        let in_use = self.state().counters.in_use;
        let PoolUsage { reserved, used, .. } = usage;
        let hint = format!("{hint}; {}: in use {in_use}, reserved {reserved}, of which {used} are out", self.name);
        Error::OutOfMemory { device, asked, free, hint }
    }
}

/// Returns the bytes to ask the driver for, with room to align.
fn len_for(request: &Request) -> Option<u64> {
    let slack = if request.align > GRANULE { request.align } else { 0 };
    let len = request.bytes.checked_next_multiple_of(GRANULE)?.checked_add(slack)?;
    // The kernel half of the address space is nobody's.
    (len <= i64::MAX.cast_unsigned()).then_some(len)
}

impl Trim for Core {
    fn trim(&self) -> Result<u64> {
        self.check()?;
        self.settle(usize::MAX);
        let backend = self.gpu.backend();
        let before = self.usage()?.reserved;
        // SAFETY: `synchronize_stream` asks for a live stream: our own, until the drop.
        unsafe { backend.synchronize_stream(self.order) }?;
        // SAFETY: `trim_pool` asks for a live pool: it is destroyed by the drop alone.
        unsafe { backend.trim_pool(self.pool, 0) }?;
        Ok(before.saturating_sub(self.usage()?.reserved))
    }
}

// SAFETY: `Allocator` asks that what is handed out does not overlap: each is an allocation of the driver's of its own,
// which goes back once. `memory` reaches it: it copies on the device that the pool lies on.
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
        let live = state.live.get_mut(&address).ok_or_else(|| foreign(address))?;
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
        let usage = self.core.check().and_then(|()| self.core.usage()).unwrap_or_default();
        let mut counters = self.core.state().counters;
        (counters.reserved, counters.peak_reserved) = (usage.reserved, usage.most_reserved);
        counters.stats(self.core.budget.as_ref().map_or(u64::MAX, |budget| budget.limit()), 0)
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
        Ok(Arc::<DeviceBytes>::clone(self.core.bytes.get_or_init(|| bytes)))
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
            tracing::warn!(allocator = name, in_use, "dropped while memory of it is in use");
        }
        if is_busy {
            // The work may end long after this, and a drop must not wait for it.
            let late = self.core.clone();
            let spawned = thread::Builder::new().name("gpu-ipc-late".into()).spawn(move || late.finish());
            if let Err(error) = spawned {
                tracing::warn!(allocator = name, %error, "memory is leaked: no thread waits for its work");
            }
        }
    }
}

impl Core {
    /// Stays until the work on what was given back has finished.
    fn finish(&self) {
        let mut nap = LATE_NAPS.0;
        while self.check().is_ok() && !self.state().pending.is_empty() {
            thread::sleep(nap);
            nap = (2 * nap).min(LATE_NAPS.1);
            self.settle(usize::MAX);
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if self.check().is_err() {
            return;
        }
        let backend = self.gpu.backend();
        // SAFETY: `destroy_pool` asks for a live pool: this is its owner's drop. Memory of it that is in use stays.
        if let Err(error) = unsafe { backend.destroy_pool(self.pool) } {
            tracing::warn!(allocator = self.name, %error, "a pool is leaked");
        }
        // SAFETY: `destroy_stream` asks for a live stream that nobody uses afterwards: likewise.
        if let Err(error) = unsafe { backend.destroy_stream(self.order) } {
            tracing::warn!(allocator = self.name, %error, "a stream is leaked");
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

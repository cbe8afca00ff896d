//! Memory that belongs to a graph: what is freed under capture is used again within the graph, and
//! by nobody else.
//!
//! A graph has the addresses that its kernels were captured with, and touches them at every launch.
//! So what was handed out during its capture stays the graph's until that is gone, freed or not.
//! Within the capture a free means: from here on in the stream's order. Another allocation of the
//! same stream may have the bytes then, at every launch anew. PyTorch's private pools
//! (`torch.cuda.graph_pool_handle`) do the same.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use gpu_api::lock::Acquire;
use gpu_api::{Error, Result, StreamIdentity};

use crate::bfc::Counters;
use crate::request::foreign;
use crate::{
    Allocator, AllocatorStats, Bfc, BfcOptions, Extent, Growth, Memory, Placed, Request,
    SubAllocator, Work,
};

/// What a heap of a pool takes at a time, when there is room for it.
const GROWTH: Growth = Growth::Fixed(2 << 20);

/// An allocator for what is captured into a graph, over the one that the program uses otherwise.
///
/// Each stream of the capture has a heap of its own, since nothing but its order keeps two users of
/// the same bytes apart. [`Request::on`] names the stream. Memory that another stream touches as
/// well is told so ([`record_stream`](GraphPool::record_stream)); freed, it is nobody's until the
/// graph is gone. The same holds for memory of a request without a stream.
///
/// Several captures may share a pool if their graphs are launched in the order in which they were
/// captured, on one stream at a time.
///
/// # Dropping
///
/// Says that the graph is gone and has no launch under way, as [`release`](GraphPool::release)
/// without work. Memory that is still in use then is leaked.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use allocators::{Allocator, Bfc, BfcOptions, GraphPool, Request, Simulated};
/// use gpu_api::StreamIdentity;
///
/// let bfc = Arc::new(Bfc::new(BfcOptions::new("bfc"), Simulated::new()));
/// let pool = GraphPool::new("graph", bfc.clone());
/// let stream = StreamIdentity(7);
/// // While the stream is being captured:
/// let first = pool.alloc(Request::new(1 << 20).on(stream))?;
/// pool.free(first.address)?;
/// let second = pool.alloc(Request::new(1 << 20).on(stream))?;
/// assert_eq!(first.address, second.address);
/// pool.free(second.address)?;
/// // The graph keeps the bytes until it is gone.
/// assert_eq!(bfc.stats().bytes_in_use, 2 << 20);
/// pool.release(vec![])?;
/// assert_eq!(bfc.stats().bytes_in_use, 0);
/// # Ok::<(), gpu_api::Error>(())
/// ```
pub struct GraphPool {
    name: String,
    lease: Arc<Lease>,
    state: Mutex<StreamHeaps>,
}

/// The allocator beneath, and whether the graph still needs what was taken from it.
#[derive(Debug)]
struct Lease {
    inner: Arc<dyn Allocator>,
    is_over: AtomicBool,
    /// The launches that may still be under way when it is over.
    after: Mutex<Vec<Work>>,
}

impl Lease {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }
}

/// One stream's part of it.
#[derive(Debug)]
struct Leased(Arc<Lease>);

type Heap = Bfc<Leased>;

#[derive(Default)]
struct StreamHeaps {
    heaps: HashMap<Option<StreamIdentity>, Arc<Heap>>,
    /// What is handed out, and the stream whose heap it lies in.
    live: BTreeMap<u64, (Placed, Option<StreamIdentity>)>,
    counters: Counters,
    number: u64,
}

// SAFETY: `SubAllocator` asks that extents overlap nothing that is not yet freed: each is an
// allocation of the allocator beneath, which promises that, and goes back once. `memory` is its
// memory.
unsafe impl SubAllocator for Leased {
    type Token = ();

    fn alloc(&self, len: u64, align: u64) -> Result<(Extent, ())> {
        // Of no stream: the graph may be launched on another one than that whose order a pending
        // piece is in.
        let placed = self
            .0
            .inner
            .alloc(Request::new(len).align(align).tag("graph"))?;
        Ok((
            Extent {
                base: placed.address,
                len: placed.bytes,
            },
            (),
        ))
    }

    fn free(&self, extent: Extent, (): ()) -> Result<()> {
        let after = self.0.after.acquire().clone();
        self.0.inner.free_after(extent.base, after)
    }

    fn may_free(&self, (): &()) -> bool {
        self.0.is_over()
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        self.0.inner.memory()
    }

    fn check_owner(&self) -> Result<()> {
        self.0.inner.check_owner()
    }
}

impl GraphPool {
    /// Takes memory for a graph from this allocator.
    pub fn new(name: impl Into<String>, inner: Arc<dyn Allocator>) -> GraphPool {
        let lease = Arc::new(Lease {
            inner,
            is_over: AtomicBool::new(false),
            after: Mutex::default(),
        });
        GraphPool {
            name: name.into(),
            lease,
            state: Mutex::default(),
        }
    }

    /// Notes that a further stream of the capture touches an allocation: once freed, its bytes are
    /// nobody's until the graph is gone. Under capture no event can say when that stream is through
    /// with it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an address that is not handed out.
    pub fn record_stream(&self, address: u64, stream: StreamIdentity) -> Result<()> {
        self.record(address, Some(stream), || true)
    }

    /// Says that the graph is gone, or that its capture was aborted: what is free goes back to the
    /// allocator beneath, once this work is done, which is that of launches still under way; and so
    /// does the rest when it is freed. Says how many bytes went back at once.
    ///
    /// # Errors
    ///
    /// What the allocator beneath gives, such as [`Error::Unsupported`] of one that cannot keep
    /// memory until work is done. What it did not take is leaked.
    pub fn release(&self, after: Vec<Work>) -> Result<u64> {
        self.lease.inner.check_owner()?;
        if !self.lease.is_over() {
            *self.lease.after.acquire() = after;
            self.lease.is_over.store(true, Ordering::Release);
        }
        self.trim()
    }

    /// Returns the heap of a stream; makes it if need be.
    fn heap(&self, stream: Option<StreamIdentity>) -> Arc<Heap> {
        let made = || {
            let name = match stream {
                Some(stream) => format!("{} of stream {}", self.name, stream.0),
                None => self.name.clone(),
            };
            // Idle regions are the graph's.
            let options = BfcOptions::new(name).growth(GROWTH).collect_regions(false);
            Arc::new(Bfc::new(options, Leased(self.lease.clone())))
        };
        self.state
            .acquire()
            .heaps
            .entry(stream)
            .or_insert_with(made)
            .clone()
    }

    fn heaps(&self) -> Vec<Arc<Heap>> {
        self.state.acquire().heaps.values().cloned().collect()
    }

    /// Stands for the graph, and for work that may go on after it.
    fn until_over(&self, work: impl Fn() -> bool + Send + Sync + 'static) -> Work {
        let lease = self.lease.clone();
        Work::alone(move || lease.is_over() && work())
    }

    /// Notes work of a stream other than the allocation's own.
    fn record(
        &self,
        address: u64,
        stream: Option<StreamIdentity>,
        done: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<()> {
        let own = self
            .state
            .acquire()
            .live
            .get(&address)
            .ok_or_else(|| foreign(address))?
            .1;
        if own.is_some() && stream == own {
            return Ok(());
        }
        self.heap(own).record_work(address, self.until_over(done))
    }
}

// SAFETY: `Allocator` asks that what is handed out does not overlap: it lies in heaps over
// allocations of their own. `memory` is that of the allocator beneath.
unsafe impl Allocator for GraphPool {
    fn name(&self) -> &str {
        &self.name
    }

    fn alloc(&self, request: Request) -> Result<Placed> {
        request.check()?;
        if self.lease.is_over() {
            return Err(Error::invalid(
                "a request for memory of a graph",
                format!("made of {}, which was released", self.name),
                "made before the graph is gone",
            ));
        }
        // Its heap has nothing that is pending in the stream's order: frees are of the same order
        // as allocations.
        let placed = self.heap(request.stream).alloc(request.idle())?;
        let mut state = self.state.acquire();
        state.number += 1;
        let placed = Placed {
            number: state.number,
            ..placed
        };
        state.live.insert(placed.address, (placed, request.stream));
        state.counters.allocated(placed.bytes, placed.asked);
        Ok(placed)
    }

    fn free(&self, address: u64) -> Result<()> {
        self.free_after(address, Vec::new())
    }

    /// As [`free`](Allocator::free): work of the allocation's own stream is in its order, and other
    /// work keeps the bytes until the graph is gone as well.
    fn free_after(&self, address: u64, work: Vec<Work>) -> Result<()> {
        self.check_owner()?;
        let (placed, own) = {
            let mut state = self.state.acquire();
            let live = state
                .live
                .remove(&address)
                .ok_or_else(|| foreign(address))?;
            state.counters.freed(live.0.bytes, live.0.asked);
            live
        };
        let heap = self.heap(own);
        let mut others: Vec<Work> = work
            .into_iter()
            .filter(|work| own.is_none() || work.stream() != own)
            .collect();
        if own.is_none() && others.is_empty() {
            others.push(Work::alone(|| true));
        }
        let others = others
            .into_iter()
            .map(|work| self.until_over(move || work.is_done()));
        heap.free_after_all(placed.address, others.collect())?;
        if self.lease.is_over() {
            heap.trim()?;
        }
        Ok(())
    }

    fn record_work(&self, address: u64, work: Work) -> Result<()> {
        let stream = work.stream();
        self.record(address, stream, move || work.is_done())
    }

    fn get(&self, address: u64) -> Option<Placed> {
        self.state.acquire().live.get(&address).map(|live| live.0)
    }

    fn find(&self, address: u64) -> Option<Placed> {
        let state = self.state.acquire();
        let (_, live) = state.live.range(..=address).next_back()?;
        Some(live.0).filter(|placed| placed.covers(address))
    }

    fn stats(&self) -> AllocatorStats {
        let heaps = self.heaps();
        let of =
            |count: fn(AllocatorStats) -> u64| heaps.iter().map(|heap| count(heap.stats())).sum();
        let mut counters = self.state.acquire().counters;
        counters.reserved = of(|stats| stats.bytes_reserved);
        counters.peak_reserved = of(|stats| stats.peak_bytes_reserved);
        counters.stats(
            u64::MAX,
            heaps
                .iter()
                .map(|heap| heap.stats().largest_free_block_bytes)
                .max()
                .unwrap_or(0),
        )
    }

    fn clear_stats(&self) {
        self.heaps().iter().for_each(|heap| heap.clear_stats());
        self.state.acquire().counters.clear();
    }

    /// Gives back what is free, if the graph is gone; before, all of it is the graph's.
    fn trim(&self) -> Result<u64> {
        self.check_owner()?;
        let mut freed = 0;
        let mut failed = Ok(());
        for heap in self.heaps() {
            match heap.trim() {
                Ok(bytes) => freed += bytes,
                Err(error) => failed = failed.and(Err(error)),
            }
        }
        failed.map(|()| freed)
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        self.lease.inner.memory()
    }

    fn check_owner(&self) -> Result<()> {
        self.lease.inner.check_owner()
    }
}

impl Drop for GraphPool {
    fn drop(&mut self) {
        if self.check_owner().is_err() {
            return;
        }
        if let Err(error) = self.release(Vec::new()) {
            tracing::warn!(allocator = self.name, %error, "memory of a graph is leaked");
        }
    }
}

impl fmt::Debug for GraphPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.acquire();
        f.debug_struct("GraphPool")
            .field("name", &self.name)
            .field("heaps", &state.heaps.len())
            .field("in_use", &state.counters.in_use)
            .field("is_over", &self.lease.is_over())
            .finish_non_exhaustive()
    }
}

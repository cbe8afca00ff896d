//! Allocators that ask upstream for every single request.

// Tests: `crates/allocators/tests/suite.rs`.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use gpu_api::lock::Acquire;
use gpu_api::{Error, Gpu, HostMemory, Result};

use crate::allocator::hand_on;
use crate::bfc::Counters;
use crate::request::foreign;
use crate::{
    Allocator, AllocatorStats, Bfc, BfcOptions, Extent, Growth, HostHeap, HostPages, NodePages,
    Placed, RegionVisitor, Request, SubAllocator, Visited,
};

/// An allocator that hands each extent of upstream out as it is.
pub struct Direct<U: SubAllocator> {
    name: String,
    upstream: U,
    state: Mutex<DirectState<U::Token>>,
}

struct DirectState<T> {
    live: HashMap<u64, (Placed, T)>,
    counters: Counters,
    number: u64,
}

impl<U: SubAllocator> Direct<U> {
    /// Hands out what comes from there.
    pub fn new(name: impl Into<String>, upstream: U) -> Direct<U> {
        let state = DirectState {
            live: HashMap::new(),
            counters: Counters::default(),
            number: 0,
        };
        Direct {
            name: name.into(),
            upstream,
            state: Mutex::new(state),
        }
    }

    /// Returns where memory comes from.
    pub fn upstream(&self) -> &U {
        &self.upstream
    }
}

// SAFETY: `Allocator` asks that what is handed out does not overlap: each is an extent of its own,
// which the promises of `SubAllocator` keep apart until it is freed, and each is freed once, when
// it is taken back. `memory` is upstream's.
unsafe impl<U: SubAllocator> Allocator for Direct<U> {
    fn name(&self) -> &str {
        &self.name
    }

    fn alloc(&self, request: Request) -> Result<Placed> {
        request.check()?;
        self.upstream.check_owner()?;
        let (Extent { base, len }, token) = self.upstream.alloc(request.bytes, request.align)?;
        if !base.is_multiple_of(request.align) {
            self.upstream.free(Extent { base, len }, token)?;
            return Err(Error::unsupported(
                "this alignment",
                format!(
                    "upstream gave {base:#x}, which is not a multiple of {}",
                    request.align
                ),
                "put a best-fit allocator over it",
            ));
        }
        let mut state = self.state.acquire();
        state.number += 1;
        let placed = Placed {
            address: base,
            bytes: len,
            asked: request.bytes,
            number: state.number,
            token: (),
        };
        state.live.insert(base, (placed, token));
        state.counters.allocated(len, request.bytes);
        state.counters.grown(len);
        Ok(placed)
    }

    fn free(&self, address: u64) -> Result<()> {
        self.upstream.check_owner()?;
        let (placed, token) = {
            let mut state = self.state.acquire();
            let (placed, token) = state
                .live
                .remove(&address)
                .ok_or_else(|| foreign(address))?;
            state.counters.freed(placed.bytes, placed.asked);
            state.counters.reserved -= placed.bytes;
            (placed, token)
        };
        self.upstream.free(
            Extent {
                base: address,
                len: placed.bytes,
            },
            token,
        )
    }

    fn get(&self, address: u64) -> Option<Placed> {
        self.state
            .acquire()
            .live
            .get(&address)
            .map(|(placed, _)| *placed)
    }

    fn find(&self, address: u64) -> Option<Placed> {
        self.state
            .acquire()
            .live
            .values()
            .map(|(placed, _)| *placed)
            .find(|placed| placed.covers(address))
    }

    fn stats(&self) -> AllocatorStats {
        self.state.acquire().counters.stats(u64::MAX, 0)
    }

    fn clear_stats(&self) {
        self.state.acquire().counters.clear();
    }

    fn trim(&self) -> Result<u64> {
        self.upstream.check_owner()?;
        Ok(0)
    }

    hand_on!(upstream: memory, check_owner);
}

impl<U: SubAllocator> Drop for Direct<U> {
    fn drop(&mut self) {
        if self.upstream.check_owner().is_err() {
            return;
        }
        let in_use = self.state.acquire().counters.in_use;
        if in_use > 0 {
            tracing::warn!(
                allocator = self.name,
                in_use,
                "dropped while memory of it is in use"
            );
        }
    }
}

impl<U: SubAllocator> fmt::Debug for Direct<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Direct")
            .field("name", &self.name)
            .field("upstream", &self.upstream)
            .finish_non_exhaustive()
    }
}

/// Plain host memory, which needs no device: what a [`Pool`](crate::Pool) is put over.
///
/// Without a node each request is one of the program's own allocator, at its price. Memory of a
/// NUMA node is cut from regions of 2 MiB that are bound to it, since the kernel binds pages and
/// not bytes.
///
/// # Examples
///
/// ```
/// use allocators::{Allocator, BasicCpu, Request};
///
/// let cpu = BasicCpu::new(None)?;
/// let placed = cpu.alloc(Request::new(100).align(4096))?;
/// assert_eq!(placed.address % 4096, 0);
/// cpu.free(placed.address)?;
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Debug)]
pub struct BasicCpu(Arc<dyn Allocator>);

impl BasicCpu {
    /// Takes memory of a NUMA node, or of any.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the kernel has no page for the fork guard.
    pub fn new(numa_node: Option<u32>) -> Result<BasicCpu> {
        BasicCpu::visited(numa_node, None)
    }

    /// Takes the same, and tells a visitor, if there is one, of each piece that comes and goes.
    pub(crate) fn visited(
        numa_node: Option<u32>,
        visitor: Option<Arc<dyn RegionVisitor>>,
    ) -> Result<BasicCpu> {
        Ok(BasicCpu(match numa_node {
            None => Arc::new(Direct::new(
                "cpu",
                Visited::maybe(HostHeap::new()?, visitor),
            )),
            Some(node) => {
                let options =
                    BfcOptions::new(format!("cpu of node {node}")).growth(Growth::Fixed(2 << 20));
                Arc::new(Bfc::new(
                    options,
                    Visited::maybe(NodePages::new(node)?, visitor),
                ))
            }
        }))
    }
}

/// Host memory that a device reaches: pinned, an allocation of the driver's for each request.
#[derive(Debug)]
pub struct PinnedHost(Direct<HostPages>);

impl PinnedHost {
    /// Takes memory of a NUMA node, or of any.
    ///
    /// # Errors
    ///
    /// As [`HostPages::new`].
    pub fn new(gpu: Gpu, numa_node: Option<u32>) -> Result<PinnedHost> {
        let name = numa_node.map_or_else(
            || "pinned".to_owned(),
            |node| format!("pinned of node {node}"),
        );
        let pages = HostPages::new(
            gpu,
            HostMemory {
                pinned: true,
                numa_node,
            },
        )?;
        Ok(PinnedHost(Direct::new(name, pages)))
    }

    /// Returns the allocator beneath.
    pub fn direct(&self) -> &Direct<HostPages> {
        &self.0
    }
}

// SAFETY: as the allocator beneath, which does everything.
unsafe impl Allocator for BasicCpu {
    hand_on!(0: name, alloc, free, free_after, record_work, is_wanted, register_keeper);
    hand_on!(0: get, find, stats, clear_stats, trim);
    hand_on!(0: memory, snapshot, check_owner);
}

// SAFETY: as the allocator beneath, which does everything.
unsafe impl Allocator for PinnedHost {
    hand_on!(0: name, alloc, free, get, find, stats, clear_stats, trim, memory, check_owner);
}

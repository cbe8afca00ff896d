//! Plain host memory, with no device in sight: from the system's allocator, or bound to a NUMA
//! node.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gpu_api::{DeviceId, Error, ForkGuard, KernelPages, Result};

use crate::{Extent, HostBytes, Memory, SubAllocator};

/// Zeroed memory of the program's own allocator (`calloc`, `aligned_alloc`).
#[derive(Debug)]
pub struct HostHeap {
    fork: ForkGuard,
}

impl HostHeap {
    /// What every block is aligned to at least: a cache line.
    const ALIGNED: u64 = 64;

    /// Takes memory of the program's own allocator.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the kernel has no page for the fork guard.
    pub fn new() -> Result<HostHeap> {
        Ok(HostHeap {
            fork: ForkGuard::new()?,
        })
    }
}

fn out_of_memory(asked: u64, why: &str) -> Error {
    Error::OutOfMemory {
        device: DeviceId(0),
        asked,
        free: 0,
        hint: format!("host memory: {why}"),
    }
}

// SAFETY: `SubAllocator` asks that extents overlap nothing that is not yet freed, which the
// system's allocator promises, and that `memory` reaches them: they are in this process, and
// initialised.
unsafe impl SubAllocator for HostHeap {
    type Token = Layout;

    fn alloc(&self, len: u64, align: u64) -> Result<(Extent, Layout)> {
        self.check_owner()?;
        let size = usize::try_from(len).ok();
        let align = usize::try_from(align.max(HostHeap::ALIGNED)).ok();
        let layout = size
            .zip(align)
            .and_then(|(size, align)| Layout::from_size_align(size, align).ok());
        let layout = layout.filter(|layout| layout.size() > 0);
        let layout =
            layout.ok_or_else(|| out_of_memory(len, "no block can be that large or so aligned"))?;
        // SAFETY: `alloc_zeroed` asks for a size that is not zero: it was checked just now.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            return Err(out_of_memory(len, "the system has no more"));
        }
        Ok((
            Extent {
                base: start.expose_provenance() as u64,
                len,
            },
            layout,
        ))
    }

    fn free(&self, extent: Extent, layout: Layout) -> Result<()> {
        self.check_owner()?;
        let start = ptr::with_exposed_provenance_mut(extent.base as usize);
        // SAFETY: `dealloc` asks for a block of this layout from `alloc_zeroed` that is not yet
        // freed: `alloc` gave both, and `SubAllocator::free` gets each extent once.
        unsafe { dealloc(start, layout) };
        Ok(())
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        Ok(Arc::new(HostBytes))
    }

    fn check_owner(&self) -> Result<()> {
        self.fork.check("this allocator")
    }
}

/// Zeroed pages of the kernel's, bound to a NUMA node where the kernel can.
#[derive(Debug)]
pub struct NodePages {
    node: u32,
    bound: AtomicBool,
    fork: ForkGuard,
}

impl NodePages {
    /// Takes pages of a node. A kernel that cannot bind, or a sandbox that does not let it, gives
    /// pages all the same.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the kernel has no page for the fork guard.
    pub fn new(node: u32) -> Result<NodePages> {
        Ok(NodePages {
            node,
            bound: AtomicBool::new(true),
            fork: ForkGuard::new()?,
        })
    }

    /// Says whether everything so far lies on the node.
    pub fn is_bound(&self) -> bool {
        self.bound.load(Ordering::Relaxed)
    }

    fn map(&self, len: usize) -> Result<KernelPages> {
        if self.is_bound() {
            match KernelPages::map(len, Some(self.node)) {
                Err(error) => tracing::debug!(node = self.node, %error, "not bound to its node"),
                pages => return pages,
            }
        }
        let pages = KernelPages::map(len, None);
        // Without memory at all nothing is said about binding.
        if pages.is_ok() && self.bound.swap(false, Ordering::Relaxed) {
            tracing::warn!(
                node = self.node,
                "host memory is not bound to its NUMA node"
            );
        }
        pages
    }
}

// SAFETY: `SubAllocator` asks that extents overlap nothing that is not yet freed: each is a mapping
// of its own, which its token keeps. `memory` reaches them: they are mapped in this process.
unsafe impl SubAllocator for NodePages {
    type Token = Arc<KernelPages>;

    fn alloc(&self, len: u64, _align: u64) -> Result<(Extent, Arc<KernelPages>)> {
        self.check_owner()?;
        let size = usize::try_from(len)
            .ok()
            .filter(|&size| size <= isize::MAX as usize);
        let size = size.ok_or_else(|| out_of_memory(len, "no mapping can be that large"))?;
        let pages = self
            .map(size)
            .map_err(|error| out_of_memory(len, &error.to_string()))?;
        Ok((
            Extent {
                base: pages.as_ptr().expose_provenance() as u64,
                len,
            },
            Arc::new(pages),
        ))
    }

    fn free(&self, _: Extent, pages: Arc<KernelPages>) -> Result<()> {
        self.check_owner()?;
        drop(pages);
        Ok(())
    }

    fn granularity(&self) -> u64 {
        // A page, of every architecture.
        64 << 10
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        Ok(Arc::new(HostBytes))
    }

    fn check_owner(&self) -> Result<()> {
        self.fork.check("this allocator")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_a_node_that_is_not_there_are_given_all_the_same() {
        let pages = NodePages::new(12_345).expect("pages");
        let (extent, token) = pages.alloc(4096, 1).expect("memory");
        assert!(!pages.is_bound());
        pages.free(extent, token).expect("it is out");
    }

    #[test]
    fn more_than_an_address_space_is_an_error() {
        let heap = HostHeap::new().expect("a heap");
        for (len, align) in [(u64::MAX, 1), (1 << 62, 1), (1, 1 << 63), (0, 1)] {
            assert!(
                matches!(heap.alloc(len, align), Err(Error::OutOfMemory { .. })),
                "{len} at {align}"
            );
        }
    }
}

//! Host memory from a backend: plain or pinned, bound to a NUMA node where the kernel can.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use gpu_api::lock::Acquire;
use gpu_api::{Error, Gpu, HostMemory, HostPtr, Result};

use crate::{Extent, HostBytes, Memory, SubAllocator};

/// Host memory of one kind and one NUMA node.
#[derive(Debug)]
pub struct HostPages {
    gpu: Gpu,
    kind: HostMemory,
    bound: AtomicBool,
    /// Where the allocation of an extent starts, for those that were moved up to be aligned.
    starts: Mutex<HashMap<u64, usize>>,
}

impl HostPages {
    /// What backends align to at least.
    const ALIGNED: u64 = 64;

    /// Takes memory of this kind through a device's backend.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child of the process that found the device.
    pub fn new(gpu: Gpu, kind: HostMemory) -> Result<HostPages> {
        gpu.check_fork()?;
        let bound = AtomicBool::new(kind.numa_node.is_some());
        Ok(HostPages {
            gpu,
            kind,
            bound,
            starts: Mutex::default(),
        })
    }

    /// Returns the kind of memory.
    pub fn kind(&self) -> HostMemory {
        self.kind
    }

    /// Says whether everything so far lies on the node that was asked for. A kernel that cannot
    /// bind, or a sandbox that does not let it, gives memory all the same.
    pub fn is_bound(&self) -> bool {
        self.bound.load(Ordering::Relaxed)
    }

    fn allocate(&self, len: usize) -> Result<HostPtr> {
        let (backend, device) = (self.gpu.backend(), self.gpu.device());
        let mut kind = self.kind;
        if kind.numa_node.is_some() && self.is_bound() {
            match backend.host_alloc(device, len, kind) {
                Err(error @ Error::System { .. }) => {
                    tracing::debug!(?kind, %error, "not bound to its node")
                }
                other => return other,
            }
        }
        kind.numa_node = None;
        let allocated = backend.host_alloc(device, len, kind);
        // Without memory at all nothing is said about binding.
        if allocated.is_ok() && self.bound.swap(false, Ordering::Relaxed) {
            tracing::warn!(node = ?self.kind.numa_node, "host memory is not bound to its NUMA node");
        }
        allocated
    }

    fn out_of_memory(&self, asked: u64) -> Error {
        let hint = "no host allocation can be that large or so aligned, ask for less".into();
        Error::OutOfMemory {
            device: self.gpu.device(),
            asked,
            free: 0,
            hint,
        }
    }
}

// SAFETY: `SubAllocator` asks that extents overlap nothing that is not yet freed: each lies in an
// allocation of its own from `host_alloc`. `memory` reaches them: they are mapped in this process
// until `host_free`.
unsafe impl SubAllocator for HostPages {
    type Token = ();

    fn alloc(&self, len: u64, align: u64) -> Result<(Extent, ())> {
        self.check_owner()?;
        let slack = if align > HostPages::ALIGNED { align } else { 0 };
        let whole = len
            .checked_add(slack)
            .and_then(|whole| usize::try_from(whole).ok());
        // Beyond this no address space goes.
        let whole = whole
            .filter(|&whole| whole <= isize::MAX as usize)
            .ok_or_else(|| self.out_of_memory(len))?;
        let HostPtr(start) = match self.allocate(whole) {
            Err(Error::System { source, .. }) => {
                let hint = format!("the kernel has no such host memory ({source})");
                return Err(Error::OutOfMemory {
                    device: self.gpu.device(),
                    asked: len,
                    free: 0,
                    hint,
                });
            }
            other => other?,
        };
        let base = if slack == 0 {
            start as u64
        } else {
            (start as u64).next_multiple_of(align)
        };
        self.starts.acquire().insert(base, start);
        Ok((Extent { base, len }, ()))
    }

    fn free(&self, extent: Extent, (): ()) -> Result<()> {
        self.check_owner()?;
        let start = self.starts.acquire().remove(&extent.base);
        let start = start
            .ok_or_else(|| Error::invalid("extent", format!("{extent:?}"), "one that is out"))?;
        // SAFETY: `host_free` asks for memory from `host_alloc` that is not yet freed: the table
        // had it, and it was taken out once; and that nothing touches it: the free of the last
        // piece stated so.
        unsafe { self.gpu.backend().host_free(HostPtr(start)) }
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        Ok(Arc::new(HostBytes))
    }

    fn check_owner(&self) -> Result<()> {
        self.gpu.check_fork()
    }
}

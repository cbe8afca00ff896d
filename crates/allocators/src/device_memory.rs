//! Regions from a device's driver, each on its own.

// Tests: `crates/allocators/tests/arena_in_place.rs`, `crates/allocators/tests/bfc_on_memory.rs`.

use std::sync::{Arc, OnceLock, Weak};

use gpu_api::{Allocation, DevicePtr, Error, Gpu, Result, Sharing};

use crate::Export;

use crate::{Budget, DeviceBytes, Extent, Memory, RoomListener, SubAllocator};

/// Memory of a device that no other process ever sees.
#[derive(Debug)]
pub struct DeviceMemory {
    gpu: Gpu,
    sharing: Sharing,
    budget: Option<Arc<Budget>>,
    bytes: OnceLock<Arc<DeviceBytes>>,
}

impl DeviceMemory {
    /// Takes memory of this device, the way that it is shared by default: by file descriptor where
    /// the device can, since freeing such memory waits for no stream. A device that cannot share
    /// has private memory all the same.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child of the process that found the device.
    pub fn new(gpu: Gpu) -> Result<DeviceMemory> {
        gpu.check_fork()?;
        let sharing = gpu.default_sharing().unwrap_or(Sharing::Handle);
        Ok(DeviceMemory {
            gpu,
            sharing,
            budget: None,
            bytes: OnceLock::new(),
        })
    }

    /// Chooses the kind of memory by how it could be shared.
    #[must_use]
    pub fn sharing(mut self, sharing: Sharing) -> DeviceMemory {
        self.sharing = sharing;
        self
    }

    /// Takes no more than a budget allows.
    #[must_use]
    pub fn budget(mut self, budget: Arc<Budget>) -> DeviceMemory {
        self.budget = Some(budget);
        self
    }

    /// Returns the device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(crate) fn allocate(&self, len: u64) -> Result<Allocation> {
        self.check_owner()?;
        let device = self.gpu.device();
        let rounded = len
            .checked_next_multiple_of(self.granularity())
            .unwrap_or(u64::MAX);
        self.afford(rounded, len)?;
        let allocation = match self.gpu.backend().alloc(device, rounded, self.sharing) {
            Ok(allocation) => allocation,
            Err(error) => {
                self.forgo(rounded);
                return Err(error);
            }
        };
        // A driver that rounds up to more than it says is held to the budget all the same.
        let more = allocation.len.saturating_sub(rounded);
        if let Err(error) = self.afford(more, len) {
            self.forgo(rounded);
            // SAFETY: `free` asks for a base from `alloc` that nothing uses: nobody has seen it
            // yet.
            if let Err(error) = unsafe { self.gpu.backend().free(allocation.base) } {
                tracing::warn!(%error, "a region is leaked");
            }
            return Err(error);
        }
        Ok(allocation)
    }

    /// Takes bytes of the budget.
    fn afford(&self, bytes: u64, asked: u64) -> Result<()> {
        self.budget.as_ref().map_or(Ok(()), |budget| {
            budget.take_for(self.gpu.device(), bytes, asked, "")
        })
    }

    pub(crate) fn release(&self, extent: Extent) -> Result<()> {
        self.check_owner()?;
        // SAFETY: `GpuBackend::free` asks for
        // - a base from `alloc`, not yet freed: `SubAllocator::free` gets each extent once, as
        //   `allocate` gave it;
        // - no GPU work that touches it: the free of its last piece stated that its bytes may be
        //   used again;
        // - no process with its handle open: a private extent has none, and `Shareable::may_free`
        //   said so of its own.
        let freed = unsafe { self.gpu.backend().free(DevicePtr(extent.base)) };
        // What failed is leaked and stays counted.
        if freed.is_ok() {
            self.forgo(extent.len);
        }
        freed
    }

    /// Exports what `allocate` gave, the way that it was chosen for.
    pub(crate) fn export(&self, allocation: Allocation) -> Result<Export> {
        let backend = self.gpu.backend();
        match self.sharing {
            Sharing::Handle => backend.export_handle(allocation.base).map(Export::Handle),
            Sharing::Fd => backend.export_fd(allocation.base).map(Export::Fd),
            other => Err(Error::unsupported(
                "an arena of shareable memory",
                format!("it knows no {other:?} regions"),
                "choose `Sharing::Fd` or `Sharing::Handle`",
            )),
        }
    }

    fn forgo(&self, bytes: u64) {
        if let Some(budget) = &self.budget {
            budget.give_back(bytes);
        }
    }
}

// SAFETY: `SubAllocator` asks that extents overlap nothing that is not yet freed, which
// `GpuBackend::alloc` promises, and that `memory` reaches them: it copies on the device that they
// lie on.
unsafe impl SubAllocator for DeviceMemory {
    type Token = ();

    fn alloc(&self, len: u64, _align: u64) -> Result<(Extent, ())> {
        let allocation = self.allocate(len)?;
        Ok((
            Extent {
                base: allocation.base.0,
                len: allocation.len,
            },
            (),
        ))
    }

    fn free(&self, extent: Extent, (): ()) -> Result<()> {
        self.release(extent)
    }

    fn granularity(&self) -> u64 {
        self.gpu.caps().granularity.max(1)
    }

    fn capacity(&self) -> u64 {
        self.gpu.info().total_bytes.min(
            self.budget
                .as_ref()
                .map_or(u64::MAX, |budget| budget.limit()),
        )
    }

    fn subscribe(&self, listener: Weak<dyn RoomListener>) {
        if let Some(budget) = &self.budget {
            budget.subscribe(listener);
        }
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        if let Some(bytes) = self.bytes.get() {
            return Ok(Arc::<DeviceBytes>::clone(bytes));
        }
        let bytes = Arc::new(DeviceBytes::new(self.gpu.clone())?);
        Ok(Arc::<DeviceBytes>::clone(self.bytes.get_or_init(|| bytes)))
    }

    fn check_owner(&self) -> Result<()> {
        self.gpu.check_fork()
    }
}

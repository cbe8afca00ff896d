//! The calls on memory.

use std::os::fd::{BorrowedFd, OwnedFd};

use gpu_ipc::Result;
use gpu_ipc::backend::groups::*;
use gpu_ipc::backend::{
    Access, AddressRange, Allocation, DeviceId, DevicePtr, HostMemory, HostPtr, MemHandle,
    PointerInfo, PoolUsage, RawMemory, RawPool, RawStream, Sharing,
};

use super::{Faulty, Thing};

// SAFETY: `GpuMemory`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuMemory for Faulty<B> {
    fn alloc(&self, device: DeviceId, len: u64, sharing: Sharing) -> Result<Allocation> {
        let mut made = Allocation {
            base: DevicePtr(0),
            len: 0,
        };
        self.gives("alloc", || {
            made = self.backend.alloc(device, len, sharing)?;
            Ok(Thing::Memory(made.base.0))
        })?;
        Ok(made)
    }

    unsafe fn free(&self, base: DevicePtr) -> Result<()> {
        // SAFETY: `free`: the caller's own promise.
        self.takes("free", Thing::Memory(base.0), || unsafe {
            self.backend.free(base)
        })
    }

    unsafe fn close(&self, base: DevicePtr) -> Result<()> {
        // SAFETY: `close`: the caller's own promise.
        self.takes("close", Thing::Mapping(base.0), || unsafe {
            self.backend.close(base)
        })
    }
}

// SAFETY: `GpuPointers`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuPointers for Faulty<B> {
    fn address_range(&self, ptr: DevicePtr) -> Result<AddressRange> {
        self.turn("address_range")?;
        self.backend.address_range(ptr)
    }

    fn classify(&self, ptr: DevicePtr) -> Result<PointerInfo> {
        self.turn("classify")?;
        self.backend.classify(ptr)
    }
}

// SAFETY: `GpuHostMemory`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuHostMemory for Faulty<B> {
    fn host_alloc(&self, device: DeviceId, len: usize, memory: HostMemory) -> Result<HostPtr> {
        let mut made = HostPtr(0);
        self.gives("host_alloc", || {
            made = self.backend.host_alloc(device, len, memory)?;
            Ok(Thing::HostMemory(made.0))
        })?;
        Ok(made)
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: `host_free`: the caller's own promise.
        self.takes("host_free", Thing::HostMemory(ptr.0), || unsafe {
            self.backend.host_free(ptr)
        })
    }
}

// SAFETY: `GpuHandles`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuHandles for Faulty<B> {
    fn is_served(&self, base: DevicePtr) -> Result<bool> {
        self.below().is_served(base)
    }

    fn export_handle(&self, base: DevicePtr) -> Result<MemHandle> {
        self.turn("export_handle")?;
        self.below().export_handle(base)
    }

    fn open_handle(&self, device: DeviceId, handle: &MemHandle) -> Result<DevicePtr> {
        let mut made = DevicePtr(0);
        self.gives("open_handle", || {
            self.pass_gate();
            made = self.below().open_handle(device, handle)?;
            Ok(Thing::Mapping(made.0))
        })?;
        Ok(made)
    }
}

// SAFETY: `GpuDescriptors`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuDescriptors for Faulty<B> {
    fn export_fd(&self, base: DevicePtr) -> Result<OwnedFd> {
        self.turn("export_fd")?;
        self.below().export_fd(base)
    }

    fn import_fd(
        &self,
        device: DeviceId,
        fd: BorrowedFd<'_>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        let mut made = DevicePtr(0);
        self.gives("import_fd", || {
            self.pass_gate();
            made = self.below().import_fd(device, fd, len, access)?;
            Ok(Thing::Mapping(made.0))
        })?;
        Ok(made)
    }

    fn import_fds(
        &self,
        device: DeviceId,
        fds: &mut dyn ExactSizeIterator<Item = Result<OwnedFd>>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        let mut made = DevicePtr(0);
        self.gives("import_fds", || {
            made = self.below().import_fds(device, fds, len, access)?;
            Ok(Thing::Mapping(made.0))
        })?;
        Ok(made)
    }

    fn maps_read_only(&self, device: DeviceId) -> Result<bool> {
        self.below().descriptors_of(device)?.maps_read_only(device)
    }

    fn read_only_fd(&self, device: DeviceId, fd: BorrowedFd<'_>) -> Result<Option<OwnedFd>> {
        self.turn("read_only_fd")?;
        self.below().read_only_fd(device, fd)
    }
}

// SAFETY: `GpuStore`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuStore for Faulty<B> {
    fn create_memory(&self, device: DeviceId, len: u64) -> Result<RawMemory> {
        let mut made = RawMemory {
            device,
            handle: 0,
            len,
        };
        self.gives("create_memory", || {
            made = self.below().create_memory(device, len)?;
            Ok(Thing::Physical(made.handle))
        })?;
        Ok(made)
    }

    unsafe fn export_memory(&self, memory: RawMemory) -> Result<OwnedFd> {
        self.turn("export_memory")?;
        // SAFETY: `export_memory`: the caller's own promise.
        unsafe { self.below().export_memory(memory) }
    }

    fn import_memory(&self, device: DeviceId, fd: BorrowedFd<'_>, len: u64) -> Result<RawMemory> {
        let mut made = RawMemory {
            device,
            handle: 0,
            len,
        };
        self.gives("import_memory", || {
            made = self.below().import_memory(device, fd, len)?;
            Ok(Thing::Physical(made.handle))
        })?;
        Ok(made)
    }

    unsafe fn release_memory(&self, memory: RawMemory) -> Result<()> {
        let thing = Thing::Physical(memory.handle);
        // SAFETY: `release_memory`: the caller's own promise.
        self.takes("release_memory", thing, || unsafe {
            self.below().release_memory(memory)
        })
    }
}

// SAFETY: `GpuRanges`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuRanges for Faulty<B> {
    fn reserve_range(
        &self,
        device: DeviceId,
        len: u64,
        at: Option<DevicePtr>,
    ) -> Result<AddressRange> {
        let mut made = AddressRange {
            base: DevicePtr(0),
            len,
        };
        self.gives("reserve_range", || {
            made = self.below().reserve_range(device, len, at)?;
            Ok(Thing::Range(made.base.0))
        })?;
        Ok(made)
    }

    unsafe fn map_memory(&self, at: DevicePtr, memory: RawMemory, access: Access) -> Result<()> {
        self.gives("map_memory", || {
            // SAFETY: `map_memory`: the caller's own promise.
            unsafe { self.below().map_memory(at, memory, access) }?;
            Ok(Thing::Piece(at.0))
        })
    }

    unsafe fn unmap_memory(&self, at: DevicePtr) -> Result<()> {
        // SAFETY: `unmap_memory`: the caller's own promise.
        self.takes("unmap_memory", Thing::Piece(at.0), || unsafe {
            self.below().unmap_memory(at)
        })
    }

    unsafe fn release_range(&self, range: AddressRange) -> Result<()> {
        let thing = Thing::Range(range.base.0);
        // SAFETY: `release_range`: the caller's own promise.
        self.takes("release_range", thing, || unsafe {
            self.below().release_range(range)
        })
    }
}

// SAFETY: `GpuPools`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuPools for Faulty<B> {
    fn create_pool(&self, device: DeviceId, keep: u64) -> Result<RawPool> {
        let mut made = RawPool { device, handle: 0 };
        self.gives("create_pool", || {
            made = self.below().create_pool(device, keep)?;
            Ok(Thing::Pool(made.handle))
        })?;
        Ok(made)
    }

    unsafe fn destroy_pool(&self, pool: RawPool) -> Result<()> {
        // SAFETY: `destroy_pool`: the caller's own promise.
        self.takes("destroy_pool", Thing::Pool(pool.handle), || unsafe {
            self.below().destroy_pool(pool)
        })
    }

    unsafe fn pool_alloc(&self, pool: RawPool, stream: RawStream, len: u64) -> Result<Allocation> {
        let mut made = Allocation {
            base: DevicePtr(0),
            len,
        };
        self.gives("pool_alloc", || {
            // SAFETY: `pool_alloc`: the caller's own promise.
            made = unsafe { self.below().pool_alloc(pool, stream, len) }?;
            Ok(Thing::Pooled(made.base.0))
        })?;
        Ok(made)
    }

    unsafe fn pool_free(&self, stream: RawStream, base: DevicePtr) -> Result<()> {
        // SAFETY: `pool_free`: the caller's own promise.
        self.takes("pool_free", Thing::Pooled(base.0), || unsafe {
            self.below().pool_free(stream, base)
        })
    }

    unsafe fn pool_usage(&self, pool: RawPool) -> Result<PoolUsage> {
        self.turn("pool_usage")?;
        // SAFETY: `pool_usage`: the caller's own promise.
        unsafe { self.below().pool_usage(pool) }
    }

    unsafe fn trim_pool(&self, pool: RawPool, keep: u64) -> Result<()> {
        self.turn("trim_pool")?;
        // SAFETY: `trim_pool`: the caller's own promise.
        unsafe { self.below().trim_pool(pool, keep) }
    }
}

// SAFETY: `GpuManaged`: the backend below keeps it; a call that fails has done nothing.
unsafe impl<B: GpuBackend> GpuManaged for Faulty<B> {
    fn alloc_managed(&self, device: DeviceId, len: u64) -> Result<Allocation> {
        let mut made = Allocation {
            base: DevicePtr(0),
            len,
        };
        self.gives("alloc_managed", || {
            made = self.below().alloc_managed(device, len)?;
            Ok(Thing::Memory(made.base.0))
        })?;
        Ok(made)
    }
}

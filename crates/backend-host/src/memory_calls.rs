//! The calls on memory: what they give and take is in the backend's tables.

use std::os::fd::{BorrowedFd, OwnedFd};

use gpu_api::groups::*;
use gpu_api::{
    Access, AddressRange, Allocation, DeviceId, DevicePtr, Error, HostMemory, HostPtr, KernelPages,
    MemHandle, MemoryKind, PointerInfo, Result, Sharing,
};

use crate::backend::HostBackend;
use crate::error::{INVALID_VALUE, driver};

// SAFETY: `GpuMemory`: `alloc` maps a fresh memfd each time, at an address where nothing is mapped.
unsafe impl GpuMemory for HostBackend {
    fn alloc(&self, device: DeviceId, len: u64, sharing: Sharing) -> Result<Allocation> {
        self.check_device("alloc", device)?;
        self.tables().memories.alloc(device, len, sharing)
    }

    unsafe fn free(&self, base: DevicePtr) -> Result<()> {
        self.check_device("free", DeviceId(0))?;
        self.block_while_waiting();
        let unmapped = self.tables().memories.free(base)?;
        drop(unmapped);
        Ok(())
    }

    unsafe fn close(&self, base: DevicePtr) -> Result<()> {
        self.check_device("close", DeviceId(0))?;
        self.block_while_waiting();
        let unmapped = self.tables().memories.close(base)?;
        drop(unmapped);
        Ok(())
    }
}

// SAFETY: `GpuPointers`: what is told is in the tables.
unsafe impl GpuPointers for HostBackend {
    fn address_range(&self, ptr: DevicePtr) -> Result<AddressRange> {
        let tables = self.tables();
        tables
            .ranges
            .range(ptr)
            .map_or_else(|| tables.memories.range(ptr), Ok)
    }

    fn classify(&self, ptr: DevicePtr) -> Result<PointerInfo> {
        let tables = self.tables();
        let host = tables.host.iter().find(|(start, pages)| {
            (**start as u64..**start as u64 + pages.len() as u64).contains(&ptr.0)
        });
        if let Some((&start, pages)) = host {
            let range = Some(AddressRange {
                base: DevicePtr(start as u64),
                len: pages.len() as u64,
            });
            return Ok(PointerInfo {
                kind: MemoryKind::Host,
                range,
                device: None,
                sharing: None,
            });
        }
        Ok(tables
            .ranges
            .classify(ptr)
            .unwrap_or_else(|| tables.memories.classify(ptr)))
    }
}

// SAFETY: `GpuHostMemory`: `host_alloc` maps fresh pages each time.
unsafe impl GpuHostMemory for HostBackend {
    fn host_alloc(&self, device: DeviceId, len: usize, memory: HostMemory) -> Result<HostPtr> {
        self.check_device("host_alloc", device)?;
        if len == 0 {
            return Err(Error::invalid(
                "the length of host memory",
                "0",
                "at least 1 byte",
            ));
        }
        let pages = KernelPages::map(len, memory.numa_node)?;
        let start = pages.as_ptr() as usize;
        self.tables().host.insert(start, pages);
        Ok(HostPtr(start))
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        self.block_while_waiting();
        match self.tables().host.remove(&ptr.0) {
            Some(_) => Ok(()),
            None => Err(driver("host_free", DeviceId(0), INVALID_VALUE)),
        }
    }
}

// SAFETY: `GpuHandles`: a handle names its file by inode, which is compared.
unsafe impl GpuHandles for HostBackend {
    fn is_served(&self, _: DevicePtr) -> Result<bool> {
        Ok(true)
    }

    fn export_handle(&self, base: DevicePtr) -> Result<MemHandle> {
        self.tables().memories.export_handle(base)
    }

    fn open_handle(&self, device: DeviceId, handle: &MemHandle) -> Result<DevicePtr> {
        self.check_device("open_handle", device)?;
        self.tables().memories.open(device, handle)
    }
}

// SAFETY: `GpuDescriptors`: a descriptor is the file itself, sealed and long enough.
unsafe impl GpuDescriptors for HostBackend {
    fn export_fd(&self, base: DevicePtr) -> Result<OwnedFd> {
        self.tables().memories.export_fd(base)
    }

    fn import_fd(
        &self,
        device: DeviceId,
        fd: BorrowedFd<'_>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        self.check_device("import_fd", device)?;
        self.tables().memories.import(device, fd, len, access)
    }

    fn import_fds(
        &self,
        device: DeviceId,
        fds: &mut dyn ExactSizeIterator<Item = Result<OwnedFd>>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        self.check_device("import_fds", device)?;
        let files = fds.collect::<Result<_>>()?;
        self.tables()
            .memories
            .import_several(device, files, len, access)
    }

    fn maps_read_only(&self, _: DeviceId) -> Result<bool> {
        Ok(true)
    }

    fn read_only_fd(&self, device: DeviceId, fd: BorrowedFd<'_>) -> Result<Option<OwnedFd>> {
        self.check_device("read_only_fd", device)?;
        crate::memory::reopened_read_only(fd).map(Some)
    }
}

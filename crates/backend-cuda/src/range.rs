//! Memory apart from addresses: physical memory without a context, and ranges that it is mapped on.

use std::os::fd::{BorrowedFd, OwnedFd};

use gpu_api::vendor::memory_table::Way;
use gpu_api::vendor::peer_table::reaching;
use gpu_api::{
    Access, AddressRange, DeviceId, DevicePtr, Error, GpuRanges, GpuStore, RawMemory, Result,
    round_up,
};

use crate::backend::CudaBackend;
use crate::mapping;
use crate::memory::Origin;
use crate::physical::{Physical, wrong_length};

// SAFETY: the condition of `GpuStore`: `cuMemCreate` gives memory that is nobody else's, and the
// driver counts its handles, mappings and descriptors (manual, "Virtual Memory Management").
unsafe impl GpuStore for CudaBackend {
    fn create_memory(&self, device: DeviceId, len: u64) -> Result<RawMemory> {
        let ordinal = self.virtual_memory(device)?;
        let size = round_up(len, self.driver.granularity(device)?)?;
        let scope = self.driver.without_context(device)?;
        let handle = Physical::create(&scope, ordinal, size, len)?.keep();
        Ok(RawMemory {
            device,
            handle,
            len: size as u64,
        })
    }

    unsafe fn export_memory(&self, memory: RawMemory) -> Result<OwnedFd> {
        let scope = self.driver.without_context(memory.device)?;
        // SAFETY: `Physical::again` asks for a live handle: our caller vouches for it. It is not
        // given back here.
        let physical = unsafe { Physical::again(&scope, memory.handle) };
        let exported = physical.export();
        physical.keep();
        exported
    }

    fn import_memory(&self, device: DeviceId, fd: BorrowedFd<'_>, len: u64) -> Result<RawMemory> {
        self.virtual_memory(device)?;
        let size = round_up(len, self.driver.granularity(device)?)?;
        let scope = self.driver.without_context(device)?;
        let handle = Physical::import(&scope, fd, size)?.keep();
        Ok(RawMemory {
            device,
            handle,
            len: size as u64,
        })
    }

    unsafe fn release_memory(&self, memory: RawMemory) -> Result<()> {
        let scope = self.driver.without_context(memory.device)?;
        // SAFETY: `Physical::again` asks for a live handle that is ours to give back: our caller
        // vouches for it.
        unsafe { Physical::again(&scope, memory.handle) }.give_back()
    }
}

// SAFETY: the condition of `GpuRanges`: `cuMemAddressReserve` gives addresses that nothing else
// has, and `cuMemMap` and `cuMemSetAccess` let the device reach the memory there, as the manual
// says.
unsafe impl GpuRanges for CudaBackend {
    fn reserve_range(
        &self,
        device: DeviceId,
        len: u64,
        at: Option<DevicePtr>,
    ) -> Result<AddressRange> {
        self.virtual_memory(device)?;
        let size = round_up(len, self.driver.granularity(device)?)?;
        let scope = self.driver.on_device(device)?;
        let base = DevicePtr(mapping::reserve(&scope, size, at.map_or(0, |at| at.0))?);
        if at.is_some_and(|at| at != base) {
            // SAFETY: `unreserve` asks for a whole reservation without a mapping: just made. An
            // error leaks addresses.
            let _ = unsafe { mapping::unreserve(&scope, base.0, size) };
            let got = format!(
                "{}, where something else lies or no device memory can",
                at.unwrap_or(base)
            );
            return Err(Error::Invalid {
                what: "the wanted address",
                got,
                must: "free in this process",
            });
        }
        Ok(AddressRange {
            base,
            len: size as u64,
        })
    }

    unsafe fn map_memory(&self, at: DevicePtr, memory: RawMemory, access: Access) -> Result<()> {
        let RawMemory {
            device,
            handle,
            len,
        } = memory;
        let (ordinal, size) = (self.driver.ordinal(device)?, len as usize);
        let scope = self.driver.on_device(device)?;
        // SAFETY: `Physical::again` asks for a live handle: our caller vouches for it. It is not
        // given back here.
        let physical = unsafe { Physical::again(&scope, handle) };
        // As in `alloc_virtual`.
        let peers = self.peers.read();
        // SAFETY: `Physical::map` asks for reserved addresses without a mapping: our caller vouches
        // for them.
        let mapped = unsafe { physical.map(at.0, size) };
        physical.keep();
        mapped.map_err(|error| wrong_length(error, len))?;
        if let Err(error) = mapping::open(
            &scope,
            (at.0, size),
            ordinal,
            access,
            &reaching(&peers, device),
        ) {
            // SAFETY: `unmap` asks for a whole mapping that nothing uses: just made. An error leaks
            // it.
            let _ = unsafe { mapping::unmap(&scope, at.0, size) };
            return Err(error);
        }
        self.memory
            .insert(at.0, len, device, Origin::Piece { access });
        Ok(())
    }

    unsafe fn unmap_memory(&self, at: DevicePtr) -> Result<()> {
        let entry = self.memory.take(at, Way::Unmap)?;
        let unmapped = self.driver.on_device(entry.device).and_then(|scope| {
            // As in `unmap_virtual`.
            let _peers = self.peers.read();
            // SAFETY: `unmap` asks for a whole mapping that nothing uses: it was taken out of the
            // table once, and our caller vouches for the rest.
            unsafe { mapping::unmap(&scope, at.0, entry.len as usize) }
        });
        if unmapped.is_err() {
            self.memory.leak(at, entry);
        }
        unmapped
    }

    unsafe fn release_range(&self, range: AddressRange) -> Result<()> {
        let scope = self.driver.anywhere()?;
        // SAFETY: `unreserve` asks for a whole reservation without a mapping: our caller vouches
        // for it.
        unsafe { mapping::unreserve(&scope, range.base.0, range.len as usize) }
    }
}

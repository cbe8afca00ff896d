//! Memory apart from addresses: physical memory without a context, and ranges that it is mapped on.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::memory_table::Way;
use crate::peer_table::reaching;
use gpu_api::{
    Access, AddressRange, DeviceId, DevicePtr, Error, GpuDevices, GpuRanges, GpuStore, RawMemory,
    Result, round_up,
};

use crate::backend::Backend;
use crate::mapping;
use crate::memory_table::Origin;
use crate::physical::{Physical, wrong_length};
use crate::vendor::Vendor;

// SAFETY: the condition of `GpuStore`: `memory_create` gives memory that is nobody else's, and the
// driver counts its handles, mappings and descriptors (manual, "Virtual Memory Management").
unsafe impl<V: Vendor> GpuStore for Backend<V> {
    fn create_memory(&self, device: DeviceId, len: u64) -> Result<RawMemory> {
        self.require_ranges(device)?;
        let ordinal = self.ordinal(device)?;
        let size = round_up(len, self.granularity(device)?)?;
        let scope = self.without_context(device)?;
        let handle = Physical::create(&scope, ordinal, size, len)?.keep();
        Ok(RawMemory {
            device,
            handle,
            len: size as u64,
        })
    }

    unsafe fn export_memory(&self, memory: RawMemory) -> Result<OwnedFd> {
        let scope = self.without_context(memory.device)?;
        // SAFETY: `Physical::lent` asks for a live handle: our caller vouches for it.
        unsafe { Physical::lent(&scope, memory.handle) }.export()
    }

    fn import_memory(&self, device: DeviceId, fd: BorrowedFd<'_>, len: u64) -> Result<RawMemory> {
        self.require_ranges(device)?;
        let size = round_up(len, self.granularity(device)?)?;
        let scope = self.without_context(device)?;
        let handle = Physical::import(&scope, fd, None, size)?.keep();
        Ok(RawMemory {
            device,
            handle,
            len: size as u64,
        })
    }

    unsafe fn release_memory(&self, memory: RawMemory) -> Result<()> {
        let scope = self.without_context(memory.device)?;
        // SAFETY: `Physical::again` asks for a live handle that is ours to give back: our caller
        // vouches for it.
        unsafe { Physical::again(&scope, memory.handle) }.give_back()
    }
}

// SAFETY: the condition of `GpuRanges`: `range_reserve` gives addresses that nothing else
// has, and `range_map` and `range_access` let the device reach the memory there, as the manual
// says.
unsafe impl<V: Vendor> GpuRanges for Backend<V> {
    fn reserve_range(
        &self,
        device: DeviceId,
        len: u64,
        at: Option<DevicePtr>,
    ) -> Result<AddressRange> {
        self.require_ranges(device)?;
        let size = round_up(len, self.granularity(device)?)?;
        let scope = self.on_device(device)?;
        let base = DevicePtr(mapping::reserve(&scope, size, at.map_or(0, |at| at.0))?);
        if at.is_some_and(|at| at != base) {
            // SAFETY: `unreserve` asks for a whole reservation without a mapping: just made. An
            // error leaks addresses.
            let _ = unsafe { mapping::unreserve(&scope, base.0, size) };
            let got = format!(
                "{}, where something else lies or no device memory can",
                at.unwrap_or(base)
            );
            return Err(Error::invalid(
                "the wanted address",
                got,
                "free in this process",
            ));
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
        let (ordinal, size) = (self.ordinal(device)?, len as usize);
        let scope = self.on_device(device)?;
        // SAFETY: `Physical::lent` asks for a live handle: our caller vouches for it.
        let physical = unsafe { Physical::lent(&scope, handle) };
        // As in `alloc_virtual`.
        let peers = self.driver().peers.read();
        // SAFETY: `Physical::map` asks for reserved addresses without a mapping: our caller vouches
        // for them.
        let mapped = unsafe { physical.map(at.0, size) };
        mapped.map_err(|error| wrong_length(&scope, error, len))?;
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
        self.driver()
            .memory
            .insert(at.0, len, device, Origin::Piece { access });
        Ok(())
    }

    unsafe fn unmap_memory(&self, at: DevicePtr) -> Result<()> {
        let entry = self.take(at, Way::Unmap)?;
        let unmapped = self.on_device(entry.device).and_then(|scope| {
            // As in `unmap_virtual`.
            let _peers = self.driver().peers.read();
            // SAFETY: `unmap` asks for a whole mapping that nothing uses: it was taken out of the
            // table once, and our caller vouches for the rest.
            unsafe { mapping::unmap(&scope, at.0, entry.len as usize) }
        });
        if unmapped.is_err() {
            self.driver().memory.leak(at, entry);
        }
        unmapped
    }

    unsafe fn release_range(&self, range: AddressRange) -> Result<()> {
        let scope = self.anywhere()?;
        // SAFETY: `unreserve` asks for a whole reservation without a mapping: our caller vouches
        // for it.
        unsafe { mapping::unreserve(&scope, range.base.0, range.len as usize) }
    }
}

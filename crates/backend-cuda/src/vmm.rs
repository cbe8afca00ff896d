//! Memory by the virtual memory management calls: physical memory that is exported as a file descriptor.
//!
//! An allocation is four things of the driver's: a handle of the physical memory, a range of addresses, the mapping
//! of one on the other, and the right of a device to reach it. The handle is given back as soon as the mapping
//! stands, because the mapping keeps the memory and the handle can be had again from the address.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use gpu_api::{Access, Allocation, DeviceId, DevicePtr, Error, Result};

use crate::backend::CudaBackend;
use crate::call::Scope;
use crate::error::{INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, OPERATING_SYSTEM, SUCCESS, UNKNOWN};
use crate::memory::{Entry, Origin};
use crate::peer::Reach;
use crate::sys::{
    ACCESS_READ, ACCESS_READ_WRITE, ALLOCATION_PINNED, AccessDescription, AllocationProperties, CUdevice,
    HANDLE_POSIX_FD, LOCATION_DEVICE, Location, MemoryHandle,
};

/// Describes physical memory on a device that can be exported as a file descriptor.
pub(crate) fn properties(ordinal: CUdevice) -> AllocationProperties {
    AllocationProperties {
        kind: ALLOCATION_PINNED,
        handle_types: HANDLE_POSIX_FD,
        location: Location { kind: LOCATION_DEVICE, id: ordinal },
        win32: ptr::null_mut(),
        flags: [0; 8],
    }
}

/// What was built so far; dropped, it is taken down again in reverse.
struct Building<'a, 'd> {
    scope: &'a Scope<'d>,
    handle: Option<MemoryHandle>,
    reserved: Option<(u64, usize)>,
    mapped: bool,
}

impl CudaBackend {
    /// Allocates virtual memory.
    pub(crate) fn alloc_virtual(&self, device: DeviceId, len: u64) -> Result<Allocation> {
        let ordinal = self.virtual_memory(device)?;
        let size = round_up(len, self.driver.granularity(device)?)?;
        let scope = self.driver.on_device(device)?;
        let properties = properties(ordinal);
        let create = &self.driver.symbols.cuMemCreate;
        let mut handle: MemoryHandle = 0;
        let code = scope.code(create, |function| {
            // SAFETY: `cuMemCreate` writes one handle and reads the properties: both live here. Its flags are 0.
            unsafe { function(&raw mut handle, size, &raw const properties, 0) }
        })?;
        if code != SUCCESS {
            return Err(scope.allocation_error(create.name, code, len));
        }
        let building = Building { scope: &scope, handle: Some(handle), reserved: None, mapped: false };
        // Held until the entry is in the table, so that a device that is given access meanwhile misses none.
        let peers = self.peers();
        let base = building.finish(size, ordinal, Access::ReadWrite, &reaching(&peers, device))?;
        self.memory.insert(base, Entry { len: size as u64, device, origin: Origin::Virtual, leaked: false });
        Ok(Allocation { base: DevicePtr(base), len: size as u64 })
    }

    /// Maps another process' virtual memory.
    pub(crate) fn import_virtual(
        &self,
        device: DeviceId,
        fd: BorrowedFd<'_>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        let ordinal = self.virtual_memory(device)?;
        let size = round_up(len, self.driver.granularity(device)?)?;
        let scope = self.driver.on_device(device)?;
        let symbols = &self.driver.symbols;
        let mut handle: MemoryHandle = 0;
        let code = scope.code(&symbols.cuMemImportFromShareableHandle, |function| {
            let number = ptr::without_provenance_mut(fd.as_raw_fd() as usize);
            // SAFETY: `cuMemImportFromShareableHandle` writes one handle: `handle` is one. For this type the second
            // argument is a descriptor's number in place of an address; it is open for the call and stays ours.
            unsafe { function(&raw mut handle, number, HANDLE_POSIX_FD) }
        })?;
        match code {
            SUCCESS => {}
            INVALID_VALUE | OPERATING_SYSTEM | INVALID_HANDLE | NOT_FOUND | UNKNOWN => {
                return Err(bad_descriptor(format!("one that the driver refuses with {}", symbols.error(code))));
            }
            _ => return Err(scope.allocation_error(symbols.cuMemImportFromShareableHandle.name, code, len)),
        }
        let building = Building { scope: &scope, handle: Some(handle), reserved: None, mapped: false };
        let mut properties = properties(ordinal);
        scope.call(&symbols.cuMemGetAllocationPropertiesFromHandle, |function| {
            // SAFETY: `cuMemGetAllocationPropertiesFromHandle` writes the properties, which live here, of a handle
            // that is alive: it was imported above.
            unsafe { function(&raw mut properties, handle) }
        })?;
        if properties.location.kind != LOCATION_DEVICE {
            return Err(bad_descriptor(format!("one of memory of kind {}", properties.location.kind)));
        }
        // As in `alloc_virtual`.
        let peers = self.peers();
        let base = building.finish(size, ordinal, access, &reaching(&peers, device)).map_err(|error| match error {
            // A mapping is of the whole memory: driver 580 gives 801 to a shorter and to a longer one.
            Error::Driver { call: "cuMemMap", source, .. } if matches!(source.code, INVALID_VALUE | NOT_SUPPORTED) => {
                bad_descriptor(format!("one of another length than {size} bytes"))
            }
            error => error,
        })?;
        self.memory
            .insert(base, Entry { len: size as u64, device, origin: Origin::Imported { access }, leaked: false });
        Ok(DevicePtr(base))
    }

    /// Exports the memory that starts at `base`.
    pub(crate) fn export_virtual(&self, base: DevicePtr) -> Result<OwnedFd> {
        let scope = self.driver.anywhere()?;
        let symbols = &self.driver.symbols;
        let mut handle: MemoryHandle = 0;
        let code = scope.code(&symbols.cuMemRetainAllocationHandle, |function| {
            // SAFETY: `cuMemRetainAllocationHandle` writes one handle: `handle` is one. The address is looked up, not
            // followed.
            unsafe { function(&raw mut handle, ptr::with_exposed_provenance_mut(base.0 as usize)) }
        })?;
        if code != SUCCESS {
            return Err(self.refusal(base, "a file descriptor of this memory"));
        }
        // Gives the handle back, whatever becomes of the export.
        let building = Building { scope: &scope, handle: Some(handle), reserved: None, mapped: false };
        let mut fd: i32 = -1;
        let code = scope.code(&symbols.cuMemExportToShareableHandle, |function| {
            // SAFETY: `cuMemExportToShareableHandle` writes one descriptor: `fd` has its size. The handle is alive.
            unsafe { function((&raw mut fd).cast(), handle, HANDLE_POSIX_FD, 0) }
        })?;
        drop(building);
        match code {
            SUCCESS if fd >= 0 => {
                // SAFETY: `OwnedFd::from_raw_fd` asks for an open descriptor that nobody else closes: the driver made
                // it for us.
                Ok(unsafe { OwnedFd::from_raw_fd(fd) })
            }
            // Memory that was made without that kind of export.
            INVALID_VALUE | NOT_SUPPORTED => Err(self.refusal(base, "a file descriptor of this memory")),
            code => Err(scope.error(symbols.cuMemExportToShareableHandle.name, code)),
        }
    }

    /// Unmaps virtual memory, own or imported, and gives its addresses back.
    ///
    /// # Safety
    ///
    /// `base` and `entry` came out of the table, and no unfinished GPU work touches them.
    pub(crate) unsafe fn unmap_virtual(&self, base: DevicePtr, entry: &Entry) -> Result<()> {
        let scope = self.driver.on_device(entry.device)?;
        let symbols = &self.driver.symbols;
        scope.call(&symbols.cuMemUnmap, |function| {
            // SAFETY: `cuMemUnmap` asks for a whole mapping that nothing uses: the entry is one, taken out of the
            // table once, and our caller vouches for the rest.
            unsafe { function(base.0, entry.len as usize) }
        })?;
        scope.call(&symbols.cuMemAddressFree, |function| {
            // SAFETY: `cuMemAddressFree` asks for a whole reservation without a mapping: it was unmapped above.
            unsafe { function(base.0, entry.len as usize) }
        })
    }

    /// Gives a device access to virtual memory of another.
    pub(crate) fn grant_virtual(
        &self,
        scope: &Scope<'_>,
        device: CUdevice,
        (base, len, access): (u64, u64, Access),
    ) -> Result<()> {
        set_access(scope, base, len as usize, &[description(device, access)])
    }

    fn virtual_memory(&self, device: DeviceId) -> Result<CUdevice> {
        let ordinal = self.driver.ordinal(device)?;
        if self.driver.has_virtual_memory(ordinal) {
            return Ok(ordinal);
        }
        Err(Error::Unsupported {
            what: "memory that is shared by file descriptor",
            why: format!("{device} has no virtual memory management, or does not export it"),
            remedy: "share by handle (`Sharing::Handle`)",
        })
    }
}

impl Building<'_, '_> {
    /// Reserves, maps, gives access, and gives the handle back.
    fn finish(mut self, size: usize, ordinal: CUdevice, access: Access, reaching: &[CUdevice]) -> Result<u64> {
        let symbols = &self.scope.driver.symbols;
        let handle = self.handle.expect("a building begins with a handle");
        let mut base = 0;
        let code = self.scope.code(&symbols.cuMemAddressReserve, |function| {
            // SAFETY: `cuMemAddressReserve` writes one address: `base` is one. The size is a multiple of the
            // granularity; alignment, hint and flags are 0.
            unsafe { function(&raw mut base, size, 0, 0, 0) }
        })?;
        if code != SUCCESS {
            return Err(self.scope.allocation_error(symbols.cuMemAddressReserve.name, code, size as u64));
        }
        self.reserved = Some((base, size));
        self.scope.call(&symbols.cuMemMap, |function| {
            // SAFETY: `cuMemMap` asks for a reservation without a mapping and for a handle that is alive: both were
            // made above. Offset and flags are 0; a size beyond the memory is refused.
            unsafe { function(base, size, 0, handle, 0) }
        })?;
        self.mapped = true;
        let mut descriptions = vec![description(ordinal, access)];
        descriptions.extend(reaching.iter().map(|&device| description(device, access)));
        set_access(self.scope, base, size, &descriptions)?;
        self.handle = None;
        self.scope.call(&symbols.cuMemRelease, |function| {
            // SAFETY: `cuMemRelease` asks for a handle that is alive; it is given back here or in `drop`, not both.
            unsafe { function(handle) }
        })?;
        self.mapped = false;
        self.reserved = None;
        Ok(base)
    }
}

impl Drop for Building<'_, '_> {
    fn drop(&mut self) {
        // What cannot be taken down stays, and so does what it rests on: a leak, and the error that led here is on
        // its way to the caller.
        let symbols = &self.scope.driver.symbols;
        if let Some((base, size)) = self.reserved.take() {
            let unmapped = !self.mapped
                || self
                    .scope
                    .call(&symbols.cuMemUnmap, |function| {
                        // SAFETY: `cuMemUnmap` asks for a whole mapping that nothing uses: nobody has seen its address.
                        unsafe { function(base, size) }
                    })
                    .is_ok();
            if unmapped {
                let _ = self.scope.call(&symbols.cuMemAddressFree, |function| {
                    // SAFETY: `cuMemAddressFree` asks for a whole reservation without a mapping: see above.
                    unsafe { function(base, size) }
                });
            }
        }
        if let Some(handle) = self.handle.take() {
            let _ = self.scope.call(&symbols.cuMemRelease, |function| {
                // SAFETY: `cuMemRelease` asks for a handle that is alive: `finish` did not give it back.
                unsafe { function(handle) }
            });
        }
    }
}

/// Lists the devices that were given a way to the memory of `device`.
fn reaching(peers: &[Reach], device: DeviceId) -> Vec<CUdevice> {
    peers.iter().filter(|(_, peer)| *peer == device).map(|(reaching, _)| *reaching).collect()
}

fn description(ordinal: CUdevice, access: Access) -> AccessDescription {
    let flags = match access {
        Access::ReadWrite => ACCESS_READ_WRITE,
        Access::ReadOnly => ACCESS_READ,
    };
    AccessDescription { location: Location { kind: LOCATION_DEVICE, id: ordinal }, flags }
}

fn set_access(scope: &Scope<'_>, base: u64, size: usize, descriptions: &[AccessDescription]) -> Result<()> {
    scope.call(&scope.driver.symbols.cuMemSetAccess, |function| {
        // SAFETY: `cuMemSetAccess` reads as many descriptions as it is told: the slice's. An address range without a
        // mapping is refused.
        unsafe { function(base, size, descriptions.as_ptr(), descriptions.len()) }
    })
}

fn bad_descriptor(got: String) -> Error {
    Error::Invalid { what: "the file descriptor", got, must: "one of device memory of exactly the length asked for" }
}

/// Rounds a length up to what the driver allocates.
pub(crate) fn round_up(len: u64, granularity: u64) -> Result<usize> {
    let invalid = || Error::Invalid {
        what: "the length",
        got: len.to_string(),
        must: "at least 1, and within the address space",
    };
    if len == 0 {
        return Err(invalid());
    }
    let rounded = len.checked_next_multiple_of(granularity).ok_or_else(invalid)?;
    // The kernel half of the address space is nobody's: the driver need not be asked.
    usize::try_from(rounded).ok().filter(|&size| size <= isize::MAX as usize).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_rounded_up_and_never_wraps() {
        assert_eq!(round_up(1, 4096).ok(), Some(4096));
        assert_eq!(round_up(4096, 4096).ok(), Some(4096));
        assert_eq!(round_up(4097, 4096).ok(), Some(8192));
        assert!(round_up(0, 4096).is_err());
        assert!(round_up(u64::MAX, 4096).is_err());
        assert!(round_up(1 << 63, 4096).is_err());
    }
}

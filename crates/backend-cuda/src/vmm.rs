//! Memory by the virtual memory management calls: physical memory that is exported as a file descriptor.
//!
//! An allocation is four things of the driver's: a handle of the physical memory, a range of addresses, the mapping
//! of one on the other, and the right of a device to reach it. The handle is given back as soon as the mapping
//! stands, because the mapping keeps the memory and the handle can be had again from the address.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::{iter, mem, ptr};

use gpu_api::{Access, Allocation, DeviceId, DevicePtr, Error, GpuDescriptors, Result, close_on_exec, round_up};

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

/// A handle of physical memory; dropped, it is given back. A mapping keeps the memory.
pub(crate) struct Physical<'a, 'd> {
    scope: &'a Scope<'d>,
    handle: MemoryHandle,
}

/// Addresses with physical memory mapped on them, piece by piece; dropped, all of it is taken down again in reverse.
struct Building<'a, 'd> {
    scope: &'a Scope<'d>,
    base: u64,
    size: usize,
    piece: usize,
    /// Bytes from the base that are mapped.
    mapped: usize,
}

// SAFETY: the condition of `GpuDescriptors`: a mapping is of the whole memory behind a descriptor; the driver
// refuses another length.
unsafe impl GpuDescriptors for CudaBackend {
    fn export_fd(&self, base: DevicePtr) -> Result<OwnedFd> {
        const WHAT: &str = "a file descriptor of this memory";
        self.exportable(base, WHAT)?;
        let scope = self.driver.anywhere()?;
        let symbols = &self.driver.symbols;
        let mut handle: MemoryHandle = 0;
        let code = scope.code(&symbols.cuMemRetainAllocationHandle, |function| {
            // SAFETY: `cuMemRetainAllocationHandle` writes one handle: `handle` is one. The address is looked up, not
            // followed.
            unsafe { function(&raw mut handle, ptr::with_exposed_provenance_mut(base.0 as usize)) }
        })?;
        if code != SUCCESS {
            return Err(self.refusal(base, WHAT));
        }
        let physical = Physical { scope: &scope, handle };
        physical.export().map_err(|error| match error {
            // Memory that was made without that kind of export.
            Error::Driver { source, .. } if matches!(source.code, INVALID_VALUE | NOT_SUPPORTED) => {
                self.refusal(base, WHAT)
            }
            error => error,
        })
    }

    fn import_fd(&self, device: DeviceId, fd: BorrowedFd<'_>, len: u64, access: Access) -> Result<DevicePtr> {
        let size = round_up(len, self.driver.granularity(device)?)?;
        self.import_pieces(device, iter::once(Ok(fd)), size, access)
    }

    fn import_fds(
        &self,
        device: DeviceId,
        fds: &mut dyn ExactSizeIterator<Item = Result<OwnedFd>>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        let piece = round_up(len, self.driver.granularity(device)?)?;
        if piece as u64 != len {
            let must = "a multiple of the device's granularity";
            return Err(Error::Invalid { what: "the length of a piece", got: len.to_string(), must });
        }
        self.import_pieces(device, fds, piece, access)
    }
}

impl CudaBackend {
    /// Allocates virtual memory.
    pub(crate) fn alloc_virtual(&self, device: DeviceId, len: u64) -> Result<Allocation> {
        let ordinal = self.virtual_memory(device)?;
        let size = round_up(len, self.driver.granularity(device)?)?;
        let scope = self.driver.on_device(device)?;
        let physical = Physical::create(&scope, ordinal, size, len)?;
        // Held until the entry is in the table, so that a device that is given access meanwhile misses none.
        let peers = self.peers();
        let mut building = Building::reserve(&scope, size, size)?;
        building.map(&physical)?;
        building.open(ordinal, Access::ReadWrite, &reaching(&peers, device))?;
        physical.give_back()?;
        let base = building.keep();
        self.memory.insert(base, Entry { len: size as u64, device, origin: Origin::Virtual, leaked: false });
        Ok(Allocation { base: DevicePtr(base), len: size as u64 })
    }

    fn import_pieces<F: AsFd>(
        &self,
        device: DeviceId,
        fds: impl ExactSizeIterator<Item = Result<F>>,
        piece: usize,
        access: Access,
    ) -> Result<DevicePtr> {
        let ordinal = self.virtual_memory(device)?;
        let count = fds.len();
        let size = piece.checked_mul(count).filter(|&size| (1..=isize::MAX as usize).contains(&size));
        let size = size.ok_or_else(|| Error::Invalid {
            what: "memory to import",
            got: format!("{count} pieces of {piece} bytes"),
            must: "at least 1, and within the address space",
        })?;
        let scope = self.driver.on_device(device)?;
        // Given back when access is given, as those that are allocated are.
        let mut all = Vec::new();
        // As in `alloc_virtual`.
        let peers = self.peers();
        let mut building = Building::reserve(&scope, size, piece)?;
        for fd in fds.take(count) {
            let physical = self.import_physical(&scope, fd?.as_fd(), piece)?;
            building.map(&physical).map_err(|error| wrong_length(error, piece as u64))?;
            all.push(physical);
        }
        building.open(ordinal, access, &reaching(&peers, device))?;
        all.into_iter().try_for_each(Physical::give_back)?;
        let base = building.keep();
        let origin = Origin::Imported { access, piece: piece as u64 };
        self.memory.insert(base, Entry { len: size as u64, device, origin, leaked: false });
        Ok(DevicePtr(base))
    }

    /// Takes the physical memory behind a descriptor, if it is a device's.
    pub(crate) fn import_physical<'a, 'd>(
        &self,
        scope: &'a Scope<'d>,
        fd: BorrowedFd<'_>,
        size: usize,
    ) -> Result<Physical<'a, 'd>> {
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
            _ => return Err(scope.allocation_error(symbols.cuMemImportFromShareableHandle.name, code, size as u64)),
        }
        let physical = Physical { scope, handle };
        let mut properties = properties(0);
        scope.call(&symbols.cuMemGetAllocationPropertiesFromHandle, |function| {
            // SAFETY: `cuMemGetAllocationPropertiesFromHandle` writes the properties, which live here, of a handle
            // that is alive: it was imported above.
            unsafe { function(&raw mut properties, physical.handle) }
        })?;
        if properties.location.kind != LOCATION_DEVICE {
            return Err(bad_descriptor(format!("one of memory of kind {}", properties.location.kind)));
        }
        Ok(physical)
    }

    /// Unmaps virtual memory, own or imported, and gives its addresses back.
    ///
    /// # Safety
    ///
    /// `base` and `entry` came out of the table, and no unfinished GPU work touches them.
    pub(crate) unsafe fn unmap_virtual(&self, base: DevicePtr, entry: &Entry) -> Result<()> {
        let scope = self.driver.on_device(entry.device)?;
        let piece = match entry.origin {
            Origin::Imported { piece, .. } => piece,
            _ => entry.len,
        };
        // A device that is given access meanwhile has seen the entry in the table: it must find the mapping too.
        let _peers = self.peers();
        for at in (base.0..base.0 + entry.len).step_by(piece as usize) {
            // SAFETY: `unmap` asks for a whole mapping that nothing uses: the entry is made of such, taken out of the
            // table once, and our caller vouches for the rest.
            unsafe { unmap(&scope, at, piece as usize) }?;
        }
        // SAFETY: `unreserve` asks for a whole reservation without a mapping: all were unmapped above.
        unsafe { unreserve(&scope, base.0, entry.len as usize) }
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

    /// Returns the driver's number of a device that has virtual memory.
    pub(crate) fn virtual_memory(&self, device: DeviceId) -> Result<CUdevice> {
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

impl<'a, 'd> Physical<'a, 'd> {
    /// Makes physical memory; `asked` is for the error.
    pub(crate) fn create(scope: &'a Scope<'d>, ordinal: CUdevice, size: usize, asked: u64) -> Result<Self> {
        let properties = properties(ordinal);
        let create = &scope.driver.symbols.cuMemCreate;
        let mut handle: MemoryHandle = 0;
        let code = scope.code(create, |function| {
            // SAFETY: `cuMemCreate` writes one handle and reads the properties: both live here. Its flags are 0.
            unsafe { function(&raw mut handle, size, &raw const properties, 0) }
        })?;
        match code {
            SUCCESS => Ok(Physical { scope, handle }),
            code => Err(scope.allocation_error(create.name, code, asked)),
        }
    }

    /// Takes a handle that `keep` gave.
    ///
    /// # Safety
    ///
    /// It is alive, and the caller's to give back.
    pub(crate) unsafe fn again(scope: &'a Scope<'d>, handle: MemoryHandle) -> Self {
        Physical { scope, handle }
    }

    /// Gives the handle to the caller.
    pub(crate) fn keep(self) -> MemoryHandle {
        let handle = self.handle;
        mem::forget(self);
        handle
    }

    /// Exports the memory as a descriptor that is closed on exec.
    pub(crate) fn export(&self) -> Result<OwnedFd> {
        let symbol = &self.scope.driver.symbols.cuMemExportToShareableHandle;
        let mut fd: i32 = -1;
        let code = self.scope.code(symbol, |function| {
            // SAFETY: `cuMemExportToShareableHandle` writes one descriptor: `fd` has its size. The handle is alive.
            unsafe { function((&raw mut fd).cast(), self.handle, HANDLE_POSIX_FD, 0) }
        })?;
        match code {
            SUCCESS if fd >= 0 => {
                // SAFETY: `OwnedFd::from_raw_fd` asks for an open descriptor that nobody else closes: the driver made
                // it for us.
                close_on_exec(unsafe { OwnedFd::from_raw_fd(fd) })
            }
            SUCCESS => Err(self.scope.error(symbol.name, UNKNOWN)),
            code => Err(self.scope.error(symbol.name, code)),
        }
    }

    /// Maps all of it on reserved addresses.
    ///
    /// # Safety
    ///
    /// The addresses are reserved, and nothing is mapped on them.
    pub(crate) unsafe fn map(&self, at: u64, size: usize) -> Result<()> {
        self.scope.call(&self.scope.driver.symbols.cuMemMap, |function| {
            // SAFETY: `cuMemMap` asks for reserved addresses without a mapping, which our caller vouches for, and for a
            // handle that is alive. Offset and flags are 0; a size other than the memory's is refused.
            unsafe { function(at, size, 0, self.handle, 0) }
        })
    }

    /// Gives the handle back; a call that fails leaves it, for nobody knows what became of it.
    pub(crate) fn give_back(self) -> Result<()> {
        let released = self.release();
        mem::forget(self);
        released
    }

    fn release(&self) -> Result<()> {
        self.scope.call(&self.scope.driver.symbols.cuMemRelease, |function| {
            // SAFETY: `cuMemRelease` asks for a handle that is alive; it is given back by `give_back` or by `drop`, not
            // both.
            unsafe { function(self.handle) }
        })
    }
}

impl Drop for Physical<'_, '_> {
    fn drop(&mut self) {
        // What cannot be given back is leaked; the error that led here, or a success, is on its way to the caller.
        let _ = self.release();
    }
}

impl<'a, 'd> Building<'a, 'd> {
    /// Reserves addresses for pieces that fill them.
    fn reserve(scope: &'a Scope<'d>, size: usize, piece: usize) -> Result<Self> {
        let base = reserve(scope, size, 0)?;
        Ok(Building { scope, base, size, piece, mapped: 0 })
    }

    /// Maps the next piece.
    fn map(&mut self, physical: &Physical<'_, '_>) -> Result<()> {
        debug_assert!(self.mapped + self.piece <= self.size, "more pieces than addresses");
        // SAFETY: `Physical::map` asks for reserved addresses without a mapping: those behind what is mapped.
        unsafe { physical.map(self.base + self.mapped as u64, self.piece) }?;
        self.mapped += self.piece;
        Ok(())
    }

    /// Lets devices reach what is mapped, which is all of it.
    fn open(&self, ordinal: CUdevice, access: Access, reaching: &[CUdevice]) -> Result<()> {
        if self.mapped != self.size {
            let got = format!("{} bytes of {}", self.mapped, self.size);
            return Err(Error::Invalid { what: "memory to import", got, must: "as many pieces as were announced" });
        }
        open(self.scope, (self.base, self.size), ordinal, access, reaching)
    }

    /// Gives the mapping to the caller.
    fn keep(self) -> u64 {
        let base = self.base;
        mem::forget(self);
        base
    }
}

impl Drop for Building<'_, '_> {
    fn drop(&mut self) {
        // What cannot be taken down stays, and so does what it rests on: a leak, and the error that led here is on
        // its way to the caller.
        while self.mapped > 0 {
            self.mapped -= self.piece;
            // SAFETY: `unmap` asks for a whole mapping that nothing uses: nobody has seen its address.
            if unsafe { unmap(self.scope, self.base + self.mapped as u64, self.piece) }.is_err() {
                return;
            }
        }
        // SAFETY: `unreserve` asks for a whole reservation without a mapping: all were unmapped above.
        let _ = unsafe { unreserve(self.scope, self.base, self.size) };
    }
}

/// Reserves addresses, at `hint` if the driver likes.
pub(crate) fn reserve(scope: &Scope<'_>, size: usize, hint: u64) -> Result<u64> {
    let symbol = &scope.driver.symbols.cuMemAddressReserve;
    let mut base = 0;
    let code = scope.code(symbol, |function| {
        // SAFETY: `cuMemAddressReserve` writes one address: `base` is one. The size is a multiple of the granularity;
        // alignment and flags are 0, and the hint is looked at alone.
        unsafe { function(&raw mut base, size, 0, hint, 0) }
    })?;
    match code {
        SUCCESS => Ok(base),
        code => Err(scope.allocation_error(symbol.name, code, size as u64)),
    }
}

/// Gives reserved addresses back.
///
/// # Safety
///
/// They are a whole reservation without a mapping.
pub(crate) unsafe fn unreserve(scope: &Scope<'_>, base: u64, size: usize) -> Result<()> {
    scope.call(&scope.driver.symbols.cuMemAddressFree, |function| {
        // SAFETY: `cuMemAddressFree` asks for a whole reservation without a mapping: our caller vouches for it.
        unsafe { function(base, size) }
    })
}

/// Takes a mapping down.
///
/// # Safety
///
/// It is a whole mapping that nothing uses.
pub(crate) unsafe fn unmap(scope: &Scope<'_>, base: u64, size: usize) -> Result<()> {
    scope.call(&scope.driver.symbols.cuMemUnmap, |function| {
        // SAFETY: `cuMemUnmap` asks for a whole mapping that nothing uses: our caller vouches for it.
        unsafe { function(base, size) }
    })
}

/// Lets a device, and those that were given a way to its memory, reach a mapping.
pub(crate) fn open(
    scope: &Scope<'_>,
    (base, size): (u64, usize),
    ordinal: CUdevice,
    access: Access,
    reaching: &[CUdevice],
) -> Result<()> {
    let mut descriptions = vec![description(ordinal, access)];
    descriptions.extend(reaching.iter().map(|&device| description(device, access)));
    set_access(scope, base, size, &descriptions)
}

/// Says it of the descriptor where the driver refuses to map memory: a mapping is of the whole, and driver 580 gives
/// 801 to a shorter one and to a longer one.
pub(crate) fn wrong_length(error: Error, len: u64) -> Error {
    match error {
        Error::Driver { call: "cuMemMap", source, .. } if matches!(source.code, INVALID_VALUE | NOT_SUPPORTED) => {
            bad_descriptor(format!("one of another length than {len} bytes"))
        }
        error => error,
    }
}

/// Lists the devices that were given a way to the memory of `device`.
pub(crate) fn reaching(peers: &[Reach], device: DeviceId) -> Vec<CUdevice> {
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

//! Memory by the virtual memory management calls: physical memory that is exported as a file
//! descriptor.
//!
//! An allocation is four things of the driver's: a handle of the physical memory, a range of
//! addresses, the mapping of one on the other, and the right of a device to reach it. The handle is
//! given back as soon as the mapping stands, because the mapping keeps the memory and the handle
//! can be had again from the address.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::{iter, ptr};

use gpu_api::vendor::peer_table::reaching;
use gpu_api::{Access, Allocation, DeviceId, DevicePtr, Error, GpuDescriptors, Result, round_up};

use crate::backend::CudaBackend;
use crate::error::{INVALID_VALUE, NOT_SUPPORTED, SUCCESS};
use crate::mapping::{Building, unmap, unreserve};
use crate::memory::{Entry, Origin};
use crate::physical::{Physical, wrong_length};
use crate::sys::{CUdevice, MemoryHandle};

// SAFETY: the condition of `GpuDescriptors`: a mapping is of the whole memory behind a descriptor;
// the driver refuses another length.
unsafe impl GpuDescriptors for CudaBackend {
    fn export_fd(&self, base: DevicePtr) -> Result<OwnedFd> {
        const WHAT: &str = "a file descriptor of this memory";
        self.exportable(base, WHAT)?;
        let scope = self.driver.anywhere()?;
        let symbols = &self.driver.symbols;
        let mut handle: MemoryHandle = 0;
        let code = scope.code(&symbols.cuMemRetainAllocationHandle, |function| {
            // SAFETY: `cuMemRetainAllocationHandle` writes one handle: `handle` is one. The address
            // is looked up, not followed.
            unsafe {
                function(
                    &raw mut handle,
                    ptr::with_exposed_provenance_mut(base.0 as usize),
                )
            }
        })?;
        if code != SUCCESS {
            return Err(self.refusal(base, WHAT));
        }
        // SAFETY: `Physical::again` asks for a live handle that is ours to give back: it was
        // retained above.
        let physical = unsafe { Physical::again(&scope, handle) };
        physical.export().map_err(|error| match error {
            // Memory that was made without that kind of export.
            Error::Driver { source, .. }
                if matches!(source.code, INVALID_VALUE | NOT_SUPPORTED) =>
            {
                self.refusal(base, WHAT)
            }
            error => error,
        })
    }

    fn import_fd(
        &self,
        device: DeviceId,
        fd: BorrowedFd<'_>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
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
            return Err(Error::Invalid {
                what: "the length of a piece",
                got: len.to_string(),
                must,
            });
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
        // Held until the entry is in the table, so that a device that is given access meanwhile
        // misses none.
        let peers = self.peers.read();
        let mut building = Building::reserve(&scope, size, size)?;
        building.map(&physical)?;
        building.open(ordinal, Access::ReadWrite, &reaching(&peers, device))?;
        physical.give_back()?;
        let base = building.keep();
        self.memory
            .insert(base, size as u64, device, Origin::Virtual);
        Ok(Allocation {
            base: DevicePtr(base),
            len: size as u64,
        })
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
        let size = piece
            .checked_mul(count)
            .filter(|&size| (1..=isize::MAX as usize).contains(&size));
        let size = size.ok_or_else(|| Error::Invalid {
            what: "memory to import",
            got: format!("{count} pieces of {piece} bytes"),
            must: "at least 1, and within the address space",
        })?;
        let scope = self.driver.on_device(device)?;
        // Given back when access is given, as those that are allocated are.
        let mut all = Vec::new();
        // As in `alloc_virtual`.
        let peers = self.peers.read();
        let mut building = Building::reserve(&scope, size, piece)?;
        for fd in fds.take(count) {
            let physical = Physical::import(&scope, fd?.as_fd(), piece)?;
            building
                .map(&physical)
                .map_err(|error| wrong_length(error, piece as u64))?;
            all.push(physical);
        }
        building.open(ordinal, access, &reaching(&peers, device))?;
        all.into_iter().try_for_each(Physical::give_back)?;
        let base = building.keep();
        let origin = Origin::Imported {
            access,
            piece: piece as u64,
        };
        self.memory.insert(base, size as u64, device, origin);
        Ok(DevicePtr(base))
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
        // A device that is given access meanwhile has seen the entry in the table: it must find the
        // mapping too.
        let _peers = self.peers.read();
        for at in (base.0..base.0 + entry.len).step_by(piece as usize) {
            // SAFETY: `unmap` asks for a whole mapping that nothing uses: the entry is made of
            // such, taken out of the table once, and our caller vouches for the rest.
            unsafe { unmap(&scope, at, piece as usize) }?;
        }
        // SAFETY: `unreserve` asks for a whole reservation without a mapping: all were unmapped
        // above.
        unsafe { unreserve(&scope, base.0, entry.len as usize) }
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

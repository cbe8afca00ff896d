//! Memory by the virtual memory management calls: physical memory that is exported as a file
//! descriptor.
//!
//! An allocation is four things of the driver's: a handle of the physical memory, a range of
//! addresses, the mapping of one on the other, and the right of a device to reach it. Where the
//! mapping keeps the memory and the handle can be had again from the address, the handle is given
//! back as soon as the mapping stands; else ([`Quirks::keeps_handles`](crate::vendor::Quirks)) it is
//! kept until the mapping goes.

use std::iter;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use gpu_api::lock::Acquire;
use gpu_api::{
    Access, Allocation, DeviceId, DevicePtr, Error, GpuDescriptors, GpuDevices, Result, round_up,
};

use crate::alloc::DESCRIPTORS;
use crate::backend::Backend;
use crate::calls::MemoryHandle;
use crate::code::{INVALID_VALUE, NOT_SUPPORTED};
use crate::given::Given;
use crate::mapping::{Building, unmap, unreserve};
use crate::memory_table::{Entry, Origin};
use crate::peer::refuse_dma_buf;
use crate::peer_table::reaching;
use crate::physical::{Physical, check_size, wrong_length};
use crate::pointer::{exportable, refusal, retained};
use crate::vendor::{Descriptor, Vendor};

const WHAT: &str = "a file descriptor of this memory";

// SAFETY: the condition of `GpuDescriptors`: a mapping is of the whole memory behind a descriptor,
// of which the driver or `check_size` refuses another length.
unsafe impl<V: Vendor> GpuDescriptors for Backend<V> {
    fn export_fd(&self, base: DevicePtr) -> Result<OwnedFd> {
        let found = self.driver().memory.find(base);
        let live = found.filter(|(range, entry)| range.base == base && !entry.leaked);
        let (device, len) = live.map_or((DeviceId(0), 0), |(_, entry)| (entry.device, entry.len));
        let kept = |origin| match origin {
            Origin::Virtual { handle } => handle,
            _ => None,
        };
        let origin = live.map(|(_, entry)| entry.origin);
        match (origin, origin.and_then(kept), self.dma_buf()) {
            (Some(Origin::DmaBuf), _, Some(calls)) => calls.export(device, base, len),
            (_, Some(handle), _) => self.export_kept(base, device, handle),
            _ if self.quirks().keeps_handles => Err(refusal(&**self, base, WHAT)),
            _ => self.export_retained(base),
        }
    }

    fn import_fd(
        &self,
        device: DeviceId,
        fd: BorrowedFd<'_>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        match (self.descriptor(device)?, self.dma_buf()) {
            (Some(Descriptor::Vmm), _) => {
                let size = round_up(len, self.granularity(device)?)?;
                self.import_pieces(device, iter::once(Ok(fd)), size, access)
            }
            (Some(Descriptor::DmaBuf), Some(_)) => self.import_dma_buf(device, fd, len, access),
            _ => Err(Vendor::unsupported(&**self, DESCRIPTORS, device)),
        }
    }

    fn import_fds(
        &self,
        device: DeviceId,
        fds: &mut dyn ExactSizeIterator<Item = Result<OwnedFd>>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        if self.descriptor(device)? != Some(Descriptor::Vmm) || self.quirks().keeps_handles {
            let what = "one mapping of several allocations";
            return Err(Vendor::unsupported(&**self, what, device));
        }
        let piece = round_up(len, self.granularity(device)?)?;
        if piece as u64 != len {
            let must = "a multiple of the device's granularity";
            return Err(Error::invalid("the length of a piece", len, must));
        }
        self.import_pieces(device, fds, piece, access)
    }

    fn maps_read_only(&self, device: DeviceId) -> Result<bool> {
        Ok(Vendor::maps_read_only(&**self, device))
    }
}

impl<V: Vendor> Backend<V> {
    /// Exports what is mapped at an address, whose handle the driver gives again.
    fn export_retained(&self, base: DevicePtr) -> Result<OwnedFd> {
        exportable(&**self, base, WHAT)?;
        let scope = self.anywhere()?;
        let Some(handle) = retained(&scope, base)? else {
            return Err(refusal(&**self, base, WHAT));
        };
        // SAFETY: `Physical::again` asks for a live handle that is ours to give back: it was
        // retained above.
        let physical = unsafe { Physical::again(&scope, handle) };
        physical.export().map_err(|error| match error {
            // Memory that was made without that kind of export.
            Error::Driver { source, .. }
                if matches!(source.code, INVALID_VALUE | NOT_SUPPORTED) =>
            {
                refusal(&**self, base, WHAT)
            }
            error => error,
        })
    }

    /// Exports memory by the handle that was kept with its mapping.
    fn export_kept(
        &self,
        base: DevicePtr,
        device: DeviceId,
        handle: MemoryHandle,
    ) -> Result<OwnedFd> {
        let scope = self.on_device(device)?;
        // SAFETY: `Physical::lent` asks for a live handle: it is while its memory is in the table.
        let physical = unsafe { Physical::lent(&scope, handle) };
        physical.export().map_err(|error| match error {
            Error::Driver { source, .. } if source.code == NOT_SUPPORTED => {
                refusal(&**self, base, WHAT)
            }
            error => error,
        })
    }

    /// Allocates virtual memory.
    pub(crate) fn alloc_virtual(&self, device: DeviceId, len: u64) -> Result<Allocation> {
        let ordinal = self.ordinal(device)?;
        let size = round_up(len, self.granularity(device)?)?;
        let scope = self.on_device(device)?;
        let physical = Physical::create(&scope, ordinal, size, len)?;
        // Held until the entry is in the table, so that a device that is given access meanwhile
        // misses none.
        let peers = self.driver().peers.read();
        let mut building = Building::reserve(&scope, size, size)?;
        building.map(&physical)?;
        let (base, handle) = building.finish(
            vec![physical],
            ordinal,
            Access::ReadWrite,
            &reaching(&peers, device),
        )?;
        self.driver()
            .memory
            .insert(base, size as u64, device, Origin::Virtual { handle });
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
        let ordinal = self.ordinal(device)?;
        let count = fds.len();
        let size = piece
            .checked_mul(count)
            .filter(|&size| (1..=isize::MAX as usize).contains(&size));
        let size = size.ok_or_else(|| {
            Error::invalid(
                "memory to import",
                format!("{count} pieces of {piece} bytes"),
                "at least 1, and within the address space",
            )
        })?;
        let scope = self.on_device(device)?;
        let (mut all, mut given) = (Vec::new(), None);
        // As in `alloc_virtual`.
        let peers = self.driver().peers.read();
        let mut building = Building::reserve(&scope, size, piece)?;
        for fd in fds.take(count) {
            let fd = fd?;
            if self.quirks().maps_unchecked {
                check_size(fd.as_fd(), piece)?;
            }
            if self.quirks().keeps_descriptors {
                given = Some(Given::new(fd.as_fd())?);
            }
            let physical = Physical::import(&scope, fd.as_fd(), given.as_ref(), piece)?;
            building
                .map(&physical)
                .map_err(|error| wrong_length(&scope, error, piece as u64))?;
            all.push(physical);
        }
        let (base, handle) = building.finish(all, ordinal, access, &reaching(&peers, device))?;
        if let Some(given) = given {
            self.driver().given.acquire().insert(base, given);
        }
        let origin = Origin::Imported {
            handle,
            access,
            piece: piece as u64,
        };
        self.driver()
            .memory
            .insert(base, size as u64, device, origin);
        Ok(DevicePtr(base))
    }

    /// Maps another process' plain memory, for one device.
    fn import_dma_buf(
        &self,
        device: DeviceId,
        fd: BorrowedFd<'_>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        let Some(calls) = self.dma_buf() else {
            return Err(Vendor::unsupported(&**self, DESCRIPTORS, device));
        };
        if access == Access::ReadOnly {
            return Err(Error::unsupported(
                "a read-only mapping",
                "a dma-buf is mapped read-write by this driver",
                "ask for read-write access: `Caps::read_only` says when",
            ));
        }
        let size = round_up(len, self.granularity(device)?)?;
        check_size(fd, size)?;
        // Held until the entry is in the table: `enable_peer` looks for such entries.
        let peers = self.driver().peers.read();
        refuse_dma_buf(&peers, device)?;
        // The driver keeps the number that it is given for as long as the memory is mapped.
        let given = Given::new(fd)?;
        let (base, object) = match calls.import(device, &given, size as u64) {
            Ok(imported) => imported,
            Err(error) => {
                given.give_back();
                return Err(error);
            }
        };
        self.driver().given.acquire().insert(base, given);
        self.driver()
            .memory
            .insert(base, size as u64, device, Origin::External { object });
        Ok(DevicePtr(base))
    }

    /// Unmaps virtual memory, own or imported, and gives its addresses back, and its handle where
    /// that was kept.
    ///
    /// # Safety
    ///
    /// `base` and `entry` came out of the table, and no unfinished GPU work touches them.
    pub(crate) unsafe fn unmap_virtual(&self, base: DevicePtr, entry: &Entry) -> Result<()> {
        let scope = self.on_device(entry.device)?;
        let (piece, handle) = match entry.origin {
            Origin::Imported { piece, handle, .. } => (piece, handle),
            Origin::Virtual { handle } => (entry.len, handle),
            _ => (entry.len, None),
        };
        // A device that is given access meanwhile has seen the entry in the table: it must find the
        // mapping too.
        let _peers = self.driver().peers.read();
        for at in (base.0..base.0 + entry.len).step_by(piece as usize) {
            // SAFETY: `unmap` asks for a whole mapping that nothing uses: the entry is made of
            // such, taken out of the table once, and our caller vouches for the rest.
            unsafe { unmap(&scope, at, piece as usize) }?;
        }
        if let Some(handle) = handle {
            // SAFETY: `Physical::again` asks for a live handle that is ours to give back: the entry
            // had it.
            unsafe { Physical::again(&scope, handle) }.give_back()?;
        }
        // SAFETY: `unreserve` asks for a whole reservation without a mapping: all were unmapped
        // above.
        unsafe { unreserve(&scope, base.0, entry.len as usize) }
    }
}

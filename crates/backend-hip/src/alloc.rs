//! Memory by where it comes from: which way it is made, exported, imported, freed and closed.

use std::os::fd::{BorrowedFd, OwnedFd};

use gpu_api::vendor::memory_table::Way;
use gpu_api::{
    Access, Allocation, DeviceId, DevicePtr, GpuDescriptors, GpuDevices, GpuMemory, Result, Sharing,
};

use crate::backend::HipBackend;
use crate::device::Descriptor;
use crate::memory::Origin;
use crate::vmm;

// SAFETY: the condition of `GpuMemory`: `alloc` hands on what `hipMalloc`, or
// `hipMemAddressReserve` and `hipMemMap`, gave; the runtime gives no address twice.
unsafe impl GpuMemory for HipBackend {
    fn alloc(&self, device: DeviceId, len: u64, sharing: Sharing) -> Result<Allocation> {
        match sharing {
            Sharing::Handle => self.alloc_plain(device, len, Origin::Plain),
            Sharing::Fd => match self.driver.descriptor(device)? {
                Some(Descriptor::Vmm) => self.alloc_virtual(device, len),
                Some(Descriptor::DmaBuf) => self.alloc_plain(device, len, Origin::DmaBuf),
                None => Err(vmm::no_descriptors()),
            },
            _ => Err(self.unsupported("memory that is shared in that way")),
        }
    }

    unsafe fn free(&self, base: DevicePtr) -> Result<()> {
        let entry = self.memory.take(base, Way::Free)?;
        let result = match entry.origin {
            // SAFETY: `unmap_virtual` asks for an entry out of the table that nothing touches: our
            // caller vouches.
            Origin::Virtual { handle } => unsafe { self.unmap_virtual(base, &entry, handle) },
            // SAFETY: `free_plain` asks for a base out of the table that nothing touches: our
            // caller vouches for it.
            _ => unsafe { self.free_plain(base, entry.device) },
        };
        if result.is_err() {
            self.memory.leak(base, entry);
        }
        result
    }

    unsafe fn close(&self, base: DevicePtr) -> Result<()> {
        let entry = self.memory.take(base, Way::Close)?;
        // Before the address can be handed out again; closed once the runtime is through with it.
        let given = match entry.origin {
            Origin::Imported { .. } | Origin::External { .. } => {
                self.memory.take_descriptor(base.0)
            }
            _ => None,
        };
        let result = match entry.origin {
            // SAFETY: `unmap_virtual` asks for an entry out of the table that nothing touches: our
            // caller vouches.
            Origin::Imported { handle, .. } => unsafe { self.unmap_virtual(base, &entry, handle) },
            // SAFETY: `close_dma_buf` asks for an object out of the table that nothing touches: our
            // caller vouches.
            Origin::External { object } => unsafe {
                self.close_dma_buf(base, entry.device, object)
            },
            // SAFETY: `close_plain` asks for a base out of the table that nothing touches: our
            // caller vouches for it.
            _ => unsafe { self.close_plain(base, entry.device) },
        };
        match (&result, given) {
            (Ok(()), Some(given)) => given.give_back(),
            // Nobody knows what the runtime still does with the number.
            (Err(_), Some(given)) => std::mem::forget(given),
            (_, None) => {}
        }
        if result.is_err() {
            self.memory.leak(base, entry);
        }
        result
    }
}

// SAFETY: the condition of `GpuDescriptors`: descriptors are made and mapped only in a way that a
// probe saw to hold.
unsafe impl GpuDescriptors for HipBackend {
    fn export_fd(&self, base: DevicePtr) -> Result<OwnedFd> {
        let found = self
            .memory
            .find(base)
            .filter(|(range, entry)| range.base == base && !entry.leaked);
        match found.map(|(_, entry)| (entry, entry.origin)) {
            Some((entry, Origin::Virtual { handle })) => self.export_virtual(base, &entry, handle),
            Some((entry, Origin::DmaBuf)) => self.export_dma_buf(base, &entry),
            _ => Err(self.refusal(base, "a file descriptor of this memory")),
        }
    }

    fn import_fd(
        &self,
        device: DeviceId,
        fd: BorrowedFd<'_>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        match self.driver.descriptor(device)? {
            Some(Descriptor::Vmm) => self.import_virtual(device, fd, len, access),
            Some(Descriptor::DmaBuf) => self.import_dma_buf(device, fd, len, access),
            None => Err(vmm::no_descriptors()),
        }
    }
}

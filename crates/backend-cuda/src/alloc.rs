//! Memory by where it comes from: which way it is made, freed and closed.

use gpu_api::vendor::memory_table::Way;
use gpu_api::{Allocation, DeviceId, DevicePtr, GpuDevices, GpuMemory, Result, Sharing};

use crate::backend::CudaBackend;
use crate::memory::Origin;

// SAFETY: the condition of `GpuMemory`: `alloc` hands on what `cuMemAlloc`, or
// `cuMemAddressReserve` and `cuMemMap`, gave; the driver gives no address twice.
unsafe impl GpuMemory for CudaBackend {
    fn alloc(&self, device: DeviceId, len: u64, sharing: Sharing) -> Result<Allocation> {
        match sharing {
            Sharing::Handle => self.alloc_plain(device, len),
            Sharing::Fd => self.alloc_virtual(device, len),
            _ => Err(self.unsupported("memory that is shared in that way")),
        }
    }

    unsafe fn free(&self, base: DevicePtr) -> Result<()> {
        let entry = self.memory.take(base, Way::Free)?;
        let result = match entry.origin {
            // SAFETY: `free_plain` asks for a base out of the table that nothing touches: our
            // caller vouches for it.
            Origin::Plain | Origin::Managed => unsafe { self.free_plain(base, entry.device) },
            // SAFETY: `unmap_virtual` asks for an entry out of the table that nothing touches: our
            // caller vouches.
            _ => unsafe { self.unmap_virtual(base, &entry) },
        };
        if result.is_err() {
            self.memory.leak(base, entry);
        }
        result
    }

    unsafe fn close(&self, base: DevicePtr) -> Result<()> {
        let entry = self.memory.take(base, Way::Close)?;
        let result = match entry.origin {
            // SAFETY: `close_plain` asks for a base out of the table that nothing touches: our
            // caller vouches for it.
            Origin::Opened { .. } => unsafe { self.close_plain(base, entry.device) },
            // SAFETY: `unmap_virtual` asks for an entry out of the table that nothing touches: our
            // caller vouches.
            _ => unsafe { self.unmap_virtual(base, &entry) },
        };
        if result.is_err() {
            self.memory.leak(base, entry);
        }
        result
    }
}

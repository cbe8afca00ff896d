//! Memory by where it comes from: which way it is made, freed and closed.

use gpu_api::lock::Acquire;
use gpu_api::{Allocation, DeviceId, DevicePtr, GpuMemory, Result, Sharing};

use crate::backend::Backend;
use crate::memory_table::{Origin, Way};
use crate::vendor::{Descriptor, Vendor};

/// What is said of a device whose memory is not shared by file descriptor.
pub(crate) const DESCRIPTORS: &str = "memory that is shared by file descriptor";

// SAFETY: the condition of `GpuMemory`: `alloc` hands on what `malloc`, or `range_reserve` and
// `range_map`, gave; the driver gives no address twice.
unsafe impl<V: Vendor> GpuMemory for Backend<V> {
    fn alloc(&self, device: DeviceId, len: u64, sharing: Sharing) -> Result<Allocation> {
        match sharing {
            Sharing::Handle => self.alloc_plain(device, len, Origin::Plain),
            Sharing::Fd => match self.descriptor(device)? {
                Some(Descriptor::Vmm) => self.alloc_virtual(device, len),
                Some(Descriptor::DmaBuf) => self.alloc_plain(device, len, Origin::DmaBuf),
                None => Err(Vendor::unsupported(&**self, DESCRIPTORS, device)),
            },
            _ => Err(Vendor::unsupported(
                &**self,
                "memory that is shared in that way",
                device,
            )),
        }
    }

    unsafe fn free(&self, base: DevicePtr) -> Result<()> {
        let entry = self.take(base, Way::Free)?;
        let result = match entry.origin {
            // SAFETY: `unmap_virtual` asks for an entry out of the table that nothing touches: our
            // caller vouches.
            Origin::Virtual { .. } => unsafe { self.unmap_virtual(base, &entry) },
            // SAFETY: `free_plain` asks for a base out of the table that nothing touches: our
            // caller vouches for it.
            _ => unsafe { self.free_plain(base, entry.device) },
        };
        if result.is_err() {
            self.driver().memory.leak(base, entry);
        }
        result
    }

    unsafe fn close(&self, base: DevicePtr) -> Result<()> {
        let entry = self.take(base, Way::Close)?;
        // Before the address can be handed out again; closed once the driver is through with it.
        let given = match entry.origin {
            Origin::Imported { .. } | Origin::External { .. } => {
                self.driver().given.acquire().remove(&base.0)
            }
            _ => None,
        };
        let result = match (entry.origin, self.dma_buf()) {
            // SAFETY: `unmap_virtual` asks for an entry out of the table that nothing touches: our
            // caller vouches.
            (Origin::Imported { .. }, _) => unsafe { self.unmap_virtual(base, &entry) },
            (Origin::External { object }, Some(calls)) => {
                self.pass_known_streams();
                // SAFETY: `DmaBuf::close` asks for what `import` gave, out of the table, that
                // nothing touches: our caller vouches.
                unsafe { calls.close(entry.device, base, object) }
            }
            // SAFETY: `close_plain` asks for a base out of the table that nothing touches: our
            // caller vouches for it.
            _ => unsafe { self.close_plain(base, entry.device) },
        };
        match (&result, given) {
            (Ok(()), Some(given)) => given.give_back(),
            // What the driver still does with the number is unknown.
            (Err(_), Some(given)) => std::mem::forget(given),
            (_, None) => {}
        }
        if result.is_err() {
            self.driver().memory.leak(base, entry);
        }
        result
    }
}

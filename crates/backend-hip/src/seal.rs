//! A number in each region and in its handle, by which an importer knows that it has that region.
//!
//! An export of memory that another process opens at that moment may have it map other memory, with
//! success (ROCm/rocm-systems#11892, #11462). So where a thread of the exporter hands memory out, an
//! allocation has [`TAIL`] bytes more than its user sees. The export writes [`MARK`] and a random
//! number there and into the bytes of the handle that the runtime leaves alone; whichever process
//! opens the handle reads them, once, and closes what does not have them.
//!
//! Memory that was adopted has no seal, nor has that of other libraries.

use std::ops::Range;

use driver::calls::Stream;
use driver::{Scope, Vendor};
use gpu_api::{AddressRange, DeviceId, DevicePtr, MemHandle, Result};

use crate::hip::Hip;

/// What is allocated behind sealed memory: a whole granule, since handles of other sizes are refused
/// by some runtimes.
pub(crate) const TAIL: u64 = driver::device::LARGE_PAGE;

/// The last bytes of a handle, which are the runtime's padding (`ihipIpcMemHandle_t`).
pub(crate) const PLACE: Range<usize> = 56..64;

/// What a seal begins with: other libraries may leave anything there.
const MARK: [u8; 4] = *b"gIPC";

impl Hip {
    /// Seals an allocation of `len` bytes, and its handle.
    pub(crate) fn seal(
        &self,
        device: DeviceId,
        base: DevicePtr,
        len: u64,
        handle: &mut MemHandle,
    ) -> Result<()> {
        let mut seal = [0; 8];
        seal[..4].copy_from_slice(&MARK);
        // Short only where the kernel has no randomness yet: the place and length are beside it.
        let _ = rustix::rand::getrandom(&mut seal[4..], rustix::rand::GetRandomFlags::empty());
        self.with_stream(device, |scope, stream| {
            scope.call(&self.driver().calls.copy_to_device, |function| {
                // SAFETY: `copy_to_device` asks for ranges and a stream that live until it is done:
                // the tail is behind `len` bytes of an allocation that our caller keeps, `seal` is
                // on this frame, and `with_stream` waits.
                unsafe { function(base.0 + len, seal.as_ptr().cast(), seal.len(), stream) }
            })
        })?;
        handle.0[PLACE].copy_from_slice(&seal);
        Ok(())
    }

    /// Returns what the user of an opened handle sees of it; `None` for other memory than the
    /// handle's.
    pub(crate) fn unsealed(
        &self,
        device: DeviceId,
        opened: AddressRange,
        handle: &MemHandle,
    ) -> Result<Option<AddressRange>> {
        let seal = &handle.0[PLACE];
        if !seal.starts_with(&MARK) {
            return Ok(Some(opened));
        }
        let Some(len) = opened.len.checked_sub(TAIL) else {
            return Ok(None);
        };
        let mut found = [0; 8];
        self.with_stream(device, |scope, stream| {
            scope.call(&self.driver().calls.copy_to_host, |function| {
                // SAFETY: as in `seal`; the driver says that so much was opened, and `found` is on
                // this frame.
                unsafe {
                    function(
                        found.as_mut_ptr().cast(),
                        opened.base.0 + len,
                        found.len(),
                        stream,
                    )
                }
            })
        })?;
        let seen = AddressRange {
            base: opened.base,
            len,
        };
        Ok((found == seal).then_some(seen))
    }

    /// Queues work on a stream of its own, which waits for nothing of the application's, and waits
    /// for it.
    fn with_stream(
        &self,
        device: DeviceId,
        queue: impl FnOnce(&Scope<'_, Hip>, Stream) -> Result<()>,
    ) -> Result<()> {
        let (scope, calls) = (self.on_device(device)?, &self.driver().calls);
        let mut stream = std::ptr::null_mut();
        scope.call(&calls.stream_create, |function| {
            // SAFETY: `stream_create` writes one pointer: `stream` is one.
            unsafe { function(&raw mut stream, driver::calls::STREAM_NON_BLOCKING) }
        })?;
        let queued = queue(&scope, stream);
        let done = scope.call(&calls.stream_synchronize, |function| {
            // SAFETY: `stream_synchronize` asks for a live stream: made above.
            unsafe { function(stream) }
        });
        scope.call(&calls.stream_destroy, |function| {
            // SAFETY: `stream_destroy` asks for a live stream that nothing uses afterwards: as
            // above.
            unsafe { function(stream) }
        })?;
        queued.and(done)
    }
}

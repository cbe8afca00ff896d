//! Copies and fills, in stream order.

use gpu_api::{DevicePtr, GpuCopies, RawStream, Result};

use crate::backend::Backend;
use crate::vendor::Vendor;

// SAFETY: the condition of `GpuCopies`: the driver writes what it is told to.
unsafe impl<V: Vendor> GpuCopies for Backend<V> {
    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        to: DevicePtr,
        from: *const u8,
        len: usize,
    ) -> Result<()> {
        let scope = self.on_device(stream.device)?;
        scope.call(&self.driver().calls.copy_to_device, |function| {
            // SAFETY: the call asks for ranges and a stream: our caller vouches for all of them.
            unsafe { function(to.0, from.cast(), len, V::stream(stream)) }
        })
    }

    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        to: *mut u8,
        from: DevicePtr,
        len: usize,
    ) -> Result<()> {
        let scope = self.on_device(stream.device)?;
        scope.call(&self.driver().calls.copy_to_host, |function| {
            // SAFETY: the call asks for ranges and a stream: our caller vouches for all of them.
            unsafe { function(to.cast(), from.0, len, V::stream(stream)) }
        })
    }

    unsafe fn copy(
        &self,
        stream: RawStream,
        to: DevicePtr,
        from: DevicePtr,
        len: u64,
    ) -> Result<()> {
        let scope = self.on_device(stream.device)?;
        scope.call(&self.driver().calls.copy, |function| {
            // SAFETY: the call asks for ranges and a stream: our caller vouches for all of them.
            unsafe { function(to.0, from.0, len as usize, V::stream(stream)) }
        })
    }

    unsafe fn fill(&self, stream: RawStream, to: DevicePtr, byte: u8, len: u64) -> Result<()> {
        let scope = self.on_device(stream.device)?;
        scope.call(&self.driver().calls.fill, |function| {
            // SAFETY: the call asks for a range and a stream: our caller vouches for both.
            unsafe { function(to.0, byte, len as usize, V::stream(stream)) }
        })
    }
}

//! Copies and fills, in stream order.

use gpu_api::{DevicePtr, GpuCopies, RawStream, Result};

use crate::backend::CudaBackend;
use crate::call;

// SAFETY: the condition of `GpuCopies`: the driver writes what it is told to.
unsafe impl GpuCopies for CudaBackend {
    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        to: DevicePtr,
        from: *const u8,
        len: usize,
    ) -> Result<()> {
        let scope = self.driver.on_stream(stream)?;
        scope.call(&self.driver.symbols.cuMemcpyHtoDAsync, |function| {
            // SAFETY: `cuMemcpyHtoDAsync` asks for ranges and a stream: our caller vouches for all
            // of them.
            unsafe { function(to.0, from.cast(), len, call::stream(stream)) }
        })
    }

    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        to: *mut u8,
        from: DevicePtr,
        len: usize,
    ) -> Result<()> {
        let scope = self.driver.on_stream(stream)?;
        scope.call(&self.driver.symbols.cuMemcpyDtoHAsync, |function| {
            // SAFETY: `cuMemcpyDtoHAsync` asks for ranges and a stream: our caller vouches for all
            // of them.
            unsafe { function(to.cast(), from.0, len, call::stream(stream)) }
        })
    }

    unsafe fn copy(
        &self,
        stream: RawStream,
        to: DevicePtr,
        from: DevicePtr,
        len: u64,
    ) -> Result<()> {
        let scope = self.driver.on_stream(stream)?;
        scope.call(&self.driver.symbols.cuMemcpyDtoDAsync, |function| {
            // SAFETY: `cuMemcpyDtoDAsync` asks for ranges and a stream: our caller vouches for all
            // of them.
            unsafe { function(to.0, from.0, len as usize, call::stream(stream)) }
        })
    }

    unsafe fn fill(&self, stream: RawStream, to: DevicePtr, byte: u8, len: u64) -> Result<()> {
        let scope = self.driver.on_stream(stream)?;
        scope.call(&self.driver.symbols.cuMemsetD8Async, |function| {
            // SAFETY: `cuMemsetD8Async` asks for a range and a stream: our caller vouches for both.
            unsafe { function(to.0, byte, len as usize, call::stream(stream)) }
        })
    }
}

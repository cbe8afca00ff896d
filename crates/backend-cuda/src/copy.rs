//! Copies and fills, in stream order.

use gpu_api::{DeviceId, DevicePtr, RawStream, Result};

use crate::backend::CudaBackend;
use crate::call;

impl CudaBackend {
    /// # Safety
    ///
    /// `stream` is alive; both ranges are valid for `len` bytes until the copy has finished.
    pub(crate) unsafe fn copy_in(&self, stream: RawStream, to: DevicePtr, from: *const u8, len: usize) -> Result<()> {
        // SAFETY: `Driver::on_stream` asks for a stream that is alive: our caller vouches for it.
        let scope = unsafe { self.driver.on_stream(stream, self.device_of(stream, to)) }?;
        scope.call(&self.driver.symbols.cuMemcpyHtoDAsync, |function| {
            // SAFETY: `cuMemcpyHtoDAsync` asks for ranges and a stream: our caller vouches for all of them.
            unsafe { function(to.0, from.cast(), len, call::stream(stream)) }
        })
    }

    /// # Safety
    ///
    /// `stream` is alive; both ranges are valid for `len` bytes until the copy has finished.
    pub(crate) unsafe fn copy_out(&self, stream: RawStream, to: *mut u8, from: DevicePtr, len: usize) -> Result<()> {
        // SAFETY: `Driver::on_stream` asks for a stream that is alive: our caller vouches for it.
        let scope = unsafe { self.driver.on_stream(stream, self.device_of(stream, from)) }?;
        scope.call(&self.driver.symbols.cuMemcpyDtoHAsync, |function| {
            // SAFETY: `cuMemcpyDtoHAsync` asks for ranges and a stream: our caller vouches for all of them.
            unsafe { function(to.cast(), from.0, len, call::stream(stream)) }
        })
    }

    /// # Safety
    ///
    /// `stream` is alive; both ranges are valid for `len` bytes until the copy has finished.
    pub(crate) unsafe fn copy_within(&self, stream: RawStream, to: DevicePtr, from: DevicePtr, len: u64) -> Result<()> {
        // SAFETY: `Driver::on_stream` asks for a stream that is alive: our caller vouches for it.
        let scope = unsafe { self.driver.on_stream(stream, self.device_of(stream, to)) }?;
        scope.call(&self.driver.symbols.cuMemcpyDtoDAsync, |function| {
            // SAFETY: `cuMemcpyDtoDAsync` asks for ranges and a stream: our caller vouches for all of them.
            unsafe { function(to.0, from.0, len as usize, call::stream(stream)) }
        })
    }

    /// # Safety
    ///
    /// `stream` is alive; the range is valid for `len` bytes until the fill has finished.
    pub(crate) unsafe fn fill_with(&self, stream: RawStream, to: DevicePtr, byte: u8, len: u64) -> Result<()> {
        // SAFETY: `Driver::on_stream` asks for a stream that is alive: our caller vouches for it.
        let scope = unsafe { self.driver.on_stream(stream, self.device_of(stream, to)) }?;
        scope.call(&self.driver.symbols.cuMemsetD8Async, |function| {
            // SAFETY: `cuMemsetD8Async` asks for a range and a stream: our caller vouches for both.
            unsafe { function(to.0, byte, len as usize, call::stream(stream)) }
        })
    }

    /// Names the device whose default stream is meant on a thread without a context: that of the memory.
    fn device_of(&self, stream: RawStream, ptr: DevicePtr) -> Option<DeviceId> {
        if !call::is_default(stream) {
            return None;
        }
        self.memory.find(ptr).map(|(_, entry)| entry.device)
    }
}

//! Contexts, streams and addresses of other libraries, and ours for them, as the driver's own
//! values.
//!
//! | of the driver | here | how |
//! |---|---|---|
//! | `CUstream` | [`RawStream`](gpu_api::RawStream) | its device, and its address as the handle |
//! | `CUdeviceptr` | [`DevicePtr`](gpu_api::DevicePtr) | the same number |
//! | `CUevent` | [`RawEvent`](gpu_api::RawEvent) | its address |
//! | `CUcontext` | `u64` | its address: [`Cuda::context`], [`Cuda::device_of_context`] |
//!
//! A stream must be of its device's primary context, which the CUDA runtime, and so PyTorch, and
//! cudarc use: others are refused, because the driver records an event on streams of the event's
//! own context only (`cuEventRecord`). Memory must come from `cuMemAlloc`, or from `cuMemCreate`
//! with a POSIX file descriptor among its handle types, to be exported; `classify` says what an
//! address is.

use std::ptr;

use gpu_api::{DeviceId, Result};

use crate::cuda::Cuda;

impl Cuda {
    /// Finds the device of a context (`CUcontext`) of the application's.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](gpu_api::Error::Driver) for a context that the driver refuses.
    ///
    /// # Safety
    ///
    /// `context` is a context that is alive.
    pub unsafe fn device_of_context(&self, context: u64) -> Result<DeviceId> {
        let context = ptr::with_exposed_provenance_mut(context as usize);
        // SAFETY: `on_context` asks for a context that is alive: our caller vouches for it.
        let _on = unsafe { self.on_context(context) }?;
        self.device_number()
    }

    /// Returns a device's primary context (`CUcontext`), which lives as long as the backend does.
    ///
    /// It is the context that the CUDA runtime, and so PyTorch, uses too.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](gpu_api::Error::Invalid) for a device that this process does not have.
    pub fn context(&self, device: DeviceId) -> Result<u64> {
        let scope = self.relaxed()?;
        let context = self.primary(&scope, device)?;
        Ok(context.expose_provenance() as u64)
    }
}

#[cfg(feature = "cudarc-0_19")]
pub use self::of_cudarc::{device, slice, stream};

#[cfg(feature = "cudarc-0_19")]
mod of_cudarc {
    use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr as _};
    use gpu_api::{
        AddressRange, DeviceId, DevicePtr, GpuPointers as _, RawStream, Result, Sharing,
    };

    use crate::backend::CudaBackend;

    /// Returns the stream of cudarc's as ours; it lives as long as `stream` does.
    ///
    /// # Errors
    ///
    /// As [`device`].
    pub fn stream(cuda: &CudaBackend, stream: &CudaStream) -> Result<RawStream> {
        let device = device(cuda, stream.context())?;
        Ok(RawStream::new(
            device,
            stream.cu_stream().expose_provenance() as u64,
        ))
    }

    /// Finds our number of the device of a context of cudarc's.
    ///
    /// # Errors
    ///
    /// [`Error::Driver`](gpu_api::Error::Driver) for a context whose device the driver does not
    /// tell.
    pub fn device(cuda: &CudaBackend, context: &CudaContext) -> Result<DeviceId> {
        // SAFETY: `device_of_context` asks for a context that is alive: `CudaContext` holds it
        // retained.
        unsafe { cuda.device_of_context(context.cu_ctx().expose_provenance() as u64) }
    }

    /// Returns where a slice's bytes lie, if that memory can be shared.
    ///
    /// `stream` waits for the writes that cudarc knows of; share the slice after work on that
    /// stream.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](gpu_api::Error::Unsupported) for a slice from the stream-ordered
    /// pool, which is what cudarc's own `alloc` gives on every device that has such pools.
    pub fn slice<T>(
        cuda: &CudaBackend,
        slice: &CudaSlice<T>,
        stream: &CudaStream,
    ) -> Result<AddressRange> {
        let (address, _order) = slice.device_ptr(stream);
        let base = DevicePtr(address);
        match cuda.classify(base)?.sharing {
            Some(Sharing::Handle | Sharing::Fd) => Ok(AddressRange {
                base,
                len: slice.num_bytes() as u64,
            }),
            _ => Err(driver::pointer::refusal(
                &**cuda,
                base,
                "sharing this slice",
            )),
        }
    }
}

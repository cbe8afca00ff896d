//! What the driver knows of a stream.
//!
//! A stream's handle is its `CUstream`. The handles 0 and 1 (the legacy default stream) and 2 (the
//! per-thread default stream) mean something only together with a context, which is the primary one
//! of the stream's device.

use driver::Vendor;
use gpu_api::{DeviceId, Error, RawStream, Result, StreamIdentity, StreamInfo};

use crate::cuda::Cuda;
use crate::sys::CUcontext;

impl Cuda {
    /// Finds a stream's identity, and refuses one of another context than its device's primary one.
    ///
    /// # Safety
    ///
    /// `raw` is alive.
    pub(crate) unsafe fn identify_stream(&self, raw: RawStream) -> Result<StreamInfo> {
        let device = raw.device;
        // SAFETY: `own_context` has our condition.
        let (theirs, context) = unsafe { self.own_context(raw) }?;
        let scope = self.on_device(device)?;
        let ours = self.primary(&scope, device)?;
        if theirs != device {
            return Err(Error::mismatch(
                "the stream's device",
                theirs,
                device,
                "pass a stream of the device that the session or participant was opened on",
            ));
        }
        if context != ours {
            // Our events are of the primary context, and an event can only be recorded on a stream
            // of its own.
            return Err(Error::mismatch(
                "the stream's context",
                format!("{context:p}"),
                format!("{ours:p}, the primary context of {device}"),
                "make the stream in the device's primary context (cuDevicePrimaryCtxRetain), as the CUDA \
                         runtime does",
            ));
        }
        let symbol = &self.driver().calls.stream_id;
        let identity = if symbol.function.is_some() {
            let mut identity = 0;
            scope.call(symbol, |function| {
                // SAFETY: `stream_id` writes one number: `identity` is one. Our caller vouches
                // for the stream.
                unsafe { function(Cuda::stream(raw), &raw mut identity) }
            })?;
            StreamIdentity(identity)
        } else if let Some(known) = self.driver().streams.get(raw) {
            known.identity
        } else {
            // A handle would do until its stream is destroyed and another one gets it; then two
            // streams would write one timeline word, and an early value would pass for a later one.
            return Err(Error::unsupported(
                "a stream that this library did not make",
                format!(
                    "the driver (CUDA {}) cannot tell it from a later one",
                    self.driver_version()
                ),
                "update the driver to CUDA 12.0 or later, or use a stream of this library",
            ));
        };
        Ok(StreamInfo {
            identity,
            device,
            context: context.expose_provenance() as u64,
        })
    }

    /// Finds the context that a stream is of, and its device: for a default stream the device's
    /// primary one, unless another context of the same device is current, which is what the
    /// caller's own calls would mean.
    ///
    /// # Safety
    ///
    /// `raw` is alive.
    unsafe fn own_context(&self, raw: RawStream) -> Result<(DeviceId, CUcontext)> {
        let scope = self.relaxed()?;
        let context = if raw.is_default() {
            self.current(&scope)?
        } else {
            // SAFETY: `context_of` asks for a stream that is alive: our caller vouches for
            // it.
            unsafe { self.context_of(&scope, raw) }?
        };
        if !context.is_null() {
            // SAFETY: `on_context` asks for a context that is alive: it is current, or a
            // live stream's.
            let device =
                unsafe { self.on_context(context) }.and_then(|_on| self.device_number())?;
            if device == raw.device || !raw.is_default() {
                return Ok((device, context));
            }
        }
        Ok((raw.device, self.primary(&scope, raw.device)?))
    }
}

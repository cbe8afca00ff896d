//! Streams: queues of GPU work.
//!
//! A stream's handle is its `CUstream`. The handles 0 and 1 (the legacy default stream) and 2 (the
//! per-thread default stream) mean something only together with a context, which is the primary one
//! of the stream's device.

use std::ptr;

use gpu_api::vendor::queued::{self, QueuedFunction};
use gpu_api::{
    CaptureStatus, DeviceId, Error, GpuStreams, RawStream, Result, StreamIdentity, StreamInfo,
};

use crate::backend::CudaBackend;
use crate::call::{self, Scope};
use crate::error::{NOT_READY, STREAM_CAPTURE_IMPLICIT, SUCCESS};
use crate::sys::{CUcontext, STREAM_NON_BLOCKING};

// SAFETY: the condition of `GpuStreams`: `true` and success are `cuStreamQuery`'s and
// `cuStreamSynchronize`'s, which the manual gives to work that has completed.
unsafe impl GpuStreams for CudaBackend {
    fn create_stream(&self, device: DeviceId) -> Result<RawStream> {
        let scope = self.driver.on_device(device)?;
        let mut made = ptr::null_mut();
        scope.call(&self.driver.symbols.cuStreamCreate, |function| {
            // SAFETY: `cuStreamCreate` writes one pointer: `made` is one.
            unsafe { function(&raw mut made, STREAM_NON_BLOCKING) }
        })?;
        let raw = RawStream::new(device, made.expose_provenance() as u64);
        self.streams.insert(raw);
        Ok(raw)
    }

    unsafe fn destroy_stream(&self, raw: RawStream) -> Result<()> {
        let scope = self.driver.on_stream(raw)?;
        let known = self.streams.remove(raw);
        let result = scope.call(&self.driver.symbols.cuStreamDestroy, |function| {
            // SAFETY: `cuStreamDestroy` asks for a stream that is alive: our caller vouches for it,
            // and that nobody uses it afterwards.
            unsafe { function(call::stream(raw)) }
        });
        if let (Err(_), Some(known)) = (&result, known) {
            // It may live: its context must not be given back.
            self.streams.put_back(raw, known);
        }
        result
    }

    unsafe fn query_stream(&self, raw: RawStream) -> Result<bool> {
        let scope = self.driver.on_stream(raw)?;
        let symbol = &self.driver.symbols.cuStreamQuery;
        let code = scope.code(symbol, |function| {
            // SAFETY: `cuStreamQuery` asks for a stream that is alive: our caller vouches for it.
            unsafe { function(call::stream(raw)) }
        })?;
        match code {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => Err(scope.error(symbol.name, code)),
        }
    }

    unsafe fn synchronize_stream(&self, raw: RawStream) -> Result<()> {
        let scope = self.driver.on_stream(raw)?;
        scope.call(&self.driver.symbols.cuStreamSynchronize, |function| {
            // SAFETY: `cuStreamSynchronize` asks for a stream that is alive: our caller vouches for
            // it.
            unsafe { function(call::stream(raw)) }
        })
    }

    unsafe fn stream_info(&self, raw: RawStream) -> Result<StreamInfo> {
        let device = raw.device;
        // SAFETY: `own_context` has our condition.
        let (theirs, context) = unsafe { self.own_context(raw) }?;
        let scope = self.driver.on_stream(raw)?;
        let ours = self.driver.primary(&scope, device)?;
        if theirs != device {
            return Err(Error::Mismatch {
                what: "the stream's device",
                theirs: theirs.to_string(),
                ours: device.to_string(),
                remedy: "pass a stream of the device that the session or participant was opened on",
            });
        }
        if context != ours {
            // Our events are of the primary context, and an event can only be recorded on a stream
            // of its own.
            return Err(Error::Mismatch {
                what: "the stream's context",
                theirs: format!("{context:p}"),
                ours: format!("{ours:p}, the primary context of {device}"),
                remedy: "make the stream in the device's primary context (cuDevicePrimaryCtxRetain), as the CUDA \
                         runtime does",
            });
        }
        let symbol = &self.driver.symbols.cuStreamGetId;
        let identity = if symbol.function.is_some() {
            let mut identity = 0;
            scope.call(symbol, |function| {
                // SAFETY: `cuStreamGetId` writes one number: `identity` is one. Our caller vouches
                // for the stream.
                unsafe { function(call::stream(raw), &raw mut identity) }
            })?;
            StreamIdentity(identity)
        } else if let Some(known) = self.streams.get(raw) {
            known.identity
        } else {
            // A handle would do until its stream is destroyed and another one gets it; then two
            // streams would write one timeline word, and an early value would pass for a later one.
            return Err(Error::Unsupported {
                what: "a stream that this library did not make",
                why: format!(
                    "the driver (CUDA {}) cannot tell it from a later one",
                    self.driver.version()
                ),
                remedy: "update the driver to CUDA 12.0 or later, or use a stream of this library",
            });
        };
        Ok(StreamInfo {
            identity,
            device,
            context: context.expose_provenance() as u64,
        })
    }

    unsafe fn capture_status(&self, raw: RawStream) -> Result<CaptureStatus> {
        let scope = self.driver.asking_stream(raw)?;
        // SAFETY: `status_within` has our condition.
        unsafe { self.status_within(&scope, raw) }
    }

    unsafe fn host_function(
        &self,
        raw: RawStream,
        function: Box<dyn FnOnce() + Send>,
    ) -> Result<()> {
        // A graph may run more than once, and the function can be called only once.
        // SAFETY: `capture_status` asks for a stream that is alive: our caller vouches for it.
        if unsafe { self.capture_status(raw) }? != CaptureStatus::None {
            return Err(Error::Capturing {
                stream: raw.handle,
                remedy: "queue host functions outside the capture",
            });
        }
        let scope = self.driver.on_stream(raw)?;
        let (ours, theirs) = QueuedFunction::new(function);
        let result = scope.call(&self.driver.symbols.cuLaunchHostFunc, |launch| {
            // SAFETY: `cuLaunchHostFunc` asks for a function that takes the address beside it and
            // calls no driver: `queued::run` does, and our trait asks the latter of the closure.
            // Our caller vouches for the stream.
            unsafe { launch(call::stream(raw), queued::run, theirs) }
        });
        if result.is_err() {
            ours.take_back();
        }
        result
    }
}

impl CudaBackend {
    /// Finds the context that a stream is of, and its device: for a default stream the device's
    /// primary one, unless another context of the same device is current, which is what the
    /// caller's own calls would mean.
    ///
    /// # Safety
    ///
    /// `raw` is alive.
    unsafe fn own_context(&self, raw: RawStream) -> Result<(DeviceId, CUcontext)> {
        let scope = self.driver.relaxed()?;
        let context = if raw.is_default() {
            scope.current()?
        } else {
            // SAFETY: `Scope::context_of` asks for a stream that is alive: our caller vouches for
            // it.
            unsafe { scope.context_of(raw) }?
        };
        if !context.is_null() {
            // SAFETY: `Driver::on_context` asks for a context that is alive: it is current, or a
            // live stream's.
            let device = unsafe { self.driver.on_context(context) }
                .and_then(|on| self.driver.device_number(&on))?;
            if device == raw.device || !raw.is_default() {
                return Ok((device, context));
            }
        }
        Ok((raw.device, self.driver.primary(&scope, raw.device)?))
    }

    /// # Safety
    ///
    /// `raw` is alive, and the scope is its own or of its context.
    pub(crate) unsafe fn status_within(
        &self,
        scope: &Scope<'_>,
        raw: RawStream,
    ) -> Result<CaptureStatus> {
        let symbol = &self.driver.symbols.cuStreamIsCapturing;
        if symbol.function.is_none() {
            return Ok(CaptureStatus::None);
        }
        let mut status = 0;
        let code = scope.code(symbol, |function| {
            // SAFETY: `cuStreamIsCapturing` writes one integer: `status` is one. Our caller vouches
            // for the stream.
            unsafe { function(call::stream(raw), &raw mut status) }
        })?;
        match (code, status) {
            (SUCCESS, 0) => Ok(CaptureStatus::None),
            (SUCCESS, 1) => Ok(CaptureStatus::Active),
            (SUCCESS, _) => Ok(CaptureStatus::Invalidated),
            // The legacy default stream while a stream that it orders is being captured: work
            // queued on it would destroy that capture.
            (STREAM_CAPTURE_IMPLICIT, _) => Ok(CaptureStatus::Active),
            (code, _) => Err(scope.error(symbol.name, code)),
        }
    }
}

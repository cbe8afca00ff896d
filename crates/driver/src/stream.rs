//! Streams: queues of GPU work.
//!
//! A stream's handle is its `Stream`. The handles 0 and 1 (the legacy default stream) and 2 (the
//! per-thread default stream) mean something only together with a context, which is the primary one
//! of the stream's device.

use std::ptr;
use std::sync::Arc;

use crate::queued::{self, QueuedFunction};
use gpu_api::{
    CaptureStatus, DeviceId, Error, GpuCaptures, GpuHostFunctions, GpuStreams, RawEvent, RawStream,
    Result, StreamInfo, StreamOp,
};

use crate::backend::Backend;
use crate::calls::STREAM_NON_BLOCKING;
use crate::checks;
use crate::code::{STREAM_CAPTURE_IMPLICIT, SUCCESS};
use crate::vendor::{Scope, Vendor};

// SAFETY: the condition of `GpuStreams`: `true` and success are `stream_query`'s and
// `stream_synchronize`'s, which the manual gives to work that has completed.
unsafe impl<V: Vendor> GpuStreams for Backend<V> {
    fn create_stream(&self, device: DeviceId) -> Result<RawStream> {
        let scope = self.on_device(device)?;
        let mut made = ptr::null_mut();
        scope.call(&self.driver().calls.stream_create, |function| {
            // SAFETY: `stream_create` writes one pointer: `made` is one.
            unsafe { function(&raw mut made, STREAM_NON_BLOCKING) }
        })?;
        let raw = RawStream::new(device, made.expose_provenance() as u64);
        self.driver().streams.insert(raw);
        Ok(raw)
    }

    unsafe fn destroy_stream(&self, raw: RawStream) -> Result<()> {
        // A driver that waits for all that is queued may be held up by what the calling thread does
        // next: there a stream that is busy is destroyed on a thread that may block.
        // SAFETY: `query_stream` asks for a stream that is alive: our caller vouches for it.
        if self.quirks().destroy_waits && !matches!(unsafe { self.query_stream(raw) }, Ok(true)) {
            self.driver().streams.remove(raw);
            return self.destroy_later(raw);
        }
        let scope = self.on_device(raw.device)?;
        let known = self.driver().streams.remove(raw);
        let result = scope.call(&self.driver().calls.stream_destroy, |function| {
            // SAFETY: `stream_destroy` asks for a stream that is alive: our caller vouches for it,
            // and that nobody uses it afterwards.
            unsafe { function(V::stream(raw)) }
        });
        if let (Err(_), Some(known)) = (&result, known) {
            // It may live: its context must not be given back.
            self.driver().streams.put_back(raw, known);
        }
        result
    }

    unsafe fn query_stream(&self, raw: RawStream) -> Result<bool> {
        let scope = self.on_device(raw.device)?;
        scope.is_done(&self.driver().calls.stream_query, |function| {
            // SAFETY: `stream_query` asks for a stream that is alive: our caller vouches for it.
            unsafe { function(V::stream(raw)) }
        })
    }

    unsafe fn synchronize_stream(&self, raw: RawStream) -> Result<()> {
        let scope = self.on_device(raw.device)?;
        scope.call(&self.driver().calls.stream_synchronize, |function| {
            // SAFETY: `stream_synchronize` asks for a stream that is alive: our caller vouches for
            // it.
            unsafe { function(V::stream(raw)) }
        })
    }

    unsafe fn stream_info(&self, raw: RawStream) -> Result<StreamInfo> {
        // SAFETY: `Vendor::stream_info` has our condition.
        unsafe { Vendor::stream_info(&**self, raw) }
    }
}

// SAFETY: the condition of `GpuHostFunctions`: the driver calls what it was given, once, in the
// stream's order.
unsafe impl<V: Vendor> GpuHostFunctions for Backend<V> {
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
        let scope = self.on_device(raw.device)?;
        let (ours, theirs) = QueuedFunction::new(function);
        let call = &self.driver().calls.stream_call;
        let result = if call.function.is_some() {
            scope.call(call, |call| {
                // SAFETY: `stream_call` asks for a function that takes the address beside it and
                // calls no driver: `queued::run` does, and our trait asks the latter of the
                // closure. Our caller vouches for the stream.
                unsafe { call(V::stream(raw), queued::run, theirs) }
            })
        } else {
            // SAFETY: `call_back` asks for a live stream, for which our caller vouches, and for a
            // function to call once: as above.
            unsafe { self.call_back(&scope, raw, theirs) }
        };
        if result.is_err() {
            ours.take_back();
        }
        result
    }
}

// SAFETY: the condition of `GpuCaptures`: the answer is the driver's, asked in the scope of the
// batch.
unsafe impl<V: Vendor> GpuCaptures for Backend<V> {
    unsafe fn capture_status(&self, raw: RawStream) -> Result<CaptureStatus> {
        let scope = self.asking_stream(raw)?;
        // SAFETY: `status_within` has our condition.
        unsafe { self.status_within(&scope, raw) }
    }

    unsafe fn batch_uncaptured(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: `words_batch` has our conditions.
        unsafe { self.words_batch(stream, ops, true) }
    }

    unsafe fn batch_behind(
        &self,
        stream: RawStream,
        others: &[(RawEvent, RawStream)],
        ops: &[StreamOp],
    ) -> Result<()> {
        checks::batch(ops)?;
        let scope = self.on_device(stream.device)?;
        for &(event, other) in others {
            // SAFETY: `status_within` asks for a stream that is alive, and for its scope: our
            // caller vouches for both.
            gpu_api::refuse_capture(other, unsafe { self.status_within(&scope, other) }?)?;
            // SAFETY: `record_within` asks for both alive and of the scope's context: our caller
            // vouches for it.
            unsafe { self.record_within(&scope, event, other) }?;
            // SAFETY: `await_within` asks for both alive, and for the stream's scope: as above.
            unsafe { self.await_within(&scope, stream, event) }?;
        }
        // SAFETY: `queue_words` has our conditions, and the scope is the stream's.
        unsafe { self.queue_words(&scope, stream, ops) }
    }
}

impl<V: Vendor> Backend<V> {
    /// Destroys a busy stream on a thread of its own. It ends with the stream's work, or with the
    /// process.
    fn destroy_later(&self, raw: RawStream) -> Result<()> {
        let vendor = Arc::clone(self.vendor());
        let destroy = move || {
            // An error leaks it.
            let _ = vendor.on_device(raw.device).and_then(|scope| {
                scope.call(&vendor.driver().calls.stream_destroy, |function| {
                    // SAFETY: `stream_destroy` asks for a stream that is alive and that nobody uses
                    // afterwards: the caller of `destroy_stream` vouched for both.
                    unsafe { function(V::stream(raw)) }
                })
            });
        };
        // Without a thread the stream is leaked, which does not block.
        gpu_api::thread::start("gpu-ipc-stream", destroy).map(drop)
    }

    /// # Safety
    ///
    /// `raw` is alive, and the scope is its own or of its context.
    pub(crate) unsafe fn status_within(
        &self,
        scope: &Scope<'_, V>,
        raw: RawStream,
    ) -> Result<CaptureStatus> {
        let symbol = &self.driver().calls.stream_capturing;
        if symbol.function.is_none() {
            return Ok(CaptureStatus::None);
        }
        let mut status = 0;
        let code = scope.code(symbol, |function| {
            // SAFETY: `stream_capturing` writes one integer: `status` is one. Our caller vouches
            // for the stream.
            unsafe { function(V::stream(raw), &raw mut status) }
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

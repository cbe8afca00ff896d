//! Streams: queues of GPU work.
//!
//! A stream's handle is its `hipStream_t`. The handles 0 and 1 (the null stream) and 2 (the
//! per-thread default stream) mean something only together with a device, which is the stream's
//! own.

use std::ffi::c_void;
use std::ptr;

use gpu_api::vendor::queued::{self, QueuedFunction};
use gpu_api::{
    CaptureStatus, DeviceId, Error, GpuStreams, RawStream, Result, StreamIdentity, StreamInfo,
    thread,
};

use crate::backend::HipBackend;
use crate::call;
use crate::error::{self, NOT_READY, STREAM_CAPTURE_IMPLICIT, SUCCESS};
use crate::sys::{Code, STREAM_NON_BLOCKING, Stream};

// SAFETY: the condition of `GpuStreams`: `true` and success are `hipStreamQuery`'s and
// `hipStreamSynchronize`'s, which the manual gives to work that has completed.
unsafe impl GpuStreams for HipBackend {
    fn create_stream(&self, device: DeviceId) -> Result<RawStream> {
        let scope = self.driver.on_device(device)?;
        let mut made = ptr::null_mut();
        scope.call(&self.driver.symbols.hipStreamCreateWithFlags, |function| {
            // SAFETY: `hipStreamCreateWithFlags` writes one pointer: `made` is one.
            unsafe { function(&raw mut made, STREAM_NON_BLOCKING) }
        })?;
        let raw = RawStream::new(device, made.expose_provenance() as u64);
        self.streams.insert(raw);
        Ok(raw)
    }

    unsafe fn destroy_stream(&self, raw: RawStream) -> Result<()> {
        self.streams.remove(raw);
        // AMD's waits for all that is queued (its header; `HostQueue::terminate`; ROCm/hip#3367),
        // and may be held up by what the calling thread does next: a stream that is busy is
        // destroyed on a thread that may block. SAFETY: `query_stream` asks for a stream that is
        // alive: our caller vouches for it.
        if !matches!(unsafe { self.query_stream(raw) }, Ok(true)) {
            return self.destroy_later(raw);
        }
        let scope = self.driver.on_stream(raw)?;
        scope.call(&self.driver.symbols.hipStreamDestroy, |function| {
            // SAFETY: `hipStreamDestroy` asks for a stream that is alive: our caller vouches for
            // it, and that nobody uses it afterwards.
            unsafe { function(call::stream(raw)) }
        })
    }

    unsafe fn query_stream(&self, raw: RawStream) -> Result<bool> {
        let scope = self.driver.on_stream(raw)?;
        let symbol = &self.driver.symbols.hipStreamQuery;
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipStreamQuery` asks for a stream that is alive: our caller vouches for it.
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
        scope.call(&self.driver.symbols.hipStreamSynchronize, |function| {
            // SAFETY: `hipStreamSynchronize` asks for a stream that is alive: our caller vouches
            // for it.
            unsafe { function(call::stream(raw)) }
        })
    }

    unsafe fn stream_info(&self, raw: RawStream) -> Result<StreamInfo> {
        // The number that the runtime gives would do for our own streams too, but old runtimes give
        // none, and one stream must not have two identities.
        if let Some(known) = self.streams.get(raw) {
            require(raw, known.device)?;
            return Ok(StreamInfo {
                identity: known.identity,
                device: known.device,
                context: 0,
            });
        }
        if !raw.is_default() {
            // SAFETY: `device_of` asks for a stream that is alive, and no default one: our caller
            // vouches for it.
            require(raw, unsafe { self.device_of(raw) }?)?;
        }
        let scope = self.driver.on_stream(raw)?;
        let symbol = &self.driver.symbols.hipStreamGetId;
        if symbol.function.is_none() {
            // A handle would do until its stream is destroyed and another one gets it; then two
            // streams would write one timeline word, and an early value would pass for a later one.
            return Err(error::foreign_stream(raw));
        }
        let mut identity = 0;
        scope.call(symbol, |function| {
            // SAFETY: `hipStreamGetId` writes one number: `identity` is one. Our caller vouches for
            // the stream.
            unsafe { function(call::stream(raw), &raw mut identity) }
        })?;
        Ok(StreamInfo {
            identity: StreamIdentity(identity),
            device: raw.device,
            context: 0,
        })
    }

    unsafe fn capture_status(&self, raw: RawStream) -> Result<CaptureStatus> {
        let scope = self.driver.on_stream(raw)?;
        let symbol = &self.driver.symbols.hipStreamIsCapturing;
        if symbol.function.is_none() {
            return Ok(CaptureStatus::None);
        }
        let mut status = 0;
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipStreamIsCapturing` writes one integer: `status` is one. Our caller
            // vouches for the stream.
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
        let launch = &self.driver.symbols.hipLaunchHostFunc;
        let result = if launch.function.is_some() {
            scope.call(launch, |launch| {
                // SAFETY: `hipLaunchHostFunc` asks for a function that takes the address beside it
                // and calls no runtime: `queued::run` does, and our trait asks the latter of the
                // closure. Our caller vouches for the stream.
                unsafe { launch(call::stream(raw), queued::run, theirs) }
            })
        } else {
            // ROCm 5.2 has only the older call.
            scope.call(&self.driver.symbols.hipStreamAddCallback, |add| {
                // SAFETY: `hipStreamAddCallback` asks for the same. Its flags are 0.
                unsafe { add(call::stream(raw), run_called_back, theirs, 0) }
            })
        };
        if result.is_err() {
            ours.take_back();
        }
        result
    }
}

impl HipBackend {
    /// Destroys a busy stream on a thread of its own. It ends with the stream's work, or with the
    /// process.
    fn destroy_later(&self, raw: RawStream) -> Result<()> {
        let ordinal = self.driver.ordinal(raw.device)?;
        let symbols = &self.driver.symbols;
        let set = symbols
            .hipSetDevice
            .function
            .ok_or_else(|| error::missing(symbols.hipSetDevice.name))?;
        let destroy = symbols
            .hipStreamDestroy
            .function
            .ok_or_else(|| error::missing(symbols.hipStreamDestroy.name))?;
        // Without a thread the stream is leaked, which does not block.
        let thread = thread::start("gpu-ipc-hip-stream", move || {
            // SAFETY: `hipSetDevice` refuses what is no device.
            if unsafe { set(ordinal) } == SUCCESS {
                // SAFETY: `hipStreamDestroy` asks for a stream that is alive and that nobody uses
                // afterwards: the caller of `destroy_stream` vouched for both. An error leaks it.
                let _ = unsafe { destroy(call::stream(raw)) };
            }
        });
        thread.map(drop)
    }

    /// Asks for the device of a stream that somebody else made.
    ///
    /// # Safety
    ///
    /// `raw` is alive, and no default stream.
    pub(crate) unsafe fn device_of(&self, raw: RawStream) -> Result<DeviceId> {
        if let Some(device) = self.driver.only_device() {
            return Ok(device);
        }
        let scope = self.driver.anywhere()?;
        let symbol = &self.driver.symbols.hipStreamGetDevice;
        if symbol.function.is_none() {
            return Err(error::foreign_stream(raw));
        }
        let mut ordinal = 0;
        scope.call(symbol, |function| {
            // SAFETY: `hipStreamGetDevice` writes one integer: `ordinal` is one. Our caller vouches
            // for the stream.
            unsafe { function(call::stream(raw), &raw mut ordinal) }
        })?;
        self.driver
            .numbered(ordinal)
            .ok_or_else(|| error::foreign_stream(raw))
    }
}

/// Refuses a stream of another device than the one that was named with it.
pub(crate) fn require(raw: RawStream, device: DeviceId) -> Result<()> {
    if raw.device == device {
        return Ok(());
    }
    Err(Error::Mismatch {
        what: "the stream's device",
        theirs: device.to_string(),
        ours: raw.device.to_string(),
        remedy: "pass a stream of the device that the session or participant was opened on",
    })
}

/// Runs what a stream reached, if all before it went well; else it is dropped, as
/// `hipLaunchHostFunc` would.
///
/// # Safety
///
/// `queued` is what `QueuedFunction::new` gave, for this call.
unsafe extern "C" fn run_called_back(_stream: Stream, status: Code, queued: *mut c_void) {
    if status == SUCCESS {
        // SAFETY: `queued::run` has our condition.
        unsafe { queued::run(queued) }
    } else {
        // SAFETY: `queued::discard` has our condition.
        unsafe { queued::discard(queued) }
    }
}

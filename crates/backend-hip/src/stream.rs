//! What the runtime knows of a stream.
//!
//! A stream's handle is its `hipStream_t`. The handles 0 and 1 (the null stream) and 2 (the
//! per-thread default stream) mean something only together with a device, which is the stream's
//! own.

use std::ffi::c_void;

use driver::calls::Stream;
use driver::code::{Code, SUCCESS};
use driver::queued;
use driver::{Scope, Vendor};
use gpu_api::{DeviceId, Error, RawStream, Result, StreamIdentity, StreamInfo};

use crate::error;
use crate::hip::Hip;

impl Hip {
    /// Finds a stream's identity and device.
    ///
    /// # Safety
    ///
    /// `raw` is alive.
    pub(crate) unsafe fn identify_stream(&self, raw: RawStream) -> Result<StreamInfo> {
        // The number that the runtime gives would do for our own streams too, but old runtimes give
        // none, and one stream must not have two identities.
        if let Some(known) = self.driver().streams.get(raw) {
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
        let scope = self.on_device(raw.device)?;
        let symbol = &self.driver().calls.stream_id;
        if symbol.function.is_none() {
            // A handle would do until its stream is destroyed and another one gets it; then two
            // streams would write one timeline word, and an early value would pass for a later one.
            return Err(error::foreign_stream(raw));
        }
        let mut identity = 0;
        scope.call(symbol, |function| {
            // SAFETY: `stream_id` writes one number: `identity` is one. Our caller vouches for
            // the stream.
            unsafe { function(Hip::stream(raw), &raw mut identity) }
        })?;
        Ok(StreamInfo {
            identity: StreamIdentity(identity),
            device: raw.device,
            context: 0,
        })
    }

    /// Queues a function by ROCm 5.2's older call.
    ///
    /// # Safety
    ///
    /// As [`Vendor::call_back`].
    pub(crate) unsafe fn add_callback(
        &self,
        scope: &Scope<'_, Hip>,
        raw: RawStream,
        queued: *mut c_void,
    ) -> Result<()> {
        scope.call(&self.own().hipStreamAddCallback, |add| {
            // SAFETY: `hipStreamAddCallback` asks for a function that takes the address beside it
            // and calls no runtime: our caller vouches for it, and for the stream. Its flags are 0.
            unsafe { add(Hip::stream(raw), run_called_back, queued, 0) }
        })
    }

    /// Asks for the device of a stream that somebody else made.
    ///
    /// # Safety
    ///
    /// `raw` is alive, and no default stream.
    pub(crate) unsafe fn device_of(&self, raw: RawStream) -> Result<DeviceId> {
        if let Some(device) = self.only_device() {
            return Ok(device);
        }
        let scope = self.anywhere()?;
        let symbol = &self.own().hipStreamGetDevice;
        if symbol.function.is_none() {
            return Err(error::foreign_stream(raw));
        }
        let mut ordinal = 0;
        scope.call(symbol, |function| {
            // SAFETY: `hipStreamGetDevice` writes one integer: `ordinal` is one. Our caller vouches
            // for the stream.
            unsafe { function(Hip::stream(raw), &raw mut ordinal) }
        })?;
        self.numbered(ordinal)
            .ok_or_else(|| error::foreign_stream(raw))
    }
}

/// Refuses a stream of another device than the one that was named with it.
pub(crate) fn require(raw: RawStream, device: DeviceId) -> Result<()> {
    if raw.device == device {
        return Ok(());
    }
    Err(Error::mismatch(
        "the stream's device",
        device,
        raw.device,
        "pass a stream of the device that the session or participant was opened on",
    ))
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

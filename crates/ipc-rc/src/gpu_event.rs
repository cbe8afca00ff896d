//! Marks: events that tell when a stream's queued work is done.
//!
//! An event is recorded on a stream of its own device alone, so a mark is made for a device and
//! keeps it. The stream may be one of another device, or of another vendor's, than the session or
//! participant that asks: only the mark's own backend is called.

use gpu_api::{EventKind, Gpu, RawEvent, RawStream, Result};

use crate::stream::Stream;

/// An event on the device of the streams that it is recorded on.
#[derive(Debug)]
pub(crate) struct GpuEvent {
    gpu: Gpu,
    event: RawEvent,
}

impl GpuEvent {
    /// Makes one for streams of a device.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn new(gpu: &Gpu) -> Result<GpuEvent> {
        let event = gpu.backend().create_event(gpu.device(), EventKind::Local)?;
        Ok(GpuEvent {
            gpu: gpu.clone(),
            event,
        })
    }

    /// Returns the device on whose streams it can be recorded.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the event, to be recorded on a stream of its device.
    pub fn on(&self, stream: &Stream) -> (RawEvent, RawStream) {
        debug_assert!(*stream.gpu() == self.gpu, "an event of another device");
        (self.event, stream.raw())
    }

    /// Marks what is queued on `stream` at this moment, instead of what it marked before.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        stream.require(&self.gpu)?;
        // SAFETY: `record_event` asks for a live event and stream of one device: the event goes
        // with `self`, `Stream` keeps its stream, and both were compared above.
        unsafe { self.gpu.backend().record_event(self.event, stream.raw()) }
    }

    /// Says whether the work before it is done.
    ///
    /// # Errors
    ///
    /// The driver's error: then it is unknown.
    pub fn is_passed(&self) -> Result<bool> {
        // SAFETY: `query_event` asks for a live event: only the drop destroys it.
        unsafe { self.gpu.backend().query_event(self.event) }
    }

    /// Makes a stream of the same device wait for it.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn hold(&self, stream: &Stream) -> Result<()> {
        stream.require(&self.gpu)?;
        // SAFETY: `stream_wait_event` asks for a live stream and event: `Stream` keeps the one,
        // `self` the other.
        unsafe {
            self.gpu
                .backend()
                .stream_wait_event(stream.raw(), self.event)
        }
    }
}

impl Drop for GpuEvent {
    fn drop(&mut self) {
        // SAFETY: `destroy_event` asks for a live event that nobody uses afterwards: a wait that
        // was queued for it stays good. An error leaks it.
        let _ = unsafe { self.gpu.backend().destroy_event(self.event) };
    }
}

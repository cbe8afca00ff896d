//! Events: points in the order of a stream's work.

#[cfg(doc)]
use crate::Error;
use crate::{DeviceId, EventKind, RawEvent, RawStream, Result};

/// Events: points in the order of a stream's work.
///
/// # Safety
///
/// For implementors: `query_event` says `true` only once all work before the recording has
/// finished.
pub unsafe trait GpuEvents {
    /// Makes an event.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for an interprocess event on a device without them.
    fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent>;

    /// Lets the event stand for all work that is in the stream at this moment.
    ///
    /// # Safety
    ///
    /// `event` and `stream` are alive and of one device.
    unsafe fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Says whether the work that the event stands for has finished. An event never recorded has.
    ///
    /// # Safety
    ///
    /// `event` is alive.
    unsafe fn query_event(&self, event: RawEvent) -> Result<bool>;

    /// Holds up the stream until what the event stands for *at this moment* has finished; the event
    /// may be recorded again at once.
    ///
    /// # Safety
    ///
    /// `event` and `stream` are alive.
    unsafe fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Destroys an event, made or opened. Waits that were queued for it stay good.
    ///
    /// # Safety
    ///
    /// `event` is alive, and nobody uses it afterwards.
    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()>;
}

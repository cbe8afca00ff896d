//! Streams, and what is queued on them.

use crate::{CaptureStatus, DeviceId, DevicePtr, Error, RawStream, Result, StreamIdentity};

/// Streams: queues of GPU work.
///
/// # Safety
///
/// For implementors: `query_stream` says `true`, and `synchronize_stream` comes back without an
/// error, only once all work that was queued before has finished.
pub unsafe trait GpuStreams {
    /// Makes a stream that waits for no other.
    fn create_stream(&self, device: DeviceId) -> Result<RawStream>;

    /// Destroys a stream; what is queued on it still runs.
    ///
    /// # Safety
    ///
    /// `stream` is alive, and nobody uses it afterwards.
    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()>;

    /// Says whether all that was queued on the stream has finished.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn query_stream(&self, stream: RawStream) -> Result<bool>;

    /// Blocks until all that was queued on the stream has finished.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn synchronize_stream(&self, stream: RawStream) -> Result<()>;

    /// Returns the stream's number that is never used again, the device it queues on, and the
    /// driver's context.
    ///
    /// # Errors
    ///
    /// [`Error::Mismatch`] for a stream that is not of its device's primary context, and for a
    /// default stream while another context of the device is current on the calling thread: that
    /// context's own is meant then, and calls would go to the primary one's.
    ///
    /// # Safety
    ///
    /// `stream` is alive, whatever its context.
    unsafe fn stream_info(&self, stream: RawStream) -> Result<StreamInfo>;
}

/// Copies and fills, in stream order.
///
/// # Safety
///
/// For implementors: nothing but the range that was named is written.
pub unsafe trait GpuCopies {
    /// Copies `len` bytes from host memory to the device.
    ///
    /// # Safety
    ///
    /// `stream` is alive; both ranges are valid for `len` bytes until the copy has finished.
    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        to: DevicePtr,
        from: *const u8,
        len: usize,
    ) -> Result<()>;

    /// Copies `len` bytes from the device to host memory.
    ///
    /// # Safety
    ///
    /// `stream` is alive; both ranges are valid for `len` bytes until the copy has finished.
    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        to: *mut u8,
        from: DevicePtr,
        len: usize,
    ) -> Result<()>;

    /// Copies `len` bytes within device memory.
    ///
    /// # Safety
    ///
    /// `stream` is alive; both ranges are valid for `len` bytes until the copy has finished.
    unsafe fn copy(
        &self,
        stream: RawStream,
        to: DevicePtr,
        from: DevicePtr,
        len: u64,
    ) -> Result<()>;

    /// Sets `len` bytes of device memory to `byte`.
    ///
    /// # Safety
    ///
    /// `stream` is alive; the range is valid for `len` bytes until the fill has finished.
    unsafe fn fill(&self, stream: RawStream, to: DevicePtr, byte: u8, len: u64) -> Result<()>;
}

/// What the driver knows of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StreamInfo {
    /// A number that is never used again in this process.
    pub identity: StreamIdentity,
    /// The device it queues on.
    pub device: DeviceId,
    /// The driver's context (`CUcontext`), or 0 where there is no such thing.
    pub context: u64,
}

/// Refuses a stream whose work goes into a graph.
///
/// # Errors
///
/// [`Error::Capturing`].
pub fn refuse_capture(stream: RawStream, status: CaptureStatus) -> Result<()> {
    match status {
        CaptureStatus::None => Ok(()),
        _ => Err(Error::Capturing {
            stream: stream.handle,
            remedy: "do it before the capture begins or after it ended",
        }),
    }
}

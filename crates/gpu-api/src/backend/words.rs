//! Words in shared memory.

use super::{GpuEvents, GpuStreams, refuse_capture};
#[cfg(doc)]
use crate::{Caps, Error};
use crate::{HostPtr, RawEvent, RawStream, Result, StreamOp, WordPtr};

/// 64-bit words in shared memory that streams write and wait for.
///
/// # Safety
///
/// For implementors: a word that a batch writes changes only after all work queued before it on
/// that stream has finished.
pub unsafe trait GpuWords: GpuStreams + GpuEvents {
    /// Registers `len` bytes of shared memory, so that streams of every device can write and wait
    /// for its words.
    ///
    /// Returns the address of the first word as streams see it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an address or length that is not a multiple of the page size.
    ///
    /// # Safety
    ///
    /// The bytes are mapped, readable and writable, and stay so until `unregister_words`.
    unsafe fn register_words(&self, start: HostPtr, len: usize) -> Result<WordPtr>;

    /// Ends a registration. May block.
    ///
    /// # Safety
    ///
    /// - `start` was registered and is not yet unregistered.
    /// - No operation on its words is unfinished on any stream of this process.
    unsafe fn unregister_words(&self, start: HostPtr) -> Result<()>;

    /// Queues up to [`MAX_BATCH`](crate::MAX_BATCH) operations on registered words, in order.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an empty or longer batch, [`Error::Unsupported`] for a write on a
    /// device without [`Caps::stream_writes`], and for a wait on one without
    /// [`Caps::stream_waits`].
    ///
    /// # Safety
    ///
    /// `stream` is alive, and every word lies in a registration that outlives the operation.
    unsafe fn stream_batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()>;

    /// As [`stream_batch`](GpuWords::stream_batch), for a stream that the application may be
    /// capturing.
    ///
    /// A backend with expensive calls asks and queues in one call.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`] while the stream is being captured: nothing was queued.
    ///
    /// # Safety
    ///
    /// `stream` is alive, and every word lies in a registration that outlives the operation.
    unsafe fn batch_uncaptured(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
        // SAFETY: `capture_status` asks for a live stream: so do we.
        refuse_capture(stream, unsafe { self.capture_status(stream) }?)?;
        // SAFETY: `stream_batch` has our conditions.
        unsafe { self.stream_batch(stream, ops) }
    }

    /// Queues operations on a stream behind what is on others at this moment: records each event on
    /// its stream, lets `stream` wait for it, and queues the batch.
    ///
    /// A backend with expensive calls does all of it in one call.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`] while one of the others is being captured, and as
    /// [`stream_batch`](GpuWords::stream_batch): the batch was not queued, though `stream` may wait
    /// for some of them.
    ///
    /// # Safety
    ///
    /// All streams and events are alive and of one device, and every word lies in a registration
    /// that outlives the operation.
    unsafe fn batch_behind(
        &self,
        stream: RawStream,
        others: &[(RawEvent, RawStream)],
        ops: &[StreamOp],
    ) -> Result<()> {
        for &(event, other) in others {
            // SAFETY: `capture_status` asks for a live stream: so do we.
            refuse_capture(other, unsafe { self.capture_status(other) }?)?;
            // SAFETY: `record_event` asks for both alive and of one device: so do we.
            unsafe { self.record_event(event, other) }?;
            // SAFETY: `stream_wait_event` asks for both alive: so do we.
            unsafe { self.stream_wait_event(stream, event) }?;
        }
        // SAFETY: `stream_batch` has our conditions.
        unsafe { self.stream_batch(stream, ops) }
    }
}

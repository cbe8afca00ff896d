//! Words in shared memory.

#[cfg(doc)]
use crate::{Caps, Error};
use crate::{DeviceId, HostPtr, RawStream, Result, StreamOp, WordPtr};

/// What streams of a device do with words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WordOps {
    /// They write them.
    pub writes: bool,
    /// They wait for them.
    pub waits: bool,
}

/// 64-bit words in shared memory that streams write and wait for.
///
/// # Safety
///
/// For implementors: a word that a batch writes changes only after all work queued before it on
/// that stream has finished.
pub unsafe trait GpuWords {
    /// Says what streams of a device do with words.
    fn word_ops(&self, device: DeviceId) -> Result<WordOps>;

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
}

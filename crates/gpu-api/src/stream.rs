//! Streams, events, and the 64-bit words that order GPU work across processes.

// Tests: `tests/processes/default_stream.rs`, `testing/conformance/src`.

use std::fmt;

use crate::DeviceId;

/// A stream: a device, and what the driver calls the stream there.
///
/// The handles 0 and 1 stand for the legacy default stream and 2 for the calling thread's default
/// stream. Each device has its own, so a handle alone names none: a backend takes those of the
/// primary context of `device`, whatever context or device is current on the calling thread.
///
/// Handles are used again after a stream was destroyed; [`StreamIdentity`] is not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawStream {
    /// The device that it queues on.
    pub device: DeviceId,
    /// The driver's handle (`CUstream`, `hipStream_t`), as a number.
    pub handle: u64,
}

impl RawStream {
    /// The handle of the legacy default stream.
    pub const LEGACY: u64 = 0;
    /// The handle of the calling thread's default stream (`CU_STREAM_PER_THREAD`,
    /// `hipStreamPerThread`).
    pub const PER_THREAD: u64 = 2;

    /// Names a stream of a device by the driver's handle.
    #[must_use]
    pub const fn new(device: DeviceId, handle: u64) -> RawStream {
        RawStream { device, handle }
    }

    /// Says whether every device has a stream of this handle.
    #[must_use]
    pub const fn is_default(self) -> bool {
        self.handle <= RawStream::PER_THREAD
    }

    /// Says whether every thread has a stream of this handle.
    #[must_use]
    pub const fn is_per_thread(self) -> bool {
        self.handle == RawStream::PER_THREAD
    }
}

/// The driver's own number of a stream, never used again in a process (`cuStreamGetId`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[repr(transparent)]
pub struct StreamIdentity(pub u64);

/// An event as the driver hands it out, as a number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(transparent)]
pub struct RawEvent(pub u64);

/// Which processes may wait for an event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum EventKind {
    /// Streams of this process.
    Local,
    /// Streams of any process that opens its handle.
    Interprocess,
}

/// A vendor's handle of an interprocess event: 64 bytes that another process opens.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct EventHandle(pub [u8; 64]);
const _: () = assert!(size_of::<EventHandle>() == 64);

impl fmt::Debug for EventHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventHandle(..)")
    }
}

/// Whether a stream is being captured into a graph.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CaptureStatus {
    /// Work is queued as usual.
    None,
    /// Work goes into a graph and runs when that graph is launched, perhaps more than once.
    Active,
    /// A capture that an error spoilt and that has not been ended.
    Invalidated,
}

/// The address of a registered 64-bit word as streams see it, in this process only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(transparent)]
pub struct WordPtr(pub u64);

impl WordPtr {
    /// Returns the word `index` words further on.
    ///
    /// # Panics
    ///
    /// If the address space ends before: an index that was not checked.
    #[must_use]
    pub fn word(self, index: usize) -> WordPtr {
        let bytes = (index as u64)
            .checked_mul(8)
            .expect("an index inside its registration");
        WordPtr(
            self.0
                .checked_add(bytes)
                .expect("an index inside its registration"),
        )
    }
}

/// The most operations in one batch. CUDA refuses 256 (measured on driver 580).
pub const MAX_BATCH: usize = 255;

/// One operation on a registered word, in stream order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamOp {
    /// Stores `value` once all work queued before has finished and is visible to other processes.
    Write {
        /// Where.
        word: WordPtr,
        /// What.
        value: u64,
    },
    /// Holds up the stream until `(word - value) as i64 >= 0`: CUDA's cyclic, signed comparison.
    WaitGeq {
        /// Where.
        word: WordPtr,
        /// From which value on the stream goes on.
        value: u64,
    },
}

/// Runs a function and lets no panic out. The panic hook has told of it; what it carries may itself
/// panic when it is dropped.
pub fn contain(run: impl FnOnce()) {
    if let Err(payload) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
        std::mem::forget(payload);
    }
}

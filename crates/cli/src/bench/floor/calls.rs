//! The calls that a floor makes.

use crate::failure::Result;
use std::fmt;
use std::os::fd::OwnedFd;

use gpu_ipc::backend::{DevicePtr, MemHandle, RawEvent, RawStream, WordPtr};

/// A region of another process, as a bare program would be told of it.
#[derive(Debug)]
pub enum Foreign {
    /// A file descriptor, and the bytes.
    Fd(OwnedFd, u64),
    /// A vendor's handle.
    Handle(MemHandle),
}

/// Calls that are timed beside ours. Every stream, event and word that they are given is alive.
pub trait Floor: fmt::Debug {
    /// Queues one write of a word.
    fn write(&self, stream: RawStream, word: WordPtr, value: u64) -> Result<()>;

    /// Queues this many writes to one word in one call.
    fn writes(&self, stream: RawStream, word: WordPtr, value: u64, count: usize) -> Result<()>;

    /// Queues a wait for a word.
    fn wait(&self, stream: RawStream, word: WordPtr, value: u64) -> Result<()>;

    /// Records an event.
    fn record(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Queues a wait for an event.
    fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Waits until all that is queued is done.
    fn settle(&self, stream: RawStream) -> Result<()>;

    /// Queues a fill of device memory.
    fn fill(&self, stream: RawStream, to: DevicePtr, len: u64) -> Result<()>;

    /// Queues a kernel that writes the device's time, in nanoseconds, to a word of its memory.
    fn stamp(&self, stream: RawStream, to: DevicePtr) -> Result<()>;

    /// Does something to a stream, and returns the nanoseconds that the stream took for it.
    fn stretch(&self, stream: RawStream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64>;

    /// Maps a region of another process.
    fn open(&self, foreign: &Foreign) -> Result<Opened>;

    /// Unmaps it.
    fn close(&self, opened: Opened) -> Result<()>;
}

/// A region that is mapped.
#[derive(Clone, Copy, Debug)]
pub struct Opened {
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) is_fd: bool,
}

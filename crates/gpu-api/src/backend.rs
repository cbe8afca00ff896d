//! The trait that a vendor implements, and a device of it to work with.

mod devices;
mod events;
mod memory;
mod optional;
mod sharing;
mod streams;
mod words;

use std::fmt;

pub use devices::{GpuDevices, QUARANTINE};
pub use events::GpuEvents;
pub use memory::{GpuHostMemory, GpuMemory, GpuPointers};
pub use optional::{GpuCaptures, GpuEventHandles, GpuHostFunctions, GpuManaged, GpuPeers, Group};
pub use sharing::{GpuDescriptors, GpuHandles};
pub use streams::{GpuCopies, GpuStreams, StreamInfo, refuse_capture};
pub use words::{GpuWords, WordOps};

#[cfg(doc)]
use crate::Caps;
#[cfg(doc)]
use crate::RawStream;
use crate::{DeviceId, Error, GpuPools, GpuRanges, GpuStore};

/// What one GPU vendor provides for sharing memory between processes.
///
/// A backend does what the driver does and nothing else: it keeps no counts, caches nothing, never
/// retries and never decides when to free. Leases and limbo live in `ipc-rc`, sub-allocation in
/// `allocators`; both see only this trait. Its arguments and results are plain data, so one process
/// can hold several vendors at once.
///
/// ```text
/// producer  alloc ─► export ┄┄┄ write words in stream order ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄► free
/// consumer                  open / import ─► wait for words ─► use ─► record ─► wait ─► write ─► close
/// ```
///
/// # Calls under an application's stream capture
///
/// A backend makes every call in the driver's *relaxed* capture mode on the calling thread and
/// restores the mode afterwards, so that no call of ours destroys a capture that the application
/// has under way. It also leaves the thread's current context as it found it.
///
/// # Streams
///
/// A [`RawStream`] brings its device, and only the device's primary context counts: a call resolves
/// the default streams there, never in what is current on the calling thread. A stream of another
/// context is found by [`stream_info`](GpuStreams::stream_info), which is asked once, before
/// anything else is done with a stream that other code made; so "the stream is alive" below means:
/// and `stream_info` took it. [`RawStream::PER_THREAD`] is another stream on every thread: each
/// call means the calling thread's.
///
/// # Portability
///
/// - Opening a handle in the process that exported it is refused by CUDA and HIP, and so by the
///   host backend.
/// - `close`, `free`, `host_free` and `unregister_words` may block while any stream of the process
///   waits for a word (measured on CUDA), or for the whole device (HIP). Call them on a thread that
///   may block.
/// - An event of a process that died never completes (measured on CUDA). No fence rests on one.
///
/// # Errors
///
/// Every method gives [`Error::Driver`] for a code that the driver returned; what else it gives is
/// said there. After an `Err` from a method that acquires something, nothing was acquired. After an
/// `Err` from one that gives something back nobody knows whether it was given back: leak it, never
/// give it back twice.
///
/// # Groups
///
/// Each group is an `unsafe` trait of its own, which says what safe code relies on. What every device
/// must have is a supertrait. What a device may lack has an accessor, which gives `None` where the
/// device lacks it; [`Caps`] is derived from the accessors, so it cannot disagree with them.
/// `docs/BACKENDS.md` has the order in which to write one.
pub trait GpuBackend:
    GpuDevices
    + GpuMemory
    + GpuPointers
    + GpuHostMemory
    + GpuEvents
    + GpuStreams
    + GpuCopies
    + GpuWords
    + fmt::Debug
    + Send
    + Sync
    + 'static
{
    /// Returns the calls that share memory of a device by handle.
    fn handles(&self, device: DeviceId) -> Option<&dyn GpuHandles>;

    /// Returns the calls that share memory of a device by file descriptor.
    fn descriptors(&self, device: DeviceId) -> Option<&dyn GpuDescriptors>;

    /// Returns the calls that share events of a device.
    fn event_handles(&self, device: DeviceId) -> Option<&dyn GpuEventHandles>;

    /// Returns the calls about a device's physical memory.
    fn store(&self, device: DeviceId) -> Option<&dyn GpuStore>;

    /// Returns the calls that map a device's physical memory where the caller says.
    fn ranges(&self, device: DeviceId) -> Option<&dyn GpuRanges>;

    /// Returns the calls about the driver's pools on a device.
    fn pools(&self, device: DeviceId) -> Option<&dyn GpuPools>;

    /// Returns the calls for managed memory that a device and the host may touch at once.
    fn managed(&self, device: DeviceId) -> Option<&dyn GpuManaged>;

    /// Returns the calls that open ways to a device's peers.
    fn peers(&self, device: DeviceId) -> Option<&dyn GpuPeers>;

    /// Returns the calls that queue functions on streams of a device.
    fn host_functions(&self, device: DeviceId) -> Option<&dyn GpuHostFunctions>;

    /// Returns the calls about captures; `None` where no stream of a device can be captured.
    fn captures(&self, device: DeviceId) -> Option<&dyn GpuCaptures>;

    /// Says why a device lacks a group, and what to do.
    fn lacks(&self, group: Group, device: DeviceId) -> Error;
}

// Object-safe on purpose: one process may hold several vendors at once.
const _: Option<&dyn GpuBackend> = None;

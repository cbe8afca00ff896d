//! What only some devices have, each group behind an accessor of [`GpuBackend`].
//!
//! An accessor that gives `None` is the only way in which a group is absent.

#[cfg(doc)]
use super::{GpuBackend, GpuDescriptors, GpuHandles};
use crate::{
    Allocation, CaptureStatus, DeviceId, Error, EventHandle, RawEvent, RawStream, Result, StreamOp,
};
#[cfg(doc)]
use crate::{GpuPools, GpuRanges, GpuStore};

/// A group of calls that a device may lack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Group {
    /// [`GpuHandles`].
    Handles,
    /// [`GpuDescriptors`].
    Descriptors,
    /// [`GpuEventHandles`].
    EventHandles,
    /// [`GpuStore`].
    Store,
    /// [`GpuRanges`].
    Ranges,
    /// [`GpuPools`].
    Pools,
    /// [`GpuManaged`].
    Managed,
    /// [`GpuPeers`].
    Peers,
    /// [`GpuHostFunctions`].
    HostFunctions,
}

impl Group {
    /// Returns what is asked for with it, for an error.
    pub const fn what(self) -> &'static str {
        match self {
            Group::Handles => "memory that is shared by handle",
            Group::Descriptors => "memory that is shared by file descriptor",
            Group::EventHandles => "an interprocess event",
            Group::Store | Group::Ranges => "memory apart from addresses",
            Group::Pools => "a pool of the driver's",
            Group::Managed => "managed memory",
            Group::Peers => "peer access",
            Group::HostFunctions => "a host function on a stream",
        }
    }

    /// Makes the error of a backend that has nothing more to say.
    pub fn absent(self, backend: crate::BackendKind, device: DeviceId) -> Error {
        Error::unsupported(
            self.what(),
            format!("the {backend} backend has none on {device}"),
            "ask `Caps` first, or choose another device or backend",
        )
    }
}

/// Interprocess events.
///
/// # Safety
///
/// For implementors: what a handle opens is the event that it was made for.
pub unsafe trait GpuEventHandles {
    /// Gets the handle of an interprocess event.
    ///
    /// # Safety
    ///
    /// `event` is alive.
    unsafe fn event_handle(&self, event: RawEvent) -> Result<EventHandle>;

    /// Opens another process' event. Its owner must not have destroyed it.
    fn open_event(&self, device: DeviceId, handle: &EventHandle) -> Result<RawEvent>;
}

/// Managed memory, which the driver moves between the host and the device that touches it, and which
/// both may touch at once.
///
/// # Safety
///
/// For implementors: `alloc_managed` returns memory that overlaps nothing that is not yet freed.
pub unsafe trait GpuManaged {
    /// Allocates managed memory; there may be more of it than the device has.
    /// [`GpuMemory::free`](crate::GpuMemory::free) gives it back.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] when the driver has no room, [`Error::Invalid`] for a length of zero.
    fn alloc_managed(&self, device: DeviceId, len: u64) -> Result<Allocation>;
}

/// Direct ways between devices.
///
/// # Safety
///
/// For implementors: after a success `device` reaches the memory of `peer` that the trait names.
pub unsafe trait GpuPeers {
    /// Lets `device` reach memory of `peer` directly. Enabling it twice is no error.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the two have no direct way to each other, and where memory of
    /// the peer is mapped that `device` would not reach.
    ///
    /// # Portability
    ///
    /// Another process' memory is reached if it was imported by file descriptor. Memory that was
    /// opened by a 64-byte handle is reached from the device that it was opened on alone: a kernel
    /// of another device faults on it, whether access was enabled before or after (CUDA, driver
    /// 580, measured on two H200). On AMD it is the other way round, by its sources: a handle maps
    /// memory for every device, a dma-buf for the one that imported it, and a backend refuses the
    /// pair.
    fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<()>;
}

/// Functions that streams call.
///
/// # Safety
///
/// For implementors: the function is called at most once, after all work queued before it.
pub unsafe trait GpuHostFunctions {
    /// Queues a call of `function` on a thread of the driver's; the stream waits for it. A panic
    /// ends in the call. A function that calls the driver may fail there or never return.
    ///
    /// # Safety
    ///
    /// - `stream` is alive.
    /// - No thread begins to capture it during the call: what goes into a graph may be called more
    ///   than once, and the function cannot.
    unsafe fn host_function(
        &self,
        stream: RawStream,
        function: Box<dyn FnOnce() + Send>,
    ) -> Result<()>;
}

/// Streams whose work may go into a graph.
///
/// # Safety
///
/// For implementors: `capture_status` is true of the stream at that moment, and the batches queue
/// nothing on a stream that is being captured.
pub unsafe trait GpuCaptures {
    /// Says whether the stream is being captured into a graph.
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus>;

    /// As [`stream_batch`](crate::GpuWords::stream_batch), for a stream that the application may be
    /// capturing: asks and queues, in one call where calls are expensive.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`] while the stream is being captured: nothing was queued.
    ///
    /// # Safety
    ///
    /// `stream` is alive, and every word lies in a registration that outlives the operation.
    unsafe fn batch_uncaptured(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()>;

    /// Queues operations on a stream behind what is on others at this moment: records each event on
    /// its stream, lets `stream` wait for it, and queues the batch.
    ///
    /// # Errors
    ///
    /// [`Error::Capturing`] while one of the others is being captured, and as
    /// [`stream_batch`](crate::GpuWords::stream_batch): the batch was not queued, though `stream`
    /// may wait for some of them.
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
    ) -> Result<()>;
}

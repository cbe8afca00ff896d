//! What differs from one CUDA-shaped driver to the next.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use gpu_api::{
    AddressRange, BackendKind, Caps, DeviceId, DevicePtr, DeviceUuid, DriverError, Error,
    MemHandle, PointerInfo, RawStream, Result, StreamInfo, StreamOp,
};

use crate::calls::{MemoryHandle, Stream};
use crate::code::Code;
use crate::driver::{Backend, Driver};
use crate::given::Given;
use crate::scope::Scope;

/// What one version of a driver does otherwise than the next, as data: a backend has one table of
/// them, each with the report or the source line that it rests on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Quirks {
    /// The flag without which no handle is opened (`cuIpcMemLazyEnablePeerAccess`).
    pub open_flags: u32,
    /// The question that [`granularity`](crate::calls::Calls::granularity) is asked: 0 for the
    /// minimum, 1 for what is recommended.
    pub granularity_flag: u32,
    /// What every allocation is rounded up to at least.
    pub least_granularity: u64,
    /// The handle of physical memory is kept for as long as it is mapped: not every driver keeps
    /// the memory for the mapping's sake alone, or gives the handle again.
    pub keeps_handles: bool,
    /// An import takes a descriptor's number in place of an address; else the address of one.
    pub imports_by_value: bool,
    /// The driver keeps the number of an imported descriptor, and reads it again.
    pub keeps_descriptors: bool,
    /// A mapping that fails is an error, and what is not mapped can be unmapped with an error.
    pub tells_failed_mappings: bool,
    /// The driver maps as many bytes as it is told, whatever a descriptor has.
    pub maps_unchecked: bool,
    /// Destroying a stream waits for all that is queued on it.
    pub destroy_waits: bool,
}

/// How file descriptors of a device's memory are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Descriptor {
    /// From virtual memory.
    Vmm,
    /// From plain memory, as a dma-buf.
    DmaBuf,
}

/// What a vendor calls things, for errors.
#[derive(Clone, Copy, Debug)]
pub struct Words {
    /// What to see for the ways between devices.
    pub topology: &'static str,
}

/// Plain memory that travels as a dma-buf.
pub trait DmaBuf {
    /// Exports an allocation.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn export(&self, device: DeviceId, base: DevicePtr, len: u64) -> Result<OwnedFd>;

    /// Maps another process' allocation; returns its base and what the mapping rests on.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a descriptor that the driver refuses, and the driver's.
    fn import(&self, device: DeviceId, given: &Given, len: u64) -> Result<(u64, usize)>;

    /// Unmaps it.
    ///
    /// # Errors
    ///
    /// The driver's.
    ///
    /// # Safety
    ///
    /// `import` gave both, once, and no unfinished GPU work touches the memory.
    unsafe fn close(&self, device: DeviceId, base: DevicePtr, object: usize) -> Result<()>;
}

/// A vendor's driver: what [`Backend`](crate::Backend) calls where drivers differ.
///
/// Methods without a body are what no two drivers do alike; none has state of its own beyond the
/// vendor's. Read with `backend-cuda` beside it.
pub trait Vendor: fmt::Debug + Send + Sync + Sized + 'static {
    /// The vendor.
    const KIND: BackendKind;
    /// The backend's name in debug output.
    const NAME: &'static str;
    /// What it calls things.
    const WORDS: Words;

    /// What a scope changed on the calling thread.
    type Thread: Default;

    /// Loads the driver and starts it.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] with what is missing and what to do about it.
    fn load() -> Result<Self>;

    /// Ends the backend, which is being dropped.
    fn end(backend: &Backend<Self>);

    /// Returns the calls and the tables.
    fn driver(&self) -> &Driver;

    /// Returns what this version does otherwise.
    fn quirks(&self) -> &Quirks;

    /// Names a code the way the driver does.
    fn code(&self, code: Code) -> DriverError;

    /// Makes the error of a driver that lacks a function.
    fn missing(&self, name: &'static str) -> Error;

    /// Makes the error of what a device does not have, or is not known to do right.
    fn unsupported(&self, what: &'static str, device: DeviceId) -> Error;

    /// Says what may hold memory that nothing uses.
    fn out_of_memory_hint(&self) -> &'static str;

    /// Makes a device current.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a device that is none, and the driver's.
    fn on_device(&self, device: DeviceId) -> Result<Scope<'_, Self>>;

    /// Makes any device current: for calls about addresses, which are the same on all of them.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn anywhere(&self) -> Result<Scope<'_, Self>>;

    /// Makes ready for calls that queue on a stream and take what they need from it.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn beside_stream(&self, stream: RawStream) -> Result<Scope<'_, Self>> {
        self.on_device(stream.device)
    }

    /// Makes ready to ask whether a stream is captured.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn asking_stream(&self, stream: RawStream) -> Result<Scope<'_, Self>> {
        self.on_device(stream.device)
    }

    /// Makes ready for calls about physical memory, which need no context.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn without_context(&self, device: DeviceId) -> Result<Scope<'_, Self>> {
        self.on_device(device)
    }

    /// Puts back what a scope changed on the calling thread.
    fn leave(&self, thread: &mut Self::Thread);

    /// Is called after each call that failed.
    fn failed(&self) {}

    /// Returns the device that the thread is on.
    fn current_device(&self, scope: &Scope<'_, Self>) -> Option<DeviceId>;

    /// Counts the devices.
    fn count(&self) -> usize;

    /// Returns the driver's own number of a device.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a device that is none.
    fn ordinal(&self, device: DeviceId) -> Result<c_int>;

    /// Finds our number of a device by the driver's.
    fn numbered(&self, ordinal: c_int) -> Option<DeviceId>;

    /// Returns what identifies a device in every process.
    ///
    /// # Errors
    ///
    /// The driver's, and [`Error::Unsupported`] for a device that cannot be told from another.
    fn uuid(&self, device: DeviceId) -> Result<DeviceUuid>;

    /// Returns where a device lies on the PCI bus.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn pci_address(&self, device: DeviceId) -> Result<Option<String>>;

    /// Returns the host's NUMA node that a device is closest to.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn host_numa_node(&self, device: DeviceId) -> Result<Option<u32>>;

    /// Says what a device can do.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn caps(&self, device: DeviceId) -> Result<Caps>;

    /// Says how file descriptors of a device's memory are made, if at all.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn descriptor(&self, device: DeviceId) -> Result<Option<Descriptor>>;

    /// Says whether a device's physical memory can be mapped where the caller says.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where it cannot.
    fn require_ranges(&self, device: DeviceId) -> Result<()>;

    /// Says whether a device has pools that are right.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where it has not.
    fn require_pools(&self, device: DeviceId) -> Result<()>;

    /// Names the files that keep a process' GPU work alive.
    fn device_files(&self) -> &[&'static str];

    /// Names files that are there for as long as GPU work of a process may run.
    fn signs_of_life(&self, pid: u32) -> Vec<PathBuf>;

    /// Returns for how long GPU work may go on after all signs of a process' life are gone.
    fn quarantine(&self) -> Duration;

    /// Opens the way from the scope's device to the memory of a peer.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where something on the device would not be reached.
    fn open_way(&self, scope: &Scope<'_, Self>, peer: DeviceId) -> Result<(&'static str, Code)>;

    /// Says whether another process' events may be opened.
    fn opens_events(&self) -> bool {
        true
    }

    /// Turns a stream's handle into what the driver takes.
    fn stream(raw: RawStream) -> Stream;

    /// Says what the driver knows of a stream.
    ///
    /// # Errors
    ///
    /// As [`GpuStreams::stream_info`](gpu_api::GpuStreams::stream_info).
    ///
    /// # Safety
    ///
    /// `stream` is alive.
    unsafe fn stream_info(&self, stream: RawStream) -> Result<StreamInfo>;

    /// Queues a function, where `stream_call` is missing: [`queued::run`](crate::queued::run), or
    /// [`queued::discard`](crate::queued::discard) after an error, is to be called with `queued`.
    ///
    /// # Errors
    ///
    /// The driver's.
    ///
    /// # Safety
    ///
    /// `stream` is alive, and `queued` is for one call.
    unsafe fn call_back(
        &self,
        scope: &Scope<'_, Self>,
        stream: RawStream,
        queued: *mut c_void,
    ) -> Result<()>;

    /// Makes what destroys a stream on another thread, where that
    /// [waits](Quirks::destroy_waits) for the stream's work.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a function that the driver lacks.
    fn destroying(&self, stream: RawStream) -> Result<Box<dyn FnOnce() + Send>>;

    /// Queues operations on words, in order.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for an operation that the device does not have.
    ///
    /// # Safety
    ///
    /// `stream` is alive, the scope is its own, and every word lies in a registration that outlives
    /// the operation.
    unsafe fn queue_words(
        &self,
        scope: &Scope<'_, Self>,
        stream: RawStream,
        ops: &[StreamOp],
    ) -> Result<()>;

    /// Says what memory is that this backend did not make.
    ///
    /// # Errors
    ///
    /// The driver's.
    fn classify(&self, scope: &Scope<'_, Self>, ptr: DevicePtr) -> Result<PointerInfo>;

    /// Says why memory of a kind cannot be exported, and what to change.
    fn refusal(&self, info: &PointerInfo) -> (&'static str, &'static str);

    /// Gets the handle of plain memory.
    ///
    /// # Errors
    ///
    /// As [`GpuHandles::export_handle`](gpu_api::GpuHandles::export_handle).
    fn export_handle(&self, base: DevicePtr) -> Result<MemHandle>;

    /// Opens a handle: its base and how much the driver says lies there.
    ///
    /// # Errors
    ///
    /// As [`GpuHandles::open_handle`](gpu_api::GpuHandles::open_handle).
    fn open_handle(&self, device: DeviceId, handle: &MemHandle) -> Result<AddressRange>;

    /// Is called when memory has left the table and not yet the driver.
    fn forgotten(&self, base: DevicePtr) {
        let _ = base;
    }

    /// Refuses a handle that was imported and is of no device's memory.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`].
    fn check_imported(&self, scope: &Scope<'_, Self>, handle: MemoryHandle) -> Result<()> {
        let _ = (scope, handle);
        Ok(())
    }

    /// Returns the calls for plain memory as a dma-buf; `None` on a driver without them.
    fn dma_buf(&self) -> Option<&dyn DmaBuf>;

    /// Allocates managed memory of a whole number of granules.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] on a driver without it.
    fn alloc_managed(&self, device: DeviceId, size: u64) -> Result<DevicePtr>;
}

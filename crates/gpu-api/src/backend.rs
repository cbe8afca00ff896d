//! The trait that a vendor implements, and a device of it to work with.

mod devices;
mod events;
mod memory;
mod optional;
mod sharing;
mod streams;
mod words;

use std::fmt;
use std::sync::Arc;

pub use devices::{GpuDevices, QUARANTINE};
pub use events::GpuEvents;
pub use memory::{GpuHostMemory, GpuMemory, GpuPointers};
pub use optional::{GpuCaptures, GpuEventHandles, GpuHostFunctions, GpuManaged, GpuPeers, Group};
pub use sharing::{GpuDescriptors, GpuHandles};
pub use streams::{GpuCopies, GpuStreams, StreamInfo, refuse_capture};
pub use words::{GpuWords, WordOps};

#[cfg(doc)]
use crate::RawStream;
use crate::guarded::{DEVICE, Guarded};
use crate::{
    BackendKind, Caps, DeviceId, DeviceInfo, DeviceUuid, Error, ForkGuard, GpuPools, GpuRanges,
    GpuStore, Result, Sharing,
};

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

/// One device of one backend. Sessions, participants and allocators are opened on it.
///
/// Cheap to clone. `gpu_ipc::detect` finds those of a machine.
///
/// It belongs to the process that made it. In a forked child every call of its
/// [`backend`](Gpu::backend) that can fail gives [`Error::Forked`] before any lock, and so does all
/// that is made with it.
///
/// # Examples
///
/// ```
/// use gpu_api::{BackendKind, Gpu};
///
/// fn describe(gpu: &Gpu) -> String {
///     let place = if gpu.kind() == BackendKind::Host { "in host memory" } else { "a GPU" };
///     let access = if gpu.caps().read_only { "consumers can map read-only" } else { "consumers can write" };
///     format!("{} ({place}), {} bytes; {access}", gpu.info().name, gpu.info().total_bytes)
/// }
/// # let _ = describe;
/// ```
#[derive(Clone)]
pub struct Gpu {
    /// What [`key`](Gpu::key) points to, behind the guard.
    backend: Arc<dyn GpuBackend>,
    key: usize,
    fork: ForkGuard,
    info: Arc<DeviceInfo>,
    caps: Caps,
}

/// Shows the device alone: its backend knows every allocation.
impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut gpu = f.debug_struct("Gpu");
        gpu.field("kind", &self.kind())
            .field("device", &self.info.device.0);
        gpu.field("uuid", &format_args!("{}", self.info.uuid))
            .field("name", &self.info.name)
            .finish_non_exhaustive()
    }
}

/// Equal if they are one device by one backend object: handles of one mean the same to the other.
impl PartialEq for Gpu {
    fn eq(&self, other: &Gpu) -> bool {
        self.key == other.key && self.info.device == other.info.device
    }
}

impl Eq for Gpu {}

impl Gpu {
    /// Takes a device of a backend, and asks once for its description and capabilities.
    ///
    /// # Errors
    ///
    /// What [`GpuDevices::device_info`], [`GpuDevices::caps`] and [`ForkGuard::new`] give.
    pub fn new(backend: Arc<dyn GpuBackend>, device: DeviceId) -> Result<Gpu> {
        let fork = ForkGuard::new()?;
        let info = Arc::new(backend.device_info(device)?);
        let caps = Caps::of(&*backend, device)?;
        let key = Arc::as_ptr(&backend).cast::<()>().addr();
        Ok(Gpu {
            backend: Arc::new(Guarded { backend, fork }),
            key,
            fork,
            info,
            caps,
        })
    }

    /// Finds the device with this identity, whatever its number is in this process.
    ///
    /// # Errors
    ///
    /// [`Error::NoDevice`] when this process cannot see it.
    pub fn with_uuid(backend: Arc<dyn GpuBackend>, uuid: DeviceUuid) -> Result<Gpu> {
        for ordinal in 0..backend.device_count()? {
            if backend.device_info(DeviceId(ordinal))?.uuid == uuid {
                return Gpu::new(backend, DeviceId(ordinal));
            }
        }
        Err(Error::NoDevice {
            backend: backend.kind(),
            uuid,
        })
    }

    /// Fails in a forked child of the process that made this.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`].
    #[inline]
    pub fn check_fork(&self) -> Result<()> {
        self.fork.check(DEVICE)
    }

    /// Tells the backend object from every other that lives: all devices of one have the same.
    pub fn key(&self) -> usize {
        self.key
    }

    /// Returns the backend, which refuses the calls of a forked child.
    pub fn backend(&self) -> &Arc<dyn GpuBackend> {
        &self.backend
    }

    /// Names the vendor.
    pub fn kind(&self) -> BackendKind {
        self.backend.kind()
    }

    /// Returns the device's number in this process.
    pub fn device(&self) -> DeviceId {
        self.info.device
    }

    /// Returns the device's identity in every process.
    pub fn uuid(&self) -> DeviceUuid {
        self.info.uuid
    }

    /// Describes the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Says what the device can do.
    pub fn caps(&self) -> &Caps {
        &self.caps
    }

    /// Returns the default way of sharing regions: by file descriptor where the device can, else by
    /// handle.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] on a device that can do neither.
    pub fn default_sharing(&self) -> Result<Sharing> {
        if self.caps.fd {
            Ok(Sharing::Fd)
        } else if self.caps.handle {
            Ok(Sharing::Handle)
        } else {
            Err(Error::Unsupported {
                what: "sharing memory with another process",
                why: format!(
                    "{} ({}) exports neither file descriptors nor handles",
                    self.info.name, self.info.device
                ),
                remedy: "run `gpu-ipc doctor` for the reason, or choose another device",
            })
        }
    }
}

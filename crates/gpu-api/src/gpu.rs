//! One device of a backend, and what it can do.

use std::fmt;
use std::sync::Arc;

use crate::backend::GpuBackend;
#[cfg(doc)]
use crate::backend::GpuDevices;
use crate::guarded::{DEVICE, Guarded};
use crate::{
    BackendKind, Caps, DeviceId, DeviceInfo, DeviceUuid, Error, ForkGuard, Result, Sharing,
};

impl Caps {
    /// Asks a backend what a device can do: what its accessors give.
    ///
    /// # Errors
    ///
    /// The driver's, for a device that is none or does not answer.
    pub fn of(backend: &dyn GpuBackend, device: DeviceId) -> Result<Caps> {
        let (granularity, words) = (backend.granularity(device)?, backend.word_ops(device)?);
        let descriptors = backend.descriptors(device);
        Ok(Caps {
            handle: backend.handles(device).is_some(),
            fd: descriptors.is_some(),
            read_only: descriptors.map_or(Ok(false), |calls| calls.maps_read_only(device))?,
            event_ipc: backend.event_handles(device).is_some(),
            stream_writes: words.writes,
            stream_waits: words.waits,
            ranges: backend.store(device).is_some() && backend.ranges(device).is_some(),
            pools: backend.pools(device).is_some(),
            managed: backend.managed(device).is_some(),
            shared_context: backend.shared_context(device)?,
            granularity,
        })
    }
}

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
///     let place = if gpu.kind().in_host_memory() { "in host memory" } else { "a GPU" };
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
    /// What [`GpuDevices::device_info`], [`Caps::of`] and [`ForkGuard::new`] give.
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
            Err(Error::unsupported(
                "sharing memory with another process",
                format!(
                    "{} ({}) exports neither file descriptors nor handles",
                    self.info.name, self.info.device
                ),
                "run `gpu-ipc doctor` for the reason, or choose another device",
            ))
        }
    }
}

//! Finds out what this process can use, and why not the rest.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use gpu_api::{BackendKind, DeviceId, DeviceUuid, Error, ForkGuard, Gpu, GpuBackend, Result};

/// What [`detect`] or [`detect_only`] found.
pub struct Detected {
    backends: Vec<Arc<dyn GpuBackend>>,
    gpus: Vec<Gpu>,
    failing: Vec<(BackendKind, DeviceId, Error)>,
    missing: Vec<(BackendKind, Error)>,
    fork: ForkGuard,
}

impl fmt::Debug for Detected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gpus: Vec<_> = self
            .gpus
            .iter()
            .map(|gpu| (gpu.kind(), gpu.device().0))
            .collect();
        let missing: Vec<BackendKind> = self.missing.iter().map(|(kind, _)| *kind).collect();
        let mut detected = f.debug_struct("Detected");
        detected
            .field("gpus", &gpus)
            .field("failing", &self.failing.len())
            .field("missing", &missing)
            .finish_non_exhaustive()
    }
}

/// Finds every device of every backend that is compiled in and usable, and says of the others why
/// not.
///
/// # Errors
///
/// [`Error::Invalid`] when an environment variable of the host backend is wrong.
///
/// # Examples
///
/// ```
/// let found = gpu_ipc::detect()?;
/// for gpu in found.gpus() {
///     println!("{} {}: {}", gpu.kind(), gpu.device(), gpu.info().name);
/// }
/// for (backend, why) in found.missing() {
///     println!("no {backend}: {why}");
/// }
/// # Ok::<(), gpu_ipc::Error>(())
/// ```
pub fn detect() -> Result<Detected> {
    look_for(&BackendKind::ALL)
}

/// Finds every device of one backend, and opens no driver but that one's.
///
/// [`detect`] loads every driver that is compiled in, which costs time and memory in a process that
/// needs one.
///
/// # Errors
///
/// As [`detect`].
///
/// # Examples
///
/// ```
/// use gpu_ipc::BackendKind;
/// use gpu_ipc::backend::detect_only;
/// let gpu = detect_only(BackendKind::Host)?.first(BackendKind::Host)?;
/// assert_eq!(gpu.kind(), BackendKind::Host);
/// # Ok::<(), gpu_ipc::Error>(())
/// ```
pub fn detect_only(kind: BackendKind) -> Result<Detected> {
    look_for(&[kind])
}

/// The backends of one process: each is loaded when it is first asked for. Sessions and
/// participants that use the same one know each other's streams.
///
/// A forked child is refused its parent's: it makes its own.
///
/// # Examples
///
/// ```
/// use gpu_ipc::BackendKind;
/// use gpu_ipc::backend::Backends;
///
/// let backends = Backends::default();
/// let (one, other) = (backends.get(BackendKind::Host)?, backends.get(BackendKind::Host)?);
/// assert!(std::sync::Arc::ptr_eq(&one, &other));
/// # Ok::<(), gpu_ipc::Error>(())
/// ```
pub struct Backends {
    loaded: Mutex<Vec<Arc<dyn GpuBackend>>>,
    /// `None` where forked children cannot be told apart: each call says why.
    fork: Option<ForkGuard>,
}

impl Default for Backends {
    fn default() -> Backends {
        Backends {
            loaded: Mutex::default(),
            fork: ForkGuard::new().ok(),
        }
    }
}

impl Backends {
    /// Returns the backend of a kind.
    ///
    /// # Errors
    ///
    /// Why it cannot be used; the next call tries again. [`Error::Forked`] in a forked child of the
    /// process that made this.
    pub fn get(&self, kind: BackendKind) -> Result<Arc<dyn GpuBackend>> {
        let fork = self.fork.map_or_else(ForkGuard::new, Ok)?;
        fork.check("this list of backends")?;
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(backend) = loaded.iter().find(|backend| backend.kind() == kind) {
            return Ok(backend.clone());
        }
        let backend = detect_only(kind)?.backend(kind)?;
        loaded.push(backend.clone());
        Ok(backend)
    }
}

impl fmt::Debug for Backends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backends").finish_non_exhaustive()
    }
}

fn look_for(kinds: &[BackendKind]) -> Result<Detected> {
    let fork = ForkGuard::new()?;
    let mut found = Detected {
        backends: Vec::new(),
        gpus: Vec::new(),
        failing: Vec::new(),
        missing: Vec::new(),
        fork,
    };
    for &kind in kinds {
        match open(kind) {
            // A driver that loads but cannot tell of its devices must not take the others down.
            Ok(backend) => match backend.device_count() {
                Ok(count) => {
                    found.look_at(&backend, count);
                    found.backends.push(backend);
                }
                Err(error) => found.missing.push((kind, error)),
            },
            Err(error @ Error::Invalid { .. }) => return Err(error),
            Err(error) => found.missing.push((kind, error)),
        }
    }
    Ok(found)
}

fn open(kind: BackendKind) -> Result<Arc<dyn GpuBackend>> {
    match kind {
        BackendKind::Host => compiled::host(),
        BackendKind::Cuda => compiled::cuda(),
        BackendKind::Hip => compiled::hip(),
        backend => Err(Error::NotCompiled { backend }),
    }
}

/// The vendors, each as this build has it.
mod compiled {
    use super::*;

    cfg_if::cfg_if! {
        if #[cfg(feature = "host")] {
            pub fn host() -> Result<Arc<dyn GpuBackend>> {
                Ok(backend_host::HostBackend::new(backend_host::HostConfig::from_env()?)?)
            }
        } else {
            pub fn host() -> Result<Arc<dyn GpuBackend>> {
                Err(Error::NotCompiled { backend: BackendKind::Host })
            }
        }
    }
    cfg_if::cfg_if! {
        if #[cfg(feature = "cuda")] {
            pub fn cuda() -> Result<Arc<dyn GpuBackend>> {
                Ok(backend_cuda::CudaBackend::load()?)
            }
        } else {
            pub fn cuda() -> Result<Arc<dyn GpuBackend>> {
                Err(Error::NotCompiled { backend: BackendKind::Cuda })
            }
        }
    }
    cfg_if::cfg_if! {
        if #[cfg(feature = "hip")] {
            pub fn hip() -> Result<Arc<dyn GpuBackend>> {
                Ok(backend_hip::HipBackend::load()?)
            }
        } else {
            pub fn hip() -> Result<Arc<dyn GpuBackend>> {
                Err(Error::NotCompiled { backend: BackendKind::Hip })
            }
        }
    }
}

/// Says whether the kernel shows a GPU of this vendor, whatever its libraries do.
fn shows_hardware(kind: BackendKind) -> bool {
    let files = kind.driver_files();
    files.iter().any(|file| Path::new(file).exists())
}

impl Detected {
    /// Takes the devices of a backend that work, and notes of the others why they do not.
    fn look_at(&mut self, backend: &Arc<dyn GpuBackend>, count: u32) {
        for device in (0..count).map(DeviceId) {
            match Gpu::new(backend.clone(), device) {
                Ok(gpu) => self.gpus.push(gpu),
                Err(error) => self.failing.push((backend.kind(), device, error)),
            }
        }
    }

    /// Lists the devices that work, GPUs first.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// Lists the devices that a driver counts and that do not work, each with the reason.
    pub fn failing(&self) -> &[(BackendKind, DeviceId, Error)] {
        &self.failing
    }

    /// Returns the devices that work.
    ///
    /// # Errors
    ///
    /// Why a GPU that this machine shows cannot be used, if no other can and nobody asked for host
    /// devices: what is meant for a GPU must not end up in shared memory unsaid.
    pub(crate) fn into_gpus(self) -> Result<Vec<Gpu>> {
        let host_is_wanted = std::env::var_os("GPU_IPC_HOST_DEVICES").is_some();
        self.gpus_unless(host_is_wanted, shows_hardware)
    }

    fn gpus_unless(
        self,
        host_is_wanted: bool,
        shows: impl Fn(BackendKind) -> bool,
    ) -> Result<Vec<Gpu>> {
        if host_is_wanted || self.gpus.iter().any(|gpu| !gpu.kind().in_host_memory()) {
            return Ok(self.gpus);
        }
        let failing = self
            .failing
            .into_iter()
            .map(|(kind, _, error)| (kind, error));
        let missing = self
            .missing
            .into_iter()
            .filter(|(kind, error)| !matches!(error, Error::NotCompiled { .. }) && shows(*kind));
        match failing
            .chain(missing)
            .find(|(kind, _)| !kind.in_host_memory())
        {
            Some((_, error)) => Err(error),
            None => Ok(self.gpus),
        }
    }

    /// Lists the backends that cannot be used, each with the reason.
    pub fn missing(&self) -> &[(BackendKind, Error)] {
        &self.missing
    }

    /// Returns a backend; one that was not found is tried once more, for the reason or because
    /// nobody asked for it.
    ///
    /// # Errors
    ///
    /// [`Error::NotCompiled`] or [`Error::Unavailable`], as [`missing`](Detected::missing) has it;
    /// [`Error::Forked`] in a forked child of the process that detected.
    pub fn backend(&self, kind: BackendKind) -> Result<Arc<dyn GpuBackend>> {
        self.fork.check("what was detected")?;
        match self.backends.iter().find(|backend| backend.kind() == kind) {
            Some(backend) => Ok(backend.clone()),
            None => open(kind),
        }
    }

    /// Returns the device with this identity.
    ///
    /// # Errors
    ///
    /// As [`backend`](Detected::backend), and [`Error::NoDevice`].
    pub fn device(&self, kind: BackendKind, uuid: DeviceUuid) -> Result<Gpu> {
        Gpu::with_uuid(self.backend(kind)?, uuid)
    }

    /// Returns a backend's first device that works.
    ///
    /// # Errors
    ///
    /// As [`backend`](Detected::backend), [`Error::Unavailable`] when it has no device, and the
    /// first device's own error when none works.
    pub fn first(&self, kind: BackendKind) -> Result<Gpu> {
        self.fork.check("what was detected")?;
        if let Some(gpu) = self.gpus.iter().find(|gpu| gpu.kind() == kind) {
            return Ok(gpu.clone());
        }
        let backend = self.backend(kind)?;
        if backend.device_count()? == 0 {
            return Err(Error::Unavailable {
                backend: kind,
                why: "it has no device".into(),
                remedy: kind.no_device_remedy(),
            });
        }
        Gpu::new(backend, DeviceId(0))
    }
}

#[cfg(all(test, feature = "host"))]
mod tests {
    use backend_host::{HostBackend, HostConfig};

    use super::*;

    #[test]
    fn a_device_that_fails_hides_no_other() {
        let host = HostBackend::new(HostConfig::default().devices(4)).expect("shared memory");
        host.break_device(DeviceId(0));
        host.break_device(DeviceId(2));
        let mut found = look_for(&[]).expect("nothing is asked for");
        let backend: Arc<dyn GpuBackend> = host;
        found.look_at(&backend, 4);
        found.backends.push(backend);
        let works: Vec<u32> = found.gpus().iter().map(|gpu| gpu.device().0).collect();
        assert_eq!(works, [1, 3]);
        let failing: Vec<u32> = found
            .failing()
            .iter()
            .map(|(_, device, _)| device.0)
            .collect();
        assert_eq!(failing, [0, 2]);
        assert!(
            found
                .failing()
                .iter()
                .all(|(kind, _, why)| *kind == BackendKind::Host
                    && why.to_string().contains("device"))
        );
        assert_eq!(
            found.first(BackendKind::Host).expect("two work").device(),
            DeviceId(1)
        );
    }

    #[test]
    fn shared_memory_takes_no_gpus_place_unasked() {
        let found = || {
            let mut found = look_for(&[BackendKind::Host]).expect("the host is there");
            let (backend, remedy) = (BackendKind::Cuda, "load it");
            let why = || Error::Unavailable {
                backend,
                why: "the module is older than the library".into(),
                remedy,
            };
            found.missing.push((
                BackendKind::Hip,
                Error::NotCompiled {
                    backend: BackendKind::Hip,
                },
            ));
            found.missing.push((backend, why()));
            found
        };
        let refused = found()
            .gpus_unless(false, |_| true)
            .expect_err("there is a GPU that cannot be used");
        assert!(
            matches!(
                refused,
                Error::Unavailable {
                    backend: BackendKind::Cuda,
                    ..
                }
            ),
            "{refused}"
        );
        assert!(
            found().gpus_unless(true, |_| true).is_ok(),
            "host devices were asked for"
        );
        assert!(
            found().gpus_unless(false, |_| false).is_ok(),
            "the machine has no GPU"
        );
        let mut failing = found();
        let error = Error::NoDevice {
            backend: BackendKind::Cuda,
            uuid: DeviceUuid([0; 16]),
        };
        failing
            .failing
            .push((BackendKind::Cuda, DeviceId(0), error));
        assert!(
            failing.gpus_unless(false, |_| false).is_err(),
            "the driver counts a GPU that does not work"
        );
    }
}

//! Finds out what this process can use, and why not the rest.

use std::sync::Arc;

use gpu_api::{BackendKind, DeviceId, DeviceUuid, Error, Gpu, GpuBackend, Result};

/// What [`detect`] or [`detect_only`] found.
#[derive(Debug)]
pub struct Detected {
    backends: Vec<Arc<dyn GpuBackend>>,
    gpus: Vec<Gpu>,
    missing: Vec<(BackendKind, Error)>,
}

/// Finds every device of every backend that is compiled in and usable, and says of the others why not.
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
/// [`detect`] loads every driver that is compiled in, which costs time and memory in a process that needs one.
///
/// # Errors
///
/// As [`detect`].
///
/// # Examples
///
/// ```
/// use gpu_ipc::{BackendKind, detect_only};
/// let gpu = detect_only(BackendKind::Host)?.first(BackendKind::Host)?;
/// assert_eq!(gpu.kind(), BackendKind::Host);
/// # Ok::<(), gpu_ipc::Error>(())
/// ```
pub fn detect_only(kind: BackendKind) -> Result<Detected> {
    look_for(&[kind])
}

fn look_for(kinds: &[BackendKind]) -> Result<Detected> {
    let mut found = Detected { backends: Vec::new(), gpus: Vec::new(), missing: Vec::new() };
    for &kind in kinds {
        match open(kind) {
            // A driver that loads but cannot tell of its devices must not take the others down.
            Ok(backend) => match devices(&backend) {
                Ok(gpus) => {
                    found.gpus.extend(gpus);
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

fn devices(backend: &Arc<dyn GpuBackend>) -> Result<Vec<Gpu>> {
    (0..backend.device_count()?).map(|ordinal| Gpu::new(backend.clone(), DeviceId(ordinal))).collect()
}

fn open(kind: BackendKind) -> Result<Arc<dyn GpuBackend>> {
    match kind {
        #[cfg(feature = "host")]
        BackendKind::Host => Ok(backend_host::HostBackend::new(backend_host::HostConfig::from_env()?)?),
        #[cfg(feature = "cuda")]
        BackendKind::Cuda => Ok(backend_cuda::CudaBackend::load()?),
        #[cfg(feature = "hip")]
        BackendKind::Hip => Ok(backend_hip::HipBackend::load()?),
        backend => Err(Error::NotCompiled { backend }),
    }
}

impl Detected {
    /// Lists the devices, GPUs first.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// Lists the backends that cannot be used, each with the reason.
    pub fn missing(&self) -> &[(BackendKind, Error)] {
        &self.missing
    }

    /// Returns a backend; one that was not found is tried once more, for the reason or because nobody asked for it.
    ///
    /// # Errors
    ///
    /// [`Error::NotCompiled`] or [`Error::Unavailable`], as [`missing`](Detected::missing) has it.
    pub fn backend(&self, kind: BackendKind) -> Result<Arc<dyn GpuBackend>> {
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

    /// Returns a backend's first device.
    ///
    /// # Errors
    ///
    /// As [`backend`](Detected::backend), and [`Error::Unavailable`] when it has no device.
    pub fn first(&self, kind: BackendKind) -> Result<Gpu> {
        let backend = self.backend(kind)?;
        if backend.device_count()? == 0 {
            return Err(Error::Unavailable {
                backend: kind,
                why: "it has no device".into(),
                remedy: match kind {
                    BackendKind::Host => "set GPU_IPC_HOST_DEVICES to 1 or more, or unset it",
                    BackendKind::Cuda => "look at CUDA_VISIBLE_DEVICES",
                    BackendKind::Hip => "look at HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES",
                    _ => "make one visible to this process",
                },
            });
        }
        Gpu::new(backend, DeviceId(0))
    }
}

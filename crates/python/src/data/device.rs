//! Devices, by the names that Python programs use: `cuda:0`.

use gpu_ipc::backend::DeviceId;
use gpu_ipc::{BackendKind, Error, Gpu};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::interpreter::errors::{OrRaise, invalid};
use crate::interpreter::process::process;

/// A device that this process can share memory of.
#[pyclass(frozen, weakref, eq, hash, module = "gpu_ipc")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Device {
    kind: BackendKind,
    ordinal: u32,
    uuid: String,
    description: String,
    total_bytes: u64,
}

impl Device {
    pub fn of(gpu: &Gpu) -> Device {
        Device {
            kind: gpu.kind(),
            ordinal: gpu.device().0,
            uuid: gpu.uuid().to_string(),
            description: gpu.info().name.clone(),
            total_bytes: gpu.info().total_bytes,
        }
    }
}

#[pymethods]
impl Device {
    /// The name to open it by: ``cuda:0``.
    #[getter]
    fn name(&self) -> String {
        format!("{}:{}", self.kind, self.ordinal)
    }

    /// The vendor: ``cuda``, ``hip`` or ``host``.
    #[getter]
    fn kind(&self) -> &'static str {
        self.kind.name()
    }

    /// The number under which this process sees it.
    #[getter]
    fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The identity under which every process sees it.
    #[getter]
    fn uuid(&self) -> &str {
        &self.uuid
    }

    /// The vendor's name for it.
    #[getter]
    fn description(&self) -> &str {
        &self.description
    }

    /// Bytes of device memory.
    #[getter]
    fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    fn __str__(&self) -> String {
        self.name()
    }

    fn __repr__(&self) -> String {
        format!(
            "<gpu_ipc.Device {}: {}, {} bytes>",
            self.name(),
            self.description,
            self.total_bytes
        )
    }
}

/// What `detect` found.
#[pyclass(frozen, weakref, module = "gpu_ipc")]
pub(crate) struct Detected {
    devices: Vec<Py<Device>>,
    missing: Py<PyDict>,
}

#[pymethods]
impl Detected {
    /// The devices that can be used, GPUs first.
    #[getter]
    fn devices(&self, py: Python<'_>) -> Vec<Py<Device>> {
        self.devices
            .iter()
            .map(|device| device.clone_ref(py))
            .collect()
    }

    /// The vendors that cannot be used, each with the reason and the remedy.
    #[getter]
    fn missing(&self, py: Python<'_>) -> Py<PyDict> {
        self.missing.clone_ref(py)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let names: Vec<String> = self
            .devices
            .iter()
            .map(|device| device.get().name())
            .collect();
        format!(
            "<gpu_ipc.Detected devices=[{}] missing={}>",
            names.join(", "),
            self.missing.bind(py)
        )
    }
}

/// Find every device that this process can use, and say of each missing vendor why.
#[pyfunction]
pub(crate) fn detect(py: Python<'_>) -> PyResult<Detected> {
    let (gpus, why_not) = py.detach(|| {
        let (mut gpus, mut why_not) = (Vec::new(), Vec::new());
        for kind in BackendKind::ALL {
            match all_of(kind) {
                Ok(found) => gpus.extend(found),
                Err(error) => why_not.push((kind, error)),
            }
        }
        (gpus, why_not)
    });
    let missing = PyDict::new(py);
    for (kind, error) in why_not {
        missing.set_item(kind.name(), error.to_string())?;
    }
    let devices = gpus
        .iter()
        .map(|gpu| Py::new(py, Device::of(gpu)))
        .collect::<PyResult<_>>()?;
    Ok(Detected {
        devices,
        missing: missing.unbind(),
    })
}

fn all_of(kind: BackendKind) -> Result<Vec<Gpu>, Error> {
    let backend = process().backends.get(kind)?;
    (0..backend.device_count()?)
        .map(|ordinal| Gpu::new(backend.clone(), DeviceId(ordinal)))
        .collect()
}

/// Opens the device of a name, or the first that there is.
///
/// The name is a string, or whatever `str` makes one of: a [`Device`], a `torch.device`.
pub(crate) fn open(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<Gpu> {
    let Some(device) = device else {
        return py.detach(first).or_raise();
    };
    let name = device.str()?.to_string();
    let bad = || {
        invalid(
            "a device",
            format!("`{name}`"),
            "a name such as `cuda:0`, `hip:0` or `host:0`",
        )
    };
    let (kind, ordinal) = name.split_once(':').unwrap_or((&name, "0"));
    let kind = BackendKind::ALL
        .into_iter()
        .find(|known| known.name() == kind)
        .ok_or_else(bad)?;
    let ordinal: u32 = ordinal.parse().map_err(|_| bad())?;
    py.detach(|| {
        let gpus = all_of(kind)?;
        let count = gpus.len();
        gpus.into_iter()
            .nth(ordinal as usize)
            .ok_or(Error::Unavailable {
                backend: kind,
                why: format!("it has no device {ordinal}: this process sees {count}"),
                remedy: "check `gpu_ipc.detect()`, and CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES",
            })
    })
    .or_raise()
}

fn first() -> Result<Gpu, Error> {
    let mut why = None;
    for kind in BackendKind::ALL {
        match all_of(kind) {
            Ok(gpus) => {
                if let Some(gpu) = gpus.into_iter().next() {
                    return Ok(gpu);
                }
            }
            Err(error) => why = Some(error),
        }
    }
    Err(why.unwrap_or(Error::Unavailable {
        backend: BackendKind::Host,
        why: "it has no device".into(),
        remedy: "set GPU_IPC_HOST_DEVICES to 1 or more, or unset it",
    }))
}

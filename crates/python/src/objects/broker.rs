//! A connection to a broker: put, create and open objects, and wait for newer ones.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use gpu_ipc::Gpu;
use gpu_ipc::backend::DevicePtr;
use gpu_ipc::broker::{Client, Commit, CreateOptions, DType, Dimension, Epoch, Layout, PartSpec, Writer};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::object::{Object, selector};
use super::writer::ObjectWriter;
use crate::arrays::read;
use crate::arrays::view::View;
use crate::data::layout::Dtype;
use crate::data::{device, stream};
use crate::interpreter::errors::{OrRaise, invalid, unsupported};
use crate::interpreter::later::Later;
use crate::interpreter::waiting::{aside, coroutine, duration, in_slices};
use crate::interpreter::{keeper, logging};
use crate::producer::sharing::copy;

/// Connect to a broker, for objects that outlive their writer.
///
/// Args:
///     dir: the broker's directory; None takes ``$NVIDIA_DRA_LOCAL_IPC_DIR``, or ``broker`` in the runtime directory.
///     device: the device of the objects, as for ``Session``.
///     name: what the broker's listing calls this process.
///     timeout: seconds that each question to the broker may take. A creation waits for the driver.
///
/// Raises:
///     ConnectFailed: no broker listens there; start one with ``gpu-ipc broker``.
#[pyfunction]
#[pyo3(signature = (dir=None, device=None, *, name=None, timeout=60.0))]
pub(crate) fn connect_broker(
    py: Python<'_>,
    dir: Option<PathBuf>,
    device: Option<&Bound<'_, PyAny>>,
    name: Option<String>,
    timeout: f64,
) -> PyResult<Broker> {
    logging::listen(py);
    keeper::start(py)?;
    let gpu = device::open(py, device)?;
    let mut builder = Client::builder(gpu.clone()).name(name.unwrap_or_default());
    if let Some(patience) = duration(Some(timeout))? {
        builder = builder.patience(patience);
    }
    if let Some(dir) = dir {
        builder = builder.dir(dir);
    }
    let client = aside(py, move || builder.connect())?.or_raise()?;
    Ok(Broker { client: Mutex::new(Some(client)), gpu })
}

/// A connection to a broker; made by ``connect_broker``. It reconnects by itself when the broker was started again.
#[pyclass(frozen, module = "gpu_ipc")]
pub(crate) struct Broker {
    client: Mutex<Option<Client>>,
    gpu: Gpu,
}

impl Broker {
    fn client(&self) -> PyResult<Client> {
        let client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        client.clone().ok_or_else(|| invalid("a broker's connection", "closed", "open: connect again"))
    }

    fn start(&self, py: Python<'_>, name: String, parts: Layout, options: CreateOptions) -> PyResult<Writer> {
        let client = self.client()?;
        aside(py, move || client.create_with(&name, parts, &options))?.or_raise()
    }
}

#[pymethods]
impl Broker {
    /// Copy arrays into a new object, commit it, and return its epoch.
    ///
    /// Args:
    ///     name: the object's name. A newer epoch of a name replaces the older for the next open.
    ///     parts: a mapping of names to arrays, such as a state dict. Mappings in it may nest: the name of a part is
    ///         then made of the keys on the way, with ``/`` between.
    ///     stream: as for ``Session.share``.
    ///     expect: the epoch that the name must have at the commit; 0 for none.
    ///     replace: give the name's epochs up first, where there is no room for two.
    ///     meta: bytes of your own beside the parts.
    ///
    /// Raises:
    ///     Conflict: the name has another epoch than ``expect``.
    ///     OutOfMemory: there is no room for all of it, and nothing was taken.
    #[pyo3(signature = (name, parts, *, stream=None, expect=None, replace=false, meta=None))]
    #[allow(clippy::too_many_arguments, reason = "they are Python's keyword arguments")]
    fn put(
        &self,
        py: Python<'_>,
        name: String,
        parts: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
        expect: Option<u64>,
        replace: bool,
        meta: Option<Vec<u8>>,
    ) -> PyResult<u64> {
        let given = stream.map(|stream| stream::given(&self.gpu, stream)).transpose()?;
        let own = py.detach(|| gpu_ipc::Stream::create(&self.gpu)).or_raise()?;
        let order = || Ok(given.is_none().then(|| own.raw().handle));
        let mut sources = Vec::new();
        for (part, array) in flat(py, parts)?.iter() {
            let view = read::read(&self.gpu, &array, order)?;
            sources.push((part.extract::<String>()?, view));
        }
        let specs = sources.iter().map(|(part, view)| spec_of(part, view));
        let layout = Layout::pack(specs.collect::<PyResult<Vec<_>>>()?, &meta.unwrap_or_default()).or_raise()?;
        let writer = self.start(py, name, layout, options_of(expect, replace))?;
        let mut used: Vec<gpu_ipc::Stream> = vec![own.clone()];
        let queued = sources.iter().try_for_each(|(part, view)| {
            let stream = match (&given, view.pending(|| Ok(Some(own.raw().handle)))?) {
                (Some(given), _) => given.clone(),
                (None, Some(raw)) if raw != own.raw().handle => {
                    py.detach(|| stream::of_handle(&self.gpu, raw)).or_raise()?
                }
                (None, _) => own.clone(),
            };
            let (first, len, _) = view.span()?;
            let to = writer.device_ptr(part).unwrap_or(DevicePtr(0));
            if len > 0 {
                let device = view.device;
                py.detach(|| copy(&self.gpu, &stream, to, device, (first, len)))?;
            }
            if !used.iter().any(|known| known.raw() == stream.raw()) {
                used.push(stream);
            }
            Ok::<(), PyErr>(())
        });
        // The arrays and the object are kept until their copies are over, also when one failed or Ctrl-C ends the wait.
        let kept = Later::new(sources);
        let (writer, copied) = aside(py, move || {
            let copied = used.iter().try_for_each(gpu_ipc::Stream::synchronize);
            drop(kept);
            (writer, copied)
        })?;
        queued?;
        copied.or_raise()?;
        let epoch = aside(py, move || writer.commit(&[]).and_then(Commit::wait))?.or_raise()?;
        Ok(epoch.0)
    }

    /// Make an object to be filled in place: its parts are arrays that kernels write to, and nobody else sees.
    ///
    /// Args:
    ///     parts: as for ``put``, but nothing is copied: arrays say type and shape, as does a pair of both,
    ///         ``("bfloat16", (4096, 4096))``.
    ///     name, expect, replace, meta: as for ``put``.
    #[pyo3(signature = (name, parts, *, expect=None, replace=false, meta=None))]
    fn create(
        &self,
        py: Python<'_>,
        name: String,
        parts: &Bound<'_, PyAny>,
        expect: Option<u64>,
        replace: bool,
        meta: Option<Vec<u8>>,
    ) -> PyResult<ObjectWriter> {
        let mut specs = Vec::new();
        for (part, what) in flat(py, parts)?.iter() {
            let part = part.extract::<String>()?;
            let (dtype, shape) = match what.cast::<PyTuple>() {
                Ok(pair) => {
                    let (dtype, shape): (String, Vec<u64>) = pair.extract()?;
                    let known = Dtype::of_name(&dtype);
                    (known.ok_or_else(|| invalid("an element type", dtype, "a name such as `bfloat16`"))?, shape)
                }
                Err(_) => {
                    let layout = read::read(&self.gpu, &what, || Ok(None))?.layout;
                    (layout.dtype, layout.shape.iter().map(|&length| length as u64).collect())
                }
            };
            specs.push(PartSpec::contiguous(part, dtype_of(dtype), &shape).or_raise()?);
        }
        let layout = Layout::pack(specs, &meta.unwrap_or_default()).or_raise()?;
        let writer = self.start(py, name, layout, options_of(expect, replace))?;
        Ok(ObjectWriter::new(writer, &self.gpu))
    }

    /// Map an object, read-only.
    ///
    /// Args:
    ///     name: its name.
    ///     epoch: which of its epochs; None takes the newest.
    ///
    /// Raises:
    ///     NotFound: there is none, or none that this user may open.
    #[pyo3(signature = (name, epoch=None))]
    fn open(&self, py: Python<'_>, name: String, epoch: Option<u64>) -> PyResult<Object> {
        let client = self.client()?;
        let reader = aside(py, move || client.open_one(&selector(name, epoch)))?.or_raise()?;
        Ok(Object::new(reader, &self.gpu))
    }

    /// Wait until a name has an epoch newer than ``seen``, and return it.
    ///
    /// Returns:
    ///     The epoch; None when there is none after ``timeout`` seconds.
    #[pyo3(signature = (name, seen=0, timeout=None))]
    fn watch(&self, py: Python<'_>, name: &str, seen: u64, timeout: Option<f64>) -> PyResult<Option<u64>> {
        let client = self.client()?;
        let newer = in_slices(py, duration(timeout)?, |slice| match client.watch(name, Epoch(seen), slice) {
            Ok(None) => None,
            Ok(Some((epoch, _))) => Some(Ok(epoch.0)),
            Err(error) => Some(Err(error)),
        })?;
        newer.transpose().or_raise()
    }

    /// Wait for an epoch newer than ``seen`` without blocking the event loop.
    #[pyo3(signature = (name, seen=0))]
    fn watch_async<'py>(slf: &Bound<'py, Self>, name: &str, seen: u64) -> PyResult<Bound<'py, PyAny>> {
        coroutine(slf.py(), "watch", (slf, name, seen))
    }

    /// Remove a name with all its epochs, or one epoch. A process that has it mapped keeps it.
    ///
    /// Returns:
    ///     The last epoch that it had.
    #[pyo3(signature = (name, epoch=None))]
    fn remove(&self, py: Python<'_>, name: String, epoch: Option<u64>) -> PyResult<u64> {
        let client = self.client()?;
        let removed = aside(py, move || client.remove_epoch(&name, Epoch(epoch.unwrap_or(0))))?;
        Ok(removed.or_raise()?.0)
    }

    /// The broker's objects and their readers: a dictionary, with ``objects`` as a list of dictionaries.
    fn listing<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let listing = aside(py, move || client.list())?.or_raise()?;
        let text = serde_json::to_string(&listing).map_err(|error| invalid("the broker's listing", error, "JSON"))?;
        py.import("json")?.call_method1("loads", (text,))
    }

    /// Give up the connection. Objects that are mapped stay good.
    fn close(&self, py: Python<'_>) {
        let client = self.client.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(client));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(invalid(
            "what to pickle",
            "a broker's connection",
            "the broker's directory: each process connects by itself",
        ))
    }
}

fn options_of(expect: Option<u64>, replace: bool) -> CreateOptions {
    CreateOptions { expect: expect.map(Epoch), replace, ..CreateOptions::default() }
}

/// Lays nested mappings out flat.
fn flat<'py>(py: Python<'py>, parts: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    Ok(py.import("gpu_ipc._objects")?.call_method1("flat", (parts,))?.cast_into::<PyDict>()?)
}

fn dtype_of(dtype: Dtype) -> DType {
    DType { code: dtype.code, bits: dtype.bits, lanes: dtype.lanes }
}

/// Describes an array as a part: its elements lie there as they lie here.
fn spec_of(name: &str, view: &View) -> PyResult<PartSpec> {
    let ((_, len, _), layout) = (view.span()?, &view.layout);
    let strides = layout.full_strides();
    let dimensions = layout.shape.iter().zip(&strides).map(|(&extent, &stride)| {
        let stride = u64::try_from(stride).map_err(|_| {
            unsupported("putting this array into an object", "it runs backwards", "put a contiguous copy of it")
        })?;
        Ok(Dimension { extent: extent as u64, stride })
    });
    let dimensions = dimensions.collect::<PyResult<Vec<_>>>()?;
    let spec = PartSpec { name: name.into(), dtype: dtype_of(layout.dtype), dimensions, len };
    spec.check().or_raise()?;
    Ok(spec)
}

//! Objects of a broker: memory that outlives the process that filled it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use gpu_ipc::backend::DevicePtr;
use gpu_ipc::broker::{
    Client, CreateOptions, DType, Dimension, Epoch, Layout as Parts, PartSpec, Reader, Selector, Writer,
};
use gpu_ipc::{Error, Gpu};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::array::{self, View};
use crate::errors::{OrRaise, invalid, unsupported};
use crate::layout::{Dtype, Layout};
use crate::part::{Owner, Part};
use crate::sharing::copy;
use crate::waiting::{aside, coroutine, duration, in_slices};
use crate::{device, logging, streams};

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
    crate::process::process().keeper.start(py)?;
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

    fn start(&self, py: Python<'_>, name: String, parts: Parts, options: CreateOptions) -> PyResult<Writer> {
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
        let given = stream.map(|stream| streams::given(&self.gpu, stream)).transpose()?;
        let own = py.detach(|| gpu_ipc::Stream::create(&self.gpu)).or_raise()?;
        let order = || Ok(given.is_none().then(|| own.raw().handle));
        let mut sources = Vec::new();
        for (part, array) in flat(py, parts)?.iter() {
            let view = array::read(&self.gpu, &array, order)?;
            sources.push((part.extract::<String>()?, view));
        }
        let specs = sources.iter().map(|(part, view)| spec_of(part, view));
        let layout = Parts::pack(specs.collect::<PyResult<Vec<_>>>()?, &meta.unwrap_or_default()).or_raise()?;
        let writer = self.start(py, name, layout, options_of(expect, replace))?;
        let mut used: Vec<gpu_ipc::Stream> = vec![own.clone()];
        for (part, view) in &sources {
            let stream = match (&given, view.pending(|| Ok(Some(own.raw().handle)))?) {
                (Some(given), _) => given.clone(),
                (None, Some(raw)) if raw != own.raw().handle => streams::borrow(py, &self.gpu, raw, None)?,
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
        }
        // The arrays may be dropped from here on.
        py.detach(|| used.iter().try_for_each(gpu_ipc::Stream::synchronize)).or_raise()?;
        drop(sources);
        let epoch = aside(py, move || writer.commit(&[]).and_then(gpu_ipc::broker::Commit::wait))?.or_raise()?;
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
                    let layout = array::read(&self.gpu, &what, || Ok(None))?.layout;
                    (layout.dtype, layout.shape.iter().map(|&length| length as u64).collect())
                }
            };
            specs.push(PartSpec::contiguous(part, dtype_of(dtype), &shape).or_raise()?);
        }
        let layout = Parts::pack(specs, &meta.unwrap_or_default()).or_raise()?;
        let writer = self.start(py, name, layout, options_of(expect, replace))?;
        Ok(ObjectWriter { writer: Mutex::new(Some(Arc::new(writer))), gpu: self.gpu.clone() })
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
        Ok(Object { reader: Arc::new(Mutex::new(reader)), gpu: self.gpu.clone() })
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

    /// Take a name away with all its epochs, or one epoch of it. Who has it mapped keeps it.
    ///
    /// Returns:
    ///     The last epoch that it had.
    #[pyo3(signature = (name, epoch=None))]
    fn remove(&self, py: Python<'_>, name: String, epoch: Option<u64>) -> PyResult<u64> {
        let client = self.client()?;
        let removed = aside(py, move || client.remove_epoch(&name, Epoch(epoch.unwrap_or(0))))?;
        Ok(removed.or_raise()?.0)
    }

    /// What the broker holds, and who reads it: a dictionary, with ``objects`` as a list of dictionaries.
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

/// An object that is being filled. Left without ``commit`` it is aborted: nobody ever sees it.
#[pyclass(frozen, module = "gpu_ipc")]
pub(crate) struct ObjectWriter {
    writer: Mutex<Option<Arc<Writer>>>,
    gpu: Gpu,
}

impl ObjectWriter {
    fn writer(&self) -> PyResult<Arc<Writer>> {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.clone().ok_or_else(|| invalid("an object to fill", "committed or aborted", "one that is being filled"))
    }
}

#[pymethods]
impl ObjectWriter {
    /// A part, to be written: an array for every library that takes arrays.
    fn __getitem__(&self, name: &str) -> PyResult<Part> {
        let writer = self.writer()?;
        let (layout, start) = place_of(writer.layout(), writer.device_ptr(name), name)?;
        Ok(Part::new(Owner::Writer(writer), start, layout, &self.gpu))
    }

    /// The names of the parts.
    fn keys(&self) -> PyResult<Vec<String>> {
        Ok(names_of(self.writer()?.layout()))
    }

    /// Name a stream whose work touches the object.
    fn record_stream(&self, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        self.writer()?.used_on(&streams::given(&self.gpu, stream)?).or_raise()
    }

    /// Make the object visible, whole, once all work on the streams that were named has finished; return its epoch.
    ///
    /// Args:
    ///     stream: one more stream whose work fills the object.
    ///
    /// Raises:
    ///     Invalid: arrays made of its parts are still alive: drop them first. Nothing changed.
    ///     Conflict: the name has another epoch than was expected.
    ///     WriterLost: the broker died before it was asked.
    #[pyo3(signature = (stream=None))]
    fn commit(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let stream = stream.map(|stream| streams::given(&self.gpu, stream)).transpose()?;
        let writer = {
            let mut open = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
            match open.take().map(Arc::try_unwrap) {
                Some(Ok(writer)) => writer,
                Some(Err(shared)) => {
                    let arrays = Arc::strong_count(&shared) - 1;
                    *open = Some(shared);
                    return Err(invalid(
                        "the object to commit",
                        format!("{arrays} arrays or parts of it are alive"),
                        "let go of: its addresses end with the commit",
                    ));
                }
                None => return Err(invalid("an object to fill", "committed or aborted", "one that is being filled")),
            }
        };
        let done = aside(py, move || {
            let used: Vec<_> = stream.iter().collect();
            writer.commit(&used).and_then(gpu_ipc::broker::Commit::wait)
        });
        Ok(done?.or_raise()?.0)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(writer));
    }
}

/// An object that is mapped: a mapping of the names of its parts to arrays, which are read-only.
///
/// Its addresses stay the same whatever epoch they reach, so graphs that were captured over them stay good. Arrays keep
/// the addresses, not the epoch: after ``advance`` they show the newer contents, and while the object sleeps they reach
/// nothing. Launch no work on them meanwhile.
#[pyclass(frozen, mapping, module = "gpu_ipc")]
pub(crate) struct Object {
    reader: Arc<Mutex<Reader>>,
    gpu: Gpu,
}

impl Object {
    /// Asks the reader something, with no lock of Python's held.
    fn with<T: Send>(&self, py: Python<'_>, ask: impl FnOnce(&mut Reader) -> T + Send) -> T {
        py.detach(|| ask(&mut self.reader.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    fn select(&self, py: Python<'_>, epoch: Option<u64>) -> Selector {
        selector(self.with(py, |reader| reader.name().to_owned()), epoch)
    }
}

#[pymethods]
impl Object {
    /// The name.
    #[getter]
    fn name(&self, py: Python<'_>) -> String {
        self.with(py, |reader| reader.name().to_owned())
    }

    /// The epoch that the addresses reach.
    #[getter]
    fn epoch(&self, py: Python<'_>) -> u64 {
        self.with(py, |reader| reader.epoch().0)
    }

    /// The bytes that the writer put beside the parts.
    #[getter]
    fn meta<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.with(py, |reader| reader.layout().user().to_vec()))
    }

    /// Whether the addresses reach nothing.
    #[getter]
    fn asleep(&self, py: Python<'_>) -> bool {
        self.with(py, |reader| reader.is_asleep())
    }

    fn __getitem__(&self, py: Python<'_>, name: &str) -> PyResult<Part> {
        let (layout, start) = self.with(py, |reader| place_of(reader.layout(), reader.device_ptr(name), name))?;
        Ok(Part::new(Owner::Reader(self.reader.clone()), start, layout, &self.gpu))
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.with(py, |reader| reader.layout().parts().len())
    }

    fn __contains__(&self, py: Python<'_>, name: &str) -> bool {
        self.with(py, |reader| reader.layout().part(name).is_some())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(self.keys(py).into_pyobject(py)?.try_iter()?.into_any())
    }

    /// The names of the parts, in their order.
    fn keys(&self, py: Python<'_>) -> Vec<String> {
        self.with(py, |reader| names_of(reader.layout()))
    }

    /// The parts, in the order of their names.
    fn values(&self, py: Python<'_>) -> PyResult<Vec<Part>> {
        self.keys(py).iter().map(|name| self.__getitem__(py, name)).collect()
    }

    /// Names and parts.
    fn items(&self, py: Python<'_>) -> PyResult<Vec<(String, Part)>> {
        self.keys(py).into_iter().map(|name| Ok((name.clone(), self.__getitem__(py, &name)?))).collect()
    }

    /// Make PyTorch tensors of all parts, nested as they were put.
    ///
    /// PyTorch has no read-only tensors, and these are on memory that is mapped read-only: a write to one faults. On a
    /// GPU it ends the process' context.
    fn tensors<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("gpu_ipc._objects")?.call_method1("tensors", (slf,))
    }

    /// Name a stream whose work touches the object: ``advance``, ``sleep`` and its end wait for that.
    fn record_stream(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let stream = streams::given(&self.gpu, stream)?;
        self.with(py, |reader| reader.used_on(&stream)).or_raise()
    }

    /// Move to the newest epoch, or the one that is named, at the same addresses; say whether it is another.
    ///
    /// Raises:
    ///     LayoutDiffers: the parts are not the same; nothing changed. Open it as an object of its own.
    #[pyo3(signature = (epoch=None))]
    fn advance(&self, py: Python<'_>, epoch: Option<u64>) -> PyResult<bool> {
        let to = self.select(py, epoch);
        let reader = self.reader.clone();
        aside(py, move || reader.lock().unwrap_or_else(PoisonError::into_inner).advance_to(&to))?.or_raise()
    }

    /// Give the mapping up and keep the addresses; with ``release`` also the hold on the object.
    #[pyo3(signature = (release=false))]
    fn sleep(&self, py: Python<'_>, release: bool) -> PyResult<()> {
        let reader = self.reader.clone();
        aside(py, move || reader.lock().unwrap_or_else(PoisonError::into_inner).sleep(release))?.or_raise()
    }

    /// Map the same object again at the same addresses, or the epoch that is named.
    ///
    /// Raises:
    ///     NotFound: the hold was released and the object has gone meanwhile.
    #[pyo3(signature = (epoch=None))]
    fn wake(&self, py: Python<'_>, epoch: Option<u64>) -> PyResult<()> {
        let to = epoch.map(|epoch| self.select(py, Some(epoch)));
        let reader = self.reader.clone();
        let woken = aside(py, move || {
            let mut reader = reader.lock().unwrap_or_else(PoisonError::into_inner);
            match to {
                Some(to) => reader.wake_to(&to),
                None => reader.wake(),
            }
        })?;
        woken.or_raise()
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let state = if self.asleep(py) { ", asleep" } else { "" };
        format!("<gpu_ipc.Object {} epoch {}, {} parts{state}>", self.name(py), self.epoch(py), self.__len__(py))
    }
}

fn selector(name: String, epoch: Option<u64>) -> Selector {
    match epoch {
        None => Selector::Latest(name),
        Some(epoch) => Selector::Epoch(name, Epoch(epoch)),
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
    let (_, len, layout) = view.span()?;
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

fn names_of(parts: &Parts) -> Vec<String> {
    parts.parts().iter().map(|part| part.spec.name.clone()).collect()
}

/// Finds a part: its layout, and where it begins.
fn place_of(parts: &Parts, start: Option<DevicePtr>, name: &str) -> PyResult<(Layout, u64)> {
    let Some((part, start)) = parts.part(name).zip(start) else {
        return Err(pyo3::exceptions::PyKeyError::new_err(name.to_owned()));
    };
    let DType { code, bits, lanes } = part.spec.dtype;
    let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let shape = part.spec.dimensions.iter().map(|one| number(one.extent)).collect();
    let strides = part.spec.dimensions.iter().map(|one| number(one.stride)).collect();
    Ok((Layout::new(Dtype { code, bits, lanes }, shape, Some(strides)).or_raise()?, start.0))
}

/// Be a broker until the process ends, for tests.
#[pyfunction(name = "_serve_broker")]
pub(crate) fn serve_broker(py: Python<'_>, dir: PathBuf, device: &Bound<'_, PyAny>) -> PyResult<()> {
    use gpu_ipc::broker::{Broker as Server, Limits, Options};
    let gpu = device::open(py, Some(device))?;
    let gpus = Arc::new(move || Ok::<_, Error>(vec![gpu.clone()]));
    let options = Options { dir, gpus, limits: Limits::default(), allowed: Vec::new(), keeper: None };
    let broker = py.detach(|| Server::open(options)).or_raise()?;
    py.detach(|| broker.run())
}

//! A connection to a broker: put, create and open objects, and wait for newer ones.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use gpu_ipc::Gpu;
use gpu_ipc::backend::DevicePtr;
use gpu_ipc::broker::client::broker_dir;
use gpu_ipc::broker::{Client, Commit, CreateOptions, Epoch, Layout, PartSpec, Readers, Writer};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use serde_json::Value;

use super::object::{Object, selector};
use super::pool::Pool;
use super::pool_reader::PoolReader;
use super::scratch::Scratch;
use super::specs::{expanded, flat, layout_of, readers_of, spec_of, spec_of_what};
use super::writer::ObjectWriter;
use crate::arrays::read;
use crate::data::number::Whole;
use crate::data::{device, stream};
use crate::interpreter::errors::{OrRaise, invalid};
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
    let dir = broker_dir(dir.as_deref()).or_raise()?;
    let builder = builder.dir(dir.clone());
    let client = aside(py, move || builder.connect())?.or_raise()?;
    Ok(Broker {
        client: Mutex::new(Some(client)),
        dir,
        gpu,
    })
}

/// A connection to a broker; made by ``connect_broker``. It reconnects by itself when the broker
/// was started again.
#[pyclass(frozen, weakref, module = "gpu_ipc")]
pub(crate) struct Broker {
    client: Mutex<Option<Client>>,
    dir: PathBuf,
    gpu: Gpu,
}

impl Broker {
    fn client(&self) -> PyResult<Client> {
        self.gpu.check_fork().or_raise()?;
        let client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        client
            .clone()
            .ok_or_else(|| invalid("a broker's connection", "closed", "open: connect again"))
    }

    fn specs_of(&self, parts: &Bound<'_, PyDict>) -> PyResult<Vec<PartSpec>> {
        let spec = |(name, what): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
            spec_of_what(&self.gpu, name.extract()?, &what)
        };
        parts.iter().map(spec).collect()
    }

    fn start(
        &self,
        py: Python<'_>,
        name: String,
        parts: Layout,
        options: CreateOptions,
    ) -> PyResult<Writer> {
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
    ///     groups: lists of names, of parts or of mappings that hold them. The parts of a list have memory of their
    ///         own, so that they can be unchanged without the others. At most 16 lists, or 15 if parts are in none.
    ///     unchanged: names, of parts or of mappings, that are as in the newest epoch: its memory is taken over and
    ///         nothing is copied. All parts of a group or none, and each epoch with the same groups. Their arrays may
    ///         be pairs of type and shape, as for ``create``.
    ///
    /// Raises:
    ///     Conflict: the name has another epoch than ``expect``.
    ///     OutOfMemory: there is no room for all of it, and nothing was taken.
    ///     NotFound: there is no epoch whose parts could be unchanged.
    ///     Refused: the newest epoch has the unchanged parts with other names, types, shapes, groups or users.
    #[pyo3(signature = (
        name, parts, *, stream=None, expect=None, replace=false, meta=None, groups=Vec::new(), unchanged=Vec::new(),
    ))]
    #[allow(
        clippy::too_many_arguments,
        reason = "they are Python's keyword arguments"
    )]
    fn put(
        &self,
        py: Python<'_>,
        name: String,
        parts: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
        expect: Option<u64>,
        replace: bool,
        meta: Option<Vec<u8>>,
        groups: Vec<Vec<String>>,
        unchanged: Vec<String>,
    ) -> PyResult<u64> {
        let given = stream
            .map(|stream| stream::given(&self.gpu, stream))
            .transpose()?;
        let own = py
            .detach(|| gpu_ipc::Stream::create(&self.gpu))
            .or_raise()?;
        let order = || Ok(given.is_none().then(|| own.raw().handle));
        let parts = flat(py, parts)?;
        let unchanged = expanded(&parts, unchanged)?;
        let taken: HashSet<&str> = unchanged.iter().map(String::as_str).collect();
        let (mut specs, mut sources) = (Vec::new(), Vec::new());
        for (part, array) in parts.iter() {
            let part = part.extract::<String>()?;
            if array.is_instance_of::<PyTuple>() && taken.contains(part.as_str()) {
                specs.push(spec_of_what(&self.gpu, part, &array)?);
                continue;
            }
            let view = read::read(&self.gpu, &array, order)?;
            specs.push(spec_of(&part, &view)?);
            if !taken.contains(part.as_str()) {
                sources.push((part, view));
            }
        }
        let layout = layout_of(&parts, specs, groups, meta)?;
        let writer = self.start(py, name, layout, options_of(expect, replace, unchanged))?;
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
        // The arrays and the object are kept until their copies are over, also when one failed or
        // Ctrl-C ends the wait.
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

    /// Make an object to be filled in place: its parts are arrays that kernels write to, and nobody
    /// else sees.
    ///
    /// Args:
    ///     parts: as for ``put``, but nothing is copied: arrays say type and shape, as does a pair of both,
    ///         ``("bfloat16", (4096, 4096))``.
    ///     name, expect, replace, meta, groups, unchanged: as for ``put``.
    #[pyo3(signature = (
        name, parts, *, expect=None, replace=false, meta=None, groups=Vec::new(), unchanged=Vec::new(),
    ))]
    #[allow(
        clippy::too_many_arguments,
        reason = "they are Python's keyword arguments"
    )]
    fn create(
        &self,
        py: Python<'_>,
        name: String,
        parts: &Bound<'_, PyAny>,
        expect: Option<u64>,
        replace: bool,
        meta: Option<Vec<u8>>,
        groups: Vec<Vec<String>>,
        unchanged: Vec<String>,
    ) -> PyResult<ObjectWriter> {
        let parts = flat(py, parts)?;
        let unchanged = expanded(&parts, unchanged)?;
        let layout = layout_of(&parts, self.specs_of(&parts)?, groups, meta)?;
        let writer = self.start(py, name, layout, options_of(expect, replace, unchanged))?;
        Ok(ObjectWriter::new(writer, &self.gpu))
    }

    /// Make memory of this process alone, which nobody else sees: a mapping of names to arrays that
    /// may be written to.
    ///
    /// Args:
    ///     name: what the broker's listing calls it.
    ///     parts: as for ``create``.
    #[pyo3(signature = (name, parts))]
    fn scratch(&self, py: Python<'_>, name: String, parts: &Bound<'_, PyAny>) -> PyResult<Scratch> {
        let parts = flat(py, parts)?;
        let layout = layout_of(&parts, self.specs_of(&parts)?, Vec::new(), None)?;
        let client = self.client()?;
        let memory = aside(py, move || client.scratch(&name, layout))?.or_raise()?;
        Ok(Scratch::new(memory, &self.gpu))
    }

    /// Make a pool, memory that stays writable and outlives its holder, and hold it.
    ///
    /// Args:
    ///     name: its name. No object and no other pool may have it.
    ///     parts, meta, groups: as for ``create``; of groups at most 15.
    ///     journal_bytes: the bytes of its journal; ``gpu_ipc.journal_bytes(blocks)`` says how many for a number of blocks.
    ///     readers: who besides this user may read it, and never hold it: ``"everybody"``, or ``{"uids": [...]}`` or
    ///         ``{"gids": [...]}`` with at most 16 numbers. None is this user alone.
    ///
    /// Raises:
    ///     Refused: the name is there already.
    ///     OutOfMemory: there is no room for all of it, and nothing was taken.
    ///     Invalid: the journal's bytes are no multiple of 4,096 from 8,192 to 67,108,864.
    #[pyo3(signature = (name, parts, journal_bytes, *, readers=None, meta=None, groups=Vec::new()))]
    #[allow(
        clippy::too_many_arguments,
        reason = "they are Python's keyword arguments"
    )]
    fn create_pool(
        &self,
        py: Python<'_>,
        name: String,
        parts: &Bound<'_, PyAny>,
        journal_bytes: Whole,
        readers: Option<&Bound<'_, PyAny>>,
        meta: Option<Vec<u8>>,
        groups: Vec<Vec<String>>,
    ) -> PyResult<Pool> {
        let parts = flat(py, parts)?;
        let layout = layout_of(&parts, self.specs_of(&parts)?, groups, meta)?;
        let readers = readers.map_or(Ok(Readers::Owner), readers_of)?;
        let client = self.client()?;
        let hold = aside(py, move || {
            client.create_pool_for(&name, layout, journal_bytes.0, readers)
        })?;
        Ok(Pool::new(hold.or_raise()?, &self.gpu))
    }

    /// Hold a pool: map it writable, with the bytes that its last holder left.
    ///
    /// Args:
    ///     name: its name.
    ///     at_same_addresses: map it where the last holder had it, so that pointers in it stay good.
    ///
    /// Raises:
    ///     NotFound: there is no such pool.
    ///     Refused: another process holds it, which the text names, or it is another user's.
    ///     Invalid: the same addresses are in use here.
    #[pyo3(signature = (name, *, at_same_addresses=false))]
    fn adopt(&self, py: Python<'_>, name: String, at_same_addresses: bool) -> PyResult<Pool> {
        let client = self.client()?;
        let hold = aside(py, move || client.adopt(&name, at_same_addresses))?;
        Ok(Pool::new(hold.or_raise()?, &self.gpu))
    }

    /// Map a pool read-only, beside its holder.
    ///
    /// Raises:
    ///     NotFound: there is no such pool.
    ///     Refused: it is not for this user.
    fn read_pool(&self, py: Python<'_>, name: String) -> PyResult<PoolReader> {
        let client = self.client()?;
        let reader = aside(py, move || client.read_pool(&name))?;
        Ok(PoolReader::new(reader.or_raise()?, &self.gpu))
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

    /// Get an object from another host, by this host's gateway (docs/HOSTS.md); it is then opened
    /// as any other.
    ///
    /// Runs ``gpu-ipc-gateway pull`` in a process of its own, which is killed when the wait ends by
    /// an exception.
    ///
    /// Args:
    ///     name: its name.
    ///     from_: the host to read it from; None takes any that has it.
    ///     epoch: which of its epochs; None takes the newest.
    ///     timeout: seconds that it may take.
    ///
    /// Returns:
    ///     The figures, as a dictionary: ``epoch``, ``identity``, ``from``, ``home``, ``bytes``, ``gb_s``, ``seconds``,
    ///     ``retries``, and ``was_here`` if there was nothing to do.
    ///
    /// Raises:
    ///     Unavailable: the program, its network or the library that carries the bytes is not installed, or no
    ///         gateway that answered has it and some did not answer.
    ///     Invalid: no gateway runs for this broker.
    ///     NotFound: every gateway was asked, and none has the object.
    ///     Timeout: it took longer than ``timeout``, or all that have it were busy for ten minutes.
    ///     Refused: this host's broker does not take it, for instance because the name has another home.
    ///     Aborted: it was not read, and nothing of it is here.
    #[pyo3(signature = (name, *, from_=None, epoch=None, timeout=None))]
    fn pull<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        from_: Option<&str>,
        epoch: Option<u64>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.client()?;
        let device = format!("{}:{}", self.gpu.kind(), self.gpu.device().0);
        let gateway = py.import("gpu_ipc._gateway")?;
        gateway.call_method1(
            "pull",
            (self.dir.as_os_str(), device, name, from_, epoch, timeout),
        )
    }

    /// Wait until a name has an epoch newer than ``seen``, and return it. The epoch of a pool is its
    /// generation: it grows with each holder.
    ///
    /// Returns:
    ///     The epoch; None when there is none after ``timeout`` seconds.
    #[pyo3(signature = (name, seen=Whole(0), timeout=None), text_signature = "($self, name, seen=0, timeout=None)")]
    fn watch(
        &self,
        py: Python<'_>,
        name: &str,
        seen: Whole,
        timeout: Option<f64>,
    ) -> PyResult<Option<u64>> {
        let client = self.client()?;
        let newer = in_slices(py, duration(timeout)?, |slice| {
            match client.watch(name, Epoch(seen.0), slice) {
                Ok(None) => None,
                Ok(Some((epoch, _))) => Some(Ok(epoch.0)),
                Err(error) => Some(Err(error)),
            }
        })?;
        newer.transpose().or_raise()
    }

    /// Wait for an epoch newer than ``seen`` without blocking the event loop.
    #[pyo3(signature = (name, seen=Whole(0)), text_signature = "($self, name, seen=0)")]
    fn watch_async<'py>(
        slf: &Bound<'py, Self>,
        name: &str,
        seen: Whole,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.get().client()?;
        coroutine(slf.py(), "watch", (slf, name, seen.0))
    }

    /// Remove a name with all its epochs, or one epoch. A process that has it mapped keeps it.
    ///
    /// Returns:
    ///     The last epoch that it had.
    #[pyo3(signature = (name, epoch=None))]
    fn remove(&self, py: Python<'_>, name: String, epoch: Option<u64>) -> PyResult<u64> {
        let client = self.client()?;
        let removed = aside(py, move || {
            client.remove_epoch(&name, Epoch(epoch.unwrap_or(0)))
        })?;
        Ok(removed.or_raise()?.0)
    }

    /// The broker's objects and their readers: a dictionary, with ``objects`` as a list of
    /// dictionaries.
    fn listing<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let client = self.client()?;
        let listing = aside(py, move || client.list())?.or_raise()?;
        let listing = serde_json::to_value(&listing)
            .map_err(|error| invalid("the broker's listing", error, "JSON"))?;
        python_of(py, &listing)
    }

    /// Give up the connection. Objects that are mapped stay good.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.gpu.check_fork().or_raise()?;
        let client = self
            .client
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        py.detach(|| drop(client));
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(invalid(
            "what to pickle",
            "a broker's connection",
            "the broker's directory: each process connects by itself",
        ))
    }

    fn __repr__(&self) -> String {
        let state = match self.gpu.check_fork() {
            Err(_) => ", of the parent process",
            Ok(()) if self.client().is_err() => ", closed",
            Ok(()) => "",
        };
        let (kind, device) = (self.gpu.kind(), self.gpu.device().0);
        let dir = self.dir.display();
        format!("<gpu_ipc.Broker {kind}:{device} at {dir}{state}>")
    }
}

fn options_of(expect: Option<u64>, replace: bool, unchanged: Vec<String>) -> CreateOptions {
    CreateOptions {
        expect: expect.map(Epoch),
        replace,
        unchanged,
        ..CreateOptions::default()
    }
}

/// Makes Python's objects of JSON's, without running Python's code: at the interpreter's end that
/// ends its thread, which cannot be unwound through this library.
fn python_of<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any(),
        Value::Number(number) => match number.as_u64() {
            Some(number) => number.into_pyobject(py)?.into_any(),
            None => number
                .as_f64()
                .unwrap_or(f64::NAN)
                .into_pyobject(py)?
                .into_any(),
        },
        Value::String(text) => text.into_pyobject(py)?.into_any(),
        Value::Array(values) => {
            let values = values
                .iter()
                .map(|value| python_of(py, value))
                .collect::<PyResult<Vec<_>>>()?;
            values.into_pyobject(py)?.into_any()
        }
        Value::Object(fields) => {
            let made = PyDict::new(py);
            for (name, value) in fields {
                made.set_item(name, python_of(py, value)?)?;
            }
            made.into_any()
        }
    })
}

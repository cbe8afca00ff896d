//! Objects that are mapped.

use std::sync::{Arc, Mutex, PoisonError};

use gpu_ipc::Gpu;
use gpu_ipc::broker::{Epoch, Layout, Reader, Selector};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::mapping::{Parts, parts_methods};
use super::part::{Addresses, Part, ask, place_of};
use super::scratch::Scratch;
use super::writer::ObjectWriter;
use crate::data::stream;
use crate::interpreter::errors::OrRaise;
use crate::interpreter::waiting::aside;

/// An object that is mapped: a mapping of the names of its parts to arrays, which are read-only.
///
/// Its addresses stay the same whatever epoch they reach, so graphs that were captured over them
/// stay good. Arrays keep the addresses, not the epoch: after ``advance`` they show the newer
/// contents, and while the object sleeps they reach nothing. Launch no work on them meanwhile.
#[pyclass(frozen, weakref, mapping, module = "gpu_ipc")]
pub(crate) struct Object {
    reader: Arc<Mutex<Reader>>,
    gpu: Gpu,
}

impl Object {
    pub fn new(reader: Reader, gpu: &Gpu) -> Object {
        Object {
            reader: Arc::new(Mutex::new(reader)),
            gpu: gpu.clone(),
        }
    }

    /// Asks the reader something.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        question: impl Fn(&mut Reader) -> T + Send + Sync,
    ) -> PyResult<T> {
        self.gpu.check_fork().or_raise()?;
        ask(py, &self.reader, question)
    }

    fn select(&self, py: Python<'_>, epoch: Option<u64>) -> PyResult<Selector> {
        Ok(selector(self.name(py)?, epoch))
    }
}

impl Parts for Object {
    fn with_layout<T: Send>(
        &self,
        py: Python<'_>,
        question: impl Fn(&Layout) -> T + Send + Sync,
    ) -> PyResult<T> {
        self.with(py, |reader| question(reader.layout()))
    }

    fn part(&self, py: Python<'_>, name: &str) -> PyResult<Part> {
        let place = self.with(py, |reader| {
            place_of(reader.layout(), reader.device_ptr(name), name)
        })??;
        Ok(Part::new(
            Addresses::Reader(self.reader.clone()),
            place,
            &self.gpu,
            true,
        ))
    }
}

parts_methods!(Object);

#[pymethods]
impl Object {
    /// The name.
    #[getter]
    fn name(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |reader| reader.name().to_owned())
    }

    /// The epoch that the addresses reach.
    #[getter]
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |reader| reader.epoch().0)
    }

    /// The bytes that the writer put beside the parts.
    #[getter]
    fn meta<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(
            py,
            &self.with(py, |reader| reader.layout().user().to_vec())?,
        ))
    }

    /// Whether the addresses reach nothing.
    #[getter]
    fn asleep(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |reader| reader.is_asleep())
    }

    /// Make PyTorch tensors of all parts, nested as they were put.
    ///
    /// PyTorch has no read-only tensors, and these are on memory that is mapped read-only: a write
    /// to one faults. On a GPU it ends the process' context.
    fn tensors<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py()
            .import("gpu_ipc._objects")?
            .call_method1("tensors", (slf,))
    }

    /// Name a stream whose work touches the object: ``advance``, ``sleep`` and its end wait for
    /// that.
    fn record_stream(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let stream = stream::given(&self.gpu, stream)?;
        self.with(py, |reader| reader.used_on(&stream))?.or_raise()
    }

    /// Move to the newest epoch, or the one that is named, at the same addresses; say whether it is
    /// another.
    ///
    /// Raises:
    ///     LayoutDiffers: the parts are not the same; nothing changed. Open it as an object of its own.
    ///     Poisoned: neither the new memory nor the old could be mapped. Open the object anew.
    #[pyo3(signature = (epoch=None))]
    fn advance(&self, py: Python<'_>, epoch: Option<u64>) -> PyResult<bool> {
        let to = self.select(py, epoch)?;
        let reader = self.reader.clone();
        aside(py, move || {
            reader
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .advance_to(&to)
        })?
        .or_raise()
    }

    /// Give the mapping up and keep the addresses; with ``release`` also the hold on the object.
    #[pyo3(signature = (release=false))]
    fn sleep(&self, py: Python<'_>, release: bool) -> PyResult<()> {
        let reader = self.reader.clone();
        aside(py, move || {
            reader
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .sleep(release)
        })?
        .or_raise()
    }

    /// Map the same object again at the same addresses, or the epoch that is named.
    ///
    /// Raises:
    ///     NotFound: the hold was released and the object has gone meanwhile.
    #[pyo3(signature = (epoch=None))]
    fn wake(&self, py: Python<'_>, epoch: Option<u64>) -> PyResult<()> {
        let to = epoch
            .map(|epoch| self.select(py, Some(epoch)))
            .transpose()?;
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

    /// Copy a part into the part of the same name of an object that is being filled, on the device.
    ///
    /// Raises:
    ///     Invalid: one of both has no such part, or of another length, or it is unchanged there.
    ///     Asleep: this object sleeps.
    fn copy_part(&self, py: Python<'_>, name: String, writer: &ObjectWriter) -> PyResult<()> {
        let (reader, writer) = (self.reader.clone(), writer.writer()?);
        let copied = aside(py, move || {
            let reader = reader.lock().unwrap_or_else(PoisonError::into_inner);
            let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
            reader.copy_part(&name, &mut writer)
        })?;
        copied.or_raise()
    }

    /// Copy the whole object into memory of this process alone, which may be written to. It counts
    /// against the broker's limits, and is given back when the copy and every array made of it are
    /// gone.
    ///
    /// Raises:
    ///     OutOfMemory: there is no room for it.
    ///     Asleep: this object sleeps.
    fn writable_copy(&self, py: Python<'_>) -> PyResult<Scratch> {
        let reader = self.reader.clone();
        let copied = aside(py, move || {
            reader
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .writable_copy()
        })?;
        Ok(Scratch::new(copied.or_raise()?, &self.gpu))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        if self.gpu.check_fork().is_err() {
            return Ok("<gpu_ipc.Object, of the parent process>".into());
        }
        let state = if self.asleep(py)? { ", asleep" } else { "" };
        let (name, epoch, parts) = (self.name(py)?, self.epoch(py)?, self.__len__(py)?);
        Ok(format!(
            "<gpu_ipc.Object {name} epoch {epoch}, {parts} parts{state}>"
        ))
    }
}

/// Names an epoch of an object; the newest unless one is given.
pub(crate) fn selector(name: String, epoch: Option<u64>) -> Selector {
    match epoch {
        None => Selector::Latest(name),
        Some(epoch) => Selector::Epoch(name, Epoch(epoch)),
    }
}

//! Objects that are being filled.

use std::sync::{Arc, Mutex, PoisonError};

use gpu_ipc::Gpu;
use gpu_ipc::broker::{Commit, Writer};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::mapping::names_of;
use super::part::{Addresses, Part, ask, place_of};
use crate::data::stream;
use crate::interpreter::errors::{OrRaise, invalid};
use crate::interpreter::waiting::aside;

/// An object that is being filled. Left without ``commit`` it is aborted: nobody ever sees it.
#[pyclass(frozen, weakref, module = "gpu_ipc")]
pub(crate) struct ObjectWriter {
    writer: Mutex<Option<Arc<Mutex<Writer>>>>,
    gpu: Gpu,
}

impl ObjectWriter {
    pub fn new(writer: Writer, gpu: &Gpu) -> ObjectWriter {
        ObjectWriter {
            writer: Mutex::new(Some(Arc::new(Mutex::new(writer)))),
            gpu: gpu.clone(),
        }
    }

    pub fn writer(&self) -> PyResult<Arc<Mutex<Writer>>> {
        self.gpu.check_fork().or_raise()?;
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.clone().ok_or_else(|| {
            invalid(
                "an object to fill",
                "committed or aborted",
                "one that is being filled",
            )
        })
    }
}

#[pymethods]
impl ObjectWriter {
    /// A part, to be written: an array for every library that takes arrays. One that is unchanged
    /// is read-only.
    fn __getitem__(&self, py: Python<'_>, name: &str) -> PyResult<Part> {
        let writer = self.writer()?;
        let (place, unchanged) = ask(py, &writer, |writer| {
            Ok::<_, PyErr>((
                place_of(writer.layout(), writer.device_ptr(name), name)?,
                writer.is_unchanged(name),
            ))
        })??;
        Ok(Part::new(
            Addresses::Writer(writer),
            place,
            &self.gpu,
            unchanged,
        ))
    }

    /// The names of the parts.
    fn keys(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        ask(py, &*self.writer()?, |writer| names_of(writer.layout()))
    }

    /// Name a stream whose work touches the object.
    fn record_stream(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let stream = stream::given(&self.gpu, stream)?;
        ask(py, &*self.writer()?, |writer| writer.used_on(&stream))?.or_raise()
    }

    /// Make the object visible, whole, once all work on the streams that were named has finished;
    /// return its epoch.
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
        let stream = stream
            .map(|stream| stream::given(&self.gpu, stream))
            .transpose()?;
        let writer = {
            let mut open = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
            match open.take().map(Arc::try_unwrap) {
                Some(Ok(writer)) => writer.into_inner().unwrap_or_else(PoisonError::into_inner),
                Some(Err(shared)) => {
                    let arrays = Arc::strong_count(&shared) - 1;
                    *open = Some(shared);
                    return Err(invalid(
                        "the object to commit",
                        format!("{arrays} arrays or parts of it are alive"),
                        "let go of: its addresses end with the commit",
                    ));
                }
                None => {
                    return Err(invalid(
                        "an object to fill",
                        "committed or aborted",
                        "one that is being filled",
                    ));
                }
            }
        };
        let done = aside(py, move || {
            let used: Vec<_> = stream.iter().collect();
            writer.commit(&used).and_then(Commit::wait)
        });
        Ok(done?.or_raise()?.0)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        let writer = self
            .writer
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        py.detach(|| drop(writer));
    }
}

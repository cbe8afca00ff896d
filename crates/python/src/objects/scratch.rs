//! Memory of a broker that is never committed.

use std::sync::{Arc, Mutex};

use gpu_ipc::Gpu;
use gpu_ipc::broker::{Layout, Scratch as Memory};
use pyo3::prelude::*;

use super::mapping::{Parts, parts_methods};
use super::part::{Addresses, Part, ask, place_of};
use crate::data::stream;
use crate::interpreter::errors::OrRaise;

/// Memory of this process alone, as a mapping of the names of its parts to arrays that may be
/// written to.
///
/// It is the broker's, and counts against its limits; nobody else sees it. It is given back when
/// this object and every array made of it are gone, or when the process dies.
#[pyclass(frozen, weakref, mapping, module = "gpu_ipc")]
pub(crate) struct Scratch {
    memory: Arc<Mutex<Memory>>,
    gpu: Gpu,
}

impl Scratch {
    pub fn new(memory: Memory, gpu: &Gpu) -> Scratch {
        Scratch {
            memory: Arc::new(Mutex::new(memory)),
            gpu: gpu.clone(),
        }
    }

    fn with<T: Send>(
        &self,
        py: Python<'_>,
        question: impl Fn(&mut Memory) -> T + Send + Sync,
    ) -> PyResult<T> {
        self.gpu.check_fork().or_raise()?;
        ask(py, &self.memory, question)
    }
}

impl Parts for Scratch {
    fn with_layout<T: Send>(
        &self,
        py: Python<'_>,
        question: impl Fn(&Layout) -> T + Send + Sync,
    ) -> PyResult<T> {
        self.with(py, |memory| question(memory.layout()))
    }

    fn part(&self, py: Python<'_>, name: &str) -> PyResult<Part> {
        let place = self.with(py, |memory| {
            place_of(memory.layout(), memory.device_ptr(name), name)
        })??;
        Ok(Part::new(
            Addresses::Scratch(self.memory.clone()),
            place,
            &self.gpu,
            false,
        ))
    }
}

parts_methods!(Scratch);

#[pymethods]
impl Scratch {
    /// Make PyTorch tensors of all parts, nested as they were put.
    fn tensors<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py()
            .import("gpu_ipc._objects")?
            .call_method1("tensors", (slf,))
    }

    /// Name a stream whose work touches the memory: its end waits for that.
    fn record_stream(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let stream = stream::given(&self.gpu, stream)?;
        self.with(py, |memory| memory.used_on(&stream))?.or_raise()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        if self.gpu.check_fork().is_err() {
            return Ok("<gpu_ipc.Scratch, of the parent process>".into());
        }
        Ok(format!("<gpu_ipc.Scratch {} parts>", self.__len__(py)?))
    }
}

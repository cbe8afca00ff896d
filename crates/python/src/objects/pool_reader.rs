//! Pools that another process holds, to be read.

use std::sync::Arc;

use gpu_ipc::Gpu;
use gpu_ipc::broker::{Layout, PoolReader as Reader};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::mapping::{Parts, parts_methods};
use super::part::{Addresses, Part, place_of};
use crate::data::number::Whole;
use crate::data::sealed::{self, Sealed};
use crate::data::stream;
use crate::interpreter::errors::{OrRaise, invalid};
use crate::interpreter::waiting::aside;

/// A pool that is mapped read-only, beside a holder that may write to it at any time: a mapping of
/// the names of its parts to arrays, which are read-only.
///
/// What is read is a block's contents only if the block was whole before and after: ``read_whole``
/// does both looks. Work on a stream is put between ``look`` and ``is_still``, with a wait for it.
#[pyclass(frozen, weakref, mapping, module = "gpu_ipc")]
pub(crate) struct PoolReader {
    reader: Arc<Reader>,
    gpu: Gpu,
}

impl PoolReader {
    pub fn new(reader: Reader, gpu: &Gpu) -> PoolReader {
        PoolReader {
            reader: Arc::new(reader),
            gpu: gpu.clone(),
        }
    }

    fn reader(&self) -> PyResult<&Arc<Reader>> {
        self.gpu.check_fork().or_raise()?;
        Ok(&self.reader)
    }
}

impl Parts for PoolReader {
    fn with_layout<T: Send>(
        &self,
        py: Python<'_>,
        question: impl Fn(&Layout) -> T + Send + Sync,
    ) -> PyResult<T> {
        let reader = self.reader()?;
        Ok(py.detach(|| question(reader.layout())))
    }

    fn part(&self, py: Python<'_>, name: &str) -> PyResult<Part> {
        let reader = self.reader()?;
        let place = py.detach(|| place_of(reader.layout(), reader.device_ptr(name), name))?;
        let addresses = Addresses::PoolReader(reader.clone());
        Ok(Part::new(addresses, place, &self.gpu, true))
    }
}

parts_methods!(PoolReader);

#[pymethods]
impl PoolReader {
    /// The name.
    #[getter]
    fn name(&self) -> PyResult<String> {
        Ok(self.reader()?.name().to_owned())
    }

    /// How often the pool had been adopted when this reader opened. ``Broker.watch`` of the name, with
    /// it as ``seen``, waits for the next holder.
    #[getter]
    fn generation(&self) -> PyResult<u64> {
        Ok(self.reader()?.generation())
    }

    /// How many blocks the journal has entries for.
    #[getter]
    fn blocks(&self) -> PyResult<u32> {
        Ok(self.reader()?.blocks())
    }

    /// The bytes that were put beside the parts when the pool was made.
    #[getter]
    fn meta<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, self.reader()?.layout().user()))
    }

    /// Make PyTorch tensors of all parts, nested as the pool was made. A write to one faults.
    fn tensors<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py()
            .import("gpu_ipc._objects")?
            .call_method1("tensors", (slf,))
    }

    /// Name a stream whose work touches the pool: the mapping stays until that is done.
    fn record_stream(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let (reader, stream) = (self.reader()?, stream::given(&self.gpu, stream)?);
        py.detach(|| reader.used_on(&stream)).or_raise()
    }

    /// List the blocks that are whole at this moment; the holder may give any of them up meanwhile.
    fn sealed(&self, py: Python<'_>) -> PyResult<Vec<Sealed>> {
        let reader = self.reader()?;
        let found = py.detach(|| reader.sealed());
        Ok(found.into_iter().map(Sealed).collect())
    }

    /// Say what a block holds, or None if it is not whole at this moment.
    fn look(&self, block: Whole) -> PyResult<Option<Sealed>> {
        Ok(self.reader()?.look(sealed::block(block)?).map(Sealed))
    }

    /// Whether a block was whole all along since the look: what was copied from it between is what
    /// the look found.
    fn is_still(&self, found: &Sealed) -> PyResult<bool> {
        Ok(self.reader()?.is_still(&found.0))
    }

    /// Copy a block that is whole from its place in a part to the host.
    ///
    /// Args:
    ///     block: its number.
    ///     part: the name of the part that it lies in.
    ///     offset, nbytes: where in the part, in bytes, and how many.
    ///
    /// Returns:
    ///     What the block holds, and its bytes; None if it is not whole, or the holder gave it up meanwhile.
    ///
    /// Raises:
    ///     Invalid: the bytes do not lie in a part.
    fn read_whole<'py>(
        &self,
        py: Python<'py>,
        block: Whole,
        part: String,
        offset: Whole,
        nbytes: Whole,
    ) -> PyResult<Option<(Sealed, Bound<'py, PyBytes>)>> {
        let (reader, block) = (self.reader()?.clone(), sealed::block(block)?);
        let len = reader.layout().part(&part).map_or(0, |part| part.spec.len);
        if nbytes.0 > len {
            // Before memory is taken for them.
            return Err(invalid(
                "the range to read of a part",
                format!("{} bytes of {part}, which has {len}", nbytes.0),
                "inside it",
            ));
        }
        let copied = aside(py, move || {
            let mut bytes = vec![0; nbytes.count()];
            let found = reader.read_whole(block, &part, offset.0, &mut bytes)?;
            Ok::<_, gpu_ipc::broker::ObjectError>(found.map(|found| (found, bytes)))
        });
        let copied = copied?.or_raise()?;
        Ok(copied.map(|(found, bytes)| (Sealed(found), PyBytes::new(py, &bytes))))
    }

    fn __repr__(&self) -> String {
        if self.gpu.check_fork().is_err() {
            return "<gpu_ipc.PoolReader, of the parent process>".into();
        }
        let (name, generation) = (self.reader.name(), self.reader.generation());
        format!("<gpu_ipc.PoolReader {name} generation {generation}>")
    }
}

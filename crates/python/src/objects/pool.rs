//! Pools that this process holds.

use std::sync::{Arc, Mutex, PoisonError};

use gpu_ipc::Gpu;
use gpu_ipc::broker::pool::Key;
use gpu_ipc::broker::{Layout, Pool as Hold};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyTuple};

use super::mapping::{Parts, parts_methods};
use super::part::{Addresses, Part, place_of};
use super::torch_pool;
use crate::data::number::Whole;
use crate::data::sealed::{self, Sealed};
use crate::data::stream;
use crate::interpreter::errors::{OrRaise, invalid};
use crate::interpreter::waiting::aside;

/// A pool that this process holds: a mapping of the names of its parts to arrays that may be
/// written to. The next holder finds their bytes as this one left them.
///
/// Contents come in blocks, whatever the program calls so. A block is given up by ``invalidate``,
/// then filled by work on streams, then sealed behind that work by ``seal``. What is sealed is
/// whole, and ``sealed`` lists it, also for the next holder after this process died.
///
/// The hold ends with ``close``, which waits for the streams, and with the death of this process
/// once its GPU work has ended. It also ends, behind the streams that were named, when this object
/// and every array made of it are gone.
#[pyclass(frozen, weakref, mapping, module = "gpu_ipc")]
pub(crate) struct Pool {
    hold: Mutex<Option<Arc<Hold>>>,
    /// PyTorch's own object, the same for every call.
    torch: Mutex<Option<Py<PyAny>>>,
    gpu: Gpu,
}

impl Pool {
    pub fn new(hold: Hold, gpu: &Gpu) -> Pool {
        Pool {
            hold: Mutex::new(Some(Arc::new(hold))),
            torch: Mutex::new(None),
            gpu: gpu.clone(),
        }
    }

    pub fn hold(&self) -> PyResult<Arc<Hold>> {
        self.gpu.check_fork().or_raise()?;
        let hold = self.hold.lock().unwrap_or_else(PoisonError::into_inner);
        hold.clone()
            .ok_or_else(|| invalid("a pool", "closed", "held: adopt it again"))
    }

    fn take_torch(&self) -> Option<Py<PyAny>> {
        let mut torch = self.torch.lock().unwrap_or_else(PoisonError::into_inner);
        torch.take()
    }

    #[cfg(feature = "faults")]
    pub fn use_part(&self, part: Option<&str>) -> PyResult<()> {
        torch_pool::use_part(&self.gpu, &self.hold()?, part)
    }
}

impl Parts for Pool {
    fn with_layout<T: Send>(
        &self,
        py: Python<'_>,
        question: impl Fn(&Layout) -> T + Send + Sync,
    ) -> PyResult<T> {
        let hold = self.hold()?;
        Ok(py.detach(|| question(hold.layout())))
    }

    fn part(&self, py: Python<'_>, name: &str) -> PyResult<Part> {
        let hold = self.hold()?;
        let place = py.detach(|| place_of(hold.layout(), hold.device_ptr(name), name))?;
        Ok(Part::new(Addresses::Pool(hold), place, &self.gpu, false))
    }
}

parts_methods!(Pool);

#[pymethods]
impl Pool {
    /// The name.
    #[getter]
    fn name(&self) -> PyResult<String> {
        Ok(self.hold()?.name().to_owned())
    }

    /// How often the pool was adopted, this time included.
    #[getter]
    fn generation(&self) -> PyResult<u64> {
        Ok(self.hold()?.generation())
    }

    /// How the hold before this one ended: ``never`` if there was none, ``closed`` if its holder
    /// closed it behind its streams, ``died`` if a filling may have been under way.
    #[getter]
    fn previous(&self) -> PyResult<&'static str> {
        Ok(self.hold()?.previous().name())
    }

    /// How many blocks the journal has entries for.
    #[getter]
    fn blocks(&self) -> PyResult<u32> {
        Ok(self.hold()?.blocks())
    }

    /// The bytes that were put beside the parts when the pool was made.
    #[getter]
    fn meta<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, self.hold()?.layout().user()))
    }

    /// The address and the bytes of each region: all parts lie in them.
    #[getter]
    fn regions(&self) -> PyResult<Vec<(u64, u64)>> {
        let regions = self.hold()?.regions();
        Ok(regions.into_iter().map(|(at, len)| (at.0, len)).collect())
    }

    /// Make PyTorch tensors of all parts, nested as the pool was made.
    fn tensors<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py()
            .import("gpu_ipc._objects")?
            .call_method1("tensors", (slf,))
    }

    /// A ``torch.cuda.MemPool`` whose segments lie in a part of this pool, the same at every call::
    ///
    ///     with torch.cuda.use_mem_pool(pool.torch_pool()):
    ///         kv = torch.empty(shape, dtype=torch.bfloat16, device="cuda:0")
    ///
    /// A segment lies in the lowest gap. So a process that adopts the pool, and allocates what the
    /// holder before it allocated in the same order, has that one's bytes in its tensors. A process
    /// has one such pool and part for each device, until the pool is closed.
    ///
    /// Args:
    ///     part: the name of the part; None is the only one.
    ///
    /// Raises:
    ///     Unsupported: the pool is not on a CUDA device.
    ///     Invalid: there is no such part, or another pool or part has the device.
    #[pyo3(signature = (part=None))]
    fn torch_pool<'py>(&self, py: Python<'py>, part: Option<&str>) -> PyResult<Bound<'py, PyAny>> {
        let hold = self.hold()?;
        torch_pool::check(&self.gpu, &hold)?;
        torch_pool::use_part(&self.gpu, &hold, part)?;
        let known = || self.torch.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = &*known() {
            return Ok(made.bind(py).clone());
        }
        let made = torch_pool::make(py, &self.gpu)?;
        // Another thread may have been faster; nothing of the one made here was allocated yet.
        let first = known()
            .get_or_insert_with(|| made.clone().unbind())
            .clone_ref(py);
        Ok(first.into_bound(py))
    }

    /// Name a stream whose work touches the pool: the end of the hold waits for that. The stream of
    /// a seal is named by it.
    fn record_stream(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let (hold, stream) = (self.hold()?, stream::given(&self.gpu, stream)?);
        py.detach(|| hold.used_on(&stream)).or_raise()
    }

    /// Give a block's contents up: from here on it may be filled. Call it before the filling is
    /// queued.
    ///
    /// Raises:
    ///     Invalid: the journal has no entry for the block.
    ///     Exhausted: the block was given up 4,294,967,295 times.
    fn invalidate(&self, py: Python<'_>, block: Whole) -> PyResult<()> {
        let (hold, block) = (self.hold()?, sealed::block(block)?);
        py.detach(|| hold.invalidate(block)).or_raise()
    }

    /// Queue the seal of a block behind the work on a stream: once that has finished, the block is
    /// whole, and listed under its key. Returns at once where streams write words.
    ///
    /// Args:
    ///     block: its number.
    ///     key: what its contents are called, 16 bytes.
    ///     stream: the stream whose work fills the block.
    ///
    /// Raises:
    ///     Invalid: the block was not invalidated since its last seal, or has no entry.
    ///     Capturing: the stream is being captured into a graph.
    fn seal(
        &self,
        py: Python<'_>,
        block: Whole,
        key: &[u8],
        stream: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.queue(py, vec![(sealed::block(block)?, sealed::key(key)?)], stream)
    }

    /// As ``seal``, for pairs of block and key, in one batch. A refused batch seals nothing.
    ///
    /// Raises:
    ///     Invalid: as ``seal``, or a block is named twice.
    fn seal_all(
        &self,
        py: Python<'_>,
        blocks: Vec<(Whole, PyBackedBytes)>,
        stream: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let pairs = blocks
            .iter()
            .map(|(block, key)| Ok((sealed::block(*block)?, sealed::key(key)?)));
        self.queue(py, pairs.collect::<PyResult<_>>()?, stream)
    }

    /// List the blocks that are whole at this moment, in the order of their numbers.
    fn sealed(&self, py: Python<'_>) -> PyResult<Vec<Sealed>> {
        let hold = self.hold()?;
        let found = py.detach(|| hold.sealed()).or_raise()?;
        Ok(found.into_iter().map(Sealed).collect())
    }

    /// End the hold: wait for the streams that were named, and return when the broker has noted it.
    /// Then another process may adopt the pool. A second call does nothing.
    ///
    /// Args:
    ///     stream: one more stream whose work touches the pool.
    ///
    /// Raises:
    ///     Invalid: parts, arrays or tensors of the pool are still alive: drop them first, and what
    ///         ``torch_pool`` returned. Nothing changed.
    ///     Timeout: the broker is away; it is told when it is back.
    #[pyo3(signature = (stream=None))]
    fn close(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        self.gpu.check_fork().or_raise()?;
        let stream = stream
            .map(|stream| stream::given(&self.gpu, stream))
            .transpose()?;
        // Its end gives back the segments that PyTorch keeps for later.
        drop(self.take_torch());
        let hold = {
            let mut held = self.hold.lock().unwrap_or_else(PoisonError::into_inner);
            match held.take().map(Arc::try_unwrap) {
                None => return Ok(()),
                Some(Ok(hold)) => hold,
                Some(Err(shared)) => {
                    let users = Arc::strong_count(&shared) - 1;
                    *held = Some(shared);
                    return Err(invalid(
                        "the pool to close",
                        format!("kept by {users} arrays, parts or tensors"),
                        "let go of: its addresses end with the hold",
                    ));
                }
            }
        };
        let closed = aside(py, move || hold.close(&stream.iter().collect::<Vec<_>>()));
        closed?.or_raise()
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Closes the pool. After an exception, whose traceback may keep arrays, the hold ends when they
    /// are gone.
    #[pyo3(signature = (*raised))]
    fn __exit__(&self, py: Python<'_>, raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        if raised.get_item(0).is_ok_and(|kind| kind.is_none()) {
            return self.close(py, None);
        }
        drop(self.take_torch());
        let hold = self
            .hold
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        py.detach(|| drop(hold));
        Ok(())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(invalid(
            "what to pickle",
            "a pool",
            "its name: close it, and let the other process adopt it",
        ))
    }

    fn __repr__(&self) -> String {
        if self.gpu.check_fork().is_err() {
            return "<gpu_ipc.Pool, of the parent process>".into();
        }
        match self.hold() {
            Err(_) => "<gpu_ipc.Pool, closed>".into(),
            Ok(hold) => format!(
                "<gpu_ipc.Pool {} generation {}, {} blocks>",
                hold.name(),
                hold.generation(),
                hold.blocks()
            ),
        }
    }
}

impl Pool {
    fn queue(
        &self,
        py: Python<'_>,
        blocks: Vec<(u32, Key)>,
        stream: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (hold, stream) = (self.hold()?, stream::given(&self.gpu, stream)?);
        if self.gpu.caps().stream_writes {
            return py.detach(|| hold.seal_all(&blocks, &stream)).or_raise();
        }
        // The library waits for the stream.
        aside(py, move || hold.seal_all(&blocks, &stream))?.or_raise()
    }
}

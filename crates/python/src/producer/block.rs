//! Blocks of a session, as Python holds them.

use std::sync::{Mutex, PoisonError};

use gpu_ipc::{Error, Gpu};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::shared::Lent;
use crate::arrays::class::{Array, array_methods};
use crate::data::layout::Layout;
use crate::data::stream::{self, ConsumerStream};
use crate::interpreter::errors::{OrRaise, invalid};
use crate::interpreter::waiting::{duration, in_slices};

/// A block of a session's memory: allocate, fill, share, drop.
///
/// It is an array of bytes for every library that takes arrays: ``torch.from_dlpack(block)``,
/// ``numpy.asarray(block)`` on the host backend. Such an array keeps the block, and is shared as
/// any other array, without a copy. When the block and its arrays are dropped, the memory comes
/// back after the last lease on it has ended.
#[pyclass(frozen, weakref, module = "gpu_ipc")]
pub(crate) struct Block {
    lent: Mutex<Option<Lent>>,
    layout: Layout,
    gpu: Gpu,
}

impl Block {
    pub fn new(lent: Lent) -> Block {
        let (layout, gpu) = (
            Layout::bytes(lent.block().len()),
            lent.session().gpu.clone(),
        );
        Block {
            lent: Mutex::new(Some(lent)),
            layout,
            gpu,
        }
    }

    pub fn lent(&self) -> PyResult<Lent> {
        self.gpu.check_fork().or_raise()?;
        let lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        lent.clone().ok_or_else(|| {
            invalid(
                "a block",
                "released",
                "one that was not released: allocate another",
            )
        })
    }
}

impl Array for Block {
    type Hold = Lent;

    fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn hold(&self) -> PyResult<(u64, Lent)> {
        self.lent().map(|lent| (lent.start(), lent))
    }

    /// The block's own process fills it, and knows when.
    fn use_on(&self, py: Python<'_>, lent: &Lent, on: ConsumerStream) -> PyResult<()> {
        let ConsumerStream::Raw(raw) = on else {
            return Ok(());
        };
        py.detach(|| lent.block().used_on(&stream::of_handle(&self.gpu, raw)?))
            .or_raise()
    }
}

#[pymethods]
impl Block {
    /// How many leases on it are granted or held, and tickets of a number of claims that can still
    /// be claimed.
    #[getter]
    fn outstanding(&self) -> PyResult<usize> {
        Ok(self.lent()?.block().outstanding())
    }

    /// Wait until no lease on the block is outstanding, so that it can be written again.
    ///
    /// Args:
    ///     timeout: seconds; None waits for ever.
    ///
    /// Raises:
    ///     Timeout: some are outstanding still.
    #[pyo3(signature = (timeout=None))]
    fn wait_released(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let lent = self.lent()?;
        let waited = in_slices(py, duration(timeout)?, |slice| {
            match lent.block().wait_released(Some(slice)) {
                Err(Error::Deadline { .. }) => None,
                done => Some(done),
            }
        })?;
        waited
            .unwrap_or(Err(Error::Deadline {
                what: "the consumers of a block",
            }))
            .or_raise()
    }

    /// Name a stream whose queued work touches the block: it is not used again before that is done.
    fn record_stream(&self, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let lent = self.lent()?;
        let stream = stream::given(&self.gpu, stream)?;
        lent.block().used_on(&stream).or_raise()
    }

    /// Give the block up. Arrays that were made of it keep it.
    fn release(&self, py: Python<'_>) {
        let lent = self
            .lent
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        py.detach(|| drop(lent));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        self.release(py);
    }

    fn __repr__(&self) -> String {
        match self.lent() {
            Ok(lent) => {
                format!(
                    "<gpu_ipc.Block {} bytes, {} outstanding>",
                    lent.block().len(),
                    lent.block().outstanding()
                )
            }
            Err(_) if self.gpu.check_fork().is_err() => {
                "<gpu_ipc.Block, of the parent process>".into()
            }
            Err(_) => "<gpu_ipc.Block, released>".into(),
        }
    }
}

array_methods!(Block);

//! Blocks of a session, as Python holds them.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

use gpu_ipc::{Error, SentBlock};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::dlpack::{Device, Export, Holder};
use crate::errors::OrRaise;
use crate::layout::Layout;
use crate::shared::Shared;
use crate::streams::{self, ConsumerStream};
use crate::waiting::{duration, in_slices};
use crate::{buffer, dlpack, interface};

/// A block, held by its Python object and by every array that was made of it; the last one that is dropped drops the
/// block.
#[derive(Clone)]
pub(crate) struct Lent(Arc<Owned>);

pub(crate) struct Owned {
    pub block: SentBlock,
    pub session: Arc<Shared>,
    pub kind: Kind,
}

/// Whose memory a block is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// The session's, given out as one block.
    Whole,
    /// The session's, in the hands of PyTorch's allocator, which gives out parts of it again and again.
    Segment,
    /// Of another allocator, adopted for one grant; or a part of a segment. It may begin where a segment does.
    Adopted,
}

impl Lent {
    pub fn new(block: SentBlock, session: &Arc<Shared>, kind: Kind) -> Lent {
        let lent = Lent(Arc::new(Owned { block, session: session.clone(), kind }));
        if kind != Kind::Adopted {
            session.note_block(&lent);
        }
        lent
    }

    pub fn of(owned: Arc<Owned>) -> Lent {
        Lent(owned)
    }

    pub fn block(&self) -> &SentBlock {
        &self.0.block
    }

    pub fn owned(&self) -> &Arc<Owned> {
        &self.0
    }

    /// Returns the address of the first byte.
    pub fn start(&self) -> u64 {
        self.0.block.device_ptr().0
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // Before the block itself: its address may be another's as soon as it is gone.
        if self.kind != Kind::Adopted {
            self.session.forget_block(self.block.device_ptr().0);
        }
    }
}

/// A block of a session's memory: allocate, fill, share, drop.
///
/// It is an array of bytes for every library that takes arrays: ``torch.from_dlpack(block)``, ``numpy.asarray(block)``
/// on the host backend. Such an array keeps the block, and is shared as any other array, without a copy. When the block
/// and its arrays are dropped, the memory comes back after the last lease on it has ended.
#[pyclass(frozen, module = "gpu_ipc")]
pub(crate) struct Block {
    lent: Mutex<Option<Lent>>,
    layout: Layout,
}

impl Block {
    pub fn new(lent: Lent) -> Block {
        let layout = Layout::bytes(lent.block().len());
        Block { lent: Mutex::new(Some(lent)), layout }
    }

    pub fn lent(&self) -> PyResult<Lent> {
        let lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        lent.clone()
            .ok_or(Error::Invalid {
                what: "a block",
                got: "released".into(),
                must: "one that was not released: allocate another",
            })
            .or_raise()
    }
}

#[pymethods]
impl Block {
    /// Bytes.
    #[getter]
    fn nbytes(&self) -> PyResult<u64> {
        Ok(self.lent()?.block().len())
    }

    /// The address of the first byte, in this process.
    #[getter]
    fn data_ptr(&self) -> PyResult<u64> {
        Ok(self.lent()?.start())
    }

    /// How many leases on it are granted or held, and tickets of a number of claims that can still be claimed.
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
        let waited = in_slices(py, duration(timeout)?, |slice| match lent.block().wait_released(Some(slice)) {
            Err(Error::Deadline { .. }) => None,
            done => Some(done),
        })?;
        waited.unwrap_or(Err(Error::Deadline { what: "the consumers of a block" })).or_raise()
    }

    /// Name a stream whose queued work touches the block: it is not used again before that is done.
    fn record_stream(&self, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let lent = self.lent()?;
        let stream = streams::given(&lent.owned().session.gpu, stream)?;
        lent.block().used_on(&stream).or_raise()
    }

    /// Give the block up. Arrays that were made of it keep it.
    fn release(&self, py: Python<'_>) {
        let lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(lent));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        self.release(py);
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.nbytes()? as usize)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let lent = self.lent()?;
        let gpu = &lent.owned().session.gpu;
        let device = Device::of(gpu);
        dlpack::check_request(device, dl_device, copy)?;
        if let ConsumerStream::Raw(raw) = streams::of_consumer(gpu, stream)? {
            let stream = streams::borrow(py, gpu, raw, None)?;
            lent.block().used_on(&stream).or_raise()?;
        }
        let export =
            Export { start: lent.start(), layout: &self.layout, device, read_only: false, holder: Holder::Lent(lent) };
        export.capsule(py, max_version.is_some_and(|(major, _)| major >= 1))
    }

    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        let device = Device::of(&self.lent()?.owned().session.gpu);
        Ok((device.kind, device.id))
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let lent = self.lent()?;
        interface::only_cuda(&lent.owned().session.gpu)?;
        interface::describe(py, lent.start(), &self.layout, false, None)
    }

    // SAFETY: Python calls it as the protocol says: `view` is its own to fill, or null.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let lent = slf.get().lent()?;
        buffer::only_host(&lent.owned().session.gpu)?;
        let (start, layout) = (lent.start(), &slf.get().layout);
        // SAFETY: `fill_array` asks that the holder keeps an array of that layout: the block has as many bytes.
        unsafe { buffer::fill_array(slf.as_any(), start, layout, false, Holder::Lent(lent), view, flags) }
    }

    // SAFETY: Python calls it once for each view that `__getbuffer__` filled.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: `release_array` asks for just that.
        unsafe { buffer::release_array(view) };
    }

    fn __repr__(&self) -> String {
        match self.lent() {
            Ok(lent) => {
                format!("<gpu_ipc.Block {} bytes, {} outstanding>", lent.block().len(), lent.block().outstanding())
            }
            Err(_) => "<gpu_ipc.Block, released>".into(),
        }
    }
}

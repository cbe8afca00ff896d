//! Received arrays: what a claim gives.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use gpu_ipc::{ClaimError, Error, Gpu, ReceivedBlock, State, Wait};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::addressee;
use crate::descriptor::Descriptor;
use crate::dlpack::{Device, Export, Holder};
use crate::errors::{OrRaise, poisoned, unsupported};
use crate::layout::Layout;
use crate::streams::{self, ConsumerStream};
use crate::waiting::{aside, duration, in_slices};
use crate::{buffer, dlpack, exchange, interface};

/// An array of another process, under a lease that ends when the last array made of it is dropped.
///
/// Every library that takes arrays takes it: ``torch.from_dlpack(received)``, ``cupy.from_dlpack``,
/// ``jax.dlpack.from_dlpack``, ``numpy.from_dlpack`` on the host backend, and whatever knows the CUDA array interface.
/// ``received.torch()`` is the fast way to PyTorch. The array alone keeps the lease; this object can go.
///
/// Each of these waits for the producer's work on the stream that its library names, and that stream counts as used:
/// the lease ends when the work on it is done. Name further streams with ``record_stream``.
#[pyclass(frozen, module = "gpu_ipc")]
pub(crate) struct Received {
    block: Mutex<Option<ReceivedBlock>>,
    layout: Layout,
    meta: Vec<u8>,
    gpu: Gpu,
    read_only: bool,
    /// Somebody has the address by the CUDA array interface, which keeps this object and nothing else.
    is_exposed: AtomicBool,
}

impl Received {
    pub fn new(block: ReceivedBlock, descriptor: &Descriptor, gpu: &Gpu, read_only: bool) -> Received {
        Received {
            block: Mutex::new(Some(block)),
            layout: descriptor.layout().clone(),
            meta: descriptor.meta_bytes().to_vec(),
            gpu: gpu.clone(),
            read_only,
            is_exposed: AtomicBool::new(false),
        }
    }

    fn block(&self) -> PyResult<ReceivedBlock> {
        let block = self.block.lock().unwrap_or_else(PoisonError::into_inner);
        block
            .clone()
            .ok_or(Error::Invalid {
                what: "a received array",
                got: "released".into(),
                must: "one that was not released",
            })
            .or_raise()
    }

    /// Waits on the host until the contents are there.
    fn wait_on_host(&self, py: Python<'_>, block: &ReceivedBlock, timeout: Option<f64>) -> PyResult<()> {
        if block.state() == State::Pending {
            let waited = in_slices(py, duration(timeout)?, |slice| match block.wait(Wait::Host, Some(slice)) {
                Err(ClaimError::Backend(Error::Deadline { .. })) => None,
                done => Some(done),
            })?;
            let late = || Err(Error::Deadline { what: "the producer's work on the block" }.into());
            waited.unwrap_or_else(late).or_raise()?;
        }
        if block.state() == State::Poisoned { Err(poisoned()) } else { Ok(()) }
    }

    /// Lets a stream wait for the contents, and notes that it is used.
    fn wait_on_stream(&self, py: Python<'_>, block: &ReceivedBlock, stream: &gpu_ipc::Stream) -> PyResult<()> {
        if block.state() == State::Poisoned {
            return Err(poisoned());
        }
        let waited = in_slices(py, None, |slice| match block.wait(Wait::Stream(stream), Some(slice)) {
            Err(ClaimError::Backend(Error::Deadline { .. })) => None,
            done => Some(done),
        })?;
        waited.unwrap_or(Ok(())).or_raise()
    }

    fn export(&self, block: ReceivedBlock) -> Export<'_> {
        Export {
            start: block.device_ptr().0.wrapping_add(self.layout.offset),
            layout: &self.layout,
            device: Device::of(&self.gpu),
            read_only: self.read_only,
            holder: Holder::Received(block),
        }
    }
}

#[pymethods]
impl Received {
    /// The name of the element type: ``float32``, ``bfloat16``, ``float8_e4m3fn``.
    #[getter]
    fn dtype(&self) -> String {
        self.layout.dtype.name()
    }

    /// The lengths of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.layout.shape)
    }

    /// The steps between elements of each dimension, in elements.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.layout.full_strides())
    }

    /// Bytes of the elements.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.layout.nbytes().unwrap_or(u64::MAX)
    }

    /// The bytes that the producer's ``share(..., meta=...)`` put in.
    #[getter]
    fn meta<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.meta)
    }

    /// The address of the first element, in this process. The contents may be pending: see ``wait``.
    #[getter]
    fn data_ptr(&self) -> PyResult<u64> {
        Ok(self.export(self.block()?).start)
    }

    /// The device.
    #[getter]
    fn device(&self) -> crate::device::Device {
        crate::device::Device::of(&self.gpu)
    }

    /// Whether the memory is mapped so that a write to it faults.
    #[getter]
    fn read_only(&self) -> bool {
        self.read_only
    }

    /// The region that it lies in, as ``Notice.region`` gives it.
    #[getter]
    fn region(&self) -> PyResult<u64> {
        Ok(self.block()?.region().0)
    }

    /// What the contents are worth: ``pending``, the producer's work is not done; ``ready``; ``ready_producer_gone``,
    /// and the producer is gone; ``poisoned``, it died before its work was done, and they are garbage.
    #[getter]
    fn state(&self) -> PyResult<&'static str> {
        Ok(match self.block()?.state() {
            State::Pending => "pending",
            State::Ready => "ready",
            State::ReadyProducerGone => "ready_producer_gone",
            State::Poisoned => "poisoned",
        })
    }

    /// Wait until the producer's work on the array is done.
    ///
    /// Raises:
    ///     Stale: the producer died before, and the contents are garbage.
    ///     Timeout: it is not done after ``timeout`` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.wait_on_host(py, &self.block()?, timeout)
    }

    /// Name a stream whose work touches the array: the lease does not end before that is done.
    fn record_stream(&self, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let block = self.block()?;
        block.used_on(&streams::given(&self.gpu, stream)?).or_raise()
    }

    /// Make a PyTorch tensor of it, on PyTorch's current stream. Faster than ``torch.from_dlpack``, and means the same.
    ///
    /// Raises:
    ///     Unsupported: the lease is read-only; PyTorch has no such tensors.
    ///     ``received.without_read_only_flag().torch()``
    ///         makes one all the same; a write to it ends the process' GPU context.
    fn torch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if self.read_only {
            return Err(unsupported(
                "a PyTorch tensor of a read-only lease",
                "PyTorch has no read-only tensors, and a write to the memory faults",
                "connect without `read_only`, or use received.without_read_only_flag().torch() and never write to it",
            ));
        }
        let block = self.block()?;
        match exchange::current_stream(py, Device::of(&self.gpu))? {
            None => self.wait_on_host(py, &block, None)?,
            Some(raw) => {
                let stream = streams::borrow(py, &self.gpu, raw, None)?;
                self.wait_on_stream(py, &block, &stream)?;
            }
        }
        exchange::tensor(py, self.export(block))
    }

    /// Hand out the same lease without the mark that it is read-only, to libraries that do not know the mark.
    ///
    /// The memory stays mapped read-only: on a GPU, a write to it ends the process' context.
    fn without_read_only_flag(&self) -> PyResult<Received> {
        Ok(Received {
            block: Mutex::new(Some(self.block()?)),
            layout: self.layout.clone(),
            meta: self.meta.clone(),
            gpu: self.gpu.clone(),
            read_only: false,
            is_exposed: AtomicBool::new(false),
        })
    }

    /// Ask the producer for a descriptor of the array for somebody else. The new lease does not depend on this one.
    ///
    /// Your own work on the array must be done: the receiver waits for none of it.
    ///
    /// Args:
    ///     to: as for ``Session.share``.
    ///     timeout: seconds to wait for the producer's work and its answer; None waits for ever.
    ///     meta: bytes of your own; None passes on the producer's.
    ///
    /// Raises:
    ///     Refused: the producer says why.
    ///     ProducerGone: it grants nothing any more.
    ///     Timeout: what the producer may have granted by then lapses unclaimed.
    #[pyo3(signature = (to=None, *, timeout=None, meta=None))]
    fn forward(
        &self,
        py: Python<'_>,
        to: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        meta: Option<Vec<u8>>,
    ) -> PyResult<Descriptor> {
        let (to, timeout, block) = (addressee::to(to)?, duration(timeout)?, self.block()?);
        // Not in slices: each would be a question, and a grant, of its own.
        let grant = aside(py, move || block.forward(to, timeout))?.or_raise()?;
        Ok(Descriptor::new(&grant, self.layout.clone(), meta.as_ref().unwrap_or(&self.meta)))
    }

    /// Give up this object's hold on the lease. Arrays that were made of it keep theirs.
    ///
    /// After the CUDA array interface was read the hold stays until this object is dropped: that interface keeps
    /// nothing else.
    fn release(&self, py: Python<'_>) {
        if !self.is_exposed.load(Ordering::Relaxed) {
            let block = self.block.lock().unwrap_or_else(PoisonError::into_inner).take();
            py.detach(|| drop(block));
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) {
        self.release(py);
    }

    fn __len__(&self) -> PyResult<usize> {
        let first = self.layout.shape.first();
        let length =
            first.ok_or_else(|| pyo3::exceptions::PyTypeError::new_err("len() of an array without dimensions"))?;
        Ok(*length as usize)
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
        let block = self.block()?;
        dlpack::check_request(Device::of(&self.gpu), dl_device, copy)?;
        match streams::of_consumer(&self.gpu, stream)? {
            ConsumerStream::NoSync => {}
            ConsumerStream::Host => self.wait_on_host(py, &block, None)?,
            ConsumerStream::Raw(raw) => {
                let stream = streams::borrow(py, &self.gpu, raw, None)?;
                self.wait_on_stream(py, &block, &stream)?;
            }
        }
        self.export(block).capsule(py, max_version.is_some_and(|(major, _)| major >= 1))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        let device = Device::of(&self.gpu);
        (device.kind, device.id)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        interface::only_cuda(&self.gpu)?;
        let block = self.block()?;
        // The interface lets nobody queue a wait on a stream that its user names later.
        self.wait_on_host(py, &block, None)?;
        let interface = interface::describe(py, self.export(block).start, &self.layout, self.read_only, None)?;
        self.is_exposed.store(true, Ordering::Relaxed);
        Ok(interface)
    }

    // SAFETY: Python calls it as the protocol says: `view` is its own to fill, or null.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let received = slf.get();
        buffer::only_host(&received.gpu)?;
        let block = received.block()?;
        received.wait_on_host(slf.py(), &block, None)?;
        let (start, layout) = (received.export(block.clone()).start, &received.layout);
        let (read_only, holder) = (received.read_only, Holder::Received(block));
        // SAFETY: `fill_array` asks that the holder keeps an array of that layout: the descriptor was checked against
        // its block, which the lease keeps.
        unsafe { buffer::fill_array(slf.as_any(), start, layout, read_only, holder, view, flags) }
    }

    // SAFETY: Python calls it once for each view that `__getbuffer__` filled.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: `release_array` asks for just that.
        unsafe { buffer::release_array(view) };
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(crate::errors::invalid("what to pickle", "a received array", "a descriptor: forward() asks for one"))
    }

    fn __repr__(&self) -> String {
        let shape: Vec<String> = self.layout.shape.iter().map(i64::to_string).collect();
        let state = self.state().unwrap_or("released");
        format!("<gpu_ipc.Received {}[{}], {state}>", self.layout.dtype.name(), shape.join(", "))
    }
}

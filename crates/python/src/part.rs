//! A part of an object, as an array.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

use gpu_ipc::Gpu;
use gpu_ipc::broker::{Reader, Writer};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::dlpack::{self, Device, Export, Holder};
use crate::errors::{OrRaise, unsupported};
use crate::layout::Layout;
use crate::streams::{self, ConsumerStream};
use crate::{buffer, exchange, interface};

/// What keeps the addresses of a part.
#[derive(Clone)]
pub(crate) enum Owner {
    /// An object that is being filled.
    Writer(Arc<Writer>),
    /// One that is mapped.
    Reader(Arc<Mutex<Reader>>),
}

/// A part of an object: an array for every library that takes arrays.
///
/// It and every array made of it keep the addresses. The stream that a library names when it takes the array counts as
/// used; name further streams with ``record_stream`` of the object.
#[pyclass(frozen, module = "gpu_ipc")]
pub(crate) struct Part {
    owner: Owner,
    start: u64,
    layout: Layout,
    gpu: Gpu,
    read_only: bool,
}

impl Part {
    pub fn new(owner: Owner, start: u64, layout: Layout, gpu: &Gpu) -> Part {
        let read_only = matches!(owner, Owner::Reader(_));
        Part { owner, start, layout, gpu: gpu.clone(), read_only }
    }

    /// Notes that work on a stream touches the object.
    fn use_on(&self, py: Python<'_>, raw: u64) -> PyResult<()> {
        let stream = streams::borrow(py, &self.gpu, raw, None)?;
        let noted = py.detach(|| match &self.owner {
            Owner::Writer(writer) => writer.used_on(&stream),
            Owner::Reader(reader) => reader.lock().unwrap_or_else(PoisonError::into_inner).used_on(&stream),
        });
        noted.or_raise()
    }

    fn export(&self) -> Export<'_> {
        Export {
            start: self.start,
            layout: &self.layout,
            device: Device::of(&self.gpu),
            read_only: self.read_only,
            holder: Holder::Part(self.owner.clone()),
        }
    }
}

#[pymethods]
impl Part {
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

    /// The address of the first element, in this process.
    #[getter]
    fn data_ptr(&self) -> u64 {
        self.start
    }

    /// Whether the memory is mapped so that a write to it faults.
    #[getter]
    fn read_only(&self) -> bool {
        self.read_only
    }

    /// Make a PyTorch tensor of it, on PyTorch's current stream.
    ///
    /// Raises:
    ///     Unsupported: the part is read-only; PyTorch has no such tensors.
    ///         ``part.without_read_only_flag().torch()`` makes one all the same; a write to it ends the process' GPU
    ///         context.
    fn torch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if self.read_only {
            return Err(unsupported(
                "a PyTorch tensor of a read-only part",
                "PyTorch has no read-only tensors, and a write to the memory faults",
                "use part.without_read_only_flag().torch(), or object.tensors(), and never write to it",
            ));
        }
        if let Some(raw) = exchange::current_stream(py, Device::of(&self.gpu))? {
            self.use_on(py, raw)?;
        }
        exchange::tensor(py, self.export())
    }

    /// Hand out the same part without the mark that it is read-only, to libraries that do not know the mark.
    ///
    /// The memory stays mapped read-only: on a GPU, a write to it ends the process' context.
    fn without_read_only_flag(&self) -> Part {
        let (owner, layout, gpu) = (self.owner.clone(), self.layout.clone(), self.gpu.clone());
        Part { owner, start: self.start, layout, gpu, read_only: false }
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
        dlpack::check_request(Device::of(&self.gpu), dl_device, copy)?;
        if let ConsumerStream::Raw(raw) = streams::of_consumer(&self.gpu, stream)? {
            self.use_on(py, raw)?;
        }
        self.export().capsule(py, max_version.is_some_and(|(major, _)| major >= 1))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        let device = Device::of(&self.gpu);
        (device.kind, device.id)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        interface::only_cuda(&self.gpu)?;
        interface::describe(py, self.start, &self.layout, self.read_only, None)
    }

    // SAFETY: Python calls it as the protocol says: `view` is its own to fill, or null.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let part = slf.get();
        buffer::only_host(&part.gpu)?;
        let holder = Holder::Part(part.owner.clone());
        // SAFETY: `fill_array` asks that the holder keeps an array of that layout: the layout was checked against its
        // part, whose addresses the owner keeps.
        unsafe { buffer::fill_array(slf.as_any(), part.start, &part.layout, part.read_only, holder, view, flags) }
    }

    // SAFETY: Python calls it once for each view that `__getbuffer__` filled.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: `release_array` asks for just that.
        unsafe { buffer::release_array(view) };
    }

    fn __len__(&self) -> PyResult<usize> {
        let first = self.layout.shape.first();
        let length =
            first.ok_or_else(|| pyo3::exceptions::PyTypeError::new_err("len() of an array without dimensions"))?;
        Ok(*length as usize)
    }

    fn __repr__(&self) -> String {
        let shape: Vec<String> = self.layout.shape.iter().map(i64::to_string).collect();
        format!("<gpu_ipc.Part {}[{}]>", self.layout.dtype.name(), shape.join(", "))
    }
}

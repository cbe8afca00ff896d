//! What the classes of arrays have in common: [`Block`], [`Received`], [`Part`], and memory for
//! tests.
//!
//! A class says by [`Array`] where its elements lie; [`array_methods`] gives it the protocols and
//! what they say of it.
//!
//! [`Block`]: crate::producer::block::Block
//! [`Received`]: crate::consumer::received::Received
//! [`Part`]: crate::objects::part::Part

use std::ffi::c_int;

use gpu_ipc::Gpu;
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::abi::Device;
use super::export::Export;
use super::{buffer, exchange, interface};
use crate::data::layout::Layout;
use crate::data::stream::{self, ConsumerStream};
use crate::interpreter::errors::{OrRaise, no_buffer};

/// An object that is an array.
pub(crate) trait Array {
    /// What keeps the memory of an array that was made of it. It may be dropped on any thread.
    type Hold: Send + 'static;

    fn gpu(&self) -> &Gpu;

    fn layout(&self) -> &Layout;

    /// Says whether the memory is to be handed out with the mark that it is read-only.
    fn is_read_only(&self) -> bool;

    /// Returns the address of the first element, and what keeps it.
    ///
    /// # Errors
    ///
    /// `Invalid` when the object was released.
    fn hold(&self) -> PyResult<(u64, Self::Hold)>;

    /// Lets what the consumer does next come after the work that fills the array, and notes that
    /// its stream is used.
    fn use_on(&self, py: Python<'_>, hold: &Self::Hold, on: ConsumerStream) -> PyResult<()>;

    /// Notes that somebody has the address and keeps this object alone.
    fn note_exposed(&self) {}
}

/// Prepares an array for a consumer that uses it on a stream.
fn export<'a, A: Array>(
    array: &'a A,
    py: Python<'_>,
    on: ConsumerStream,
) -> PyResult<Export<'a, A::Hold>> {
    let (start, hold) = array.hold()?;
    array.use_on(py, &hold, on)?;
    let (layout, device, read_only) = (
        array.layout(),
        Device::of(array.gpu()),
        array.is_read_only(),
    );
    Ok(Export {
        start,
        layout,
        device,
        read_only,
        hold,
    })
}

/// What a consumer asks of `__dlpack__`.
pub(crate) struct Request {
    pub stream: Option<i64>,
    pub max_version: Option<(u32, u32)>,
    pub device: Option<(i32, i32)>,
    pub copy: Option<bool>,
}

/// Gives an array out by DLPack.
pub(crate) fn dlpack<'py, A: Array>(
    array: &A,
    py: Python<'py>,
    asked: Request,
) -> PyResult<Bound<'py, PyAny>> {
    let ours = Device::of(array.gpu());
    if let Some((kind, id)) = asked.device
        && (kind, id) != (ours.kind, ours.id)
    {
        let theirs = Device { kind, id }.name();
        return Err(no_buffer(format!(
            "the array is in {}, not in {theirs}; move it with the array library",
            ours.name()
        )));
    }
    if asked.copy == Some(true) {
        return Err(no_buffer(
            "a copy was asked for; take the array as it is and copy it with the array library",
        ));
    }
    let on = stream::of_consumer(array.gpu(), asked.stream)?;
    export(array, py, on)?.capsule(py, asked.max_version.is_some_and(|(major, _)| major >= 1))
}

/// Gives an array out by the CUDA array interface; refused elsewhere than on CUDA, so that
/// `hasattr` says no.
pub(crate) fn cuda_interface<'py, A: Array>(
    array: &A,
    py: Python<'py>,
) -> PyResult<Bound<'py, PyDict>> {
    array.gpu().check_fork().or_raise()?;
    let kind = array.gpu().kind();
    if !kind.arrays().has_cuda_interface {
        return Err(PyAttributeError::new_err(format!(
            "the memory is {kind}'s: it has no CUDA array interface"
        )));
    }
    // The interface lets nobody queue a wait on a stream that its user names later.
    let export = export(array, py, ConsumerStream::Host)?;
    let interface = interface::describe(py, export.start, export.layout, export.read_only, None)?;
    array.note_exposed();
    Ok(interface)
}

/// Gives an array, which is that Python object, out by the buffer protocol; refused elsewhere than
/// on the host backend.
///
/// # Safety
///
/// `view` is what Python gave to `__getbuffer__`, and the array of its layout is valid while its
/// hold is.
pub(crate) unsafe fn fill_view<A: Array>(
    array: &A,
    object: &Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    array.gpu().check_fork().or_raise()?;
    let kind = array.gpu().kind();
    if !kind.in_host_memory() {
        return Err(no_buffer(format!(
            "the memory is on a {kind} device; take the array by DLPack"
        )));
    }
    let export = export(array, object.py(), ConsumerStream::Host)?;
    // SAFETY: `fill_array` asks for what our caller vouches for.
    unsafe { buffer::fill_array(object, export, view, flags) }
}

/// Makes a tensor of PyTorch's, on PyTorch's current stream.
pub(crate) fn tensor<'py, A: Array>(array: &A, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
    let on = exchange::current_stream(py, Device::of(array.gpu()))?;
    let export = export(
        array,
        py,
        on.map_or(ConsumerStream::Host, ConsumerStream::Raw),
    )?;
    exchange::tensor(py, export)
}

/// Returns the length of the first dimension.
pub(crate) fn length(layout: &Layout) -> PyResult<usize> {
    let first = layout.shape.first().map(|&length| length as usize);
    first.ok_or_else(|| PyTypeError::new_err("len() of an array without dimensions"))
}

/// Gives a class that is an [`Array`] what Python expects of arrays.
macro_rules! array_methods {
    ($class:ty) => {
        $crate::data::layout::layout_methods!($class);

        #[pyo3::pymethods]
        impl $class {
            /// The address of the first element, in this process. The contents may be pending
            /// still.
            #[getter]
            fn data_ptr(&self) -> pyo3::PyResult<u64> {
                $crate::arrays::class::Array::hold(self).map(|(start, _)| start)
            }

            /// Whether the memory is mapped so that a write to it faults.
            #[getter]
            fn read_only(&self) -> bool {
                $crate::arrays::class::Array::is_read_only(self)
            }
        }

        $crate::arrays::class::protocol_methods!($class);
    };
}

/// Gives a class that is an [`Array`] the protocols by which other libraries take it.
macro_rules! protocol_methods {
    ($class:ty) => {
        #[allow(
            unsafe_op_in_unsafe_fn,
            reason = "pyo3 calls the two of the buffer protocol from code of its own"
        )]
        const _: () = {
            #[pyo3::pymethods]
            impl $class {
                #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
                fn __dlpack__<'py>(
                    &self,
                    py: pyo3::Python<'py>,
                    stream: Option<i64>,
                    max_version: Option<(u32, u32)>,
                    dl_device: Option<(i32, i32)>,
                    copy: Option<bool>,
                ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::PyAny>> {
                    let asked = $crate::arrays::class::Request {
                        stream,
                        max_version,
                        device: dl_device,
                        copy,
                    };
                    $crate::arrays::class::dlpack(self, py, asked)
                }

                fn __dlpack_device__(&self) -> (i32, i32) {
                    let device =
                        $crate::arrays::abi::Device::of($crate::arrays::class::Array::gpu(self));
                    (device.kind, device.id)
                }

                #[getter]
                fn __cuda_array_interface__<'py>(
                    &self,
                    py: pyo3::Python<'py>,
                ) -> pyo3::PyResult<pyo3::Bound<'py, pyo3::types::PyDict>> {
                    $crate::arrays::class::cuda_interface(self, py)
                }

                // SAFETY: Python calls it as the protocol says: `view` is its own to fill, or null.
                unsafe fn __getbuffer__(
                    slf: pyo3::Bound<'_, Self>,
                    view: *mut pyo3::ffi::Py_buffer,
                    flags: std::ffi::c_int,
                ) -> pyo3::PyResult<()> {
                    // SAFETY: `fill_view` asks for Python's view, and for an array that is valid
                    // while it is held: the class checked its layout against the memory.
                    unsafe {
                        $crate::arrays::class::fill_view(slf.get(), slf.as_any(), view, flags)
                    }
                }

                // SAFETY: Python calls it once for each view that `__getbuffer__` filled.
                unsafe fn __releasebuffer__(&self, view: *mut pyo3::ffi::Py_buffer) {
                    // SAFETY: `release_array` asks for just that.
                    unsafe { $crate::arrays::buffer::release_array(view) };
                }

                fn __len__(&self) -> pyo3::PyResult<usize> {
                    $crate::arrays::class::length($crate::arrays::class::Array::layout(self))
                }
            }
        };
    };
}

pub(crate) use {array_methods, protocol_methods};

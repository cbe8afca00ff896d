//! Streams, as PyTorch, CuPy, Numba, JAX, cuda.core or an integer name them.

use std::any::Any;
use std::sync::Arc;

use gpu_ipc::{Error, Gpu};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyInt;

use super::device;
use crate::interpreter::errors::{OrRaise, invalid};
use crate::interpreter::later::Later;
use crate::interpreter::waiting::aside;

/// A queue of GPU work of the library's own, for programs without an array library.
#[pyclass(frozen, weakref, module = "gpu_ipc")]
pub(crate) struct Stream(gpu_ipc::Stream);

impl Stream {
    #[cfg(feature = "faults")]
    pub fn native(&self) -> &gpu_ipc::Stream {
        &self.0
    }
}

#[pymethods]
impl Stream {
    /// Make a stream that waits for no other.
    ///
    /// Args:
    ///     device: as for ``Session``.
    #[new]
    #[pyo3(signature = (device=None))]
    fn new(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<Stream> {
        let gpu = device::open(py, device)?;
        py.detach(|| gpu_ipc::Stream::create(&gpu))
            .or_raise()
            .map(Stream)
    }

    /// The driver's handle, as an integer (``CUstream``, ``hipStream_t``).
    #[getter]
    fn handle(&self) -> u64 {
        self.0.raw().handle
    }

    /// Block until all that is queued on it has finished.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let stream = self.0.clone();
        aside(py, move || stream.synchronize())?.or_raise()
    }

    /// The protocol of ``cuda.core``: a version and the handle.
    fn __cuda_stream__(&self) -> (u32, u64) {
        (0, self.handle())
    }

    fn __repr__(&self) -> String {
        format!("<gpu_ipc.Stream {:#x}>", self.handle())
    }
}

/// Reads a stream that a caller gave.
pub(crate) fn given(gpu: &Gpu, object: &Bound<'_, PyAny>) -> PyResult<gpu_ipc::Stream> {
    if let Ok(own) = object.cast::<Stream>() {
        return Ok(own.get().0.clone());
    }
    let Some(raw) = handle(object)? else {
        return Err(invalid(
            "a stream",
            object.get_type(),
            "an integer, or a stream of PyTorch, CuPy, Numba, cuda.core or gpu_ipc",
        ));
    };
    let keep = Arc::new(Later::new(object.clone().unbind()));
    object.py().detach(|| borrow(gpu, raw, keep)).or_raise()
}

/// Takes the stream of a handle, whose owner the caller keeps alive. It may reach the driver.
pub(crate) fn of_handle(gpu: &Gpu, raw: u64) -> Result<gpu_ipc::Stream, Error> {
    borrow(gpu, raw, Arc::new(()))
}

fn borrow(gpu: &Gpu, raw: u64, keep: Arc<dyn Any + Send + Sync>) -> Result<gpu_ipc::Stream, Error> {
    // SAFETY: `Stream::borrow` asks for a stream that is alive as long as `keep` is: it keeps the
    // object that owns the stream, and for an integer the caller vouches, as the documentation
    // asks; and that no thread begins to capture it during a call that was given it, which the
    // documentation asks for too.
    unsafe { gpu_ipc::Stream::borrow(gpu, raw, keep) }
}

/// Returns the handle of what is a stream.
fn handle(object: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    // Asked by its type, since an exception of `extract` costs as much as all the rest.
    if object.is_instance_of::<PyInt>() {
        return Ok(object.extract().ok());
    }
    // PyTorch, CuPy, then whatever speaks cuda.core's protocol, Numba, and numbers of other
    // libraries.
    for name in [
        intern!(object.py(), "cuda_stream"),
        intern!(object.py(), "ptr"),
    ] {
        if let Ok(raw) = object.getattr(name)
            && let Ok(raw) = raw.extract::<u64>()
        {
            return Ok(Some(raw));
        }
    }
    if let Ok(protocol) = object.getattr("__cuda_stream__") {
        let pair = if protocol.is_callable() {
            protocol.call0()?
        } else {
            protocol
        };
        return pair.extract::<(u64, u64)>().map(|(_, raw)| Some(raw));
    }
    let Ok(raw) = object.getattr("handle") else {
        return Ok(object.extract().ok());
    };
    if let Ok(raw) = raw.extract::<u64>() {
        return Ok(Some(raw));
    }
    // A `c_void_p`, which reads as None for the default stream.
    let raw = raw.getattr("value")?;
    if raw.is_none() {
        Ok(Some(0))
    } else {
        raw.extract().map(Some)
    }
}

/// How a consumer wants the producer's work to be waited for.
#[derive(Clone, Copy)]
pub(crate) enum ConsumerStream {
    /// Not at all.
    NoSync,
    /// On the host.
    Host,
    /// On this stream, by handle.
    Raw(u64),
}

/// Reads the `stream` of `__dlpack__`: `None` is the legacy default stream, -1 wants no order.
pub(crate) fn of_consumer(gpu: &Gpu, stream: Option<i64>) -> PyResult<ConsumerStream> {
    match (gpu.kind().arrays().default_stream, stream) {
        (_, Some(-1)) => Ok(ConsumerStream::NoSync),
        (None, None) => Ok(ConsumerStream::Host),
        (None, Some(other)) => Err(invalid("the stream of host memory", other, "None")),
        (Some(_), None) => Ok(ConsumerStream::Raw(0)),
        (Some(legacy), Some(raw)) if raw == legacy => Ok(ConsumerStream::Raw(0)),
        // Where that stream has another number, 0 is none.
        (Some(_), Some(0)) => Err(invalid(
            "the stream of __dlpack__",
            0,
            "None, -1, 1, 2 or a handle",
        )),
        (Some(_), Some(raw)) => match u64::try_from(raw) {
            Ok(raw) => Ok(ConsumerStream::Raw(raw)),
            Err(_) => Err(invalid(
                "the stream of __dlpack__",
                raw,
                "None, -1, 1, 2 or a handle",
            )),
        },
    }
}

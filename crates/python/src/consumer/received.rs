//! Received arrays: what a claim gives.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use gpu_ipc::{ClaimError, Error, Gpu, ReceivedBlock, State, Wait};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::arrays::class::{self, Array, array_methods};
use crate::data::addressee;
use crate::data::descriptor::{Descriptor, Tail};
use crate::data::device::Device;
use crate::data::layout::Layout;
use crate::data::stream::{self, ConsumerStream};
use crate::interpreter::errors::{OrRaise, invalid, poisoned, unsupported};
use crate::interpreter::waiting::{aside, duration, for_ever, in_slices};

/// An array of another process, under a lease that ends when the last array made of it is dropped.
///
/// Every library that takes arrays takes it: ``torch.from_dlpack(received)``, ``cupy.from_dlpack``,
/// ``jax.dlpack.from_dlpack``, ``numpy.from_dlpack`` on the host backend, and whatever knows the
/// CUDA array interface. ``received.torch()`` is the fast way to PyTorch. The array alone keeps the
/// lease; this object can go.
///
/// Each of these waits for the producer's work on the stream that its library names, and that
/// stream counts as used: the lease ends when the work on it is done. Name further streams with
/// ``record_stream``.
#[pyclass(frozen, weakref, module = "gpu_ipc")]
pub(crate) struct Received {
    block: Mutex<Option<ReceivedBlock>>,
    /// What it was claimed by, which says what it is.
    descriptor: Py<Descriptor>,
    gpu: Gpu,
    read_only: bool,
    /// Somebody has the address by the CUDA array interface, which keeps this object and nothing
    /// else.
    is_exposed: AtomicBool,
}

impl Received {
    pub fn new(block: ReceivedBlock, descriptor: Py<Descriptor>, gpu: &Gpu) -> Received {
        Received {
            read_only: block.is_read_only(),
            block: Mutex::new(Some(block)),
            descriptor,
            gpu: gpu.clone(),
            is_exposed: AtomicBool::new(false),
        }
    }

    fn block(&self) -> PyResult<ReceivedBlock> {
        self.gpu.check_fork().or_raise()?;
        let block = self.block.lock().unwrap_or_else(PoisonError::into_inner);
        block
            .clone()
            .ok_or_else(|| invalid("a received array", "released", "one that was not released"))
    }

    /// Waits on the host until the contents are there.
    fn wait_on_host(
        &self,
        py: Python<'_>,
        block: &ReceivedBlock,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        if block.state() == State::Pending {
            let waited = in_slices(py, duration(timeout)?, |slice| {
                match block.wait(Wait::Host, Some(slice)) {
                    Err(ClaimError::Backend(Error::Deadline { .. })) => None,
                    done => Some(done),
                }
            })?;
            let late = || {
                Err(Error::Deadline {
                    what: "the producer's work on the block",
                }
                .into())
            };
            waited.unwrap_or_else(late).or_raise()?;
        }
        if block.state() == State::Poisoned {
            Err(poisoned())
        } else {
            Ok(())
        }
    }

    /// Lets a stream wait for the contents, and notes that it is used.
    fn wait_on_stream(&self, py: Python<'_>, block: &ReceivedBlock, raw: u64) -> PyResult<()> {
        if block.state() == State::Poisoned {
            return Err(poisoned());
        }
        let waited = for_ever(py, |slice| {
            let waited = stream::of_handle(&self.gpu, raw)
                .map_err(ClaimError::from)
                .and_then(|stream| block.wait(Wait::Stream(&stream), Some(slice)));
            match waited {
                Err(ClaimError::Backend(Error::Deadline { .. })) => None,
                done => Some(done),
            }
        })?;
        waited.or_raise()
    }
}

impl Array for Received {
    type Hold = ReceivedBlock;

    fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn layout(&self) -> &Layout {
        self.descriptor.get().layout()
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn hold(&self) -> PyResult<(u64, ReceivedBlock)> {
        let block = self.block()?;
        Ok((
            block.device_ptr().0.wrapping_add(self.layout().offset),
            block,
        ))
    }

    fn use_on(&self, py: Python<'_>, block: &ReceivedBlock, on: ConsumerStream) -> PyResult<()> {
        match on {
            ConsumerStream::NoSync => Ok(()),
            ConsumerStream::Host => self.wait_on_host(py, block, None),
            ConsumerStream::Raw(raw) => self.wait_on_stream(py, block, raw),
        }
    }

    fn note_exposed(&self) {
        self.is_exposed.store(true, Ordering::Relaxed);
    }
}

/// Refuses a tensor of a read-only lease.
pub(crate) fn no_read_only_tensor() -> PyErr {
    unsupported(
        "a PyTorch tensor of a read-only lease",
        "PyTorch has no read-only tensors, and a write to the memory faults",
        "share and connect without `read_only`, or use received.without_read_only_flag().torch() and never write to it",
    )
}

#[pymethods]
impl Received {
    /// The bytes that the producer's ``share(..., meta=...)`` put in.
    #[getter]
    fn meta<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.descriptor.get().meta_bytes())
    }

    /// The device.
    #[getter]
    fn device(&self) -> Device {
        Device::of(&self.gpu)
    }

    /// The region that it lies in, as ``Notice.region`` gives it.
    #[getter]
    fn region(&self) -> PyResult<u64> {
        Ok(self.block()?.region().0)
    }

    /// What the contents are worth: ``pending``, the producer's work is not done; ``ready``;
    /// ``ready_producer_gone``, and the producer is gone; ``poisoned``, it died before its work was
    /// done, and they are garbage.
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
        block.used_on(&stream::given(&self.gpu, stream)?).or_raise()
    }

    /// Make a PyTorch tensor of it, on PyTorch's current stream. Faster than ``torch.from_dlpack``,
    /// and means the same.
    ///
    /// Raises:
    ///     Unsupported: the lease is read-only; PyTorch has no such tensors.
    ///     ``received.without_read_only_flag().torch()``
    ///         makes one all the same; a write to it ends the process' GPU context.
    fn torch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.gpu.check_fork().or_raise()?;
        if self.read_only {
            return Err(no_read_only_tensor());
        }
        class::tensor(self, py)
    }

    /// Hand out the same lease without the mark that it is read-only, to libraries that do not know
    /// the mark.
    ///
    /// The memory stays mapped read-only: on a GPU, a write to it ends the process' context.
    fn without_read_only_flag(&self, py: Python<'_>) -> PyResult<Received> {
        Ok(Received {
            block: Mutex::new(Some(self.block()?)),
            descriptor: self.descriptor.clone_ref(py),
            gpu: self.gpu.clone(),
            read_only: false,
            is_exposed: AtomicBool::new(false),
        })
    }

    /// Ask the producer for a descriptor of the array for somebody else. The new lease does not
    /// depend on this one.
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
        let meta = meta
            .as_deref()
            .unwrap_or_else(|| self.descriptor.get().meta_bytes());
        let tail = Tail::of(self.layout(), meta);
        let user = *tail.user();
        // Not in slices: each would be a question, and a grant, of its own.
        let grant = aside(py, move || block.forward_with(to, &user, timeout))?.or_raise()?;
        Ok(Descriptor::new(&grant, self.layout().clone(), &tail))
    }

    /// Give up this object's hold on the lease. Arrays that were made of it keep theirs.
    ///
    /// After the CUDA array interface was read the hold stays until this object is dropped: that
    /// interface keeps nothing else.
    fn release(&self, py: Python<'_>) {
        if !self.is_exposed.load(Ordering::Relaxed) {
            let block = self
                .block
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
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

    fn __reduce__(&self) -> PyResult<()> {
        Err(invalid(
            "what to pickle",
            "a received array",
            "a descriptor: forward() asks for one",
        ))
    }

    fn __repr__(&self) -> String {
        let shape: Vec<String> = self.layout().shape.iter().map(i64::to_string).collect();
        let state = match self.gpu.check_fork() {
            Ok(()) => self.state().unwrap_or("released"),
            Err(_) => "of the parent process",
        };
        format!(
            "<gpu_ipc.Received {}[{}], {state}>",
            self.layout().dtype.name(),
            shape.join(", ")
        )
    }
}

array_methods!(Received);

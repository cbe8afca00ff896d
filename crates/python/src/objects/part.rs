//! A part of an object, as an array.

use std::sync::{Arc, Mutex, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use gpu_ipc::Gpu;
use gpu_ipc::backend::DevicePtr;
use gpu_ipc::broker::{DType, Layout as Parts, Pool, PoolReader, Reader, Scratch, Writer};
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;

use crate::arrays::class::{self, Array, array_methods};
use crate::data::layout::{Dtype, Layout};
use crate::data::stream::{self, ConsumerStream};
use crate::interpreter::errors::{OrRaise, unsupported};
use crate::interpreter::waiting::for_ever;

/// How soon an object that is busy is tried again.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// What keeps the addresses of a part.
#[derive(Clone)]
pub(crate) enum Addresses {
    /// An object that is being filled.
    Writer(Arc<Mutex<Writer>>),
    /// One that is mapped.
    Reader(Arc<Mutex<Reader>>),
    /// Memory that is never committed.
    Scratch(Arc<Mutex<Scratch>>),
    /// A pool that this process holds.
    Pool(Arc<Pool>),
    /// One that another process holds.
    PoolReader(Arc<PoolReader>),
}

/// A part of an object: an array for every library that takes arrays.
///
/// It and every array made of it keep the addresses. The stream that a library names when it takes
/// the array counts as used; name further streams with ``record_stream`` of the object.
#[pyclass(frozen, weakref, module = "gpu_ipc")]
pub(crate) struct Part {
    addresses: Addresses,
    start: u64,
    layout: Layout,
    gpu: Gpu,
    read_only: bool,
}

impl Part {
    pub fn new(
        addresses: Addresses,
        (layout, start): (Layout, u64),
        gpu: &Gpu,
        read_only: bool,
    ) -> Part {
        Part {
            addresses,
            start,
            layout,
            gpu: gpu.clone(),
            read_only,
        }
    }
}

impl Array for Part {
    type Hold = Addresses;

    fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn hold(&self) -> PyResult<(u64, Addresses)> {
        self.gpu.check_fork().or_raise()?;
        Ok((self.start, self.addresses.clone()))
    }

    /// An object is opened when it is whole, and a pool's journal says which of its blocks are: there
    /// is nothing to wait for.
    fn use_on(&self, py: Python<'_>, addresses: &Addresses, on: ConsumerStream) -> PyResult<()> {
        let ConsumerStream::Raw(raw) = on else {
            return Ok(());
        };
        let stream = py.detach(|| stream::of_handle(&self.gpu, raw)).or_raise()?;
        match addresses {
            Addresses::Writer(writer) => {
                ask(py, writer, |writer| writer.used_on(&stream))?.or_raise()
            }
            Addresses::Reader(reader) => {
                ask(py, reader, |reader| reader.used_on(&stream))?.or_raise()
            }
            Addresses::Scratch(scratch) => {
                ask(py, scratch, |scratch| scratch.used_on(&stream))?.or_raise()
            }
            Addresses::Pool(pool) => py.detach(|| pool.used_on(&stream)).or_raise(),
            Addresses::PoolReader(reader) => py.detach(|| reader.used_on(&stream)).or_raise(),
        }
    }
}

/// Asks an object something, with no lock of Python's held. A move that Ctrl-C gave up on has the
/// object until its broker answers, and Ctrl-C ends this wait for it as well.
pub(crate) fn ask<O: Send, T: Send>(
    py: Python<'_>,
    object: &Mutex<O>,
    question: impl Fn(&mut O) -> T + Send + Sync,
) -> PyResult<T> {
    for_ever(py, |slice| {
        let begin = Instant::now();
        loop {
            match object.try_lock() {
                Ok(mut object) => return Some(question(&mut object)),
                Err(TryLockError::Poisoned(broken)) => {
                    return Some(question(&mut broken.into_inner()));
                }
                Err(TryLockError::WouldBlock) if begin.elapsed() >= slice => return None,
                Err(TryLockError::WouldBlock) => thread::sleep(LOOK_AGAIN),
            }
        }
    })
}

#[pymethods]
impl Part {
    /// Make a PyTorch tensor of it, on PyTorch's current stream.
    ///
    /// Raises:
    ///     Unsupported: the part is read-only; PyTorch has no such tensors.
    ///         ``part.without_read_only_flag().torch()`` makes one all the same; a write to it ends the process' GPU
    ///         context.
    fn torch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.gpu.check_fork().or_raise()?;
        if self.read_only {
            return Err(unsupported(
                "a PyTorch tensor of a read-only part",
                "PyTorch has no read-only tensors, and a write to the memory faults",
                "use part.without_read_only_flag().torch(), or object.tensors(), and never write to it",
            ));
        }
        class::tensor(self, py)
    }

    /// Hand out the same part without the mark that it is read-only, to libraries that do not know
    /// the mark.
    ///
    /// The memory stays mapped read-only: on a GPU, a write to it ends the process' context.
    fn without_read_only_flag(&self) -> Part {
        let (addresses, layout, gpu) = (
            self.addresses.clone(),
            self.layout.clone(),
            self.gpu.clone(),
        );
        Part {
            addresses,
            start: self.start,
            layout,
            gpu,
            read_only: false,
        }
    }

    fn __repr__(&self) -> String {
        let shape: Vec<String> = self.layout.shape.iter().map(i64::to_string).collect();
        format!(
            "<gpu_ipc.Part {}[{}]>",
            self.layout.dtype.name(),
            shape.join(", ")
        )
    }
}

array_methods!(Part);

/// Finds a part: its layout, and where it begins.
pub(crate) fn place_of(
    parts: &Parts,
    start: Option<DevicePtr>,
    name: &str,
) -> PyResult<(Layout, u64)> {
    let Some((part, start)) = parts.part(name).zip(start) else {
        return Err(PyKeyError::new_err(name.to_owned()));
    };
    let DType { code, bits, lanes } = part.spec.dtype;
    let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    let shape = part
        .spec
        .dimensions
        .iter()
        .map(|one| number(one.extent))
        .collect();
    let strides = part
        .spec
        .dimensions
        .iter()
        .map(|one| number(one.stride))
        .collect();
    Ok((
        Layout::new(Dtype { code, bits, lanes }, shape, Some(strides)).or_raise()?,
        start.0,
    ))
}

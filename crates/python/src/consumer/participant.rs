//! Participants: what a consumer opens.

use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use gpu_ipc::{ClaimError, Error, Gpu, ReceivedBlock, State, Wait};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::received::{self, Received};
use crate::arrays::export::Export;
use crate::arrays::{abi, class, exchange};
use crate::data::addressee::ParticipantId;
use crate::data::deposit;
use crate::data::descriptor::Descriptor;
use crate::data::descriptors::Descriptors;
use crate::data::device::{self, Device};
use crate::data::notice::Notice;
use crate::data::{stats, stream};
use crate::interpreter::errors::{OrRaise, invalid, raise_claim};
use crate::interpreter::later::Call;
use crate::interpreter::process::process;
use crate::interpreter::waiting::{Waiters, aside, coroutine, duration, in_slices};
use crate::interpreter::{keeper, logging};

/// Connect to a producer's session.
///
/// Args:
///     path: the session's ``path``.
///     timeout: seconds to wait for the producer's welcome; None waits for ever.
///     device: the device to map memory on, as for ``Session``; None takes the session's own.
///     name: what the producer's reports call the participant, instead of the command that it runs; 32 bytes of it.
///     read_only: map memory so that a write to it faults, where the device can. On a GPU such a write ends the
///         process' context.
///
/// Raises:
///     ConnectFailed: no process listens there.
///     Refused: the producer says why.
///     Timeout: it does not answer.
#[pyfunction]
#[pyo3(signature = (path, timeout=30.0, *, device=None, name=None, read_only=false))]
pub(crate) fn connect(
    py: Python<'_>,
    path: PathBuf,
    timeout: Option<f64>,
    device: Option<&Bound<'_, PyAny>>,
    name: Option<String>,
    read_only: bool,
) -> PyResult<Participant> {
    logging::listen(py);
    keeper::start(py)?;
    let limit = duration(timeout)?;
    let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
    let gpu = match device {
        Some(_) => device::open(py, device)?,
        None => {
            let report = stats::ask(py, path.clone(), timeout)?;
            let found = py
                .detach(|| Gpu::with_uuid(process().backends.get(report.backend)?, report.device));
            found.or_raise()?
        }
    };
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let mut builder = gpu_ipc::Participant::builder(gpu.clone()).timeout(left);
    if let Some(name) = name {
        builder = builder.name(name);
    }
    if read_only {
        builder = builder.read_only();
    }
    let participant = aside(py, move || builder.connect(path))?.or_raise()?;
    Ok(Participant {
        open: Mutex::new(Some(participant)),
        gpu,
        read_only,
        waiters: Waiters::default(),
        ended: AtomicBool::new(false),
    })
}

/// A consumer's connection to one producer's session; made by ``connect``.
#[pyclass(frozen, weakref, module = "gpu_ipc")]
pub(crate) struct Participant {
    open: Mutex<Option<gpu_ipc::Participant>>,
    gpu: Gpu,
    read_only: bool,
    waiters: Waiters,
    /// The last notice was taken.
    ended: AtomicBool,
}

impl Participant {
    pub fn participant(&self) -> PyResult<gpu_ipc::Participant> {
        self.gpu.check_fork().or_raise()?;
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.clone()
            .ok_or_else(|| invalid("a participant", "closed", "open: connect again"))
    }

    pub fn received(&self, descriptor: Py<Descriptor>, block: ReceivedBlock) -> Received {
        Received::new(block, descriptor, &self.gpu)
    }
}

/// Says whether a claim is to be made again.
fn is_late(error: &ClaimError) -> bool {
    matches!(
        error,
        ClaimError::WouldBlock | ClaimError::Backend(Error::Deadline { .. })
    )
}

fn list_of(descriptors: &Bound<'_, PyAny>) -> PyResult<Vec<Py<Descriptor>>> {
    // Bytes are an iterable of numbers: those of `share_many` are meant.
    if !descriptors.is_instance_of::<Descriptors>() && PyBuffer::<u8>::get(descriptors).is_ok() {
        return list_of(
            Bound::new(descriptors.py(), Descriptors::of_bytes(descriptors)?)?.as_any(),
        );
    }
    descriptors
        .try_iter()?
        .map(|one| Ok(Descriptor::of(&one?)?.unbind()))
        .collect()
}

/// Claims everything, in slices. What is late is claimed again in the next slice; nothing of it was
/// lost.
fn claim_all(
    py: Python<'_>,
    participant: &gpu_ipc::Participant,
    wanted: &[Py<Descriptor>],
    wait: Wait<'_>,
    timeout: Option<f64>,
) -> PyResult<Vec<Result<ReceivedBlock, ClaimError>>> {
    let mut claimed: Vec<Option<Result<ReceivedBlock, ClaimError>>> =
        wanted.iter().map(|_| None).collect();
    let mut left: Vec<usize> = (0..wanted.len()).collect();
    let done = in_slices(py, duration(timeout)?, |slice| {
        let grants: Vec<&[u8]> = left.iter().map(|&n| wanted[n].get().grant()).collect();
        let results = participant.claim_many(&grants, wait, Some(slice));
        let mut late = Vec::new();
        for (&n, result) in left.iter().zip(results) {
            if result.as_ref().is_err_and(is_late) {
                late.push(n);
            } else {
                claimed[n] = Some(result);
            }
        }
        left = late;
        left.is_empty().then_some(())
    });
    if let Err(interrupt) = done {
        py.detach(|| drop(claimed));
        return Err(interrupt);
    }
    let deadline = || {
        Err(Error::Deadline {
            what: "the producer's answer",
        }
        .into())
    };
    Ok(claimed
        .into_iter()
        .map(|result| result.unwrap_or_else(deadline))
        .collect())
}

/// Returns the blocks; where a claim failed, releases the others and raises the first error.
fn all_of(
    py: Python<'_>,
    results: Vec<Result<ReceivedBlock, ClaimError>>,
) -> PyResult<Vec<ReceivedBlock>> {
    let mut first = None;
    let mut blocks = Vec::with_capacity(results.len());
    for result in results {
        match result {
            Ok(block) => blocks.push(block),
            Err(error) => {
                first.get_or_insert(error);
            }
        }
    }
    let Some(error) = first else {
        return Ok(blocks);
    };
    py.detach(|| ReceivedBlock::drop_many(blocks));
    Err(raise_claim(error))
}

#[pymethods]
impl Participant {
    /// The number under which the producer shares with this participant.
    #[getter]
    fn id(&self) -> PyResult<ParticipantId> {
        Ok(ParticipantId::of(self.participant()?.id()))
    }

    /// The number of the session that it is connected to, as 32 hexadecimal digits.
    #[getter]
    fn session(&self) -> PyResult<String> {
        Ok(self.participant()?.session().to_string())
    }

    /// The device.
    #[getter]
    fn device(&self) -> Device {
        Device::of(&self.gpu)
    }

    /// The producer's process, as this process sees it.
    #[getter]
    fn producer_pid(&self) -> PyResult<u32> {
        Ok(self.participant()?.producer_pid())
    }

    /// Whether the producer is dead or has closed the session.
    #[getter]
    fn is_producer_gone(&self) -> PyResult<bool> {
        Ok(self.participant()?.is_producer_gone())
    }

    /// Have the session keep a file descriptor under a name, until one participant or the session's process fetches
    /// it.
    ///
    /// It ends with this participant: once its death is proven, or at its goodbye. A session keeps up to 256 for a
    /// participant.
    ///
    /// Args:
    ///     id: the name, 16 bytes that are used once: ``uuid.uuid4().bytes``.
    ///     fd: the number of an open file; the session keeps a copy, and this one stays yours.
    ///     timeout: seconds to wait for the session's answer; None waits for ever.
    ///
    /// Raises:
    ///     Refused: a descriptor is kept under the name, or 256 of this participant's are.
    ///     ProducerGone: connect to its successor.
    ///     Timeout: nothing is kept.
    #[pyo3(signature = (id, fd, *, timeout=None))]
    fn deposit(&self, py: Python<'_>, id: &[u8], fd: i32, timeout: Option<f64>) -> PyResult<()> {
        let (participant, timeout) = (self.participant()?, duration(timeout)?);
        let (id, file) = (deposit::name(id)?, deposit::copy_of(fd)?);
        // Not in slices: each would be another deposit.
        aside(py, move || participant.deposit(id, file, timeout))?.or_raise()
    }

    /// Fetch the file descriptor that the session keeps under a name. Of several that ask, one gets it.
    ///
    /// Args:
    ///     id: its name.
    ///     timeout: seconds to wait for the session's answer; None waits for ever.
    ///
    /// Returns:
    ///     The number of a descriptor that is yours to close.
    ///
    /// Raises:
    ///     Refused: nothing is kept under the name, or another is fetching it.
    ///     ProducerGone: connect to its successor.
    ///     Timeout: it is there for another.
    #[pyo3(signature = (id, *, timeout=None))]
    fn fetch(&self, py: Python<'_>, id: &[u8], timeout: Option<f64>) -> PyResult<i32> {
        let (participant, id) = (self.participant()?, deposit::name(id)?);
        let timeout = duration(timeout)?;
        let fetched = aside(py, move || participant.fetch(id, timeout))?;
        Ok(deposit::given(fetched.or_raise()?))
    }

    /// Claim what a descriptor grants.
    ///
    /// Args:
    ///     descriptor: a ``Descriptor``, or its bytes.
    ///     stream: a stream of yours that waits for the producer's work; it counts as used. None lets each array that
    ///         is made of the result wait by itself.
    ///     timeout: seconds to wait for the producer's answer, where one is needed; None waits for ever. When it passes
    ///         nothing is lost: the same claim can be made again.
    ///
    /// Raises:
    ///     AlreadyClaimed: a descriptor that is addressed is claimed once.
    ///     Revoked: the producer took the grant back, or nobody claimed it in time.
    ///     Stale: its lease ended long ago.
    ///     WrongParticipant: it is for somebody else.
    ///     ProducerGone: connect to its successor.
    ///     Timeout: claim again.
    #[pyo3(signature = (descriptor, *, stream=None, timeout=None))]
    fn claim(
        &self,
        py: Python<'_>,
        descriptor: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Received> {
        let _call = Call::begin(py);
        let descriptor = Descriptor::of(descriptor)?.unbind();
        let stream = stream
            .map(|stream| stream::given(&self.gpu, stream))
            .transpose()?;
        let (participant, wait) = (
            self.participant()?,
            stream.as_ref().map_or(Wait::None, Wait::Stream),
        );
        let claimed = in_slices(py, duration(timeout)?, |slice| {
            match participant.claim(descriptor.get().grant(), wait, Some(slice)) {
                Err(error) if is_late(&error) => None,
                done => Some(done),
            }
        })?;
        let block = claimed
            .unwrap_or(Err(Error::Deadline {
                what: "the producer's answer",
            }
            .into()))
            .or_raise()?;
        Ok(self.received(descriptor, block))
    }

    /// Claim what a descriptor grants if that needs no waiting.
    ///
    /// Otherwise what can be asked for is asked for, and ``fileno()`` becomes readable when it may
    /// have come.
    ///
    /// Raises:
    ///     WouldBlock: try again when ``fileno()`` is readable; and as ``claim``.
    #[pyo3(signature = (descriptor, *, stream=None))]
    fn try_claim(
        &self,
        py: Python<'_>,
        descriptor: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Received> {
        let _call = Call::begin(py);
        let descriptor = Descriptor::of(descriptor)?.unbind();
        let stream = stream
            .map(|stream| stream::given(&self.gpu, stream))
            .transpose()?;
        let (participant, wait) = (
            self.participant()?,
            stream.as_ref().map_or(Wait::None, Wait::Stream),
        );
        let block = py
            .detach(|| participant.try_claim(descriptor.get().grant(), wait))
            .or_raise()?;
        Ok(self.received(descriptor, block))
    }

    /// Claim several descriptors, with one question to the producer for up to 56 tickets among
    /// them.
    ///
    /// Args:
    ///     descriptors: an iterable of descriptors, or of their bytes.
    ///     stream, timeout: as for ``claim``.
    ///     return_exceptions: put the error of a claim that failed into its place in the list. Otherwise the first is
    ///         raised, and what the others gave is released.
    ///
    /// Returns:
    ///     The received arrays, in the order of ``descriptors``.
    #[pyo3(signature = (descriptors, *, stream=None, timeout=None, return_exceptions=false))]
    fn claim_many<'py>(
        &self,
        py: Python<'py>,
        descriptors: &Bound<'py, PyAny>,
        stream: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
        return_exceptions: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let _call = Call::begin(py);
        let wanted = list_of(descriptors)?;
        let stream = stream
            .map(|stream| stream::given(&self.gpu, stream))
            .transpose()?;
        let (participant, wait) = (
            self.participant()?,
            stream.as_ref().map_or(Wait::None, Wait::Stream),
        );
        let results = claim_all(py, &participant, &wanted, wait, timeout)?;
        if !return_exceptions && results.iter().any(Result::is_err) {
            return Err(all_of(py, results)
                .err()
                .unwrap_or_else(|| invalid("a claim", "failed", "to have an error")));
        }
        let given = wanted
            .into_iter()
            .zip(results)
            .map(|(descriptor, result)| match result {
                Ok(block) => Py::new(py, self.received(descriptor, block)).map(Py::into_any),
                Err(error) => Ok(raise_claim(error).into_value(py).into_any()),
            });
        PyList::new(py, given.collect::<PyResult<Vec<_>>>()?)
    }

    /// Claim several descriptors as PyTorch tensors on PyTorch's current stream, such as a state
    /// dict.
    ///
    /// It means what ``[one.torch() for one in participant.claim_many(descriptors)]`` does, with
    /// one look at the stream, and without a ``Received`` for each.
    ///
    /// Args:
    ///     descriptors, timeout: as for ``claim_many``.
    ///
    /// Raises:
    ///     Unsupported: leases are read-only, and PyTorch has no such tensors.
    ///     Stale: the producer died before its work on one of them was done.
    ///     As ``claim_many``. After an error nothing of what was claimed is held.
    #[pyo3(signature = (descriptors, *, timeout=None))]
    fn claim_tensors<'py>(
        &self,
        py: Python<'py>,
        descriptors: &Bound<'py, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyList>> {
        self.gpu.check_fork().or_raise()?;
        let _call = Call::begin(py);
        let (participant, wanted) = (self.participant()?, list_of(descriptors)?);
        // Before anything is claimed, as far as the descriptors tell.
        let says = |one: &Py<Descriptor>| {
            gpu_ipc::Descriptor::decode(one.get().grant()).is_ok_and(|it| it.is_read_only())
        };
        if self.read_only || wanted.iter().any(says) {
            return Err(received::no_read_only_tensor());
        }
        let current = exchange::current_stream(py, abi::Device::of(&self.gpu))?;
        let stream = current
            .map(|raw| py.detach(|| stream::of_handle(&self.gpu, raw)))
            .transpose()
            .or_raise()?;
        let wait = stream.as_ref().map_or(Wait::None, Wait::Stream);
        let mut blocks =
            all_of(py, claim_all(py, &participant, &wanted, wait, timeout)?)?.into_iter();
        if blocks.as_slice().iter().any(ReceivedBlock::is_read_only) {
            py.detach(|| ReceivedBlock::drop_many(blocks));
            return Err(received::no_read_only_tensor());
        }
        let mut tensors = Vec::with_capacity(wanted.len());
        for (descriptor, block) in wanted.into_iter().zip(blocks.by_ref()) {
            // Host memory has no streams: each is waited for by itself, as all are that are
            // garbage.
            let made = match stream {
                Some(_) if block.state() != State::Poisoned => {
                    let (layout, device) = (descriptor.get().layout(), abi::Device::of(&self.gpu));
                    let start = block.device_ptr().0.wrapping_add(layout.offset);
                    exchange::tensor(
                        py,
                        Export {
                            start,
                            layout,
                            device,
                            read_only: false,
                            hold: block,
                        },
                    )
                }
                _ => class::tensor(&self.received(descriptor, block), py),
            };
            match made {
                Ok(tensor) => tensors.push(tensor),
                Err(error) => {
                    py.detach(|| ReceivedBlock::drop_many(blocks));
                    return Err(error);
                }
            }
        }
        PyList::new(py, tensors)
    }

    /// Claim what a descriptor grants, without blocking the event loop.
    ///
    /// ``await participant.claim_async(descriptor)`` gives what ``claim`` does; cancel it, or put
    /// it into ``asyncio.timeout``, and nothing is lost.
    #[pyo3(signature = (descriptor, *, stream=None))]
    fn claim_async<'py>(
        slf: &Bound<'py, Self>,
        descriptor: &Bound<'py, PyAny>,
        stream: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.get().participant()?;
        coroutine(slf.py(), "claim", (slf, descriptor, stream))
    }

    /// Wait for notices without blocking the event loop: ``async for notice in
    /// participant.notices_async()``.
    ///
    /// It ends after the notice that the producer is gone.
    fn notices_async<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.get().participant()?;
        coroutine(slf.py(), "notices", (slf,))
    }

    /// Take the notices that were not read yet.
    fn notices(&self) -> PyResult<Vec<Notice>> {
        let participant = self.participant()?;
        let taken: Vec<Notice> = std::iter::from_fn(|| participant.next_notice())
            .map(|notice| Notice { notice })
            .collect();
        if taken.iter().any(Notice::is_last) {
            self.ended.store(true, Ordering::Relaxed);
        }
        Ok(taken)
    }

    /// The number of a file descriptor that is readable while there is a notice, for event loops.
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.participant()?.as_raw_fd())
    }

    /// Regions that are mapped.
    #[getter]
    fn mappings(&self) -> PyResult<usize> {
        Ok(self.participant()?.mappings())
    }

    /// Give up the connection. What was received stays good until it is dropped itself.
    ///
    /// Args:
    ///     timeout: seconds to wait until everything received is dropped, the GPU work on it is done, and the producer
    ///         has heard the goodbye; 0 does not wait, None waits for ever.
    ///
    /// Raises:
    ///     Timeout: the text says what is still held. The goodbye goes out when it is not.
    #[pyo3(signature = (timeout=0.0))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.gpu.check_fork().or_raise()?;
        let timeout = duration(timeout)?;
        let open = self
            .open
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match open {
            // A second time there is nothing left to give up.
            None => Ok(()),
            Some(open) if timeout == Some(Duration::ZERO) => {
                py.detach(|| drop(open));
                Ok(())
            }
            Some(open) => aside(py, move || open.close(timeout))?.or_raise(),
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, Some(0.0))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(invalid(
            "what to pickle",
            "a participant",
            "the session's path: each process connects by itself",
        ))
    }

    /// Whether the last notice was taken.
    #[getter]
    fn _ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    #[getter(_waiters)]
    fn get_waiters(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.waiters.get(py)
    }

    #[setter(_waiters)]
    fn set_waiters(&self, waiters: Option<Py<PyAny>>) {
        self.waiters.set(waiters);
    }

    fn __repr__(&self) -> String {
        match self.participant() {
            Ok(open) => format!(
                "<gpu_ipc.Participant {:#x} of session {}>",
                open.id().0,
                open.session()
            ),
            Err(_) if self.gpu.check_fork().is_err() => {
                "<gpu_ipc.Participant, of the parent process>".into()
            }
            Err(_) => "<gpu_ipc.Participant, closed>".into(),
        }
    }
}

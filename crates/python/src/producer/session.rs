//! Sessions: what a producer opens.

use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpu_ipc::allocators::GrowingMemory;
use gpu_ipc::backend::Sharing;
use gpu_ipc::session::ShareOptions;
use gpu_ipc::{Error, Gpu, To};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::block::Block;
use super::loan::Loan;
use super::shared::Shared;
use super::torch_pool;
use crate::data::addressee::{self, ParticipantId, Ticket};
use crate::data::deposit;
use crate::data::descriptor::{Descriptor, MOST_META};
use crate::data::device::{self, Device};
use crate::data::notice::SessionNotice;
use crate::data::number::Whole;
use crate::data::stats::{Collected, ShutdownReport, Stats};
use crate::data::stream;
use crate::interpreter::errors::{OrRaise, invalid};
use crate::interpreter::later::Call;
use crate::interpreter::process::process;
use crate::interpreter::waiting::{Waiters, coroutine, duration, in_slices};
use crate::interpreter::{keeper, logging};

/// A producer's session: share arrays, and know when they are free again.
///
/// Closing, and the end of a ``with`` block, share nothing more and wait for nobody: what others
/// hold stays good for them while this process lives. The memory of adopted arrays is kept until
/// the last lease on it has ended.
///
/// Args:
///     device: ``"cuda:0"``, ``"hip:0"``, ``"host:0"``, or what ``str`` makes such a name of; None takes the first that
///         there is, GPUs first.
///     path: where the socket is put; None chooses a name in the runtime directory.
///     limit: the most bytes that blocks may take from the device, leases included; None takes what there is. Memory of
///         other allocators that is shared without a copy does not count.
///     ttl: seconds that a grant stays claimable; None for ever.
///     region_bytes: bytes that are taken from the driver at a time.
///     grows_in_place: take them one behind the other in one range of addresses, so that blocks lie across them.
///     quarantine: seconds between the proof of a consumer's death and the reuse of what it held.
///     max_leases: leases that one participant may have at once; at least 8,192, and rounded down to whole tables of them.
///     allow_uids: users who may connect besides this one.
///
/// Raises:
///     Unavailable: there is no such device.
///     Unsupported: its memory cannot grow in place.
///     SystemFailed: this process has no such range of addresses to give; set a limit.
///     Invalid: somebody listens on the path already.
#[pyclass(frozen, weakref, module = "gpu_ipc")]
pub(crate) struct Session {
    shared: Arc<Shared>,
    waiters: Waiters,
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.shared.guard.is_child() {
            // Blocks and the keeper may hold the session: nobody is to connect to it all the same.
            self.shared.session.shutdown(Duration::ZERO);
        }
    }
}

/// Says why memory of a device cannot grow in place, where a session would fall back to separate
/// regions.
fn check_growth(gpu: &Gpu, limit: Option<u64>) -> Result<(), Error> {
    if gpu.default_sharing()? != Sharing::Fd {
        return Err(Error::Unsupported {
            what: "a session that grows in place",
            why: format!("{} does not share memory by descriptor", gpu.device()),
            remedy: "leave `grows_in_place` out",
        });
    }
    GrowingMemory::new(gpu.clone())?
        .most(limit.unwrap_or(u64::MAX))
        .reserve()
}

#[pymethods]
impl Session {
    #[new]
    #[pyo3(signature = (
        device=None, path=None, *, limit=None, ttl=300.0, region_bytes=None, grows_in_place=false, quarantine=None,
        max_leases=None, allow_uids=None,
    ))]
    #[allow(
        clippy::too_many_arguments,
        reason = "they are Python's keyword arguments"
    )]
    fn new(
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        path: Option<PathBuf>,
        limit: Option<Whole>,
        ttl: Option<f64>,
        region_bytes: Option<Whole>,
        grows_in_place: bool,
        quarantine: Option<f64>,
        max_leases: Option<Whole>,
        allow_uids: Option<Vec<u32>>,
    ) -> PyResult<Session> {
        logging::listen(py);
        let limit = limit.map(u64::from);
        let gpu = device::open(py, device)?;
        let mut builder = gpu_ipc::Session::builder(gpu.clone())
            .time_to_live(duration(ttl)?)
            .allow_uids(allow_uids.unwrap_or_default());
        if let Some(path) = path {
            builder = builder.socket(path);
        }
        if let Some(bytes) = limit {
            builder = builder.limit(bytes);
        }
        if let Some(Whole(bytes)) = region_bytes {
            builder = builder.region_bytes(bytes);
        }
        if grows_in_place {
            py.detach(|| check_growth(&gpu, limit)).or_raise()?;
            builder = builder.grows_in_place(true);
        }
        if let Some(time) = duration(quarantine)? {
            builder = builder.quarantine(time);
        }
        if let Some(Whole(leases)) = max_leases {
            builder = builder.max_slots(leases);
        }
        let session = py.detach(|| builder.open()).or_raise()?;
        let shared = Arc::new(Shared::new(session, gpu).or_raise()?);
        keeper::start(py)?;
        let weak = Arc::downgrade(&shared);
        process()
            .queue
            .watch(shared.session.as_fd(), weak)
            .or_raise()?;
        Ok(Session {
            shared,
            waiters: Waiters::default(),
        })
    }

    /// The socket that others connect to.
    #[getter]
    fn path(&self) -> String {
        self.shared.session.socket_path().display().to_string()
    }

    /// The session's number, as 32 hexadecimal digits.
    #[getter]
    fn id(&self) -> String {
        self.shared.session.id().to_string()
    }

    /// The device.
    #[getter]
    fn device(&self) -> Device {
        Device::of(&self.shared.gpu)
    }

    /// Whether the program has closed it.
    #[getter]
    fn closed(&self) -> bool {
        self.shared.is_closed.load(Ordering::Relaxed)
    }

    /// How many shared storages were found to be resized under their leases, so far; each is logged
    /// as an error.
    #[getter]
    fn resized_storages(&self) -> u64 {
        self.shared.adopted.freed()
    }

    /// Allocate a block of memory that can be shared, aligned to 256 bytes.
    ///
    /// Args:
    ///     nbytes: its length in bytes, at least 1.
    ///     timeout: seconds to wait for room when there is none; 0 does not wait.
    ///
    /// Raises:
    ///     OutOfMemory: there is no room, even after what nobody holds was given back.
    #[pyo3(signature = (nbytes, timeout=0.0))]
    fn alloc(&self, py: Python<'_>, nbytes: Whole, timeout: f64) -> PyResult<Block> {
        self.check_fork()?;
        Ok(Block::new(self.shared.allocate(
            py,
            nbytes.0,
            duration(Some(timeout))?,
        )?))
    }

    /// Share an array, and return the descriptor by which it is claimed.
    ///
    /// The array arrives as it is: element type, shape, strides and offset. Its memory is not
    /// copied; the session keeps it until the last lease on it has ended, whatever becomes of the
    /// Python object.
    ///
    /// Args:
    ///     x: a ``Block``, or any array that speaks DLPack, the CUDA array interface or, on the host backend, the
    ///         buffer protocol.
    ///     to: a ``ParticipantId``, or a ``Ticket`` for unknown readers; None for one claim by anybody.
    ///     stream: the stream whose queued work fills the array; consumers wait for it, this call does not. None takes
    ///         the stream that the array's own library uses at this moment, and for a ``Block`` that nothing is
    ///         pending.
    ///     ttl: seconds that the grant stays claimable, 0 for ever; None as the session's.
    ///     meta: bytes of your own that travel in the descriptor.
    ///     copy: copy the array into memory of the session first, and wait for the copy. It costs as many bytes again,
    ///         until the last lease has ended.
    ///     read_only: whether the array arrives to be read only, so that a write to it faults. None as the array's
    ///         library says of it; a copy may be written.
    ///
    /// Raises:
    ///     Unsupported: the memory cannot be shared, or not to be read only; the text says what to do.
    ///     Invalid: a broadcast, ``ticket(None)``, of what is in no block that the program holds: ``lend`` it.
    ///     ParticipantGone: the addressee is not connected.
    ///     Capturing: the stream is being captured into a graph.
    #[pyo3(signature = (x, *, to=None, stream=None, ttl=None, meta=None, copy=false, read_only=None))]
    #[allow(
        clippy::too_many_arguments,
        reason = "they are Python's keyword arguments"
    )]
    fn share(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        to: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
        ttl: Option<f64>,
        meta: Option<&Bound<'_, PyAny>>,
        copy: bool,
        read_only: Option<bool>,
    ) -> PyResult<Descriptor> {
        self.check_fork()?;
        let _call = Call::begin(py);
        let meta = meta.map(bytes_of).transpose()?.unwrap_or_default();
        let to = addressee::to(to)?;
        let options = options(ttl)?;
        let given = stream
            .map(|stream| stream::given(&self.shared.gpu, stream))
            .transpose()?;
        let prepared = self.shared.prepare(py, x, given.as_ref(), copy)?;
        let prepared = prepared.with_access(read_only);
        prepared.check(to)?;
        self.shared.grant(py, prepared, to, given, &options, &meta)
    }

    /// Share several arrays with one call of the driver for each stream and addressee.
    ///
    /// Args:
    ///     arrays: arrays as ``share`` takes them, such as ``state_dict.values()``.
    ///     to: as for ``share``; or a list of addressees, each of which gets every array.
    ///     stream, ttl, copy, read_only: as for ``share``.
    ///
    /// Returns:
    ///     The descriptors in the order of ``arrays``, as one ``Descriptors``; for a list of addressees one for each.
    ///
    /// Raises:
    ///     As ``share``. After an error nothing is granted of the stream whose arrays failed. ``ParticipantGone`` names
    ///     the addressee as ``error.participant``: leave it out and share again.
    #[pyo3(signature = (arrays, *, to=None, stream=None, ttl=None, copy=false, read_only=None))]
    #[allow(
        clippy::too_many_arguments,
        reason = "they are Python's keyword arguments"
    )]
    fn share_many<'py>(
        &self,
        py: Python<'py>,
        arrays: &Bound<'py, PyAny>,
        to: Option<&Bound<'py, PyAny>>,
        stream: Option<&Bound<'py, PyAny>>,
        ttl: Option<f64>,
        copy: bool,
        read_only: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.check_fork()?;
        let _call = Call::begin(py);
        let many =
            to.is_some_and(|to| to.is_instance_of::<PyList>() || to.is_instance_of::<PyTuple>());
        let addressees: Vec<To> = match to {
            Some(list) if many => list
                .try_iter()?
                .map(|one| addressee::to(Some(&one?)))
                .collect::<PyResult<_>>()?,
            one => vec![addressee::to(one)?],
        };
        let options = options(ttl)?;
        let given = stream
            .map(|stream| stream::given(&self.shared.gpu, stream))
            .transpose()?;
        let mut prepared = Vec::new();
        for array in arrays.try_iter()? {
            let one = self.shared.prepare(py, &array?, given.as_ref(), copy)?;
            let one = one.with_access(read_only);
            addressees.iter().try_for_each(|&to| one.check(to))?;
            prepared.push(one);
        }
        let mut lists = self
            .shared
            .grant_many(py, prepared, &addressees, given, &options)?
            .into_iter();
        if many {
            let lists = lists
                .map(|list| Py::new(py, list))
                .collect::<PyResult<Vec<_>>>()?;
            return Ok(PyList::new(py, lists)?.into_any());
        }
        let only = lists
            .next()
            .ok_or_else(|| invalid("what was granted", "nothing", "a list"))?;
        Ok(Bound::new(py, only)?.into_any())
    }

    /// Lend an array: share it any number of times, with any addressee, until the loan is released.
    ///
    /// Its memory is taken in once, and the work of a stream is marked once, for all that the loan is shared with.
    ///
    /// Args:
    ///     x: an array as ``share`` takes it.
    ///     stream: as for ``share``.
    ///     copy: as for ``share``.
    ///     read_only: as for ``share``, for all that the loan is shared with unless its ``share`` says otherwise.
    ///
    /// Raises:
    ///     Unsupported: the memory cannot be shared; the text says what to do.
    ///     Capturing: the stream is being captured into a graph.
    ///     Closed: the session is closed.
    #[pyo3(signature = (x, *, stream=None, copy=false, read_only=None))]
    fn lend(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
        copy: bool,
        read_only: Option<bool>,
    ) -> PyResult<Loan> {
        self.check_fork()?;
        let _call = Call::begin(py);
        let given = stream
            .map(|stream| stream::given(&self.shared.gpu, stream))
            .transpose()?;
        let prepared = self.shared.prepare(py, x, given.as_ref(), copy)?;
        let prepared = prepared.with_access(read_only);
        let read_only = prepared.is_read_only();
        let (loan, block, layout) = self.shared.lend(py, prepared, given)?;
        Ok(Loan::new(loan, block, layout, read_only, &self.shared))
    }

    /// Find the block of this session that an array was made in; None for any other array.
    ///
    /// The block is held by what is returned, also when the one that was allocated was released.
    fn block_of(&self, x: &Bound<'_, PyAny>) -> PyResult<Option<Block>> {
        self.check_fork()?;
        Ok(self.shared.block_of(x)?.map(Block::new))
    }

    /// Make a pool of PyTorch whose tensors are born in the session's memory, and shared without
    /// another mapping.
    ///
    /// Use it as ``with torch.cuda.use_mem_pool(session.torch_pool()):``. One pool for each device
    /// and process; calls after the first give the same. Tensors keep the session's memory after it
    /// was closed, but none can be made then: PyTorch raises its ``OutOfMemoryError``.
    ///
    /// Raises:
    ///     Unsupported: the session is not on a CUDA device.
    ///     Invalid: another session of this process has the device's pool.
    fn torch_pool<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.check_fork()?;
        torch_pool::open(py, &self.shared)
    }

    /// Make an addressee of whichever participants claim first.
    ///
    /// Args:
    ///     claims: how many claims it is good for; None for any number of them, by each participant as often as it
    ///         likes, until the producer drops the block or releases the loan.
    #[staticmethod]
    #[pyo3(signature = (claims=Some(Whole(1)), /), text_signature = "(claims=1, /)")]
    fn ticket(claims: Option<Whole>) -> PyResult<Ticket> {
        Ticket::of(claims)
    }

    /// Take a grant back that nobody has claimed; a claim of it then raises ``Revoked``.
    ///
    /// Args:
    ///     block: the block that was shared.
    ///     descriptor: what ``share`` gave.
    ///
    /// Returns:
    ///     Whether there was something to take back.
    fn cancel(
        &self,
        py: Python<'_>,
        block: &Block,
        descriptor: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        self.check_fork()?;
        let descriptor =
            gpu_ipc::Descriptor::decode(Descriptor::of(descriptor)?.get().grant()).or_raise()?;
        let lent = block.lent()?;
        py.detach(|| lent.block().cancel(&descriptor)).or_raise()
    }

    /// Take back what a descriptor of this session grants and nobody has claimed; a claim of it then
    /// raises ``Revoked``. For what was shared without a ``Block`` in hand.
    ///
    /// Of a ticket, the claims that are left end, and what it granted and nobody has claimed is taken back. What was
    /// claimed stays.
    ///
    /// Args:
    ///     descriptor: what ``share`` gave.
    ///
    /// Returns:
    ///     Whether there was something to take back. Of a claim at the same moment and this, one wins.
    ///
    /// Raises:
    ///     Mismatch: the descriptor is of another session.
    fn revoke(&self, py: Python<'_>, descriptor: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.check_fork()?;
        let descriptor =
            gpu_ipc::Descriptor::decode(Descriptor::of(descriptor)?.get().grant()).or_raise()?;
        py.detach(|| self.shared.session.revoke(&descriptor))
            .or_raise()
    }

    /// Keep a file descriptor under a name, until one fetches it.
    ///
    /// It ends with the session.
    ///
    /// Args:
    ///     id: the name, 16 bytes that are used once: ``uuid.uuid4().bytes``.
    ///     fd: the number of an open file; the session keeps a copy, and this one stays yours.
    ///
    /// Raises:
    ///     Invalid: a descriptor is kept under the name, or it has another length.
    ///     Closed: the session is closing.
    fn deposit(&self, id: &[u8], fd: i32) -> PyResult<()> {
        self.check_fork()?;
        let (id, file) = (deposit::name(id)?, deposit::copy_of(fd)?);
        self.shared.session.deposit(id, file).or_raise()
    }

    /// Fetch the file descriptor that a participant has deposited, or this process.
    ///
    /// Args:
    ///     id: its name.
    ///
    /// Returns:
    ///     The number of a descriptor that is yours to close.
    ///
    /// Raises:
    ///     Invalid: nothing is kept under the name: it was fetched, or its depositor is gone.
    fn fetch(&self, id: &[u8]) -> PyResult<i32> {
        self.check_fork()?;
        let file = self.shared.session.fetch(deposit::name(id)?).or_raise()?;
        Ok(deposit::given(file))
    }

    /// How many file descriptors are deposited and not fetched.
    #[getter]
    fn deposits(&self) -> PyResult<usize> {
        self.check_fork()?;
        Ok(self.shared.session.deposits())
    }

    /// The participants that are connected.
    fn participants(&self) -> PyResult<Vec<ParticipantId>> {
        self.check_fork()?;
        let connected = self.shared.session.participants();
        Ok(connected.into_iter().map(ParticipantId::of).collect())
    }

    /// Wait until at least ``count`` participants are connected, and list them.
    ///
    /// Raises:
    ///     Timeout: fewer are connected after ``timeout`` seconds.
    #[pyo3(signature = (count, timeout=None))]
    fn wait_for_participants(
        &self,
        py: Python<'_>,
        count: Whole,
        timeout: Option<f64>,
    ) -> PyResult<Vec<ParticipantId>> {
        self.check_fork()?;
        let session = &self.shared.session;
        let waited = in_slices(py, duration(timeout)?, |slice| {
            match session.wait_for_participants(count.count(), Some(slice)) {
                Err(Error::Deadline { .. }) => None,
                done => Some(done),
            }
        })?;
        let connected = waited
            .unwrap_or(Err(Error::Deadline {
                what: "participants to connect",
            }))
            .or_raise()?;
        Ok(connected.into_iter().map(ParticipantId::of).collect())
    }

    /// What a connected participant calls itself, or else the command that it runs; None for one
    /// that is not connected.
    fn participant_name(&self, participant: &ParticipantId) -> PyResult<Option<String>> {
        self.check_fork()?;
        let id = gpu_ipc::ParticipantId(participant.number());
        Ok(self.shared.session.participant_name(id))
    }

    /// Wait for participants without blocking the event loop: ``await
    /// session.wait_for_participants_async(2)``.
    ///
    /// Raises:
    ///     Closed: the session was closed meanwhile.
    fn wait_for_participants_async<'py>(
        slf: &Bound<'py, Self>,
        count: Whole,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.get().check_fork()?;
        coroutine(slf.py(), "participants", (slf, count.0))
    }

    /// Wait until no lease on a block is outstanding, without blocking the event loop.
    fn wait_released_async<'py>(
        slf: &Bound<'py, Self>,
        block: &Bound<'py, Block>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.get().check_fork()?;
        coroutine(slf.py(), "released", (slf, block))
    }

    /// Take the notices that were not read yet.
    fn notices(&self) -> PyResult<Vec<SessionNotice>> {
        self.check_fork()?;
        Ok(self.shared.notices.take())
    }

    /// Wait for notices without blocking the event loop: ``async for notice in
    /// session.notices_async()``.
    ///
    /// It ends after the notice that the session is closed.
    fn notices_async<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.get().check_fork()?;
        coroutine(slf.py(), "notices", (slf,))
    }

    /// The number of a file descriptor that is readable while there is a notice, for event loops.
    fn fileno(&self) -> PyResult<i32> {
        self.check_fork()?;
        Ok(self.shared.notices.as_raw_fd())
    }

    /// What the session holds and who holds it, at this moment.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        self.check_fork()?;
        let stats = py.detach(|| self.shared.session.stats());
        Stats::of(py, stats)
    }

    /// Look for leases that have ended, and give back what nobody holds any more.
    ///
    /// The library does this by itself; the call is for who wants the memory at once.
    fn collect(&self, py: Python<'_>) -> PyResult<Collected> {
        self.check_fork()?;
        let (report, owners) = py.detach(|| {
            let collected = self.shared.session.collect();
            let report = (collected.blocks, collected.bytes);
            (report, self.shared.adopted.take_back(&collected.tokens))
        });
        for owner in &owners {
            self.shared.adopted.report_freed(py, owner);
        }
        Ok(Collected::of(report, owners.len() as u64))
    }

    /// Return memory that nobody uses to the driver, and say how many bytes.
    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_fork()?;
        py.detach(|| self.shared.session.trim()).or_raise()
    }

    /// Share nothing more, close the socket, and wait until nothing is held.
    ///
    /// Args:
    ///     timeout: seconds; 0 does not wait. What is still held then stays good for its holders.
    ///
    /// Returns:
    ///     What was still held, and by whom.
    #[pyo3(signature = (timeout=0.0))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<ShutdownReport> {
        self.check_fork()?;
        let timeout = duration(timeout)?;
        let session = &self.shared.session;
        self.shared.is_closed.store(true, Ordering::Relaxed);
        self.shared.notices.push(None);
        let clean = in_slices(py, timeout, |slice| {
            Some(session.shutdown(slice)).filter(|report| report.clean)
        })?;
        let report = clean.unwrap_or_else(|| session.shutdown(Duration::ZERO));
        let returned = py.detach(|| self.shared.take_back());
        drop(returned);
        ShutdownReport::of(py, report)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, Some(0.0)).map(drop)
    }

    /// Whether the last notice was taken.
    #[getter]
    fn _ended(&self) -> bool {
        self.shared.notices.have_ended()
    }

    #[getter(_waiters)]
    fn get_waiters(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.waiters.get(py)
    }

    #[setter(_waiters)]
    fn set_waiters(&self, waiters: Option<Py<PyAny>>) {
        self.waiters.set(waiters);
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(invalid(
            "what to pickle",
            "a session",
            "its path: the other process connects to it",
        ))
    }

    fn __repr__(&self) -> String {
        let state = match self.check_fork() {
            Err(_) => ", of the parent process",
            Ok(()) if self.closed() => ", closed",
            Ok(()) => "",
        };
        let (device, path) = (self.device_name(), self.path());
        format!("<gpu_ipc.Session {device} at {path}{state}>")
    }
}

impl Session {
    #[cfg(feature = "faults")]
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn check_fork(&self) -> PyResult<()> {
        self.shared.guard.check("this session").or_raise()
    }

    fn device_name(&self) -> String {
        format!("{}:{}", self.shared.gpu.kind(), self.shared.gpu.device().0)
    }
}

pub(super) fn options(ttl: Option<f64>) -> PyResult<ShareOptions> {
    Ok(match ttl {
        None => ShareOptions::default(),
        Some(0.0) => ShareOptions::default().time_to_live(None),
        some => ShareOptions::default().time_to_live(duration(some)?),
    })
}

pub(super) fn bytes_of(object: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let bytes = match object.cast::<PyBytes>() {
        Ok(bytes) => bytes.as_bytes().to_vec(),
        Err(_) => object.extract()?,
    };
    if bytes.len() > MOST_META {
        return Err(invalid(
            "the length of `meta`",
            bytes.len(),
            "at most 1,048,576 bytes: share an array instead",
        ));
    }
    Ok(bytes)
}

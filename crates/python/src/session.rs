//! Sessions: what a producer opens.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use gpu_ipc::backend::{DevicePtr, ForkGuard};
use gpu_ipc::session::{AdoptToken, ShareOptions};
use gpu_ipc::{After, Error, Gpu, To};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::addressee::{self, ParticipantId, Ticket};
use crate::array::{self, Keeper, Source, View};
use crate::block::{Block, Lent, Owned};
use crate::descriptor::{Descriptor, MOST_META};
use crate::device::{self, Device};
use crate::dlpack;
use crate::errors::{OrRaise, invalid, raise, unsupported};
use crate::layout::Layout;
use crate::process::process;
use crate::stats::{Collected, ShutdownReport, Stats};
use crate::waiting::{duration, in_slices};
use crate::{logging, streams, torch_pool};

/// How many adopted storages one look checks.
const LOOK_AT: usize = 64;

/// A session, as its Python object, its blocks and the keeper hold it.
pub(crate) struct Shared {
    session: gpu_ipc::Session,
    gpu: Gpu,
    guard: ForkGuard,
    next_token: AtomicU64,
    /// What keeps adopted memory, by token. Never dropped with the lock held.
    adopted: Mutex<HashMap<u64, Keeper>>,
    /// Blocks that arrays of this process may lie in, by address.
    blocks: Mutex<BTreeMap<u64, (u64, Weak<Owned>)>>,
    /// Where other libraries' work is waited for when they are asked by `__dlpack__`, and copies run.
    own_stream: OnceLock<gpu_ipc::Stream>,
    /// Where the next look for freed storages begins.
    looked: AtomicU64,
    freed: AtomicU64,
}

impl Shared {
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub fn session(&self) -> &gpu_ipc::Session {
        &self.session
    }

    /// Forgets a block that is being dropped.
    pub fn forget_block(&self, start: u64) {
        if !self.guard.is_child() {
            self.blocks.lock().unwrap_or_else(PoisonError::into_inner).remove(&start);
        }
    }

    /// Lets arrays of this process be found to lie in a block.
    pub fn note_block(&self, lent: &Lent) {
        let entry = (lent.block().len(), Arc::downgrade(lent.owned()));
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner).insert(lent.start(), entry);
    }

    /// Finds the block that a range lies in.
    fn block_at(&self, first: u64, len: u64) -> Option<Lent> {
        let blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let (&start, (bytes, owned)) = blocks.range(..=first).next_back()?;
        let is_inside = first.checked_add(len)? <= start.checked_add(*bytes)?;
        owned.upgrade().filter(|_| is_inside).map(Lent::of)
    }

    /// Takes back what keeps memory that nobody holds or maps any more. The caller drops it with the interpreter's lock.
    pub fn take_back(&self) -> Vec<Keeper> {
        self.keepers(self.session.collect().tokens)
    }

    fn keepers(&self, tokens: Vec<AdoptToken>) -> Vec<Keeper> {
        let mut adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.into_iter().filter_map(|token| adopted.remove(&token.0)).collect()
    }

    /// Says whether every adopted memory is its owner's again.
    pub fn lends_nothing(&self) -> bool {
        self.adopted.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Looks at some of the storages that are lent, and reports those that were freed under their leases.
    pub fn look_for_freed(&self, py: Python<'_>) {
        let from = self.looked.load(Ordering::Relaxed);
        let mut lent: Vec<(u64, Keeper)> = Vec::new();
        {
            let adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner);
            for (&token, keeper) in adopted.iter().filter(|(token, _)| **token >= from).take(LOOK_AT) {
                if let Keeper::Storage { object, start, bytes } = keeper {
                    lent.push((token, Keeper::Storage { object: object.clone_ref(py), start: *start, bytes: *bytes }));
                }
            }
        }
        let last = lent.iter().map(|(token, _)| *token).max();
        self.looked.store(last.filter(|_| lent.len() == LOOK_AT).map_or(0, |last| last + 1), Ordering::Relaxed);
        for (token, keeper) in lent {
            if self.report_freed(py, &keeper) {
                // Once is enough.
                let mut adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner);
                let known = adopted.get_mut(&token).map(|known| std::mem::replace(known, Keeper::Nothing));
                if let (Some(Keeper::Storage { object, .. }), Some(place)) = (known, adopted.get_mut(&token)) {
                    *place = Keeper::Object(object);
                }
            }
        }
    }

    fn report_freed(&self, py: Python<'_>, keeper: &Keeper) -> bool {
        let Some(text) = keeper.was_freed(py) else { return false };
        self.freed.fetch_add(1, Ordering::Relaxed);
        logging::error(py, text);
        true
    }

    /// Returns a stream of the library's own.
    fn own_stream(&self) -> Result<&gpu_ipc::Stream, Error> {
        if let Some(stream) = self.own_stream.get() {
            return Ok(stream);
        }
        let stream = gpu_ipc::Stream::create(&self.gpu)?;
        Ok(self.own_stream.get_or_init(|| stream))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The keeper holds the session while something is lent. So this is the end of a process or a forked child, and the
        // references are not this thread's to drop.
        std::mem::forget(std::mem::take(self.adopted.get_mut().unwrap_or_else(PoisonError::into_inner)));
    }
}

/// Something to share, and after what.
struct Prepared {
    lent: Lent,
    layout: Layout,
    /// The stream that its pending work is on, by handle.
    pending: Option<u64>,
}

/// A producer's session: share arrays, and know when they are free again.
///
/// Closing, and the end of a ``with`` block, share nothing more and wait for nobody: what others hold stays good for
/// them while this process lives. The memory of adopted arrays is kept until the last lease on it has ended.
///
/// Args:
///     device: ``"cuda:0"``, ``"hip:0"``, ``"host:0"``, or what ``str`` makes such a name of; None takes the first that
///         there is, GPUs first.
///     path: where the socket is put; None chooses a name in the runtime directory.
///     ttl: seconds that a grant stays claimable; None for ever.
///     region_bytes: bytes that are taken from the driver at a time.
///     quarantine: seconds between the proof of a consumer's death and the reuse of what it held.
///     max_leases: leases that one participant may have at once.
///     allow_uids: users who may connect besides this one.
///
/// Raises:
///     Unavailable: there is no such device.
///     Invalid: somebody listens on the path already.
#[pyclass(frozen, module = "gpu_ipc")]
pub(crate) struct Session {
    shared: Arc<Shared>,
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.shared.guard.is_child() {
            // Blocks and the keeper may hold the session: nobody is to connect to it all the same.
            self.shared.session.shutdown(Duration::ZERO);
        }
    }
}

#[pymethods]
impl Session {
    #[new]
    #[pyo3(signature = (
        device=None, path=None, *, ttl=300.0, region_bytes=None, quarantine=None, max_leases=None, allow_uids=Vec::new(),
    ))]
    #[allow(clippy::too_many_arguments, reason = "they are Python's keyword arguments")]
    fn new(
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        path: Option<PathBuf>,
        ttl: Option<f64>,
        region_bytes: Option<u64>,
        quarantine: Option<f64>,
        max_leases: Option<u64>,
        allow_uids: Vec<u32>,
    ) -> PyResult<Session> {
        logging::listen(py);
        let gpu = device::open(py, device)?;
        let mut builder = gpu_ipc::Session::builder(gpu.clone()).time_to_live(duration(ttl)?).allow_uids(allow_uids);
        if let Some(path) = path {
            builder = builder.socket(path);
        }
        if let Some(bytes) = region_bytes {
            builder = builder.region_bytes(bytes);
        }
        if let Some(time) = duration(quarantine)? {
            builder = builder.quarantine(time);
        }
        if let Some(leases) = max_leases {
            builder = builder.max_slots(leases);
        }
        let session = py.detach(|| builder.open()).or_raise()?;
        let shared = Shared {
            session,
            gpu,
            guard: ForkGuard::new().or_raise()?,
            next_token: AtomicU64::new(1),
            adopted: Mutex::default(),
            blocks: Mutex::default(),
            own_stream: OnceLock::new(),
            looked: AtomicU64::new(0),
            freed: AtomicU64::new(0),
        };
        process().keeper.start(py)?;
        Ok(Session { shared: Arc::new(shared) })
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

    /// How many shared storages were found to be resized under their leases, so far; each is logged as an error.
    #[getter]
    fn resized_storages(&self) -> u64 {
        self.shared.freed.load(Ordering::Relaxed)
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
    fn alloc(&self, py: Python<'_>, nbytes: u64, timeout: f64) -> PyResult<Block> {
        Ok(Block::new(self.allocate(py, nbytes, duration(Some(timeout))?)?))
    }

    /// Share an array, and return the descriptor by which it is claimed.
    ///
    /// The array arrives as it is: element type, shape, strides and offset. Its memory is not copied; the session keeps
    /// it until the last lease on it has ended, whatever becomes of the Python object.
    ///
    /// Args:
    ///     x: a ``Block``, or any array that speaks DLPack, the CUDA array interface or, on the host backend, the buffer
    ///         protocol.
    ///     to: a ``ParticipantId``, or a ``Ticket`` for those who are not known; None for one claim by anybody.
    ///     stream: the stream whose queued work fills the array; consumers wait for it, this call does not. None takes the
    ///         stream that the array's own library uses at this moment, and for a ``Block`` that nothing is pending.
    ///     ttl: seconds that the grant stays claimable, 0 for ever; None as the session's.
    ///     meta: bytes of your own that travel in the descriptor.
    ///     copy: copy the array into memory of the session first, and wait for the copy. It costs as many bytes again, until
    ///         the last lease has ended.
    ///
    /// Raises:
    ///     Unsupported: the memory cannot be shared; the text says what to do.
    ///     ParticipantGone: the addressee is not connected.
    ///     Capturing: the stream is being captured into a graph.
    #[pyo3(signature = (x, *, to=None, stream=None, ttl=None, meta=None, copy=false))]
    #[allow(clippy::too_many_arguments, reason = "they are Python's keyword arguments")]
    fn share(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        to: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
        ttl: Option<f64>,
        meta: Option<&Bound<'_, PyAny>>,
        copy: bool,
    ) -> PyResult<Descriptor> {
        let meta = meta.map(bytes_of).transpose()?.unwrap_or_default();
        let to = addressee::to(to)?;
        let options = options(ttl)?;
        let given = stream.map(|stream| streams::given(&self.shared.gpu, stream)).transpose()?;
        let prepared = self.prepare(py, x, given.as_ref(), copy)?;
        let pending = match (given, prepared.pending) {
            (Some(given), _) => Some(given),
            (None, Some(raw)) => Some(streams::borrow(py, &self.shared.gpu, raw, None)?),
            (None, None) => None,
        };
        let Prepared { lent, layout, .. } = prepared;
        let granted = py.detach(|| {
            let after = pending.as_ref().map_or(After::Done, After::Stream);
            let granted = lent.block().share_with(to, after, &options);
            // Its drop may reach the driver.
            drop((lent, pending));
            granted
        });
        Ok(Descriptor::new(&granted.or_raise()?, layout, &meta))
    }

    /// Share several arrays with one call of the driver for each stream and addressee.
    ///
    /// Args:
    ///     arrays: arrays as ``share`` takes them, such as ``state_dict.values()``.
    ///     to: as for ``share``; or a list of addressees, each of which gets every array.
    ///     stream, ttl, copy: as for ``share``.
    ///
    /// Returns:
    ///     The descriptors in the order of ``arrays``; for a list of addressees one such list for each.
    ///
    /// Raises:
    ///     As ``share``. After an error nothing is granted of the stream whose arrays failed.
    #[pyo3(signature = (arrays, *, to=None, stream=None, ttl=None, copy=false))]
    #[allow(clippy::too_many_arguments, reason = "they are Python's keyword arguments")]
    fn share_many<'py>(
        &self,
        py: Python<'py>,
        arrays: &Bound<'py, PyAny>,
        to: Option<&Bound<'py, PyAny>>,
        stream: Option<&Bound<'py, PyAny>>,
        ttl: Option<f64>,
        copy: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let many = to.is_some_and(|to| to.is_instance_of::<PyList>() || to.is_instance_of::<PyTuple>());
        let addressees: Vec<To> = match to {
            Some(list) if many => list.try_iter()?.map(|one| addressee::to(Some(&one?))).collect::<PyResult<_>>()?,
            one => vec![addressee::to(one)?],
        };
        let options = options(ttl)?;
        let given = stream.map(|stream| streams::given(&self.shared.gpu, stream)).transpose()?;
        let mut prepared = Vec::new();
        for array in arrays.try_iter()? {
            let one = self.prepare(py, &array?, given.as_ref(), copy)?;
            prepared.push(one);
        }
        let granted = self.grant_many(py, &prepared, &addressees, given, &options);
        let (layouts, lent): (Vec<_>, Vec<_>) = prepared.into_iter().map(|one| (one.layout, one.lent)).unzip();
        py.detach(|| drop(lent));
        let granted = granted?;
        let lists = granted.iter().map(|grants| {
            let descriptors =
                grants.iter().zip(&layouts).map(|(grant, layout)| Descriptor::new(grant, layout.clone(), &[]));
            PyList::new(py, descriptors.map(|one| Py::new(py, one)).collect::<PyResult<Vec<_>>>()?)
        });
        let mut lists = lists.collect::<PyResult<Vec<_>>>()?;
        if many { PyList::new(py, lists) } else { Ok(lists.swap_remove(0)) }
    }

    /// Make a pool of PyTorch whose tensors are born in the session's memory, and shared without another mapping.
    ///
    /// Use it as ``with torch.cuda.use_mem_pool(session.torch_pool()):``. One pool for each device and process; calls
    /// after the first give the same. Tensors keep the session's memory after it was closed, but none can be made then:
    /// PyTorch raises its ``OutOfMemoryError``.
    ///
    /// Raises:
    ///     Unsupported: the session is not on a CUDA device.
    ///     Invalid: another session of this process has the device's pool.
    fn torch_pool<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        torch_pool::open(py, &self.shared)
    }

    /// Make an addressee of whichever participants claim first.
    ///
    /// Args:
    ///     claims: how many claims it is good for; None for any number of them, until the producer drops the block.
    #[staticmethod]
    #[pyo3(signature = (claims=1, /))]
    fn ticket(claims: Option<u32>) -> PyResult<Ticket> {
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
    fn cancel(&self, py: Python<'_>, block: &Block, descriptor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let descriptor = gpu_ipc::Descriptor::decode(Descriptor::of(descriptor)?.grant()).or_raise()?;
        let lent = block.lent()?;
        py.detach(|| lent.block().cancel(&descriptor)).or_raise()
    }

    /// The participants that are connected.
    fn participants(&self) -> Vec<ParticipantId> {
        self.shared.session.participants().into_iter().map(ParticipantId::of).collect()
    }

    /// Wait until at least ``count`` participants are connected, and list them.
    ///
    /// Raises:
    ///     Timeout: fewer are connected after ``timeout`` seconds.
    #[pyo3(signature = (count, timeout=None))]
    fn wait_for_participants(
        &self,
        py: Python<'_>,
        count: usize,
        timeout: Option<f64>,
    ) -> PyResult<Vec<ParticipantId>> {
        let session = &self.shared.session;
        let waited =
            in_slices(py, duration(timeout)?, |slice| match session.wait_for_participants(count, Some(slice)) {
                Err(Error::Deadline { .. }) => None,
                done => Some(done),
            })?;
        let connected = waited.unwrap_or(Err(Error::Deadline { what: "participants to connect" })).or_raise()?;
        Ok(connected.into_iter().map(ParticipantId::of).collect())
    }

    /// What the session holds and who holds it, at this moment.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        self.shared.guard.check("this session").or_raise()?;
        let stats = py.detach(|| self.shared.session.stats());
        Stats::of(py, stats)
    }

    /// Look for leases that have ended, and give back what nobody holds any more.
    ///
    /// The library does this by itself; the call is for who wants the memory at once.
    fn collect(&self, py: Python<'_>) -> PyResult<Collected> {
        self.shared.guard.check("this session").or_raise()?;
        let (report, keepers) = py.detach(|| {
            let collected = self.shared.session.collect();
            let report = (collected.blocks, collected.bytes);
            (report, self.shared.keepers(collected.tokens))
        });
        for keeper in &keepers {
            self.shared.report_freed(py, keeper);
        }
        Ok(Collected::of(report, keepers.len() as u64))
    }

    /// Return memory that nobody uses to the driver, and say how many bytes.
    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
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
        self.shared.guard.check("this session").or_raise()?;
        let timeout = duration(timeout)?;
        let session = &self.shared.session;
        let clean = in_slices(py, timeout, |slice| Some(session.shutdown(slice)).filter(|report| report.clean))?;
        let report = clean.unwrap_or_else(|| session.shutdown(Duration::ZERO));
        let keepers = py.detach(|| self.shared.take_back());
        drop(keepers);
        ShutdownReport::of(py, report)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, Some(0.0)).map(drop)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(invalid("what to pickle", "a session", "its path: the other process connects to it"))
    }

    fn __repr__(&self) -> String {
        format!("<gpu_ipc.Session {} at {}>", self.device_name(), self.path())
    }
}

impl Session {
    fn device_name(&self) -> String {
        format!("{}:{}", self.shared.gpu.kind(), self.shared.gpu.device().0)
    }

    fn allocate(&self, py: Python<'_>, nbytes: u64, timeout: Option<Duration>) -> PyResult<Lent> {
        let shared = &self.shared;
        let mut last = None;
        let found = in_slices(py, timeout, |slice| {
            let block =
                if slice.is_zero() { shared.session.alloc(nbytes) } else { shared.session.alloc_within(nbytes, slice) };
            match block {
                Err(error @ Error::OutOfMemory { .. }) => {
                    last = Some(error);
                    None
                }
                done => Some(done),
            }
        })?;
        let block = match (found, last) {
            (Some(done), _) => done,
            (None, Some(error)) => Err(error),
            (None, None) => Err(Error::Deadline { what: "room for a block" }),
        };
        let lent = Lent::new(block.or_raise()?, shared);
        shared.note_block(&lent);
        Ok(lent)
    }

    /// Turns what is to be shared into a block and a layout. With a stream of the caller's, nobody else's is asked for.
    fn prepare(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        given: Option<&gpu_ipc::Stream>,
        copy: bool,
    ) -> PyResult<Prepared> {
        let shared = &self.shared;
        shared.guard.check("this session").or_raise()?;
        if let Ok(block) = x.cast::<Block>()
            && !copy
        {
            let lent = block.get().lent()?;
            if !Arc::ptr_eq(&lent.owned().session, shared) {
                return Err(invalid("a block", "of another session", "of the session that shares it"));
            }
            let layout = Layout::bytes(lent.block().len());
            return Ok(Prepared { lent, layout, pending: None });
        }
        let order = || match given {
            Some(_) => Ok(None),
            None => py.detach(|| shared.own_stream().map(|stream| Some(stream.raw().handle))).or_raise(),
        };
        let view = array::read(&shared.gpu, x, order)?;
        let pending = match view.source {
            Source::Exchange(raw) if view.device.kind != dlpack::CPU => Some(raw),
            Source::Interface(raw) => raw,
            Source::Dlpack if view.device.kind != dlpack::CPU => order()?,
            _ => None,
        };
        let (first, len, layout) = view.span()?;
        if len == 0 {
            // A block is never empty, and an empty array reads none of its bytes.
            let lent = self.allocate(py, 1, Some(Duration::ZERO))?;
            return Ok(Prepared { lent, layout, pending: None });
        }
        if copy {
            let lent = self.copied(py, &view, (first, len), given, pending)?;
            return Ok(Prepared { lent, layout, pending: None });
        }
        if let Some(error) = array::refusal(dlpack::Device::of(&shared.gpu), view.device, len) {
            return Err(error);
        }
        let lent = match shared.block_at(first, len) {
            Some(lent) if !lent.owned().is_segment => {
                let offset = view.start - lent.start();
                return Ok(Prepared { lent, layout: Layout { offset, ..layout }, pending });
            }
            // PyTorch would hand the bytes out again when the tensor is gone, so its storage is kept as if adopted.
            segment => self.adopt(py, view.keeper, first, len, segment.as_ref())?,
        };
        Ok(Prepared { lent, layout, pending })
    }

    /// Takes in memory of another allocator, which `keeper` keeps until nobody holds or maps it.
    fn adopt(&self, py: Python<'_>, keeper: Keeper, first: u64, len: u64, segment: Option<&Lent>) -> PyResult<Lent> {
        let shared = &self.shared;
        let token = shared.next_token.fetch_add(1, Ordering::Relaxed);
        shared.adopted.lock().unwrap_or_else(PoisonError::into_inner).insert(token, keeper);
        let (adopted, returned) = py.detach(|| {
            // SAFETY: `adopt` asks that the range stays allocated until its token is back: the keeper holds the memory of its
            // allocator, and is dropped with the token; and that no other block overlaps it: two adoptions of one
            // array are two leases on memory that neither of them gives away.
            let adopt = || unsafe { shared.session.adopt(DevicePtr(first), len, AdoptToken(token)) };
            let adopted = match segment {
                Some(segment) => segment.block().part(first - segment.start(), len, AdoptToken(token)),
                None => adopt(),
            };
            (adopted, shared.take_back())
        });
        drop(returned);
        match adopted {
            Ok(block) => {
                process().keeper.look_after(shared);
                Ok(Lent::new(block, shared))
            }
            Err(error) => {
                let keeper = shared.adopted.lock().unwrap_or_else(PoisonError::into_inner).remove(&token);
                drop(keeper);
                Err(match error {
                    Error::Unsupported { why, .. } => unsupported(
                        "sharing this memory without a copy",
                        format!("{why} ({len} bytes)"),
                        "pass copy=True, which copies it into the session's memory; or let it be allocated there, by \
                         session.alloc or, for PyTorch, under session.torch_pool()",
                    ),
                    error => raise(error),
                })
            }
        }
    }

    /// Copies an array into a block of its own, and waits for it.
    fn copied(
        &self,
        py: Python<'_>,
        view: &View,
        (first, len): (u64, u64),
        given: Option<&gpu_ipc::Stream>,
        pending: Option<u64>,
    ) -> PyResult<Lent> {
        let ours = dlpack::Device::of(&self.shared.gpu);
        if view.device != ours && !matches!(view.device.kind, dlpack::CPU | dlpack::CUDA_HOST) {
            return Err(
                array::refusal(ours, view.device, len).unwrap_or_else(|| invalid("a device", "another", "ours"))
            );
        }
        let lent = self.allocate(py, len, Some(Duration::ZERO))?;
        let stream = match (given, pending) {
            (Some(given), _) => given.clone(),
            (None, Some(raw)) => streams::borrow(py, &self.shared.gpu, raw, None)?,
            (None, None) => py.detach(|| self.shared.own_stream().cloned()).or_raise()?,
        };
        let on_device = view.device == ours && ours.kind != dlpack::CPU;
        py.detach(|| {
            let (backend, to) = (self.shared.gpu.backend(), lent.block().device_ptr());
            if on_device {
                // SAFETY: `copy` asks for a live stream and ranges that are valid until it is done: `view` and `lent` are
                // held beyond the wait below.
                unsafe { backend.copy(stream.raw(), to, DevicePtr(first), len) }?;
            } else {
                let from = std::ptr::with_exposed_provenance::<u8>(first as usize);
                // SAFETY: as above.
                unsafe { backend.copy_to_device(stream.raw(), to, from, len as usize) }?;
            }
            stream.synchronize()
        })
        .or_raise()?;
        Ok(lent)
    }

    /// Grants everything to everybody, stream by stream.
    fn grant_many(
        &self,
        py: Python<'_>,
        prepared: &[Prepared],
        addressees: &[To],
        given: Option<gpu_ipc::Stream>,
        options: &ShareOptions,
    ) -> PyResult<Vec<Vec<gpu_ipc::Descriptor>>> {
        let mut granted = vec![vec![None; prepared.len()]; addressees.len()];
        let mut left: Vec<usize> = (0..prepared.len()).collect();
        while let Some(&first) = left.first() {
            let same = |one: &Prepared| given.is_some() || one.pending == prepared[first].pending;
            let (group, rest): (Vec<_>, Vec<_>) = left.into_iter().partition(|&n| same(&prepared[n]));
            left = rest;
            let stream = match (&given, prepared[first].pending) {
                (Some(given), _) => Some(given.clone()),
                (None, Some(raw)) => Some(streams::borrow(py, &self.shared.gpu, raw, None)?),
                (None, None) => None,
            };
            let grants: Vec<_> =
                addressees.iter().flat_map(|&to| group.iter().map(move |&n| (prepared[n].lent.block(), to))).collect();
            let after = stream.as_ref().map_or(After::Done, After::Stream);
            let descriptors = py.detach(|| self.shared.session.share_many(&grants, after, options)).or_raise()?;
            for (place, descriptor) in descriptors.into_iter().enumerate() {
                granted[place / group.len()][group[place % group.len()]] = Some(descriptor);
            }
        }
        Ok(granted.into_iter().map(|list| list.into_iter().flatten().collect()).collect())
    }
}

fn options(ttl: Option<f64>) -> PyResult<ShareOptions> {
    Ok(match ttl {
        None => ShareOptions::default(),
        Some(0.0) => ShareOptions::default().time_to_live(None),
        some => ShareOptions::default().time_to_live(duration(some)?),
    })
}

fn bytes_of(object: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let bytes = match object.cast::<PyBytes>() {
        Ok(bytes) => bytes.as_bytes().to_vec(),
        Err(_) => object.extract()?,
    };
    if bytes.len() > MOST_META {
        return Err(invalid("the length of `meta`", bytes.len(), "at most 1,048,576 bytes: share an array instead"));
    }
    Ok(bytes)
}

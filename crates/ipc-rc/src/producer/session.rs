//! Sessions: what a producer opens.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use gpu_api::{
    DevicePtr, Error, Export, Gpu, MemoryKind, ParticipantId, Piece, Reclaim, Region, RegionId, RegionSource, Result,
    Sharing,
};

use crate::carver::Carver;
use crate::descriptor::{Descriptor, SessionId};
use crate::manual::{self, Manual, not_manual};
use crate::producer::block::{self, Block, Origin, SentBlock, Token};
use crate::producer::core::{Core, Settings};
use crate::producer::ledger::Effort;
use crate::producer::report::{ShutdownReport, Stats};
use crate::producer::service::Service;
use crate::producer::share::{After, ShareOptions, To};
use crate::socket::{self, Listener, Place};

/// Alignment of blocks, in bytes: what device allocators promise.
const ALIGN: u64 = 256;
/// Numbers of adopted regions begin here, apart from those of the session's source.
const ADOPTED: u64 = 1 << 63;

/// Opens a [`Session`].
#[derive(Debug)]
pub struct SessionBuilder {
    gpu: Gpu,
    socket: Option<PathBuf>,
    runtime_dir: Option<PathBuf>,
    uids: Vec<u32>,
    source: Option<Arc<dyn RegionSource>>,
    region_bytes: u64,
    sharing: Option<Sharing>,
    quarantine: Duration,
    time_to_live: Option<Duration>,
    max_slots: u64,
    listener: Option<OwnedFd>,
    manual: bool,
}

impl SessionBuilder {
    /// Listens on this path instead of one in the runtime directory, so that containers which share only a mounted
    /// directory find it.
    #[must_use]
    pub fn socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.socket = Some(path.into());
        self
    }

    /// Listens on this socket, which somebody else made, bound and set to listen (`SOCK_SEQPACKET`, as a service manager
    /// passes it on) and who removes its name.
    #[must_use]
    pub fn listener(mut self, socket: impl Into<OwnedFd>) -> Self {
        self.listener = Some(socket.into());
        self
    }

    /// Starts no thread for the session: the application polls its [`AsFd`] and calls [`Session::turn`] when it is
    /// readable.
    ///
    /// Calls that wait turn the session themselves. Driver calls that may block (free, unregister) still run on a thread
    /// of their own, started with the first of them, and what is left when the last handle is dropped on another.
    #[must_use]
    pub fn manual(mut self) -> Self {
        self.manual = true;
        self
    }

    /// Puts the socket into this directory, which must belong to this user alone (mode 0700).
    #[must_use]
    pub fn runtime_dir(mut self, path: impl Into<PathBuf>) -> Self {
        self.runtime_dir = Some(path.into());
        self
    }

    /// Lets these users connect, besides this process' own. The socket's directory must let them reach it.
    #[must_use]
    pub fn allow_uids(mut self, uids: impl IntoIterator<Item = u32>) -> Self {
        self.uids.extend(uids);
        self
    }

    /// Takes the bytes of blocks from here instead of from a carver of the session's own.
    #[must_use]
    pub fn source(mut self, source: Arc<dyn RegionSource>) -> Self {
        self.source = Some(source);
        self
    }

    /// Sets the bytes of a region of the session's own carver: 32 MiB unless said.
    #[must_use]
    pub fn region_bytes(mut self, bytes: u64) -> Self {
        self.region_bytes = bytes;
        self
    }

    /// Chooses how regions of the session's own carver are shared: by file descriptor where the device can, unless
    /// said.
    #[must_use]
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = Some(sharing);
        self
    }

    /// Sets how long after the proof of a participant's death its blocks are kept from reuse: 100 ms unless said.
    #[must_use]
    pub fn quarantine(mut self, time: Duration) -> Self {
        self.quarantine = time;
        self
    }

    /// Sets how long a grant stays claimable: 5 minutes unless said; `None` for ever.
    #[must_use]
    pub fn time_to_live(mut self, time: Option<Duration>) -> Self {
        self.time_to_live = time;
        self
    }

    /// Sets how many leases one participant may have outstanding: 2,097,152 unless said. Rounded down to what whole
    /// counter files give, of which the first has 8,192 and each doubles up to 65,536.
    #[must_use]
    pub fn max_slots(mut self, slots: u64) -> Self {
        self.max_slots = slots;
        self
    }

    /// Opens the session: binds its socket and starts its thread.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when somebody alive listens on the path already, when it is too long or no socket, or for a
    /// runtime directory that others can write; [`Error::System`] for what the kernel refuses.
    pub fn open(self) -> Result<Session> {
        let mut id = [0; 16];
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::system("getrandom", "use Linux 3.17 or later", e))?;
        let id = SessionId(id);
        let source = match self.source {
            Some(source) => source,
            None => {
                let sharing = match self.sharing {
                    Some(sharing) => sharing,
                    None => self.gpu.default_sharing()?,
                };
                Arc::new(Carver::new(self.gpu.clone(), sharing, self.region_bytes)?)
            }
        };
        let listener = match (self.listener, self.socket) {
            (Some(socket), _) => Listener::inherited(socket)?,
            (None, Some(path)) => Listener::bind(&Place::Path { path, others: !self.uids.is_empty() })?,
            (None, None) => {
                let dir = socket::runtime_dir(self.runtime_dir.as_deref())?;
                if let Err(error) = socket::sweep_stale(&dir) {
                    tracing::debug!(%error, "stale sockets stay");
                }
                Listener::bind(&Place::Runtime { dir, session: id })?
            }
        };
        let path = listener.path().to_owned();
        let core = Arc::new(Core::new(Settings {
            id,
            gpu: self.gpu,
            source,
            align: ALIGN,
            quarantine: self.quarantine,
            time_to_live: self.time_to_live,
            max_slots: self.max_slots,
        })?);
        let service = Service::new(core.clone(), listener, self.uids, self.manual)?;
        let manual = if self.manual {
            Some(Manual::new(service, &core.driver)?)
        } else {
            manual::start(service)?;
            None
        };
        tracing::debug!(session = %id, path = %path.display(), "session open");
        Ok(Session(Arc::new(Handle {
            core: ManuallyDrop::new(core),
            manual: ManuallyDrop::new(manual),
            path,
            adopted: Mutex::default(),
            next_adopted: AtomicU64::new(ADOPTED),
        })))
    }
}

/// A producer's session: blocks, who may have them, and when they are free.
///
/// Cheap to clone. When the last clone is dropped the socket closes; the session's thread goes on until nothing of it
/// is held any more, or the process ends.
#[derive(Clone, Debug)]
pub struct Session(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    core: ManuallyDrop<Arc<Core>>,
    manual: ManuallyDrop<Option<Manual<Service>>>,
    path: PathBuf,
    /// Regions of adopted memory, by base: several blocks may be adopted from one allocation.
    adopted: Mutex<Vec<(DevicePtr, Weak<Region>)>>,
    next_adopted: AtomicU64,
}

/// What a collect found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Collected {
    /// Blocks that nothing holds any more, adopted ones among them.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Tokens of adopted memory that nobody holds or maps any more: it is the owner's again.
    pub tokens: Vec<Token>,
}

impl IntoIterator for Collected {
    type Item = Token;
    type IntoIter = std::vec::IntoIter<Token>;

    fn into_iter(self) -> Self::IntoIter {
        self.tokens.into_iter()
    }
}

impl Session {
    /// Begins to open a session on a device.
    pub fn builder(gpu: Gpu) -> SessionBuilder {
        SessionBuilder {
            gpu,
            socket: None,
            runtime_dir: None,
            uids: Vec::new(),
            source: None,
            region_bytes: 32 << 20,
            sharing: None,
            quarantine: Duration::from_millis(100),
            time_to_live: Some(Duration::from_secs(300)),
            max_slots: 1 << 21,
            listener: None,
            manual: false,
        }
    }

    fn core(&self) -> &Arc<Core> {
        &self.0.core
    }

    /// Returns the session's number: 128 random bits, in every descriptor.
    pub fn id(&self) -> SessionId {
        self.core().id
    }

    /// Returns the socket that participants connect to.
    pub fn socket_path(&self) -> &Path {
        &self.0.path
    }

    /// Returns the device.
    pub fn gpu(&self) -> &Gpu {
        &self.core().gpu
    }

    /// Does what there is to do at this moment: hears participants, ends leases, notices deaths (manual mode). Never
    /// waits.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a session that has its own thread, [`Error::Forked`].
    pub fn turn(&self) -> Result<()> {
        self.core().check_fork()?;
        let manual = self.0.manual.as_ref();
        manual.ok_or_else(|| not_manual("the session", "opened with `SessionBuilder::manual`"))?.turn();
        Ok(())
    }

    /// Takes in a connection that reached the application in another way than through the session's socket: passed on
    /// by another process, or one end of a socket pair (`SOCK_SEQPACKET`). It is admitted when it says hello.
    ///
    /// Whoever had the other end before the participant must have closed it: as long as any copy is open, the
    /// participant's death is not proven.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for what is no such socket, [`Error::Closing`], [`Error::Forked`].
    pub fn accept(&self, connection: impl Into<OwnedFd>) -> Result<()> {
        let core = self.core();
        core.check_open()?;
        let connection = connection.into();
        socket::take_over(&connection)?;
        core.arrivals.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        core.waker.wake();
        Ok(())
    }

    /// Allocates a block of `len` bytes, aligned to 256.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`] when there is no room even after a collect of everything, [`Error::Invalid`] for zero
    /// bytes, [`Error::Closing`], [`Error::Forked`].
    pub fn alloc(&self, len: u64) -> Result<SentBlock> {
        let core = self.core();
        core.check_open()?;
        match block::alloc(core, len) {
            Err(Error::OutOfMemory { .. }) => {
                core.collect(Effort::Everything);
                block::alloc(core, len)
            }
            done => done,
        }
    }

    /// Allocates a block as [`alloc`](Session::alloc) does, and waits for room: for leases to end, and for participants
    /// to unmap what they do not use, so that whole regions can go back to the driver.
    ///
    /// # Errors
    ///
    /// As `alloc`; [`Error::OutOfMemory`] when there is no room after `timeout`.
    pub fn alloc_within(&self, len: u64, timeout: Duration) -> Result<SentBlock> {
        let core = self.core();
        let deadline = Instant::now().checked_add(timeout);
        let mut asked = false;
        let mut last = None;
        let room = || match self.alloc(len) {
            Err(error @ Error::OutOfMemory { .. }) => {
                if !asked {
                    asked = true;
                    core.ask_to_unmap();
                }
                last = Some(error);
                None
            }
            done => Some(done),
        };
        match core.wait_until(deadline, room) {
            Some(done) => done,
            None => Err(last.unwrap_or(Error::Deadline { what: "room for a block" })),
        }
    }

    /// Shares several blocks after the same work, each with whom it names: one fence for each participant, however many
    /// blocks it gets, in one call of the driver. The descriptors come in the order of `grants`.
    ///
    /// # Errors
    ///
    /// As [`SentBlock::share`]. After an error nothing is granted.
    pub fn share_many(
        &self,
        grants: &[(&SentBlock, To)],
        after: After<'_>,
        options: &ShareOptions,
    ) -> Result<Vec<Descriptor>> {
        let grants: Vec<_> = grants.iter().map(|(block, to)| (block.shared(), *to)).collect();
        let foreign = |(block, _): &(&Arc<Block>, To)| !Arc::ptr_eq(block.core(), self.core());
        if let Some((block, _)) = grants.iter().find(|grant| foreign(grant)) {
            return Err(Error::Mismatch {
                what: "the block's session",
                theirs: block.core().id.to_string(),
                ours: self.id().to_string(),
                remedy: "share blocks with the session that allocated them",
            });
        }
        self.core().share_many(&grants, after, options)
    }

    /// Takes in memory that somebody else allocated, so that it can be shared. Its owner keeps it until
    /// [`collect`](Session::collect) returns `token`.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for memory that cannot be shared, with the reason and what to change;
    /// [`Error::Invalid`] for a range that does not lie in one allocation.
    ///
    /// # Safety
    ///
    /// - The range stays allocated until a collect of this session returned `token`, or the process ends.
    /// - No other block of any session overlaps it.
    pub unsafe fn adopt(&self, ptr: DevicePtr, len: u64, token: Token) -> Result<SentBlock> {
        let core = self.core();
        core.check_open()?;
        if len == 0 {
            return Err(Error::Invalid { what: "the length of a block", got: "0".into(), must: "at least 1 byte" });
        }
        let info = core.gpu.backend().classify(ptr)?;
        let sharing = info.sharing.ok_or_else(|| Error::Unsupported {
            what: "adopting this memory",
            why: why_not(info.kind).into(),
            remedy: "allocate it with Session::alloc, or plainly (cuMemAlloc, hipMalloc)",
        })?;
        let range = match info.range {
            Some(range) => range,
            None => core.gpu.backend().address_range(ptr)?,
        };
        let offset = ptr.0 - range.base.0;
        if offset.checked_add(len).is_none_or(|end| end > range.len) {
            return Err(Error::Invalid {
                what: "the adopted range",
                got: format!("{len} bytes at offset {offset} of an allocation of {}", range.len),
                must: "inside one allocation",
            });
        }
        let mut adopted = self.0.adopted.lock().unwrap_or_else(PoisonError::into_inner);
        adopted.retain(|(_, region)| region.strong_count() > 0);
        let known = adopted.iter().find(|(base, _)| *base == range.base).and_then(|(_, region)| region.upgrade());
        let region = match known {
            Some(region) => region,
            None => {
                let export = match sharing {
                    Sharing::Fd => Export::Fd(core.gpu.backend().export_fd(range.base)?),
                    _ => Export::Handle(core.gpu.backend().export_handle(range.base)?),
                };
                let id = RegionId(self.0.next_adopted.fetch_add(1, Ordering::Relaxed));
                let region = Arc::new(Region::new(id, core.gpu.device(), range.base, range.len, export));
                adopted.push((range.base, Arc::downgrade(&region)));
                region
            }
        };
        drop(adopted);
        Ok(SentBlock::new(Block::new(core, Piece { region, offset, len }, Origin::Adopted(token))))
    }

    /// Lists the participants that are connected.
    pub fn participants(&self) -> Vec<ParticipantId> {
        let peers = self.core().peers.load();
        peers.iter().flatten().filter(|peer| !peer.gone.load(Ordering::Relaxed)).map(|peer| peer.id).collect()
    }

    /// Waits until at least `count` participants are connected, and lists them.
    ///
    /// # Errors
    ///
    /// [`Error::Deadline`] when fewer are connected after `timeout`, [`Error::Forked`].
    pub fn wait_for_participants(&self, count: usize, timeout: Option<Duration>) -> Result<Vec<ParticipantId>> {
        self.core().check_fork()?;
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let enough = || Some(self.participants()).filter(|connected| connected.len() >= count);
        self.core().wait_until(deadline, enough).ok_or(Error::Deadline { what: "participants to connect" })
    }

    /// Looks for leases that have ended, gives back what nothing holds any more, and returns the tokens of adopted
    /// memory that is its owner's again.
    ///
    /// Costs what was released since the last look, not what is held. The session's thread collects too; this is for
    /// who wants the tokens, or the memory at once.
    pub fn collect(&self) -> Collected {
        let core = self.core();
        if core.guard.is_child() {
            return Collected::default();
        }
        let reclaimed = core.collect(Effort::Marked);
        let tokens = core.take_tokens();
        core.ask_for_returned();
        Collected { blocks: reclaimed.blocks, bytes: reclaimed.bytes, tokens }
    }

    /// Returns regions that nobody uses or maps to the driver, and says how many bytes. May block.
    ///
    /// # Errors
    ///
    /// What the driver gives; the region is leaked then.
    pub fn trim(&self) -> Result<u64> {
        self.core().check_fork()?;
        self.core().ask_to_unmap();
        self.core().source.trim()
    }

    /// Says what is held and by whom.
    pub fn stats(&self) -> Stats {
        self.core().stats()
    }

    /// Gives the session to an allocator that wants to know whom to ask when memory is short.
    pub fn reclaim(&self) -> Weak<dyn Reclaim> {
        let core: Arc<dyn Reclaim> = Arc::<Core>::clone(self.core());
        Arc::downgrade(&core)
    }

    /// Shares nothing more, closes the socket, and waits until nothing is held or `timeout` has passed.
    ///
    /// Whatever the report says is still held stays safe: the session's thread goes on until it ends.
    pub fn shutdown(&self, timeout: Duration) -> ShutdownReport {
        let core = self.core();
        if !core.guard.is_child() {
            core.closing.store(true, Ordering::Relaxed);
            core.waker.wake();
            let deadline = Instant::now().checked_add(timeout);
            core.wait_until(deadline, || {
                core.collect(Effort::Everything);
                core.shutdown_report().clean.then_some(())
            });
        }
        core.shutdown_report()
    }
}

fn why_not(kind: MemoryKind) -> &'static str {
    match kind {
        MemoryKind::Pool => "it comes from a stream-ordered pool (cudaMallocAsync), which has no handle",
        MemoryKind::Managed => "managed memory migrates and has no handle",
        MemoryKind::Host => "it is host memory",
        MemoryKind::Imported => "this process opened it from another one; forward the block instead",
        MemoryKind::Unknown => "the driver does not know the address",
        MemoryKind::Virtual => "it was not created with an exportable handle type",
        _ => "the driver gives no handle for it",
    }
}

impl AsRawFd for Session {
    /// Returns the number of what [`AsFd`] gives, for event loops that want one.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl AsFd for Session {
    /// Returns what is readable while [`turn`](Session::turn) has something to do. In a session with a thread of its own
    /// it is the thread's, and tells the application nothing.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.manual.as_ref().map_or_else(|| self.core().waker.fd(), Manual::as_fd)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.core.guard.is_child() {
            // The parent's: its socket must stay open here, because that tells its peers that a copy lives.
            return;
        }
        self.core.closing.store(true, Ordering::Relaxed);
        self.core.waker.wake();
        // SAFETY: `ManuallyDrop::take` asks that the value is not used again: this is its owner's drop.
        if let Some(manual) = unsafe { ManuallyDrop::take(&mut self.manual) } {
            manual.finish();
        }
        // SAFETY: `ManuallyDrop::drop` asks that the value is not used again: this is its owner's drop.
        unsafe { ManuallyDrop::drop(&mut self.core) };
    }
}

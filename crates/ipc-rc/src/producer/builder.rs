//! How a session is opened.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use allocators::RegionSource;
use allocators::{Arena, ArenaOptions, Growth};
use gpu_api::{Error, Gpu, Result, Sharing};

use crate::producer::core::{Core, Facts};
use crate::producer::service::turn::start;
use crate::producer::session::Session;
use transport::os::clock::Tick;
use transport::os::socket::{self, Endpoint, Listener};
use transport::shared::counter_file::FIRST_SLOTS;
use transport::wire::descriptor::{SealKey, SessionId};

/// Default bytes of a region: a few hold thousands of small blocks, and a participant maps one in
/// well under a millisecond.
const REGION_BYTES: u64 = 32 << 20;

/// Where blocks come from.
#[derive(Clone, Debug)]
enum Source {
    Arena(Arc<Arena>),
    Other(Arc<dyn RegionSource>),
}

/// Opens a [`Session`], with its socket, the users that may connect, and the source of its memory.
///
/// # Examples
///
/// ```
/// # use backend_host::{HostBackend, HostConfig};
/// # use gpu_api::{DeviceId, Gpu};
/// # let dir = tempfile::tempdir()?;
/// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
/// use std::time::Duration;
///
/// use ipc_rc::Session;
///
/// let session = Session::builder(gpu)
///     .socket(dir.path().join("s")) // else one in the runtime directory
///     .time_to_live(Some(Duration::from_secs(10))) // of unclaimed descriptors
///     .open()?;
/// assert_eq!(session.socket_path(), dir.path().join("s"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct SessionBuilder {
    gpu: Gpu,
    socket: Option<PathBuf>,
    runtime_dir: Option<PathBuf>,
    uids: Vec<u32>,
    source: Option<Source>,
    region_bytes: u64,
    limit: Option<u64>,
    sharing: Option<Sharing>,
    grows_in_place: bool,
    quarantine: Option<Duration>,
    time_to_live: Option<Duration>,
    max_slots: u64,
    listener: Option<OwnedFd>,
}

impl SessionBuilder {
    pub(super) fn new(gpu: Gpu) -> SessionBuilder {
        SessionBuilder {
            gpu,
            socket: None,
            runtime_dir: None,
            uids: Vec::new(),
            source: None,
            region_bytes: REGION_BYTES,
            limit: None,
            sharing: None,
            grows_in_place: false,
            quarantine: None,
            time_to_live: Some(Duration::from_secs(300)),
            max_slots: 1 << 21,
            listener: None,
        }
    }

    /// Listens on this path instead of one in the runtime directory, so that containers which share
    /// only a mounted directory find it.
    #[must_use]
    pub fn socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.socket = Some(path.into());
        self
    }

    /// Listens on this socket, which is already bound and listening (`SOCK_SEQPACKET`, as a service
    /// manager passes it on). Its maker removes its name.
    #[must_use]
    pub fn listener(mut self, socket: impl Into<OwnedFd>) -> Self {
        self.listener = Some(socket.into());
        self
    }

    /// Puts the socket into this directory, which must belong to this user alone (mode 0700).
    #[must_use]
    pub fn runtime_dir(mut self, path: impl Into<PathBuf>) -> Self {
        self.runtime_dir = Some(path.into());
        self
    }

    /// Lets these users connect, besides this process' own. The socket's directory must let them
    /// reach it.
    #[must_use]
    pub fn allow_uids(mut self, uids: impl IntoIterator<Item = u32>) -> Self {
        self.uids.extend(uids);
        self
    }

    /// Allocates blocks from this arena, which other sessions and the allocators of a process may
    /// share, instead of from one of the session's own. The arena asks the session for memory when
    /// it has no room.
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// use allocators::{Arena, ArenaOptions};
    /// use ipc_rc::Session;
    ///
    /// let arena = Arena::new(gpu.clone(), ArenaOptions::default().limit(1 << 30))?;
    /// let session = Session::builder(gpu).arena(&arena).socket(dir.path().join("s")).open()?;
    /// let block = session.alloc(1 << 20)?;
    /// assert_eq!(arena.stats().in_use, 1 << 20);
    /// # drop(block);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn arena(mut self, arena: &Arc<Arena>) -> Self {
        self.source = Some(Source::Arena(arena.clone()));
        self
    }

    /// Allocates blocks from an allocator of the application's. The session collects when it has no
    /// room.
    #[must_use]
    pub fn source(mut self, source: Arc<dyn RegionSource>) -> Self {
        self.source = Some(Source::Other(source));
        self
    }

    /// Sets the bytes of a region of the session's own arena: 32 MiB by default. A block above half
    /// of that has a region of its own.
    #[must_use]
    pub fn region_bytes(mut self, bytes: u64) -> Self {
        self.region_bytes = bytes;
        self
    }

    /// Limits the bytes that the session's own arena takes from the device; there is no limit by
    /// default. What leases keep counts; [`alloc_within`](Session::alloc_within) waits for it.
    #[must_use]
    pub fn limit(mut self, bytes: u64) -> Self {
        self.limit = Some(bytes);
        self
    }

    /// Chooses how regions of the session's own arena are shared: by default by file descriptor
    /// where the device can.
    #[must_use]
    pub fn sharing(mut self, sharing: Sharing) -> Self {
        self.sharing = Some(sharing);
        self
    }

    /// Has the session's own arena [grow in place](ArenaOptions::grows_in_place) where the device
    /// can: regions are pieces of one range of addresses, and blocks lie across them.
    #[must_use]
    pub fn grows_in_place(mut self, grows: bool) -> Self {
        self.grows_in_place = grows;
        self
    }

    /// Sets how long after the proof of a participant's death its blocks are kept from reuse. The
    /// default is what the device's driver needs
    /// ([`GpuDevices::quarantine`](gpu_api::GpuDevices::quarantine)): 100 ms, and 5 s for a
    /// participant on an AMD GPU whose kernel does not show when a dead process' queues are gone.
    #[must_use]
    pub fn quarantine(mut self, time: Duration) -> Self {
        self.quarantine = Some(time);
        self
    }

    /// Sets how long a grant stays claimable: 5 minutes by default; `None` for ever.
    #[must_use]
    pub fn time_to_live(mut self, time: Option<Duration>) -> Self {
        self.time_to_live = time;
        self
    }

    /// Sets how many leases one participant may have outstanding: 2,097,152 by default. Rounded
    /// down to what whole counter files give, of which the first has 8,192 and each doubles up to
    /// 65,536; the first is always there, so no limit is below 8,192. An error names the limit that
    /// holds.
    #[must_use]
    pub fn max_slots(mut self, slots: u64) -> Self {
        self.max_slots = slots;
        self
    }

    /// Opens the session: binds its socket and starts its thread.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when a living process listens on the path, when the path is too long, no
    /// socket, or in no directory, or for a runtime directory that others can enter or that cannot
    /// be made; [`Error::Unsupported`] on a device that shares no memory; [`Error::Forked`] in a
    /// forked child of the process that found the device; [`Error::System`] for what the kernel
    /// refuses.
    pub fn open(mut self) -> Result<Session> {
        self.gpu.check_fork()?;
        let mut id = [0; 16];
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::system("getrandom", "use Linux 3.17 or later", e))?;
        let id = SessionId(id);
        let source = match self.source.take() {
            Some(source) => source,
            None => Source::Arena(self.own_arena()?),
        };
        let (arena, source): (_, Arc<dyn RegionSource>) = match source {
            Source::Arena(arena) => (Some(arena.clone()), arena),
            Source::Other(source) => (None, source),
        };
        let listener = match (self.listener, self.socket) {
            (Some(socket), _) => Listener::inherited(socket)?,
            (None, Some(path)) => Listener::bind(&Endpoint::Path {
                path,
                others: !self.uids.is_empty(),
            })?,
            (None, None) => {
                let dir = socket::runtime_dir(self.runtime_dir.as_deref())?;
                if let Err(error) = socket::sweep_stale(&dir) {
                    tracing::debug!(%error, "stale sockets stay");
                }
                Listener::bind(&Endpoint::Runtime { dir, session: id })?
            }
        };
        let path = listener.path().to_owned();
        let facts = Facts {
            id,
            backend: self.gpu.kind(),
            gpu: self.gpu,
            source_collects: arena.is_some(),
            quarantine: self.quarantine,
            time_to_live: self.time_to_live,
            max_slots: self.max_slots.max(u64::from(FIRST_SLOTS)),
            start: Tick::now(),
            ticket_key: SealKey::random()?,
        };
        let core = Arc::new(Core::new(facts, source)?);
        start(core.clone(), listener, self.uids)?;
        tracing::debug!(session = %id, path = %path.display(), "session open");
        let session = Session::of(core, path);
        if let Some(arena) = arena {
            arena.register(session.reclaim());
        }
        Ok(session)
    }

    /// Makes the arena of a session that was given no source.
    fn own_arena(&self) -> Result<Arc<Arena>> {
        if self.region_bytes == 0 {
            return Err(Error::invalid("region size", "0 bytes", "at least 1 byte"));
        }
        let mut options = ArenaOptions::default().growth(Growth::Fixed(self.region_bytes));
        options = options.grows_in_place(self.grows_in_place);
        options.sharing = self.sharing;
        if let Some(bytes) = self.limit {
            options = options.limit(bytes);
        }
        Arena::new(self.gpu.clone(), options)
    }
}

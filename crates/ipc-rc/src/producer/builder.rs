//! How a session is opened.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gpu_api::{Error, Gpu, RegionSource, Result, Sharing};

use crate::carver::Carver;
use crate::producer::core::{Core, Settings};
use crate::producer::service::Service;
use crate::producer::session::Session;
use channel::os::socket::{self, Listener, Place};
use channel::os::thread;
use channel::wire::descriptor::SessionId;

/// Alignment of blocks, in bytes: what device allocators promise.
const ALIGN: u64 = 256;

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
}

impl SessionBuilder {
    pub(super) fn new(gpu: Gpu) -> SessionBuilder {
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
        }
    }

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
    /// [`Error::Invalid`] when somebody alive listens on the path already, when it is too long, no socket, or in no
    /// directory, or for a runtime directory that others can enter or that cannot be made; [`Error::Unsupported`] on a
    /// device that shares no memory; [`Error::System`] for what the kernel refuses.
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
        let service = Service::new(core.clone(), listener, self.uids)?;
        thread::start("gpu-ipc-session", move || service.run())?;
        tracing::debug!(session = %id, path = %path.display(), "session open");
        Ok(Session::of(core, path))
    }
}

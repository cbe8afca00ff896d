//! How a participant connects.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_api::{Access, Error, Gpu, Result, thread};

use crate::consumer::connection::link::{Facts, Link, Welcome};
use crate::consumer::leases::holdings::Holdings;
use crate::consumer::mappings::mapping_cache::Cache;
use crate::consumer::participant::Participant;
use crate::consumer::service::Service;
use transport::client::{self, Kin};
use transport::os::process;
use transport::os::socket;
use transport::shared::counter_file::CounterFile;
use transport::wire::descriptor::{GrantKind, Names, Sealer, Seals};
use transport::wire::message::{ToParticipant, ToProducer};

/// Opens a [`Participant`]: how it maps memory, how long it waits, and its name.
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
/// use ipc_rc::{Participant, Session};
///
/// let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
/// let participant = Participant::builder(gpu)
///     .name("viewer") // for people: `gpu-ipc ls` shows it
///     .timeout(Some(Duration::from_secs(10)))
///     .mapping_cache(1 << 30, 16) // what stays mapped without being used
///     .connect(session.socket_path())?;
/// assert_eq!(session.wait_for_participants(1, None)?, [participant.id()]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ParticipantBuilder {
    gpu: Gpu,
    access: Access,
    timeout: Option<Duration>,
    cache: Cache,
    name: String,
}

impl ParticipantBuilder {
    pub(super) fn new(gpu: Gpu) -> ParticipantBuilder {
        let cache = Cache {
            bytes: gpu.info().total_bytes,
            regions: 1024,
        };
        let timeout = Some(Duration::from_secs(30));
        ParticipantBuilder {
            gpu,
            access: Access::ReadWrite,
            timeout,
            cache,
            name: String::new(),
        }
    }

    /// Maps regions read-only, where the device can: a write then faults.
    ///
    /// # Portability
    ///
    /// Memory that is shared by 64-byte handles is always mapped read-write; `connect` refuses the
    /// wish on a device that cannot map read-only. A participant in the producer's own process uses
    /// the producer's mapping, which stays writable.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.access = Access::ReadOnly;
        self
    }

    /// Sets how long to wait for the producer's welcome: 30 s by default; `None` for ever.
    #[must_use]
    pub fn timeout(mut self, time: Option<Duration>) -> Self {
        self.timeout = time;
        self
    }

    /// Limits idle mappings by bytes and by number of regions. Mappings in use do not count. The
    /// default is the bytes of the device, and 1,024 regions.
    #[must_use]
    pub fn mapping_cache(mut self, bytes: u64, regions: usize) -> Self {
        self.cache = Cache { bytes, regions };
        self
    }

    /// Gives the participant a name for people: the producer's reports show it instead of the
    /// command that this process runs. The first 32 bytes count, as far as they are whole
    /// characters.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Connects to a producer's session and starts the participant's thread.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`] when no process listens there or the socket cannot be reached,
    /// [`Error::Refused`] with the producer's reason, [`Error::Deadline`] when it does not answer,
    /// [`Error::Mismatch`] for another protocol version, [`Error::Forked`] in a forked child of the
    /// process that found the device.
    pub fn connect(self, path: impl AsRef<Path>) -> Result<Participant> {
        let deadline = self.deadline();
        self.check()?;
        let (socket, kin) = client::connect(path.as_ref(), &self.gpu, deadline)?;
        self.join(socket, &kin, deadline)
    }

    /// Joins by an existing connection: passed on by another process that connected, or one end of
    /// a socket pair whose other end the session [accepts](crate::Session::accept).
    ///
    /// Every other copy of it must be closed: as long as one is open, this process' death is not
    /// proven.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for anything but a Unix socket of whole packets; otherwise as
    /// [`connect`](ParticipantBuilder::connect).
    pub fn connect_by(self, connection: impl Into<OwnedFd>) -> Result<Participant> {
        let deadline = self.deadline();
        self.check()?;
        let socket = connection.into();
        socket::take_over(&socket)?;
        let kin = Kin::find(&self.gpu)?;
        self.join(socket, &kin, deadline)
    }

    fn deadline(&self) -> Option<Instant> {
        self.timeout.and_then(|t| Instant::now().checked_add(t))
    }

    pub(crate) fn check(&self) -> Result<()> {
        self.gpu.check_fork()?;
        if self.access == Access::ReadOnly && !self.gpu.caps().read_only {
            return Err(Error::unsupported(
                "mapping read-only",
                format!("{} cannot", self.gpu.info().name),
                "connect without `read_only`",
            ));
        }
        Ok(())
    }

    fn join(self, socket: OwnedFd, kin: &Kin, deadline: Option<Instant>) -> Result<Participant> {
        let hello = ToProducer::Hello {
            backend: self.gpu.kind(),
            device: self.gpu.uuid(),
            descendants: kin.descendants(),
            sign: self.gpu.backend().own_sign(self.gpu.device())?,
            name: self.name.clone(),
        };
        let awaited = "the producer's welcome";
        let (answer, _, fds) = client::say_hello(&socket, &hello, kin, awaited, deadline)?
            .ok_or_else(|| refused("the producer closed the connection", "look at its log"))?;
        let welcome = self.welcome(socket, answer, fds)?;
        let holdings = Arc::new(Holdings::new(Link::new(welcome)?, self.cache));
        let started = Service::new(holdings.clone())
            .and_then(|service| thread::start("gpu-ipc-participant", move || service.run()));
        if let Err(error) = started {
            // SAFETY: `unregister` asks that no operation on their words is unfinished, and for one
            // call: nothing was granted that anybody could have claimed, and no thread runs that
            // calls it too.
            if let Err(error) = unsafe { holdings.link.files.unregister(&self.gpu) } {
                tracing::warn!(%error, "a counter file stays registered, and so mapped");
                std::mem::forget(holdings);
            }
            return Err(error);
        }
        Ok(Participant::of(holdings))
    }

    fn welcome(
        &self,
        socket: OwnedFd,
        answer: ToParticipant,
        fds: Vec<OwnedFd>,
    ) -> Result<Welcome> {
        match answer {
            ToParticipant::Refused { code, why } => Err(refused(&why, code.remedy())),
            ToParticipant::Welcome {
                session,
                participant,
                pid,
                slots,
                max_slots,
                key,
                ticket_key,
            } => {
                let mut fds = fds.into_iter();
                let (Some(producer_pidfd), Some(file)) = (fds.next(), fds.next()) else {
                    return Err(refused(
                        "the welcome came without its file descriptors",
                        "raise RLIMIT_NOFILE",
                    ));
                };
                if !process::is_pidfd(producer_pidfd.as_fd())? {
                    return Err(refused(
                        "the welcome's first descriptor is not a pidfd",
                        "connect to a session of gpu-ipc",
                    ));
                }
                let facts = Facts {
                    backend: self.gpu.kind(),
                    gpu: self.gpu.clone(),
                    access: self.access,
                    session,
                    id: participant,
                    producer_pid: match process::pid_of(producer_pidfd.as_fd())? {
                        0 => pid,
                        seen => seen,
                    },
                    is_own_process: process::same_process(producer_pidfd.as_fd())?,
                    producer_pidfd,
                };
                // The session's device is this one: the producer refuses others.
                let addressed = Names {
                    backend: facts.backend,
                    kind: GrantKind::Addressed,
                    device: facts.gpu.uuid(),
                    session,
                    participant,
                };
                let seals = Seals::new(
                    Sealer::new(&key, &addressed),
                    Sealer::new(&ticket_key, &addressed.of_ticket()),
                );
                Ok(Welcome {
                    facts,
                    seals,
                    socket,
                    file: CounterFile::open(file, slots)?,
                    max_slots,
                })
            }
            _ => Err(refused(
                "its first message is not a welcome",
                "build both sides from one version",
            )),
        }
    }
}

fn refused(why: &str, remedy: &'static str) -> Error {
    Error::refused(why, remedy)
}

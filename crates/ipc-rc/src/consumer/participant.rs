//! Participants: what a consumer opens.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpu_api::{Access, Error, Gpu, ParticipantId, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::consumer::claim::{ClaimError, Wait};
use crate::consumer::link::{Link, Welcome};
use crate::consumer::received_block::ReceivedBlock;
use crate::consumer::service::Service;
use crate::counter_file::CounterFile;
use crate::descriptor::SessionId;
use crate::message::{MOST_BYTES, ToParticipant, ToProducer};
use crate::process;
use crate::socket::{self, ReceiveOutcome, SendOutcome};
use crate::step::step;

/// Opens a [`Participant`].
#[derive(Clone, Debug)]
pub struct ParticipantBuilder {
    gpu: Gpu,
    access: Access,
    timeout: Option<Duration>,
}

impl ParticipantBuilder {
    /// Maps regions read-only, where the device can: a write then faults.
    ///
    /// # Portability
    ///
    /// Memory that is shared by 64-byte handles is always mapped read-write; `connect` refuses the wish on a device
    /// that cannot map read-only.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.access = Access::ReadOnly;
        self
    }

    /// Sets how long to wait for the producer's welcome: 30 s unless said; `None` for ever.
    #[must_use]
    pub fn timeout(mut self, time: Option<Duration>) -> Self {
        self.timeout = time;
        self
    }

    /// Connects to a producer's session and starts the participant's thread.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`] when nobody listens there or the socket cannot be reached, [`Error::Refused`] with the
    /// producer's reason, [`Error::Deadline`] when it does not answer, [`Error::Mismatch`] for another protocol
    /// version.
    pub fn connect(self, path: impl AsRef<Path>) -> Result<Participant> {
        let deadline = self.timeout.and_then(|t| Instant::now().checked_add(t));
        if self.access == Access::ReadOnly && !self.gpu.caps().read_only {
            return Err(Error::Unsupported {
                what: "mapping read-only",
                why: format!("{} cannot", self.gpu.info().name),
                remedy: "connect without `read_only`",
            });
        }
        let socket = connect(path.as_ref(), deadline)?;
        let descendants = process::descendants_holding(self.gpu.backend().device_files())?;
        let own = process::own_pidfd()?;
        let mut fds: Vec<BorrowedFd<'_>> = vec![own.as_fd()];
        fds.extend(descendants.iter().map(AsFd::as_fd));
        let hello = ToProducer::Hello {
            backend: self.gpu.kind(),
            device: self.gpu.uuid(),
            descendants: u16::try_from(descendants.len()).unwrap_or(u16::MAX),
            manual: false,
        };
        let mut bytes = [0; MOST_BYTES];
        let len = hello.encode(&mut bytes);
        step!("hello");
        match socket::send(socket.as_fd(), &bytes[..len], &fds) {
            Ok(SendOutcome::Sent) => {}
            Ok(_) => return Err(refused("the producer closed the connection", "start it, or look at its log")),
            Err(source) => return Err(Error::system("sendmsg", "raise RLIMIT_NOFILE", source)),
        }
        let welcome = self.welcome(socket, deadline)?;
        let link = Arc::new(Link::new(welcome)?);
        let service = Service::new(link.clone())?;
        std::thread::Builder::new()
            .name("gpu-ipc-participant".into())
            .spawn(move || service.run())
            .map_err(|e| Error::system("starting the participant's thread", "raise RLIMIT_NPROC", e))?;
        Ok(Participant(Arc::new(Handle { link: ManuallyDrop::new(link) })))
    }

    fn welcome(&self, socket: OwnedFd, deadline: Option<Instant>) -> Result<Welcome> {
        let mut bytes = [0; MOST_BYTES];
        let mut fds = Vec::new();
        let len = loop {
            match socket::receive(socket.as_fd(), &mut bytes, &mut fds) {
                Ok(ReceiveOutcome::Packet(len)) => break len,
                Ok(ReceiveOutcome::HungUp) => {
                    return Err(refused("the producer closed the connection", "look at its log"));
                }
                Ok(ReceiveOutcome::Empty) => wait_readable(socket.as_fd(), deadline)?,
                Err(source) => return Err(Error::system("recvmsg", "raise RLIMIT_NOFILE", source)),
            }
        };
        let message = ToParticipant::decode(&bytes[..len], fds.len())?;
        match message {
            ToParticipant::Refused { code, why } => Err(refused(&why, code.remedy())),
            ToParticipant::Welcome { session, participant, pid, slots, max_slots } => {
                let mut fds = fds.into_iter();
                let (Some(producer_pidfd), Some(file)) = (fds.next(), fds.next()) else {
                    return Err(refused("the welcome came without its file descriptors", "raise RLIMIT_NOFILE"));
                };
                if !process::is_pidfd(producer_pidfd.as_fd())? {
                    return Err(refused(
                        "the welcome's first descriptor is no pidfd",
                        "connect to a session of gpu-ipc",
                    ));
                }
                Ok(Welcome {
                    gpu: self.gpu.clone(),
                    access: self.access,
                    session,
                    id: participant,
                    producer_pid: match process::pid_of(producer_pidfd.as_fd())? {
                        0 => pid,
                        seen => seen,
                    },
                    producer_pidfd,
                    socket,
                    file: CounterFile::open(file, slots)?,
                    max_slots,
                })
            }
            _ => Err(refused("its first message is no welcome", "build both sides from one version")),
        }
    }
}

fn refused(why: &str, remedy: &'static str) -> Error {
    Error::Refused { why: why.to_owned(), remedy }
}

/// Connects, trying again while the producer's backlog is full.
fn connect(path: &Path, deadline: Option<Instant>) -> Result<OwnedFd> {
    loop {
        match socket::connect(path) {
            Err(error)
                if socket::is_backlog_full(&error) && deadline.is_none_or(|deadline| Instant::now() < deadline) =>
            {
                // A full backlog wakes nobody when it empties.
                std::thread::sleep(Duration::from_millis(1));
            }
            done => return done,
        }
    }
}

fn wait_readable(socket: BorrowedFd<'_>, deadline: Option<Instant>) -> Result<()> {
    let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
    if left == Some(Duration::ZERO) {
        return Err(Error::Deadline { what: "the producer's welcome" });
    }
    let timeout = left.map(|t| Timespec { tv_sec: t.as_secs().min(3600) as i64, tv_nsec: i64::from(t.subsec_nanos()) });
    match poll(&mut [PollFd::new(&socket, PollFlags::IN)], timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(Error::system("poll", "free memory and ask again", e)),
    }
}

/// A consumer's connection to one producer's session.
///
/// Cheap to clone. When the last clone is dropped, the participant's thread goes on until every block that it received
/// is dropped and its GPU work done; then it unmaps and says goodbye.
#[derive(Clone, Debug)]
pub struct Participant(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    link: ManuallyDrop<Arc<Link>>,
}

impl Participant {
    /// Begins to connect from a device.
    pub fn builder(gpu: Gpu) -> ParticipantBuilder {
        ParticipantBuilder { gpu, access: Access::ReadWrite, timeout: Some(Duration::from_secs(30)) }
    }

    fn link(&self) -> &Arc<Link> {
        &self.0.link
    }

    /// Returns the number under which the producer shares with this participant.
    pub fn id(&self) -> ParticipantId {
        self.link().id
    }

    /// Returns the session that it is connected to.
    pub fn session(&self) -> SessionId {
        self.link().session
    }

    /// Returns the device.
    pub fn gpu(&self) -> &Gpu {
        &self.link().gpu
    }

    /// Returns the producer's process id as this process sees it.
    pub fn producer_pid(&self) -> u32 {
        self.link().producer_pid
    }

    /// Says whether the producer is dead or has closed the session.
    pub fn is_producer_gone(&self) -> bool {
        self.link().is_gone()
    }

    /// Claims what a descriptor grants.
    ///
    /// Costs no system call when the block's region is mapped; otherwise the producer is asked once for the region,
    /// and `timeout` bounds the wait (`None` waits for ever). When it passes nothing was claimed and nothing is lost.
    ///
    /// # Errors
    ///
    /// Each variant of [`ClaimError`] says what the caller can do.
    pub fn claim(&self, bytes: &[u8], wait: Wait<'_>, timeout: Option<Duration>) -> Result<ReceivedBlock, ClaimError> {
        self.link().claim(bytes, wait, timeout)
    }

    /// Counts the leases that are kept until this process ends, because nobody could say when the work on their blocks
    /// was done: a driver's error, or a drop while a used stream was captured.
    pub fn kept_leases(&self) -> u64 {
        self.link().lanes.kept()
    }

    /// Counts the regions that are mapped.
    pub fn mappings(&self) -> usize {
        self.link().mappings.all().len()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.link.guard.is_child() {
            // The parent's: its socket must stay open here, because that tells the producer that a copy lives.
            return;
        }
        self.link.closing.store(true, Ordering::Relaxed);
        self.link.wants_idle.store(true, Ordering::Relaxed);
        self.link.waker.wake();
        // SAFETY: `ManuallyDrop::drop` asks that the value is not used again: this is its owner's drop.
        unsafe { ManuallyDrop::drop(&mut self.link) };
    }
}

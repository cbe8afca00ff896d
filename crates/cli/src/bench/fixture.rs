//! What rows are measured on: a device, sessions, and consumers in processes of their own.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use gpu_ipc::session::SessionBuilder;
use gpu_ipc::{Descriptor, Gpu, Participant, ParticipantId, SentBlock, Session, Stream};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::floor::{self, Floor};
use super::jobs::told as job;
use super::told::Told;
use crate::child::Child;
use crate::failure::{Failure, Result};

/// A process that is silent for longer counts as hung.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Descriptors in one message to a consumer.
const MESSAGE: usize = 256;

/// A device, and how much is measured on it.
#[derive(Debug)]
pub struct Stage {
    pub gpu: Gpu,
    pub floor: Box<dyn Floor>,
    pub quick: bool,
    /// Makes one frame and one tensor wrong, which the jobs must find.
    pub spoil: bool,
}

impl Stage {
    /// Sets the stage, for use on this thread alone.
    pub fn new(gpu: Gpu, quick: bool) -> Result<Stage> {
        Ok(Stage {
            floor: floor::of(&gpu)?,
            gpu,
            quick,
            spoil: false,
        })
    }

    /// Chooses between the whole and the quick run's number.
    pub fn choose<T>(&self, whole: T, quick: T) -> T {
        if self.quick { quick } else { whole }
    }

    /// Begins to open a session.
    pub fn builder(&self) -> SessionBuilder {
        Session::builder(self.gpu.clone())
    }

    /// Opens a session as users do.
    pub fn session(&self) -> Result<Session> {
        self.builder().open().map_err(Failure::from)
    }

    /// Makes a stream.
    pub fn stream(&self) -> Result<Stream> {
        Stream::create(&self.gpu).map_err(Failure::from)
    }

    /// Opens a session with a participant in this same process.
    pub fn pair(&self) -> Result<(Session, Participant)> {
        let session = self.session()?;
        let participant = Participant::builder(self.gpu.clone()).connect(session.socket_path());
        Ok((session, participant?))
    }

    /// Starts a consumer; its answer is awaited by [`Starting::up`].
    pub fn start(&self, session: &Session, more: &[String]) -> Result<Starting> {
        self.start_as("consumer", session, more)
    }

    fn start_as<T>(&self, role: &str, session: &Session, more: &[String]) -> Result<Starting<T>> {
        let (device, socket) = (
            self.gpu.uuid().to_string(),
            session.socket_path().to_string_lossy().into_owned(),
        );
        let backend = self.gpu.kind().name();
        let mut args = ["bench-process", role, "--backend", backend, "--device"]
            .map(str::to_owned)
            .to_vec();
        args.extend([device, "--socket".into(), socket]);
        args.extend_from_slice(more);
        Ok(Starting(Child::start(args, PATIENCE)?))
    }

    /// Starts a consumer and waits until it is connected.
    pub fn consumer(&self, session: &Session) -> Result<Consumer> {
        self.start(session, &[])?.up()
    }

    /// Starts a consumer that also has one end of a socket pair; the other one is returned.
    pub fn consumer_by_socket(&self, session: &Session) -> Result<(Consumer, OwnedFd)> {
        self.by_socket("consumer", session)
    }

    /// Starts the process at the other end of a job, in the same way.
    pub(crate) fn worker(&self, session: &Session) -> Result<(Consumer<job::Told>, OwnedFd)> {
        self.by_socket("worker", session)
    }

    fn by_socket<T>(&self, role: &str, session: &Session) -> Result<(Consumer<T>, OwnedFd)> {
        // Without CLOEXEC: the consumer is to inherit its end.
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::empty(),
            None,
        )
        .map_err(|e| format!("socketpair: {e}"))?;
        fcntl_setfd(&ours, FdFlags::CLOEXEC).map_err(|e| format!("fcntl: {e}"))?;
        let number = theirs.as_raw_fd().to_string();
        let consumer = self
            .start_as(role, session, &["--channel".into(), number])?
            .up()?;
        Ok((consumer, ours))
    }

    /// Takes the stage down: consumers say goodbye, then nothing of the session is left to disturb
    /// the next rows.
    pub fn end(
        &self,
        session: Session,
        consumers: impl IntoIterator<Item = Consumer>,
    ) -> Result<()> {
        for mut consumer in consumers {
            consumer.child.wait()?;
        }
        let report = session.shutdown(PATIENCE);
        if report.clean {
            Ok(())
        } else {
            Err(format!("{} blocks are still held at the end", report.blocks).into())
        }
    }
}

/// A consumer that is on its way.
#[derive(Debug)]
pub struct Starting<T = Told>(Child<T>);

impl<T> Starting<T> {
    /// Waits until it is connected.
    pub fn up(self) -> Result<Consumer<T>> {
        let mut child = self.0;
        let id = ParticipantId(child.answer()?);
        Ok(Consumer { child, id })
    }
}

/// A consumer in a process of its own.
#[derive(Debug)]
pub struct Consumer<T = Told> {
    pub child: Child<T>,
    pub id: ParticipantId,
}

impl Consumer {
    /// Has it do something with descriptors, and returns its numbers.
    pub fn ask<'a>(
        &mut self,
        what: fn(Vec<Vec<u8>>) -> Told,
        descriptors: impl IntoIterator<Item = &'a Descriptor>,
    ) -> Result<Vec<u64>> {
        let descriptors = descriptors.into_iter();
        let bytes = descriptors.map(|descriptor| descriptor.as_bytes().to_vec());
        Ok(self.child.ask(&what(bytes.collect()))?)
    }

    /// Has it claim and hold many blocks.
    pub fn hold(&mut self, descriptors: &[Descriptor]) -> Result<()> {
        descriptors
            .chunks(MESSAGE)
            .try_for_each(|some| self.ask(Told::Hold, some).map(drop))
    }
}

/// Waits until the leases of a block have ended.
pub fn until_released(session: &Session, block: &SentBlock) -> Result<()> {
    until("leases to end", || {
        session.collect();
        block.outstanding() == 0
    })
}

/// Waits for a condition.
pub fn until(what: &str, holds: impl FnMut() -> bool) -> Result<()> {
    within(PATIENCE, what, holds)
}

/// Waits for a condition, and no longer than so long.
pub fn within(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let start = Instant::now();
    while !holds() {
        if start.elapsed() > limit {
            return Err(format!("waited {} s in vain for {what}", limit.as_secs()).into());
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

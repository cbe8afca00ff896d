//! What each side is told by the other: notices, and the queue of a session's.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpu_ipc::Error;
use gpu_ipc::participant::Notice as FromProducer;
use gpu_ipc::session::{Departure, SessionNotice as FromSession};
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

use super::addressee::ParticipantId;
use super::descriptor::Descriptor;
use crate::interpreter::errors::OrRaise;

/// Notices of comings and goings kept for a program that does not read them; what comes on top is
/// dropped.
const MOST_KEPT: usize = 4096;

/// Something that a producer told a participant.
#[pyclass(frozen, weakref, module = "gpu_ipc")]
pub(crate) struct Notice {
    pub notice: FromProducer,
}

impl Notice {
    /// Says whether nothing comes after it.
    pub fn is_last(&self) -> bool {
        self.notice == FromProducer::ProducerGone
    }
}

#[pymethods]
impl Notice {
    /// ``producer_gone``: nothing new comes, what is held stays readable. ``closing``: nothing new
    /// comes, but what was granted can be claimed. ``please_unmap``: the producer is short of
    /// memory; drop what you can of ``region``. ``revoked``: a grant was taken back, ``concerns``
    /// says which. ``try_again``: what ``try_claim`` waited for may have come.
    #[getter]
    fn kind(&self) -> &'static str {
        match self.notice {
            FromProducer::ProducerGone => "producer_gone",
            FromProducer::Closing => "closing",
            FromProducer::PleaseUnmap { .. } => "please_unmap",
            FromProducer::Revoked { .. } => "revoked",
            FromProducer::TryAgain => "try_again",
            _ => "unknown",
        }
    }

    /// The region that the producer would like unmapped, as ``Received.region`` gives it.
    #[getter]
    fn region(&self) -> Option<u64> {
        match self.notice {
            FromProducer::PleaseUnmap { region } => Some(region.0),
            _ => None,
        }
    }

    /// Whether the notice is about the grant of this descriptor.
    fn concerns(&self, descriptor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let descriptor =
            gpu_ipc::Descriptor::decode(Descriptor::of(descriptor)?.get().grant()).or_raise()?;
        Ok(matches!(self.notice, FromProducer::Revoked { lease } if lease == descriptor.lease()))
    }

    fn __repr__(&self) -> String {
        format!("<gpu_ipc.Notice {}>", self.kind())
    }
}

/// Something that a session tells its program.
#[pyclass(frozen, weakref, module = "gpu_ipc")]
#[derive(Clone, PartialEq)]
pub(crate) struct SessionNotice {
    /// ``None`` when the program closed the session itself.
    notice: Option<FromSession>,
}

#[pymethods]
impl SessionNotice {
    /// ``joined``, ``left``: a participant came, or is gone and holds nothing any more.
    /// ``try_again``: a block is released of which ``wait_released`` said that it was not.
    /// ``failed``: the session itself broke, and no participant: see the log; nothing more can be
    /// shared. ``closed``: this program closed it.
    #[getter]
    fn kind(&self) -> &'static str {
        match self.notice {
            Some(FromSession::Joined { .. }) => "joined",
            Some(FromSession::Left { .. }) => "left",
            Some(FromSession::TryAgain) => "try_again",
            Some(FromSession::Failed) => "failed",
            Some(_) => "unknown",
            None => "closed",
        }
    }

    /// The participant that came or went.
    #[getter]
    fn participant(&self) -> Option<ParticipantId> {
        match self.notice {
            Some(FromSession::Joined { participant } | FromSession::Left { participant, .. }) => {
                Some(ParticipantId::of(participant))
            }
            _ => None,
        }
    }

    /// What a participant that left called itself, or else the command that it ran.
    #[getter]
    fn name(&self) -> Option<&str> {
        match &self.notice {
            Some(FromSession::Left { name, .. }) => Some(name),
            _ => None,
        }
    }

    /// How a participant left. ``goodbye``: it was closed, or its program ended in order. ``died``:
    /// its process has ended without that, which the kernel proves. ``connection_lost``: its
    /// connection ended without that, and its process lives.
    #[getter]
    fn how(&self) -> Option<&'static str> {
        match self.notice {
            Some(FromSession::Left { how, .. }) => Some(match how {
                Departure::Goodbye => "goodbye",
                Departure::Died => "died",
                Departure::ConnectionLost => "connection_lost",
                _ => "unknown",
            }),
            _ => None,
        }
    }

    fn __repr__(&self) -> String {
        match self.participant() {
            Some(participant) => format!(
                "<gpu_ipc.SessionNotice {} {:#x}{}>",
                self.kind(),
                participant.number(),
                self.name()
                    .zip(self.how())
                    .map(|(name, how)| format!(" {name:?}: {how}"))
                    .unwrap_or_default()
            ),
            None => format!("<gpu_ipc.SessionNotice {}>", self.kind()),
        }
    }
}

/// A session's notices that its program has not read.
///
/// The library's own queue is read by the keeper's thread, which acts on returned memory and passes
/// the rest on.
pub(crate) struct SessionNotices {
    fd: OwnedFd,
    kept: Mutex<VecDeque<SessionNotice>>,
    /// The last one was taken.
    ended: AtomicBool,
}

impl SessionNotices {
    /// Makes an empty queue.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the process has no descriptor left.
    pub fn new() -> Result<SessionNotices, Error> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
            Error::system("eventfd", "raise RLIMIT_NOFILE or close descriptors", error)
        })?;
        Ok(SessionNotices {
            fd,
            kept: Mutex::default(),
            ended: AtomicBool::new(false),
        })
    }

    /// Passes a notice on; `None` says that the session is closed.
    pub fn push(&self, notice: Option<FromSession>) {
        let one = SessionNotice { notice };
        let mut kept = self.lock();
        let is_idle = matches!(
            one.notice,
            Some(FromSession::Joined { .. } | FromSession::Left { .. })
        );
        if is_idle && kept.len() >= MOST_KEPT || !is_idle && kept.contains(&one) {
            return;
        }
        kept.push_back(one);
        // The only failure is a counter that is full: then it is readable, which is all that is
        // wanted.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Takes all of them. The descriptor is readable while there are some.
    pub fn take(&self) -> Vec<SessionNotice> {
        let mut kept = self.lock();
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
        let is_last = |one: &SessionNotice| matches!(one.notice, None | Some(FromSession::Failed));
        if kept.iter().any(is_last) {
            self.ended.store(true, Ordering::Relaxed);
        }
        kept.drain(..).collect()
    }

    /// Says whether the last one was taken.
    pub fn have_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<SessionNotice>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsRawFd for SessionNotices {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

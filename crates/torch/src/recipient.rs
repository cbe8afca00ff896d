//! To whom a storage is sent, as far as the sender can tell.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use gpu_api::lock::Acquire;
use gpu_api::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, RawPid, pidfd_open};

/// What happens to a storage whose counter nobody decreases, because its receiver was killed or
/// never received it.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Recipient {
    /// It is held until [`Sender::reclaim`](crate::Sender::reclaim) says that nobody has it.
    #[default]
    Unknown,
    /// It is held until this process is gone. For a storage that only this process opens, and that
    /// does not fork while it uses the GPU: a child keeps its dead parent's GPU work running.
    Process(Arc<Process>),
}

/// A process that storages are sent to, by a file descriptor that names this one and no later
/// process of its number.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: OwnedFd,
    gone: Mutex<Option<Instant>>,
}

impl Recipient {
    /// Names a process by its number.
    ///
    /// Its number may have been used again if it is not known to live at this moment: ask while
    /// connected to it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a number that names no process, [`Error::System`] for one that is
    /// gone.
    pub fn process(pid: u32) -> Result<Recipient> {
        let raw = RawPid::try_from(pid).ok().and_then(Pid::from_raw);
        let Some(raw) = raw else {
            return Err(Error::invalid("a process", pid, "a positive number"));
        };
        let pidfd = pidfd_open(raw, PidfdFlags::empty()).map_err(|e| {
            Error::system(
                "pidfd_open",
                "name a process that lives, in this pid namespace",
                e,
            )
        })?;
        Ok(Recipient::pidfd(pid, pidfd))
    }

    /// Names a process by its file descriptor (`SO_PEERPIDFD` or `pidfd_open`); the number is for
    /// reports.
    pub fn pidfd(pid: u32, pidfd: OwnedFd) -> Recipient {
        Recipient::Process(Arc::new(Process {
            pid,
            pidfd,
            gone: Mutex::new(None),
        }))
    }

    /// Returns the process, if one was named.
    pub(crate) fn named(self) -> Option<Arc<Process>> {
        match self {
            Recipient::Unknown => None,
            Recipient::Process(process) => Some(process),
        }
    }
}

impl Process {
    /// Returns its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Says since when it is known to be gone.
    pub fn gone_since(&self) -> Option<Instant> {
        let mut gone = self.gone.acquire();
        if gone.is_none() {
            let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
            // An error says nothing of the process: it counts as alive.
            if poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
                *gone = Some(Instant::now());
            }
        }
        *gone
    }
}

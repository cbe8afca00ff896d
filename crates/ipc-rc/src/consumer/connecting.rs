//! Connecting without waiting: for event loops.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::{Arc, Mutex};

use gpu_api::lock::Acquire;
use gpu_api::{Error, ForkGuard, Result, thread};
use rustix::event::{EventfdFlags, eventfd};

use crate::consumer::builder::ParticipantBuilder;
use crate::consumer::participant::Participant;

/// A connection that is being made. Readable, as [`AsFd`], when
/// [`try_finish`](Connecting::try_finish) has a result.
///
/// Dropped before that, the connection is made to its end or to its timeout all the same, and
/// closed then.
pub struct Connecting(Arc<Shared>);

struct Shared {
    fd: OwnedFd,
    /// In a forked child the lock may be the parent's.
    fork: ForkGuard,
    done: Mutex<Option<Result<Participant>>>,
}

impl ParticipantBuilder {
    /// Connects as [`connect`](ParticipantBuilder::connect) does, on a thread that ends with it:
    /// neither the search for descendants, nor the producer's answer, nor the driver is waited for
    /// here.
    ///
    /// # Errors
    ///
    /// [`Error::System`] without a descriptor or a thread. What `connect` may say comes from
    /// [`try_finish`](Connecting::try_finish).
    ///
    /// # Examples
    ///
    /// ```
    /// # use backend_host::{HostBackend, HostConfig};
    /// # use gpu_api::{DeviceId, Gpu};
    /// # let dir = tempfile::tempdir()?;
    /// # let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
    /// # use ipc_rc::{Participant, Session};
    /// use rustix::event::{PollFd, PollFlags, poll};
    /// # let session = Session::builder(gpu.clone()).socket(dir.path().join("s")).open()?;
    /// let connecting = Participant::builder(gpu).start_connect(session.socket_path())?;
    /// let participant = loop {
    ///     poll(&mut [PollFd::new(&connecting, PollFlags::IN)], None)?; // with all else that the loop waits for
    ///     if let Some(done) = connecting.try_finish() {
    ///         break done?;
    ///     }
    /// };
    /// assert_eq!(participant.session(), session.id());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn start_connect(self, path: impl AsRef<Path>) -> Result<Connecting> {
        let fork = ForkGuard::new()?;
        self.check()?;
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::without_descriptors("eventfd", e))?;
        let shared = Arc::new(Shared {
            fd,
            fork,
            done: Mutex::default(),
        });
        let (path, told) = (path.as_ref().to_path_buf(), shared.clone());
        thread::start("gpu-ipc-connect", move || {
            let done = self.connect(path);
            *told.done.acquire() = Some(done);
            // The only failure is a counter that is full: it is at 0.
            let _ = rustix::io::write(&told.fd, &1u64.to_ne_bytes());
        })?;
        Ok(Connecting(shared))
    }
}

impl Connecting {
    /// Takes the result, once there is one; never waits.
    pub fn try_finish(&self) -> Option<Result<Participant>> {
        if let Err(error) = self.0.fork.check("this connection") {
            return Some(Err(error));
        }
        let done = self.0.done.acquire().take()?;
        let _ = rustix::io::read(&self.0.fd, &mut [0; 8]);
        Some(done)
    }
}

impl AsFd for Connecting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

impl AsRawFd for Connecting {
    /// Returns the number of what [`AsFd`] gives, for event loops that want one.
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl fmt::Debug for Connecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connecting").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use backend_host::{HostBackend, HostConfig};
    use gpu_api::{DeviceId, Gpu};
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    #[test]
    fn a_failure_is_told_once() {
        let dir = tempfile::tempdir().expect("a directory");
        let host = HostBackend::new(HostConfig::default()).expect("shared memory");
        let gpu = Gpu::new(host, DeviceId(0)).expect("device 0");
        let connecting = Participant::builder(gpu)
            .start_connect(dir.path().join("absent"))
            .expect("a thread");
        poll(&mut [PollFd::new(&connecting, PollFlags::IN)], None).expect("poll");
        assert!(matches!(
            connecting.try_finish(),
            Some(Err(Error::Connect { .. }))
        ));
        assert!(connecting.try_finish().is_none());
        let now = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        assert_eq!(
            poll(&mut [PollFd::new(&connecting, PollFlags::IN)], Some(&now)),
            Ok(0)
        );
    }
}

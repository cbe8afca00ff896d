//! Trying one step on one device: both sides started, waited for, and killed where they do not come
//! back.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use backend_hip::Step;
use gpu_api::{DeviceId, Error, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::channel;
use crate::runtime::Seen;
use crate::side::{Side, TASK};

/// A side of a step that runs; dropped, it is killed.
struct Runner {
    side: Side,
    child: Child,
    said: File,
    ended: Option<ExitStatus>,
}

impl Runner {
    fn start(
        program: &Path,
        step: Step,
        device: DeviceId,
        side: Side,
        socket: OwnedFd,
    ) -> Result<Runner> {
        let failed = |source| {
            Error::system(
                "starting a probe",
                "see that the program can be executed",
                source,
            )
        };
        let said = rustix::fs::memfd_create("gpu-ipc-probe", rustix::fs::MemfdFlags::CLOEXEC);
        let said = File::from(said.map_err(|errno| failed(errno.into()))?);
        let child = Command::new(program)
            .env(
                TASK,
                format!("{} {} {}", step.name(), side.name(), device.0),
            )
            .stdin(Stdio::from(socket))
            .stdout(Stdio::null())
            .stderr(Stdio::from(said.try_clone().map_err(failed)?))
            .spawn()
            .map_err(failed)?;
        Ok(Runner {
            side,
            child,
            said,
            ended: None,
        })
    }

    /// Waits until it has ended or the time is up.
    fn wait(&mut self, until: Instant) -> Result<()> {
        let failed =
            |source: std::io::Error| Error::system("waiting for a probe", "try again", source);
        let pid = Pid::from_child(&self.child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| failed(errno.into()))?;
        let left = until.saturating_duration_since(Instant::now());
        let left = rustix::time::Timespec::try_from(left).ok();
        let mut ended = [rustix::event::PollFd::new(
            &pidfd,
            rustix::event::PollFlags::IN,
        )];
        match rustix::event::poll(&mut ended, left.as_ref()) {
            // A signal cut it short: the time that is left is killed for, which errs on the safe
            // side.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
        self.ended = self.child.try_wait().map_err(failed)?;
        Ok(())
    }

    fn seen(&mut self, patience: Duration) -> Seen {
        let name = self.side.name();
        match self.ended {
            Some(status) if status.success() => Ok(()),
            Some(status) => {
                let mut said = String::new();
                // What it said is an explanation only; that it failed is known.
                let _ = self.said.seek(SeekFrom::Start(0));
                let _ = self.said.read_to_string(&mut said);
                let said = said.lines().last().unwrap_or("it said nothing").to_owned();
                Err(format!("the {name} ended with {status}: {said}"))
            }
            None => Err(format!(
                "the {name} did not come back within {} s",
                patience.as_secs()
            )),
        }
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        // One that has ended cannot be killed, and one that cannot be killed is the kernel's
        // matter.
        let _ = self.child.kill();
        let _ = self.child.try_wait();
    }
}

/// Tries a step.
pub(crate) fn attempt(
    program: &Path,
    step: Step,
    device: DeviceId,
    patience: Duration,
) -> Result<Seen> {
    let pair = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    );
    let (here, there) =
        pair.map_err(|errno| Error::system("socketpair", "raise RLIMIT_NOFILE", errno))?;
    let until = Instant::now() + patience;
    let mut exporter = Runner::start(program, step, device, Side::Exporter, here)?;
    let mut importer = Runner::start(program, step, device, Side::Importer, there)?;
    // Either ends when the other does: the socket between them says so.
    importer.wait(until)?;
    exporter.wait(until)?;
    let (imported, exported) = (importer.seen(patience), exporter.seen(patience));
    // The one that is meant to be refused may die of it.
    if step == Step::ReadOnly {
        return Ok(exported);
    }
    Ok(match (imported, exported) {
        // What one found out only from the other's end explains nothing.
        (Err(imported), Err(exported)) if imported.contains(channel::GONE) => Err(exported),
        (imported, exported) => imported.and(exported),
    })
}

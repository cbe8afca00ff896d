//! `gpu-ipc stop`: ends a keeper and its broker.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use gpu_ipc::broker::server::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::Asked;
use crate::{Outcome, output};

/// How often a lock that is about to be taken is looked at.
const AGAIN: Duration = Duration::from_millis(10);

/// Ends both; what nothing has mapped goes with them.
pub fn run(options: &Asked) -> Outcome {
    let ended = options
        .place
        .path()
        .and_then(|dir| stop(&dir, options.patience()));
    match ended {
        Ok(said) => output::conclude(&said, Outcome::Good),
        Err(why) => output::fail(&why, false, Outcome::Finding),
    }
}

fn stop(dir: &Path, patience: Duration) -> Result<String, String> {
    let start = Instant::now();
    let mut ended = Vec::new();
    // The keeper first: it would start its broker again.
    for (what, name) in [("keeper", "keeper.lock"), ("broker", "lock")] {
        let path = dir.join(name);
        while is_held(&path) {
            let left = patience.checked_sub(start.elapsed());
            let left = left.ok_or_else(|| {
                format!(
                    "the {what} in {} holds its lock, and is no process that is seen from here",
                    dir.display()
                )
            })?;
            match Holder::find(&path) {
                Some(holder) => {
                    holder.end(what, left)?;
                    ended.push(format!("{what} {}", holder.pid));
                }
                None => std::thread::sleep(AGAIN),
            }
        }
    }
    Ok(if ended.is_empty() {
        format!("nothing serves {}", dir.display())
    } else {
        format!("ended: {}", ended.join(", "))
    })
}

fn is_held(path: &Path) -> bool {
    // Locked for an instant, and left as it is.
    File::open(path).is_ok_and(|file| file.try_lock().is_err())
}

/// The process that holds a lock.
pub(super) struct Holder {
    pid: i32,
    process: OwnedFd,
}

impl Holder {
    /// Finds the process whose number is in the lock file. The number alone may be another process'
    /// by now: what has not the file open is not the holder. The descriptor comes first, so that it
    /// is of no later process.
    pub(super) fn find(path: &Path) -> Option<Holder> {
        let pid = lock::holder(path)?.cast_signed();
        let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        let file = fs::metadata(path).ok()?;
        let is_it = |entry: fs::DirEntry| {
            let open = fs::metadata(entry.path());
            open.is_ok_and(|open| (open.dev(), open.ino()) == (file.dev(), file.ino()))
        };
        let mut open = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
        open.any(is_it).then_some(Holder { pid, process })
    }

    /// Sends it a signal, unless it has ended.
    pub(super) fn signal(&self, signal: Signal) {
        let _ = pidfd_send_signal(&self.process, signal);
    }

    /// Ends it: by SIGTERM, and half the time later by SIGKILL, which also ends a process that is
    /// stopped.
    fn end(&self, what: &str, time: Duration) -> Result<(), String> {
        for signal in [Signal::TERM, Signal::KILL] {
            self.signal(signal);
            let end = Instant::now() + time / 2;
            while let Some(left) = end.checked_duration_since(Instant::now()) {
                let left = Timespec::try_from(left).ok();
                let mut one = [PollFd::from_borrowed_fd(
                    self.process.as_fd(),
                    PollFlags::IN,
                )];
                if poll(&mut one, left.as_ref()).is_ok_and(|ready| ready > 0) {
                    return Ok(());
                }
            }
        }
        Err(format!(
            "the {what}, process {}, does not end: its driver keeps it in the kernel; see its state in /proc/{}/stack",
            self.pid, self.pid
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_in_a_lock_file_is_no_holder() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("lock");
        // A dead broker's number, which is another process' by now: this one's.
        fs::write(&path, format!("{:<10}\n", std::process::id())).expect("a file");
        assert!(Holder::find(&path).is_none());
        assert!(!is_held(&path));
        assert_eq!(
            stop(dir.path(), Duration::ZERO),
            Ok(format!("nothing serves {}", dir.path().display()))
        );
        let file = lock::take(&path).expect("a file").expect("it is free");
        assert!(is_held(&path));
        assert_eq!(
            Holder::find(&path).map(|holder| holder.pid),
            Some(std::process::id().cast_signed())
        );
        drop(file);
        assert!(Holder::find(&path).is_none());
    }
}

//! The right to serve a directory: an exclusive lock on a file in it, which ends with its process.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use gpu_api::{Error, Result, thread};
use rustix::event::{PollFd, PollFlags};
use transport::os::poller::poll_for;
use transport::os::socket::has_hung_up;
use transport::os::waker::Waker;

/// Takes the lock if it is free, and writes this process' number into it, for people.
///
/// # Errors
///
/// [`Error::System`] when the file cannot be made.
pub fn take(path: &Path) -> Result<Option<File>> {
    let file = open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(sign(file))),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(e)) => Err(Error::system(
            "locking a file",
            "choose a directory on a local file system",
            e,
        )),
    }
}

/// Takes the lock as [`take`] does, and waits as long as is said for one that goes: a process that
/// its dead holder was starting has the holder's descriptors until it becomes another program.
///
/// # Errors
///
/// As [`take`].
pub fn take_within(path: &Path, patience: Duration) -> Result<Option<File>> {
    let start = Instant::now();
    loop {
        let taken = take(path)?;
        if taken.is_some() || start.elapsed() >= patience {
            return Ok(taken);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits for the lock: a broker that is stopped, or stuck in the driver, bars its successor. `leash`
/// gives a descriptor that hangs up with the keeper of the broker that waits; the wait is over with
/// it, so that no broker of an earlier keeper serves after the one that is there.
///
/// # Errors
///
/// As [`take`]; [`Error::Refused`] when the keeper has ended.
pub fn wait(path: &Path, leash: impl FnOnce() -> Result<Option<OwnedFd>>) -> Result<File> {
    if let Some(file) = take(path)? {
        return Ok(file);
    }
    let leash = leash()?;
    let holder = holder(path).unwrap_or(0);
    tracing::warn!(
        holder,
        "another broker serves this directory; waiting for its end"
    );
    let file = open(path)?;
    let failed = |e| {
        Error::system(
            "locking a file",
            "choose a directory on a local file system",
            e,
        )
    };
    let Some(leash) = leash else {
        file.lock().map_err(failed)?;
        return Ok(sign(file));
    };
    let waker = Arc::new(Waker::new()?);
    let (sender, locked) = mpsc::channel();
    let awake = waker.clone();
    // It waits on when the keeper ends before the lock is free: the process ends then.
    thread::start("gpu-ipc-lock", move || {
        let taken = file.lock().map(|()| file);
        let _ = sender.send(taken);
        awake.wake();
    })?;
    loop {
        // Before the lock: one that comes with the keeper's end is for the next keeper's broker.
        if has_hung_up(&leash) {
            return Err(keeper_ended());
        }
        if let Ok(taken) = locked.try_recv() {
            return Ok(sign(taken.map_err(failed)?));
        }
        let waked = waker.fd();
        let mut fds = [
            PollFd::new(&waked, PollFlags::IN),
            PollFd::new(&leash, PollFlags::IN),
        ];
        // An interruption is a wake-up with nothing to do.
        let _ = poll_for(&mut fds, None);
        waker.rise();
    }
}

/// Why a broker does not serve.
pub(super) fn keeper_ended() -> Error {
    Error::refused(
        "the keeper that started this broker ended before the broker served",
        "start `gpu-ipc keep` again: its own broker waits",
    )
}

/// Reads which process held the lock last, by its own pid.
pub fn holder(path: &Path) -> Option<u32> {
    let mut text = String::new();
    File::open(path)
        .ok()?
        .take(32)
        .read_to_string(&mut text)
        .ok()?;
    text.trim().parse().ok()
}

fn open(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW);
    options.open(path).map_err(|e| {
        Error::system(
            "opening a lock file",
            "let this user write in the broker's directory",
            e,
        )
    })
}

fn sign(file: File) -> File {
    // For people alone: without it the lock is as good. Always as long, so that nobody reads half
    // of it.
    let _ = file.write_all_at(format!("{:<10}\n", std::process::id()).as_bytes(), 0);
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_has_the_lock() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("lock");
        let first = take(&path).expect("a file").expect("it is free");
        assert!(take(&path).expect("a file").is_none());
        assert_eq!(holder(&path), Some(std::process::id()));
        assert!(
            take_within(&path, Duration::from_millis(30))
                .expect("a file")
                .is_none()
        );
        let waiting = {
            let path = path.clone();
            std::thread::spawn(move || take_within(&path, Duration::from_secs(600)))
        };
        drop(first);
        assert!(waiting.join().expect("no panic").expect("a file").is_some());
        assert!(take(&path).expect("a file").is_some());
    }
}

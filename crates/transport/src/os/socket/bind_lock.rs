//! The right to bind a socket under one name: a lock on a file beside it. `listener` says what it
//! is for.

use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use gpu_api::Result;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::packet_socket::{address_of, system_error, taken};

/// How many connections may wait to be accepted. The system's own limit cuts it to
/// `net.core.somaxconn`.
const BACKLOG: i32 = 1024;

/// How often and at what distance a lock is tried that another producer holds while it binds the
/// same path.
const LOCK_TRIES: u32 = 1000;
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// The right to bind one name in a directory. Dropping it removes its file.
pub(super) struct BindLock<'a> {
    directory: &'a OwnedFd,
    id: u32,
    file: OwnedFd,
}

impl<'a> BindLock<'a> {
    pub(super) fn id_of(name: &OsStr) -> u32 {
        crc32c::crc32c(name.as_bytes())
    }

    /// Returns the id in the name of a lock or of an unfinished socket.
    pub(super) fn id_in(name: &str) -> Option<u32> {
        let rest = name.strip_prefix(".gpu-ipc-")?;
        let id = rest
            .strip_suffix(".lock")
            .or_else(|| rest.strip_suffix(".tmp"))?;
        (id.len() == 8).then(|| u32::from_str_radix(id, 16).ok())?
    }

    fn name(id: u32) -> String {
        format!(".gpu-ipc-{id:08x}.lock")
    }

    /// Returns the temporary name that only the lock's holder may touch.
    pub(super) fn unfinished(&self) -> String {
        format!(".gpu-ipc-{:08x}.tmp", self.id)
    }

    pub(super) fn take(directory: &'a OwnedFd, id: u32, path: &Path) -> Result<BindLock<'a>> {
        for _ in 0..LOCK_TRIES {
            if let Some(lock) = BindLock::try_take(directory, id)? {
                return Ok(lock);
            }
            thread::sleep(LOCK_PAUSE);
        }
        Err(taken(path, "which another process is binding"))
    }

    /// Takes the lock, unless another process has it.
    pub(super) fn try_take(directory: &'a OwnedFd, id: u32) -> Result<Option<BindLock<'a>>> {
        let name = BindLock::name(id);
        loop {
            let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::openat(directory, &name, flags, Mode::RUSR | Mode::WUSR)
                .map_err(|e| system_error("creating a lock file", e))?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(Errno::INTR) => continue,
                Err(e) => return Err(system_error("flock", e)),
            }
            // A lock on a file that its last holder has removed excludes nobody.
            let ours = rustix::fs::fstat(&file).map_err(|e| system_error("fstat", e))?;
            match rustix::fs::statat(directory, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(named) if (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino) => {
                    return Ok(Some(BindLock {
                        directory,
                        id,
                        file,
                    }));
                }
                Ok(_) | Err(Errno::NOENT) => {}
                Err(e) => return Err(system_error("stat", e)),
            }
        }
    }

    /// Binds a socket under the temporary name and lets it listen; returns device and inode of the
    /// name.
    pub(super) fn listen(&self, socket: &OwnedFd, mode: Mode) -> Result<(u64, u64)> {
        // Through the directory's descriptor the temporary path is short, whatever the directory's
        // is.
        let path = format!(
            "/proc/self/fd/{}/{}",
            self.directory.as_raw_fd(),
            self.unfinished()
        );
        rustix::net::bind(socket, &address_of(Path::new(&path))?)
            .map_err(|e| system_error("bind", e))?;
        rustix::fs::chmodat(self.directory, self.unfinished(), mode, AtFlags::empty())
            .map_err(|e| system_error("chmod", e))?;
        let is = rustix::fs::statat(self.directory, self.unfinished(), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| system_error("stat", e))?;
        rustix::net::listen(socket, BACKLOG).map_err(|e| system_error("listen", e))?;
        Ok((is.st_dev, is.st_ino))
    }

    /// Gives the bound socket its own name, which is free.
    pub(super) fn publish(&self, name: &OsStr, path: &Path) -> Result<()> {
        let (dir, unfinished) = (self.directory, self.unfinished());
        match rustix::fs::renameat_with(dir, &unfinished, dir, name, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => Err(taken(path, "which another process has just made")),
            // A file system that cannot refuse to replace: then the look before has to do.
            Err(Errno::INVAL | Errno::NOSYS) => rustix::fs::renameat(dir, &unfinished, dir, name)
                .map_err(|e| system_error("rename", e)),
            Err(e) => Err(system_error("rename", e)),
        }
    }

    /// Removes what the last holder of the lock left, and the lock.
    pub(super) fn remove_unfinished(self) -> Result<(), Errno> {
        rustix::fs::unlinkat(self.directory, self.unfinished(), AtFlags::empty())
    }
}

impl Drop for BindLock<'_> {
    fn drop(&mut self) {
        // Removed while it is held, so a process that opened it meanwhile finds it without a name
        // and makes another. A lock file that stays is harmless: the next holder removes it.
        let _ = rustix::fs::unlinkat(self.directory, BindLock::name(self.id), AtFlags::empty());
        // A forked child may hold a copy of the descriptor; closing alone would leave the lock with
        // it.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

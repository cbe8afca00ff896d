//! Descriptors that a driver was given by their numbers, and reads again later.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use gpu_api::{Error, Result};

/// A descriptor that the driver was given, and the file that it is.
#[derive(Debug)]
pub struct Given {
    fd: OwnedFd,
    file: Option<(u64, u64)>,
}

impl Given {
    /// Takes a descriptor of this library's own for the file behind another.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the process has no descriptor left.
    pub fn new(fd: BorrowedFd<'_>) -> Result<Given> {
        let fd = fd
            .try_clone_to_owned()
            .map_err(|error| Error::system("dup", "raise RLIMIT_NOFILE", error))?;
        let file = named(&fd);
        Ok(Given { fd, file })
    }

    /// Returns its number.
    pub fn number(&self) -> c_int {
        self.fd.as_raw_fd()
    }

    /// Closes it, unless the driver has: AMD's manual does not say, and of the runtimes that were
    /// read none does. A file that another thread opened at the number meanwhile is another one.
    pub fn give_back(self) {
        if self.file.is_none() || named(&self.fd) != self.file {
            let _ = self.fd.into_raw_fd();
        }
    }
}

fn named(fd: &OwnedFd) -> Option<(u64, u64)> {
    let found = std::fs::metadata(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
    Some((found.dev(), found.ino()))
}

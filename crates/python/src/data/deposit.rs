//! Descriptors that a session keeps under names, as Python gives and takes them: by their numbers.

use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use gpu_ipc::Error;
use gpu_ipc::session::DepositId;
use pyo3::prelude::*;

use crate::interpreter::errors::{OrRaise, invalid};

/// Reads a name.
pub(crate) fn name(id: &[u8]) -> PyResult<DepositId> {
    let bytes = id.try_into().map_err(|_| {
        invalid(
            "the name of a deposit",
            format!("{} bytes long", id.len()),
            "16 bytes, such as `uuid.uuid4().bytes`",
        )
    })?;
    Ok(DepositId(bytes))
}

/// Makes a descriptor of a program's that stays the program's own into one of ours.
pub(crate) fn copy_of(fd: RawFd) -> PyResult<OwnedFd> {
    if fd < 0 {
        return Err(invalid("a file descriptor", fd, "that of an open file"));
    }
    // SAFETY: `borrow_raw` asks for
    // - a number that is not -1: it was checked;
    // - a descriptor that stays open meanwhile: Python's programs name descriptors by number, as they
    //   do for `os.dup`, which does the same. The kernel refuses one that is not open.
    let theirs = unsafe { BorrowedFd::borrow_raw(fd) };
    let copy = theirs.try_clone_to_owned();
    copy.map_err(|source| Error::System {
        call: "dup",
        remedy: "name an open file descriptor, or raise RLIMIT_NOFILE",
        source,
    })
    .or_raise()
}

/// Hands a descriptor to the program.
pub(crate) fn given(fd: OwnedFd) -> RawFd {
    fd.into_raw_fd()
}

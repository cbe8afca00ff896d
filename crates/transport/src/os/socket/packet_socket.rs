//! A Unix socket of whole packets: making one, its address and directory, and the errors of its
//! calls.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use gpu_api::{Error, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// The longest path of a socket: `sun_path` without the final zero.
pub(super) const MOST_PATH: usize = 107;

/// Makes a socket that came from elsewhere fit for use here: it must be a Unix socket of whole
/// packets, and does not block afterwards.
///
/// # Errors
///
/// [`Error::Invalid`] for any other descriptor.
pub fn take_over(socket: &OwnedFd) -> Result<()> {
    let domain = rustix::net::sockopt::socket_domain(socket);
    let kind = rustix::net::sockopt::socket_type(socket);
    if (domain, kind) != (Ok(AddressFamily::UNIX), Ok(SocketType::SEQPACKET)) {
        return Err(Error::invalid(
            "the connection",
            format!("descriptor {}, which is something else", socket.as_raw_fd()),
            "a Unix socket of type SOCK_SEQPACKET",
        ));
    }
    rustix::io::ioctl_fionbio(socket, true)
        .map_err(|e| system_error("making a socket not block", e))?;
    rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::CLOEXEC)
        .map_err(|e| system_error("fcntl", e))
}

pub(super) fn new_socket() -> Result<OwnedFd> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(|e| system_error("socket", e))
}

pub(super) fn address_of(path: &Path) -> Result<SocketAddrUnix> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.len() > MOST_PATH || bytes.contains(&0) {
        return Err(Error::invalid(
            "socket path",
            format!("{} ({} bytes)", path.display(), bytes.len()),
            "1 to 107 bytes without a zero: that is what a socket address holds",
        ));
    }
    SocketAddrUnix::new(path).map_err(|e| system_error("making a socket address", e))
}

/// Makes the error of a call that works on a socket or on its directory.
pub(super) fn system_error(call: &'static str, e: Errno) -> Error {
    let remedy = match e {
        Errno::MFILE | Errno::NFILE => "raise RLIMIT_NOFILE (`ulimit -n`) or hold fewer files",
        Errno::NOSPC | Errno::DQUOT => "free space in the socket's directory, or choose another",
        Errno::ACCESS | Errno::PERM | Errno::ROFS => {
            "let this user write in the socket's directory, or choose another"
        }
        Errno::NOENT | Errno::NOTDIR => "create the socket's directory, and mount /proc",
        Errno::NOMEM | Errno::NOBUFS => "free memory",
        _ => "choose another directory for the socket",
    };
    Error::system(call, remedy, e)
}

/// Opens a directory to name things in it.
pub(super) fn open_directory(dir: &Path) -> Result<OwnedFd> {
    let opened = rustix::fs::open(
        dir,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    opened.map_err(|e| match e {
        Errno::NOENT | Errno::NOTDIR => Error::invalid(
            "the socket's directory",
            format!("{}, which is missing or not a directory", dir.display()),
            "a directory that exists; make it, or choose another path",
        ),
        e => system_error("opening the socket's directory", e),
    })
}

pub(super) fn taken(path: &Path, is: &str) -> Error {
    Error::invalid(
        "socket path",
        format!("{}, {is}", path.display()),
        "free, or what a dead producer left; close the other or choose another path",
    )
}

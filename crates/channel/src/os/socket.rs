//! The control socket: whole packets with file descriptors, between processes of one host.
//!
//! 1. `directory`: where sockets lie by default, and the removal of those whose owner died.
//! 2. `listener`: a producer's end. Its name appears only once it listens; `bind_lock` is the right to make one.
//! 3. `connect`: a participant's end.
//! 4. `transfer`: sending and receiving, on either. `peer`: who is at the other.
//!
//! Nothing here blocks. Whoever has to wait polls the descriptor.

mod bind_lock;
mod connect;
mod directory;
mod listener;
mod peer;
#[cfg(test)]
pub(super) mod scratch;
mod transfer;

pub use connect::{Connecting, connect_within};
pub use directory::{list, runtime_dir, sweep_stale};
pub use listener::{Listener, Place};
pub use peer::{Credentials, credentials, peer_pidfd};
pub use transfer::{ReceiveOutcome, SendOutcome, hang_up, receive, receive_guarded, send, wait_ready};

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use gpu_api::{Error, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// The longest path of a socket: `sun_path` without the final zero.
const MOST_PATH: usize = 107;

/// Makes a socket that came from elsewhere fit for use here: it must be a Unix socket of whole packets, and does not
/// block afterwards.
///
/// # Errors
///
/// [`Error::Invalid`] for any other descriptor.
pub fn take_over(socket: &OwnedFd) -> Result<()> {
    let domain = rustix::net::sockopt::socket_domain(socket);
    let kind = rustix::net::sockopt::socket_type(socket);
    if (domain, kind) != (Ok(AddressFamily::UNIX), Ok(SocketType::SEQPACKET)) {
        return Err(Error::Invalid {
            what: "the connection",
            got: format!("descriptor {}, which is something else", socket.as_raw_fd()),
            must: "a Unix socket of type SOCK_SEQPACKET",
        });
    }
    rustix::io::ioctl_fionbio(socket, true).map_err(|e| system_error("making a socket not block", e))?;
    rustix::io::fcntl_setfd(socket, rustix::io::FdFlags::CLOEXEC).map_err(|e| system_error("fcntl", e))
}

fn new_socket() -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
        .map_err(|e| system_error("socket", e))
}

fn address_of(path: &Path) -> Result<SocketAddrUnix> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.is_empty() || bytes.len() > MOST_PATH || bytes.contains(&0) {
        return Err(Error::Invalid {
            what: "socket path",
            got: format!("{} ({} bytes)", path.display(), bytes.len()),
            must: "1 to 107 bytes without a zero: that is what a socket address holds",
        });
    }
    SocketAddrUnix::new(path).map_err(|e| system_error("making a socket address", e))
}

/// Makes the error of a call that works on a socket or on its directory.
fn system_error(call: &'static str, e: Errno) -> Error {
    let remedy = match e {
        Errno::MFILE | Errno::NFILE => "raise RLIMIT_NOFILE (`ulimit -n`) or hold fewer files",
        Errno::NOSPC | Errno::DQUOT => "free space in the socket's directory, or choose another",
        Errno::ACCESS | Errno::PERM | Errno::ROFS => "let this user write in the socket's directory, or choose another",
        Errno::NOENT | Errno::NOTDIR => "create the socket's directory, and mount /proc",
        Errno::NOMEM | Errno::NOBUFS => "free memory",
        _ => "choose another directory for the socket",
    };
    Error::system(call, remedy, e)
}

//! The process at the other end of a connection, as the kernel reports it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// The process that called `connect`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Credentials {
    /// The user.
    pub uid: u32,
    /// The process; 0 when it is in a namespace that hides it.
    pub pid: u32,
}

/// Returns the user and the process that called `connect`.
pub fn credentials(fd: impl AsFd) -> io::Result<Credentials> {
    let peer = credentials_of(&fd)?;
    Ok(Credentials {
        uid: peer.uid,
        pid: peer.pid.cast_unsigned(),
    })
}

fn credentials_of(fd: &impl AsFd) -> io::Result<libc::ucred> {
    // rustix reads the same option into a pid that must not be 0, which it is for a peer in a
    // hidden namespace.
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `getsockopt` asks for
    // - `len` writable bytes: `peer` lives on this frame and is as long as `len` says;
    // - a place for the length: `len` lives there too.
    // Any bytes are a good `ucred`.
    let answer = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    if answer != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(peer)
}

/// Returns the groups of the process that called `connect`, as they were at that call: its own and
/// the supplementary ones.
///
/// # Errors
///
/// What the kernel refuses.
pub fn groups(fd: impl AsFd) -> io::Result<Vec<u32>> {
    let own = credentials_of(&fd)?.gid;
    // Most processes are in a few groups; the kernel says how many there are if they do not fit.
    let mut groups = vec![0u32; 64];
    loop {
        let mut len = (groups.len() * size_of::<u32>()) as libc::socklen_t;
        // SAFETY: `getsockopt` asks for
        // - `len` writable bytes: `groups` has as many;
        // - a place for the length: `len` lives on this frame.
        // Any bytes are good numbers.
        let answer = unsafe {
            libc::getsockopt(
                fd.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        let count = len as usize / size_of::<u32>();
        if answer == 0 {
            groups.truncate(count);
            if !groups.contains(&own) {
                groups.push(own);
            }
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

/// Returns a pidfd of the process that called `connect`; `None` before Linux 6.5 and for a process
/// that is gone.
///
/// It names the wrong process for a connection that was passed on or inherited, so it serves only
/// for a peer that never said hello.
pub fn peer_pidfd(fd: impl AsFd) -> Option<OwnedFd> {
    let mut pidfd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: as in `credentials`, with an integer.
    let answer = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut pidfd).cast(),
            &raw mut len,
        )
    };
    if answer != 0 || pidfd < 0 {
        return None;
    }
    // SAFETY: `OwnedFd::from_raw_fd` asks for an open descriptor that nobody else owns: the kernel
    // has just made it for this call.
    Some(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

#[cfg(test)]
mod tests {
    use super::super::connect::connect;
    use super::super::scratch::ScratchDir;
    use super::super::{Endpoint, Listener};
    use super::*;
    use crate::os::process::same_process;

    #[test]
    fn the_peer_is_who_connected() {
        let dir = ScratchDir::new();
        let listener = Listener::bind(&Endpoint::Path {
            path: dir.join("s"),
            others: false,
        })
        .expect("bind");
        let _here = connect(listener.path()).expect("connect");
        let there = listener
            .accept(|_| {})
            .expect("accept")
            .expect("one that waits");
        let us = Credentials {
            uid: rustix::process::geteuid().as_raw(),
            pid: std::process::id(),
        };
        assert_eq!(credentials(&there).expect("its user"), us);
        let mut known: Vec<u32> = rustix::process::getgroups()
            .expect("this process' groups")
            .into_iter()
            .map(|group| group.as_raw())
            .collect();
        known.push(rustix::process::getegid().as_raw());
        let mut seen = groups(&there).expect("its groups");
        for groups in [&mut known, &mut seen] {
            groups.sort_unstable();
            groups.dedup();
        }
        assert_eq!(seen, known);
        let pidfd = peer_pidfd(&there).expect("Linux 6.5 or later");
        assert!(same_process(pidfd.as_fd()).expect("a readable /proc"));
        let (no_socket, _) = io::pipe().expect("a pipe");
        assert!(credentials(&no_socket).is_err());
        assert!(groups(&no_socket).is_err());
        assert!(peer_pidfd(&no_socket).is_none());
    }
}

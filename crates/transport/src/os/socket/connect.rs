//! A participant's end of the control socket.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::{Duration, Instant};

use gpu_api::{Error, Result};
use rustix::io::Errno;

use super::packet_socket::{address_of, new_socket};

/// A socket that is not connected yet.
///
/// It is made before the process' descendants are counted, so that a child forked after that has a
/// copy of it, which keeps the proof of death from being complete; and connected after, so that
/// nobody waits at the session while they are.
#[derive(Debug)]
pub struct Connecting(OwnedFd);

impl Connecting {
    /// Makes the socket.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when no file descriptor is left.
    pub fn new() -> Result<Connecting> {
        new_socket().map(Connecting)
    }

    /// Connects to a producer's socket, trying again while its backlog is full.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`] if no session answers at that path, [`Error::Invalid`] for a path that is
    /// too long.
    pub fn connect_within(self, path: &Path, deadline: Option<Instant>) -> Result<OwnedFd> {
        let address = address_of(path)?;
        loop {
            let error = match rustix::net::connect(&self.0, &address) {
                Ok(()) => return Ok(self.0),
                Err(e) => connect_error(path, e),
            };
            if !is_backlog_full(&error)
                || deadline.is_some_and(|deadline| Instant::now() >= deadline)
            {
                return Err(error);
            }
            // A full backlog wakes nobody when it empties.
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Connects a process that has no descendants to name.
///
/// # Errors
///
/// As [`Connecting::connect_within`].
pub fn connect_within(path: &Path, deadline: Option<Instant>) -> Result<OwnedFd> {
    Connecting::new()?.connect_within(path, deadline)
}

/// Connects at once, or says why not.
#[cfg(test)]
pub(super) fn connect(path: &Path) -> Result<OwnedFd> {
    connect_within(path, Some(Instant::now()))
}

/// Says whether a `connect` failed only because more participants came at once than the producer
/// had taken in.
pub(super) fn is_backlog_full(error: &Error) -> bool {
    matches!(error, Error::Connect { source: Some(e), .. } if Errno::from_io_error(e) == Some(Errno::AGAIN))
}

fn connect_error(path: &Path, e: Errno) -> Error {
    let is_socket = || std::fs::metadata(path).is_ok_and(|m| m.file_type().is_socket());
    let (why, remedy) = match e {
        Errno::NOENT => (
            "there is no such socket",
            "start the producer, or correct the path",
        ),
        Errno::CONNREFUSED if is_socket() => (
            "no process listens there any more",
            "start the producer again",
        ),
        Errno::CONNREFUSED => ("it is not a socket", "give the path of a session's socket"),
        Errno::ACCESS | Errno::PERM => (
            "this user may not",
            "name the user in `allow_uids`, and let it enter the socket's directory",
        ),
        Errno::AGAIN => (
            "too many participants connect at this moment",
            "connect again",
        ),
        Errno::PROTOTYPE => (
            "another kind of socket listens there",
            "give the path of a session's socket",
        ),
        _ => ("the system refused", "correct the path"),
    };
    Error::Connect {
        path: path.display().to_string(),
        why: why.into(),
        remedy,
        source: Some(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::scratch::{ScratchDir, in_own_process};
    use super::*;
    use std::os::unix::net::{UnixDatagram, UnixListener};

    fn refusal(path: &Path) -> String {
        connect(path)
            .expect_err("a connect that nobody answers")
            .to_string()
    }

    #[test]
    fn every_failed_connect_says_why_and_what_to_do() {
        in_own_process(
            "os::socket::connect::tests::every_failed_connect_says_why_and_what_to_do",
            || {
                let dir = ScratchDir::new();
                let at = |name: &str, text: &str| {
                    let path = dir.join(name);
                    assert_eq!(
                        refusal(&path),
                        format!("cannot connect to {}: {text}", path.display())
                    );
                };
                at(
                    "absent",
                    "there is no such socket; start the producer, or correct the path",
                );

                std::fs::write(dir.join("file"), "").expect("a file");
                at(
                    "file",
                    "it is not a socket; give the path of a session's socket",
                );

                drop(UnixDatagram::bind(dir.join("dead")).expect("bind"));
                at(
                    "dead",
                    "no process listens there any more; start the producer again",
                );

                let _stream = UnixListener::bind(dir.join("stream")).expect("bind");
                at(
                    "stream",
                    "another kind of socket listens there; give the path of a session's socket",
                );

                let full = new_socket().expect("a socket");
                rustix::net::bind(&full, &address_of(&dir.join("full")).expect("an address"))
                    .expect("bind");
                rustix::net::listen(&full, 0).expect("listen");
                let mut waiting = Vec::new();
                let error = loop {
                    match connect(&dir.join("full")) {
                        Ok(connection) => waiting.push(connection),
                        Err(error) => break error,
                    }
                };
                assert!(is_backlog_full(&error), "{error}");
                at(
                    "full",
                    "too many participants connect at this moment; connect again",
                );

                let denied = connect_error(Path::new("/x"), Errno::ACCESS);
                assert!(!is_backlog_full(&denied));
                assert_eq!(
                    denied.to_string(),
                    "cannot connect to /x: this user may not; \
                 name the user in `allow_uids`, and let it enter the socket's directory"
                );
                assert_eq!(
                    refusal(Path::new(&"x".repeat(108))),
                    format!(
                        "socket path is {} (108 bytes), but must be \
                     1 to 107 bytes without a zero: that is what a socket address holds",
                        "x".repeat(108)
                    )
                );
                assert!(refusal(Path::new("")).contains("(0 bytes)"));
            },
        );
    }
}

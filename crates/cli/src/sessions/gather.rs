//! Asking every session, each under its own deadline.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpu_ipc::Error;
use gpu_ipc::admin::SessionReport;
use gpu_ipc::backend::thread;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt,
};

use crate::args::Where;
use crate::device::explain;

/// A session's socket and what came of asking there.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The socket.
    pub socket: PathBuf,
    /// What came of it.
    pub answer: Answer,
}

/// What came of asking a session.
#[derive(Clone, Debug)]
pub enum Answer {
    /// It answered.
    Alive(Box<SessionReport>),
    /// Somebody listens and does not answer: its process hangs or is stopped.
    Hung(Option<Listener>),
    /// It cannot be asked: why, and what to do.
    Unknown(String),
}

/// A process that listens on a socket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listener {
    /// Its number.
    pub pid: i32,
    /// What it runs.
    pub command: String,
}

/// Asks the sessions that are named, or those in the runtime directory.
///
/// # Errors
///
/// Why the runtime directory cannot be read, and what to do.
pub fn gather(place: &Where) -> Result<Vec<Seen>, String> {
    let named = if place.sessions.is_empty() {
        open_here()?
    } else {
        place.sessions.clone()
    };
    let timeout = Duration::from_secs_f64(place.timeout);
    let ask = |session: &PathBuf| match find(session) {
        Ok(socket) => Seen {
            answer: ask(&socket, timeout),
            socket,
        },
        Err(why) => Seen {
            socket: session.clone(),
            answer: Answer::Unknown(why),
        },
    };
    // At once, so that one that hangs does not hold up the others.
    Ok(std::thread::scope(|scope| {
        let asking: Vec<_> = named
            .iter()
            .map(|session| {
                let asking = thread::start_scoped(scope, "gpu-ipc-ask", || ask(session));
                (session, asking)
            })
            .collect();
        let unknown = |session: &PathBuf, why: String| Seen {
            socket: session.clone(),
            answer: Answer::Unknown(why),
        };
        asking
            .into_iter()
            .map(
                |(session, asking)| match asking.map(|asking| asking.join()) {
                    Ok(Ok(seen)) => seen,
                    Ok(Err(_)) => unknown(session, "asking it failed; report this".into()),
                    Err(error) => unknown(session, explain(&error)),
                },
            )
            .collect()
    }))
}

/// Lists the sockets in the runtime directory.
///
/// # Errors
///
/// Why it cannot be read, and what to do.
pub fn open_here() -> Result<Vec<PathBuf>, String> {
    gpu_ipc::admin::sessions(None).map_err(|error| explain(&error))
}

/// Finds the socket of a session that was named: its path, or the beginning of its name in the
/// runtime directory.
///
/// # Errors
///
/// Why no single session is meant.
pub fn find(session: &Path) -> Result<PathBuf, String> {
    if session.components().count() > 1 || session.exists() {
        return Ok(session.into());
    }
    let name = session.to_string_lossy();
    let begins = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|file| file.to_string_lossy().starts_with(&*name))
    };
    let mut found: Vec<PathBuf> = open_here()?.into_iter().filter(begins).collect();
    match (found.pop(), found.len()) {
        (Some(only), 0) => Ok(only),
        (None, _) => Err(format!(
            "no session's name begins with {name}; gpu-ipc ls shows those that are open"
        )),
        (Some(_), more) => Err(format!(
            "the names of {} sessions begin with {name}; name more of it",
            more + 1
        )),
    }
}

fn ask(socket: &Path, timeout: Duration) -> Answer {
    match gpu_ipc::admin::inspect(socket, Some(timeout)) {
        Ok(report) => Answer::Alive(Box::new(report)),
        Err(Error::Deadline { .. }) => Answer::Hung(listener(socket)),
        Err(error) => Answer::Unknown(explain(&error)),
    }
}

/// Finds the process that listens on a socket without asking it: the kernel notes it at `listen`.
fn listener(socket: &Path) -> Option<Listener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let ours = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
    connect(&ours, &SocketAddrUnix::new(socket).ok()?).ok()?;
    let pid = sockopt::socket_peercred(&ours)
        .ok()?
        .pid
        .as_raw_nonzero()
        .get();
    let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(Listener {
        pid,
        command: command.trim_end().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_listens_is_known_without_an_answer() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("s");
        assert_eq!(listener(&path), None);
        let silent = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        let silent = silent.expect("a socket");
        rustix::net::bind(&silent, &SocketAddrUnix::new(&path).expect("an address"))
            .expect("bound");
        rustix::net::listen(&silent, 1).expect("it listens");
        let found = listener(&path).expect("it is this process");
        assert_eq!(found.pid, std::process::id() as i32);
        assert!(!found.command.is_empty());
    }
}

//! A producer's end of the control socket.
//!
//! Between `bind` and `listen` a connect is refused just as at a dead producer's socket, so a
//! socket is bound under a temporary name, made to listen, and only then given its own. While the
//! temporary name exists its maker holds a lock on a file beside it. So of whatever a dead producer
//! left it can be told that it is dead, also from another pid namespace, and without a timer:
//!
//! | name | whose | stale when |
//! |---|---|---|
//! | `<session>.sock`, or the path that was asked for | a listening socket | a connect is refused |
//! | `.gpu-ipc-<id>.tmp` | a socket that does not listen yet | the lock can be taken |
//! | `.gpu-ipc-<id>.lock` | the lock | it can be taken |
//!
//! The id is the checksum of the final name, so two producers that want one path take turns.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use gpu_api::lock::Acquire;
use gpu_api::{Error, Result};
use rustix::fs::{AtFlags, Mode};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketFlags};

use super::bind_lock::BindLock;
use super::directory::{Probe, probe};
use super::packet_socket::{
    address_of, new_socket, open_directory, system_error, take_over, taken,
};
use crate::wire::descriptor::SessionId;

/// Where a session listens.
#[derive(Clone, Debug)]
pub enum Endpoint {
    /// Under the session's name in a runtime directory; for this user alone.
    Runtime {
        /// The directory.
        dir: PathBuf,
        /// The session.
        session: SessionId,
    },
    /// At a path that the user chose.
    Path {
        /// The path.
        path: PathBuf,
        /// Other users may connect, as far as the directory lets them; the acceptor asks the kernel
        /// for their uid.
        others: bool,
    },
}

/// A listening socket with a name.
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the name, so that a successor's is never removed; none for a name that
    /// is not ours.
    bound: Option<(u64, u64)>,
    /// Kept for the moment when no descriptor is left: see `accept`.
    spare: Mutex<Option<OwnedFd>>,
}

impl Listener {
    /// Listens at an endpoint; the name appears at once, already listening. What a dead producer
    /// left there is replaced.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a path that is too long, that somebody listens on, that is no socket,
    /// or whose directory is missing; [`Error::System`] when that is full or not writable, or no
    /// file descriptor is left.
    pub fn bind(endpoint: &Endpoint) -> Result<Listener> {
        let (path, mode) = match endpoint {
            Endpoint::Runtime { dir, session } => (dir.join(format!("{session}.sock")), 0o600),
            Endpoint::Path { path, others } => (path.clone(), mode_of(*others)),
        };
        let path = std::path::absolute(&path).map_err(|e| {
            Error::system(
                "getcwd",
                "give an absolute path, or enter a directory that exists",
                e,
            )
        })?;
        address_of(&path)?;
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(taken(&path, "a directory"));
        };
        let directory = open_directory(parent)?;
        let lock = BindLock::take(&directory, BindLock::id_of(name), &path)?;
        match probe(&path)? {
            Probe::Absent => {}
            Probe::Dead => unlink(&directory, name).map_err(|e| system_error("unlink", e))?,
            Probe::NoSocket => return Err(taken(&path, "not a socket")),
            Probe::Alive => return Err(taken(&path, "where a process listens already")),
        }
        // Under the lock: the process that made it is dead.
        unlink(&directory, lock.unfinished()).map_err(|e| system_error("unlink", e))?;
        let socket = new_socket()?;
        let listening = lock.listen(&socket, Mode::from_raw_mode(mode));
        let bound = listening
            .and_then(|bound| lock.publish(name, &path).map(|()| bound))
            .inspect_err(|_| {
                // Best effort: what stays is removed by the next who takes the lock.
                let _ = unlink(&directory, lock.unfinished());
            })?;
        let spare = Mutex::new(spare_of(&socket));
        Ok(Listener {
            socket,
            path,
            bound: Some(bound),
            spare,
        })
    }

    /// Takes in a listening socket made elsewhere. Its name stays its maker's.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for anything but a listening Unix socket of whole packets.
    pub fn inherited(socket: OwnedFd) -> Result<Listener> {
        take_over(&socket)?;
        let listens = rustix::net::sockopt::socket_acceptconn(&socket)
            .map_err(|e| system_error("getsockopt", e))?;
        if !listens {
            return Err(Error::invalid(
                "the listening socket",
                "a socket that does not listen",
                "one that `listen` was called on",
            ));
        }
        let name = rustix::net::getsockname(&socket).map_err(|e| system_error("getsockname", e))?;
        let path = SocketAddrUnix::try_from(name)
            .ok()
            .and_then(|name| name.path().map(|path| path.into_owned()));
        let path = path.map_or_else(PathBuf::new, |path| {
            PathBuf::from(OsStr::from_bytes(path.as_bytes()))
        });
        let spare = Mutex::new(spare_of(&socket));
        Ok(Listener {
            socket,
            path,
            bound: None,
            spare,
        })
    }

    /// Returns the path to connect to.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes in one connection that waits; `None` when none does. Never blocks.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when no file descriptor is left. The connection is closed then, after
    /// `refuse` told it so: left in the queue it would keep the listener readable and its participant
    /// waiting for an answer.
    pub fn accept(&self, refuse: impl FnOnce(BorrowedFd<'_>)) -> Result<Option<OwnedFd>> {
        match self.accept_one() {
            Ok(connection) => Ok(connection),
            Err(e @ (Errno::MFILE | Errno::NFILE)) => {
                let mut spare = self.spare.acquire();
                // The kernel looks for a free number before it looks at the queue, so it may be
                // that nobody waits.
                // Closed before the next call: it is what that has room by.
                let has_room = spare.take().is_some();
                let one = has_room.then(|| self.accept_one());
                if let Some(Ok(Some(connection))) = &one {
                    refuse(connection.as_fd());
                }
                let nobody = matches!(one, Some(Ok(None)));
                drop(one);
                *spare = spare_of(&self.socket);
                if nobody {
                    Ok(None)
                } else {
                    Err(system_error("accept", e))
                }
            }
            Err(e) => Err(system_error("accept", e)),
        }
    }

    /// Says whether the path still leads here: a program that tidies up, or an operator, may have
    /// removed or replaced the name.
    pub fn has_its_name(&self) -> bool {
        let is = fs::symlink_metadata(&self.path);
        is.is_ok_and(|is| Some((is.dev(), is.ino())) == self.bound)
    }

    /// Lets other users connect, as far as the directory lets them, or this one alone, as
    /// [`Endpoint::Path`] does from the start.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the name is gone.
    pub fn open_to_others(&self, others: bool) -> Result<()> {
        let mode = fs::Permissions::from_mode(mode_of(others));
        fs::set_permissions(&self.path, mode)
            .map_err(|e| system_error("chmod", Errno::from_io_error(&e).unwrap_or(Errno::IO)))
    }

    fn accept_one(&self) -> Result<Option<OwnedFd>, Errno> {
        loop {
            match rustix::net::accept_with(
                &self.socket,
                SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            ) {
                Ok(connection) => return Ok(Some(connection)),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Removes the name, unless it is another's by now. For the process that bound it, before it
    /// drops the listener; a forked child must not.
    pub fn unlink(&self) -> Result<()> {
        let failed =
            |e: io::Error| system_error("unlink", Errno::from_io_error(&e).unwrap_or(Errno::IO));
        match fs::symlink_metadata(&self.path) {
            Ok(is) if Some((is.dev(), is.ino())) == self.bound => {
                fs::remove_file(&self.path).map_err(failed)
            }
            Ok(_) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(failed(e)),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// Removes a name; a missing one is no error.
fn unlink(directory: &OwnedFd, name: impl rustix::path::Arg) -> Result<(), Errno> {
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}

fn mode_of(others: bool) -> u32 {
    if others { 0o666 } else { 0o600 }
}

fn spare_of(socket: &OwnedFd) -> Option<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(socket, 0).ok()
}

#[cfg(test)]
mod tests {
    use super::super::connect::{connect, is_backlog_full};
    use super::super::scratch::{self, ScratchDir, in_own_process};
    use super::super::transfer::has_hung_up;
    use super::super::{ReceiveOutcome, receive, send};
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::{UnixDatagram, UnixListener};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    fn at(path: PathBuf) -> Endpoint {
        Endpoint::Path {
            path,
            others: false,
        }
    }

    #[test]
    fn a_session_listens_under_its_own_name_for_its_user_alone() {
        let dir = ScratchDir::new();
        let listener = Listener::bind(&Endpoint::Runtime {
            dir: dir.to_path_buf(),
            session: SessionId([0xa5; 16]),
        })
        .expect("bind");
        assert_eq!(dir.names(), ["a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5.sock"]);
        assert_eq!(
            fs::metadata(listener.path()).expect("stat").mode() & 0o777,
            0o600
        );
        assert!(listener.accept(|_| {}).expect("accept").is_none());

        let here = connect(listener.path()).expect("connect");
        let there = listener
            .accept(|_| {})
            .expect("accept")
            .expect("one that waits");
        assert!(listener.accept(|_| {}).expect("accept").is_none());
        assert_eq!(
            send(&here, b"hello", &[]).expect("send"),
            super::super::SendOutcome::Sent
        );
        let outcome = receive(
            &there,
            &mut [0; crate::wire::message::MOST_BYTES],
            &mut Vec::new(),
        )
        .expect("receive");
        assert_eq!(outcome, ReceiveOutcome::Packet(5));

        listener.unlink().expect("unlink");
        listener.unlink().expect("a second time is no error");
        assert!(dir.names().is_empty());
    }

    #[test]
    fn a_chosen_path_can_be_open_to_others() {
        let dir = ScratchDir::new();
        let listener = Listener::bind(&Endpoint::Path {
            path: dir.join("s"),
            others: true,
        })
        .expect("bind");
        assert_eq!(
            fs::metadata(listener.path()).expect("stat").mode() & 0o777,
            0o666
        );
        assert_eq!(dir.names(), ["s"]);
    }

    #[test]
    fn a_dead_producers_socket_is_replaced() {
        in_own_process(
            "os::socket::listener::tests::a_dead_producers_socket_is_replaced",
            || {
                let dir = ScratchDir::new();
                for _ in 0..3 {
                    let listener = Listener::bind(&at(dir.join("s"))).expect("bind");
                    connect(listener.path()).expect("connect");
                }
                drop(UnixListener::bind(dir.join("t")).expect("bind"));
                Listener::bind(&at(dir.join("t"))).expect("a dead socket of another kind");
                let id = BindLock::id_of(OsStr::new("u"));
                drop(UnixDatagram::bind(dir.join(format!(".gpu-ipc-{id:08x}.tmp"))).expect("bind"));
                Listener::bind(&at(dir.join("u"))).expect("an unfinished socket");
                assert_eq!(dir.names(), ["s", "t", "u"]);
            },
        );
    }

    #[test]
    fn what_is_no_dead_socket_is_left_alone() {
        let dir = ScratchDir::new();
        let alive = Listener::bind(&at(dir.join("alive"))).expect("bind");
        let _stream = UnixListener::bind(dir.join("stream")).expect("bind");
        fs::write(dir.join("file"), "mine").expect("a file");
        fs::create_dir(dir.join("directory")).expect("a directory");
        symlink("alive", dir.join("link")).expect("a link");
        let before = dir.names();
        for (name, is) in [
            ("alive", "where a process listens already"),
            ("stream", "where a process listens already"),
            ("file", "not a socket"),
            ("directory", "not a socket"),
            ("link", "not a socket"),
        ] {
            let path = dir.join(name);
            let error = Listener::bind(&at(path.clone())).expect_err(name);
            let expected = format!(
                "socket path is {}, {is}, but must be \
                 free, or what a dead producer left; close the other or choose another path",
                path.display()
            );
            assert_eq!(error.to_string(), expected);
        }
        assert_eq!(dir.names(), before);
        assert_eq!(fs::read(dir.join("file")).expect("read"), b"mine");
        connect(alive.path()).expect("connect");
    }

    #[test]
    fn a_path_that_leads_nowhere_is_refused() {
        let dir = ScratchDir::new();
        let error = Listener::bind(&at(dir.join("no/s"))).expect_err("no such directory");
        let expected = format!(
            "the socket's directory is {}, which is missing or not a directory, but must be a directory that exists; \
             make it, or choose another path",
            dir.join("no").display()
        );
        assert_eq!(error.to_string(), expected);
        let long = dir.join("x".repeat(108));
        let error = Listener::bind(&at(long)).expect_err("too long");
        assert!(
            error.to_string().contains("but must be 1 to 107 bytes"),
            "{error}"
        );
        let error = Listener::bind(&at("/".into())).expect_err("the root");
        assert!(error.to_string().contains("/, a directory"), "{error}");
        assert!(dir.names().is_empty(), "{:?}", dir.names());
    }

    #[test]
    fn the_longest_path_can_be_bound() {
        let dir = ScratchDir::new();
        let name = "x".repeat(super::super::packet_socket::MOST_PATH - 1 - dir.as_os_str().len());
        let listener = Listener::bind(&at(dir.join(&name))).expect("bind");
        connect(listener.path()).expect("connect");
        assert_eq!(dir.names(), [name]);
    }

    #[test]
    fn a_name_that_was_taken_away_is_noticed() {
        let dir = ScratchDir::new();
        let listener = Listener::bind(&at(dir.join("s"))).expect("bind");
        assert!(listener.has_its_name());
        listener.open_to_others(true).expect("it is ours");
        let mode = fs::metadata(listener.path()).expect("stat").mode() & 0o777;
        assert_eq!(mode, 0o666);
        fs::remove_file(listener.path()).expect("remove");
        assert!(!listener.has_its_name());
        listener.open_to_others(false).expect_err("no name");
        let _next = Listener::bind(&at(dir.join("s"))).expect("bind");
        assert!(!listener.has_its_name(), "it leads to another one");
    }

    #[test]
    fn a_successors_name_is_not_removed() {
        let dir = ScratchDir::new();
        let first = Listener::bind(&at(dir.join("s"))).expect("bind");
        fs::remove_file(first.path()).expect("remove");
        let second = Listener::bind(&at(dir.join("s"))).expect("bind");
        first.unlink().expect("unlink");
        connect(second.path()).expect("connect");
    }

    #[test]
    fn of_many_that_want_one_path_one_gets_it() {
        in_own_process(
            "os::socket::listener::tests::of_many_that_want_one_path_one_gets_it",
            || {
                let dir = ScratchDir::new();
                for round in 0..20 {
                    let path = dir.join(format!("s{round}"));
                    drop(Listener::bind(&at(path.clone())).expect("a dead producer's socket"));
                    let got: Vec<_> = thread::scope(|scope| {
                        let each: Vec<_> = (0..4)
                            .map(|_| scope.spawn(|| Listener::bind(&at(path.clone()))))
                            .collect();
                        each.into_iter()
                            .map(|one| one.join().expect("no panic"))
                            .collect()
                    });
                    let winners: Vec<_> = got.iter().flatten().collect();
                    assert_eq!(winners.len(), 1, "{got:?}");
                    let _connection = connect(&path).expect("connect");
                    // The losers' looks wait in the queue too.
                    assert!(winners[0].accept(|_| {}).expect("accept").is_some());
                }
                assert_eq!(dir.names().len(), 20, "{:?}", dir.names());
            },
        );
    }

    #[test]
    fn a_name_never_refuses_while_it_appears() {
        const ROUNDS: usize = 200;
        let dir = ScratchDir::new();
        let name = |round: usize| dir.join(format!("s{round}"));
        let done = AtomicUsize::new(0);
        // Until the other thread has ended: a listener that goes does refuse.
        let mut all = Vec::new();
        thread::scope(|scope| {
            scope.spawn(|| {
                while done.load(Ordering::Acquire) < ROUNDS {
                    let path = name(done.load(Ordering::Acquire));
                    if let Err(e) = connect(&path) {
                        // Nobody accepts, so a round that takes long fills the queue of the name
                        // before.
                        let good = is_backlog_full(&e)
                            || e.to_string().contains("there is no such socket");
                        assert!(good, "{e}");
                    }
                }
            });
            for round in 0..ROUNDS {
                all.push(Listener::bind(&at(name(round))).expect("bind"));
                done.store(round + 1, Ordering::Release);
            }
        });
    }

    #[test]
    fn a_bind_that_fails_half_way_leaves_nothing() {
        in_own_process(
            "os::socket::listener::tests::a_bind_that_fails_half_way_leaves_nothing",
            || {
                let dir = ScratchDir::new();
                let start = rustix::io::fcntl_dupfd_cloexec(
                    open_directory(&dir).expect("the directory"),
                    0,
                )
                .expect("dup");
                let start = start.as_raw_fd();
                let mut failed = 0;
                for free in 0.. {
                    scratch::limit_files_to(start + free);
                    match Listener::bind(&at(dir.join("s"))) {
                        Ok(_) => break,
                        Err(e) => {
                            failed += 1;
                            assert!(
                                e.to_string().ends_with(
                                    "; raise RLIMIT_NOFILE (`ulimit -n`) or hold fewer files"
                                ),
                                "{e}"
                            );
                            scratch::limit_files_to(start + 100);
                            assert!(dir.names().is_empty(), "{:?}", dir.names());
                        }
                    }
                }
                assert!(
                    failed >= 3,
                    "the directory, the lock and the socket each need a descriptor"
                );
            },
        );
    }

    #[test]
    fn without_descriptors_a_connection_is_closed_and_the_listener_lives_on() {
        in_own_process(
            "os::socket::listener::tests::without_descriptors_a_connection_is_closed_and_the_listener_lives_on",
            || {
                let dir = ScratchDir::new();
                let listener = Listener::bind(&at(dir.join("s"))).expect("bind");
                let first = connect(listener.path()).expect("connect");
                let second = connect(listener.path()).expect("connect");
                let free = rustix::io::fcntl_dupfd_cloexec(&first, 0).expect("dup");
                scratch::limit_files_to(free.as_raw_fd() + 1);
                for connection in [&first, &second] {
                    let mut refused = false;
                    let error = listener
                        .accept(|_| refused = true)
                        .expect_err("no descriptor left");
                    assert!(refused);
                    assert_eq!(
                        error.to_string(),
                        "accept failed; raise RLIMIT_NOFILE (`ulimit -n`) or hold fewer files"
                    );
                    assert!(has_hung_up(connection));
                }
                assert!(
                    listener.accept(|_| {}).is_ok_and(|none| none.is_none()),
                    "the queue is empty"
                );
                drop((first, second, free));
                let _third = connect(listener.path()).expect("connect");
                assert!(listener.accept(|_| {}).expect("accept").is_some());
            },
        );
    }
}

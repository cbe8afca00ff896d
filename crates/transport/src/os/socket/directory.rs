//! The default directory of sockets, and the removal of those whose owner died.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use gpu_api::{Error, Result};
use rustix::io::Errno;

use super::bind_lock::BindLock;
use super::packet_socket::{MOST_PATH, address_of, new_socket, open_directory, system_error};

const RUNTIME_DIR: &str = "runtime directory";
const MUST: &str =
    "a directory of this user that no other may enter (mode 0700); name one in GPU_IPC_RUNTIME_DIR";
/// The most bytes of its path: behind it come a slash and a session's 32 digits with `.sock`.
const MOST_BYTES: usize = MOST_PATH - 38;
const MUST_BE_SHORT: &str = "at most 69 bytes long, so that its sockets have addresses; name another in GPU_IPC_RUNTIME_DIR";
const _: () = assert!(MOST_BYTES == 69);

/// Returns the directory in which sessions put their sockets, and makes it where it is missing.
///
/// The first of these that is set: what the caller says, `$GPU_IPC_RUNTIME_DIR`,
/// `$XDG_RUNTIME_DIR/gpu-ipc`, `/tmp/gpu-ipc-<uid>`. `$XDG_RUNTIME_DIR` counts only if it is the
/// absolute path of a directory. Only the last component is made.
///
/// # Errors
///
/// [`Error::Invalid`] when it is a symbolic link, no directory, of another user, or open to others:
/// a user that can write there could answer in a producer's place; when its path is so long that a
/// socket in it has no address; or when it cannot be made because of what lies above it.
/// [`Error::System`] for what else the system refuses.
pub fn runtime_dir(explicit: Option<&Path>) -> Result<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let dir = choose(
        explicit,
        env::var_os("GPU_IPC_RUNTIME_DIR"),
        env::var_os("XDG_RUNTIME_DIR"),
        uid,
    );
    let dir = std::path::absolute(&dir).map_err(|e| Error::system("getcwd", MUST, e))?;
    let bytes = dir.as_os_str().len();
    if bytes > MOST_BYTES {
        let got = format!("{} ({bytes} bytes)", dir.display());
        return Err(Error::invalid(RUNTIME_DIR, got, MUST_BE_SHORT));
    }
    make_private(&dir, uid)?;
    Ok(dir)
}

fn choose(
    explicit: Option<&Path>,
    ours: Option<OsString>,
    xdg: Option<OsString>,
    uid: u32,
) -> PathBuf {
    let set = |value: Option<OsString>| value.filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(dir) = explicit {
        return dir.into();
    }
    if let Some(dir) = set(ours) {
        return dir;
    }
    // The XDG specification wants a relative value ignored. A container often has the variable and
    // not the directory.
    match set(xdg).filter(|dir| dir.is_absolute() && dir.is_dir()) {
        Some(dir) => dir.join("gpu-ipc"),
        None => PathBuf::from(format!("/tmp/gpu-ipc-{uid}")),
    }
}

fn make_private(dir: &Path, uid: u32) -> Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(not_made(dir, &e)),
    }
    // Of the thing itself: a link in /tmp may be somebody else's, whatever it points to.
    let is = fs::symlink_metadata(dir).map_err(|e| Error::system("lstat", MUST, e))?;
    let wrong = if is.is_symlink() {
        "a symbolic link".into()
    } else if !is.is_dir() {
        "not a directory".into()
    } else if is.uid() != uid {
        format!("of user {}, not {uid}", is.uid())
    } else if is.mode() & 0o077 != 0 {
        format!("of mode {:04o}", is.mode() & 0o7777)
    } else {
        return Ok(());
    };
    Err(Error::invalid(
        RUNTIME_DIR,
        format!("{}, which is {wrong}", dir.display()),
        MUST,
    ))
}

fn not_made(dir: &Path, e: &io::Error) -> Error {
    let errno = Errno::from_io_error(e).unwrap_or(Errno::IO);
    let got = |why| format!("{}, which cannot be made: {why}", dir.display());
    match errno {
        // Only the last component is made, so it is the place that is wrong.
        Errno::NOENT | Errno::NOTDIR => Error::invalid(
            RUNTIME_DIR,
            got("there is no directory to make it in"),
            MUST,
        ),
        Errno::ACCESS | Errno::PERM | Errno::ROFS => Error::invalid(
            RUNTIME_DIR,
            got("this user may not write where it should be"),
            MUST,
        ),
        errno => system_error("mkdir", errno),
    }
}

/// Removes from a runtime directory the sockets of sessions whose process is dead, and returns how
/// many.
///
/// A session's socket goes when a connect to it is refused: its name appears only once it listens,
/// and is never used again. What a producer left that died while it bound a socket goes when nobody
/// holds the lock on it.
///
/// # Errors
///
/// [`Error::System`] when the directory cannot be read or no file descriptor is left. What cannot
/// be removed stays.
pub fn sweep_stale(dir: &Path) -> Result<usize> {
    let directory = open_directory(dir)?;
    let mut removed = 0;
    let mut unfinished = BTreeSet::new();
    for entry in
        fs::read_dir(dir).map_err(|e| Error::system("reading the runtime directory", MUST, e))?
    {
        let entry = entry.map_err(|e| Error::system("reading the runtime directory", MUST, e))?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if let Some(id) = BindLock::id_in(name) {
            unfinished.insert(id);
        } else if is_session_socket(name) && probe(&entry.path())? == Probe::Dead {
            removed += usize::from(fs::remove_file(entry.path()).is_ok());
        }
    }
    for id in unfinished {
        if let Some(lock) = BindLock::try_take(&directory, id)? {
            removed += usize::from(lock.remove_unfinished().is_ok());
        }
    }
    Ok(removed)
}

/// Lists the sessions' sockets in a runtime directory, in the order of their names.
///
/// # Errors
///
/// [`Error::System`] when the directory cannot be read.
pub fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e| Error::system("reading the runtime directory", MUST, e);
    let mut sockets = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_name().to_str().is_some_and(is_session_socket) {
            sockets.push(entry.path());
        }
    }
    sockets.sort();
    Ok(sockets)
}

fn is_session_socket(name: &str) -> bool {
    let hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    name.strip_suffix(".sock")
        .is_some_and(|id| id.len() == 32 && id.bytes().all(hex))
}

/// What there is at a path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Probe {
    /// Nothing.
    Absent,
    /// Something other than a socket.
    NoSocket,
    /// A socket without a listener.
    Dead,
    /// A socket with a listener, or an undecided one.
    Alive,
}

/// Finds out whether a producer listens at a path. It sees a connection that ends at once.
pub(super) fn probe(path: &Path) -> Result<Probe> {
    match fs::symlink_metadata(path) {
        Ok(is) if is.file_type().is_socket() => {}
        Ok(_) => return Ok(Probe::NoSocket),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Probe::Absent),
        Err(e) => {
            return Err(system_error(
                "lstat",
                Errno::from_io_error(&e).unwrap_or(Errno::IO),
            ));
        }
    }
    let socket = new_socket()?;
    // A full backlog says EAGAIN, and another kind of socket EPROTOTYPE: somebody is there.
    match rustix::net::connect(&socket, &address_of(path)?) {
        Err(Errno::CONNREFUSED) => Ok(Probe::Dead),
        Err(Errno::NOENT) => Ok(Probe::Absent),
        _ => Ok(Probe::Alive),
    }
}

#[cfg(test)]
mod tests {
    use super::super::scratch::{ScratchDir, in_own_process, inside, run_inside};
    use super::super::{Endpoint, Listener};
    use super::*;
    use crate::wire::descriptor::SessionId;
    use rustix::process::{Signal, getpid, kill_process};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixDatagram;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn the_first_that_is_set_decides() {
        let value = |text: &str| Some(OsString::from(text));
        let scratch = ScratchDir::new();
        let there = scratch.to_str().expect("a plain name").to_owned();
        let below = format!("{there}/gpu-ipc");
        let (ours, xdg) = (value("/ours"), value(&there));
        let cases = [
            (Some("/asked"), ours.clone(), xdg.clone(), "/asked"),
            (None, ours, xdg.clone(), "/ours"),
            (None, value(""), xdg.clone(), &below),
            (None, None, xdg, &below),
            (None, None, value("/no such place"), "/tmp/gpu-ipc-7"),
            (None, None, value("relative"), "/tmp/gpu-ipc-7"),
            (None, None, value(""), "/tmp/gpu-ipc-7"),
            (None, None, None, "/tmp/gpu-ipc-7"),
        ];
        for (asked, ours, xdg, expected) in cases {
            assert_eq!(
                choose(asked.map(Path::new), ours, xdg, 7),
                Path::new(expected)
            );
        }
    }

    #[test]
    fn a_private_directory_is_made_and_found_again() {
        let dir = ScratchDir::new();
        let asked = dir.join("run");
        for _ in 0..2 {
            assert_eq!(
                runtime_dir(Some(&asked)).expect("a runtime directory"),
                asked
            );
            assert_eq!(fs::metadata(&asked).expect("stat").mode() & 0o7777, 0o700);
        }
        let error =
            runtime_dir(Some(&dir.join("a/b"))).expect_err("only the last component is made");
        let expected = format!(
            "runtime directory is {}, which cannot be made: there is no",
            dir.join("a/b").display()
        );
        assert!(error.to_string().starts_with(&expected), "{error}");
    }

    #[test]
    fn a_path_that_leaves_no_room_for_a_socket_is_refused() {
        let dir = ScratchDir::new();
        let longest = dir.join("x".repeat(MOST_BYTES - dir.as_os_str().len() - 1));
        let runtime = runtime_dir(Some(&longest)).expect("the longest that does");
        let endpoint = Endpoint::Runtime {
            dir: runtime,
            session: SessionId([7; 16]),
        };
        Listener::bind(&endpoint).expect("a socket there has an address");
        let error =
            runtime_dir(Some(Path::new(&format!("{}y", longest.display())))).expect_err("too long");
        let text = error.to_string();
        assert!(
            text.contains("(70 bytes)") && text.contains("GPU_IPC_RUNTIME_DIR"),
            "{text}"
        );
    }

    #[test]
    fn a_directory_that_others_could_use_is_refused() {
        let dir = ScratchDir::new();
        let uid = rustix::process::geteuid().as_raw();
        let own = dir.join("own");
        runtime_dir(Some(&own)).expect("a runtime directory");

        symlink(&own, dir.join("link")).expect("a link");
        fs::write(dir.join("file"), "").expect("a file");
        fs::create_dir(dir.join("open")).expect("a directory");
        fs::set_permissions(dir.join("open"), fs::Permissions::from_mode(0o710)).expect("chmod");
        let cases = [
            ("link", uid, "a symbolic link".to_owned()),
            ("file", uid, "not a directory".to_owned()),
            ("open", uid, "of mode 0710".to_owned()),
            ("own", uid + 1, format!("of user {uid}, not {}", uid + 1)),
        ];
        for (name, uid, why) in cases {
            let path = dir.join(name);
            let error = make_private(&path, uid).expect_err(name);
            let expected = format!(
                "runtime directory is {}, which is {why}, but must be {MUST}",
                path.display()
            );
            assert_eq!(error.to_string(), expected);
        }
    }

    fn endpoint(dir: &Path, byte: u8) -> Endpoint {
        Endpoint::Runtime {
            dir: dir.into(),
            session: SessionId([byte; 16]),
        }
    }

    #[test]
    fn only_what_the_dead_left_is_swept() {
        in_own_process(
            "os::socket::directory::tests::only_what_the_dead_left_is_swept",
            || {
                let dir = ScratchDir::new();
                let alive = Listener::bind(&endpoint(&dir, 1)).expect("bind");
                drop(Listener::bind(&endpoint(&dir, 2)).expect("bind"));
                fs::write(dir.join(format!("{}.sock", SessionId([3; 16]))), "").expect("a file");
                drop(UnixDatagram::bind(dir.join("other.sock")).expect("bind"));
                let before = dir.names();
                assert_eq!(sweep_stale(&dir).expect("sweep"), 1);
                let gone = format!("{}.sock", SessionId([2; 16]));
                assert_eq!(
                    dir.names(),
                    before
                        .into_iter()
                        .filter(|name| *name != gone)
                        .collect::<Vec<_>>()
                );
                assert_eq!(sweep_stale(&dir).expect("sweep"), 0);
                assert!(
                    alive.accept(|_| {}).expect("accept").is_some(),
                    "the sweep asked whether anybody is there"
                );
            },
        );
    }

    #[test]
    fn a_socket_with_a_full_backlog_is_not_swept() {
        let dir = ScratchDir::new();
        let path = dir.join(format!("{}.sock", SessionId([1; 16])));
        let full = new_socket().expect("a socket");
        rustix::net::bind(&full, &address_of(&path).expect("an address")).expect("bind");
        rustix::net::listen(&full, 0).expect("listen");
        let mut waiting = Vec::new();
        while let Ok(connection) = super::super::connect::connect(&path) {
            waiting.push(connection);
        }
        assert_eq!(sweep_stale(&dir).expect("sweep"), 0);
        assert!(path.exists());
    }

    #[test]
    fn an_unfinished_socket_is_swept_only_without_its_lock() {
        let dir = ScratchDir::new();
        let directory = open_directory(&dir).expect("the directory");
        let lock = BindLock::try_take(&directory, 0xab)
            .expect("try")
            .expect("the lock");
        drop(UnixDatagram::bind(dir.join(".gpu-ipc-000000ab.tmp")).expect("bind"));
        assert_eq!(sweep_stale(&dir).expect("sweep"), 0);
        assert_eq!(
            dir.names(),
            [".gpu-ipc-000000ab.lock", ".gpu-ipc-000000ab.tmp"]
        );
        drop(lock);
        assert_eq!(sweep_stale(&dir).expect("sweep"), 1);
        assert!(dir.names().is_empty(), "{:?}", dir.names());
    }

    #[test]
    fn what_a_producer_left_that_was_killed_while_it_bound_is_swept() {
        if let Some(dir) = inside() {
            let directory = open_directory(&dir).expect("the directory");
            let _lock = BindLock::try_take(&directory, 0xab)
                .expect("try")
                .expect("the lock");
            let _socket = UnixDatagram::bind(dir.join(".gpu-ipc-000000ab.tmp")).expect("bind");
            kill_process(getpid(), Signal::KILL).expect("kill");
        }
        let dir = ScratchDir::new();
        let name = "os::socket::directory::tests::what_a_producer_left_that_was_killed_while_it_bound_is_swept";
        let (status, text) = run_inside(name, &dir);
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{text}");
        assert_eq!(
            dir.names(),
            [".gpu-ipc-000000ab.lock", ".gpu-ipc-000000ab.tmp"]
        );
        assert_eq!(sweep_stale(&dir).expect("sweep"), 1);
        assert!(dir.names().is_empty(), "{:?}", dir.names());
    }
}

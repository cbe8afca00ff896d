//! Links, files and other users' things in the way of a session's socket: it says so, and touches
//! none of them.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use gpu_ipc::{Participant, Session};
use harness::surroundings::NOBODY;
use harness::{WATCHDOG, wait_until};

use crate::users::{Role, Said, nobody};
use crate::{Case, open_gpu};

pub const CASES: &[Case] = &[
    (
        "directory::a_link_in_place_of_the_runtime_directory",
        linked_directory,
    ),
    ("directory::links_in_place_of_the_socket", linked_socket),
    (
        "directory::links_in_place_of_the_lock_and_the_unfinished_socket",
        linked_lock,
    ),
    ("directory::another_kind_of_socket", other_socket),
];

/// Needs another user.
pub const USERS: &[Case] = &[
    (
        "directory::another_users_runtime_directory",
        others_directory,
    ),
    (
        "directory::what_another_user_laid_in_a_directory_for_all",
        laid_by_another,
    ),
];

const VICTIM: &str = "what somebody else needs";

/// A directory with a file that must stay as it is.
struct Scene {
    dir: tempfile::TempDir,
    victim: PathBuf,
}

impl Scene {
    fn new() -> Scene {
        let dir = tempfile::tempdir().expect("a directory");
        let victim = dir.path().join("victim");
        fs::write(&victim, VICTIM).expect("ours");
        fs::set_permissions(&victim, fs::Permissions::from_mode(0o640)).expect("ours");
        Scene { dir, victim }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    #[track_caller]
    fn check(&self) {
        assert_eq!(
            fs::read_to_string(&self.victim).expect("it is still there"),
            VICTIM
        );
        let is = fs::symlink_metadata(&self.victim).expect("it is still there");
        assert_eq!(is.mode() & 0o7777, 0o640, "its mode was changed");
    }
}

fn open_at(path: &Path) -> Result<Session, String> {
    Session::builder(open_gpu())
        .socket(path)
        .open()
        .map_err(|error| error.to_string())
}

fn open_in(dir: &Path) -> Result<Session, String> {
    Session::builder(open_gpu())
        .runtime_dir(dir)
        .open()
        .map_err(|error| error.to_string())
}

/// Ends a session, and waits until its name is free: its thread removes it.
fn close(session: Session) {
    let path = session.socket_path().to_owned();
    assert!(session.shutdown(WATCHDOG).clean);
    wait_until("the socket's name to go", || {
        fs::symlink_metadata(&path).is_err()
    });
}

/// The names that a session uses beside its socket's while it binds it.
fn beside(name: &str) -> (String, String) {
    let id = !name.bytes().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 & 0u32.wrapping_sub(crc & 1))
        })
    });
    (
        format!(".gpu-ipc-{id:08x}.lock"),
        format!(".gpu-ipc-{id:08x}.tmp"),
    )
}

fn linked_directory() {
    let scene = Scene::new();
    let real = scene.path("real");
    open_in(&real).expect("a fresh one is made");
    for to in [&real, &scene.victim, &scene.path("nothing")] {
        let link = scene.path("link");
        symlink(to, &link).expect("a link");
        let why = open_in(&link).expect_err("a link");
        assert!(
            why.contains("a symbolic link") && why.contains("mode 0700"),
            "{why}"
        );
        fs::remove_file(link).expect("ours");
    }
    let why = open_in(&scene.victim).expect_err("a file");
    assert!(why.contains("not a directory"), "{why}");
    scene.check();
}

fn linked_socket() {
    let scene = Scene::new();
    let path = scene.path("s");
    // To a file, to nothing, to a live session's socket; and a second name of the file.
    let live = open_at(&scene.path("live")).expect("a session");
    for to in [
        scene.victim.clone(),
        scene.path("nothing"),
        live.socket_path().to_owned(),
    ] {
        symlink(&to, &path).expect("a link");
        let why = open_at(&path).expect_err("something is there");
        assert!(
            why.contains("not a socket") && why.contains("choose another path"),
            "{why}"
        );
        assert_eq!(fs::read_link(&path).expect("the link is untouched"), to);
        fs::remove_file(&path).expect("ours");
    }
    fs::hard_link(&scene.victim, &path).expect("a link");
    let why = open_at(&path).expect_err("something is there");
    assert!(why.contains("not a socket"), "{why}");
    fs::remove_file(&path).expect("ours");
    let why = open_at(live.socket_path()).expect_err("somebody listens");
    assert!(why.contains("where a process listens already"), "{why}");
    Participant::builder(live.gpu().clone())
        .connect(live.socket_path())
        .expect("the live one is untouched");
    open_at(&path).expect("a free path");
    scene.check();
}

fn linked_lock() {
    let (lock, unfinished) = beside("s");
    let scene = Scene::new();
    let path = scene.path("s");
    // A lock that is a link is not followed.
    symlink(&scene.victim, scene.path(&lock)).expect("a link");
    let why = open_at(&path).expect_err("a link");
    assert!(why.contains("lock file"), "{why}");
    scene.check();
    fs::remove_file(scene.path(&lock)).expect("ours");
    // A second name of a file is locked, nothing is written, and the name goes.
    fs::hard_link(&scene.victim, scene.path(&lock)).expect("a link");
    close(open_at(&path).expect("a second name of a file excludes nobody"));
    scene.check();
    // What lies where the unfinished socket goes is a dead producer's: the name goes, what it leads
    // to stays.
    for hard in [false, true] {
        let at = scene.path(&unfinished);
        if hard {
            fs::hard_link(&scene.victim, &at).expect("a link")
        } else {
            symlink(&scene.victim, &at).expect("a link")
        }
        close(open_at(&path).expect("the name is made free"));
        assert!(
            fs::symlink_metadata(&at).is_err(),
            "the name is still there"
        );
        scene.check();
    }
    // A directory is not removed.
    fs::create_dir(scene.path(&unfinished)).expect("ours");
    let why = open_at(&path).expect_err("a directory");
    assert!(why.contains("unlink"), "{why}");
    scene.check();
}

fn other_socket() {
    let scene = Scene::new();
    let path = scene.path("s");
    // Somebody listens: another kind of socket is not taken for a dead producer's.
    let listener = UnixListener::bind(&path).expect("bound");
    let why = open_at(&path).expect_err("somebody listens");
    assert!(why.contains("where a process listens already"), "{why}");
    let error = Participant::builder(open_gpu())
        .connect(&path)
        .expect_err("it is no session");
    assert!(error.to_string().contains("; "), "no remedy: {error}");
    drop(listener);
    scene.check();
}

fn others_directory() {
    let scene = Scene::new();
    let theirs = scene.path("theirs");
    fs::create_dir(&theirs).expect("ours");
    fs::set_permissions(&theirs, fs::Permissions::from_mode(0o700)).expect("ours");
    std::os::unix::fs::chown(&theirs, Some(NOBODY), Some(NOBODY)).expect("root may");
    let why = open_in(&theirs).expect_err("another user's");
    assert!(why.contains("of user 65534, not 0"), "{why}");
    assert_eq!(fs::read_dir(&theirs).expect("it is still there").count(), 0);
    scene.check();
}

/// Lays links and files where a session at `path` would put its own, as another user.
pub fn lay(path: &Path) {
    let (dir, name) = (
        path.parent().expect("a directory"),
        path.file_name().expect("a name"),
    );
    let name = name.to_str().expect("a plain name");
    let (lock, unfinished) = beside(name);
    let victim = dir.join("victim");
    let laid = match name {
        "lock" => fs::write(dir.join(lock), ""),
        "locklink" => symlink(&victim, dir.join(lock)),
        "unfinished" => symlink(&victim, dir.join(unfinished)),
        "socket" => symlink(&victim, path),
        // A listener of its own, which dies with this process.
        _ => UnixListener::bind(path).map(drop),
    };
    laid.expect("the directory is for all");
}

/// In a directory like /tmp, where anybody makes names and nobody removes another's.
fn laid_by_another() {
    let scene = Scene::new();
    fs::set_permissions(scene.dir.path(), fs::Permissions::from_mode(0o1777)).expect("ours");
    for name in ["lock", "locklink", "unfinished", "socket", "listener"] {
        let path = scene.path(name);
        assert_eq!(nobody(&Role::Lay { path: path.clone() }), Said::Laid);
        match open_at(&path) {
            // Root may remove what is in its way; a plain user may not.
            Ok(session) => {
                let is = fs::symlink_metadata(session.socket_path()).expect("it listens");
                assert_eq!(
                    is.uid(),
                    0,
                    "another user's socket was taken for the session's"
                );
                Participant::builder(session.gpu().clone())
                    .connect(&path)
                    .expect("it is the session's");
            }
            Err(why) => assert!(
                why.contains("; ") || why.contains(", but must be "),
                "no remedy: {why}"
            ),
        }
        scene.check();
    }
}

//! Limits of this process, shared memory, and where sessions put their sockets.

use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Resource, geteuid, getrlimit};

use super::check::Check;
use crate::sessions::brokers::{BrokerState, Depth, SeenBroker, look, summary};
use crate::size;

/// Descriptors below which no session can be opened beside what a program has open.
const TOO_FEW_DESCRIPTORS: u64 = 64;
/// Descriptors below which a session of a few dozen participants runs out.
const FEW_DESCRIPTORS: u64 = 1024;
/// The longest runtime directory: a socket's address has 107 bytes, and 38 are a slash and the
/// socket's name.
const LONGEST_DIR: usize = 69;
/// How long a broker has to answer.
const GLANCE: Duration = Duration::from_secs(2);
/// What Docker gives, and what runs out there.
const SMALL_SHM: u64 = 64 << 20;

/// Looks at all of them.
pub fn checks() -> Vec<Check> {
    vec![
        descriptors(),
        locked_memory(),
        shm(Path::new("/dev/shm")),
        runtime_dir(),
        broker(),
    ]
}

/// The broker of this user: one that is stopped, or stuck in the driver, bars its successor.
fn broker() -> Check {
    let name = "broker";
    let Some(SeenBroker { dir, state }) = look(None, Depth::Sums, GLANCE) else {
        return Check::absent(name, "no broker has the default directory");
    };
    let dir = dir.display();
    match state {
        BrokerState::Serves(listing) if listing.keeper == "absent" => {
            Check::warning(name, format!("{dir}: {}", summary(&listing)))
                .why("commits wait until a keeper is there, and the broker's death would lose the objects")
                .remedy(format!("start a keeper: gpu-ipc keep --dir {dir} -- gpu-ipc broker --dir {dir}"))
        }
        BrokerState::Serves(listing) => Check::ok(name, format!("{dir}: {}", summary(&listing))),
        BrokerState::Hung(pid) => Check::warning(name, format!("{dir}: process {pid} does not answer"))
            .why(
                "it is stopped, or stuck in the driver; it has the directory's lock, so its successor waits for its \
                 end",
            )
            .remedy(format!("let it go on: kill -CONT {pid}; or end it: kill -KILL {pid}")),
        BrokerState::Unknown(why) => Check::warning(name, format!("{dir}: {why}")),
    }
}

fn limit(value: Option<u64>) -> String {
    value.map_or_else(|| "unlimited".into(), |value| value.to_string())
}

fn descriptors() -> Check {
    let set = getrlimit(Resource::Nofile);
    judge_descriptors(set.current, set.maximum)
}

fn judge_descriptors(soft: Option<u64>, hard: Option<u64>) -> Check {
    let (name, found) = (
        "RLIMIT_NOFILE",
        format!("soft {}, hard {}", limit(soft), limit(hard)),
    );
    let remedy = "raise it: ulimit -n 65536, LimitNOFILE= in a systemd unit, --ulimit nofile= for a container";
    match soft {
        Some(soft) if soft < TOO_FEW_DESCRIPTORS => Check::failed(name, found)
            .why("a session and its participants need a few dozen descriptors at least")
            .remedy(remedy)
            .needed(),
        Some(soft) if soft < FEW_DESCRIPTORS => Check::warning(name, found)
            .why("each participant takes a few descriptors in the producer, each region one on both sides")
            .remedy(remedy),
        _ => Check::ok(name, found),
    }
}

fn locked_memory() -> Check {
    let set = getrlimit(Resource::Memlock);
    let show = |value: Option<u64>| value.map_or_else(|| "unlimited".into(), size::show);
    let found = format!("soft {}, hard {}", show(set.current), show(set.maximum));
    Check::ok("RLIMIT_MEMLOCK", found)
}

fn shm(path: &Path) -> Check {
    let name = "/dev/shm";
    let why = "gpu-ipc itself does not use it, but frameworks and NCCL in the same process do";
    match rustix::fs::statvfs(path) {
        Ok(is) => {
            let (size, free) = (
                is.f_blocks.saturating_mul(is.f_frsize),
                is.f_bavail.saturating_mul(is.f_frsize),
            );
            let found = format!("{}, {} free", size::show(size), size::show(free));
            if size <= SMALL_SHM {
                Check::warning(name, found)
                    .why(why)
                    .remedy("make it larger: --shm-size=8g, or --ipc=host")
            } else {
                Check::ok(name, found)
            }
        }
        Err(error) => Check::absent(name, error.to_string())
            .why(why)
            .remedy("mount a tmpfs there"),
    }
}

/// Where sessions put their sockets: as the library chooses, named by the variable that decides and
/// not by its value.
fn runtime_dir() -> Check {
    let set = |name: &str| {
        env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let uid = geteuid().as_raw();
    let fallback = |why: &str| {
        let dir = format!("/tmp/gpu-ipc-{uid}");
        (
            PathBuf::from(&dir),
            format!("{dir} (XDG_RUNTIME_DIR {why})"),
        )
    };
    let (dir, shown) = match (set("GPU_IPC_RUNTIME_DIR"), set("XDG_RUNTIME_DIR")) {
        (Some(dir), _) => (dir, "$GPU_IPC_RUNTIME_DIR".to_owned()),
        (None, Some(dir)) if !dir.is_absolute() => {
            fallback("is a relative path, which does not count")
        }
        (None, Some(dir)) if !dir.is_dir() => fallback("names no directory"),
        (None, Some(dir)) => (dir.join("gpu-ipc"), "$XDG_RUNTIME_DIR/gpu-ipc".to_owned()),
        (None, None) => fallback("is not set"),
    };
    let dir = std::path::absolute(&dir).unwrap_or(dir);
    judge_runtime_dir(&dir, &shown, uid)
}

fn judge_runtime_dir(dir: &Path, shown: &str, uid: u32) -> Check {
    let failed = |found: String| {
        Check::failed("runtime directory", format!("{shown}: {found}"))
            .why(
                "sessions without a given path put their sockets there; another user who can write there could \
                 answer in their place",
            )
            .remedy("name a directory of this user with mode 0700 in GPU_IPC_RUNTIME_DIR")
            .needed()
    };
    let bytes = dir.as_os_str().len();
    if bytes > LONGEST_DIR {
        return Check::failed("runtime directory", format!("{shown}: {bytes} bytes long"))
            .why("a socket's address has 107 bytes, of which a session's own name takes 38")
            .remedy("name a directory of at most 69 bytes in GPU_IPC_RUNTIME_DIR")
            .needed();
    }
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return failed(error.to_string());
        }
        _ => {}
    }
    // The path itself, not what a link points to: its creator decides where it leads.
    let is = match fs::symlink_metadata(dir) {
        Ok(is) => is,
        Err(error) => return failed(error.to_string()),
    };
    if !is.is_dir() {
        failed("no directory".into())
    } else if is.uid() != uid {
        failed(format!("of user {}, not {uid}", is.uid()))
    } else if is.mode() & 0o077 != 0 {
        failed(format!("mode {:04o}: others may enter", is.mode() & 0o7777))
    } else if let Err(error) = rustix::fs::access(dir, rustix::fs::Access::WRITE_OK) {
        failed(error.to_string())
    } else {
        Check::ok(
            "runtime directory",
            format!("{shown}, mode {:04o}", is.mode() & 0o7777),
        )
        .needed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::check::CheckState;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn few_descriptors_are_a_warning() {
        assert!(judge_descriptors(Some(20), None).is_fatal());
        assert_eq!(
            judge_descriptors(Some(256), None).state,
            CheckState::Warning
        );
        assert_eq!(judge_descriptors(Some(1024), None).state, CheckState::Ok);
        let unlimited = judge_descriptors(None, None);
        assert_eq!(
            (unlimited.state, &*unlimited.found),
            (CheckState::Ok, "soft unlimited, hard unlimited")
        );
    }

    #[test]
    fn a_runtime_directory_must_be_private() {
        let scratch = tempfile::tempdir().expect("a directory");
        let uid = geteuid().as_raw();
        let state = |dir: &Path, uid| judge_runtime_dir(dir, "x", uid);
        let own = scratch.path().join("own");
        for _ in 0..2 {
            assert_eq!(state(&own, uid).state, CheckState::Ok);
        }
        assert!(state(&own, uid + 1).is_fatal());
        fs::set_permissions(&own, fs::Permissions::from_mode(0o750)).expect("ours");
        assert!(state(&own, uid).found.contains("0750"));
        fs::write(scratch.path().join("file"), "").expect("a file");
        assert!(state(&scratch.path().join("file"), uid).is_fatal());
        assert!(state(&scratch.path().join("a/b"), uid).is_fatal());
        let long = state(Path::new(&format!("/tmp/{}", "x".repeat(105))), uid);
        assert!(
            long.is_fatal() && long.found.contains("110 bytes"),
            "{long:?}"
        );
        assert!(
            long.remedy
                .is_some_and(|remedy| remedy.contains("GPU_IPC_RUNTIME_DIR"))
        );
    }

    #[test]
    fn a_missing_shm_is_no_failure() {
        let check = shm(Path::new("/proc/no such place"));
        assert_eq!(check.state, CheckState::Absent);
        assert!(check.remedy.is_some());
    }
}

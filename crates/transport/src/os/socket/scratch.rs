//! What the tests of sockets stand on: a directory of their own, and a process of their own.

use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// An empty directory that goes with its contents.
pub(super) struct ScratchDir(PathBuf);

impl ScratchDir {
    pub(super) fn new() -> ScratchDir {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "gpu-ipc-test-{}-{}",
            std::process::id(),
            MADE.fetch_add(1, Ordering::Relaxed)
        );
        let dir = std::env::temp_dir().join(name);
        fs::create_dir(&dir).expect("a directory");
        ScratchDir(dir)
    }

    /// Returns the sorted names in it.
    pub(super) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).expect("its entries");
        let mut names: Vec<String> = entries
            .map(|e| {
                e.expect("an entry")
                    .file_name()
                    .into_string()
                    .expect("a plain name")
            })
            .collect();
        names.sort();
        names
    }
}

impl Deref for ScratchDir {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const INSIDE: &str = "GPU_IPC_TEST_INSIDE";

/// Runs a test's body in a process that runs nothing else: the test `name` of this binary, once
/// more.
///
/// For tests that limit the process, and for those that expect a closed descriptor to be closed:
/// what another test forks at that moment has a copy of it.
pub(in crate::os) fn in_own_process(name: &str, body: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        return body();
    }
    let (status, text) = run_inside(name, Path::new(""));
    assert!(status.success() && text.contains("1 passed"), "{text}");
}

/// Runs the test `name` of this binary with a directory to work in, and returns how it ended.
pub(super) fn run_inside(name: &str, dir: &Path) -> (ExitStatus, String) {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    let output = command
        .args(["--exact", name, "--nocapture"])
        .env(INSIDE, dir)
        .output()
        .expect("this test again");
    (
        output.status,
        String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr),
    )
}

/// Returns the directory that `run_inside` gave, inside of it.
pub(super) fn inside() -> Option<PathBuf> {
    std::env::var_os(INSIDE).map(PathBuf::from)
}

/// Leaves this process only descriptors below `limit`, until the next call.
pub(in crate::os) fn limit_files_to(limit: i32) {
    let current = Some(u64::try_from(limit).expect("a limit"));
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current, maximum }).expect("setrlimit");
}

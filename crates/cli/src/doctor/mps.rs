//! Whether NVIDIA's Multi-Process Service is at work: several processes in one context of the
//! driver.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::check::Check;

/// The variable that says where the daemon keeps its pipes, and where they are when nobody says.
const VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";
const DEFAULT: &str = "/tmp/nvidia-mps";
/// What the kernel keeps of the daemons' names: 15 bytes.
const DAEMON: &str = "nvidia-cuda-mps";

/// Looks for the variable, the daemon's socket and its process.
pub fn check() -> Check {
    judge(
        env::var_os(VARIABLE),
        Path::new(DEFAULT),
        Path::new("/proc"),
    )
}

fn judge(variable: Option<OsString>, default: &Path, processes: &Path) -> Check {
    let name = "MPS";
    let variable = variable.filter(|directory| !directory.is_empty());
    let is_set = variable.is_some();
    let control = variable
        .map_or_else(|| default.to_owned(), PathBuf::from)
        .join("control");
    let mut signs = Vec::new();
    if is_set {
        signs.push(format!("{VARIABLE} is set"));
    }
    if control.exists() {
        signs.push("a control socket is there".to_owned());
    }
    if is_running(processes) {
        signs.push(format!("a process {DAEMON}* runs"));
    }
    if signs.is_empty() {
        return Check::ok(name, "not in use: every process has a context of its own");
    }
    let check = Check::warning(name, signs.join(", "));
    if control.exists() {
        check
            .why(
                "under MPS a death is no proof: the work of a killed process may go on in the daemon's context, so its \
                 blocks are never used again",
            )
            .remedy(format!(
                "stop the daemon (echo quit | nvidia-cuda-mps-control), or unset {VARIABLE} and start anew"
            ))
    } else {
        check
            .why("this process is not a client of a daemon, but others may be: under MPS a death proves nothing")
            .remedy(format!("start producers and consumers without MPS, or unset {VARIABLE}"))
    }
}

fn is_running(processes: &Path) -> bool {
    let Ok(entries) = fs::read_dir(processes) else {
        return false;
    };
    entries.flatten().any(|entry| {
        fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name.starts_with(DAEMON))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::check::CheckState;

    #[test]
    fn each_sign_is_named() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = |name: &str| scratch.path().join(name);
        for directory in ["none", "pipes", "idle/1", "busy/2"] {
            fs::create_dir_all(path(directory)).expect("a directory");
        }
        fs::write(path("pipes/control"), "").expect("a file");
        fs::write(path("idle/1/comm"), "nvidia-smi\n").expect("a file");
        fs::write(path("busy/2/comm"), "nvidia-cuda-mps\n").expect("a file");

        assert_eq!(
            judge(None, &path("none"), &path("idle")).state,
            CheckState::Ok
        );
        let set = judge(Some("".into()), &path("none"), &path("idle"));
        assert_eq!(set.state, CheckState::Ok, "an empty variable is none");
        let set = judge(Some(path("none").into()), &path("pipes"), &path("idle"));
        assert_eq!(
            (set.state, set.found),
            (CheckState::Warning, format!("{VARIABLE} is set"))
        );
        let runs = judge(None, &path("none"), &path("busy"));
        assert_eq!(runs.found, "a process nvidia-cuda-mps* runs");
        let client = judge(None, &path("pipes"), &path("idle"));
        assert_eq!(client.found, "a control socket is there");
        assert!(
            client
                .why
                .is_some_and(|why| why.contains("a death is no proof"))
        );
    }
}

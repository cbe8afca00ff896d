//! Whether the driver shares devices between processes in one context (the Multi-Process Service).
//!
//! Under MPS the death of a process proves nothing about its GPU work, so memory that it held is
//! never used again. The driver tells it of each device (`CU_DEVICE_ATTRIBUTE_MPS_ENABLED`, CUDA
//! 12.4 and later). Because an answer too many costs memory and one too few costs correctness, the
//! daemon's control file counts as well: a process whose `CUDA_MPS_PIPE_DIRECTORY`
//! (`/tmp/nvidia-mps` where it is not set) holds one becomes a client.

use std::env;
use std::path::{Path, PathBuf};

/// Where the daemon keeps its pipes when nobody says otherwise.
const DEFAULT_DIRECTORY: &str = "/tmp/nvidia-mps";

/// Says whether a daemon's control file is where this process would look for it.
pub(crate) fn daemon_answers() -> bool {
    let directory = env::var_os("CUDA_MPS_PIPE_DIRECTORY")
        .filter(|directory| !directory.is_empty())
        .map_or_else(|| PathBuf::from(DEFAULT_DIRECTORY), PathBuf::from);
    has_control_file(&directory)
}

fn has_control_file(directory: &Path) -> bool {
    directory.join("control").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_control_file_makes_a_daemon() {
        let directory = tempfile::tempdir().expect("a directory can be made");
        assert!(!has_control_file(directory.path()));
        std::fs::write(directory.path().join("control"), b"").expect("a file can be made");
        assert!(has_control_file(directory.path()));
    }
}

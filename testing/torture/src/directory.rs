//! The directory of a run.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The folder's name, before the number of the process that made it.
const FOLDER: &str = "gpu-ipc-torture-";

/// The directory of a run, which goes with it.
pub struct Dir(pub PathBuf);

impl Dir {
    /// Makes it, and removes those that nobody removed.
    pub fn new() -> Result<Dir, String> {
        sweep(&std::env::temp_dir());
        let path = std::env::temp_dir().join(format!("{FOLDER}{}", std::process::id()));
        let made = std::fs::DirBuilder::new().mode(0o700).create(&path);
        made.map_err(|e| format!("{} cannot be made: {e}", path.display()))?;
        Ok(Dir(path))
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Removes the folders of runs that were killed.
fn sweep(parent: &Path) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name
            .to_str()
            .and_then(|name| name.strip_prefix(FOLDER))
            .and_then(|pid| pid.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // Another user's stays.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

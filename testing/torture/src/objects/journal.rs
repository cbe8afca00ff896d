//! What happened in a run, in order: every process appends lines to one file, with the logs of
//! brokers and keepers between them. A finding is explained by its last lines.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use gpu_ipc_cli::log::stamp;

/// Lines of which a finding is told.
const LAST: usize = 600;

/// A way to the file.
pub struct Journal {
    file: File,
    who: String,
}

impl Journal {
    /// Opens the file of a run, as one of its processes.
    ///
    /// # Errors
    ///
    /// The system's error.
    pub fn open(dir: &Path, who: String) -> io::Result<Journal> {
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .open(path(dir))?;
        Ok(Journal { file, who })
    }

    /// Appends a line.
    pub fn note(&self, what: &str) {
        // One write: lines of other processes stand before or behind it. A full disk is no finding.
        let _ = (&self.file).write_all(format!("{} {}: {what}\n", stamp(), self.who).as_bytes());
    }
}

/// Where the file lies.
pub fn path(dir: &Path) -> PathBuf {
    dir.join("journal")
}

/// Returns the last lines.
pub fn last(dir: &Path) -> String {
    let text = std::fs::read(path(dir)).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let from = text.lines().count().saturating_sub(LAST);
    text.lines()
        .skip(from)
        .flat_map(|line| [line, "\n"])
        .collect()
}

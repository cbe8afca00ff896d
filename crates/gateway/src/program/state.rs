//! The file of a running gateway in its broker's directory: what it does, and how others of this host reach its
//! network.
//!
//! A gateway holds a lock on its file. A file that is not locked was left by one that died, and goes.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// What a gateway says of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    /// The name of its host.
    pub host: String,
    /// Its process, as a random number.
    pub incarnation: String,
    /// Its process.
    pub pid: u32,
    /// Where it listens.
    pub listen: String,
    /// The gateways that it connects to.
    pub peers: Vec<String>,
    /// Certificate, private key and authority; none with `--insecure`.
    pub tls: Option<Vec<PathBuf>>,
    /// What carries the bytes.
    pub transport: String,
    /// Gbit/s that a read reaches, as was said.
    pub link_gbit: Option<f64>,
    /// What it has done.
    pub figures: serde_json::Value,
    /// Leases of others.
    pub leases: serde_json::Value,
    /// Replicas that were removed because their home has removed them.
    pub followed: u64,
}

/// The file of a gateway that runs; goes with it.
#[derive(Debug)]
pub struct Held {
    file: File,
    path: PathBuf,
}

impl Held {
    /// Makes it, for its owner alone: it names a private key's file.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] for a directory that cannot be written to.
    pub fn create(dir: &Path, incarnation: &str) -> Result<Held> {
        let (path, unlocked) = (dir.join(format!("gateway-{incarnation}")), dir.join(format!("new-{incarnation}")));
        let made = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&unlocked);
        // Under its name it is locked already: a file that is not would be taken for that of a gateway that died.
        let locked = made.and_then(|file| {
            flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            std::fs::rename(&unlocked, &path)?;
            Ok(file)
        });
        let file = locked.map_err(|e| Error::Unavailable {
            what: path.display().to_string(),
            why: e.to_string(),
            remedy: "start the broker first, and the gateway as the same user",
        })?;
        Ok(Held { file, path })
    }

    /// Writes what the gateway says.
    pub fn write(&self, state: &State) {
        let text = serde_json::to_vec(state).unwrap_or_default();
        // A reader that meets the middle reads again.
        let written = self.file.set_len(0).and_then(|()| self.file.write_all_at(&text, 0));
        if let Err(error) = written {
            tracing::warn!(%error, "the gateway's file cannot be written");
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Reads the files of all gateways of a broker that run.
pub fn all(dir: &Path) -> Vec<State> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with("gateway-") {
            continue;
        }
        let Ok(file) = File::open(entry.path()) else { continue };
        if flock(&file, FlockOperation::NonBlockingLockShared).is_ok() {
            let _ = std::fs::remove_file(entry.path());
            continue;
        }
        let read = |_| std::fs::read(entry.path()).ok().and_then(|text| serde_json::from_slice(&text).ok());
        found.extend((0..100).find_map(read));
    }
    found.sort_by(|a: &State, b| a.incarnation.cmp(&b.incarnation));
    found
}

//! The file of a running gateway in its broker's directory: what it does, and how others of this
//! host reach its network.
//!
//! A gateway holds a lock on its file. A file that is not locked was left by one that died, and
//! goes.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path as Folder, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

#[cfg(feature = "faults")]
use super::args::Carrier;
use super::args::{Net, Place, StatusOptions};
use crate::error::{Error, Result};
use crate::net::key::escape;
use crate::net::session::Network;
use crate::transport::choice::Tried;
use crate::transport::choice::Way;

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
    /// The paths from other hosts, as the pulls of this host found them.
    #[serde(default)]
    pub paths: Vec<Path>,
}

/// What a pull found of the path from another host.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Path {
    /// The other host.
    pub from: String,
    /// What carried the bytes.
    pub transport: String,
    /// The way that was taken.
    pub way: Way,
    /// What it reached: 10^9 bytes a second over the whole object.
    pub gb_s: f64,
    /// Bytes of that object.
    pub bytes: u64,
    /// What trials of a few MiB found of each way.
    pub ways: Vec<Tried>,
}

impl Path {
    /// Writes it beside the gateways' files, in the place of what an earlier pull found.
    pub fn write(&self, dir: &Folder) {
        let name = escape(&self.from);
        let (path, new) = (
            dir.join(format!("path-{name}")),
            dir.join(format!("new-path-{name}-{}", std::process::id())),
        );
        let text = serde_json::to_vec(self).unwrap_or_default();
        if let Err(error) = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &path)) {
            tracing::warn!(%error, "what was found of a path is not written");
        }
    }
}

/// Reads what pulls found, by host.
pub fn paths(dir: &Folder) -> Vec<Path> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Vec::new();
    };
    let files = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("path-"));
    let read =
        |file: std::fs::DirEntry| serde_json::from_slice(&std::fs::read(file.path()).ok()?).ok();
    let mut found: Vec<Path> = files.filter_map(read).collect();
    found.sort_by(|a, b| a.from.cmp(&b.from));
    found
}

/// The file of a gateway that runs; goes with it.
#[derive(Debug)]
pub struct Held {
    file: File,
    path: PathBuf,
    /// The most bytes that it ever had.
    bytes: AtomicUsize,
}

impl Held {
    /// Makes it, for its owner alone: it names a private key's file.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] for a directory that cannot be written to.
    pub fn create(dir: &Folder, incarnation: &str) -> Result<Held> {
        let (path, unlocked) = (
            dir.join(format!("gateway-{incarnation}")),
            dir.join(format!("new-{incarnation}")),
        );
        let made = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&unlocked);
        // Under its name it is locked already: a file that is not would be taken for that of a
        // gateway that died.
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
        Ok(Held {
            file,
            path,
            bytes: AtomicUsize::new(0),
        })
    }

    /// Writes what the gateway says.
    pub fn write(&self, state: &State) {
        let mut text = serde_json::to_vec(state).unwrap_or_default();
        // Never cut, and over all that was there: so a reader finds a whole text, also while this
        // process is stopped.
        text.resize(text.len().max(self.bytes.load(Ordering::Relaxed)), b' ');
        self.bytes.store(text.len(), Ordering::Relaxed);
        let written = self.file.write_all_at(&text, 0);
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
pub fn all(dir: &Folder) -> Vec<State> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with("gateway-") {
            continue;
        }
        let Ok(file) = File::open(entry.path()) else {
            continue;
        };
        if flock(&file, FlockOperation::NonBlockingLockShared).is_ok() {
            let _ = std::fs::remove_file(entry.path());
            continue;
        }
        let read = |_| {
            std::fs::read(entry.path())
                .ok()
                .and_then(|text| serde_json::from_slice(&text).ok())
        };
        found.extend((0..100).find_map(read));
    }
    found.sort_by(|a: &State, b| a.incarnation.cmp(&b.incarnation));
    found
}

/// Finds the network: what was given, else that of a gateway that runs here.
///
/// # Errors
///
/// [`Error::Invalid`] when there is neither.
pub fn network_of(place: &Place, net: &Net) -> Result<(Network, Net)> {
    if net.is_given() {
        return Ok((net.network(None)?, net.clone()));
    }
    let dir = place.dir()?;
    let Some(state) = all(&dir).into_iter().next() else {
        return Err(Error::Invalid {
            what: "the network",
            got: format!(
                "not given, and no gateway runs for the broker in {}",
                dir.display()
            ),
            must: "--peer tcp/ADDR with --tls or --insecure, or that of a gateway that runs here",
        });
    };
    let address = |text: &String| text.parse().ok();
    let peers = std::iter::once(&state.listen)
        .chain(&state.peers)
        .filter_map(address)
        .collect();
    let transport = match state.transport.as_str() {
        #[cfg(feature = "faults")]
        "tcp" => Carrier::Tcp,
        _ => net.transport,
    };
    let net = Net {
        peers,
        insecure: state.tls.is_none(),
        tls: state.tls,
        transport,
        link_gbit: net.link_gbit.or(state.link_gbit),
        ..net.clone()
    };
    Ok((net.network(None)?, net))
}

/// `gpu-ipc-gateway status`: prints what the gateways of this host do.
///
/// # Errors
///
/// [`Error::Invalid`] for a directory that cannot be used.
pub fn status(options: &StatusOptions) -> Result<()> {
    let dir = options.place.dir()?;
    let (mut all, paths) = (all(&dir), paths(&dir));
    all.iter_mut()
        .for_each(|state| state.paths.clone_from(&paths));
    if options.json {
        println!("{}", serde_json::to_string(&all).unwrap_or_default());
        return Ok(());
    }
    for state in &all {
        let State {
            host,
            pid,
            listen,
            transport,
            figures,
            ..
        } = state;
        println!("{host}  process {pid} at {listen}, carried by {transport}: {figures}");
    }
    for Path {
        from,
        transport,
        way,
        gb_s,
        ways,
        ..
    } in &paths
    {
        let tried: Vec<String> = ways.iter().map(ToString::to_string).collect();
        println!(
            "from {from} by {transport}: {way}, {gb_s:.2} GB/s (tried: {})",
            tried.join("; ")
        );
    }
    if all.is_empty() {
        println!("no gateway runs for this broker");
    }
    Ok(())
}

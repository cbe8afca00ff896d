//! The connection to this host's broker.

use std::path::Path;

use gpu_ipc::broker::server::listing::Listing;
use gpu_ipc::broker::{Client, Identity, ObjectError};
use gpu_ipc::{Gpu, detect};

use crate::error::{Error, Result};
use crate::message::Home;
use crate::transport::{Place, Span};

/// The file with the number of a broker's directory.
const NUMBER: &str = "home";

/// This host's broker and device.
#[derive(Clone, Debug)]
pub struct Local {
    /// Where objects are committed first that are committed here: the name of this host, and the
    /// number of its broker's directory.
    pub home: Home,
    /// Its broker.
    pub client: Client,
}

impl Local {
    /// Connects to the broker of a directory, for objects on a device: `cuda:0`, or the first that
    /// there is.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] without a device or a broker.
    pub fn connect(host: &str, dir: Option<&Path>, device: Option<&str>) -> Result<Local> {
        let gpu = choose(device)?;
        let builder = Client::builder(gpu).name("gpu-ipc-gateway");
        let builder = match dir {
            Some(dir) => builder.dir(dir),
            None => builder,
        };
        let client = builder
            .connect()
            .map_err(|e| broker("this host's broker", &e))?;
        let dir = gpu_ipc::broker::client::broker_dir(dir).map_err(|e| no_number(e.to_string()))?;
        let broker = number(&dir).map_err(|e| no_number(format!("{}: {e}", dir.display())))?;
        let home = Home {
            host: host.into(),
            broker,
        };
        Ok(Local { home, client })
    }

    /// Says where its memory lies.
    pub fn place(&self) -> Place {
        let gpu = self.client.gpu();
        if gpu.kind().in_host_memory() {
            Place::Host
        } else {
            Place::Device(gpu.device().0)
        }
    }

    /// Turns regions into spans.
    pub fn spans(
        &self,
        regions: impl IntoIterator<Item = (gpu_ipc::backend::DevicePtr, u64)>,
    ) -> Vec<Span> {
        let place = self.place();
        regions
            .into_iter()
            .map(|(at, bytes)| Span {
                address: at.0,
                bytes,
                place,
            })
            .collect()
    }

    /// Lists what the broker has.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] without an answer.
    pub fn list(&self) -> Result<Listing> {
        self.client
            .list()
            .map_err(|e| broker("the list of objects", &e))
    }
}

fn no_number(why: String) -> Error {
    Error::Unavailable {
        what: "the number of the broker's directory".into(),
        why,
        remedy: "let this user write there, and remove the file `home` if it is damaged",
    }
}

/// Reads the number of a broker's directory; the first to ask draws it. It lives as long as the
/// directory, through every restart of broker and gateways.
fn number(dir: &Path) -> std::io::Result<[u8; 16]> {
    let (at, drawn) = (dir.join(NUMBER), Identity::random());
    if !at.exists() {
        let drawn = drawn.map_err(|e| std::io::Error::other(e.to_string()))?;
        let beside = dir.join(format!("{NUMBER}.{drawn}"));
        std::fs::write(&beside, drawn.to_string())?;
        // Whole or not at all, and the first one stays.
        let linked = std::fs::hard_link(&beside, &at);
        std::fs::remove_file(&beside)?;
        linked.or_else(|e| match e.kind() {
            std::io::ErrorKind::AlreadyExists => Ok(()),
            _ => Err(e),
        })?;
    }
    let text = std::fs::read_to_string(&at)?;
    let number = text.trim().parse::<Identity>();
    number
        .map(|number| number.0)
        .map_err(|_| std::io::Error::other(format!("{NUMBER} has no number of 32 digits")))
}

/// Makes an error of a broker one of ours.
pub fn broker(what: &str, error: &ObjectError) -> Error {
    let remedy = "see that `gpu-ipc broker` runs in the directory of `--broker`, and its log";
    Error::Unavailable {
        what: what.into(),
        why: gpu_ipc::backend::explain(error),
        remedy,
    }
}

fn choose(device: Option<&str>) -> Result<Gpu> {
    let unavailable = |why: String| Error::Unavailable {
        what: device.map_or("a device".into(), |device| format!("the device {device}")),
        why,
        remedy: "give the broker's device with `--device cuda:0`, `hip:0` or `host:0`",
    };
    let found = detect().map_err(|e| unavailable(e.to_string()))?;
    let Some(device) = device else {
        return found
            .gpus()
            .first()
            .cloned()
            .ok_or_else(|| unavailable("none was found".into()));
    };
    let named = |gpu: &&Gpu| format!("{}:{}", gpu.kind(), gpu.device().0) == device;
    found
        .gpus()
        .iter()
        .find(named)
        .cloned()
        .ok_or_else(|| unavailable("it was not found".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_keeps_its_number_and_a_damaged_one_is_told() {
        let dir = tempfile::tempdir().expect("a folder");
        let drawn = std::thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(|| number(dir.path()))).collect();
            let drawn = all.into_iter().map(|one| one.join().expect("no panic"));
            drawn.map(|one| one.expect("a number")).collect::<Vec<_>>()
        });
        assert!(drawn.iter().all(|one| *one == drawn[0]), "{drawn:?}");
        assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 1);
        std::fs::write(dir.path().join(NUMBER), "12").expect("a file");
        let why = number(dir.path()).expect_err("no number").to_string();
        assert!(why.contains("32 digits"), "{why}");
    }
}

//! The connection to this host's broker.

use std::path::Path;

use gpu_ipc::broker::server::listing::Listing;
use gpu_ipc::broker::{Client, Identity, Manifest, ObjectError, Reader};
use gpu_ipc::{BackendKind, Gpu, detect};
use gpu_ipc_gateway_plan::READS_AT_ONCE;

use crate::error::{Error, Result};
use crate::net::key::Announced;
use crate::transport::{Place, Span};

/// This host's broker and device.
#[derive(Clone, Debug)]
pub struct Local {
    /// The name of this host.
    pub host: String,
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
        Ok(Local {
            host: host.into(),
            client,
        })
    }

    /// Says where its memory lies.
    pub fn place(&self) -> Place {
        let gpu = self.client.gpu();
        match gpu.kind() {
            BackendKind::Host => Place::Host,
            _ => Place::Device(gpu.device().0),
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

    /// Describes an object for others.
    pub fn announced(&self, reader: &Reader) -> Announced {
        let manifest = reader.manifest();
        Announced {
            name: manifest.name.clone(),
            epoch: manifest.epoch.0,
            identity: manifest.identity.to_string(),
            bytes: manifest.layout.regions().iter().sum(),
            layout: layout_number(manifest),
            reads: 0,
            limit: READS_AT_ONCE,
            home: manifest.home.clone().unwrap_or_else(|| self.host.clone()),
        }
    }
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

/// Numbers a layout: FNV-1a of the manifest without what differs between copies.
fn layout_number(manifest: &Manifest) -> u64 {
    let bare = Manifest {
        identity: Identity([0; 16]),
        epoch: gpu_ipc::broker::Epoch(0),
        home: None,
        device: gpu_ipc::backend::DeviceUuid([0; 16]),
        owner: 0,
        readers: gpu_ipc::broker::Readers::Owner,
        granularity: 0,
        ..manifest.clone()
    };
    let bytes = bare.encode().unwrap_or_default();
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
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

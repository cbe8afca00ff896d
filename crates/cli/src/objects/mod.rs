//! Objects: memory that outlives the process that filled it.
//!
//! 1. `keep` and `serve`: the two processes that keep it.
//! 2. `list`, `put`, `get`, `remove`: what people do with it.

// Tests: `crates/cli/tests/objects.rs`, `crates/cli/tests/deploy.rs`, `crates/cli/tests/log.rs`,
// `crates/cli/tests/start.rs`.

pub mod get;
pub mod keep;
pub mod list;
pub mod put;
pub mod remove;
pub mod serve;

use std::path::PathBuf;

use clap::Args as Arguments;
use gpu_ipc::Gpu;
use gpu_ipc::broker::client::broker_dir;
use gpu_ipc::broker::{Client, ObjectError};

use crate::device::explain;

/// Which broker.
#[derive(Arguments, Debug)]
pub struct BrokerDir {
    /// The broker's directory; else $NVIDIA_DRA_LOCAL_IPC_DIR, else `broker` in the runtime
    /// directory
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

impl BrokerDir {
    fn path(&self) -> Result<PathBuf, String> {
        broker_dir(self.dir.as_deref()).map_err(|error| explain(&error))
    }

    fn connect(&self, gpu: Gpu, name: &str) -> Result<Client, String> {
        let client = Client::builder(gpu).dir(self.path()?).name(name);
        client.connect().map_err(|error| match &error {
            ObjectError::Gpu(gpu_ipc::Error::Connect { path, why, .. }) => {
                format!(
                    "no broker at {path}: {why}; start one with: gpu-ipc keep -- gpu-ipc broker"
                )
            }
            error => explain(error),
        })
    }
}

/// Returns a device for questions that are about no memory.
fn any_gpu() -> Result<Gpu, String> {
    crate::device::choose(crate::choice::BackendChoice::Host)
}

//! Objects: memory that outlives the process that filled it.
//!
//! 1. `keep` and `serve`: the two processes that keep it; `manager`: what the first tells systemd;
//!    `supervise`: the same for a gateway.
//!    `rules`: what the second allows, also by its `options_file`. `ready` waits for both, `stop`
//!    ends both, `reload` has the second read its options again.
//! 2. `put`, from `input`; `get`, into `files`: `origin` is what the first notes for the second,
//!    `dtype` what both call a type.
//! 3. `list`, `remove`: what else people do with it.

// Tests: `crates/cli/tests/objects.rs`, `crates/cli/tests/start.rs`, `crates/cli/tests/deploy.rs`, `crates/cli/tests/log.rs`, `crates/cli/tests/reload.rs`, `crates/cli/tests/supervise.rs`.

mod dtype;
mod files;
pub mod get;
mod input;
pub mod keep;
pub mod list;
mod manager;
mod options_file;
mod origin;
pub mod put;
pub mod ready;
pub mod reload;
pub mod remove;
pub mod rules;
pub mod serve;
pub mod stop;
mod supervise;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args as Arguments;
use gpu_ipc::Gpu;
use gpu_ipc::broker::client::broker_dir;
use gpu_ipc::broker::{Client, ObjectError};
use indicatif::{ProgressBar, ProgressStyle};

use crate::device::explain;
use crate::patience::seconds;

/// Bytes copied to or from the device at a time.
const PIECE: u64 = 16 << 20;

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
}

/// Which broker to ask, and for how long.
#[derive(Arguments, Debug)]
pub struct Asked {
    /// Which broker.
    #[command(flatten)]
    pub place: BrokerDir,
    /// Seconds that the broker and its keeper have for each answer
    #[arg(long, value_name = "S", allow_negative_numbers = true, default_value_t = 60.0, value_parser = seconds)]
    pub timeout: f64,
}

impl Asked {
    fn patience(&self) -> Duration {
        Duration::from_secs_f64(self.timeout)
    }

    fn connect(&self, gpu: Gpu, name: &str) -> Result<Client, String> {
        let client = Client::builder(gpu).dir(self.place.path()?).name(name);
        let client = client.patience(self.patience()).connect();
        client.map_err(|error| match &error {
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
    crate::device::choose(crate::choice::BackendChoice(Some(
        gpu_ipc::BackendKind::Host,
    )))
}

/// Makes a bar of this many bytes on standard error, which shows only on a terminal.
fn progress(bytes: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
    );
    ProgressBar::new(bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

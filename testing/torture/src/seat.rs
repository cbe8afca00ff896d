//! A process of a run: which one it is, and what it is told.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args as Group;
use gpu_ipc::backend::DeviceId;
use gpu_ipc::host::{HostBackend, HostConfig};
use gpu_ipc::{BackendKind, Gpu};

use super::options::Control;
use super::shared_stats::Board;
use super::told::Told;
use gpu_ipc_cli::device;

/// Options of a process of a run.
#[derive(Group, Debug)]
pub struct MemberOptions {
    /// What every process of a run is told.
    #[command(flatten)]
    pub told: Told,
    /// The number of its producer; its own for a producer
    #[arg(long)]
    pub producer: u64,
    /// How many seconds the run lasts, for a producer that lives as long
    #[arg(long)]
    pub lasts: Option<u64>,
    /// Its device is small on purpose
    #[arg(long)]
    pub small: bool,
    /// It opens connections and abandons them
    #[arg(long)]
    pub visitor: bool,
    /// The control, if it is one
    #[arg(long, value_enum)]
    pub control: Option<Control>,
}

/// The identity of a process of a run, and its directory.
pub struct Seat {
    pub dir: PathBuf,
    pub board: &'static Board,
    pub slot: usize,
    pub serial: u64,
    pub producer: u64,
    pub seed: u64,
    pub control: Option<Control>,
    pub backend: BackendKind,
    pub device: String,
    pub lasts: Option<Duration>,
    pub is_small: bool,
}

/// A device, and what the host backend alone can be made to do.
pub struct Device {
    pub gpu: Gpu,
    pub host: Option<Arc<HostBackend>>,
}

impl Seat {
    /// Takes the one that a process is told.
    pub fn take(options: &MemberOptions) -> Result<Seat, String> {
        let told = &options.told;
        let board = Board::open(&told.dir.join("board")).map_err(|e| format!("no board: {e}"))?;
        Ok(Seat {
            dir: told.dir.clone(),
            board,
            slot: told.slot,
            serial: told.serial,
            producer: options.producer,
            seed: told.seed,
            control: options.control,
            backend: told.backend.kind(),
            device: told.device.clone(),
            lasts: options.lasts.map(Duration::from_secs),
            is_small: options.small,
        })
    }

    /// Opens its device.
    pub fn gpu(&self) -> Result<Device, String> {
        Device::open(self.backend, &self.device)
    }
}

impl Device {
    /// Opens the device with an identity.
    pub fn open(backend: BackendKind, uuid: &str) -> Result<Device, String> {
        if !backend.in_host_memory() {
            return Ok(Device {
                gpu: device::find(backend, uuid)?,
                host: None,
            });
        }
        let opened = HostConfig::from_env().and_then(HostBackend::new);
        let host = opened.map_err(|e| device::explain(&e))?;
        let gpu = Gpu::new(host.clone(), DeviceId(0)).map_err(|e| device::explain(&e))?;
        Ok(Device {
            gpu,
            host: Some(host),
        })
    }
}

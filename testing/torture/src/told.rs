//! What every process of a run is told, be it among sessions or among objects.

use std::path::PathBuf;

use clap::Args as Group;

use gpu_ipc_cli::choice::Vendor;

/// Options of every process of a run.
#[derive(Group, Debug)]
pub struct Told {
    /// The directory of the run
    #[arg(long)]
    pub dir: PathBuf,
    /// Its index in what the processes share
    #[arg(long)]
    pub slot: usize,
    /// Its number in the run
    #[arg(long)]
    pub serial: u64,
    /// The seed of the run
    #[arg(long)]
    pub seed: u64,
    /// The backend
    #[arg(long, value_enum)]
    pub backend: Vendor,
    /// The device
    #[arg(long)]
    pub device: String,
}

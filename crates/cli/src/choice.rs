//! Which device a command works on.

use std::path::PathBuf;

use clap::{Args as Arguments, ValueEnum};
use gpu_ipc::BackendKind;

/// Which backend to use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum BackendChoice {
    /// The first that has a device: CUDA, HIP, then shared memory.
    Auto,
    /// Shared memory instead of a GPU.
    Host,
    /// NVIDIA.
    Cuda,
    /// AMD.
    Hip,
}

impl BackendChoice {
    /// Returns the backends to try, in order.
    pub fn kinds(self) -> &'static [BackendKind] {
        match self {
            BackendChoice::Auto => &BackendKind::ALL,
            BackendChoice::Host => &[BackendKind::Host],
            BackendChoice::Cuda => &[BackendKind::Cuda],
            BackendChoice::Hip => &[BackendKind::Hip],
        }
    }
}

/// A backend by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Vendor {
    /// Shared memory instead of a GPU.
    Host,
    /// NVIDIA.
    Cuda,
    /// AMD.
    Hip,
}

impl Vendor {
    /// Returns the library's name for it.
    pub fn kind(self) -> BackendKind {
        match self {
            Vendor::Host => BackendKind::Host,
            Vendor::Cuda => BackendKind::Cuda,
            Vendor::Hip => BackendKind::Hip,
        }
    }
}

/// Options of a consumer process.
#[derive(Arguments, Debug)]
pub struct ConsumerOptions {
    /// The producer's backend
    #[arg(long, value_enum)]
    pub backend: Vendor,
    /// The producer's device
    #[arg(long)]
    pub device: String,
    /// The producer's socket
    #[arg(long)]
    pub socket: PathBuf,
    /// Map the producer's memory read-only
    #[arg(long)]
    pub read_only: bool,
}

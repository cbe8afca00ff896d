//! Floors: the calls that the work cannot do without, as nakedly as a program could make them.
//!
//! `calls` lists them. On NVIDIA they are calls of the driver itself (`cuda`), on everything else
//! those of the backend (`backend`).

// Tests: `crates/cli/tests/bench.rs`.

mod backend;
mod calls;
#[cfg(feature = "cuda")]
mod cuda;

use crate::failure::Result;
use gpu_ipc::{BackendKind, Gpu};

pub use calls::{Floor, Foreign};

/// Chooses the floor of a device, for use on this thread alone.
pub fn of(gpu: &Gpu) -> Result<Box<dyn Floor>> {
    match gpu.kind() {
        #[cfg(feature = "cuda")]
        BackendKind::Cuda => Ok(Box::new(cuda::Cuda::new(gpu)?)),
        BackendKind::Host => Ok(Box::new(backend::Backend::new(gpu, true))),
        _ => Ok(Box::new(backend::Backend::new(gpu, false))),
    }
}

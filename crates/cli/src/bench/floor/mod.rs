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
#[cfg(feature = "cuda")]
use gpu_ipc::BackendKind;
use gpu_ipc::Gpu;

pub use calls::{Floor, Foreign};

/// Chooses the floor of a device, for use on this thread alone.
pub fn of(gpu: &Gpu) -> Result<Box<dyn Floor>> {
    // The driver's own calls, which are one vendor's.
    #[cfg(feature = "cuda")]
    if gpu.kind() == BackendKind::Cuda {
        return Ok(Box::new(cuda::Cuda::new(gpu)?));
    }
    let is_host = gpu.kind().in_host_memory();
    Ok(Box::new(backend::Backend::new(gpu, is_host)))
}

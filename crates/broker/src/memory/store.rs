//! Makes regions: physical memory that only descriptors keep.
//!
//! A region is freed by closing it. The driver frees memory when every descriptor and every mapping
//! in every process is gone, and gives it out again only after that: so nothing here is ever used
//! again by us, and a dead writer's late writes land in what nobody has.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use gpu_api::{Gpu, Result};

/// Finds the devices that a broker serves: called on a thread that may wait, so that opens are
/// served before a driver is loaded.
pub type FindGpus = Arc<dyn Fn() -> Result<Vec<Gpu>> + Send + Sync>;

/// Makes a region of `bytes`, a multiple of the device's granularity. No context of the driver's is
/// needed. May take seconds, while the driver scrubs.
///
/// # Errors
///
/// [`gpu_api::Error::OutOfMemory`] when there is no room; then nothing was made.
pub fn make_region(gpu: &Gpu, bytes: u64) -> Result<OwnedFd> {
    let backend = gpu.backend();
    let memory = backend.create_memory(gpu.device(), bytes)?;
    // SAFETY: `export_memory` asks for memory that is not yet released: just created.
    let exported = unsafe { backend.export_memory(memory) };
    // SAFETY: `release_memory` asks for memory that is not yet released: this is the only release.
    // The descriptor keeps the memory, or nothing does.
    let released = unsafe { backend.release_memory(memory) };
    if let Err(error) = released {
        // Nobody knows whether it was: then a handle of this process keeps it until the process
        // ends.
        tracing::warn!(%error, bytes, "a handle of memory cannot be given back");
    }
    exported
}

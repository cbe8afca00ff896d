//! Share GPU memory between processes without copying it, and free it exactly when the last one is done, whoever dies.
mod detect;

pub use detect::{Detected, detect};
pub use gpu_api::*;
pub use ipc_rc::*;

/// Shared memory instead of a GPU.
#[cfg(feature = "host")]
pub mod host {
    pub use backend_host::{HostBackend, HostConfig};
}

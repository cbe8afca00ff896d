//! Shared memory instead of a GPU: the reference backend.
//!
//! Not a mock. Device memory is shared memory, a handle that is opened in another process maps the
//! same pages, streams are threads, so that 'queued' and 'done' differ, and words and events work
//! across processes. What a GPU does that is awkward, this does too: it refuses to open a handle
//! where it was made, its unfinished writes can come after its process' death, its context can
//! break, and its free can block while a stream waits.
//!
//! Read in this order: `config`, `current`, `memory` (allocations and handles), `range`, `pool`,
//! `stream`, `event`, `backend`, and its calls: `memory_calls`, `pool_calls`,
//! `stream_calls`.
//!
//! # Example
//!
//! ```
//! use backend_host::{HostBackend, HostConfig};
//! use gpu_api::groups::*;
//! use gpu_api::{DeviceId, Sharing};
//!
//! let backend = HostBackend::new(HostConfig::default())?;
//! let memory = backend.alloc(DeviceId(0), 4096, Sharing::Fd)?;
//! assert_eq!(backend.address_range(memory.base.offset(100))?.base, memory.base);
//! # Ok::<(), gpu_api::Error>(())
//! ```

// Tests: `crates/backend-host/tests/awkward.rs`, `testing/conformance/tests/conformance.rs`.

mod backend;
mod config;
mod current;
mod error;
mod event;
#[cfg(feature = "faults")]
mod faults;
#[cfg(feature = "faults")]
mod late_write;
mod memory;
mod memory_calls;
mod pool;
mod pool_calls;
mod range;
mod stream;
mod stream_calls;

pub use backend::HostBackend;
pub use config::HostConfig;

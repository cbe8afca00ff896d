//! The GPU backend for AMD, on the HIP runtime, loaded at run time.
//!
//! Neither ROCm nor a driver is needed to build it or to start a program that holds it:
//! [`HipBackend::load`] says what is missing. One build serves ROCm 5.2 to 7.x. Read in this order:
//!
//! 1. `version`: the runtime's version, and what changed from one to the next. `sys`: its functions
//!    as a table that may have gaps, and its structures; `oracle`: those for a test that has AMD's
//!    headers; `library`: finding it.
//! 2. `kernel`: which driver the kernel has. `error`: the runtime's codes and what they become;
//!    `bugs`: what others reported of which version; `pool_defect`: what its pools may do wrong;
//!    [`proof`]: what may be used.
//! 3. `driver`: the running runtime and its devices.
//! 4. `call`: the calling thread around a call: its current device, its capture mode, its last
//!    error.
//! 5. `mapping`: physical memory on addresses.
//! 6. `memory`: the table of what was allocated and opened.
//! 7. [`backend`]: [`HipBackend`], the runtime and the tables. The rest are its traits, a subject
//!    each:
//!    - `device`, `peer`: what the runtime says of a device, and which other it reaches.
//!    - `stream`, `event`, `word`, `copy`: queues of GPU work and what is queued; `pass`: waiting
//!      for it.
//!    - `host`: host memory. `legacy`, `vmm`, `dma_buf`: a device's, by the way it is shared;
//!      `alloc`: any of them. `pool`: the runtime's own pools. `pointer`: addresses that others
//!      allocated.
//! 8. [`probe`]: how it is found out what may be used.
//! 9. [`interop`]: streams and addresses of other libraries, and ours for them.
//!
//! # Examples
//!
//! ```
//! match backend_hip::HipBackend::load() {
//!     Ok(hip) => println!("HIP {}", hip.version()),
//!     Err(error) => println!("{error}"),
//! }
//! ```

mod alloc;
pub mod backend;
mod bugs;
mod call;
mod copy;
mod device;
mod dma_buf;
mod driver;
mod error;
mod event;
mod host;
pub mod interop;
mod kernel;
mod legacy;
mod library;
mod mapping;
mod memory;
#[doc(hidden)]
pub mod oracle;
mod pass;
mod peer;
mod pointer;
mod pool;
mod pool_defect;
pub mod probe;
pub mod proof;
mod stream;
mod sys;
mod version;
mod vmm;
mod word;

pub use backend::{HipBackend, Inspection};
pub use bugs::KnownBug;
pub use library::LIBRARY;
pub use pool_defect::PoolDefect;
pub use probe::{Finding, Findings};
pub use proof::{PROOF, Proof, Step};
pub use version::Version;

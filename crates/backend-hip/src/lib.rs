//! The GPU backend for AMD, on the HIP runtime, loaded at run time.
//!
//! Neither ROCm nor a driver is needed to build it or to start a program that holds it: [`HipBackend::load`] says what
//! is missing. One build serves ROCm 5.2 to 7.x. Read in this order:
//!
//! 1. `sys`: the runtime's functions as a table that may have gaps, its structures, and what changed between its
//!    versions; `library`: finding it.
//! 2. `call`: the calling thread around a call: its current device, its capture mode, its last error.
//! 3. `kernel`: which driver the kernel has. `error`: the runtime's codes and what they become; `bugs`: what others
//!    reported of which version.
//! 4. [`proof`]: what may be used, and [`probe`]: how that is found out; `device`: the running runtime; `peer`.
//! 5. `memory`: the table of what was allocated and opened; `vmm`, `dma_buf`, `legacy` and `host` fill it; `pointer`
//!    looks at addresses that others allocated.
//! 6. `stream`, `event`, `word`, `copy`: queues of GPU work and what is queued; `pass`: waiting for it.
//! 7. [`backend`]: [`HipBackend`], which is all of that behind the trait.
//! 8. [`interop`]: streams and addresses of other libraries, and ours for them.
//!
//! # Examples
//!
//! ```
//! match backend_hip::HipBackend::load() {
//!     Ok(hip) => println!("HIP {}", hip.version()),
//!     Err(error) => println!("{error}"),
//! }
//! ```

pub mod backend;
mod bugs;
mod call;
mod copy;
mod device;
mod dma_buf;
mod error;
mod event;
mod host;
pub mod interop;
mod kernel;
mod legacy;
mod library;
mod memory;
mod pass;
mod peer;
mod pointer;
pub mod probe;
pub mod proof;
mod stream;
#[doc(hidden)]
pub mod sys;
mod vmm;
mod word;

pub use backend::{HipBackend, Inspection};
pub use bugs::KnownBug;
pub use library::LIBRARY;
pub use probe::{Finding, Findings};
pub use proof::{PROOF, Proof, Step};
pub use sys::Version;

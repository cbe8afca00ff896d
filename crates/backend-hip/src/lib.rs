//! The GPU backend for AMD, on the HIP runtime, loaded at run time.
//!
//! Neither ROCm nor a driver is needed to build it or to start a program that holds it:
//! [`HipBackend::load`] says what is missing. One build serves ROCm 5.2 to 10. Read in this order:
//!
//! 1. `version`: the runtime's version; [`quirks`](driver::Quirks): what changed from one to the
//!    next. `sys`: its functions as a table that may have gaps, and its structures; `oracle`: those
//!    for a test that has AMD's headers; `library`: finding it.
//! 2. `kernel`: which driver the kernel has. `error`: the runtime's codes and what they become;
//!    `bugs`: what others reported of which version; `pool_defect`: what its pools may do wrong;
//!    [`proof`]: what may be used; `named`: how both are named.
//! 3. `signs`: what the kernel shows of a process's GPU work. `start`, [`hip`]: the running runtime. [`backend`]: [`HipBackend`], which is [`driver::Backend`] over
//!    [`Hip`]: what AMD's runtime does otherwise than NVIDIA's driver.
//! 4. `call`: the current device and the last error of the calling thread. `device`: what the
//!    runtime says of a device. `stream`, `word`: queues of GPU work. `exporter`, `handles`, `seal`, `plain`,
//!    `dma_buf`: sharing plain memory. `pointer`: addresses that others allocated.
//! 5. [`interop`]: streams and addresses of other libraries, and ours for them.
//!
//! # Examples
//!
//! ```
//! match backend_hip::HipBackend::load() {
//!     Ok(hip) => println!("HIP {}", hip.version()),
//!     Err(error) => println!("{error}"),
//! }
//! ```

// Tests: `crates/backend-hip/tests/shim`, `crates/backend-hip/tests/abi`,
// `testing/conformance/tests/hip_on_host.rs`.

pub mod backend;
mod bugs;
mod call;
mod device;
mod dma_buf;
mod error;
mod exporter;
mod handles;
pub mod hip;
pub mod interop;
mod kernel;
mod library;
mod named;
#[cfg(feature = "oracle")]
#[doc(hidden)]
pub mod oracle;
mod plain;
mod pointer;
mod pool_defect;
pub mod proof;
mod quirks;
mod seal;
mod signs;
mod start;
mod stream;
mod sys;
mod version;
mod word;

pub use backend::{HipBackend, Inspection};
pub use bugs::KnownBug;
pub use hip::Hip;
pub use library::LIBRARY;
pub use pool_defect::PoolDefect;
pub use proof::{PROOF, Proof, Step};
pub use version::Version;

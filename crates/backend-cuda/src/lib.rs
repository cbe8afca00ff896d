//! The GPU backend for NVIDIA, on the CUDA driver API, loaded at run time.
//!
//! Neither the toolkit nor a driver is needed to build it or to start a program that holds it:
//! [`CudaBackend::load`] says what is missing. Read in this order:
//!
//! 1. `sys`: the driver's functions as a table that may have gaps, and its structures.
//! 2. `error`: the driver's codes and what they become. `start`, [`cuda`]: the running driver and its
//!    devices.
//! 3. [`backend`]: [`CudaBackend`], which is [`driver::Backend`] over [`Cuda`]: what NVIDIA's driver
//!    does otherwise than AMD's.
//! 4. `call`: contexts. `device`, `mps`: what the driver says of a device. `stream`, `word`: queues of
//!    GPU work. `pointer`: addresses that others allocated.
//! 5. [`interop`]: contexts, streams and addresses of other libraries, and ours for them.
//!
//! # Examples
//!
//! ```
//! match backend_cuda::CudaBackend::load() {
//!     Ok(cuda) => println!("CUDA {}", cuda.driver_version()),
//!     Err(error) => println!("{error}"),
//! }
//! ```

// Tests: `crates/backend-cuda/tests/fake_driver`, `crates/backend-cuda/tests/gpu`,
// `testing/conformance/src`.

pub mod backend;
mod call;
pub mod cuda;
mod device;
mod error;
pub mod interop;
#[cfg(feature = "test-kernels")]
#[doc(hidden)]
pub mod launch;
mod mps;
mod pointer;
mod start;
mod stream;
mod sys;
mod word;

pub use backend::CudaBackend;
pub use cuda::Cuda;

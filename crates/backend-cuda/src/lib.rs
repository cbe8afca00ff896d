//! The GPU backend for NVIDIA, on the CUDA driver API, loaded at run time.
//!
//! Neither the toolkit nor a driver is needed to build it or to start a program that holds it:
//! [`CudaBackend::load`] says what is missing. Read in this order:
//!
//! 1. `sys`: the driver's functions as a table that may have gaps, and its structures.
//! 2. `call`: the calling thread around a call: its current context and its capture mode.
//! 3. `error`: the driver's codes and what they become.
//! 4. `device`: the running driver, its devices and their primary contexts; `mps`, `peer`.
//! 5. `memory`: the table of what was allocated and opened; `vmm`, `legacy` and `host` fill it; `pointer` looks at
//!    addresses that others allocated; `range`: physical memory without a context, and addresses to map it on; `pool`:
//!    the driver's own pools, and managed memory.
//! 6. `stream`, `event`, `word`, `copy`: queues of GPU work and what is queued; `pass`: waiting for it.
//! 7. [`backend`]: [`CudaBackend`], which is all of that behind the trait.
//! 8. [`interop`]: contexts, streams and addresses of other libraries, and ours for them.
//!
//! # Examples
//!
//! ```
//! match backend_cuda::CudaBackend::load() {
//!     Ok(cuda) => println!("CUDA {}", cuda.driver_version()),
//!     Err(error) => println!("{error}"),
//! }
//! ```

pub mod backend;
mod call;
mod copy;
mod device;
mod error;
mod event;
mod host;
pub mod interop;
#[cfg(feature = "test-kernels")]
#[doc(hidden)]
pub mod launch;
mod legacy;
mod memory;
mod mps;
mod pass;
mod peer;
mod pointer;
mod pool;
mod range;
mod stream;
mod sys;
mod vmm;
mod word;

pub use backend::CudaBackend;

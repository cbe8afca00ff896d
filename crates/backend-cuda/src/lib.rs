//! The GPU backend for NVIDIA, on the CUDA driver API, loaded at run time.
//!
//! Neither the toolkit nor a driver is needed to build it or to start a program that holds it:
//! [`CudaBackend::load`] says what is missing. Read in this order:
//!
//! 1. `sys`: the driver's functions as a table that may have gaps, and its structures.
//! 2. `error`: the driver's codes and what they become.
//! 3. `driver`: the running driver and its devices.
//! 4. `call`: the calling thread around a call: its current context and its capture mode; primary
//!    contexts.
//! 5. `physical`, `mapping`: memory apart from addresses, and on them.
//! 6. `memory`, `registration`: the tables of what was allocated and opened, and of memory with
//!    words.
//! 7. [`backend`]: [`CudaBackend`], the driver and the tables. The rest are its traits, a subject
//!    each:
//!    - `device`, `mps`, `peer`: what the driver says of a device, and which other it reaches.
//!    - `stream`, `event`, `word`, `copy`: queues of GPU work and what is queued; `pass`: waiting
//!      for it.
//!    - `host`: host memory. `legacy`, `vmm`: a device's, by the way it is shared; `alloc`: either
//!      of them. `pool`: the driver's own pools, and managed memory. `range`: physical memory
//!      without a context, and addresses to map it on. `pointer`: addresses that others allocated.
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

mod alloc;
pub mod backend;
mod call;
mod copy;
mod device;
mod driver;
mod error;
mod event;
mod host;
pub mod interop;
#[cfg(feature = "test-kernels")]
#[doc(hidden)]
pub mod launch;
mod legacy;
mod mapping;
mod memory;
mod mps;
mod pass;
mod peer;
mod physical;
mod pointer;
mod pool;
mod range;
mod registration;
mod stream;
mod sys;
mod vmm;
mod word;

pub use backend::CudaBackend;

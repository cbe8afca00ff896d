//! The calls of a CUDA-shaped GPU driver, once for every vendor that has one.
//!
//! HIP took CUDA's API: streams, events, contexts or devices of a thread, virtual memory, 64-byte
//! handles, and the same numbers for most of it. A backend for such a driver is a
//! [`Vendor`]: its loader, names of functions, devices, errors, and one table of
//! [`Quirks`] by version. [`Backend`] makes a
//! [`GpuBackend`](gpu_api::GpuBackend) of it. What two drivers do differently stays in their
//! backends. Read in this order:
//!
//! 1. [`code`], [`calls`]: the codes and the functions that drivers have in common.
//! 2. [`driver`]: the calls and the tables of what was made with them: [`memory_table`],
//!    [`stream_table`], [`pool`], `peer_table`, `leak_table`, [`given`].
//! 3. [`vendor`]: what differs, and the calling thread around a call. [`backend`]: a vendor as a
//!    backend.
//! 4. A trait each: `device`, `peer`; `stream`, `event`, `word`, `copy`, [`pass`]; `host`;
//!    [`plain`], `vmm` with [`physical`] and `mapping`, `alloc`; `pool_calls`; `range`;
//!    [`mod@pointer`]; `groups`: which of them a device has. [`queued`] is a function on its way
//!    through a driver's queue, `checks` refuses arguments before a driver sees them.

// Tests: `crates/backend-cuda/tests/fake_driver`, `crates/backend-hip/tests/shim`,
// `testing/conformance/src`.
#![deny(unsafe_op_in_unsafe_fn)]

mod alloc;
pub mod backend;
pub mod calls;
mod checks;
pub mod code;
mod copy;
pub mod device;
pub mod driver;
mod event;
pub mod given;
mod groups;
mod host;
mod leak_table;
mod mapping;
pub mod memory_table;
pub mod pass;
mod peer;
mod peer_table;
pub mod physical;
pub mod plain;
pub mod pointer;
pub mod pool;
mod pool_calls;
pub mod queued;
mod range;
mod stream;
pub mod stream_table;
pub mod vendor;
mod vmm;
mod word;

pub use backend::Backend;
pub use driver::Driver;
pub use vendor::{Descriptor, DmaBuf, Quirks, Scope, Vendor, Words};

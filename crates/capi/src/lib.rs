//! The C library `libgpu_ipc`: the functions that `gpu_ipc.h` declares.
//!
//! | module | what |
//! |---|---|
//! | `version`, `failure` | which interface this is; what a call fails with |
//! | `handle`, `table` | what C holds in place of a pointer, and the rows behind it |
//! | `callback`, `opened`, `pools`, `kinds`, `process` | what stands there, and what a process has one of |
//! | `boundary`, `sized`, `log` | where C's calls come in; structures that begin with their size; lines on a descriptor (`write_signals`) |
//! | `device`, `stream` | where memory lies, and what work is ordered on |
//! | `contents`, `session`, `block`, `loan`, `stats` | copies from and to the host; the producer |
//! | `descriptor` | the bytes that travel |
//! | `participant`, `received`, `notice` | the consumer |
//! | `object` | memory that outlives the process that filled it |
//! | `torch` | PyTorch's pluggable allocator |
//!
//! The header is written from this source and is the documentation: `include/gpu_ipc.h`. Rust
//! programs use `gpu_ipc` itself.

// Tests: `crates/capi/tests/c_programs.rs`, `crates/capi/tests/header.rs`.

#![cfg(not(gpu_ipc_loom))]

mod block;
mod boundary;
mod callback;
mod contents;
mod descriptor;
mod device;
mod engine;
mod failure;
mod handle;
mod kinds;
mod loan;
mod log;
mod notice;
mod object;
mod opened;
mod participant;
mod pools;
mod process;
mod received;
mod session;
mod sized;
mod stats;
mod stream;
mod table;
mod torch;
mod version;
mod write_signals;

pub use block::*;
pub use descriptor::*;
pub use device::*;
pub use failure::*;
pub use kinds::*;
pub use loan::*;
pub use log::*;
pub use notice::*;
pub use object::*;
pub use participant::*;
pub use received::*;
pub use session::*;
pub use stats::*;
pub use stream::*;
pub use torch::*;
pub use version::*;

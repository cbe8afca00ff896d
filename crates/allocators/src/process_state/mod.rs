//! Every allocator of a process, in one value.
//!
//! 1. `attributes`: by which an allocator is chosen.
//! 2. `virtual_device`: devices as the program numbers them.
//! 3. `limit`, `options`, `environment`: how allocators are set up.
//! 4. `key`: their names. `made`: how each is made. `state`: [`ProcessState`], which hands them out
//!    and tears them down.

// Tests: `crates/allocators/tests/process_state.rs`.

mod attributes;
mod environment;
mod key;
mod limit;
mod made;
mod options;
mod state;
mod virtual_device;

pub use attributes::AllocatorAttributes;
pub use key::AllocatorKey;
pub use limit::MemoryLimit;
pub use options::{AllocatorKind, KeyedVisitor, ProcessOptions, Wrap};
pub use state::{Owner, ProcessState};
pub use virtual_device::{PhysicalDevice, VirtualDevice, VirtualDevices};

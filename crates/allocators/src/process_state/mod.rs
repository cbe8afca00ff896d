//! Every allocator of a process, in one value.
//!
//! 1. `attributes`: by which an allocator is chosen.
//! 2. `virtual_device`: devices as the program numbers them.
//! 3. `limit`, `options`, `environment`: how allocators are set up.
//! 4. `state`: [`ProcessState`], which makes them, hands them out, tears them down.

mod attributes;
mod environment;
mod limit;
mod options;
mod state;
mod virtual_device;

pub use attributes::AllocatorAttributes;
pub use limit::MemoryLimit;
pub use options::{AllocatorKind, KeyedVisitor, ProcessOptions, Wrap};
pub use state::{AllocatorKey, Owner, ProcessState};
pub use virtual_device::{PhysicalDevice, VirtualDevice, VirtualDevices};

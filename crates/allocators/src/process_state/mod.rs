//! Every allocator of a process, in one value.
//!
//! 1. `attributes`: by which an allocator is chosen.
//! 2. `virtual_device`: devices as the program numbers them.
//! 3. `limit`, `options`: how allocators are set up.
//! 4. `state`: [`ProcessState`], which makes them, hands them out, tears them down.

mod attributes;
mod limit;
mod options;
mod state;
mod virtual_device;

pub use attributes::AllocatorAttributes;
pub use limit::MemoryLimit;
pub use options::{ProcessOptions, Wrap};
pub use state::{AllocatorKey, ProcessState};
pub use virtual_device::{PhysicalDevice, VirtualDevice, VirtualDevices};

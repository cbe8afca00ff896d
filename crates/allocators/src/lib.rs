//! Best fit with coalescing, pools, wrappers, and the value that owns every allocator of a process.
//!
//! Read in this order:
//!
//! 1. [`Request`], [`Placed`]: what is asked and answered. [`Allocator`]: what every allocator can do.
//! 2. [`SubAllocator`]: where regions come from. [`DeviceMemory`], [`Shareable`], [`HostPages`]: a backend's;
//!    [`Simulated`]: addresses without memory behind them.
//! 3. [`Bfc`]: best fit with coalescing over any upstream.
//! 4. [`Relief`], [`Relieved`]: the way from 'nothing is free' to an error that explains itself.
//! 5. [`Arena`]: memory for the blocks of sessions.
//! 6. [`snapshot`]: what a heap looks like at one moment.
//!
//! # Glossary
//!
//! The words of `gpu_api`, and two more: a *chunk* is a piece of a region inside an allocator, in use or not; *slack*
//! is what a chunk has beyond what was asked for.

mod allocator;
mod arena;
pub mod bfc;
mod budget;
mod device_memory;
mod fork;
mod host_memory;
mod memory;
mod relief;
mod request;
mod simulated;
pub mod snapshot;
mod upstream;

pub use allocator::Allocator;
pub use arena::{Arena, ArenaOptions, ArenaStats};
pub use bfc::{AllocatorStats, Bfc, BfcOptions, Completion, Growth, Scope, ScopeStats};
pub use budget::Budget;
pub use device_memory::{DeviceMemory, Shareable};
pub use host_memory::HostPages;
pub use memory::{DeviceBytes, HostBytes, Memory};
pub use relief::{Relief, Relieved, Trim};
pub use request::{Placed, Request};
pub use simulated::Simulated;
pub use snapshot::Snapshot;
pub use upstream::{Extent, SubAllocator};

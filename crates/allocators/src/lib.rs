//! Best fit with coalescing, pools, wrappers, and the value that owns every allocator of a process.
//!
//! Read in this order:
//!
//! 1. [`Request`], [`Placed`]: what is asked and answered. [`Allocator`]: what every allocator can
//!    do.
//! 2. [`SubAllocator`]: where regions come from. [`DeviceMemory`], [`GrowingMemory`],
//!    [`ManagedMemory`], [`Shareable`],
//!    [`HostPages`]: a backend's; [`HostHeap`], [`NodePages`]: the system's; [`Simulated`]: addresses without memory
//!    behind them; [`Visited`]: any of them, with a [`RegionVisitor`].
//! 3. [`Bfc`]: best fit with coalescing over any upstream; [`ThreadHeaps`]: a heap for each thread.
//!    [`Recorded`]: work on a stream, after which memory is free.
//! 4. [`Trim`]: returning kept memory on request. [`Relief`], [`Relieved`]: the way from 'nothing
//!    is free' to an error that explains itself.
//! 5. [`RegionSource`]: where the blocks of a session come from; [`Reclaim`]: a session that can give some back.
//!    [`Arena`]: such a source.
//! 6. [`Direct`], [`BasicCpu`], [`PinnedHost`], [`Pool`]: host memory. [`DriverPool`]: the driver's
//!    own pool.
//!    [`GraphPool`]: memory that belongs to a graph.
//! 7. [`Tracking`], [`Guard`], [`NanFill`], [`Limit`], [`Log`]: allocators over another; [`Trace`]:
//!    a log, replayed.
//! 8. [`ProcessState`]: all of them in one value, by device and [`AllocatorAttributes`].
//! 9. [`snapshot`]: what a heap looks like at one moment.
//!
//! # Glossary
//!
//! The words of `gpu_api`, and two more: a *chunk* is a piece of a region inside an allocator, in
//! use or not; *slack* is what a chunk has beyond what was asked for.

// Tests: `crates/allocators/tests/suite.rs`, `crates/allocators/tests/overlaps.rs`,
// `crates/allocators/tests/teardown.rs`, `tests/allocation`.

mod allocator;
mod arena;
pub mod bfc;
mod budget;
mod device_memory;
mod direct;
mod driver_pool;
mod graph_pool;
mod growing;
mod host_heap;
mod host_memory;
mod keepers;
mod managed;
mod memory;
mod pool;
mod pool_options;
mod process_state;
mod recorded;
mod region;
mod relief;
mod request;
mod shareable;
mod simulated;
pub mod snapshot;
mod sync;
mod thread_heaps;
mod trace;
mod upstream;
mod visited;
mod wrappers;

pub use allocator::Allocator;
pub use arena::{Arena, ArenaOptions, ArenaStats};
pub use bfc::{AllocatorStats, Bfc, BfcOptions, Completion, Growth, Scope, ScopeStats, Work};
pub use budget::Budget;
pub use device_memory::DeviceMemory;
pub use direct::{BasicCpu, Direct, PinnedHost};
pub use driver_pool::DriverPool;
pub use graph_pool::GraphPool;
pub use growing::GrowingMemory;
pub use host_heap::{HostHeap, NodePages};
pub use host_memory::HostPages;
pub use keepers::Trim;
pub use managed::ManagedMemory;
pub use memory::{DeviceBytes, HostBytes, Memory};
pub use pool::{Pool, PoolCounts};
pub use pool_options::{PoolOptions, Rounding};
pub use process_state::{
    AllocatorAttributes, AllocatorKey, AllocatorKind, KeyedVisitor, MemoryLimit, Owner,
    PhysicalDevice, ProcessOptions, ProcessState, VirtualDevice, VirtualDevices, Wrap,
};
pub use recorded::Recorded;
pub use region::{
    Export, Holder, Lent, Piece, Reclaim, Reclaimed, Region, RegionSource, SourceUsage,
};
pub use relief::{Relief, Relieved};
pub use request::{Placed, Request};
pub use shareable::Shareable;
pub use simulated::Simulated;
pub use snapshot::Snapshot;
pub use thread_heaps::ThreadHeaps;
pub use trace::{Replayed, Step, Trace};
pub use upstream::{Extent, RoomListener, SubAllocator};
pub use visited::{RegionVisitor, Visited};
pub use wrappers::{Damage, Guard, Limit, Log, NanFill, Sizes, TagUse, Tracked, Tracking};

//! Best fit with coalescing, pools, wrappers, and the value that owns every allocator of a process.
//!
//! Read in this order:
//!
//! 1. [`upstream`]: where regions come from; [`simulated`]: addresses without memory behind them.
//! 2. [`bfc`]: [`Bfc`], best fit with coalescing over any upstream.
//! 3. [`snapshot`]: what a heap looks like at one moment.
//!
//! # Glossary
//!
//! The words of `gpu_api`, and two more: a *chunk* is a piece of a region inside an allocator, in use or not; *slack*
//! is what a chunk has beyond what was asked for.

pub mod bfc;
pub mod simulated;
pub mod snapshot;
pub mod upstream;

pub use bfc::{AllocatorStats, Bfc, BfcOptions, Completion, Growth, Placed, Request, Scope, ScopeStats};
pub use simulated::Simulated;
pub use snapshot::Snapshot;
pub use upstream::{Extent, SubAllocator};

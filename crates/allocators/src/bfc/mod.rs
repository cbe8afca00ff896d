//! Best fit with coalescing over regions from upstream: addresses as numbers, nothing is ever read
//! through them.
//!
//! 1. `chunk`: the table of chunks, 32 bytes each.
//! 2. `addresses`: from the address of a chunk in use to its number.
//! 3. `free_chunk`, `index`, `tree`: free chunks in the order of best fit, in bins by size; bins of
//!    many.
//! 4. `region`: what upstream gave.
//! 5. `heap`: the four together, for one thread: find, cut, merge.
//! 6. `pending`: work that may still touch chunks; `window`: what is kept together for a request
//!    that waits.
//! 7. `divisions`, `options`, `stats`: how it is set up, and what it counts.
//! 8. `core`: the heap under its lock. `census`: what [`Snapshot`](crate::Snapshot) shows of it;
//!    `growth`: regions from upstream and back; `turn`: a request that finds nothing free.
//! 9. `best_fit`: [`Bfc`], the front of all this.

// Tests: `crates/allocators/tests/bfc_model.rs`, `crates/allocators/tests/bfc_conformance.rs`,
// `crates/allocators/tests/bfc_room.rs`, `crates/allocators/tests/bfc_growing.rs`,
// `crates/allocators/tests/bfc_work.rs`.
#![forbid(unsafe_code)]

mod addresses;
mod best_fit;
mod census;
mod chunk;
mod core;
mod divisions;
mod free_chunk;
mod growth;
mod heap;
mod index;
mod options;
mod pending;
mod region;
mod stats;
mod tree;
mod turn;
mod window;

pub use best_fit::Bfc;
pub(crate) use core::{BfcState, Core};
pub use divisions::Divisions;
pub(crate) use heap::Fit;
pub use options::{BfcOptions, Growth};
pub use pending::{Completion, Work};
pub(crate) use stats::Counters;
pub use stats::{AllocatorStats, Scope, ScopeStats};
pub(crate) use turn::Turn;

//! Objects: memory that outlives the process that filled it, by a broker's client.
//!
//! 1. `part`: one part of an object, as C describes and reads it.
//! 2. `client`: connect, create, open, watch, remove.
//! 3. `writer`: fill and commit. `reader`: use, advance, sleep, wake, copy. `scratch`: memory that
//!    is never committed.
//! 4. `sealed`: what a pool is, and which of its blocks are whole. `pool`: one that this process
//!    holds. `pool_reader`: one that another process holds.

// Tests: `crates/capi/tests/c_programs.rs`.

mod client;
mod part;
mod pool;
mod pool_reader;
mod reader;
mod scratch;
mod sealed;
mod writer;

pub use client::*;
pub use part::*;
pub use pool::*;
pub use pool_reader::*;
pub use reader::*;
pub use scratch::*;
pub use sealed::*;
pub use writer::*;

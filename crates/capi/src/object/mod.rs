//! Objects: memory that outlives the process that filled it, by a broker's client.
//!
//! 1. `part`: one part of an object, as C describes and reads it.
//! 2. `client`: connect, create, open, watch, remove.
//! 3. `writer`: fill and commit. `reader`: use, advance, sleep, wake, copy. `scratch`: memory that
//!    is never committed.

// Tests: `crates/capi/tests/c_programs.rs`.

mod client;
mod part;
mod reader;
mod scratch;
mod writer;

pub use client::*;
pub use part::*;
pub use reader::*;
pub use scratch::*;
pub use writer::*;

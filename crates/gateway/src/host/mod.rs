//! This host's broker, as a gateway sees it: objects as spans of memory.
//!
//! 1. `local`: the connection, what is there, and where memory lies.
//! 2. `heard`: what other gateways announce. `pace`: how long a read takes.
//! 3. `desk`: whether to serve one more, by the plan. `rings`: staging memory for those that read.
//!    `register`: objects are registered beside the thread of `serve`: the origin's side of a
//!    lease.
//! 4. `source`: the host to read from. `fills`: questions for pieces in the origin's ring. `ways`:
//!    what a read goes by. `report`: what became of a pull. `fetch`: the replica's side of it.
//!    `follow`: removals at the home.

// Tests: `crates/gateway/tests/gateways`, `testing/hosts/src/cases`.

pub mod desk;
pub mod fetch;
pub mod fills;
pub mod follow;
pub mod heard;
pub mod local;
pub mod pace;
mod register;
pub mod report;
pub mod rings;
pub mod serve;
pub mod source;
pub mod step;
pub mod ways;

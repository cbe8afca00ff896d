//! This host's broker, as a gateway sees it: objects as spans of memory.
//!
//! 1. `local`: the connection, what is there, and where memory lies.
//! 2. `serve`: the origin's side of a lease. `fetch`: the replica's side of a pull. `follow`: removals at the home.

pub mod fetch;
pub mod follow;
pub mod local;
pub mod serve;
pub mod step;

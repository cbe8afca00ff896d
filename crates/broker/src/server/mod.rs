//! The broker's process.
//!
//! 1. `catalogue`: which objects there are. Pure. `bequest`: what is left to a successor.
//! 2. `lock`: one broker a directory.
//! 3. `workshop` and `deposit`: the threads that may wait, for the driver and for the keeper.
//! 4. `peer`: a participant and the proof of its death.
//! 5. `service`: the thread that serves all clients. `listing`: the list of objects as JSON.
//! 6. `broker`: how all of it starts.

pub(crate) mod bequest;
pub mod broker;
pub(crate) mod catalogue;
#[cfg(test)]
mod catalogue_tests;
mod deposit;
pub mod listing;
pub mod lock;
mod peer;
mod service;
mod workshop;

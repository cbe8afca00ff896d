//! The broker's process.
//!
//! 1. `bequest`: what a successor gets. `limits`. `action`: messages to send and steps to take.
//! 2. `catalogue`: which objects there are. Pure. Its tables: `names`, `object` and `objects`,
//!    `ledger`, `outcomes`, `leaving`, `watches`. `takeover`: what an epoch shares with the one before it.
//!    `hold`: who holds each pool. `record`: what of that outlives the broker.
//! 3. `place`: the directory. `lock`: one broker a directory.
//! 4. `happened`: what the threads that may wait tell. `workshop` waits for the driver, `deposit`
//!    for the keeper.
//! 5. `peer`: a participant. `name`: the socket's. `service`: the thread that serves all clients.
//!    `admission`: what it does with connections. `listing`: the list of objects as JSON.
//! 6. `control`: what changes meanwhile. `broker`: how all of it starts.

mod action;
mod admission;
pub(crate) mod bequest;
pub mod broker;
mod catalogue;
#[cfg(test)]
mod catalogue_tests;
pub(crate) mod control;
mod deposit;
mod happened;
mod hold;
mod leaving;
mod ledger;
pub(crate) mod limits;
pub mod listing;
pub mod lock;
mod name;
mod names;
mod object;
mod objects;
mod outcomes;
mod peer;
pub mod place;
#[cfg(test)]
mod pools_tests;
pub(crate) mod record;
mod service;
mod takeover;
mod watches;
mod workshop;

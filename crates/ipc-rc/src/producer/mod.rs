//! The producer's side. Its folders are parts with one job each; what lies beside them puts them
//! together.
//!
//! A block's life:
//!
//! | step | where |
//! |---|---|
//! | open a session, allocate or adopt | [`builder`], [`session`], [`blocks`] |
//! | share: fence, grant, descriptor | [`share`], [`fences`], [`grants`] |
//! | share by ticket | [`grants::ticket`], [`fences::ticket_event`] |
//! | share to be read only | [`access`] |
//! | lend, and share what is lent | [`loan`] |
//! | take back what is unclaimed | [`revoke`] |
//! | keep descriptors for others to fetch | [`deposits`] |
//! | drop: limbo | [`sent_block`], [`blocks`] |
//! | collect, retire, give back | [`collect`], [`grants`], [`blocks`] |
//! | connections, questions, and answers | [`service`], [`roster`] |
//! | deaths, mappings, time to live | [`service`], [`roster`] |
//! | holders, and where their memory lies | [`report`], [`snapshot`] |

// Tests: `crates/ipc-rc/tests/session.rs`, `crates/ipc-rc/tests/loan.rs`,
// `crates/ipc-rc/tests/share_many.rs`, `tests/processes`.

pub(crate) mod access;
pub(crate) mod blocks;
pub(crate) mod builder;
pub(crate) mod collect;
pub(crate) mod core;
pub(crate) mod deposits;
pub(crate) mod fences;
pub(crate) mod grants;
pub(crate) mod loan;
pub(crate) mod notice;
pub(crate) mod report;
pub(crate) mod revoke;
pub(crate) mod roster;
pub(crate) mod sent_block;
pub(crate) mod service;
pub(crate) mod session;
pub(crate) mod share;
pub(crate) mod snapshot;
pub(crate) mod wakeups;

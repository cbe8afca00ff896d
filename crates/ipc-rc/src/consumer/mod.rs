//! The consumer's side. Its folders are parts with one job each; what lies beside them puts them
//! together.
//!
//! A block's life:
//!
//! | step | where |
//! |---|---|
//! | connect | [`builder`], [`connecting`], [`participant`], [`connection`] |
//! | claim: redeem a ticket, wait or queue a wait, map, take the lease | [`claim`], [`redeem`], [`mappings`], [`leases`] |
//! | use: address, slices, state; in a graph | [`received_block`], [`graph`] |
//! | drop: release by CPU, or by a release queue once the GPU is done | [`leases`] |
//! | unmap, and what happens when the producer dies | [`service`], [`mappings`] |
//! | ask the producer, and hear it | [`connection`] |
//! | what the application is told | [`notice`] |
//! | look at a session from outside | [`inspect`] |

// Tests: `crates/ipc-rc/tests/loan.rs`, `crates/ipc-rc/tests/closing.rs`, `tests/processes`.

pub(crate) mod builder;
pub(crate) mod claim;
pub(crate) mod claim_error;
pub(crate) mod connecting;
pub(crate) mod connection;
pub(crate) mod graph;
pub(crate) mod inspect;
pub(crate) mod leases;
pub(crate) mod mappings;
pub(crate) mod notice;
pub(crate) mod participant;
pub(crate) mod received_block;
pub(crate) mod redeem;
pub(crate) mod service;
pub(crate) mod wait;

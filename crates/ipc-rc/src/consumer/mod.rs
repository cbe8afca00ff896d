//! The consumer's side, in the order of a block's life:
//!
//! | step | where |
//! |---|---|
//! | connect | [`participant`], [`connecting`] |
//! | claim: redeem a ticket, wait or queue a wait, map, take the lease | [`claim`], [`redeem`], [`mapping_cache`], [`mapping`], [`use_count`] |
//! | use: address, slices, state; in a graph | [`received_block`], [`graph`] |
//! | drop: release by CPU, or by a lane once the GPU is done | [`lease`], [`handle_count`], [`release_queue`] |
//! | unmap, and what happens when the producer dies | [`service`], [`link`] |
//! | ask the producer, and hear it | [`questions`], [`asking`], [`hear`] |
//! | what the application is told | [`notice`] |
//! | look at a session from outside | [`inspect`] |

pub(crate) mod asking;
pub(crate) mod claim;
pub(crate) mod connecting;
pub(crate) mod graph;
pub(crate) mod handle_count;
pub(crate) mod hear;
pub(crate) mod inspect;
pub(crate) mod lease;
pub(crate) mod link;
pub(crate) mod mapping;
pub(crate) mod mapping_cache;
pub(crate) mod notice;
pub(crate) mod participant;
pub(crate) mod questions;
pub(crate) mod received_block;
pub(crate) mod redeem;
pub(crate) mod release_queue;
pub(crate) mod service;
pub(crate) mod use_count;

//! The producer's side, in the order of a block's life:
//!
//! | step | where |
//! |---|---|
//! | open a session, allocate or adopt | [`builder`], [`session`], [`adopted`] |
//! | share: fence, grant, descriptor | [`share`], [`fence`], [`ledger_table`], [`ledger`], [`slot_group`] |
//! | share with whoever asks | [`ticket`], [`ticket_event`] |
//! | drop: limbo | [`block`], [`pending_work`] |
//! | collect, retire, give back | [`core`], [`ledger`], [`slot_group`], [`reclaimed`] |
//! | who connects, what they ask, and what they were told | [`admission`], [`answer`], [`told`] |
//! | deaths, mappings, time to live | [`service`], [`peer`] |
//! | who holds what, and where it lies | [`report`], [`snapshot`] |

pub(crate) mod admission;
pub(crate) mod adopted;
pub(crate) mod answer;
pub(crate) mod block;
pub(crate) mod builder;
pub(crate) mod core;
pub(crate) mod count;
pub(crate) mod fence;
pub(crate) mod ledger;
pub(crate) mod ledger_table;
pub(crate) mod notice;
pub(crate) mod outbox;
pub(crate) mod peer;
pub(crate) mod pending_work;
pub(crate) mod reclaimed;
pub(crate) mod report;
pub(crate) mod service;
pub(crate) mod session;
pub(crate) mod share;
pub(crate) mod slot_group;
pub(crate) mod snapshot;
pub(crate) mod ticket;
pub(crate) mod ticket_event;
pub(crate) mod told;

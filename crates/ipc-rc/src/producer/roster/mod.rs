//! The roster: the connected participants, their ledgers, what each was told, and what waits to be
//! sent to it.

// Tests: `crates/ipc-rc/tests/departure.rs`, `tests/processes/crowd.rs`.

pub(crate) mod ledger_table;
pub(crate) mod outbox;
pub(crate) mod peer;
pub(crate) mod place;
pub(crate) mod table;
pub(crate) mod told;

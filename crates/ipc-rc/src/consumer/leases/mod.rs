//! Leases that this process holds, and how they end.

// Tests: `crates/ipc-rc/tests/loan.rs`, `tests/processes/death.rs`.

pub(crate) mod handle_count;
pub(crate) mod holdings;
pub(crate) mod lease;
pub(crate) mod record;
pub(crate) mod release_queue;

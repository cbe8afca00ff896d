//! Grants: which slot or ticket stands for which block.

// Tests: `crates/ipc-rc/tests/loom_count.rs`, `crates/ipc-rc/tests/loom_dirty.rs`,
// `tests/processes/ticket.rs`.

#[cfg(any(test, fuzzing))]
pub(crate) mod heap_file;
pub(crate) mod lapse;
pub(crate) mod ledger;
pub(crate) mod slot_group;
pub(crate) mod ticket;

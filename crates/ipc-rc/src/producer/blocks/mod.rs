//! Blocks: their bytes, how many there are, and what keeps them after their drop.

// Tests: `crates/ipc-rc/tests/loan.rs`, `crates/ipc-rc/tests/living_block.rs`,
// `crates/ipc-rc/tests/limbo_warnings.rs`.

pub(crate) mod adopted;
pub(crate) mod block;
pub(crate) mod count;
pub(crate) mod memory;
pub(crate) mod pending_work;
pub(crate) mod reclaimed;
pub(crate) mod releases;
pub(crate) mod tokens;

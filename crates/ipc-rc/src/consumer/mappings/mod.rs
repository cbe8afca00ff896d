//! Mappings of the producer's regions, and their uses.

// Tests: `crates/ipc-rc/tests/questions.rs`, `tests/processes/growth.rs`.

pub(crate) mod mapping;
pub(crate) mod mapping_cache;
pub(crate) mod ranges;
pub(crate) mod span;
pub(crate) mod use_count;

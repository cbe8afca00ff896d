//! Objects of a broker: memory that outlives the process that filled it.

// Tests: `crates/python/tests/test_objects.py`.

pub(crate) mod broker;
pub(crate) mod object;
pub(crate) mod part;
pub(crate) mod scratch;
pub(crate) mod writer;

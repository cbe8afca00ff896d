//! Objects of a broker: memory that outlives the process that filled it.

// Tests: `crates/python/tests/test_objects.py`, `crates/python/tests/test_pools.py`.

pub(crate) mod broker;
pub(crate) mod mapping;
pub(crate) mod object;
pub(crate) mod part;
pub(crate) mod pool;
pub(crate) mod pool_reader;
pub(crate) mod scratch;
pub(crate) mod specs;
pub(crate) mod torch_pool;
pub(crate) mod writer;

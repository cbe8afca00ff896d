//! The producer: sessions, their blocks, and arrays of others that they share.

// Tests: `crates/python/tests/test_session.py`, `crates/python/tests/test_share.py`,
// `crates/python/tests/test_lend.py`.

pub(crate) mod adopted;
pub(crate) mod block;
pub(crate) mod loan;
pub(crate) mod session;
pub(crate) mod shared;
pub(crate) mod sharing;
pub(crate) mod torch_pool;

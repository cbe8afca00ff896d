//! The consumer: participants, and the arrays that they claim.

// Tests: `crates/python/tests/test_processes.py`, `crates/python/tests/test_asyncio.py`.

pub(crate) mod participant;
pub(crate) mod received;

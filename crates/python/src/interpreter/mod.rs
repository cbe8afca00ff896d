//! Errors, waits and logs, and what other threads leave to the interpreter.

// Tests: `crates/python/tests/test_forks.py`, `crates/python/tests/test_asyncio.py`.

pub(crate) mod errors;
pub(crate) mod keeper;
pub(crate) mod later;
pub(crate) mod logging;
pub(crate) mod process;
pub(crate) mod queue;
pub(crate) mod waiting;

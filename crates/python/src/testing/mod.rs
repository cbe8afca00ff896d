//! For comparison and tests: the library's calls without Python around them, memory of other
//! allocators, a broker, work that does not end, a panic.

// Tests: `crates/python/tests/test_forks.py`.

pub(crate) mod memory;
pub(crate) mod panic;
pub(crate) mod seals;
pub(crate) mod segments;
pub(crate) mod server;
pub(crate) mod stall;
pub(crate) mod timing;

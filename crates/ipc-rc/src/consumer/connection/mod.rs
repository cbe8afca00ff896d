//! The connection to a producer: questions, answers, and the counter files that it gave.

// Tests: `crates/ipc-rc/tests/questions.rs`, `crates/ipc-rc/tests/nonsense.rs`.

pub(crate) mod asking;
pub(crate) mod files;
pub(crate) mod hear;
pub(crate) mod link;
pub(crate) mod question;
pub(crate) mod questions;

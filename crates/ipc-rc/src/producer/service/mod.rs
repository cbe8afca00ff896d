//! The session's own thread: its turns, the way in, the answers, and the way out.

// Tests: `tests/joining`, `tests/security/connections.rs`.

pub(crate) mod admission;
pub(crate) mod answer;
pub(crate) mod departure;
pub(crate) mod state;
pub(crate) mod turn;

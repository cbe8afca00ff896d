//! The session's own thread: its turns, the way in, and the answers.

pub(crate) mod admission;
pub(crate) mod answer;
pub(crate) mod turn;

//! The connection to a producer: what is asked and heard, and the state that all of a participant shares.

pub(crate) mod asking;
pub(crate) mod hear;
pub(crate) mod link;
pub(crate) mod questions;

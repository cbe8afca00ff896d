//! The asking end of a connection: one table of questions, whatever the protocol.

mod questions;

pub use questions::{Entry, Questions, Row, Unsent};

//! The asking end of a connection, whatever the protocol: its hello, and one table of questions.

mod hello;
mod questions;

pub use hello::{Kin, connect, say_hello};
pub use questions::{Entry, Questions, Row, Unsent};

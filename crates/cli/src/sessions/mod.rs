//! The sessions on this host: what each holds, and who holds it.
//!
//! `gather` asks them, `ls` prints the answers once, `top` shows them live in the `columns` that fit, `snapshot` shows where
//! the memory of one lies.

mod columns;
mod gather;
pub mod ls;
pub mod snapshot;
mod text;
pub mod top;

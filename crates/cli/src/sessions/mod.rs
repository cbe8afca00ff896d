//! The sessions on this host: what each holds, and who holds it.
//!
//! `gather` asks them, `ls` prints the answers once, `top` shows them live.

mod gather;
pub mod ls;
mod text;
pub mod top;

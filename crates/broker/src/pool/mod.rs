//! Which blocks of a pool are whole: the holder's side of the journal, and what anybody finds there.
//!
//! The words and their protocol are [`transport::shared::journal`]'s. `table`: what a holder did with
//! each block, beside the words, which another process could write. `previous`: how the hold before
//! this one ended. `segments`: places in a part, for an allocator above.

// Tests: `crates/broker/src/pool/table_tests.rs`, `crates/broker/tests/objects/pools.rs`.

mod previous;
mod segments;
pub(crate) mod table;
#[cfg(test)]
mod table_tests;

pub use previous::Previous;
pub use segments::Segments;
pub use table::Sealed;
pub use transport::shared::journal::Key;
pub use transport::shared::journal_file::{blocks_of, bytes_for};

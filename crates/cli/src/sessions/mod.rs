//! The sessions on this host: what each holds, and for which process.
//!
//! `gather` asks them, `ls` prints the answers once, `top` shows them live in the `columns` that
//! fit and reads its `keys`, `snapshot` shows where the memory of one lies, `metrics` gives all of it to programs.
//! `brokers` looks at the broker, which the same commands show.

// Tests: `crates/cli/tests/program.rs`, `crates/cli/tests/snapshot.rs`,
// `crates/cli/tests/objects.rs`.

pub mod brokers;
mod columns;
mod gather;
mod keys;
pub mod ls;
pub mod metrics;
pub mod snapshot;
pub mod text;
pub mod top;

//! The sessions on this host: what each holds, and for which process.
//!
//! `gather` asks them, `ls` prints the answers once, `top` shows them live in the `columns` that
//! fit and reads its `keys`, `snapshot` shows where the memory of one lies, `metrics` gives all of
//! it to programs, as `open_metrics` writes it. `brokers` looks at the broker, which the same
//! commands show; `endpoint` serves its `broker_metrics` over HTTP.

// Tests: `crates/cli/tests/program.rs`, `crates/cli/tests/snapshot.rs`,
// `crates/cli/tests/objects.rs`, `crates/cli/tests/metrics.rs`.

mod broker_metrics;
pub mod brokers;
mod columns;
pub mod endpoint;
mod gather;
mod keys;
pub mod ls;
pub mod metrics;
mod open_metrics;
pub mod snapshot;
pub mod text;
pub mod top;

//! The memory that producer and participant share: words, each with its protocol, and the files
//! they lie in.

// Tests: `crates/transport/tests/loom_slot.rs`, `crates/transport/tests/loom_timeline.rs`,
// `crates/transport/tests/loom_journal.rs`, `crates/transport/tests/loom_waker.rs`.

pub mod counter_file;
pub mod dirty;
pub mod journal;
pub mod journal_file;
pub mod sealed_file;
pub mod slot;
pub mod timeline;
pub mod word;

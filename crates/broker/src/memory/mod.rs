//! Memory without an owner: made and kept as descriptors, and mapped at addresses that outlive what
//! is mapped.
//!
//! 1. `store`: makes regions, for the broker.
//! 2. `range`: addresses that regions come and go on, for writers and readers.

// Tests: `crates/broker/tests/objects/gpu.rs`, `crates/broker/tests/objects/limits.rs`.

pub mod range;
pub mod store;

//! Gateways find each other and ask each other, by Zenoh.
//!
//! 1. `session`: addresses and certificates. `key`: what is announced, as keys.
//! 2. `call`: a question and its answer. `heard`: what other gateways announce.

// Tests: `crates/gateway/tests/gateways/trust.rs`, `crates/gateway/tests/protocol.rs`.

pub mod call;
pub mod heard;
pub mod key;
pub mod session;

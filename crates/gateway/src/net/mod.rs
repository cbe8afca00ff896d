//! Gateways find each other and ask each other, by Zenoh.
//!
//! 1. `session`: addresses and certificates. `key`: names of gateways, as keys.
//! 2. `live`: which gateways are there. `call`: a question and its answer. `seal`: whose an answer is.
//!
//! A gateway announces itself, and nothing of its objects: a host of 20,000 objects costs the
//! others one token. Who wants a name asks every gateway that is there, and each says yes, with its
//! load, or no. `replica::search` has what follows from answers that are lost, late or forged, and
//! `origin::index` why a no is true.

// Tests: `crates/gateway/tests/gateways/trust.rs`, `crates/gateway/tests/protocol.rs`.

pub mod call;
pub mod key;
pub mod live;
pub mod seal;
pub mod session;

//! The keeper: a process that holds descriptors, so that the memory behind them survives the
//! broker.
//!
//! 1. `notify`: the datagrams, which are systemd's notify protocol and one message that reads back.
//! 2. `shelf`: the kept descriptors, by name. Pure.
//! 3. `process`: the loop that serves the socket and starts the broker again.
//! 4. `pulse`: what is known of a keeper without asking it. `depositor`: the broker's end.
//!
//! No driver's library is ever loaded into a keeper, so that none can take it down.

// Tests: `crates/broker/tests/objects/takeover.rs`, `crates/cli/tests/deploy.rs`.

pub mod depositor;
pub mod notify;
pub mod process;
pub mod pulse;
pub mod shelf;

//! The commands of `gpu-ipc-gateway`.
//!
//! 1. `args`: its arguments. `state`: the file by which commands find the gateway that runs on this
//!    host.
//! 2. `run`: serves, with a `log`, which is that of keeper and broker. `pulls`: its child, which
//!    pulls. `pull`: asks for objects. `objects`: looks.
//!    `certs`: makes certificates.

// Tests: `crates/gateway/tests/gateways`, `testing/hosts/src/cases`.

pub mod args;
pub mod certs;
#[path = "../../../cli/src/log.rs"]
pub mod log;
pub mod objects;
pub mod pull;
pub mod pulls;
pub mod run;
pub mod state;

//! Replicas of gpu-ipc's objects on other hosts.
//!
//! A **gateway** is a process beside a host's broker, an ordinary reader and writer of it. It
//! leases an object to a gateway of another host, which reads the bytes by a [`transport`], asks
//! for a confirmation, and commits a **replica**: the same identity and epoch under the same name.
//! Neither the user's process nor the broker speaks to a network.
//!
//! Read in this order:
//!
//! 1. [`transport`]: carries bytes between the memory of two gateways, and knows nothing of
//!    objects. [`carrier`]: does so in a process of its own.
//! 2. [`message`]: what two gateways say to each other. [`net`]: how they find each other and ask.
//! 3. [`origin`]: leases objects to other gateways, and why a confirmed copy is right.
//!    [`replica`]: pulls objects from them. [`digest`]: what an object's bytes are. [`local`]: this
//!    host's broker, which both have.
//! 4. [`plan`]: which host reads from which, a crate of its own without dependencies; `simulation`
//!    beside it runs thousands of hosts over it.
//! 5. [`program`]: the commands.

// Tests: `crates/gateway/tests/gateways`, `testing/hosts/src/cases`.

pub mod carrier;
pub mod digest;
mod error;
pub mod local;
pub mod message;
pub mod net;
pub mod origin;
pub mod program;
pub mod replica;
pub mod step;
pub mod transport;

pub use error::{Error, Result};
pub use gpu_ipc_gateway_plan as plan;

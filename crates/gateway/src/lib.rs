//! Replicas of gpu-ipc's objects on other hosts.
//!
//! A **gateway** is a process beside a host's broker, an ordinary reader and writer of it. It leases an object to a
//! gateway of another host, which reads the bytes by a [`transport`], asks for a confirmation, and commits a
//! **replica**: the same identity and epoch under the same name. Neither the user's process nor the broker speaks to a
//! network.
//!
//! Read in this order:
//!
//! 1. [`transport`]: carries bytes between the memory of two gateways, and knows nothing of objects.
//! 2. [`plan`]: who reads from whom, a crate of its own without dependencies; `simulation` beside it runs thousands of
//!    hosts over it.

mod error;
pub mod transport;

pub use error::{Error, Result};
pub use gpu_ipc_gateway_plan as plan;

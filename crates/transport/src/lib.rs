//! The channel between two processes that share GPU memory: messages, words in shared memory, a
//! socket, proof of death.
//!
//! Read in this order:
//!
//! 1. [`wire`]: the descriptor, the address of a lease, the messages.
//! 2. [`shared`]: slot, dirty word and timeline word, each with its protocol, and the counter file
//!    they lie in.
//! 3. [`os`]: the socket, the process at its other end, waiting and waking.
//! 4. [`server`]: the way in, the messages and the proof of death of many processes.
//! 5. [`client`]: what a process asks its server, until it is answered.
//!
//! Sessions and participants (`ipc-rc`) are built on this crate. It knows no blocks, regions or
//! vendors. Its items are for the crates of this workspace: users depend on `gpu-ipc`.

// Tests: `tests/joining`, `tests/security`.

pub mod client;
pub mod os;
pub mod server;
pub mod shared;
mod trace_point;
pub mod wire;

//! The way that bytes take: from the object's memory itself, or through staging buffers.
//!
//! UCX carries virtual memory (`cuMemCreate`) by its slowest way where there is no RDMA: 0.4 GB/s
//! between two GPUs of one host, where `cudaMalloc` gets 368 (NVLink) and pinned host memory 1.4
//! over TCP (H200, NIXL 1.5.1, UCX 1.23). So the way is not known, but measured when a pull begins
//! to read.
//!
//! 1. [`choice`]: which ways there are, what a trial of each says, and which is taken.
//! 2. [`ring`]: the way through staging buffers, with copies and reads overlapped, as one
//!    [`Transfer`](super::Transfer).
//! 3. [`staging`]: the buffers of one side, and copies between them and an object.
//! 4. [`route`]: trials, the choice and the read, as one [`Transfer`](super::Transfer).

// Tests: `crates/gateway/tests/staging.rs`, `crates/gateway/tests/gateways/rings.rs`.

pub mod choice;
pub mod ring;
pub mod route;
pub mod staging;

pub use choice::{Land, Way};

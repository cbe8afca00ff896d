//! The way that bytes take: from the object's memory itself, or through staging buffers.
//!
//! UCX carries virtual memory (`cuMemCreate`) by its slowest way where there is no RDMA: 0.4 GB/s between two GPUs of
//! one host, where `cudaMalloc` gets 368 (NVLink) and pinned host memory 1.4 over TCP (H200, NIXL 1.5.1, UCX 1.23). So
//! the way is not known, but measured when a gateway starts.
//!
//! 1. [`choice`]: which ways there are, how each is measured, and which is taken.
//! 2. [`ring`]: the way through staging buffers, with copies and reads overlapped, as one
//!    [`Transfer`](super::Transfer).

pub mod choice;
pub mod ring;

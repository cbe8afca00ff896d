//! Share GPU memory with an unmodified PyTorch, both ways, by PyTorch's own protocol.
//!
//! PyTorch shares a CUDA or HIP tensor as eight plain values (`UntypedStorage._share_cuda_()`), among them a driver's
//! handle and one counter in a file of shared memory. This crate reads and writes those values, so no Python extension
//! is needed: any transport that carries them will do.
//!
//! In reading order:
//!
//! | module | what |
//! |---|---|
//! | [`SegmentHandle`] | the bytes that name a segment, by version and kind |
//! | [`Fields`], [`SharedStorage`] | the eight values, unchecked and checked |
//! | [`CounterFile`] | the counters, byte for byte |
//! | [`Receiver`], [`ReceivedStorage`] | **from PyTorch**: open, use, let go without blocking |
//!
//! ```
//! use gpu_ipc_torch::CounterFile;
//!
//! let file = CounterFile::create()?;
//! file.grant(0);
//! assert_eq!((file.users(), file.count(0)), (1, 1));
//! # Ok::<(), gpu_api::Error>(())
//! ```
#![deny(unsafe_op_in_unsafe_fn)]

mod counter_file;
mod fields;
mod receiver;
mod releases;
mod segment_handle;
mod segments;

pub use counter_file::{CounterFile, CounterName, Released, SLOTS};
pub use fields::{Counter, Fields, Place, SharedStorage};
pub use receiver::{ReceivedStorage, Receiver};
pub use releases::ReceiverStats;
pub use segment_handle::{Chunks, ExpandableSegment, SegmentHandle};

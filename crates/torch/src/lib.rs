//! Share GPU memory with an unmodified PyTorch, both ways, by PyTorch's own protocol.
//!
//! PyTorch shares a CUDA or HIP tensor as eight plain values (`UntypedStorage._share_cuda_()`),
//! among them a driver's handle and one counter in a file of shared memory. This crate reads and
//! writes those values, so no Python extension is needed: any transport that carries them will do.
//!
//! In reading order:
//!
//! | module | what |
//! |---|---|
//! | [`SegmentHandle`] | the bytes that name a segment, by version and kind |
//! | [`Fields`], [`SharedStorage`] | the eight values, unchecked and checked |
//! | [`CounterFile`] | the counters, byte for byte |
//! | [`Receiver`], [`ReceivedStorage`] | **from PyTorch**: open, use, let go without blocking |
//! | [`Sender`], [`Recipient`] | **to PyTorch**: send, collect, and what is done about a receiver that was killed |
//! | [`Layout`], [`Dtype`] | what of a storage a tensor is |
//! | [`TensorMessage`] | all of it as plain bytes, for transports that carry nothing else |
//!
//! ```
//! use gpu_ipc_torch::CounterFile;
//!
//! let file = CounterFile::create()?;
//! file.grant(0);
//! assert_eq!((file.users(), file.count(0)), (1, 1));
//! # Ok::<(), gpu_api::Error>(())
//! ```

// Tests: `crates/torch/tests/processes`, `tests/torch`.
#![deny(unsafe_op_in_unsafe_fn)]

mod counter_file;
mod fields;
mod layout;
mod ledger;
mod message;
mod receiver;
mod recipient;
mod releases;
mod segment_handle;
mod segments;
mod sender;

pub use counter_file::{CounterFile, CounterName, Released, SLOTS};
pub use fields::{Counter, Fields, Place, SharedStorage};
pub use layout::{Dtype, Layout};
pub use ledger::{Collected, Outstanding, SendId};
pub use message::TensorMessage;
pub use receiver::{ReceivedStorage, Receiver};
pub use recipient::{Process, Recipient};
pub use releases::ReceiverStats;
pub use segment_handle::{Chunks, ExpandableSegment, SegmentHandle};
pub use sender::{Sender, Sending};

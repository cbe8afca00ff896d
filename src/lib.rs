//! Share GPU memory between processes without copying it, and free it exactly when the last one is done, whoever dies.
//!
//! | what | where |
//! |---|---|
//! | which devices can be used, and why not the others | [`detect`], [`detect_only`] |
//! | a producer: allocate, share, drop, collect | [`Session`], [`SentBlock`], [`To`], [`After`] |
//! | the bytes that travel | [`Descriptor`] |
//! | a consumer: connect, claim, use, drop | [`Participant`], [`ReceivedBlock`], [`Wait`], [`State`] |
//! | streams that work is ordered on | [`Stream`] |
//! | what a vendor provides | [`GpuBackend`], [`Gpu`] |
//! | every allocator of the process | [`allocators`], [`process_state`], [`SessionBuilder::arena`] |
//! | errors | [`Error`], [`ClaimError`] |
//! | who holds what, from outside | [`sessions`], [`inspect`], [`snapshot`] |
//!
//! `docs/EMBEDDING.md` goes through a whole program, and says what the library does inside a process: its threads, which
//! call runs where, forks, containers. Sessions, participants, streams and what they give are `Send + Sync`, and all but
//! [`SentBlock`] are cheap to clone. Sizes and offsets are bytes.
//!
//! Everything that examples take from `ipc_rc` and `gpu_api` is here, and what they take from `allocators` is in
//! [`allocators`](mod@allocators).
//!
//! ```
//! use gpu_ipc::{BackendKind, Session, detect};
//! let dir = tempfile::tempdir()?;
//! let gpu = detect()?.first(BackendKind::Host)?;
//! let session = Session::builder(gpu).socket(dir.path().join("s")).open()?;
//! let block = session.alloc(1 << 20)?;
//! assert_eq!(session.stats().live_blocks, 1);
//! # drop(block);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod detect;
mod state;

pub use detect::{Detected, detect, detect_only};
pub use gpu_api::*;
pub use ipc_rc::*;
pub use state::process_state;

/// Allocators of device and host memory, and the value that owns those of a process.
pub use ::allocators;

/// NVIDIA GPUs.
#[cfg(feature = "cuda")]
pub mod cuda {
    pub use backend_cuda::{CudaBackend, interop};
}

/// AMD GPUs.
#[cfg(feature = "hip")]
pub mod hip {
    pub use backend_hip::{
        Finding, Findings, HipBackend, Inspection, KnownBug, LIBRARY, PROOF, Proof, Step, Version, probe,
    };
}

/// Objects: memory that outlives the process that filled it, and the broker that owns it.
#[cfg(feature = "broker")]
pub use ::broker;

/// Tensors shared with an unmodified PyTorch, both ways.
#[cfg(feature = "torch")]
pub use gpu_ipc_torch as torch;

/// Shared memory instead of a GPU.
#[cfg(feature = "host")]
pub mod host {
    pub use backend_host::{HostBackend, HostConfig};
}

/// The README's code.
#[cfg(all(doctest, feature = "host"))]
#[doc = include_str!("../README.md")]
struct Readme;

/// The code of the document for embedders.
#[cfg(all(doctest, feature = "host"))]
#[doc = include_str!("../docs/EMBEDDING.md")]
struct Embedding;

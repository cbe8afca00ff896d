//! Share GPU memory between processes without copying it, and free it when the last process is
//! done, even after a crash.
//!
//! A producer allocates a block, shares it and drops it. The block stays in *limbo* until every
//! process that claimed it has dropped it and its GPU work is done. A killed consumer's blocks come
//! back, a stopped one's stay with it, and an unclaimed descriptor lapses after a time.
//!
//! ```
//! use std::time::Duration;
//!
//! use gpu_ipc::{After, BackendKind, Participant, Session, Stream, To, Wait, detect};
//!
//! # let directory = tempfile::tempdir()?;
//! let gpu = detect()?.first(BackendKind::Host)?; // or `Cuda`, or `Hip`
//! let stream = Stream::create(&gpu)?;
//! let session = Session::builder(gpu.clone());
//! # let session = session.socket(directory.path().join("s"));
//! let session = session.open()?;
//! // Usually another process, which was told the path.
//! let consumer = Participant::builder(gpu).connect(session.socket_path())?;
//!
//! let block = session.alloc(1 << 20)?;
//! stream.write(&block, b"seven")?; // or a kernel writes to `block.device_ptr()`
//! let descriptor = block.share(To::Participant(consumer.id()), After::Stream(&stream))?;
//! drop(block); // never blocks: the block waits in limbo
//!
//! // `descriptor.as_bytes()` travels by any transport.
//! let received = consumer.claim(descriptor.as_bytes(), Wait::Stream(&stream), None)?;
//! let mut bytes = [0; 5];
//! stream.read(&received, &mut bytes)?; // or a kernel reads `received.device_ptr()`
//! assert_eq!(&bytes, b"seven");
//! drop(received); // the memory is the producer's again
//!
//! drop(consumer);
//! assert!(session.shutdown(Duration::from_secs(60)).clean);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Where things are
//!
//! | for | module | begins with |
//! |---|---|---|
//! | every program | the root | [`detect`], [`Session`], [`Participant`], [`Stream`], [`Error`] |
//! | a producer: options, counts, notices | [`session`] | [`SessionBuilder`](session::SessionBuilder), [`ShareOptions`](session::ShareOptions), [`Stats`](session::Stats) |
//! | a consumer: options, notices, graphs | [`participant`] | [`ParticipantBuilder`](participant::ParticipantBuilder), [`Notice`](participant::Notice) |
//! | a tool that looks from outside | [`admin`] | [`sessions`](admin::sessions), [`inspect`](admin::inspect), [`snapshot`](admin::snapshot) |
//! | every allocator of a process | [`allocators`] | [`process_state`](allocators::process_state), [`Arena`](allocators::Arena) |
//! | a backend, or calls of the driver | [`backend`] | [`GpuBackend`](backend::GpuBackend), [`DevicePtr`](backend::DevicePtr) |
//! | the words of this library | [`concepts`] | a picture and a table |
//! | one vendor | [`host`], `cuda`, `hip` | `interop`, `probe` |
//! | memory that outlives its maker | `broker` | `Client` |
//! | tensors shared with PyTorch | `torch` | `TensorMessage` |
//!
//! `examples/tensor.rs` is a whole program of two processes. `docs/EMBEDDING.md` says what the
//! library does inside a process: its threads, which call runs where, forks, containers. Sessions,
//! participants, streams and what they give are `Send + Sync`, and all but [`SentBlock`] are cheap
//! to clone. Sizes and offsets are bytes.
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `host` (default) | shared memory in place of a GPU: the reference backend |
//! | `cuda` | NVIDIA GPUs, through the CUDA driver, loaded at run time |
//! | `cudarc-0_19` | conversions from the types of cudarc 0.19: `cuda::interop` |
//! | `hip` | AMD GPUs, through the HIP runtime, loaded at run time |
//! | `broker` | objects: memory that outlives the process that filled it |
//! | `torch` | tensors shared with an unmodified PyTorch, both ways |
//!
//! Features add up, and each builds on a machine without any driver: [`detect`] says at run time
//! what is missing.
//!
//! # Platforms
//!
//! Linux 5.3 or later on x86-64. Both processes run on one machine, and each must see the device.
//! `gpu-ipc doctor` says what a machine lacks.
//!
//! # Logs
//!
//! The library speaks through `tracing`. Its targets are the modules of its crates: `ipc_rc`
//! (sessions and participants), `transport` (sockets and threads) and `broker`. What an error calls
//! *the log* is `WARN` and `ERROR` there; `DEBUG` tells of connections, deaths and closings. The
//! target `gpu_ipc::step` at `TRACE` names each step of a block's life.

// Tests: `tests/processes`, `tests/api.rs`, `tests/debug.rs`.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod detect;
mod state;

pub use detect::detect;
pub use gpu_api::{BackendKind, Error, Gpu, ParticipantId, Result};
pub use ipc_rc::{
    After, ClaimError, Claims, Descriptor, Gone, Participant, ReceivedBlock, SentBlock, Session,
    State, Stream, To, Wait,
};

/// For a producer: options, counts and notices of a [`Session`].
pub mod session {
    pub use ipc_rc::{
        AdoptToken, Collected, Contents, Departure, DepositId, LeaseId, Loan, Released, SentSlice,
        SessionBuilder, SessionId, SessionNotice, ShareOptions, ShutdownReport, Stats,
    };
}

/// For a consumer: options and notices of a [`Participant`], and blocks in a GPU's graphs.
pub mod participant {
    pub use ipc_rc::{Connecting, GraphBlocks, Notice, ParticipantBuilder};
}

/// For tools that look from outside: the sessions of this host, and the processes that hold their
/// blocks.
pub mod admin {
    pub use ipc_rc::{Holder, SessionReport, inspect, sessions, snapshot};
}

/// For backends and for code that calls the driver itself: devices, memory, streams, events and the
/// traits of a vendor.
pub mod backend {
    pub use gpu_api::{
        Access, AddressRange, Allocation, Caps, CaptureStatus, DeviceId, DeviceInfo, DevicePtr,
        DeviceUuid, DriverError, EventHandle, EventKind, ForkGuard, GpuBackend, GpuCaptures,
        GpuCopies, GpuDescriptors, GpuDevices, GpuEventHandles, GpuEvents, GpuHandles,
        GpuHostFunctions, GpuHostMemory, GpuManaged, GpuMemory, GpuPeers, GpuPointers, GpuPools,
        GpuRanges, GpuStore, GpuStreams, GpuWords, Group, HostMemory, HostPtr, KernelPages,
        MAX_BATCH, MemHandle, MemoryInfo, MemoryKind, PointerInfo, PoolUsage, QUARANTINE, RawEvent,
        RawMemory, RawPool, RawStream, RegionId, Sharing, Spot, StreamIdentity, StreamInfo,
        StreamOp, WordOps, WordPtr, explain, groups, refuse_capture, thread,
    };
    pub use ipc_rc::{
        Export, Holder, Lent, Piece, Reclaim, Reclaimed, Region, RegionSource, SourceUsage,
    };

    pub use crate::detect::{Backends, Detected, detect_only};
}

/// Allocators of device and host memory, and the value that owns those of a process.
pub mod allocators {
    pub use ::allocators::*;

    pub use crate::state::process_state;
}

/// NVIDIA GPUs.
#[cfg(feature = "cuda")]
pub mod cuda {
    pub use backend_cuda::{Cuda, CudaBackend, interop};
}

/// AMD GPUs.
#[cfg(feature = "hip")]
pub mod hip {
    pub use backend_hip::{
        Hip, HipBackend, Inspection, KnownBug, LIBRARY, PROOF, Proof, Step, Version,
    };
    pub use hip_probe as probe;
    pub use hip_probe::{Finding, Findings};
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

#[doc = include_str!("../docs/CONCEPTS.md")]
pub mod concepts {}

/// The README's code.
#[cfg(all(doctest, feature = "host"))]
#[doc = include_str!("../README.md")]
struct Readme;

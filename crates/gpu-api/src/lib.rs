//! What a GPU vendor provides for sharing memory between processes.
//!
//! Read in this order:
//!
//! 1. [`device`]: which devices there are and what they can do.
//! 2. [`memory`]: addresses, allocations, handles that another process can open.
//! 3. [`stream`]: queues of GPU work, events, and the 64-bit words that order work across
//!    processes.
//! 4. [`range`]: memory apart from addresses, and addresses to map it on. [`pool`]: the driver's
//!    own pools, and managed memory.
//! 5. [`backend`]: [`GpuBackend`], the traits that a vendor implements over those above.
//! 6. [`id`]: the numbers of regions and participants, which every crate above has in common.
//! 7. [`error`]: one [`Error`], by what the caller can do. [`fork`]: [`ForkGuard`], which tells a
//!    forked child; `guarded`: a backend that refuses one.
//! 8. [`pages`]: [`KernelPages`], host memory from the kernel, for backends.
//!
//! # Glossary
//!
//! | word | meaning |
//! |---|---|
//! | producer | the process that allocated the memory and decides when it is freed |
//! | participant, consumer | a process that a producer shares with, connected once |
//! | region | one allocation of the driver: the unit that another process maps |
//! | block | a piece of a region: the unit of sharing and of reuse |
//! | lease | the right of one participant to one block, until it releases it |
//! | slot | the 64-bit word in shared memory that holds the state of one lease |
//! | descriptor | the plain bytes that travel from producer to consumer |
//! | limbo | the state of a dropped block until its last lease has ended |
//! | collect | finding ended leases, and freeing the blocks in limbo that had no others |
//! | timeline word | a 64-bit word in shared memory that only rises, stored and waited for by GPU queues |
//!
//! # Example
//!
//! ```
//! use gpu_api::{BackendKind, Error};
//!
//! let e = Error::NotCompiled { backend: BackendKind::Cuda };
//! assert_eq!(e.to_string(), "the cuda backend is not compiled in; build with the feature `cuda`");
//! ```
//!
//! [`thread`] starts every thread of the library, [`lock`] takes its locks. [`groups`] re-exports every trait, for calls on a
//! backend's own type.

// Tests: `testing/conformance/src`.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod backend;
mod calls;
pub mod device;
pub mod error;
pub mod fork;
mod gpu;
mod guarded;
pub mod id;
mod locality;
pub mod lock;
pub mod memory;
pub mod pages;
pub mod pool;
pub mod range;
pub mod stream;
pub mod thread;

pub use backend::{
    GpuBackend, GpuCaptures, GpuCopies, GpuDescriptors, GpuDevices, GpuEventHandles, GpuEvents,
    GpuHandles, GpuHostFunctions, GpuHostMemory, GpuManaged, GpuMemory, GpuPeers, GpuPointers,
    GpuStreams, GpuWords, Group, QUARANTINE, StreamInfo, WordOps, refuse_capture,
};
/// The traits of a backend, to call the methods of a backend's own type.
pub mod groups {
    pub use crate::{
        GpuBackend, GpuCaptures, GpuCopies, GpuDescriptors, GpuDevices, GpuEventHandles, GpuEvents,
        GpuHandles, GpuHostFunctions, GpuHostMemory, GpuManaged, GpuMemory, GpuPeers, GpuPointers,
        GpuPools, GpuRanges, GpuStore, GpuStreams, GpuWords,
    };
}
pub use device::{Arrays, BackendKind, Caps, DeviceId, DeviceInfo, DeviceUuid, MemoryInfo};
pub use error::{DriverError, Error, Result, explain};
pub use fork::ForkGuard;
pub use gpu::Gpu;
pub use id::{Holder, ParticipantId, RegionId, Spot};
pub use memory::{
    Access, AddressRange, Allocation, DevicePtr, HostMemory, HostPtr, MemHandle, MemoryKind,
    PointerInfo, Sharing, close_on_exec, round_up,
};
pub use pages::KernelPages;
pub use pool::{GpuPools, PoolUsage, RawPool};
pub use range::{GpuRanges, GpuStore, RawMemory};
pub use stream::{
    CaptureStatus, EventHandle, EventKind, MAX_BATCH, RawEvent, RawStream, StreamIdentity,
    StreamOp, WordPtr, contain,
};

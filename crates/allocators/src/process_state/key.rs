//! The names of a process's allocators.

use gpu_api::BackendKind;

use super::VirtualDevice;

/// Names an allocator of a [`ProcessState`](super::ProcessState). In this order they are destroyed:
/// device memory first, while host memory that the device might still read exists.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum AllocatorKey {
    /// Memory of a virtual device for this process alone.
    Device(VirtualDevice),
    /// Memory of a virtual device for blocks of sessions.
    Arena(VirtualDevice),
    /// Pinned host memory that a vendor's devices reach, of a NUMA node or of any.
    Pinned(BackendKind, Option<u32>),
    /// Plain host memory of a NUMA node or of any.
    Cpu(Option<u32>),
}

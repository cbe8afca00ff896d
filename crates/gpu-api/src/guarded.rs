//! A backend as a [`Gpu`](crate::Gpu) hands it out: every call of a forked child is refused before
//! it comes to the vendor's code, which has locks that a thread of the parent's may hold and a
//! driver that is not for a child.

// Tests: `tests/threads.rs`, `tests/processes/default_stream.rs`.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{
    GpuBackend, GpuCaptures, GpuCopies, GpuDescriptors, GpuDevices, GpuEventHandles, GpuEvents,
    GpuHandles, GpuHostFunctions, GpuHostMemory, GpuManaged, GpuMemory, GpuPeers, GpuPointers,
    GpuStreams, GpuWords, Group, StreamInfo, WordOps,
};
use crate::{
    Access, AddressRange, Allocation, BackendKind, CaptureStatus, DeviceId, DeviceInfo, DevicePtr,
    Error, EventHandle, EventKind, ForkGuard, GpuPools, GpuRanges, GpuStore, HostMemory, HostPtr,
    MemHandle, MemoryInfo, PointerInfo, PoolUsage, RawEvent, RawMemory, RawPool, RawStream, Result,
    Sharing, StreamOp, WordPtr,
};

/// Passes calls on to a backend, in the process that made this alone.
#[derive(Debug)]
pub(crate) struct Guarded {
    pub(crate) backend: Arc<dyn GpuBackend>,
    pub(crate) fork: ForkGuard,
}

/// Passes each call on: those of the first block look at nothing but data, and the others are
/// refused in a forked child.
macro_rules! pass_on {
    ($group:ident:
        $(data { $(fn $known:ident($($given:ident: $kind:ty),*) -> $told:ty;)* })?
        $(safe { $(fn $name:ident($($arg:ident: $type:ty),*) -> $made:ty;)* })?
        $(unsafe { $(fn $risky:ident($($part:ident: $what:ty),*) -> $done:ty;)* })?
    ) => {
        // SAFETY: the group's conditions: a call that is passed on keeps those of the backend
        // below, and one that is refused has done nothing.
        #[deny(clippy::missing_trait_methods, reason = "a default would not be the backend's own")]
        unsafe impl $group for Guarded {
            $($(fn $known(&self $(, $given: $kind)*) -> $told {
                self.backend.$known($($given),*)
            })*)?
            $($(fn $name(&self $(, $arg: $type)*) -> Result<$made> {
                self.fork.check(DEVICE)?;
                self.backend.$name($($arg),*)
            })*)?
            $($(unsafe fn $risky(&self $(, $part: $what)*) -> Result<$done> {
                self.fork.check(DEVICE)?;
                // SAFETY: the backend's method of the same name has our conditions.
                unsafe { self.backend.$risky($($part),*) }
            })*)?
        }
    };
}

/// What a child is told belongs to its parent.
pub(crate) const DEVICE: &str = "this device";

pass_on! { GpuDevices:
    data {
        fn kind() -> BackendKind;
        fn device_files() -> &[&'static str];
        fn signs_of_life(pid: u32, sign: u32) -> Vec<PathBuf>;
        fn quarantine(is_shown: bool) -> Duration;
    }
    safe {
        fn device_count() -> u32;
        fn own_sign(device: DeviceId) -> u32;
        fn device_info(device: DeviceId) -> DeviceInfo;
        fn pci_address(device: DeviceId) -> Option<String>;
        fn host_numa_node(device: DeviceId) -> Option<u32>;
        fn memory_info(device: DeviceId) -> MemoryInfo;
        fn granularity(device: DeviceId) -> u64;
        fn shared_context(device: DeviceId) -> bool;
    }
}

pass_on! { GpuMemory:
    safe {
        fn alloc(device: DeviceId, len: u64, sharing: Sharing) -> Allocation;
    }
    unsafe {
        fn free(base: DevicePtr) -> ();
        fn close(base: DevicePtr) -> ();
    }
}

pass_on! { GpuPointers:
    safe {
        fn address_range(ptr: DevicePtr) -> AddressRange;
        fn classify(ptr: DevicePtr) -> PointerInfo;
    }
}

pass_on! { GpuHostMemory:
    safe {
        fn host_alloc(device: DeviceId, len: usize, memory: HostMemory) -> HostPtr;
    }
    unsafe {
        fn host_free(ptr: HostPtr) -> ();
    }
}

pass_on! { GpuHandles:
    safe {
        fn export_handle(base: DevicePtr) -> MemHandle;
        fn open_handle(device: DeviceId, handle: &MemHandle) -> DevicePtr;
        fn is_served(base: DevicePtr) -> bool;
    }
}

pass_on! { GpuDescriptors:
    safe {
        fn export_fd(base: DevicePtr) -> OwnedFd;
        fn import_fd(device: DeviceId, fd: BorrowedFd<'_>, len: u64, access: Access) -> DevicePtr;
        fn import_fds(
            device: DeviceId,
            fds: &mut dyn ExactSizeIterator<Item = Result<OwnedFd>>,
            len: u64,
            access: Access
        ) -> DevicePtr;
        fn maps_read_only(device: DeviceId) -> bool;
        fn read_only_fd(device: DeviceId, fd: BorrowedFd<'_>) -> Option<OwnedFd>;
    }
}

pass_on! { GpuEvents:
    safe {
        fn create_event(device: DeviceId, kind: EventKind) -> RawEvent;
    }
    unsafe {
        fn record_event(event: RawEvent, stream: RawStream) -> ();
        fn query_event(event: RawEvent) -> bool;
        fn stream_wait_event(stream: RawStream, event: RawEvent) -> ();
        fn destroy_event(event: RawEvent) -> ();
    }
}

pass_on! { GpuStreams:
    safe {
        fn create_stream(device: DeviceId) -> RawStream;
    }
    unsafe {
        fn destroy_stream(stream: RawStream) -> ();
        fn query_stream(stream: RawStream) -> bool;
        fn synchronize_stream(stream: RawStream) -> ();
        fn stream_info(stream: RawStream) -> StreamInfo;
    }
}

pass_on! { GpuCopies:
    unsafe {
        fn copy_to_device(stream: RawStream, to: DevicePtr, from: *const u8, len: usize) -> ();
        fn copy_to_host(stream: RawStream, to: *mut u8, from: DevicePtr, len: usize) -> ();
        fn copy(stream: RawStream, to: DevicePtr, from: DevicePtr, len: u64) -> ();
        fn fill(stream: RawStream, to: DevicePtr, byte: u8, len: u64) -> ();
    }
}

pass_on! { GpuWords:
    safe {
        fn word_ops(device: DeviceId) -> WordOps;
    }
    unsafe {
        fn register_words(start: HostPtr, len: usize) -> WordPtr;
        fn unregister_words(start: HostPtr) -> ();
        fn stream_batch(stream: RawStream, ops: &[StreamOp]) -> ();
    }
}

pass_on! { GpuStore:
    safe {
        fn create_memory(device: DeviceId, len: u64) -> RawMemory;
        fn import_memory(device: DeviceId, fd: BorrowedFd<'_>, len: u64) -> RawMemory;
    }
    unsafe {
        fn export_memory(memory: RawMemory) -> OwnedFd;
        fn release_memory(memory: RawMemory) -> ();
    }
}

pass_on! { GpuRanges:
    safe {
        fn reserve_range(device: DeviceId, len: u64, at: Option<DevicePtr>) -> AddressRange;
    }
    unsafe {
        fn map_memory(at: DevicePtr, memory: RawMemory, access: Access) -> ();
        fn unmap_memory(at: DevicePtr) -> ();
        fn release_range(range: AddressRange) -> ();
    }
}

pass_on! { GpuPools:
    safe {
        fn create_pool(device: DeviceId, keep: u64) -> RawPool;
    }
    unsafe {
        fn destroy_pool(pool: RawPool) -> ();
        fn pool_alloc(pool: RawPool, stream: RawStream, len: u64) -> Allocation;
        fn pool_free(stream: RawStream, base: DevicePtr) -> ();
        fn pool_usage(pool: RawPool) -> PoolUsage;
        fn trim_pool(pool: RawPool, keep: u64) -> ();
    }
}

pass_on! { GpuEventHandles:
    safe {
        fn open_event(device: DeviceId, handle: &EventHandle) -> RawEvent;
    }
    unsafe {
        fn event_handle(event: RawEvent) -> EventHandle;
    }
}

pass_on! { GpuManaged:
    safe {
        fn alloc_managed(device: DeviceId, len: u64) -> Allocation;
    }
}

pass_on! { GpuPeers:
    safe {
        fn enable_peer_access(device: DeviceId, peer: DeviceId) -> ();
    }
}

pass_on! { GpuHostFunctions:
    unsafe {
        fn host_function(stream: RawStream, function: Box<dyn FnOnce() + Send>) -> ();
    }
}

pass_on! { GpuCaptures:
    unsafe {
        fn capture_status(stream: RawStream) -> CaptureStatus;
        fn batch_uncaptured(stream: RawStream, ops: &[StreamOp]) -> ();
        fn batch_behind(
            stream: RawStream,
            others: &[(RawEvent, RawStream)],
            ops: &[StreamOp]
        ) -> ();
    }
}

/// Gives what the backend has. A forked child asks the backend nothing: it is given every group,
/// whose calls refuse it.
macro_rules! groups {
    ($($name:ident: $group:ident;)*) => {
        impl GpuBackend for Guarded {
            $(fn $name(&self, device: DeviceId) -> Option<&dyn $group> {
                let has = self.fork.is_child() || self.backend.$name(device).is_some();
                has.then_some(self)
            })*

            fn lacks(&self, group: Group, device: DeviceId) -> Error {
                let refused = self.fork.check(DEVICE);
                refused.map_or_else(|error| error, |()| self.backend.lacks(group, device))
            }
        }
    };
}

groups! {
    handles: GpuHandles;
    descriptors: GpuDescriptors;
    event_handles: GpuEventHandles;
    store: GpuStore;
    ranges: GpuRanges;
    pools: GpuPools;
    managed: GpuManaged;
    peers: GpuPeers;
    host_functions: GpuHostFunctions;
    captures: GpuCaptures;
}

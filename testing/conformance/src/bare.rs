//! A backend with little, as a third vendor's first one has: memory by file descriptor, streams that
//! write words and call functions, and nothing else that a device may lack.
//!
//! It shows that what a device lacks is an accessor that gives `None`, and no more: its calls are the
//! host backend's.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gpu_ipc::backend::groups::*;
use gpu_ipc::backend::{
    Access, AddressRange, Allocation, DeviceId, DeviceInfo, DevicePtr, EventKind, Group,
    HostMemory, HostPtr, MemoryInfo, PointerInfo, RawEvent, RawStream, Sharing, StreamInfo,
    StreamOp, WordOps, WordPtr,
};
use gpu_ipc::{BackendKind, Error, Result};

/// A backend without handles, interprocess events, stream waits, captures, ranges, pools, managed
/// memory and peers.
#[derive(Debug)]
pub struct Bare(Arc<dyn GpuBackend>);

impl Bare {
    /// Makes one of the host backend.
    pub fn over(host: Arc<dyn GpuBackend>) -> Bare {
        Bare(host)
    }
}

/// Gives the host backend's calls of a group.
macro_rules! as_host {
    ($group:ident:
        $(safe { $(fn $name:ident($($arg:ident: $type:ty),*) -> $made:ty;)* })?
        $(unsafe { $(fn $risky:ident($($part:ident: $what:ty),*) -> $done:ty;)* })?
        $(own { $($own:item)* })?
    ) => {
        // SAFETY: the group's conditions: its calls are the host backend's, or refused.
        unsafe impl $group for Bare {
            $($(fn $name(&self $(, $arg: $type)*) -> $made {
                self.0.$name($($arg),*)
            })*)?
            $($(unsafe fn $risky(&self $(, $part: $what)*) -> Result<$done> {
                // SAFETY: the host backend's method of the same name has our conditions.
                unsafe { self.0.$risky($($part),*) }
            })*)?
            $($($own)*)?
        }
    };
}

as_host! { GpuDevices:
    safe {
        fn kind() -> BackendKind;
        fn device_files() -> &[&'static str];
        fn signs_of_life(pid: u32, sign: u32) -> Vec<PathBuf>;
        fn own_sign(device: DeviceId) -> Result<u32>;
        fn quarantine(is_shown: bool) -> Duration;
        fn device_count() -> Result<u32>;
        fn device_info(device: DeviceId) -> Result<DeviceInfo>;
        fn pci_address(device: DeviceId) -> Result<Option<String>>;
        fn host_numa_node(device: DeviceId) -> Result<Option<u32>>;
        fn memory_info(device: DeviceId) -> Result<MemoryInfo>;
        fn granularity(device: DeviceId) -> Result<u64>;
        fn shared_context(device: DeviceId) -> Result<bool>;
    }
}

as_host! { GpuPointers:
    safe {
        fn address_range(ptr: DevicePtr) -> Result<AddressRange>;
        fn classify(ptr: DevicePtr) -> Result<PointerInfo>;
    }
}

as_host! { GpuHostMemory:
    safe {
        fn host_alloc(device: DeviceId, len: usize, memory: HostMemory) -> Result<HostPtr>;
    }
    unsafe {
        fn host_free(ptr: HostPtr) -> ();
    }
}

as_host! { GpuDescriptors:
    safe {
        fn export_fd(base: DevicePtr) -> Result<OwnedFd>;
        fn import_fd(
            device: DeviceId,
            fd: BorrowedFd<'_>,
            len: u64,
            access: Access
        ) -> Result<DevicePtr>;
        fn import_fds(
            device: DeviceId,
            fds: &mut dyn ExactSizeIterator<Item = Result<OwnedFd>>,
            len: u64,
            access: Access
        ) -> Result<DevicePtr>;
        fn maps_read_only(device: DeviceId) -> Result<bool>;
    }
}

as_host! { GpuStreams:
    safe {
        fn create_stream(device: DeviceId) -> Result<RawStream>;
    }
    unsafe {
        fn destroy_stream(stream: RawStream) -> ();
        fn query_stream(stream: RawStream) -> bool;
        fn synchronize_stream(stream: RawStream) -> ();
        fn stream_info(stream: RawStream) -> StreamInfo;
    }
}

as_host! { GpuCopies:
    unsafe {
        fn copy_to_device(stream: RawStream, to: DevicePtr, from: *const u8, len: usize) -> ();
        fn copy_to_host(stream: RawStream, to: *mut u8, from: DevicePtr, len: usize) -> ();
        fn copy(stream: RawStream, to: DevicePtr, from: DevicePtr, len: u64) -> ();
        fn fill(stream: RawStream, to: DevicePtr, byte: u8, len: u64) -> ();
    }
}

as_host! { GpuHostFunctions:
    unsafe {
        fn host_function(stream: RawStream, function: Box<dyn FnOnce() + Send>) -> ();
    }
}

as_host! { GpuMemory:
    unsafe {
        fn free(base: DevicePtr) -> ();
        fn close(base: DevicePtr) -> ();
    }
    own {
        fn alloc(&self, device: DeviceId, len: u64, sharing: Sharing) -> Result<Allocation> {
            match sharing {
                Sharing::Handle => Err(self.lacks(Group::Handles, device)),
                sharing => self.0.alloc(device, len, sharing),
            }
        }
    }
}

as_host! { GpuEvents:
    unsafe {
        fn record_event(event: RawEvent, stream: RawStream) -> ();
        fn query_event(event: RawEvent) -> bool;
        fn stream_wait_event(stream: RawStream, event: RawEvent) -> ();
        fn destroy_event(event: RawEvent) -> ();
    }
    own {
        fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent> {
            match kind {
                EventKind::Interprocess => Err(self.lacks(Group::EventHandles, device)),
                kind => self.0.create_event(device, kind),
            }
        }
    }
}

as_host! { GpuWords:
    unsafe {
        fn register_words(start: HostPtr, len: usize) -> WordPtr;
        fn unregister_words(start: HostPtr) -> ();
    }
    own {
        fn word_ops(&self, device: DeviceId) -> Result<WordOps> {
            let ops = self.0.word_ops(device)?;
            Ok(WordOps { waits: false, ..ops })
        }

        unsafe fn stream_batch(&self, stream: RawStream, ops: &[StreamOp]) -> Result<()> {
            if ops.iter().any(|op| matches!(op, StreamOp::WaitGeq { .. })) {
                return Err(Error::Unsupported {
                    what: "a stream's wait for a word",
                    why: "this backend has none".into(),
                    remedy: "ask `Caps::stream_waits` first",
                });
            }
            // SAFETY: the host backend's method of the same name has our conditions.
            unsafe { self.0.stream_batch(stream, ops) }
        }
    }
}

impl GpuBackend for Bare {
    fn handles(&self, _: DeviceId) -> Option<&dyn GpuHandles> {
        None
    }

    fn descriptors(&self, _: DeviceId) -> Option<&dyn GpuDescriptors> {
        Some(self)
    }

    fn event_handles(&self, _: DeviceId) -> Option<&dyn GpuEventHandles> {
        None
    }

    fn store(&self, _: DeviceId) -> Option<&dyn GpuStore> {
        None
    }

    fn ranges(&self, _: DeviceId) -> Option<&dyn GpuRanges> {
        None
    }

    fn pools(&self, _: DeviceId) -> Option<&dyn GpuPools> {
        None
    }

    fn managed(&self, _: DeviceId) -> Option<&dyn GpuManaged> {
        None
    }

    fn peers(&self, _: DeviceId) -> Option<&dyn GpuPeers> {
        None
    }

    fn host_functions(&self, _: DeviceId) -> Option<&dyn GpuHostFunctions> {
        Some(self)
    }

    fn captures(&self, _: DeviceId) -> Option<&dyn GpuCaptures> {
        None
    }

    fn lacks(&self, group: Group, device: DeviceId) -> Error {
        group.absent(BackendKind::Host, device)
    }
}

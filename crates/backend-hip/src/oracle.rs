//! What this crate takes for true of AMD's headers, for tests that have the headers (`tests/abi`,
//! `tests/oracle.rs`).

// Tests: `crates/backend-hip/tests/oracle.rs`.

use std::mem::offset_of;

use driver::calls::{
    ACCESS_READ, ACCESS_READ_WRITE, ALLOCATION_PINNED, AccessDescription, AllocationProperties,
    CAPTURE_RELAXED, EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, HANDLE_POSIX_FD,
    HOST_ALLOC_PORTABLE, HOST_REGISTER_MAPPED, HOST_REGISTER_PORTABLE, Handle, LOCATION_DEVICE,
    Location, STREAM_NON_BLOCKING, Uuid, WAIT_GEQ,
};
use driver::code as error;
use driver::pool::{self, PoolProperties};

use crate::kernel::IpcMode;
use crate::sys::{
    self, ATTRIBUTE_HOST_NUMA_NODE, ATTRIBUTE_VIRTUAL_MEMORY, EXTERNAL_OPAQUE_FD, ExternalBuffer,
    ExternalHandle, PointerAttributes, RANGE_DMA_BUF,
};
use crate::version::Version;

/// Lists sizes, offsets and constants of a version's headers, by their names in C.
pub fn layout(version: Version) -> Vec<(&'static str, u64)> {
    let mut all = vec![
        ("sizeof hipIpcMemHandle_t", size_of::<Handle>() as u64),
        ("sizeof hipIpcEventHandle_t", size_of::<Handle>() as u64),
        ("sizeof hipUUID", size_of::<Uuid>() as u64),
        ("sizeof hipMemLocation", size_of::<Location>() as u64),
        (
            "offsetof hipMemLocation.type",
            offset_of!(Location, kind) as u64,
        ),
        (
            "offsetof hipMemLocation.id",
            offset_of!(Location, id) as u64,
        ),
        (
            "sizeof hipMemAccessDesc",
            size_of::<AccessDescription>() as u64,
        ),
        (
            "offsetof hipMemAccessDesc.location",
            offset_of!(AccessDescription, location) as u64,
        ),
        (
            "offsetof hipMemAccessDesc.flags",
            offset_of!(AccessDescription, flags) as u64,
        ),
        (
            "sizeof hipPointerAttribute_t",
            size_of::<PointerAttributes>() as u64,
        ),
        (
            "offsetof hipPointerAttribute_t.type",
            offset_of!(PointerAttributes, kind) as u64,
        ),
        (
            "offsetof hipPointerAttribute_t.device",
            offset_of!(PointerAttributes, device) as u64,
        ),
        (
            "offsetof hipPointerAttribute_t.devicePointer",
            offset_of!(PointerAttributes, device_pointer) as u64,
        ),
        (
            "offsetof hipPointerAttribute_t.hostPointer",
            offset_of!(PointerAttributes, host_pointer) as u64,
        ),
        (
            "offsetof hipPointerAttribute_t.isManaged",
            offset_of!(PointerAttributes, is_managed) as u64,
        ),
        (
            "offsetof hipPointerAttribute_t.allocationFlags",
            offset_of!(PointerAttributes, flags) as u64,
        ),
        (
            "offsetof hipExternalMemoryHandleDesc.type",
            offset_of!(ExternalHandle, kind) as u64,
        ),
        (
            "offsetof hipExternalMemoryHandleDesc.handle",
            offset_of!(ExternalHandle, fd) as u64,
        ),
        (
            "offsetof hipExternalMemoryHandleDesc.size",
            offset_of!(ExternalHandle, size) as u64,
        ),
        (
            "offsetof hipExternalMemoryHandleDesc.flags",
            offset_of!(ExternalHandle, flags) as u64,
        ),
        (
            "offsetof hipExternalMemoryBufferDesc.offset",
            offset_of!(ExternalBuffer, offset) as u64,
        ),
        (
            "offsetof hipExternalMemoryBufferDesc.size",
            offset_of!(ExternalBuffer, size) as u64,
        ),
        (
            "offsetof hipExternalMemoryBufferDesc.flags",
            offset_of!(ExternalBuffer, flags) as u64,
        ),
        ("sizeof hipMemPoolProps", size_of::<PoolProperties>() as u64),
        (
            "offsetof hipMemPoolProps.allocType",
            offset_of!(PoolProperties, kind) as u64,
        ),
        (
            "offsetof hipMemPoolProps.handleTypes",
            offset_of!(PoolProperties, handle_types) as u64,
        ),
        (
            "offsetof hipMemPoolProps.location",
            offset_of!(PoolProperties, location_kind) as u64,
        ),
        (
            "offsetof hipMemPoolProps.location.id",
            offset_of!(PoolProperties, location_id) as u64,
        ),
        (
            "offsetof hipMemPoolProps.win32SecurityAttributes",
            offset_of!(PoolProperties, win32) as u64,
        ),
        (
            "hipMemPoolReuseAllowInternalDependencies",
            pool::REUSE_ALLOW_INTERNAL_DEPENDENCIES.into(),
        ),
        (
            "hipMemPoolAttrReleaseThreshold",
            pool::RELEASE_THRESHOLD.into(),
        ),
        (
            "hipMemPoolAttrReservedMemCurrent",
            pool::RESERVED_NOW.into(),
        ),
        ("hipMemPoolAttrReservedMemHigh", pool::RESERVED_MOST.into()),
        ("hipMemPoolAttrUsedMemCurrent", pool::USED_NOW.into()),
        ("hipMemLocationTypeDevice", LOCATION_DEVICE.into()),
        ("hipMemAllocationTypePinned", ALLOCATION_PINNED.into()),
        (
            "hipMemHandleTypePosixFileDescriptor",
            HANDLE_POSIX_FD.into(),
        ),
        (
            "hipExternalMemoryHandleTypeOpaqueFd",
            EXTERNAL_OPAQUE_FD.into(),
        ),
        (
            "hipMemAllocationGranularityRecommended",
            version
                .quirks(IpcMode::here(version))
                .granularity_flag
                .into(),
        ),
        ("hipMemAccessFlagsProtRead", ACCESS_READ.into()),
        ("hipMemAccessFlagsProtReadWrite", ACCESS_READ_WRITE.into()),
        ("hipStreamWaitValueGte", WAIT_GEQ.into()),
        ("hipStreamCaptureModeRelaxed", CAPTURE_RELAXED.into()),
        ("hipEventDisableTiming", EVENT_DISABLE_TIMING.into()),
        ("hipEventInterprocess", EVENT_INTERPROCESS.into()),
        ("hipStreamNonBlocking", STREAM_NON_BLOCKING.into()),
        ("hipHostMallocPortable", HOST_ALLOC_PORTABLE.into()),
        ("hipHostRegisterPortable", HOST_REGISTER_PORTABLE.into()),
        ("hipHostRegisterMapped", HOST_REGISTER_MAPPED.into()),
        (
            "hipIpcMemLazyEnablePeerAccess",
            version.quirks(IpcMode::here(version)).open_flags.into(),
        ),
        ("hipErrorInvalidValue", error::INVALID_VALUE.into()),
        ("hipErrorOutOfMemory", error::OUT_OF_MEMORY.into()),
        (
            "hipErrorInvalidDevicePointer",
            error::INVALID_DEVICE_POINTER.into(),
        ),
        ("hipErrorNoDevice", error::NO_DEVICE.into()),
        ("hipErrorInvalidContext", error::INVALID_CONTEXT.into()),
        ("hipErrorOperatingSystem", error::OPERATING_SYSTEM.into()),
        ("hipErrorInvalidHandle", error::INVALID_HANDLE.into()),
        ("hipErrorNotFound", error::NOT_FOUND.into()),
        ("hipErrorNotReady", error::NOT_READY.into()),
        (
            "hipErrorPeerAccessAlreadyEnabled",
            error::PEER_ACCESS_ALREADY_ENABLED.into(),
        ),
        ("hipErrorNotSupported", error::NOT_SUPPORTED.into()),
        (
            "hipErrorStreamCaptureImplicit",
            error::STREAM_CAPTURE_IMPLICIT.into(),
        ),
        ("hipErrorUnknown", error::UNKNOWN.into()),
    ];
    if version.has_virtual_memory() {
        all.extend([
            (
                "sizeof hipMemAllocationProp",
                size_of::<AllocationProperties>() as u64,
            ),
            (
                "offsetof hipMemAllocationProp.type",
                offset_of!(AllocationProperties, kind) as u64,
            ),
            (
                "offsetof hipMemAllocationProp.handleType",
                offset_of!(AllocationProperties, handle_types) as u64,
            ),
            (
                "offsetof hipMemAllocationProp.location",
                offset_of!(AllocationProperties, location) as u64,
            ),
            (
                "offsetof hipMemAllocationProp.win32HandleMetaData",
                offset_of!(AllocationProperties, win32) as u64,
            ),
            (
                "offsetof hipMemAllocationProp.allocFlags",
                offset_of!(AllocationProperties, flags) as u64,
            ),
            (
                "hipDeviceAttributeVirtualMemoryManagementSupported",
                ATTRIBUTE_VIRTUAL_MEMORY.into(),
            ),
        ]);
    }
    if version.tells_numa_nodes() {
        all.push((
            "hipDeviceAttributeHostNumaId",
            ATTRIBUTE_HOST_NUMA_NODE.into(),
        ));
    }
    if version.at_least(7, 0) {
        all.push(("hipMemRangeHandleTypeDmaBufFd", RANGE_DMA_BUF.into()));
    }
    all
}

/// Returns the room that this crate has for structures that grew from one version to the next.
pub fn room() -> [(&'static str, u64); 2] {
    [
        (
            "sizeof hipExternalMemoryHandleDesc",
            size_of::<ExternalHandle>() as u64,
        ),
        (
            "sizeof hipExternalMemoryBufferDesc",
            size_of::<ExternalBuffer>() as u64,
        ),
    ]
}

/// Says what this crate takes a number of `hipMemoryType` for.
pub fn memory_type(version: Version, number: u32) -> String {
    format!("{:?}", version.memory_type(number))
}

/// Lists the functions that this crate calls, with the sizes of their arguments.
pub fn signatures() -> Vec<(&'static str, Vec<usize>)> {
    sys::signatures()
}

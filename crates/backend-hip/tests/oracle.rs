//! The backend's view of AMD's headers against that of `hip-sys`, which was generated from those of
//! HIP 5.4.
//!
//! Built only with `RUSTFLAGS="--cfg gpu_ipc_hip_sys"`, where ROCm's development files are
//! (Debian's libamdhip64-dev with `HIP_PATH=/usr`). No function is called.

#![cfg(gpu_ipc_hip_sys)]

use std::mem::offset_of;

use backend_hip::Version;
use backend_hip::oracle::{layout, memory_type, room, signatures};
use hip_sys::hiprt as theirs;

/// The sizes of a function's arguments.
trait Arguments {
    fn sizes() -> Vec<usize>;
}

macro_rules! arguments {
    ($($argument:ident)*) => {
        impl<Made, $($argument),*> Arguments for unsafe extern "C" fn($($argument),*) -> Made {
            fn sizes() -> Vec<usize> {
                vec![$(size_of::<$argument>()),*]
            }
        }
    };
}
arguments!();
arguments!(A);
arguments!(A B);
arguments!(A B C);
arguments!(A B C D);
arguments!(A B C D E);

/// Looks at a function's type alone: the closure is never called, so the function need not be
/// there.
fn sizes<F: Arguments>(_: impl FnOnce() -> F) -> Vec<usize> {
    F::sizes()
}

macro_rules! all {
    ($($name:ident($($argument:tt)*);)*) => {
        vec![$((
            stringify!($name),
            sizes(|| theirs::$name as unsafe extern "C" fn($($argument)*) -> theirs::hipError_t),
        )),*]
    };
}

#[test]
fn every_function_takes_what_hip_sys_says() {
    let theirs = all! {
        hipInit(_);
        hipRuntimeGetVersion(_);
        hipGetLastError();
        hipGetDeviceCount(_);
        hipGetDevice(_);
        hipSetDevice(_);
        hipDeviceGetName(_, _, _);
        hipDeviceGetUuid(_, _);
        hipDeviceGetPCIBusId(_, _, _);
        hipDeviceTotalMem(_, _);
        hipDeviceGetAttribute(_, _, _);
        hipDeviceCanAccessPeer(_, _, _);
        hipDeviceEnablePeerAccess(_, _);
        hipThreadExchangeStreamCaptureMode(_);
        hipMemGetInfo(_, _);
        hipMalloc(_, _);
        hipFree(_);
        hipMemGetAddressRange(_, _, _);
        hipPointerGetAttributes(_, _);
        hipHostMalloc(_, _, _);
        hipHostFree(_);
        hipHostRegister(_, _, _);
        hipHostUnregister(_);
        hipHostGetDevicePointer(_, _, _);
        hipMemGetAllocationGranularity(_, _, _);
        hipMemCreate(_, _, _, _);
        hipMemRelease(_);
        hipMemAddressReserve(_, _, _, _, _);
        hipMemAddressFree(_, _);
        hipMemMap(_, _, _, _, _);
        hipMemUnmap(_, _);
        hipMemSetAccess(_, _, _, _);
        hipMemExportToShareableHandle(_, _, _, _);
        hipMemImportFromShareableHandle(_, _, _);
        hipMemRetainAllocationHandle(_, _);
        hipMemPoolCreate(_, _);
        hipMemPoolDestroy(_);
        hipMemPoolSetAttribute(_, _, _);
        hipMemPoolGetAttribute(_, _, _);
        hipMemPoolTrimTo(_, _);
        hipMallocFromPoolAsync(_, _, _, _);
        hipFreeAsync(_, _);
        hipImportExternalMemory(_, _);
        hipExternalMemoryGetMappedBuffer(_, _, _);
        hipDestroyExternalMemory(_);
        hipIpcGetMemHandle(_, _);
        hipIpcOpenMemHandle(_, _, _);
        hipIpcCloseMemHandle(_);
        hipIpcGetEventHandle(_, _);
        hipIpcOpenEventHandle(_, _);
        hipEventCreateWithFlags(_, _);
        hipEventRecord(_, _);
        hipEventQuery(_);
        hipEventDestroy(_);
        hipStreamCreateWithFlags(_, _);
        hipStreamDestroy(_);
        hipStreamQuery(_);
        hipStreamSynchronize(_);
        hipStreamWaitEvent(_, _, _);
        hipStreamIsCapturing(_, _);
        hipStreamWriteValue64(_, _, _, _);
        hipStreamWaitValue64(_, _, _, _, _);
        hipLaunchHostFunc(_, _, _);
        hipStreamAddCallback(_, _, _, _);
        hipMemcpyHtoDAsync(_, _, _, _);
        hipMemcpyDtoHAsync(_, _, _, _);
        hipMemcpyDtoDAsync(_, _, _, _);
        hipMemsetD8Async(_, _, _, _);
    };
    // Younger than the headers of hip-sys.
    let younger = [
        "hipStreamGetDevice",
        "hipStreamGetId",
        "hipMemGetHandleForAddressRange",
    ];
    let ours: Vec<_> = signatures()
        .into_iter()
        .filter(|(name, _)| !younger.contains(name))
        .collect();
    assert_eq!(
        ours.len(),
        theirs.len(),
        "a function came or went: compare it here"
    );
    for (name, ours) in ours {
        let found = theirs.iter().find(|(theirs, _)| *theirs == name);
        assert_eq!(found.map(|(_, sizes)| sizes), Some(&ours), "{name}");
    }
}

#[test]
fn every_structure_and_constant_is_what_hip_sys_says() {
    use theirs::*;

    macro_rules! constants {
        ($($name:ident = $value:expr),* $(,)?) => { vec![$((stringify!($name), $value as u64)),*] };
    }
    macro_rules! fields {
        ($($type:ident.$field:ident as $name:literal),* $(,)?) => {
            vec![$(($name, offset_of!($type, $field) as u64)),*]
        };
    }
    let mut all = constants! {
        hipMemLocationTypeDevice = hipMemLocationType::hipMemLocationTypeDevice,
        hipMemAllocationTypePinned = hipMemAllocationType::hipMemAllocationTypePinned,
        hipMemHandleTypePosixFileDescriptor = hipMemAllocationHandleType::hipMemHandleTypePosixFileDescriptor,
        hipMemPoolReuseAllowInternalDependencies = hipMemPoolAttr::hipMemPoolReuseAllowInternalDependencies,
        hipMemPoolAttrReleaseThreshold = hipMemPoolAttr::hipMemPoolAttrReleaseThreshold,
        hipMemPoolAttrReservedMemCurrent = hipMemPoolAttr::hipMemPoolAttrReservedMemCurrent,
        hipMemPoolAttrReservedMemHigh = hipMemPoolAttr::hipMemPoolAttrReservedMemHigh,
        hipMemPoolAttrUsedMemCurrent = hipMemPoolAttr::hipMemPoolAttrUsedMemCurrent,
        hipExternalMemoryHandleTypeOpaqueFd = hipExternalMemoryHandleType_enum::hipExternalMemoryHandleTypeOpaqueFd,
        hipMemAllocationGranularityRecommended =
            hipMemAllocationGranularity_flags::hipMemAllocationGranularityRecommended,
        hipMemAccessFlagsProtRead = hipMemAccessFlags::hipMemAccessFlagsProtRead,
        hipMemAccessFlagsProtReadWrite = hipMemAccessFlags::hipMemAccessFlagsProtReadWrite,
        hipStreamWaitValueGte = hipStreamWaitValueGte,
        hipStreamCaptureModeRelaxed = hipStreamCaptureMode::hipStreamCaptureModeRelaxed,
        hipEventDisableTiming = hipEventDisableTiming,
        hipEventInterprocess = hipEventInterprocess,
        hipStreamNonBlocking = hipStreamNonBlocking,
        hipHostMallocPortable = hipHostMallocPortable,
        hipHostRegisterPortable = hipHostRegisterPortable,
        hipHostRegisterMapped = hipHostRegisterMapped,
        hipIpcMemLazyEnablePeerAccess = hipIpcMemLazyEnablePeerAccess,
        hipErrorInvalidValue = hipError_t::hipErrorInvalidValue,
        hipErrorOutOfMemory = hipError_t::hipErrorOutOfMemory,
        hipErrorInvalidDevicePointer = hipError_t::hipErrorInvalidDevicePointer,
        hipErrorNoDevice = hipError_t::hipErrorNoDevice,
        hipErrorInvalidContext = hipError_t::hipErrorInvalidContext,
        hipErrorOperatingSystem = hipError_t::hipErrorOperatingSystem,
        hipErrorInvalidHandle = hipError_t::hipErrorInvalidHandle,
        hipErrorNotFound = hipError_t::hipErrorNotFound,
        hipErrorNotReady = hipError_t::hipErrorNotReady,
        hipErrorPeerAccessAlreadyEnabled = hipError_t::hipErrorPeerAccessAlreadyEnabled,
        hipErrorNotSupported = hipError_t::hipErrorNotSupported,
        hipErrorStreamCaptureImplicit = hipError_t::hipErrorStreamCaptureImplicit,
        hipErrorUnknown = hipError_t::hipErrorUnknown,
        hipDeviceAttributeVirtualMemoryManagementSupported =
            hipDeviceAttribute_t::hipDeviceAttributeVirtualMemoryManagementSupported,
    };
    all.extend(fields! {
        hipMemLocation.type_ as "offsetof hipMemLocation.type",
        hipMemLocation.id as "offsetof hipMemLocation.id",
        hipMemAccessDesc.location as "offsetof hipMemAccessDesc.location",
        hipMemAccessDesc.flags as "offsetof hipMemAccessDesc.flags",
        hipPointerAttribute_t.memoryType as "offsetof hipPointerAttribute_t.type",
        hipPointerAttribute_t.device as "offsetof hipPointerAttribute_t.device",
        hipPointerAttribute_t.devicePointer as "offsetof hipPointerAttribute_t.devicePointer",
        hipPointerAttribute_t.hostPointer as "offsetof hipPointerAttribute_t.hostPointer",
        hipPointerAttribute_t.isManaged as "offsetof hipPointerAttribute_t.isManaged",
        hipPointerAttribute_t.allocationFlags as "offsetof hipPointerAttribute_t.allocationFlags",
        hipExternalMemoryHandleDesc_st.type_ as "offsetof hipExternalMemoryHandleDesc.type",
        hipExternalMemoryHandleDesc_st.handle as "offsetof hipExternalMemoryHandleDesc.handle",
        hipExternalMemoryHandleDesc_st.size as "offsetof hipExternalMemoryHandleDesc.size",
        hipExternalMemoryHandleDesc_st.flags as "offsetof hipExternalMemoryHandleDesc.flags",
        hipExternalMemoryBufferDesc_st.offset as "offsetof hipExternalMemoryBufferDesc.offset",
        hipExternalMemoryBufferDesc_st.size as "offsetof hipExternalMemoryBufferDesc.size",
        hipExternalMemoryBufferDesc_st.flags as "offsetof hipExternalMemoryBufferDesc.flags",
        hipMemPoolProps.allocType as "offsetof hipMemPoolProps.allocType",
        hipMemPoolProps.handleTypes as "offsetof hipMemPoolProps.handleTypes",
        hipMemPoolProps.location as "offsetof hipMemPoolProps.location",
        hipMemPoolProps.win32SecurityAttributes as "offsetof hipMemPoolProps.win32SecurityAttributes",
        hipMemAllocationProp.type_ as "offsetof hipMemAllocationProp.type",
        hipMemAllocationProp.requestedHandleType as "offsetof hipMemAllocationProp.handleType",
        hipMemAllocationProp.location as "offsetof hipMemAllocationProp.location",
        hipMemAllocationProp.win32HandleMetaData as "offsetof hipMemAllocationProp.win32HandleMetaData",
        hipMemAllocationProp.allocFlags as "offsetof hipMemAllocationProp.allocFlags",
    });
    all.extend([
        (
            "sizeof hipIpcMemHandle_t",
            size_of::<hipIpcMemHandle_t>() as u64,
        ),
        (
            "sizeof hipIpcEventHandle_t",
            size_of::<hipIpcEventHandle_t>() as u64,
        ),
        ("sizeof hipUUID", size_of::<hipUUID>() as u64),
        ("sizeof hipMemLocation", size_of::<hipMemLocation>() as u64),
        (
            "sizeof hipMemAccessDesc",
            size_of::<hipMemAccessDesc>() as u64,
        ),
        (
            "sizeof hipMemPoolProps",
            size_of::<hipMemPoolProps>() as u64,
        ),
        (
            "offsetof hipMemPoolProps.location.id",
            (offset_of!(hipMemPoolProps, location) + offset_of!(hipMemLocation, id)) as u64,
        ),
        (
            "sizeof hipPointerAttribute_t",
            size_of::<hipPointerAttribute_t>() as u64,
        ),
        (
            "sizeof hipMemAllocationProp",
            size_of::<hipMemAllocationProp>() as u64,
        ),
    ]);
    // Virtual memory is used from 5.7 on; its structures and constants were the same in 5.4.
    let ours = layout(Version(50_700_000));
    assert_eq!(
        ours.len(),
        all.len(),
        "a number came or went: compare it here"
    );
    for (name, ours) in ours {
        let found = all.iter().find(|(theirs, _)| *theirs == name);
        assert_eq!(found.map(|(_, number)| *number), Some(ours), "{name}");
    }
    let room = room();
    assert!(size_of::<hipExternalMemoryHandleDesc_st>() as u64 <= room[0].1);
    assert!(size_of::<hipExternalMemoryBufferDesc_st>() as u64 <= room[1].1);
    let version = Version(HIP_VERSION);
    assert_eq!(
        memory_type(version, hipMemoryType::hipMemoryTypeHost as u32),
        "Host"
    );
    assert_eq!(
        memory_type(version, hipMemoryType::hipMemoryTypeDevice as u32),
        "Device"
    );
    assert_eq!(
        memory_type(version, hipMemoryType::hipMemoryTypeManaged as u32),
        "Managed"
    );
}

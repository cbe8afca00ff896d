/* Prints what AMD's headers say of what the backend calls: sizes, offsets and constants, a name and a number a line.
 * That it compiles says that every function has the prototype that stands here, which is that of the backend's table. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <hip/hip_runtime_api.h>
#include <hip/hip_version.h>

#define VERSION (HIP_VERSION_MAJOR * 100 + HIP_VERSION_MINOR)
#define HAS(function, ...) \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&function), hipError_t (*)(__VA_ARGS__)), #function)

HAS(hipInit, unsigned);
HAS(hipRuntimeGetVersion, int *);
HAS(hipGetLastError, void);
HAS(hipGetDeviceCount, int *);
HAS(hipGetDevice, int *);
HAS(hipSetDevice, int);
HAS(hipDeviceGetName, char *, int, int);
HAS(hipDeviceGetUuid, hipUUID *, int);
HAS(hipDeviceGetPCIBusId, char *, int, int);
HAS(hipDeviceTotalMem, size_t *, int);
HAS(hipDeviceGetAttribute, int *, hipDeviceAttribute_t, int);
HAS(hipDeviceCanAccessPeer, int *, int, int);
HAS(hipDeviceEnablePeerAccess, int, unsigned);
HAS(hipThreadExchangeStreamCaptureMode, hipStreamCaptureMode *);
HAS(hipMemGetInfo, size_t *, size_t *);
HAS(hipMalloc, void **, size_t);
HAS(hipFree, void *);
HAS(hipMemGetAddressRange, hipDeviceptr_t *, size_t *, hipDeviceptr_t);
HAS(hipPointerGetAttributes, hipPointerAttribute_t *, const void *);
HAS(hipHostMalloc, void **, size_t, unsigned);
HAS(hipHostFree, void *);
HAS(hipHostRegister, void *, size_t, unsigned);
HAS(hipHostUnregister, void *);
HAS(hipHostGetDevicePointer, void **, void *, unsigned);
HAS(hipMemGetAllocationGranularity, size_t *, const hipMemAllocationProp *, hipMemAllocationGranularity_flags);
HAS(hipMemCreate, hipMemGenericAllocationHandle_t *, size_t, const hipMemAllocationProp *, unsigned long long);
HAS(hipMemRelease, hipMemGenericAllocationHandle_t);
HAS(hipMemAddressReserve, void **, size_t, size_t, void *, unsigned long long);
HAS(hipMemAddressFree, void *, size_t);
HAS(hipMemMap, void *, size_t, size_t, hipMemGenericAllocationHandle_t, unsigned long long);
HAS(hipMemUnmap, void *, size_t);
HAS(hipMemSetAccess, void *, size_t, const hipMemAccessDesc *, size_t);
HAS(hipMemExportToShareableHandle, void *, hipMemGenericAllocationHandle_t, hipMemAllocationHandleType,
    unsigned long long);
HAS(hipMemImportFromShareableHandle, hipMemGenericAllocationHandle_t *, void *, hipMemAllocationHandleType);
HAS(hipMemRetainAllocationHandle, hipMemGenericAllocationHandle_t *, void *);
HAS(hipMemPoolCreate, hipMemPool_t *, const hipMemPoolProps *);
HAS(hipMemPoolDestroy, hipMemPool_t);
HAS(hipMemPoolSetAttribute, hipMemPool_t, hipMemPoolAttr, void *);
HAS(hipMemPoolGetAttribute, hipMemPool_t, hipMemPoolAttr, void *);
HAS(hipMemPoolTrimTo, hipMemPool_t, size_t);
HAS(hipMallocFromPoolAsync, void **, size_t, hipMemPool_t, hipStream_t);
HAS(hipFreeAsync, void *, hipStream_t);
HAS(hipImportExternalMemory, hipExternalMemory_t *, const hipExternalMemoryHandleDesc *);
HAS(hipExternalMemoryGetMappedBuffer, void **, hipExternalMemory_t, const hipExternalMemoryBufferDesc *);
HAS(hipDestroyExternalMemory, hipExternalMemory_t);
HAS(hipIpcGetMemHandle, hipIpcMemHandle_t *, void *);
HAS(hipIpcOpenMemHandle, void **, hipIpcMemHandle_t, unsigned);
HAS(hipIpcCloseMemHandle, void *);
HAS(hipIpcGetEventHandle, hipIpcEventHandle_t *, hipEvent_t);
HAS(hipIpcOpenEventHandle, hipEvent_t *, hipIpcEventHandle_t);
HAS(hipEventCreateWithFlags, hipEvent_t *, unsigned);
HAS(hipEventQuery, hipEvent_t);
HAS(hipEventDestroy, hipEvent_t);
HAS(hipStreamCreateWithFlags, hipStream_t *, unsigned);
HAS(hipStreamDestroy, hipStream_t);
HAS(hipStreamQuery, hipStream_t);
HAS(hipStreamSynchronize, hipStream_t);
HAS(hipStreamWaitEvent, hipStream_t, hipEvent_t, unsigned);
HAS(hipStreamIsCapturing, hipStream_t, hipStreamCaptureStatus *);
HAS(hipStreamWriteValue64, hipStream_t, void *, uint64_t, unsigned);
HAS(hipStreamWaitValue64, hipStream_t, void *, uint64_t, unsigned, uint64_t);
HAS(hipLaunchHostFunc, hipStream_t, hipHostFn_t, void *);
HAS(hipStreamAddCallback, hipStream_t, hipStreamCallback_t, void *, unsigned);
HAS(hipMemcpyDtoHAsync, void *, hipDeviceptr_t, size_t, hipStream_t);
HAS(hipMemcpyDtoDAsync, hipDeviceptr_t, hipDeviceptr_t, size_t, hipStream_t);
HAS(hipMemsetD8Async, hipDeviceptr_t, unsigned char, size_t, hipStream_t);
/* One that gained a const, and one whose default argument hides behind a macro. */
HAS(hipEventRecord, hipEvent_t, hipStream_t);
_Static_assert(__builtin_types_compatible_p(__typeof__(&hipMemcpyHtoDAsync),
                   hipError_t (*)(hipDeviceptr_t, void *, size_t, hipStream_t)) ||
               __builtin_types_compatible_p(__typeof__(&hipMemcpyHtoDAsync),
                   hipError_t (*)(hipDeviceptr_t, const void *, size_t, hipStream_t)), "hipMemcpyHtoDAsync");
_Static_assert(__builtin_types_compatible_p(__typeof__(&hipGetErrorName), const char *(*)(hipError_t)), "hipGetErrorName");
#if VERSION >= 507
HAS(hipStreamGetDevice, hipStream_t, hipDevice_t *);
#endif
#if VERSION >= 702
HAS(hipStreamGetId, hipStream_t, unsigned long long *);
#endif
#if VERSION >= 700
HAS(hipMemGetHandleForAddressRange, void *, hipDeviceptr_t, size_t, hipMemRangeHandleType, unsigned long long);
#endif

#define SIZE(type) printf("sizeof %s\t%zu\n", #type, sizeof(type))
#define OFFSET(type, field) OFFSET_AS(type, field, field)
#define OFFSET_AS(type, name, field) printf("offsetof %s.%s\t%zu\n", #type, #name, offsetof(type, field))
#define VALUE(constant) printf("%s\t%llu\n", #constant, (unsigned long long)(constant))
#define KIND(constant) printf("kind %s\t%llu\n", #constant, (unsigned long long)(constant))

int main(void) {
    VALUE(HIP_VERSION);
    SIZE(hipIpcMemHandle_t);
    SIZE(hipIpcEventHandle_t);
    SIZE(hipUUID);
    SIZE(hipMemLocation);
    OFFSET(hipMemLocation, type);
    OFFSET(hipMemLocation, id);
    SIZE(hipMemAccessDesc);
    OFFSET(hipMemAccessDesc, location);
    OFFSET(hipMemAccessDesc, flags);
    SIZE(hipPointerAttribute_t);
#if VERSION >= 600
    OFFSET(hipPointerAttribute_t, type);
#else
    OFFSET_AS(hipPointerAttribute_t, type, memoryType);
#endif
    OFFSET(hipPointerAttribute_t, device);
    OFFSET(hipPointerAttribute_t, devicePointer);
    OFFSET(hipPointerAttribute_t, hostPointer);
    OFFSET(hipPointerAttribute_t, isManaged);
    OFFSET(hipPointerAttribute_t, allocationFlags);
    SIZE(hipExternalMemoryHandleDesc);
    OFFSET(hipExternalMemoryHandleDesc, type);
    OFFSET(hipExternalMemoryHandleDesc, handle);
    OFFSET(hipExternalMemoryHandleDesc, size);
    OFFSET(hipExternalMemoryHandleDesc, flags);
    SIZE(hipExternalMemoryBufferDesc);
    OFFSET(hipExternalMemoryBufferDesc, offset);
    OFFSET(hipExternalMemoryBufferDesc, size);
    OFFSET(hipExternalMemoryBufferDesc, flags);
    SIZE(hipMemPoolProps);
    OFFSET(hipMemPoolProps, allocType);
    OFFSET(hipMemPoolProps, handleTypes);
    OFFSET(hipMemPoolProps, location);
    OFFSET(hipMemPoolProps, location.id);
    OFFSET(hipMemPoolProps, win32SecurityAttributes);
    VALUE(hipMemPoolReuseAllowInternalDependencies);
    VALUE(hipMemPoolAttrReleaseThreshold);
    VALUE(hipMemPoolAttrReservedMemCurrent);
    VALUE(hipMemPoolAttrReservedMemHigh);
    VALUE(hipMemPoolAttrUsedMemCurrent);
    VALUE(hipMemLocationTypeDevice);
    VALUE(hipMemAllocationTypePinned);
    VALUE(hipMemHandleTypePosixFileDescriptor);
    VALUE(hipExternalMemoryHandleTypeOpaqueFd);
    VALUE(hipMemAllocationGranularityRecommended);
    VALUE(hipMemAccessFlagsProtRead);
    VALUE(hipMemAccessFlagsProtReadWrite);
    VALUE(hipStreamWaitValueGte);
    VALUE(hipStreamCaptureModeRelaxed);
    VALUE(hipEventDisableTiming);
    VALUE(hipEventInterprocess);
    VALUE(hipStreamNonBlocking);
    VALUE(hipHostMallocPortable);
    VALUE(hipHostRegisterPortable);
    VALUE(hipHostRegisterMapped);
    VALUE(hipIpcMemLazyEnablePeerAccess);
    VALUE(hipErrorInvalidValue);
    VALUE(hipErrorOutOfMemory);
    VALUE(hipErrorInvalidDevicePointer);
    VALUE(hipErrorNoDevice);
    VALUE(hipErrorInvalidContext);
    VALUE(hipErrorOperatingSystem);
    VALUE(hipErrorInvalidHandle);
    VALUE(hipErrorNotFound);
    VALUE(hipErrorNotReady);
    VALUE(hipErrorPeerAccessAlreadyEnabled);
    VALUE(hipErrorNotSupported);
    VALUE(hipErrorStreamCaptureImplicit);
    VALUE(hipErrorUnknown);
    KIND(hipMemoryTypeHost);
    KIND(hipMemoryTypeDevice);
#if VERSION >= 507
    KIND(hipMemoryTypeManaged);
    SIZE(hipMemAllocationProp);
    OFFSET(hipMemAllocationProp, type);
    OFFSET_AS(hipMemAllocationProp, handleType, requestedHandleType);
    OFFSET(hipMemAllocationProp, location);
    OFFSET(hipMemAllocationProp, win32HandleMetaData);
    OFFSET(hipMemAllocationProp, allocFlags);
    VALUE(hipDeviceAttributeVirtualMemoryManagementSupported);
#endif
#if VERSION >= 600
    KIND(hipMemoryTypeUnregistered);
#endif
#if VERSION >= 700
    VALUE(hipMemRangeHandleTypeDmaBufFd);
#endif
    return 0;
}

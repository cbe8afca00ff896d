//! The part of the HIP API that this backend calls, as a table of function pointers.
//!
//! One table serves ROCm 5.2 to 7.x: a function that the loaded runtime lacks is `None`, a code is a plain number, and
//! what changed its number or its layout between versions is chosen by [`Version`]. Structures are declared here with
//! plain integers; `tests/abi.rs` measures them against AMD's headers.

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::mem::offset_of;

use libloading::os::unix::Library;

use crate::error;

/// What every function of the runtime returns.
pub(crate) type Code = u32;

/// An address as the runtime takes it (`void *`, `hipDeviceptr_t`).
pub(crate) type Address = u64;

/// The runtime's name for a physical allocation (`hipMemGenericAllocationHandle_t`, a pointer).
pub(crate) type MemoryHandle = *mut c_void;

/// A stream (`hipStream_t`).
pub(crate) type Stream = *mut c_void;

/// An event (`hipEvent_t`).
pub(crate) type Event = *mut c_void;

/// Memory that another API exported (`hipExternalMemory_t`).
pub(crate) type ExternalMemory = *mut c_void;

/// What `hipLaunchHostFunc` calls.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// What `hipStreamAddCallback` calls.
pub(crate) type Callback = unsafe extern "C" fn(Stream, Code, *mut c_void);

/// A handle of memory or of an event (`hipIpcMemHandle_t`, `hipIpcEventHandle_t`), passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Handle {
    pub(crate) reserved: [c_char; 64],
}
const _: () = assert!(size_of::<Handle>() == 64 && align_of::<Handle>() == 1);

/// The identity of a device (`hipUUID`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Uuid {
    pub(crate) bytes: [c_char; 16],
}

/// Where memory lies (`hipMemLocation`).
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Location {
    /// [`LOCATION_DEVICE`] for device memory.
    pub(crate) kind: u32,
    /// The device.
    pub(crate) id: c_int,
}

/// What to allocate (`hipMemAllocationProp`), as it is from ROCm 5.7 on: before, the fields stood in another order.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AllocationProperties {
    /// [`ALLOCATION_PINNED`]: the only kind of physical memory that devices have.
    pub(crate) kind: u32,
    /// How it can be exported: [`HANDLE_POSIX_FD`].
    pub(crate) handle_types: u32,
    /// Where.
    pub(crate) location: Location,
    /// For Windows.
    pub(crate) win32: *mut c_void,
    /// Compression, RDMA and usage.
    pub(crate) flags: [u16; 4],
}
const _: () = assert!(size_of::<AllocationProperties>() == 32);

/// Which device may access a mapping, and how (`hipMemAccessDesc`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AccessDescription {
    /// The device.
    pub(crate) location: Location,
    /// [`ACCESS_READ`] or [`ACCESS_READ_WRITE`].
    pub(crate) flags: u32,
}
const _: () = assert!(size_of::<AccessDescription>() == 12);

/// What the runtime knows of an address (`hipPointerAttribute_t`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PointerAttributes {
    /// A `hipMemoryType`: [`Version::memory_type`] reads it.
    pub(crate) kind: u32,
    pub(crate) device: c_int,
    pub(crate) device_pointer: Address,
    pub(crate) host_pointer: Address,
    pub(crate) is_managed: c_int,
    pub(crate) flags: u32,
}
const _: () = assert!(size_of::<PointerAttributes>() == 32);

/// Memory to import (`hipExternalMemoryHandleDesc`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ExternalHandle {
    /// [`EXTERNAL_OPAQUE_FD`].
    pub(crate) kind: u32,
    pub(crate) pad: u32,
    /// The descriptor, in the first four bytes; the rest is for Windows.
    pub(crate) fd: [u64; 2],
    pub(crate) size: u64,
    pub(crate) flags: u32,
    /// Younger headers add sixteen reserved integers.
    pub(crate) reserved: [u32; 17],
}

/// A piece of imported memory (`hipExternalMemoryBufferDesc`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ExternalBuffer {
    pub(crate) offset: u64,
    pub(crate) size: u64,
    pub(crate) flags: u32,
    /// Younger headers add sixteen reserved integers.
    pub(crate) reserved: [u32; 17],
}

pub(crate) const LOCATION_DEVICE: u32 = 1;
pub(crate) const ALLOCATION_PINNED: u32 = 1;
pub(crate) const HANDLE_POSIX_FD: u32 = 1;
pub(crate) const RANGE_DMA_BUF: u32 = 1;
pub(crate) const EXTERNAL_OPAQUE_FD: u32 = 1;
pub(crate) const GRANULARITY_RECOMMENDED: u32 = 1;
pub(crate) const ACCESS_READ: u32 = 1;
pub(crate) const ACCESS_READ_WRITE: u32 = 3;
pub(crate) const WAIT_GEQ: u32 = 0;
pub(crate) const CAPTURE_RELAXED: u32 = 2;
pub(crate) const EVENT_DISABLE_TIMING: u32 = 2;
pub(crate) const EVENT_INTERPROCESS: u32 = 4;
pub(crate) const STREAM_NON_BLOCKING: u32 = 1;
pub(crate) const HOST_ALLOC_PORTABLE: u32 = 1;
pub(crate) const HOST_REGISTER_PORTABLE: u32 = 1;
pub(crate) const HOST_REGISTER_MAPPED: u32 = 2;
/// `hipDeviceAttributeVirtualMemoryManagementSupported`, from ROCm 5.3 on.
pub(crate) const ATTRIBUTE_VIRTUAL_MEMORY: u32 = 89;
/// `hipDeviceAttributeHostNumaId`, from ROCm 7.2 on.
pub(crate) const ATTRIBUTE_HOST_NUMA_NODE: u32 = 92;

/// A version of the runtime, as `hipRuntimeGetVersion` writes it: 60443484 is 6.4.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version(pub u32);

/// What an address points at, whatever number the runtime has for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MemoryType {
    Unregistered,
    Host,
    Device,
    Managed,
    Other,
}

impl Version {
    /// Returns the first number: 6 of 6.4.
    pub const fn major(self) -> u32 {
        self.0 / 10_000_000
    }

    /// Returns the second number: 4 of 6.4.
    pub const fn minor(self) -> u32 {
        self.0 / 100_000 % 100
    }

    /// Says whether it is this version or a later one.
    pub const fn at_least(self, major: u32, minor: u32) -> bool {
        self.0 >= major * 10_000_000 + minor * 100_000
    }

    /// Returns `hipIpcMemLazyEnablePeerAccess`, without which the runtime opens no handle.
    pub(crate) const fn lazy_peer_access(self) -> u32 {
        if self.at_least(6, 0) { 1 } else { 0 }
    }

    /// Reads a `hipMemoryType`, whose numbers became CUDA's in ROCm 6.
    pub(crate) const fn memory_type(self, number: u32) -> MemoryType {
        match (self.at_least(6, 0), number) {
            (true, 0) => MemoryType::Unregistered,
            (true, 1) | (false, 0) => MemoryType::Host,
            (true, 2) | (false, 1) => MemoryType::Device,
            (true, 3) | (false, 4) => MemoryType::Managed,
            _ => MemoryType::Other,
        }
    }

    /// Says whether `hipMemImportFromShareableHandle` takes a descriptor's number as such; before ROCm 7.1 it takes
    /// the address of one.
    pub(crate) const fn imports_by_value(self) -> bool {
        self.at_least(7, 1)
    }

    /// Says whether `hipMemRetainAllocationHandle` may be asked of any address, and retains. From 6.2 to 7.13 it
    /// follows a null pointer for memory of `hipMalloc` (clr 6.2.2, `hip_vm.cpp`; ROCm/rocm-systems#5807), and up to
    /// 7.11 it hands out a handle without retaining it (ROCm/rocm-systems#2696, change log of 7.12).
    pub(crate) const fn tells_virtual_memory(self) -> bool {
        self.at_least(7, 14)
    }

    /// Says whether [`ATTRIBUTE_HOST_NUMA_NODE`] is that attribute's number: 7.1 ends before it.
    pub(crate) const fn tells_numa_nodes(self) -> bool {
        self.at_least(7, 2)
    }

    /// Says whether `hipMemMap` fails where the mapping does, and `hipMemUnmap` refuses what is not mapped. 6.2.2
    /// succeeds, and follows a null pointer (`hip_vm.cpp`).
    pub(crate) const fn tells_failed_mappings(self) -> bool {
        self.at_least(7, 0)
    }

    /// Says whether the runtime keeps the number of an imported descriptor, and reads it at each `hipMemSetAccess`
    /// (ROCm/rocm-systems#8304, #8436: around 7.14).
    pub(crate) const fn keeps_descriptors(self) -> bool {
        self.at_least(7, 12)
    }

    /// Says whether a handle names its exporter's number of the device. Before, the bytes are the caller's.
    pub(crate) const fn handles_name_devices(self) -> bool {
        self.at_least(7, 0)
    }

    /// Says whether [`AllocationProperties`] lies in memory as the runtime reads it.
    pub(crate) const fn has_virtual_memory(self) -> bool {
        self.at_least(5, 7)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major(), self.minor(), self.0 % 100_000)
    }
}

/// One function of the runtime: its name in the manual, and where this runtime has it.
pub(crate) struct Symbol<F> {
    pub(crate) name: &'static str,
    pub(crate) function: Option<F>,
}

/// Declares a table of the runtime's functions, by the names of its manual.
macro_rules! symbols {
    ($table:ident; $($name:ident : fn($($argument:ty),* $(,)?);)*) => {
        /// Functions of the runtime's, by the names of its manual.
        #[allow(non_snake_case, reason = "the manual's names can be looked up, ours could not")]
        pub(crate) struct $table {
            $(pub(crate) $name: Symbol<unsafe extern "C" fn($($argument),*) -> Code>,)*
            /// Names a code.
            pub(crate) hipGetErrorName: Symbol<unsafe extern "C" fn(Code) -> *const c_char>,
            /// Returns what files a library that stands in for the runtime keeps open instead of AMD's; AMD's own has
            /// no such function.
            pub(crate) device_files: Symbol<unsafe extern "C" fn() -> *const c_char>,
            /// Returns the folder in which such a library shows whose queues there are, likewise.
            pub(crate) signs_of_life: Symbol<unsafe extern "C" fn() -> *const c_char>,
        }

        impl $table {
            /// Looks every function up in a library.
            ///
            /// # Safety
            ///
            /// The library is a HIP runtime, and it is never unloaded.
            pub(crate) unsafe fn find(library: &Library) -> $table {
                $table {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: `Library::get` asks that the type be the symbol's: each row of the table is the
                        // prototype in hip_runtime_api.h, with the result as the integer that C passes it as. Our
                        // caller vouches for the library.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> Code>(name.as_bytes())
                        };
                        Symbol { name: stringify!($name), function: found.ok().map(|function| *function) }
                    },)*
                    hipGetErrorName: {
                        // SAFETY: `Library::get`: as above.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn(Code) -> *const c_char>(b"hipGetErrorName\0")
                        };
                        Symbol { name: "hipGetErrorName", function: found.ok().map(|function| *function) }
                    },
                    device_files: {
                        // SAFETY: `Library::get`: the function is ours, and of that type.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn() -> *const c_char>(b"gpu_ipc_device_files\0")
                        };
                        Symbol { name: "gpu_ipc_device_files", function: found.ok().map(|function| *function) }
                    },
                    signs_of_life: {
                        // SAFETY: `Library::get`: the function is ours, and of that type.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn() -> *const c_char>(b"gpu_ipc_signs_of_life\0")
                        };
                        Symbol { name: "gpu_ipc_signs_of_life", function: found.ok().map(|function| *function) }
                    },
                }
            }

            /// Lists the functions and the sizes of their arguments, for a test that has another opinion.
            pub(crate) fn signatures() -> Vec<(&'static str, Vec<usize>)> {
                vec![$((stringify!($name), vec![$(size_of::<$argument>()),*]),)*]
            }

            /// Lists the functions that the runtime lacks.
            pub(crate) fn missing(&self) -> Vec<&'static str> {
                let mut missing = Vec::new();
                $(if self.$name.function.is_none() { missing.push(self.$name.name); })*
                if self.hipGetErrorName.function.is_none() {
                    missing.push(self.hipGetErrorName.name);
                }
                missing
            }
        }
    };
}

symbols! {
    Symbols;

    hipInit: fn(u32);
    hipRuntimeGetVersion: fn(*mut c_int);
    hipGetLastError: fn();

    hipGetDeviceCount: fn(*mut c_int);
    hipGetDevice: fn(*mut c_int);
    hipSetDevice: fn(c_int);
    hipDeviceGetName: fn(*mut c_char, c_int, c_int);
    hipDeviceGetUuid: fn(*mut Uuid, c_int);
    hipDeviceGetPCIBusId: fn(*mut c_char, c_int, c_int);
    hipDeviceTotalMem: fn(*mut usize, c_int);
    hipDeviceGetAttribute: fn(*mut c_int, u32, c_int);
    hipDeviceCanAccessPeer: fn(*mut c_int, c_int, c_int);
    hipDeviceEnablePeerAccess: fn(c_int, u32);
    hipThreadExchangeStreamCaptureMode: fn(*mut u32);

    hipMemGetInfo: fn(*mut usize, *mut usize);
    hipMalloc: fn(*mut Address, usize);
    hipFree: fn(Address);
    hipMemGetAddressRange: fn(*mut Address, *mut usize, Address);
    hipPointerGetAttributes: fn(*mut PointerAttributes, Address);
    hipHostMalloc: fn(*mut *mut c_void, usize, u32);
    hipHostFree: fn(*mut c_void);
    hipHostRegister: fn(*mut c_void, usize, u32);
    hipHostUnregister: fn(*mut c_void);
    hipHostGetDevicePointer: fn(*mut Address, *mut c_void, u32);

    hipMemGetAllocationGranularity: fn(*mut usize, *const AllocationProperties, u32);
    hipMemCreate: fn(*mut MemoryHandle, usize, *const AllocationProperties, u64);
    hipMemRelease: fn(MemoryHandle);
    hipMemAddressReserve: fn(*mut Address, usize, usize, Address, u64);
    hipMemAddressFree: fn(Address, usize);
    hipMemMap: fn(Address, usize, usize, MemoryHandle, u64);
    hipMemUnmap: fn(Address, usize);
    hipMemSetAccess: fn(Address, usize, *const AccessDescription, usize);
    hipMemExportToShareableHandle: fn(*mut c_void, MemoryHandle, u32, u64);
    hipMemImportFromShareableHandle: fn(*mut MemoryHandle, *mut c_void, u32);
    hipMemRetainAllocationHandle: fn(*mut MemoryHandle, Address);

    hipMemGetHandleForAddressRange: fn(*mut c_void, Address, usize, u32, u64);
    hipImportExternalMemory: fn(*mut ExternalMemory, *const ExternalHandle);
    hipExternalMemoryGetMappedBuffer: fn(*mut Address, ExternalMemory, *const ExternalBuffer);
    hipDestroyExternalMemory: fn(ExternalMemory);

    hipIpcGetMemHandle: fn(*mut Handle, Address);
    hipIpcOpenMemHandle: fn(*mut Address, Handle, u32);
    hipIpcCloseMemHandle: fn(Address);
    hipIpcGetEventHandle: fn(*mut Handle, Event);
    hipIpcOpenEventHandle: fn(*mut Event, Handle);

    hipEventCreateWithFlags: fn(*mut Event, u32);
    hipEventRecord: fn(Event, Stream);
    hipEventQuery: fn(Event);
    hipEventDestroy: fn(Event);

    hipStreamCreateWithFlags: fn(*mut Stream, u32);
    hipStreamDestroy: fn(Stream);
    hipStreamQuery: fn(Stream);
    hipStreamSynchronize: fn(Stream);
    hipStreamWaitEvent: fn(Stream, Event, u32);
    hipStreamGetDevice: fn(Stream, *mut c_int);
    hipStreamGetId: fn(Stream, *mut u64);
    hipStreamIsCapturing: fn(Stream, *mut u32);
    hipStreamWriteValue64: fn(Stream, Address, u64, u32);
    hipStreamWaitValue64: fn(Stream, Address, u64, u32, u64);
    hipLaunchHostFunc: fn(Stream, HostFunction, *mut c_void);
    hipStreamAddCallback: fn(Stream, Callback, *mut c_void, u32);

    hipMemcpyHtoDAsync: fn(Address, *const c_void, usize, Stream);
    hipMemcpyDtoHAsync: fn(*mut c_void, Address, usize, Stream);
    hipMemcpyDtoDAsync: fn(Address, Address, usize, Stream);
    hipMemsetD8Async: fn(Address, u8, usize, Stream);
}

/// Lists what this crate takes for true of a version's headers: sizes, offsets and constants by their names in C, for
/// tests that have the headers.
#[doc(hidden)]
pub fn layout(version: Version) -> Vec<(&'static str, u64)> {
    let mut all = vec![
        ("sizeof hipIpcMemHandle_t", size_of::<Handle>() as u64),
        ("sizeof hipIpcEventHandle_t", size_of::<Handle>() as u64),
        ("sizeof hipUUID", size_of::<Uuid>() as u64),
        ("sizeof hipMemLocation", size_of::<Location>() as u64),
        ("offsetof hipMemLocation.type", offset_of!(Location, kind) as u64),
        ("offsetof hipMemLocation.id", offset_of!(Location, id) as u64),
        ("sizeof hipMemAccessDesc", size_of::<AccessDescription>() as u64),
        ("offsetof hipMemAccessDesc.location", offset_of!(AccessDescription, location) as u64),
        ("offsetof hipMemAccessDesc.flags", offset_of!(AccessDescription, flags) as u64),
        ("sizeof hipPointerAttribute_t", size_of::<PointerAttributes>() as u64),
        ("offsetof hipPointerAttribute_t.type", offset_of!(PointerAttributes, kind) as u64),
        ("offsetof hipPointerAttribute_t.device", offset_of!(PointerAttributes, device) as u64),
        ("offsetof hipPointerAttribute_t.devicePointer", offset_of!(PointerAttributes, device_pointer) as u64),
        ("offsetof hipPointerAttribute_t.hostPointer", offset_of!(PointerAttributes, host_pointer) as u64),
        ("offsetof hipPointerAttribute_t.isManaged", offset_of!(PointerAttributes, is_managed) as u64),
        ("offsetof hipPointerAttribute_t.allocationFlags", offset_of!(PointerAttributes, flags) as u64),
        ("offsetof hipExternalMemoryHandleDesc.type", offset_of!(ExternalHandle, kind) as u64),
        ("offsetof hipExternalMemoryHandleDesc.handle", offset_of!(ExternalHandle, fd) as u64),
        ("offsetof hipExternalMemoryHandleDesc.size", offset_of!(ExternalHandle, size) as u64),
        ("offsetof hipExternalMemoryHandleDesc.flags", offset_of!(ExternalHandle, flags) as u64),
        ("offsetof hipExternalMemoryBufferDesc.offset", offset_of!(ExternalBuffer, offset) as u64),
        ("offsetof hipExternalMemoryBufferDesc.size", offset_of!(ExternalBuffer, size) as u64),
        ("offsetof hipExternalMemoryBufferDesc.flags", offset_of!(ExternalBuffer, flags) as u64),
        ("hipMemLocationTypeDevice", LOCATION_DEVICE.into()),
        ("hipMemAllocationTypePinned", ALLOCATION_PINNED.into()),
        ("hipMemHandleTypePosixFileDescriptor", HANDLE_POSIX_FD.into()),
        ("hipExternalMemoryHandleTypeOpaqueFd", EXTERNAL_OPAQUE_FD.into()),
        ("hipMemAllocationGranularityRecommended", GRANULARITY_RECOMMENDED.into()),
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
        ("hipIpcMemLazyEnablePeerAccess", version.lazy_peer_access().into()),
        ("hipErrorInvalidValue", error::INVALID_VALUE.into()),
        ("hipErrorOutOfMemory", error::OUT_OF_MEMORY.into()),
        ("hipErrorInvalidDevicePointer", error::INVALID_DEVICE_POINTER.into()),
        ("hipErrorNoDevice", error::NO_DEVICE.into()),
        ("hipErrorInvalidContext", error::INVALID_CONTEXT.into()),
        ("hipErrorOperatingSystem", error::OPERATING_SYSTEM.into()),
        ("hipErrorInvalidHandle", error::INVALID_HANDLE.into()),
        ("hipErrorNotFound", error::NOT_FOUND.into()),
        ("hipErrorNotReady", error::NOT_READY.into()),
        ("hipErrorPeerAccessAlreadyEnabled", error::PEER_ACCESS_ALREADY_ENABLED.into()),
        ("hipErrorNotSupported", error::NOT_SUPPORTED.into()),
        ("hipErrorStreamCaptureImplicit", error::STREAM_CAPTURE_IMPLICIT.into()),
        ("hipErrorUnknown", error::UNKNOWN.into()),
    ];
    if version.has_virtual_memory() {
        all.extend([
            ("sizeof hipMemAllocationProp", size_of::<AllocationProperties>() as u64),
            ("offsetof hipMemAllocationProp.type", offset_of!(AllocationProperties, kind) as u64),
            ("offsetof hipMemAllocationProp.handleType", offset_of!(AllocationProperties, handle_types) as u64),
            ("offsetof hipMemAllocationProp.location", offset_of!(AllocationProperties, location) as u64),
            ("offsetof hipMemAllocationProp.win32HandleMetaData", offset_of!(AllocationProperties, win32) as u64),
            ("offsetof hipMemAllocationProp.allocFlags", offset_of!(AllocationProperties, flags) as u64),
            ("hipDeviceAttributeVirtualMemoryManagementSupported", ATTRIBUTE_VIRTUAL_MEMORY.into()),
        ]);
    }
    if version.tells_numa_nodes() {
        all.push(("hipDeviceAttributeHostNumaId", ATTRIBUTE_HOST_NUMA_NODE.into()));
    }
    if version.at_least(7, 0) {
        all.push(("hipMemRangeHandleTypeDmaBufFd", RANGE_DMA_BUF.into()));
    }
    all
}

/// Returns the room that this crate has for structures that grew from one version to the next.
#[doc(hidden)]
pub fn room() -> [(&'static str, u64); 2] {
    [
        ("sizeof hipExternalMemoryHandleDesc", size_of::<ExternalHandle>() as u64),
        ("sizeof hipExternalMemoryBufferDesc", size_of::<ExternalBuffer>() as u64),
    ]
}

/// Says what this crate takes a number of `hipMemoryType` for.
#[doc(hidden)]
pub fn memory_type(version: Version, number: u32) -> String {
    format!("{:?}", version.memory_type(number))
}

/// Lists the functions that this crate calls, with the sizes of their arguments.
#[doc(hidden)]
pub fn signatures() -> Vec<(&'static str, Vec<usize>)> {
    Symbols::signatures()
}

impl fmt::Debug for Symbols {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Symbols").field("missing", &self.missing()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_reads_like_a_version() {
        for (number, text) in
            [(50_221_153, "5.2.21153"), (50_731_921, "5.7.31921"), (60_443_484, "6.4.43484"), (70_253_211, "7.2.53211")]
        {
            assert_eq!(Version(number).to_string(), text);
        }
    }

    #[test]
    fn what_changed_between_versions_is_chosen_by_the_version() {
        let (old, late, six, seven) =
            (Version(50_221_153), Version(50_731_921), Version(60_000_000), Version(70_253_211));
        assert_eq!([old, late, six, seven].map(Version::lazy_peer_access), [0, 0, 1, 1]);
        assert_eq!([old, late, six, seven].map(Version::imports_by_value), [false, false, false, true]);
        assert_eq!([old, late, six, seven].map(Version::has_virtual_memory), [false, true, true, true]);
        assert!(!Version(70_051_831).imports_by_value());
        assert_eq!(old.memory_type(1), MemoryType::Device);
        assert_eq!(six.memory_type(1), MemoryType::Host);
        assert_eq!(six.memory_type(2), MemoryType::Device);
        assert_eq!(old.memory_type(2), MemoryType::Other);
    }
}

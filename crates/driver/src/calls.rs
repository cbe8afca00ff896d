//! The functions that CUDA-shaped drivers have in common, as a table of pointers with gaps.
//!
//! The fields have the names of this crate; [`Symbol::name`] is the one in the vendor's manual. A
//! function that the loaded library lacks is `None`, and a code is a plain number, because drivers
//! return codes that no header lists. Structures are declared with plain integers; each backend
//! measures them against its vendor's headers.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use crate::pool::PoolProperties;

/// An address of a device (`CUdeviceptr`, `hipDeviceptr_t`).
pub type Address = u64;
/// A handle of physical memory (`CUmemGenericAllocationHandle`; AMD's is a pointer).
pub type MemoryHandle = u64;
/// A stream (`CUstream`, `hipStream_t`).
pub type Stream = *mut c_void;
/// An event (`CUevent`, `hipEvent_t`).
pub type Event = *mut c_void;
/// A pool (`CUmemoryPool`, `hipMemPool_t`).
pub type PoolHandle = *mut c_void;
/// What a stream calls.
pub type HostFunction = unsafe extern "C" fn(*mut c_void);

/// A handle of memory or of an event that another process opens, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Handle {
    /// The driver's bytes.
    pub reserved: [c_char; 64],
}
const _: () = assert!(size_of::<Handle>() == 64 && align_of::<Handle>() == 1);

impl Handle {
    /// Turns bytes into what the driver takes.
    pub fn new(bytes: [u8; 64]) -> Handle {
        Handle {
            reserved: bytes.map(|byte| byte as c_char),
        }
    }

    /// Returns the bytes that the driver gave.
    pub fn bytes(self) -> [u8; 64] {
        self.reserved.map(|byte| byte as u8)
    }
}

/// The identity of a device (`CUuuid`, `hipUUID`).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Uuid {
    /// The driver's bytes.
    pub bytes: [c_char; 16],
}

/// Where memory lies (`CUmemLocation`, `hipMemLocation`).
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Location {
    /// [`LOCATION_DEVICE`] for device memory.
    pub kind: u32,
    /// The driver's number of the device.
    pub id: c_int,
}
const _: () = assert!(size_of::<Location>() == 8);

/// What to allocate, or what was allocated (`CUmemAllocationProp`, `hipMemAllocationProp`).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AllocationProperties {
    /// [`ALLOCATION_PINNED`]: the only kind of physical memory that devices have.
    pub kind: u32,
    /// The ways in which it can be exported: [`HANDLE_POSIX_FD`].
    pub handle_types: u32,
    /// Where.
    pub location: Location,
    /// For Windows.
    pub win32: *mut c_void,
    /// Compression, RDMA and usage.
    pub flags: [u8; 8],
}
const _: () = assert!(size_of::<AllocationProperties>() == 32);

impl AllocationProperties {
    /// Describes physical memory on a device that can be exported as a file descriptor.
    pub fn exportable(ordinal: c_int) -> AllocationProperties {
        AllocationProperties {
            kind: ALLOCATION_PINNED,
            handle_types: HANDLE_POSIX_FD,
            location: Location {
                kind: LOCATION_DEVICE,
                id: ordinal,
            },
            win32: ptr::null_mut(),
            flags: [0; 8],
        }
    }
}

/// Which device may access a mapping, and how (`CUmemAccessDesc`, `hipMemAccessDesc`).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessDescription {
    /// The device.
    pub location: Location,
    /// [`ACCESS_READ`] or [`ACCESS_READ_WRITE`].
    pub flags: u32,
}
const _: () = assert!(size_of::<AccessDescription>() == 12);

/// Memory of a device.
pub const LOCATION_DEVICE: u32 = 1;
/// Memory that stays where it is.
pub const ALLOCATION_PINNED: u32 = 1;
/// A POSIX file descriptor.
pub const HANDLE_POSIX_FD: u32 = 1;
/// A device may read.
pub const ACCESS_READ: u32 = 1;
/// A device may read and write.
pub const ACCESS_READ_WRITE: u32 = 3;
/// A wait that compares cyclically, greater or equal.
pub const WAIT_GEQ: u32 = 0;
/// The capture mode in which no call destroys a capture.
pub const CAPTURE_RELAXED: u32 = 2;
/// An event that takes no time stamp.
pub const EVENT_DISABLE_TIMING: u32 = 2;
/// An event that another process can open.
pub const EVENT_INTERPROCESS: u32 = 4;
/// A stream that the legacy default stream does not order.
pub const STREAM_NON_BLOCKING: u32 = 1;
/// Pinned memory for every context.
pub const HOST_ALLOC_PORTABLE: u32 = 1;
/// Registered memory for every context.
pub const HOST_REGISTER_PORTABLE: u32 = 1;
/// Registered memory that devices reach.
pub const HOST_REGISTER_MAPPED: u32 = 2;

/// One function of the driver: its name in the manual, and where this driver has it.
pub struct Symbol<F> {
    /// The manual's name.
    pub name: &'static str,
    /// The function, if the library has it.
    pub function: Option<F>,
}

/// Where a library has a function, and the manual's name of it.
pub type Found = (&'static str, Option<*mut c_void>);

/// Declares a table of a driver's functions. Each row is a prototype of the vendor's header, with
/// the result as the integer that C passes it as, under the name of the vendor's manual; or, in a
/// table of several vendors' functions, `row = Name`, where `Name` is what follows the vendor's
/// prefix.
#[macro_export]
macro_rules! symbols {
    ($(#[$doc:meta])* $table:ident; $($name:ident $(= $common:ident)? : fn($($argument:ty),* $(,)?);)*) => {
        $(#[$doc])*
        #[allow(non_snake_case, reason = "the manual's names can be looked up, ours could not")]
        #[allow(missing_docs, reason = "a row is a function of the manual's")]
        pub struct $table {
            $(pub $name: $crate::calls::Symbol<unsafe extern "C" fn($($argument),*) -> $crate::code::Code>,)*
        }

        impl $table {
            /// Looks every function up by the name of its row.
            ///
            /// # Safety
            ///
            /// What `look` finds is the function of that row's prototype, for as long as the
            /// process runs.
            pub unsafe fn find(look: &dyn Fn(&'static str) -> $crate::calls::Found) -> $table {
                $table {
                    $($name: {
                        let (name, found) = look(stringify!($name));
                        let function = found.map(|address| {
                            // SAFETY: `transmute`: a function's address is as wide as a pointer to
                            // it, and our caller vouches for the prototype.
                            unsafe {
                                ::std::mem::transmute::<
                                    *mut ::std::ffi::c_void,
                                    unsafe extern "C" fn($($argument),*) -> $crate::code::Code,
                                >(address)
                            }
                        });
                        $crate::calls::Symbol { name, function }
                    },)*
                }
            }

            /// Lists the functions that the library lacks.
            pub fn missing(&self) -> Vec<&'static str> {
                let mut missing = Vec::new();
                $(if self.$name.function.is_none() { missing.push(self.$name.name); })*
                missing
            }

            /// Lists the rows, each with what follows a vendor's prefix, or nothing.
            pub fn rows() -> Vec<(&'static str, Option<&'static str>)> {
                vec![$((stringify!($name), None::<&str>$(.or(Some(stringify!($common))))?),)*]
            }

            /// Lists the rows and the sizes of their arguments, for a test that has another
            /// opinion.
            pub fn signatures() -> Vec<(&'static str, Vec<usize>)> {
                vec![$((stringify!($name), vec![$(size_of::<$argument>()),*]),)*]
            }
        }

        impl ::std::fmt::Debug for $table {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.debug_struct(stringify!($table)).field("missing", &self.missing()).finish_non_exhaustive()
            }
        }
    };
}

symbols! {
    /// The functions that CUDA-shaped drivers have in common.
    Calls;

    device_name = DeviceGetName: fn(*mut c_char, c_int, c_int);
    device_uuid = DeviceGetUuid: fn(*mut Uuid, c_int);
    device_total = DeviceTotalMem: fn(*mut usize, c_int);
    device_attribute = DeviceGetAttribute: fn(*mut c_int, u32, c_int);
    device_can_access = DeviceCanAccessPeer: fn(*mut c_int, c_int, c_int);
    exchange_capture_mode = ThreadExchangeStreamCaptureMode: fn(*mut u32);

    mem_info = MemGetInfo: fn(*mut usize, *mut usize);
    malloc = MemAlloc: fn(*mut Address, usize);
    free = MemFree: fn(Address);
    address_range = MemGetAddressRange: fn(*mut Address, *mut usize, Address);
    host_alloc = MemHostAlloc: fn(*mut *mut c_void, usize, u32);
    host_free = MemFreeHost: fn(*mut c_void);
    host_register = MemHostRegister: fn(*mut c_void, usize, u32);
    host_unregister = MemHostUnregister: fn(*mut c_void);
    host_device_pointer = MemHostGetDevicePointer: fn(*mut Address, *mut c_void, u32);

    pool_create = MemPoolCreate: fn(*mut PoolHandle, *const PoolProperties);
    pool_destroy = MemPoolDestroy: fn(PoolHandle);
    pool_set = MemPoolSetAttribute: fn(PoolHandle, u32, *mut c_void);
    pool_get = MemPoolGetAttribute: fn(PoolHandle, u32, *mut c_void);
    pool_trim = MemPoolTrimTo: fn(PoolHandle, usize);
    pool_alloc = MemAllocFromPoolAsync: fn(*mut Address, usize, PoolHandle, Stream);
    pool_free = MemFreeAsync: fn(Address, Stream);

    granularity = MemGetAllocationGranularity: fn(*mut usize, *const AllocationProperties, u32);
    memory_create = MemCreate: fn(*mut MemoryHandle, usize, *const AllocationProperties, u64);
    memory_release = MemRelease: fn(MemoryHandle);
    memory_retain = MemRetainAllocationHandle: fn(*mut MemoryHandle, Address);
    memory_export = MemExportToShareableHandle: fn(*mut c_void, MemoryHandle, u32, u64);
    memory_import = MemImportFromShareableHandle: fn(*mut MemoryHandle, *mut c_void, u32);
    range_reserve = MemAddressReserve: fn(*mut Address, usize, usize, Address, u64);
    range_free = MemAddressFree: fn(Address, usize);
    range_map = MemMap: fn(Address, usize, usize, MemoryHandle, u64);
    range_unmap = MemUnmap: fn(Address, usize);
    range_access = MemSetAccess: fn(Address, usize, *const AccessDescription, usize);

    handle_get = IpcGetMemHandle: fn(*mut Handle, Address);
    handle_open = IpcOpenMemHandle: fn(*mut Address, Handle, u32);
    handle_close = IpcCloseMemHandle: fn(Address);
    event_handle_get = IpcGetEventHandle: fn(*mut Handle, Event);
    event_handle_open = IpcOpenEventHandle: fn(*mut Event, Handle);

    event_create = EventCreate: fn(*mut Event, u32);
    event_record = EventRecord: fn(Event, Stream);
    event_query = EventQuery: fn(Event);
    event_destroy = EventDestroy: fn(Event);

    stream_create = StreamCreate: fn(*mut Stream, u32);
    stream_destroy = StreamDestroy: fn(Stream);
    stream_query = StreamQuery: fn(Stream);
    stream_synchronize = StreamSynchronize: fn(Stream);
    stream_wait_event = StreamWaitEvent: fn(Stream, Event, u32);
    stream_id = StreamGetId: fn(Stream, *mut u64);
    stream_capturing = StreamIsCapturing: fn(Stream, *mut u32);
    stream_call = LaunchHostFunc: fn(Stream, HostFunction, *mut c_void);

    copy_to_device = MemcpyHtoDAsync: fn(Address, *const c_void, usize, Stream);
    copy_to_host = MemcpyDtoHAsync: fn(*mut c_void, Address, usize, Stream);
    copy = MemcpyDtoDAsync: fn(Address, Address, usize, Stream);
    fill = MemsetD8Async: fn(Address, u8, usize, Stream);
}

/// One row of a vendor's own names: the table's, the manual's, and the library's.
pub type Name = (&'static str, &'static str, &'static str);

/// What a vendor calls the rows of [`Calls`] and of its own table.
#[derive(Debug)]
pub struct Names {
    /// What its functions begin with.
    prefix: &'static str,
    /// The rows whose names are not the prefix and the common name.
    own: &'static [Name],
    common: OnceLock<Vec<(&'static str, String)>>,
}

impl Names {
    /// Takes what [`names!`](crate::names) listed.
    pub const fn new(prefix: &'static str, own: &'static [Name]) -> Names {
        let common = OnceLock::new();
        Names {
            prefix,
            own,
            common,
        }
    }

    /// Finds the manual's and the library's name of a row.
    pub fn of(&'static self, row: &'static str) -> (&'static str, &'static str) {
        if let Some((_, manual, library)) = self.own.iter().find(|own| own.0 == row) {
            return (manual, library);
        }
        let prefixed = |(row, name)| Some((row, format!("{}{}", self.prefix, name?)));
        let common = self
            .common
            .get_or_init(|| Calls::rows().into_iter().filter_map(prefixed).collect());
        let found = common.iter().find(|common| common.0 == row);
        found.map_or((row, row), |(_, name)| (name, name))
    }
}

/// Lists a vendor's names of rows: the manual's, and the library's where that is another.
#[macro_export]
macro_rules! names {
    ($($row:ident = $manual:ident $(as $library:ident)?;)*) => {
        &[$((stringify!($row), stringify!($manual), $crate::names!(@last $manual $($library)?))),*]
    };
    (@last $manual:ident) => { stringify!($manual) };
    (@last $manual:ident $library:ident) => { stringify!($library) };
}

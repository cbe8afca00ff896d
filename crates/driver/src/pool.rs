//! Pools of a driver's in stream order: what is asked for, and what one says of itself.
//!
//! HIP took CUDA's structure and numbers: `CUmemPoolProps` is `hipMemPoolProps`,
//! `CUmemPool_attribute` is `hipMemPoolAttr`.

use std::ffi::{c_int, c_void};
use std::ptr;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, `hipMemAllocationTypePinned`.
pub const ALLOCATION_PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`, `hipMemLocationTypeDevice`.
pub const LOCATION_DEVICE: u32 = 1;

/// Whether the driver may make an allocation wait for another stream's work: an `int`.
pub const REUSE_ALLOW_INTERNAL_DEPENDENCIES: u32 = 3;
/// The bytes that a pool keeps: a `uint64_t`, as the following are.
pub const RELEASE_THRESHOLD: u32 = 4;
/// The bytes that a pool has of the device.
pub const RESERVED_NOW: u32 = 5;
/// The most that it had.
pub const RESERVED_MOST: u32 = 6;
/// The bytes that are out.
pub const USED_NOW: u32 = 7;

/// What pool to make (`CUmemPoolProps`, `hipMemPoolProps`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolProperties {
    /// [`ALLOCATION_PINNED`].
    pub kind: u32,
    /// The ways in which it can be exported: none.
    pub handle_types: u32,
    /// [`LOCATION_DEVICE`].
    pub location_kind: u32,
    /// The driver's number of the device.
    pub location_id: c_int,
    /// For Windows.
    pub win32: *mut c_void,
    /// The largest size, which 0 leaves to the driver, and what younger headers have besides.
    pub rest: [u8; 64],
}
const _: () = assert!(size_of::<PoolProperties>() == 88);

impl PoolProperties {
    /// Describes a pool on a device that no other process can have.
    pub fn private(ordinal: c_int) -> PoolProperties {
        PoolProperties {
            kind: ALLOCATION_PINNED,
            handle_types: 0,
            location_kind: LOCATION_DEVICE,
            location_id: ordinal,
            win32: ptr::null_mut(),
            rest: [0; 64],
        }
    }
}

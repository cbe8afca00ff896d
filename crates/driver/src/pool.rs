//! Pools of a driver's in stream order: what is asked for, how one is set up, and what it says of
//! itself.
//!
//! HIP took CUDA's structure and numbers: `CUmemPoolProps` is `hipMemPoolProps`,
//! `CUmemPool_attribute` is `hipMemPoolAttr`. The calls that allocate and free are each backend's
//! own.

use std::ffi::{c_int, c_void};
use std::ptr;

use gpu_api::{DeviceId, PoolUsage, RawPool, Result};

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

/// A driver's calls about pools themselves.
///
/// # Errors
///
/// Each gives the driver's error.
pub trait PoolCalls {
    /// Makes a pool.
    fn make(&self, device: DeviceId, properties: &PoolProperties) -> Result<RawPool>;

    /// Ends a pool; what is allocated from it stays.
    ///
    /// # Safety
    ///
    /// `pool` is live.
    unsafe fn end(&self, pool: RawPool) -> Result<()>;

    /// Sets a property of a pool. Of an `int` the driver reads the first four bytes of the value.
    ///
    /// # Safety
    ///
    /// `pool` is live.
    unsafe fn set(&self, pool: RawPool, attribute: u32, value: u64) -> Result<()>;

    /// Asks for a property of eight bytes.
    ///
    /// # Safety
    ///
    /// `pool` is live, and `attribute` is one of a `uint64_t`.
    unsafe fn get(&self, pool: RawPool, attribute: u32) -> Result<u64>;
}

/// Makes a pool that keeps `keep` bytes, and none of whose allocations waits for another stream.
///
/// # Errors
///
/// The driver's error; no pool is left then, unless the driver fails to end it.
pub fn create(
    driver: &impl PoolCalls,
    device: DeviceId,
    ordinal: c_int,
    keep: u64,
) -> Result<RawPool> {
    let made = driver.make(device, &PoolProperties::private(ordinal))?;
    let settings = [
        (RELEASE_THRESHOLD, keep),
        // The driver is not to hold an allocation back until another stream's work is done: there
        // are other bytes.
        (REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0),
    ];
    for (attribute, value) in settings {
        // SAFETY: `set` asks for a live pool: just made.
        if let Err(error) = unsafe { driver.set(made, attribute, value) } {
            // SAFETY: `end` asks for a live pool: as above. An error leaks it.
            let _ = unsafe { driver.end(made) };
            return Err(error);
        }
    }
    Ok(made)
}

/// Asks what a pool holds.
///
/// # Errors
///
/// The driver's error.
///
/// # Safety
///
/// `pool` is live.
pub unsafe fn usage(driver: &impl PoolCalls, pool: RawPool) -> Result<PoolUsage> {
    // SAFETY: `get` asks for a live pool, for which our caller vouches, and for a property of eight
    // bytes.
    let get = |attribute| unsafe { driver.get(pool, attribute) };
    Ok(PoolUsage {
        reserved: get(RESERVED_NOW)?,
        most_reserved: get(RESERVED_MOST)?,
        used: get(USED_NOW)?,
    })
}

//! Pools of the driver's, in stream order (`pool_alloc`), and managed memory
//! (`cuMemAllocManaged`).

use std::ffi::c_void;
use std::ptr;

use crate::memory_table::Way;
use crate::pool::{
    PoolProperties, RELEASE_THRESHOLD, RESERVED_MOST, RESERVED_NOW,
    REUSE_ALLOW_INTERNAL_DEPENDENCIES, USED_NOW,
};
use gpu_api::lock::Acquire;
use gpu_api::{
    Allocation, CaptureStatus, DeviceId, DevicePtr, Error, GpuCaptures, GpuDevices, GpuManaged,
    GpuPools, PoolUsage, RawPool, RawStream, Result, refuse_capture, round_up,
};

use crate::backend::Backend;
use crate::calls::PoolHandle;
use crate::code::{OUT_OF_MEMORY, SUCCESS};
use crate::memory_table::Origin;
use crate::vendor::Vendor;

fn handle(pool: RawPool) -> PoolHandle {
    ptr::with_exposed_provenance_mut(pool.handle as usize)
}

// SAFETY: the condition of `GpuPools`: `pool_alloc` and `cuMemAllocManaged` give
// memory that is nobody else's, and the driver hands it out again in stream order alone (manual,
// "Stream Ordered Memory Allocator").
unsafe impl<V: Vendor> GpuPools for Backend<V> {
    fn create_pool(&self, device: DeviceId, keep: u64) -> Result<RawPool> {
        let ordinal = self.ordinal(device)?;
        self.require_pools(device)?;
        let properties = PoolProperties::private(ordinal);
        let mut made: PoolHandle = ptr::null_mut();
        self.on_device(device)?
            .call(&self.driver().calls.pool_create, |function| {
                // SAFETY: `pool_create` writes one pointer and reads the properties: both live here.
                unsafe { function(&raw mut made, &raw const properties) }
            })?;
        let made = RawPool {
            device,
            handle: made.expose_provenance() as u64,
        };
        // None of its allocations is to be held back until another stream's work is done: there are
        // other bytes.
        let settings = [
            (RELEASE_THRESHOLD, keep),
            (REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0),
        ];
        for (attribute, value) in settings {
            // SAFETY: `set` asks for a live pool: just made.
            if let Err(error) = unsafe { self.set(made, attribute, value) } {
                // SAFETY: `end` asks for a live pool: as above. An error leaks it.
                let _ = unsafe { self.end(made) };
                return Err(error);
            }
        }
        self.driver().pools.acquire().insert(made.handle);
        Ok(made)
    }

    unsafe fn destroy_pool(&self, raw: RawPool) -> Result<()> {
        // SAFETY: `end` asks for a live pool: our caller vouches for it.
        unsafe { self.end(raw) }?;
        self.driver().pools.acquire().remove(&raw.handle);
        Ok(())
    }

    unsafe fn pool_alloc(&self, raw: RawPool, stream: RawStream, len: u64) -> Result<Allocation> {
        let size = round_up(len, 1)?;
        // SAFETY: `capture_status` asks for a stream that is alive: our caller vouches for it.
        refuse_capture(stream, unsafe { self.capture_status(stream) }?)?;
        let scope = self.on_device(stream.device)?;
        let mut base = 0;
        scope.allocate(&self.driver().calls.pool_alloc, len, |function| {
            // SAFETY: `pool_alloc` writes one address: `base` is one. Our caller
            // vouches for the pool and the stream.
            match unsafe { function(&raw mut base, size, handle(raw), V::stream(stream)) } {
                // ROCm 5.4.3 calls it a success and gives null where there is no room
                // (ROCm/hip#3223).
                SUCCESS if base == 0 => OUT_OF_MEMORY,
                code => code,
            }
        })?;
        self.driver()
            .memory
            .insert(base, len, raw.device, Origin::Pool);
        Ok(Allocation {
            base: DevicePtr(base),
            len,
        })
    }

    unsafe fn pool_free(&self, stream: RawStream, base: DevicePtr) -> Result<()> {
        // SAFETY: `capture_status` asks for a stream that is alive: our caller vouches for it.
        let status = unsafe { self.capture_status(stream) }?;
        if status != CaptureStatus::None {
            return Err(Error::Capturing {
                stream: stream.handle,
                remedy: "free it on a stream that is not captured",
            });
        }
        let scope = self.on_device(stream.device)?;
        let entry = self.take(base, Way::Return)?;
        let freed = scope.call(&self.driver().calls.pool_free, |function| {
            // SAFETY: `pool_free` asks for the base of stream-ordered memory that is not freed
            // and that no other stream's unfinished work touches: it was taken out of the table
            // once, and our caller vouches for the rest.
            unsafe { function(base.0, V::stream(stream)) }
        });
        if freed.is_err() {
            self.driver().memory.leak(base, entry);
        }
        freed
    }

    unsafe fn pool_usage(&self, raw: RawPool) -> Result<PoolUsage> {
        // SAFETY: `get` asks for a live pool, for which our caller vouches, and for a property of
        // eight bytes.
        let get = |attribute| unsafe { self.get(raw, attribute) };
        Ok(PoolUsage {
            reserved: get(RESERVED_NOW)?,
            most_reserved: get(RESERVED_MOST)?,
            used: get(USED_NOW)?,
        })
    }

    unsafe fn trim_pool(&self, raw: RawPool, keep: u64) -> Result<()> {
        let scope = self.on_device(raw.device)?;
        scope.call(&self.driver().calls.pool_trim, |function| {
            // SAFETY: `pool_trim` asks for a live pool: our caller vouches for it.
            unsafe { function(handle(raw), usize::try_from(keep).unwrap_or(usize::MAX)) }
        })
    }
}

// SAFETY: the condition of `GpuManaged`: the driver gives memory that nothing else has.
unsafe impl<V: Vendor> GpuManaged for Backend<V> {
    fn alloc_managed(&self, device: DeviceId, len: u64) -> Result<Allocation> {
        let size = round_up(len, self.granularity(device)?)? as u64;
        let base = Vendor::alloc_managed(&**self, device, size)?;
        self.driver()
            .memory
            .insert(base.0, size, device, Origin::Managed);
        Ok(Allocation { base, len: size })
    }
}

impl<V: Vendor> Backend<V> {
    /// Ends a pool; what is allocated from it stays.
    ///
    /// # Safety
    ///
    /// `raw` is live.
    unsafe fn end(&self, raw: RawPool) -> Result<()> {
        let scope = self.on_device(raw.device)?;
        scope.call(&self.driver().calls.pool_destroy, |function| {
            // SAFETY: `pool_destroy` asks for a live pool: our caller vouches for it. What is
            // allocated from it stays (manual).
            unsafe { function(handle(raw)) }
        })
    }

    /// Sets a property of a pool. Of an `int` the driver reads the first four bytes of the value.
    ///
    /// # Safety
    ///
    /// `raw` is live.
    unsafe fn set(&self, raw: RawPool, attribute: u32, mut value: u64) -> Result<()> {
        let scope = self.on_device(raw.device)?;
        scope.call(&self.driver().calls.pool_set, |function| {
            // SAFETY: `pool_set` reads a value as long as the property's, eight bytes
            // at most: `value` has them. Our caller vouches for the pool.
            unsafe { function(handle(raw), attribute, (&raw mut value).cast::<c_void>()) }
        })
    }

    /// Asks for a property of eight bytes.
    ///
    /// # Safety
    ///
    /// `raw` is live, and `attribute` is one of a `uint64_t`.
    unsafe fn get(&self, raw: RawPool, attribute: u32) -> Result<u64> {
        let scope = self.on_device(raw.device)?;
        let mut value = 0_u64;
        scope.call(&self.driver().calls.pool_get, |function| {
            // SAFETY: `pool_get` writes a value of eight bytes, as our caller vouches:
            // `value` has them, and the pool is live.
            unsafe { function(handle(raw), attribute, (&raw mut value).cast::<c_void>()) }
        })?;
        Ok(value)
    }
}

//! Pools of the driver's, in stream order (`cuMemAllocFromPoolAsync`), and managed memory
//! (`cuMemAllocManaged`).

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::ptr;
use std::sync::{MutexGuard, PoisonError};

use gpu_api::vendor::memory_table::Way;
use gpu_api::vendor::pool::{self, PoolCalls, PoolProperties};
use gpu_api::{
    Allocation, CaptureStatus, DeviceId, DevicePtr, Error, GpuPools, GpuStreams, PoolUsage,
    RawPool, RawStream, Result, refuse_capture, round_up,
};

use crate::backend::CudaBackend;
use crate::call;
use crate::error::SUCCESS;
use crate::memory::Origin;
use crate::sys::{MEMORY_GLOBAL, PoolHandle};

fn handle(pool: RawPool) -> PoolHandle {
    ptr::with_exposed_provenance_mut(pool.handle as usize)
}

// SAFETY: the condition of `GpuPools`: `cuMemAllocFromPoolAsync` and `cuMemAllocManaged` give
// memory that is nobody else's, and the driver hands it out again in stream order alone (manual,
// "Stream Ordered Memory Allocator").
unsafe impl GpuPools for CudaBackend {
    fn create_pool(&self, device: DeviceId, keep: u64) -> Result<RawPool> {
        let made = pool::create(self, device, self.driver.ordinal(device)?, keep)?;
        self.pools().insert(made.handle);
        Ok(made)
    }

    unsafe fn destroy_pool(&self, raw: RawPool) -> Result<()> {
        // SAFETY: `end` asks for a live pool: our caller vouches for it.
        unsafe { self.end(raw) }?;
        self.pools().remove(&raw.handle);
        Ok(())
    }

    unsafe fn pool_alloc(&self, raw: RawPool, stream: RawStream, len: u64) -> Result<Allocation> {
        let size = round_up(len, 1)?;
        // SAFETY: `capture_status` asks for a stream that is alive: our caller vouches for it.
        refuse_capture(stream, unsafe { self.capture_status(stream) }?)?;
        let scope = self.driver.on_stream(stream)?;
        let symbol = &self.driver.symbols.cuMemAllocFromPoolAsync;
        let mut base = 0;
        let code = scope.code(symbol, |function| {
            // SAFETY: `cuMemAllocFromPoolAsync` writes one address: `base` is one. Our caller
            // vouches for the pool and the stream.
            unsafe { function(&raw mut base, size, handle(raw), call::stream(stream)) }
        })?;
        if code != SUCCESS {
            return Err(scope.allocation_error(symbol.name, code, len));
        }
        self.memory.insert(base, len, raw.device, Origin::Pool);
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
        let scope = self.driver.on_stream(stream)?;
        let entry = self.memory.take(base, Way::Return)?;
        let freed = scope.call(&self.driver.symbols.cuMemFreeAsync, |function| {
            // SAFETY: `cuMemFreeAsync` asks for the base of stream-ordered memory that is not freed
            // and that no other stream's unfinished work touches: it was taken out of the table
            // once, and our caller vouches for the rest.
            unsafe { function(base.0, call::stream(stream)) }
        });
        if freed.is_err() {
            self.memory.leak(base, entry);
        }
        freed
    }

    unsafe fn pool_usage(&self, raw: RawPool) -> Result<PoolUsage> {
        // SAFETY: `usage` asks for a live pool: our caller vouches for it.
        unsafe { pool::usage(self, raw) }
    }

    unsafe fn trim_pool(&self, raw: RawPool, keep: u64) -> Result<()> {
        let scope = self.driver.on_device(raw.device)?;
        scope.call(&self.driver.symbols.cuMemPoolTrimTo, |function| {
            // SAFETY: `cuMemPoolTrimTo` asks for a live pool: our caller vouches for it.
            unsafe { function(handle(raw), usize::try_from(keep).unwrap_or(usize::MAX)) }
        })
    }

    fn alloc_managed(&self, device: DeviceId, len: u64) -> Result<Allocation> {
        let size = round_up(len, self.driver.granularity(device)?)?;
        let scope = self.driver.on_device(device)?;
        let symbol = &self.driver.symbols.cuMemAllocManaged;
        let mut base = 0;
        let code = scope.code(symbol, |function| {
            // SAFETY: `cuMemAllocManaged` writes one address: `base` is one.
            unsafe { function(&raw mut base, size, MEMORY_GLOBAL) }
        })?;
        if code != SUCCESS {
            return Err(scope.allocation_error(symbol.name, code, len));
        }
        self.memory
            .insert(base, size as u64, device, Origin::Managed);
        Ok(Allocation {
            base: DevicePtr(base),
            len: size as u64,
        })
    }
}

impl PoolCalls for CudaBackend {
    fn make(&self, device: DeviceId, properties: &PoolProperties) -> Result<RawPool> {
        let scope = self.driver.on_device(device)?;
        let mut made: PoolHandle = ptr::null_mut();
        scope.call(&self.driver.symbols.cuMemPoolCreate, |function| {
            // SAFETY: `cuMemPoolCreate` writes one pointer and reads the properties: both live
            // here.
            unsafe { function(&raw mut made, ptr::from_ref(properties)) }
        })?;
        Ok(RawPool {
            device,
            handle: made.expose_provenance() as u64,
        })
    }

    unsafe fn end(&self, raw: RawPool) -> Result<()> {
        let scope = self.driver.on_device(raw.device)?;
        scope.call(&self.driver.symbols.cuMemPoolDestroy, |function| {
            // SAFETY: `cuMemPoolDestroy` asks for a live pool: our caller vouches for it. What is
            // allocated from it stays (manual).
            unsafe { function(handle(raw)) }
        })
    }

    unsafe fn set(&self, raw: RawPool, attribute: u32, mut value: u64) -> Result<()> {
        let scope = self.driver.on_device(raw.device)?;
        scope.call(&self.driver.symbols.cuMemPoolSetAttribute, |function| {
            // SAFETY: `cuMemPoolSetAttribute` reads a value as long as the property's, eight bytes
            // at most: `value` has them. Our caller vouches for the pool.
            unsafe { function(handle(raw), attribute, (&raw mut value).cast::<c_void>()) }
        })
    }

    unsafe fn get(&self, raw: RawPool, attribute: u32) -> Result<u64> {
        let scope = self.driver.on_device(raw.device)?;
        let mut value = 0_u64;
        scope.call(&self.driver.symbols.cuMemPoolGetAttribute, |function| {
            // SAFETY: `cuMemPoolGetAttribute` writes a value of eight bytes, as our caller vouches:
            // `value` has them, and the pool is live.
            unsafe { function(handle(raw), attribute, (&raw mut value).cast::<c_void>()) }
        })?;
        Ok(value)
    }
}

impl CudaBackend {
    pub(crate) fn pools(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! The calls about the driver's pools and managed memory, over the tables.

use std::sync::atomic::Ordering;

use gpu_api::{
    Allocation, DeviceId, DevicePtr, Error, GpuManaged, GpuPools, PoolUsage, RawPool, RawStream,
    Result,
};

use crate::backend::HostBackend;
use crate::error::{INVALID_VALUE, driver};

// SAFETY: `GpuPools`: a buffer is handed out again once its stream has passed its free, or to that
// stream.
unsafe impl GpuPools for HostBackend {
    fn create_pool(&self, device: DeviceId, keep: u64) -> Result<RawPool> {
        self.check_device("create_pool", device)?;
        let pool = RawPool {
            device,
            handle: self.number(),
        };
        self.tables().pools.create(pool, keep);
        Ok(pool)
    }

    unsafe fn destroy_pool(&self, pool: RawPool) -> Result<()> {
        let mut tables = self.tables();
        let tables = &mut *tables;
        tables.pools.destroy(&mut tables.memories, pool)
    }

    unsafe fn pool_alloc(&self, pool: RawPool, stream: RawStream, len: u64) -> Result<Allocation> {
        let number = self.queue_number("pool_alloc", stream)?;
        let mut tables = self.tables();
        let tables = &mut *tables;
        tables.pools.alloc(&mut tables.memories, pool, number, len)
    }

    unsafe fn pool_free(&self, stream: RawStream, base: DevicePtr) -> Result<()> {
        let number = self.queue_number("pool_free", stream)?;
        let passed = self.tables().pools.free(number, base);
        let passed = passed.ok_or_else(|| driver("pool_free", stream.device, INVALID_VALUE))?;
        self.push("pool_free", stream, move || {
            passed.store(true, Ordering::Release)
        })
    }

    unsafe fn pool_usage(&self, pool: RawPool) -> Result<PoolUsage> {
        let mut tables = self.tables();
        let tables = &mut *tables;
        tables.pools.usage(&mut tables.memories, pool)
    }

    unsafe fn trim_pool(&self, pool: RawPool, keep: u64) -> Result<()> {
        let mut tables = self.tables();
        let tables = &mut *tables;
        tables.pools.trim(&mut tables.memories, pool, keep)
    }
}

// SAFETY: `GpuManaged`: as memory of a device, of which nothing is handed out twice.
unsafe impl GpuManaged for HostBackend {
    fn alloc_managed(&self, device: DeviceId, len: u64) -> Result<Allocation> {
        self.check_device("alloc_managed", device)?;
        if len == 0 {
            let what = "the length of managed memory";
            return Err(Error::invalid(what, 0, "at least 1 byte"));
        }
        self.tables().memories.alloc_managed(device, len)
    }
}

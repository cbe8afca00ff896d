//! The pools of the driver, and managed memory.
//!
//! A buffer that was given back carries a flag that its stream sets when it comes to that point. Whoever looks at a
//! pool next sees it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gpu_api::{Allocation, DeviceId, DevicePtr, Error, GpuPools, PoolUsage, RawPool, RawStream, Result};

use crate::backend::HostBackend;
use crate::error::{INVALID_VALUE, driver};
use crate::memory::Memories;

/// A buffer that was given back.
#[derive(Debug)]
struct Returned {
    base: DevicePtr,
    len: u64,
    /// The number of the stream that gave it back: in its order it may be used again at once.
    stream: u64,
    /// Whether that stream has come so far.
    passed: Arc<AtomicBool>,
}

impl Returned {
    fn is_idle(&self) -> bool {
        self.passed.load(Ordering::Acquire)
    }
}

#[derive(Debug)]
struct Pool {
    device: DeviceId,
    keep: u64,
    /// Buffers that are handed out, and their bytes.
    out: HashMap<u64, u64>,
    returned: Vec<Returned>,
    most_reserved: u64,
    destroyed: bool,
}

impl Pool {
    fn bytes_out(&self) -> u64 {
        self.out.values().sum()
    }

    fn reserved(&self) -> u64 {
        self.bytes_out() + self.returned.iter().map(|buffer| buffer.len).sum::<u64>()
    }

    /// Gives idle buffers back to the device, the oldest first, until the pool has no more than `keep` bytes.
    fn release(&mut self, memories: &mut Memories, keep: u64) {
        let mut reserved = self.reserved();
        self.returned.retain(|buffer| {
            let stays = reserved <= keep || !buffer.is_idle();
            if !stays {
                reserved -= buffer.len;
                memories.free_pooled(buffer.base);
            }
            stays
        });
    }

    /// Takes a buffer of this length that `stream` may use.
    fn take(&mut self, stream: u64, len: u64) -> Option<DevicePtr> {
        let fits = |buffer: &Returned| buffer.len == len && (buffer.stream == stream || buffer.is_idle());
        let at = self.returned.iter().position(fits)?;
        Some(self.returned.swap_remove(at).base)
    }
}

/// All pools of this process, by their numbers.
#[derive(Debug, Default)]
pub struct Pools {
    all: HashMap<u64, Pool>,
}

impl Pools {
    fn get(&mut self, call: &'static str, pool: RawPool) -> Result<&mut Pool> {
        let found = self.all.get_mut(&pool.handle).filter(|found| found.device == pool.device && !found.destroyed);
        found.ok_or_else(|| driver(call, pool.device, INVALID_VALUE))
    }

    /// Gives back what the pools need not keep, and forgets pools that were destroyed and are empty.
    pub fn settle(&mut self, memories: &mut Memories) {
        for pool in self.all.values_mut() {
            let keep = if pool.destroyed { 0 } else { pool.keep };
            pool.release(memories, keep);
        }
        self.all.retain(|_, pool| !pool.destroyed || !pool.out.is_empty() || !pool.returned.is_empty());
    }
}

// SAFETY: `GpuPools`: a buffer is handed out again once its stream has passed its free, or to that stream.
unsafe impl GpuPools for HostBackend {
    fn create_pool(&self, device: DeviceId, keep: u64) -> Result<RawPool> {
        self.check_device("create_pool", device)?;
        let handle = self.number();
        let pool = Pool { device, keep, out: HashMap::new(), returned: Vec::new(), most_reserved: 0, destroyed: false };
        self.tables().pools.all.insert(handle, pool);
        Ok(RawPool { device, handle })
    }

    unsafe fn destroy_pool(&self, pool: RawPool) -> Result<()> {
        let mut guard = self.tables();
        let tables = &mut *guard;
        tables.pools.get("destroy_pool", pool)?.destroyed = true;
        tables.pools.settle(&mut tables.memories);
        Ok(())
    }

    unsafe fn pool_alloc(&self, pool: RawPool, stream: RawStream, len: u64) -> Result<Allocation> {
        let number = self.queue_number("pool_alloc", stream)?;
        let mut guard = self.tables();
        let tables = &mut *guard;
        tables.pools.settle(&mut tables.memories);
        let pool = tables.pools.get("pool_alloc", pool)?;
        let rounded = tables.memories.rounded(pool.device, len)?;
        let base = match pool.take(number, rounded) {
            Some(base) => base,
            None => {
                if tables.memories.room(pool.device, len).is_err() {
                    pool.release(&mut tables.memories, 0);
                }
                tables.memories.alloc_pooled(pool.device, len)?.base
            }
        };
        pool.out.insert(base.0, rounded);
        pool.most_reserved = pool.most_reserved.max(pool.reserved());
        Ok(Allocation { base, len: rounded })
    }

    unsafe fn pool_free(&self, stream: RawStream, base: DevicePtr) -> Result<()> {
        let number = self.queue_number("pool_free", stream)?;
        let passed = Arc::new(AtomicBool::new(false));
        {
            let mut tables = self.tables();
            let found = tables.pools.all.values_mut().find_map(|pool| Some((pool.out.remove(&base.0)?, pool)));
            let Some((len, pool)) = found else { return Err(driver("pool_free", stream.device, INVALID_VALUE)) };
            pool.returned.push(Returned { base, len, stream: number, passed: passed.clone() });
        }
        self.push("pool_free", stream, move || passed.store(true, Ordering::Release))
    }

    unsafe fn pool_usage(&self, pool: RawPool) -> Result<PoolUsage> {
        let mut guard = self.tables();
        let tables = &mut *guard;
        tables.pools.settle(&mut tables.memories);
        let pool = tables.pools.get("pool_usage", pool)?;
        let working: u64 = pool.returned.iter().filter(|buffer| !buffer.is_idle()).map(|buffer| buffer.len).sum();
        let (reserved, most_reserved) = (pool.reserved(), pool.most_reserved);
        Ok(PoolUsage { reserved, most_reserved, used: pool.bytes_out() + working })
    }

    unsafe fn trim_pool(&self, pool: RawPool, keep: u64) -> Result<()> {
        let mut guard = self.tables();
        let tables = &mut *guard;
        tables.pools.get("trim_pool", pool)?.release(&mut tables.memories, keep);
        Ok(())
    }

    fn alloc_managed(&self, device: DeviceId, len: u64) -> Result<Allocation> {
        self.check_device("alloc_managed", device)?;
        if len == 0 {
            return Err(Error::Invalid {
                what: "the length of managed memory",
                got: "0".into(),
                must: "at least 1 byte",
            });
        }
        self.tables().memories.alloc_managed(device, len)
    }
}

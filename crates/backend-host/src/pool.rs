//! The table of the driver's pools.
//!
//! A buffer that was given back carries a flag that its stream sets when it comes to that point.
//! The next call that looks at a pool sees it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gpu_api::{Allocation, DeviceId, DevicePtr, PoolUsage, RawPool, Result};

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

    /// Gives idle buffers back to the device, the oldest first, until the pool has no more than
    /// `keep` bytes.
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
        let fits =
            |buffer: &Returned| buffer.len == len && (buffer.stream == stream || buffer.is_idle());
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
        let found = self
            .all
            .get_mut(&pool.handle)
            .filter(|found| found.device == pool.device && !found.destroyed);
        found.ok_or_else(|| driver(call, pool.device, INVALID_VALUE))
    }

    /// Makes a pool of this number.
    pub fn create(&mut self, pool: RawPool, keep: u64) {
        let RawPool { device, handle } = pool;
        let made = Pool {
            device,
            keep,
            out: HashMap::new(),
            returned: Vec::new(),
            most_reserved: 0,
            destroyed: false,
        };
        self.all.insert(handle, made);
    }

    /// Ends a pool, once memory of it is back.
    pub fn destroy(&mut self, memories: &mut Memories, pool: RawPool) -> Result<()> {
        self.get("destroy_pool", pool)?.destroyed = true;
        self.settle(memories);
        Ok(())
    }

    /// Hands a buffer out, in the order of the stream with this number.
    pub fn alloc(
        &mut self,
        memories: &mut Memories,
        pool: RawPool,
        stream: u64,
        len: u64,
    ) -> Result<Allocation> {
        self.settle(memories);
        let pool = self.get("pool_alloc", pool)?;
        let rounded = memories.rounded(pool.device, len)?;
        let base = match pool.take(stream, rounded) {
            Some(base) => base,
            None => {
                if memories.room(pool.device, len).is_err() {
                    pool.release(memories, 0);
                }
                memories.alloc_pooled(pool.device, len)?.base
            }
        };
        pool.out.insert(base.0, rounded);
        pool.most_reserved = pool.most_reserved.max(pool.reserved());
        Ok(Allocation { base, len: rounded })
    }

    /// Takes a buffer back behind the work of the stream with this number, which sets the flag when
    /// it has come so far.
    pub fn free(&mut self, stream: u64, base: DevicePtr) -> Option<Arc<AtomicBool>> {
        let found = self
            .all
            .values_mut()
            .find_map(|pool| Some((pool.out.remove(&base.0)?, pool)));
        let (len, pool) = found?;
        let passed = Arc::new(AtomicBool::new(false));
        pool.returned.push(Returned {
            base,
            len,
            stream,
            passed: passed.clone(),
        });
        Some(passed)
    }

    /// Says what a pool holds.
    pub fn usage(&mut self, memories: &mut Memories, pool: RawPool) -> Result<PoolUsage> {
        self.settle(memories);
        let pool = self.get("pool_usage", pool)?;
        let working: u64 = pool
            .returned
            .iter()
            .filter(|buffer| !buffer.is_idle())
            .map(|buffer| buffer.len)
            .sum();
        let (reserved, most_reserved) = (pool.reserved(), pool.most_reserved);
        Ok(PoolUsage {
            reserved,
            most_reserved,
            used: pool.bytes_out() + working,
        })
    }

    /// Gives idle buffers of a pool back to the device.
    pub fn trim(&mut self, memories: &mut Memories, pool: RawPool, keep: u64) -> Result<()> {
        self.get("trim_pool", pool)?.release(memories, keep);
        Ok(())
    }

    /// Gives back what the pools need not keep, and forgets pools that were destroyed and are
    /// empty.
    pub fn settle(&mut self, memories: &mut Memories) {
        for pool in self.all.values_mut() {
            let keep = if pool.destroyed { 0 } else { pool.keep };
            pool.release(memories, keep);
        }
        self.all
            .retain(|_, pool| !pool.destroyed || !pool.out.is_empty() || !pool.returned.is_empty());
    }
}

//! Pools of the runtime's, in stream order (`hipMallocFromPoolAsync`), where a probe saw that they
//! are right.
//!
//! AMD's own reports say of several versions that a pool loses bytes, gives nothing back or brings
//! the process down: [`PoolDefect`](crate::PoolDefect) lists what the probe looks for,
//! [`KnownBug`](crate::KnownBug) what was reported.

use std::ffi::c_void;
use std::ptr;

use gpu_api::vendor::memory_table::Way;
use gpu_api::vendor::pool::{self, PoolCalls, PoolProperties};
use gpu_api::{
    Allocation, CaptureStatus, DeviceId, DevicePtr, Error, GpuPools, GpuStreams, PoolUsage,
    RawPool, RawStream, Result, refuse_capture, round_up,
};

use crate::backend::HipBackend;
use crate::bugs;
use crate::call;
use crate::driver::Driver;
use crate::error::{self, OUT_OF_MEMORY, SUCCESS};
use crate::memory::Origin;
use crate::proof::Step;
use crate::sys::PoolHandle;

fn handle(pool: RawPool) -> PoolHandle {
    ptr::with_exposed_provenance_mut(pool.handle as usize)
}

impl Driver {
    /// Refuses pools where the runtime lacks a call of theirs, and where no probe saw that they are
    /// right.
    pub(crate) fn require_pools(&self) -> Result<()> {
        let symbols = &self.symbols;
        let missing = [
            (
                symbols.hipMemPoolCreate.name,
                symbols.hipMemPoolCreate.function.is_none(),
            ),
            (
                symbols.hipMemPoolDestroy.name,
                symbols.hipMemPoolDestroy.function.is_none(),
            ),
            (
                symbols.hipMemPoolSetAttribute.name,
                symbols.hipMemPoolSetAttribute.function.is_none(),
            ),
            (
                symbols.hipMemPoolGetAttribute.name,
                symbols.hipMemPoolGetAttribute.function.is_none(),
            ),
            (
                symbols.hipMemPoolTrimTo.name,
                symbols.hipMemPoolTrimTo.function.is_none(),
            ),
            (
                symbols.hipMallocFromPoolAsync.name,
                symbols.hipMallocFromPoolAsync.function.is_none(),
            ),
            (
                symbols.hipFreeAsync.name,
                symbols.hipFreeAsync.function.is_none(),
            ),
        ];
        if let Some((name, _)) = missing.into_iter().find(|(_, is_missing)| *is_missing) {
            return Err(error::missing(name));
        }
        if self.proved(Step::Pools) {
            return Ok(());
        }
        let seen = self
            .proof()
            .map(|proof| proof.pool_defects())
            .unwrap_or_default();
        let why = if seen.is_empty() {
            format!(
                "no probe has proved it with this runtime and driver; {}",
                bugs::of_pools(self.version())
            )
        } else {
            let seen: Vec<String> = seen.iter().map(ToString::to_string).collect();
            format!("the probe saw here what it does wrong: {}", seen.join("; "))
        };
        Err(Error::Unsupported {
            what: "a pool of the driver's",
            why,
            remedy: bugs::PROVE_POOLS,
        })
    }
}

// SAFETY: the condition of `GpuPools`: pools are used only where a probe saw that
// `hipMallocFromPoolAsync` gives memory that is nobody else's, and gives it again in stream order
// alone.
unsafe impl GpuPools for HipBackend {
    fn create_pool(&self, device: DeviceId, keep: u64) -> Result<RawPool> {
        let ordinal = self.driver.ordinal(device)?;
        self.driver.require_pools()?;
        pool::create(self, device, ordinal, keep)
    }

    unsafe fn destroy_pool(&self, raw: RawPool) -> Result<()> {
        // SAFETY: `end` asks for a live pool: our caller vouches for it.
        unsafe { self.end(raw) }
    }

    unsafe fn pool_alloc(&self, raw: RawPool, stream: RawStream, len: u64) -> Result<Allocation> {
        let size = round_up(len, 1)?;
        // SAFETY: `capture_status` asks for a stream that is alive: our caller vouches for it.
        refuse_capture(stream, unsafe { self.capture_status(stream) }?)?;
        let scope = self.driver.on_stream(stream)?;
        let symbol = &self.driver.symbols.hipMallocFromPoolAsync;
        let mut base = 0;
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipMallocFromPoolAsync` writes one address: `base` is one. Our caller
            // vouches for the pool and the stream.
            unsafe { function(&raw mut base, size, handle(raw), call::stream(stream)) }
        })?;
        match code {
            // 5.4.3 calls it a success and gives null where there is no room (ROCm/hip#3223).
            SUCCESS if base == 0 => Err(scope.allocation_error(symbol.name, OUT_OF_MEMORY, len)),
            SUCCESS => {
                self.memory.insert(base, len, raw.device, Origin::Pool);
                Ok(Allocation {
                    base: DevicePtr(base),
                    len,
                })
            }
            code => Err(scope.allocation_error(symbol.name, code, len)),
        }
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
        let freed = scope.call(&self.driver.symbols.hipFreeAsync, |function| {
            // SAFETY: `hipFreeAsync` asks for the base of stream-ordered memory that is not freed
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
        scope.call(&self.driver.symbols.hipMemPoolTrimTo, |function| {
            // SAFETY: `hipMemPoolTrimTo` asks for a live pool: our caller vouches for it.
            unsafe { function(handle(raw), usize::try_from(keep).unwrap_or(usize::MAX)) }
        })
    }
}

impl PoolCalls for HipBackend {
    fn make(&self, device: DeviceId, properties: &PoolProperties) -> Result<RawPool> {
        let scope = self.driver.on_device(device)?;
        let mut made: PoolHandle = ptr::null_mut();
        scope.call(&self.driver.symbols.hipMemPoolCreate, |function| {
            // SAFETY: `hipMemPoolCreate` writes one pointer and reads the properties: both live
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
        scope.call(&self.driver.symbols.hipMemPoolDestroy, |function| {
            // SAFETY: `hipMemPoolDestroy` asks for a live pool: our caller vouches for it.
            unsafe { function(handle(raw)) }
        })
    }

    unsafe fn set(&self, raw: RawPool, attribute: u32, mut value: u64) -> Result<()> {
        let scope = self.driver.on_device(raw.device)?;
        scope.call(&self.driver.symbols.hipMemPoolSetAttribute, |function| {
            // SAFETY: `hipMemPoolSetAttribute` reads a value as long as the property's, eight bytes
            // at most: `value` has them. Our caller vouches for the pool.
            unsafe { function(handle(raw), attribute, (&raw mut value).cast::<c_void>()) }
        })
    }

    unsafe fn get(&self, raw: RawPool, attribute: u32) -> Result<u64> {
        let scope = self.driver.on_device(raw.device)?;
        let mut value = 0_u64;
        scope.call(&self.driver.symbols.hipMemPoolGetAttribute, |function| {
            // SAFETY: `hipMemPoolGetAttribute` writes a value of eight bytes, as our caller
            // vouches: `value` has them, and the pool is live.
            unsafe { function(handle(raw), attribute, (&raw mut value).cast::<c_void>()) }
        })?;
        Ok(value)
    }
}

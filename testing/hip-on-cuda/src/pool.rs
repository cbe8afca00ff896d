//! HIP's functions about stream-ordered pools, and what AMD's are reported to do wrong.
//!
//! Where a report names versions, those have it by their rules; a version after all reports (7.14
//! here, though none is known to mend them all) has none. Each is also a [`Fault`].

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, Once};

use driver::pool::{
    ALLOCATION_PINNED, LOCATION_DEVICE, PoolProperties, RELEASE_THRESHOLD, RESERVED_MOST,
    RESERVED_NOW, REUSE_ALLOW_INTERNAL_DEPENDENCIES, USED_NOW,
};

use gpu_api::lock::Acquire;

use crate::device::entered;
use crate::export::{hip, put};
use crate::machine::{INVALID_VALUE, Machine, NOT_SUPPORTED, Outcome};
use crate::memory_files::OUT_OF_MEMORY;
use crate::settings::{Fault, Settings};

/// How often what is given back on another stream than it came from costs the next allocation its
/// bytes. The report has 151 of 600.
const LOST: u32 = 4;

const LAUNCH_FAILURE: u32 = 719;

/// A pool. The device's own is made with the first allocation, when it is known what to keep.
struct Pool {
    device: i32,
    keep: u64,
    below: Option<u64>,
    destroyed: bool,
    /// Allocations that are out.
    out: usize,
    /// All bytes that it ever gave.
    given: u64,
}

/// An allocation that is out.
#[derive(Clone, Copy)]
struct Out {
    pool: u64,
    len: usize,
    stream: u64,
    /// What is written to it does not stay.
    loses: bool,
}

#[derive(Default)]
struct Pools {
    last: u64,
    all: BTreeMap<u64, Pool>,
    out: BTreeMap<u64, Out>,
    /// Allocations that were given back on another stream than they came from.
    crossed: u32,
    /// The next allocation loses its bytes.
    taints: bool,
    /// What was given back, for the next allocation: by base, the length.
    early: BTreeMap<u64, usize>,
    /// The stream on which memory was given back last.
    latest: u64,
}

static POOLS: LazyLock<Mutex<Pools>> = LazyLock::new(Mutex::default);

/// Some allocation loses its bytes: before that nobody looks.
static LOSES: AtomicBool = AtomicBool::new(false);

/// The rest of the device is gone.
static KEPT: AtomicBool = AtomicBool::new(false);

/// The versions, from and before, with ROCm/rocm-systems#10943 (bytes that are lost), #11690 (a
/// threshold that is ignored) and #11642 (a failed allocation that keeps the rest, and a crash).
const OF_7_2: ((u32, u32), (u32, u32)) = ((7, 2), (7, 14));
/// Those with ROCm/hip#3775, which 7.0 mended.
const OF_6_3: ((u32, u32), (u32, u32)) = ((6, 3), (7, 0));

/// Says whether a fault is asked for, or is what the version does.
fn does(fault: Fault, (from, to): ((u32, u32), (u32, u32))) -> bool {
    Settings::get().has(fault) || Settings::get().within(from, to)
}

/// Says whether a failed allocation has taken all that was left.
pub(crate) fn has_kept_the_rest() -> bool {
    KEPT.load(Ordering::Relaxed)
}

extern "C" fn crash() {
    std::process::abort();
}

/// Does what a failed allocation does besides failing.
fn failed() {
    if does(Fault::PoolHoards, OF_7_2) {
        KEPT.store(true, Ordering::Relaxed);
    }
    if does(Fault::PoolCrashes, OF_7_2) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: `atexit` asks for a function without arguments that stays loaded: the runtime
            // is never unloaded.
            unsafe { libc::atexit(crash) };
        });
    }
}

/// Undoes what was written to memory that loses it.
pub(crate) fn written(machine: &dyn Machine, stream: u64, to: u64, len: usize) -> Outcome {
    if !LOSES.load(Ordering::Relaxed) {
        return Ok(());
    }
    let pools = POOLS.acquire();
    let found = pools.out.range(..=to).next_back();
    if found.is_some_and(|(base, out)| out.loses && to - base < out.len as u64) {
        drop(pools);
        machine.fill(stream, to, 0, len)
    } else {
        Ok(())
    }
}

impl Pools {
    fn live(&mut self, pool: u64) -> Outcome<&mut Pool> {
        self.all
            .get_mut(&pool)
            .filter(|found| !found.destroyed)
            .ok_or(INVALID_VALUE)
    }

    /// Ends the device's own, once nothing of it is out.
    fn settle(&mut self, machine: &dyn Machine, pool: u64) -> Outcome {
        match self.all.get(&pool) {
            Some(found) if found.destroyed && found.out == 0 => {
                let below = self
                    .all
                    .remove(&pool)
                    .and_then(|found| Some((found.device, found.below?)));
                below.map_or(Ok(()), |(device, below)| {
                    machine.pool_destroy(device, below)
                })
            }
            _ => Ok(()),
        }
    }

    fn alloc(&mut self, machine: &dyn Machine, pool: u64, stream: u64, len: usize) -> Outcome<u64> {
        let mut out = Out {
            pool,
            len,
            stream,
            loses: false,
        };
        // There is none but under `PoolEarly`.
        let early = self.early.iter().find(|(_, had)| **had == len);
        if let Some(base) = early.map(|(base, _)| *base) {
            self.early.remove(&base);
            self.live(pool)?.out += 1;
            self.out.insert(base, out);
            return Ok(base);
        }
        let found = self.live(pool)?;
        let (device, given) = (found.device, found.given.saturating_add(len as u64));
        if does(Fault::PoolRunsOut, OF_6_3) && given > machine.total(device)? as u64 {
            return Err(OUT_OF_MEMORY);
        }
        let below = match found.below {
            Some(below) => below,
            None => {
                let keep = match does(Fault::PoolDrops, OF_7_2) {
                    _ if Settings::get().has(Fault::PoolKeeps) => u64::MAX,
                    true => 0,
                    false => found.keep,
                };
                *found.below.insert(machine.pool(device, keep)?)
            }
        };
        let base = machine.pool_alloc(device, below, stream, len)?;
        (found.given, found.out) = (given, found.out + 1);
        out.loses = std::mem::take(&mut self.taints);
        LOSES.fetch_or(out.loses, Ordering::Relaxed);
        self.out.insert(base, out);
        Ok(base)
    }

    fn free(&mut self, machine: &dyn Machine, base: u64, stream: u64) -> Outcome {
        let out = *self.out.get(&base).ok_or(INVALID_VALUE)?;
        if Settings::get().has(Fault::PoolEarly) {
            self.early.insert(base, out.len);
        } else {
            machine.pool_free(stream, base)?;
        }
        self.out.remove(&base);
        self.latest = stream;
        if out.stream != stream && does(Fault::PoolLoses, OF_7_2) {
            self.crossed += 1;
            self.taints |= self.crossed.is_multiple_of(LOST);
        }
        if let Some(pool) = self.all.get_mut(&out.pool) {
            pool.out -= 1;
        }
        self.settle(machine, out.pool)
    }
}

/// Reads the properties of the only pools that there are here.
///
/// # Safety
///
/// `properties` is null or points to properties.
unsafe fn device_of(properties: *const PoolProperties) -> Outcome<i32> {
    if properties.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: reading: our caller vouches for the properties.
    let properties = unsafe { properties.read() };
    let device = properties.location_id;
    let is_plain = properties.kind == ALLOCATION_PINNED
        && properties.handle_types == 0
        && properties.location_kind == LOCATION_DEVICE
        && properties.rest == [0; 64];
    if is_plain && (0..entered()?.0.count()).contains(&device) {
        Ok(device)
    } else {
        Err(INVALID_VALUE)
    }
}

hip! {
    hipMemPoolCreate(pool: u64; properties: *const PoolProperties) {
        // SAFETY: `device_of`: HIP's caller points to properties.
        let device = unsafe { device_of(properties) }?;
        let mut pools = POOLS.acquire();
        pools.last += 16;
        let last = pools.last;
        let made = Pool { device, keep: 0, below: None, destroyed: false, out: 0, given: 0 };
        pools.all.insert(last, made);
        Ok(last)
    }
    hipMemPoolDestroy(; pool: u64) {
        let machine = entered()?.0;
        let mut pools = POOLS.acquire();
        pools.live(pool)?.destroyed = true;
        pools.settle(machine, pool)
    }
    hipMemPoolSetAttribute(; pool: u64, attribute: u32, value: *mut c_void) {
        let mut pools = POOLS.acquire();
        let pool = pools.live(pool)?;
        match attribute {
            // SAFETY: reading: HIP's caller points to a value as long as the attribute's.
            RELEASE_THRESHOLD if pool.below.is_none() => pool.keep = unsafe { value.cast::<u64>().read() },
            // What is below is never asked to wait.
            // SAFETY: reading: HIP's caller points to a value as long as the attribute's.
            REUSE_ALLOW_INTERNAL_DEPENDENCIES if unsafe { value.cast::<i32>().read() } == 0 => {}
            _ => return Err(NOT_SUPPORTED),
        }
        Ok(())
    }
    hipMemPoolGetAttribute(; pool: u64, attribute: u32, value: *mut c_void) {
        let machine = entered()?.0;
        let mut pools = POOLS.acquire();
        let pool = pools.live(pool)?;
        let usage = match pool.below {
            Some(below) => machine.pool_usage(pool.device, below)?,
            None => Default::default(),
        };
        let asked = match attribute {
            RELEASE_THRESHOLD => pool.keep,
            RESERVED_NOW => usage.reserved,
            RESERVED_MOST => usage.most_reserved,
            USED_NOW => usage.used,
            _ => return Err(NOT_SUPPORTED),
        };
        // SAFETY: `put`: HIP's caller points to a value as long as the attribute's, which is eight
        // bytes here.
        unsafe { put(value.cast::<u64>(), Ok(asked)) }
    }
    hipMemPoolTrimTo(; pool: u64, keep: usize) {
        let machine = entered()?.0;
        let mut pools = POOLS.acquire();
        let pool = pools.live(pool)?;
        match pool.below {
            Some(below) if !Settings::get().has(Fault::PoolKeeps) => machine.pool_trim(pool.device, below, keep),
            _ => Ok(()),
        }
    }
    hipMallocFromPoolAsync(base: u64; len: usize, pool: u64, stream: u64) {
        let (machine, settings) = (entered()?.0, Settings::get());
        if len == 0 {
            return Ok(0);
        }
        if settings.has(Fault::PoolWaits) {
            let latest = POOLS.acquire().latest;
            machine.stream_synchronize(latest)?;
        }
        if settings.has(Fault::PoolFails) || has_kept_the_rest() {
            return Err(OUT_OF_MEMORY);
        }
        match POOLS.acquire().alloc(machine, pool, stream, len) {
            Err(OUT_OF_MEMORY) if settings.has(Fault::PoolGivesNull) => Ok(0),
            Err(OUT_OF_MEMORY) => {
                failed();
                Err(OUT_OF_MEMORY)
            }
            other => other,
        }
    }
    hipFreeAsync(; base: u64, stream: u64) {
        let machine = entered()?.0;
        if Settings::get().has(Fault::PoolFreeFails) {
            return Err(LAUNCH_FAILURE);
        }
        POOLS.acquire().free(machine, base, stream)
    }
}

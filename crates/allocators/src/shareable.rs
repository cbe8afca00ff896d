//! Regions that other processes may map: each on its own, or pieces of one range of addresses.

// Tests: `crates/allocators/tests/process_state.rs`, `crates/allocators/tests/bfc_on_memory.rs`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use gpu_api::lock::Acquire;
use gpu_api::{DevicePtr, RegionId, Result, Spot};

use crate::{Export, Region};

use crate::upstream::RoomListener;
use crate::{DeviceMemory, Extent, GrowingMemory, Memory, SubAllocator};

/// The number of the one range that an arena has.
const RANGE: u64 = 0;

/// Memory of a device that is exported as soon as it is allocated, for blocks of sessions and
/// nothing else.
///
/// A region is mapped by others as a whole, so nothing private may lie in one.
///
/// Regions on their own have numbers that are never used again. The number of a region in a range
/// is that of the place where it begins, so that a process that maps a region knows the number of
/// the one behind it at any time.
#[derive(Debug)]
pub struct Shareable {
    upstream: Upstream,
    numbers: Mutex<Numbers>,
}

#[derive(Debug)]
enum Upstream {
    Apart(DeviceMemory),
    InPlace(GrowingMemory),
}

/// The numbers of regions.
#[derive(Debug, Default)]
struct Numbers {
    next: u64,
    /// Of places in the range: as many as there were ends of pieces.
    places: HashMap<u64, RegionId>,
}

impl Numbers {
    fn next(&mut self) -> RegionId {
        self.next += 1;
        RegionId(self.next - 1)
    }

    fn of_place(&mut self, offset: u64) -> RegionId {
        if let Some(&number) = self.places.get(&offset) {
            return number;
        }
        let number = self.next();
        self.places.insert(offset, number);
        number
    }
}

impl Shareable {
    /// Exports regions that come from there.
    pub fn new(device: DeviceMemory) -> Shareable {
        Shareable {
            upstream: Upstream::Apart(device),
            numbers: Mutex::default(),
        }
    }

    /// Exports pieces of a range that come from there: a block may lie across several, and goes on
    /// in each process that maps them.
    pub fn growing(memory: GrowingMemory) -> Shareable {
        Shareable {
            upstream: Upstream::InPlace(memory),
            numbers: Mutex::default(),
        }
    }

    fn inner(&self) -> &dyn SubAllocator<Token = ()> {
        match &self.upstream {
            Upstream::Apart(memory) => memory,
            Upstream::InPlace(memory) => memory,
        }
    }

    fn export_apart(&self, memory: &DeviceMemory, len: u64) -> Result<(Extent, Region)> {
        let allocation = memory.allocate(len)?;
        let extent = Extent {
            base: allocation.base.0,
            len: allocation.len,
        };
        let export = memory.export(allocation).inspect_err(|_| {
            // Nobody has seen the allocation yet. That it could not be shared is what the caller
            // can mend.
            if let Err(error) = memory.release(extent) {
                tracing::warn!(%error, "a region is leaked");
            }
        })?;
        let id = self.numbers.acquire().next();
        Ok((
            extent,
            Region::new(
                id,
                memory.gpu().device(),
                allocation.base,
                allocation.len,
                export,
            ),
        ))
    }

    fn export_in_place(&self, memory: &GrowingMemory, len: u64) -> Result<(Extent, Region)> {
        let (extent, ()) = memory.alloc(len, 1)?;
        let exported = memory.export(extent).inspect_err(|_| {
            if let Err(error) = memory.free(extent, ()) {
                tracing::warn!(%error, "a region is leaked");
            }
        })?;
        let offset = extent.base - exported.range.base.0;
        let (id, behind) = {
            let mut numbers = self.numbers.acquire();
            (
                numbers.of_place(offset),
                numbers.of_place(offset + extent.len),
            )
        };
        let spot = Spot {
            range: RANGE,
            range_len: exported.range.len,
            offset,
            behind,
        };
        let region = Region::new(
            id,
            memory.gpu().device(),
            DevicePtr(extent.base),
            extent.len,
            Export::Fd(exported.fd),
        );
        Ok((extent, region.with_spot(spot)))
    }
}

// SAFETY: as `DeviceMemory` or `GrowingMemory`, whose extents these are.
unsafe impl SubAllocator for Shareable {
    type Token = Arc<Region>;

    fn alloc(&self, len: u64, _align: u64) -> Result<(Extent, Arc<Region>)> {
        let (extent, region) = match &self.upstream {
            Upstream::Apart(memory) => self.export_apart(memory, len),
            Upstream::InPlace(memory) => self.export_in_place(memory, len),
        }?;
        Ok((extent, Arc::new(region)))
    }

    fn free(&self, extent: Extent, region: Arc<Region>) -> Result<()> {
        // A descriptor keeps the memory: with the last block gone, this is the last of it but for
        // somebody's report.
        drop(region);
        self.inner().free(extent, ())
    }

    fn may_free(&self, region: &Arc<Region>) -> bool {
        !region.is_pinned()
    }

    fn merges(&self) -> bool {
        self.inner().merges()
    }

    fn granularity(&self) -> u64 {
        self.inner().granularity()
    }

    fn capacity(&self) -> u64 {
        self.inner().capacity()
    }

    fn subscribe(&self, listener: Weak<dyn RoomListener>) {
        self.inner().subscribe(listener);
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        self.inner().memory()
    }

    fn check_owner(&self) -> Result<()> {
        self.inner().check_owner()
    }
}

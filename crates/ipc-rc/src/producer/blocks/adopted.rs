//! Memory that other code allocated, as regions of a session.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use allocators::{Export, Piece, Region};
use gpu_api::lock::Acquire;
use gpu_api::{BackendKind, DevicePtr, Error, Gpu, MemoryKind, RegionId, Result, Sharing};

/// Numbers of adopted regions begin here, apart from those of the session's source.
pub(crate) const FIRST_ADOPTED: RegionId = RegionId(1 << 63);

/// The regions that a session has adopted.
#[derive(Debug)]
pub(crate) struct Adopted {
    /// By base: several blocks may be adopted from one allocation. Those that are gone stay until
    /// another is made.
    regions: Mutex<BTreeMap<u64, Weak<Region>>>,
    next: AtomicU64,
}

impl Adopted {
    pub(crate) fn new() -> Adopted {
        Adopted {
            regions: Mutex::default(),
            next: AtomicU64::new(FIRST_ADOPTED.0),
        }
    }

    /// Finds the allocation that a range lies in, and makes it a region unless it is one.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for memory that cannot be shared, [`Error::Invalid`] for a range that
    /// does not lie in one allocation.
    pub(crate) fn piece(&self, gpu: &Gpu, ptr: DevicePtr, len: u64) -> Result<Piece> {
        if len == 0 {
            return Err(Error::invalid(
                "the length of a block",
                "0",
                "at least 1 byte",
            ));
        }
        let info = gpu.backend().classify(ptr)?;
        let sharing = info.sharing.ok_or_else(|| {
            Error::unsupported(
                "adopting this memory",
                why_not(gpu.kind(), info.kind),
                "allocate it with the session's `alloc`, or plainly (cuMemAlloc, hipMalloc)",
            )
        })?;
        let range = match info.range {
            Some(range) => range,
            None => gpu.backend().address_range(ptr)?,
        };
        let offset = ptr.0 - range.base.0;
        if offset.checked_add(len).is_none_or(|end| end > range.len) {
            return Err(Error::invalid(
                "the adopted range",
                format!(
                    "{len} bytes at offset {offset} of an allocation of {}",
                    range.len
                ),
                "inside one allocation",
            ));
        }
        let mut regions = self.regions.acquire();
        let known = regions.get(&range.base.0).and_then(Weak::upgrade);
        let region = match known {
            Some(region) => region,
            None => {
                regions.retain(|_, region| region.strong_count() > 0);
                let export = match sharing {
                    Sharing::Fd => Export::Fd(gpu.backend().export_fd(range.base)?),
                    _ => Export::Handle(gpu.backend().export_handle(range.base)?),
                };
                let id = RegionId(self.next.fetch_add(1, Ordering::Relaxed));
                let region = Arc::new(Region::new(id, gpu.device(), range.base, range.len, export));
                regions.insert(range.base.0, Arc::downgrade(&region));
                region
            }
        };
        Ok(Piece {
            region,
            offset,
            len,
        })
    }
}

fn why_not(backend: BackendKind, kind: MemoryKind) -> &'static str {
    match kind {
        MemoryKind::Pool => {
            "it comes from a stream-ordered pool (cudaMallocAsync), which has no handle"
        }
        MemoryKind::Managed => "managed memory migrates and has no handle",
        MemoryKind::Host => "it is host memory",
        MemoryKind::Imported => {
            "this process opened it from another one; forward the block instead"
        }
        MemoryKind::Unknown if backend.in_host_memory() => {
            "it is memory of this process alone, which has no handle for others"
        }
        MemoryKind::Unknown => "the driver does not know the address",
        MemoryKind::Virtual => "it was not created with an exportable handle type",
        _ => "the driver gives no handle for it",
    }
}

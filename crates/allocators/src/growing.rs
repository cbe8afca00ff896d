//! Memory of a device that grows in place: one range of addresses, and physical pieces on it.

// Tests: `crates/allocators/tests/arena_in_place.rs`, `crates/allocators/tests/bfc_on_memory.rs`.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use gpu_api::lock::Acquire;
use gpu_api::{Access, AddressRange, DevicePtr, Error, Gpu, RawMemory, Result};

use crate::upstream::RoomListener;
use crate::{Budget, DeviceBytes, Extent, Memory, SubAllocator};

/// How many times the device's memory the range of addresses is: holes that no piece fits into cost
/// addresses alone.
const ADDRESSES: u64 = 2;

/// Memory of a device in pieces that lie side by side. No other process sees it, unless a
/// [`Shareable`](crate::Shareable) exports it.
///
/// Addresses for more than the device has are reserved at the first piece, and each piece is mapped
/// at the lowest place that is free. A [`Bfc`](crate::Bfc) over it uses neighbouring pieces as one
/// region, so what is free in several of them serves a request that is larger than each, and it
/// gives the last pieces of a region back when nobody uses them. PyTorch's expandable segments are
/// the same.
///
/// # Examples
///
/// ```
/// use allocators::{Bfc, BfcOptions, Growth, GrowingMemory, Request};
/// use backend_host::{HostBackend, HostConfig};
/// use gpu_api::{DeviceId, Gpu};
///
/// let gpu = Gpu::new(HostBackend::new(HostConfig::default())?, DeviceId(0))?;
/// let options = BfcOptions::new("grows").growth(Growth::Fixed(2 << 20));
/// let bfc = Bfc::new(options, GrowingMemory::new(gpu)?);
/// let pieces = [bfc.alloc(Request::new(2 << 20))?, bfc.alloc(Request::new(2 << 20))?];
/// for piece in pieces {
///     bfc.free(piece.address)?;
/// }
/// // Two pieces, one request.
/// bfc.alloc(Request::new(4 << 20))?;
/// assert_eq!(bfc.stats().bytes_reserved, 4 << 20);
/// # Ok::<(), gpu_api::Error>(())
/// ```
#[derive(Debug)]
pub struct GrowingMemory {
    gpu: Gpu,
    budget: Option<Arc<Budget>>,
    most: u64,
    mapped: Mutex<Mapped>,
    bytes: OnceLock<Arc<DeviceBytes>>,
}

/// The range, and what is mapped on it.
#[derive(Debug, Default)]
struct Mapped {
    range: Option<AddressRange>,
    /// By their place in the range.
    pieces: BTreeMap<u64, RawMemory>,
}

/// A piece that other processes may map.
pub(crate) struct ExportedPiece {
    pub(crate) fd: OwnedFd,
    /// What it is a piece of.
    pub(crate) range: AddressRange,
}

impl GrowingMemory {
    /// Takes memory of this device.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] on a device without [`Caps::ranges`](gpu_api::Caps::ranges);
    /// [`Error::Forked`] in a forked child of the process that found the device.
    pub fn new(gpu: Gpu) -> Result<GrowingMemory> {
        gpu.check_fork()?;
        if !gpu.caps().ranges {
            return Err(Error::unsupported(
                "device memory that grows in place",
                format!("{} has no ranges of addresses", gpu.device()),
                "use `DeviceMemory`",
            ));
        }
        Ok(GrowingMemory {
            gpu,
            budget: None,
            most: u64::MAX,
            mapped: Mutex::default(),
            bytes: OnceLock::new(),
        })
    }

    /// Reserves addresses for no more than this, where that is less than the device has.
    #[must_use]
    pub fn most(mut self, bytes: u64) -> GrowingMemory {
        self.most = bytes;
        self
    }

    /// Reserves the addresses, which the first piece would else do.
    ///
    /// # Errors
    ///
    /// [`Error::System`] or [`Error::Driver`] when the process has no room for them.
    pub fn reserve(&self) -> Result<()> {
        self.check_owner()?;
        self.reserved(&mut self.mapped.acquire(), 0).map(drop)
    }

    /// Returns the device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Exports a piece that is out.
    pub(crate) fn export(&self, extent: Extent) -> Result<ExportedPiece> {
        let mapped = self.mapped.acquire();
        let (range, at) = mapped.find(extent)?;
        // SAFETY: `export_memory` asks for memory that is not yet released: the table has it.
        let fd = unsafe { self.gpu.backend().export_memory(mapped.pieces[&at]) }?;
        Ok(ExportedPiece { fd, range })
    }

    /// Returns the range, and reserves it first if need be, with room for `len` bytes.
    fn reserved(&self, mapped: &mut Mapped, len: u64) -> Result<AddressRange> {
        if let Some(range) = mapped.range {
            return Ok(range);
        }
        let granularity = self.granularity();
        let whole = self
            .gpu
            .info()
            .total_bytes
            .min(self.most)
            .max(len)
            .max(granularity)
            .saturating_mul(ADDRESSES);
        let whole = whole
            .checked_next_multiple_of(granularity)
            .unwrap_or(u64::MAX / granularity * granularity);
        Ok(*mapped.range.insert(self.gpu.backend().reserve_range(
            self.gpu.device(),
            whole,
            None,
        )?))
    }

    /// Takes no more than a budget allows.
    #[must_use]
    pub fn budget(mut self, budget: Arc<Budget>) -> GrowingMemory {
        self.budget = Some(budget);
        self
    }

    /// Takes bytes of the budget.
    fn afford(&self, bytes: u64, asked: u64) -> Result<()> {
        self.budget.as_ref().map_or(Ok(()), |budget| {
            budget.take_for(self.gpu.device(), bytes, asked, "")
        })
    }

    fn forgo(&self, bytes: u64) {
        if let Some(budget) = &self.budget {
            budget.give_back(bytes);
        }
    }

    /// Makes a piece and maps it at the lowest place that is free.
    fn grow(&self, len: u64) -> Result<Extent> {
        let (backend, device) = (self.gpu.backend(), self.gpu.device());
        let mut mapped = self.mapped.acquire();
        let range = self.reserved(&mut mapped, len)?;
        let memory = backend.create_memory(device, len)?;
        let at = mapped.place(memory.len, range.len);
        let result = match at {
            Some(at) => {
                // SAFETY: `map_memory` asks for
                // - memory that is not yet released: it was created just now;
                // - a place within one range from `reserve_range`, at a multiple of the
                //   granularity, with nothing mapped on it: `place` looked for it among the pieces,
                //   whose lengths are multiples.
                unsafe {
                    backend.map_memory(DevicePtr(range.base.0 + at), memory, Access::ReadWrite)
                }
                .map(|()| at)
            }
            None => Err(Error::OutOfMemory {
                device,
                asked: len,
                free: 0,
                hint: "the range of addresses has no gap that is large enough".into(),
            }),
        };
        match result {
            Ok(at) => {
                mapped.pieces.insert(at, memory);
                Ok(Extent {
                    base: range.base.0 + at,
                    len: memory.len,
                })
            }
            Err(error) => {
                // SAFETY: `release_memory` asks for memory that is not yet released: it was created
                // just now.
                if let Err(error) = unsafe { backend.release_memory(memory) } {
                    tracing::warn!(%error, "physical memory is leaked");
                }
                Err(error)
            }
        }
    }
}

impl Mapped {
    /// Finds the place of a piece that is out.
    fn find(&self, extent: Extent) -> Result<(AddressRange, u64)> {
        let found = self
            .range
            .and_then(|range| Some((range, extent.base.checked_sub(range.base.0)?)));
        let is_out = |at: u64| {
            self.pieces
                .get(&at)
                .is_some_and(|memory| memory.len == extent.len)
        };
        found
            .filter(|&(_, at)| is_out(at))
            .ok_or_else(|| Error::invalid("extent", format!("{extent:?}"), "one that is out"))
    }

    /// Finds the lowest gap.
    fn place(&self, len: u64, range: u64) -> Option<u64> {
        let mut at = 0;
        for (&start, piece) in &self.pieces {
            if start - at >= len {
                return Some(at);
            }
            at = start + piece.len;
        }
        (range - at >= len).then_some(at)
    }
}

// SAFETY: `SubAllocator` asks that extents overlap nothing that is not yet freed: each is a piece
// of its own at a place of its own in the range. `memory` reaches them: it copies on the device
// that they are mapped for.
unsafe impl SubAllocator for GrowingMemory {
    type Token = ();

    fn alloc(&self, len: u64, _align: u64) -> Result<(Extent, ())> {
        self.check_owner()?;
        let rounded = len
            .checked_next_multiple_of(self.granularity())
            .unwrap_or(u64::MAX);
        self.afford(rounded, len)?;
        match self.grow(rounded) {
            Ok(extent) => Ok((extent, ())),
            Err(error) => {
                self.forgo(rounded);
                Err(error)
            }
        }
    }

    fn free(&self, extent: Extent, (): ()) -> Result<()> {
        self.check_owner()?;
        let mut mapped = self.mapped.acquire();
        let (_, at) = mapped.find(extent)?;
        let memory = mapped.pieces[&at];
        let backend = self.gpu.backend();
        // SAFETY: `unmap_memory` asks for a place from `map_memory` that is not yet unmapped, which
        // the table says, and that no work touches it: the free of its last piece stated that its
        // bytes may be used again.
        unsafe { backend.unmap_memory(DevicePtr(extent.base)) }?;
        // SAFETY: `release_memory` asks for memory that is not yet released: it is taken out of the
        // table, once.
        let released = unsafe { backend.release_memory(memory) };
        mapped.pieces.remove(&at);
        drop(mapped);
        if released.is_ok() {
            self.forgo(extent.len);
        }
        released
    }

    fn merges(&self) -> bool {
        true
    }

    fn granularity(&self) -> u64 {
        self.gpu.caps().granularity.max(1)
    }

    fn capacity(&self) -> u64 {
        self.gpu.info().total_bytes.min(
            self.budget
                .as_ref()
                .map_or(u64::MAX, |budget| budget.limit()),
        )
    }

    fn subscribe(&self, listener: Weak<dyn RoomListener>) {
        if let Some(budget) = &self.budget {
            budget.subscribe(listener);
        }
    }

    fn memory(&self) -> Result<Arc<dyn Memory>> {
        if let Some(bytes) = self.bytes.get() {
            return Ok(Arc::<DeviceBytes>::clone(bytes));
        }
        let bytes = Arc::new(DeviceBytes::new(self.gpu.clone())?);
        Ok(Arc::<DeviceBytes>::clone(self.bytes.get_or_init(|| bytes)))
    }

    fn check_owner(&self) -> Result<()> {
        self.gpu.check_fork()
    }
}

impl Drop for GrowingMemory {
    fn drop(&mut self) {
        if self.gpu.check_fork().is_err() {
            return;
        }
        let mapped = self
            .mapped
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        let Some(range) = mapped.range.filter(|_| mapped.pieces.is_empty()) else {
            return;
        };
        // SAFETY: `release_range` asks for what `reserve_range` gave, once, with nothing mapped on
        // it: the table is empty.
        if let Err(error) = unsafe { self.gpu.backend().release_range(range) } {
            tracing::warn!(%error, "a range of addresses is leaked");
        }
    }
}

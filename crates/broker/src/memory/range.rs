//! Addresses that regions come and go on.
//!
//! An address of a range stays valid for the range's life. The memory behind it changes as a whole,
//! from one epoch to another, and an empty range has none.

use std::os::fd::{AsFd, OwnedFd};

use gpu_api::{Access, AddressRange, DevicePtr, Gpu, RawMemory, Result};

/// Regions of one object, imported into this process: in order, not mapped.
#[derive(Debug)]
pub struct Imported {
    gpu: Gpu,
    memories: Vec<RawMemory>,
    /// The regions that are mapped read-only whatever the range allows, one bit each.
    protected: u16,
}

impl Imported {
    /// Imports regions of these sizes in bytes.
    ///
    /// # Errors
    ///
    /// What [`import_memory`](gpu_api::GpuStore::import_memory) gives; then nothing is imported.
    pub fn of(
        gpu: &Gpu,
        regions: &[OwnedFd],
        bytes: impl IntoIterator<Item = u64>,
    ) -> Result<Imported> {
        let mut imported = Imported {
            gpu: gpu.clone(),
            memories: Vec::with_capacity(regions.len()),
            protected: 0,
        };
        for (region, bytes) in regions.iter().zip(bytes) {
            imported.memories.push(gpu.backend().import_memory(
                gpu.device(),
                region.as_fd(),
                bytes,
            )?);
        }
        Ok(imported)
    }

    /// Lets some regions be mapped read-only, one bit each.
    #[must_use]
    pub fn protect(mut self, regions: u16) -> Imported {
        self.protected = regions;
        self
    }

    fn bytes(&self) -> u64 {
        self.memories.iter().map(|memory| memory.len).sum()
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        for &memory in &self.memories {
            // SAFETY: `release_memory` asks for memory that is not yet released: it was imported
            // here, and this is the only release. Mappings of it stay.
            if let Err(error) = unsafe { self.gpu.backend().release_memory(memory) } {
                tracing::warn!(%error, "a handle of memory cannot be given back; it is leaked");
            }
        }
    }
}

/// What the addresses of a range reach.
#[derive(Debug)]
enum Content {
    Nothing,
    Mapped(Imported),
    /// A call failed with an unknown effect.
    Unknown,
}

/// Why a swap failed.
#[derive(Debug)]
pub enum SwapError {
    /// The range is as it was before.
    Unchanged(gpu_api::Error),
    /// The addresses reach nothing, and cannot be used again.
    Poisoned(gpu_api::Error),
}

/// A range of addresses.
#[derive(Debug)]
pub struct Range {
    gpu: Gpu,
    range: Option<AddressRange>,
    access: Access,
    content: Content,
}

impl Range {
    /// Reserves addresses for this many bytes; none for 0.
    ///
    /// # Errors
    ///
    /// What [`reserve_range`](gpu_api::GpuRanges::reserve_range) gives.
    pub fn reserve(gpu: &Gpu, bytes: u64, access: Access) -> Result<Range> {
        Range::reserve_at(gpu, bytes, access, None)
    }

    /// As [`reserve`](Range::reserve), at an address if one is given.
    ///
    /// # Errors
    ///
    /// As [`reserve`](Range::reserve), and [`Invalid`](gpu_api::Error::Invalid) when something else
    /// lies there.
    pub fn reserve_at(
        gpu: &Gpu,
        bytes: u64,
        access: Access,
        at: Option<DevicePtr>,
    ) -> Result<Range> {
        let range = match bytes {
            0 => None,
            bytes => Some(gpu.backend().reserve_range(gpu.device(), bytes, at)?),
        };
        Ok(Range {
            gpu: gpu.clone(),
            range,
            access,
            content: Content::Nothing,
        })
    }

    /// Returns the first address, 0 for a range of no bytes.
    pub fn base(&self) -> DevicePtr {
        self.range.map_or(DevicePtr(0), |range| range.base)
    }

    /// Says whether the addresses reach memory.
    pub fn is_mapped(&self) -> bool {
        matches!(self.content, Content::Mapped(_))
    }

    /// Exports what is mapped, in order, as descriptors that map it read-only where they have such a
    /// form.
    ///
    /// # Errors
    ///
    /// What [`export_memory`](gpu_api::GpuStore::export_memory) gives.
    pub fn export(&self) -> Result<Vec<OwnedFd>> {
        let Content::Mapped(imported) = &self.content else {
            return Ok(Vec::new());
        };
        let (backend, device) = (self.gpu.backend(), self.gpu.device());
        let export = |&memory: &RawMemory| {
            // SAFETY: `export_memory` asks for memory that is not released, which `imported` holds.
            let file = unsafe { backend.export_memory(memory) }?;
            let read_only = backend.read_only_fd(device, file.as_fd())?;
            Ok(read_only.unwrap_or(file))
        };
        imported.memories.iter().map(export).collect()
    }

    /// Says whether the addresses are lost.
    pub fn is_poisoned(&self) -> bool {
        matches!(self.content, Content::Unknown)
    }

    /// Maps regions on an empty range.
    ///
    /// # Errors
    ///
    /// As [`swap`](Range::swap); unchanged means empty.
    ///
    /// # Panics
    ///
    /// If something is mapped, or the addresses are lost.
    pub fn map(&mut self, imported: Imported) -> Result<(), SwapError> {
        assert!(
            matches!(self.content, Content::Nothing),
            "mapped already, or lost"
        );
        match self.map_all(&imported) {
            Ok(()) => {
                self.content = Content::Mapped(imported);
                Ok(())
            }
            Err(Half { error, clean: true }) => Err(SwapError::Unchanged(error)),
            Err(Half {
                error,
                clean: false,
            }) => {
                self.content = Content::Unknown;
                Err(SwapError::Poisoned(error))
            }
        }
    }

    /// Maps other regions in place of those that are mapped, at the same addresses, and returns
    /// those; if that fails, puts them back.
    ///
    /// # Errors
    ///
    /// [`SwapError::Unchanged`] when the former regions are mapped, [`SwapError::Poisoned`] when
    /// nothing is.
    ///
    /// # Safety
    ///
    /// No unfinished GPU work of this process touches the range, and none is queued before this
    /// returns.
    pub unsafe fn swap(&mut self, imported: Imported) -> Result<Option<Imported>, SwapError> {
        // SAFETY: `unmap` has our condition.
        let former = unsafe { self.unmap() }?;
        let error = match self.map(imported) {
            Ok(()) => return Ok(former),
            Err(SwapError::Unchanged(error)) => error,
            Err(poisoned) => return Err(poisoned),
        };
        let Some(former) = former else {
            return Err(SwapError::Unchanged(error));
        };
        match self.map(former) {
            Ok(()) => Err(SwapError::Unchanged(error)),
            Err(SwapError::Unchanged(error) | SwapError::Poisoned(error)) => {
                self.content = Content::Unknown;
                Err(SwapError::Poisoned(error))
            }
        }
    }

    /// Takes what is mapped off the addresses, which stay reserved.
    ///
    /// # Errors
    ///
    /// [`SwapError::Poisoned`]: it is then unknown what is mapped.
    ///
    /// # Safety
    ///
    /// As [`swap`](Range::swap), until something is mapped again.
    pub unsafe fn unmap(&mut self) -> Result<Option<Imported>, SwapError> {
        match std::mem::replace(&mut self.content, Content::Unknown) {
            Content::Nothing => {
                self.content = Content::Nothing;
                Ok(None)
            }
            Content::Mapped(imported) => {
                let mut at = self.base();
                for memory in &imported.memories {
                    // SAFETY: `unmap_memory` asks for what was mapped at `at` and that no work
                    // touches it: `map_all` mapped these in this order, and our caller vouches for
                    // the rest.
                    if let Err(error) = unsafe { self.gpu.backend().unmap_memory(at) } {
                        // The handles are leaked with what may be mapped.
                        std::mem::forget(imported);
                        return Err(SwapError::Poisoned(error));
                    }
                    at = at.offset(memory.len);
                }
                self.content = Content::Nothing;
                Ok(Some(imported))
            }
            Content::Unknown => {
                let (got, must) = ("lost", "reserved and whole");
                Err(SwapError::Poisoned(gpu_api::Error::invalid(
                    "the addresses of a range",
                    got,
                    must,
                )))
            }
        }
    }

    fn map_all(&self, imported: &Imported) -> Result<(), Half> {
        let room = self.range.map_or(0, |range| range.len);
        if imported.bytes() > room {
            let got = format!("{} bytes for {room}", imported.bytes());
            let error =
                gpu_api::Error::invalid("regions to map", got, "no longer than their range");
            return Err(Half { error, clean: true });
        }
        let mut at = self.base();
        let mut mapped: Vec<DevicePtr> = Vec::with_capacity(imported.memories.len());
        for (n, &memory) in imported.memories.iter().enumerate() {
            let protected = imported
                .protected
                .checked_shr(n as u32)
                .is_some_and(|bits| bits & 1 != 0);
            let access = if protected {
                Access::ReadOnly
            } else {
                self.access
            };
            // SAFETY: `map_memory` asks for memory that is not released, and for addresses inside a
            // reservation with nothing on them, at a multiple of the granularity: `imported` holds
            // the memory, the lengths are such multiples and fit into the range, which is empty
            // from `at` on.
            if let Err(error) = unsafe { self.gpu.backend().map_memory(at, memory, access) } {
                let undo = |&at: &DevicePtr| {
                    // SAFETY: `unmap_memory` asks for what was mapped and is used by nothing: just
                    // mapped, and nobody was told.
                    unsafe { self.gpu.backend().unmap_memory(at) }.is_ok()
                };
                return Err(Half {
                    error,
                    clean: mapped.iter().all(undo),
                });
            }
            mapped.push(at);
            at = at.offset(memory.len);
        }
        Ok(())
    }

    /// Gives the addresses back.
    ///
    /// # Safety
    ///
    /// No unfinished GPU work of this process touches the range, and none is queued later.
    pub unsafe fn release(mut self) {
        // SAFETY: `unmap` has our condition.
        let unmapped = unsafe { self.unmap() };
        let Some(range) = self.range.take().filter(|_| unmapped.is_ok()) else {
            return;
        };
        // SAFETY: `release_range` asks for a reservation with nothing mapped on it, given back
        // once: it is empty, and `take` leaves none behind.
        if let Err(error) = unsafe { self.gpu.backend().release_range(range) } {
            tracing::warn!(%error, "a range of addresses cannot be given back; it is leaked");
        }
    }
}

/// A mapping that failed half-way.
struct Half {
    error: gpu_api::Error,
    /// What was mapped before it was unmapped again.
    clean: bool,
}

//! Memory apart from addresses: memfds, and reserved addresses that they are mapped on.

// Tests: `crates/backend-host/tests/awkward.rs`, `testing/conformance/src`.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{null_mut, with_exposed_provenance_mut};

use gpu_api::{
    Access, AddressRange, DeviceId, DevicePtr, Error, GpuRanges, GpuStore, MemoryKind, PointerInfo,
    RawMemory, Result,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::backend::HostBackend;
use crate::error::{INVALID_VALUE, driver};
use crate::memory::{self, GRANULARITY};

const RESERVED: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

/// Physical memory.
#[derive(Debug)]
struct Physical {
    file: OwnedFd,
    len: u64,
    device: DeviceId,
    /// Made here: it counts against the device.
    is_own: bool,
    /// The handle and the mappings.
    holders: u32,
}

/// A mapping of it.
#[derive(Clone, Copy, Debug)]
struct Piece {
    handle: u64,
    len: u64,
    device: DeviceId,
}

/// What this process made, imported, reserved and mapped.
#[derive(Debug, Default)]
pub struct Ranges {
    physical: HashMap<u64, Physical>,
    reserved: BTreeMap<u64, u64>,
    pieces: BTreeMap<u64, Piece>,
}

impl Ranges {
    /// Lets go of a handle or mapping. Returns the device that has bytes back.
    fn let_go(&mut self, handle: u64) -> Option<(DeviceId, u64)> {
        let physical = self.physical.get_mut(&handle)?;
        physical.holders -= 1;
        if physical.holders > 0 {
            return None;
        }
        self.physical
            .remove(&handle)
            .filter(|physical| physical.is_own)
            .map(|physical| (physical.device, physical.len))
    }

    fn find(&self, ptr: DevicePtr) -> Option<(u64, Piece)> {
        let (&base, &piece) = self.pieces.range(..=ptr.0).next_back()?;
        (ptr.0 - base < piece.len).then_some((base, piece))
    }

    /// Finds the piece that an address lies in.
    pub fn range(&self, ptr: DevicePtr) -> Option<AddressRange> {
        self.find(ptr).map(|(base, piece)| AddressRange {
            base: DevicePtr(base),
            len: piece.len,
        })
    }

    /// Says what an address in a piece is.
    pub fn classify(&self, ptr: DevicePtr) -> Option<PointerInfo> {
        let (base, piece) = self.find(ptr)?;
        let range = Some(AddressRange {
            base: DevicePtr(base),
            len: piece.len,
        });
        Some(PointerInfo {
            kind: MemoryKind::Piece,
            range,
            device: Some(piece.device),
            sharing: None,
        })
    }

    /// Returns the file behind an address in a piece, and the address' offset in it.
    #[cfg(feature = "faults")]
    pub fn file_at(&self, ptr: DevicePtr) -> Option<Result<(OwnedFd, u64)>> {
        let (base, piece) = self.find(ptr)?;
        Some(duplicate(&self.physical.get(&piece.handle)?.file).map(|file| (file, ptr.0 - base)))
    }

    /// Checks that a piece lies in one reservation, where nothing is mapped.
    fn is_free(&self, at: u64, len: u64) -> bool {
        let inside = |(&base, &reserved): (&u64, &u64)| {
            at - base <= reserved && len <= reserved - (at - base)
        };
        let reserved = self.reserved.range(..=at).next_back().is_some_and(inside);
        let before = self
            .pieces
            .range(..at + len)
            .next_back()
            .is_some_and(|(&base, piece)| base + piece.len > at);
        reserved && !before && at.is_multiple_of(memory::PAGE)
    }
}

impl Drop for Ranges {
    fn drop(&mut self) {
        for (&base, &len) in &self.reserved {
            // SAFETY: `munmap` asks that nobody use the range: the backend, and with it the last
            // that names it, goes. A failure leaves the addresses.
            let _ = unsafe { munmap(with_exposed_provenance_mut(base as usize), len as usize) };
        }
    }
}

fn duplicate(file: impl AsFd) -> Result<OwnedFd> {
    file.as_fd()
        .try_clone_to_owned()
        .map_err(|e| Error::system("dup", "raise RLIMIT_NOFILE", e))
}

fn unmapped(error: Errno) -> Error {
    Error::system(
        "mmap of device memory",
        "raise RLIMIT_AS or vm.max_map_count",
        error,
    )
}

// SAFETY: the condition of `GpuStore`: each creation is a memfd of its own, which its descriptors
// and mappings keep.
unsafe impl GpuStore for HostBackend {
    fn create_memory(&self, device: DeviceId, len: u64) -> Result<RawMemory> {
        self.check_device("create_memory", device)?;
        let mut tables = self.tables();
        let len = tables.memories.room(device, len)?;
        let file = memory::shared_file(len)?;
        tables.memories.charge(device, len);
        let handle = self.number();
        tables.ranges.physical.insert(
            handle,
            Physical {
                file,
                len,
                device,
                is_own: true,
                holders: 1,
            },
        );
        Ok(RawMemory {
            device,
            handle,
            len,
        })
    }

    unsafe fn export_memory(&self, memory: RawMemory) -> Result<OwnedFd> {
        match self.tables().ranges.physical.get(&memory.handle) {
            Some(physical) => duplicate(&physical.file),
            None => Err(driver("export_memory", memory.device, INVALID_VALUE)),
        }
    }

    fn import_memory(&self, device: DeviceId, fd: BorrowedFd<'_>, len: u64) -> Result<RawMemory> {
        self.check_device("import_memory", device)?;
        let len = len
            .checked_next_multiple_of(GRANULARITY)
            .unwrap_or(u64::MAX);
        memory::check_whole(fd, len)?;
        let (file, handle) = (duplicate(fd)?, self.number());
        self.tables().ranges.physical.insert(
            handle,
            Physical {
                file,
                len,
                device,
                is_own: false,
                holders: 1,
            },
        );
        Ok(RawMemory {
            device,
            handle,
            len,
        })
    }

    unsafe fn release_memory(&self, memory: RawMemory) -> Result<()> {
        let mut tables = self.tables();
        if !tables.ranges.physical.contains_key(&memory.handle) {
            return Err(driver("release_memory", memory.device, INVALID_VALUE));
        }
        if let Some((device, len)) = tables.ranges.let_go(memory.handle) {
            tables.memories.discharge(device, len);
        }
        Ok(())
    }
}

// SAFETY: the condition of `GpuRanges`: `mmap` gives addresses where nothing is mapped, and a
// mapping of a memfd shows it.
unsafe impl GpuRanges for HostBackend {
    fn reserve_range(
        &self,
        device: DeviceId,
        len: u64,
        at: Option<DevicePtr>,
    ) -> Result<AddressRange> {
        self.check_device("reserve_range", device)?;
        let size = gpu_api::round_up(len, GRANULARITY)?;
        let (address, flags) = match at {
            Some(at) => (
                with_exposed_provenance_mut(at.0 as usize),
                RESERVED | MapFlags::FIXED_NOREPLACE,
            ),
            None => (null_mut(), RESERVED),
        };
        // SAFETY: `mmap_anonymous` at a fixed address asks that it replace nothing in use: it
        // replaces nothing.
        let base = match unsafe { mmap_anonymous(address, size, ProtFlags::empty(), flags) } {
            Ok(base) => DevicePtr(base.expose_provenance() as u64),
            Err(Errno::EXIST | Errno::INVAL | Errno::PERM) if at.is_some() => {
                return Err(taken(at));
            }
            Err(error) => {
                return Err(Error::system(
                    "mmap of addresses",
                    "raise RLIMIT_AS, or ask for less",
                    error,
                ));
            }
        };
        if at.is_some_and(|at| at != base) {
            // A kernel before 4.17 takes the address for a hint.
            // SAFETY: `munmap` asks that nobody use the range: just made.
            let _ = unsafe { munmap(with_exposed_provenance_mut(base.0 as usize), size) };
            return Err(taken(at));
        }
        self.tables().ranges.reserved.insert(base.0, size as u64);
        Ok(AddressRange {
            base,
            len: size as u64,
        })
    }

    unsafe fn map_memory(&self, at: DevicePtr, memory: RawMemory, access: Access) -> Result<()> {
        let mut tables = self.tables();
        let ranges = &mut tables.ranges;
        let is_free = ranges.is_free(at.0, memory.len);
        let Some(physical) = ranges.physical.get_mut(&memory.handle).filter(|_| is_free) else {
            return Err(driver("map_memory", memory.device, INVALID_VALUE));
        };
        let protection = match access {
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
            Access::ReadOnly => ProtFlags::READ,
        };
        let (address, flags) = (
            with_exposed_provenance_mut(at.0 as usize),
            MapFlags::SHARED | MapFlags::FIXED,
        );
        // SAFETY: `mmap` at a fixed address asks that it replace nothing in use: part of a
        // reservation, without a piece.
        unsafe {
            mmap(
                address,
                physical.len as usize,
                protection,
                flags,
                &physical.file,
                0,
            )
        }
        .map_err(unmapped)?;
        physical.holders += 1;
        let piece = Piece {
            handle: memory.handle,
            len: physical.len,
            device: memory.device,
        };
        ranges.pieces.insert(at.0, piece);
        Ok(())
    }

    unsafe fn unmap_memory(&self, at: DevicePtr) -> Result<()> {
        let mut tables = self.tables();
        let Some(piece) = tables.ranges.pieces.get(&at.0).copied() else {
            return Err(driver("unmap_memory", DeviceId(0), INVALID_VALUE));
        };
        let address = with_exposed_provenance_mut(at.0 as usize);
        // SAFETY: `mmap_anonymous` at a fixed address asks that it replace nothing in use: our
        // caller vouches for it.
        unsafe {
            mmap_anonymous(
                address,
                piece.len as usize,
                ProtFlags::empty(),
                RESERVED | MapFlags::FIXED,
            )
        }
        .map_err(unmapped)?;
        tables.ranges.pieces.remove(&at.0);
        if let Some((device, len)) = tables.ranges.let_go(piece.handle) {
            tables.memories.discharge(device, len);
        }
        Ok(())
    }

    unsafe fn release_range(&self, range: AddressRange) -> Result<()> {
        let mut tables = self.tables();
        let ranges = &mut tables.ranges;
        let is_whole = ranges.reserved.get(&range.base.0) == Some(&range.len);
        if !is_whole
            || ranges
                .pieces
                .range(range.base.0..range.base.0 + range.len)
                .next()
                .is_some()
        {
            return Err(driver("release_range", DeviceId(0), INVALID_VALUE));
        }
        // SAFETY: `munmap` asks that nobody use the range: nothing is mapped on it.
        unsafe {
            munmap(
                with_exposed_provenance_mut(range.base.0 as usize),
                range.len as usize,
            )
        }
        .map_err(unmapped)?;
        ranges.reserved.remove(&range.base.0);
        Ok(())
    }
}

fn taken(at: Option<DevicePtr>) -> Error {
    let got = format!(
        "{}, where something else lies or no memory can",
        at.unwrap_or(DevicePtr(0))
    );
    Error::invalid("the wanted address", got, "free in this process")
}

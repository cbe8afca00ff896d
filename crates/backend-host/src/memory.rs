//! Device memory: memfds, mapped, and how other processes reach them.

// Tests: `crates/backend-host/tests/awkward.rs`, `testing/conformance/src`.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use gpu_api::{
    Access, AddressRange, Allocation, DeviceId, DevicePtr, Error, EventHandle, MemHandle,
    MemoryKind, PointerInfo, Result, Sharing,
};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::error::{INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, driver};

/// Allocations are rounded up to this.
pub const GRANULARITY: u64 = 64 << 10;
/// What the name of every memfd here begins with; `/proc/PID/fd` shows it.
pub const NAME: &str = "gpu-ipc-host";

/// What an address that something is mapped at is a multiple of.
pub const PAGE: u64 = 4096;

const MAGIC: [u8; 8] = *b"gpuipcH1";

/// Makes a sealed memfd. Its mode keeps other users, who are sent a descriptor that can only be
/// read, from opening it again by `/proc` to write.
pub fn shared_file(bytes: u64) -> Result<OwnedFd> {
    let file = rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(|e| {
            Error::system(
                "memfd_create",
                "raise RLIMIT_NOFILE or close descriptors",
                e,
            )
        })?;
    rustix::fs::ftruncate(&file, bytes)
        .map_err(|e| Error::system("ftruncate of device memory", "free memory", e))?;
    rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR)
        .map_err(|e| Error::system("fchmod of device memory", "report this", e))?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(|e| Error::system("sealing device memory", "use Linux 3.17 or later", e))?;
    Ok(file)
}

/// Opens a memfd a second time, to read only: what is mapped by that descriptor can neither be
/// written nor made writable.
pub fn reopened_read_only(file: BorrowedFd<'_>) -> Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(|e| {
        Error::system(
            "opening device memory to read only",
            "raise RLIMIT_NOFILE, and mount /proc",
            e,
        )
    })
}

/// Maps a file that nobody can truncate.
pub fn map(file: &OwnedFd, bytes: u64, access: Access) -> Result<MmapRaw> {
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut options = MmapOptions::new();
    options.len(len);
    let mapped = match access {
        Access::ReadWrite => options.map_raw(file),
        Access::ReadOnly => options.map_raw_read_only(file),
    };
    mapped.map_err(|e| {
        Error::system(
            "mmap of device memory",
            "raise RLIMIT_AS or vm.max_map_count",
            e,
        )
    })
}

/// Maps sealed files side by side, `piece` bytes of each.
fn map_side_by_side(files: &[OwnedFd], piece: u64, access: Access) -> Result<MmapRaw> {
    let failed = |e: rustix::io::Errno| {
        Error::system(
            "mmap of device memory",
            "raise RLIMIT_AS or vm.max_map_count",
            e,
        )
    };
    let len = piece
        .checked_mul(files.len() as u64)
        .and_then(|len| usize::try_from(len).ok())
        .unwrap_or(usize::MAX);
    let addresses = MmapOptions::new().len(len).no_reserve_swap().map_anon();
    let whole =
        MmapRaw::from(addresses.map_err(|e| {
            Error::system("mmap of addresses", "raise RLIMIT_AS, or ask for less", e)
        })?);
    let protection = match access {
        Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        Access::ReadOnly => ProtFlags::READ,
    };
    for (number, file) in files.iter().enumerate() {
        // SAFETY: `add` asks for an offset within the mapping: it has `piece` bytes for each file.
        let at = unsafe { whole.as_mut_ptr().add(number * piece as usize) };
        // SAFETY: `mmap` at a fixed address asks that nobody use what it replaces: part of `whole`,
        // made above.
        unsafe {
            mmap(
                at.cast(),
                piece as usize,
                protection,
                MapFlags::SHARED | MapFlags::FIXED,
                file,
                0,
            )
        }
        .map_err(failed)?;
    }
    Ok(whole)
}

/// What a handle says: which descriptor of which process, and what must be behind it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Handle {
    pid: u32,
    fd: u32,
    inode: u64,
    bytes: u64,
}

impl Handle {
    /// Describes a file of this process.
    pub fn of(file: &OwnedFd, bytes: u64) -> Result<Handle> {
        let inode = inode_of(file.as_fd())?.0;
        Ok(Handle {
            pid: std::process::id(),
            fd: file.as_raw_fd().cast_unsigned(),
            inode,
            bytes,
        })
    }

    fn encode(self) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.pid.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.fd.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.inode.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; 64]) -> Option<Handle> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if bytes[..8] != MAGIC || bytes[32..] != [0; 32] {
            return None;
        }
        Some(Handle {
            pid: word(8) as u32,
            fd: (word(8) >> 32) as u32,
            inode: word(16),
            bytes: word(24),
        })
    }

    /// Returns the memory handle's bytes.
    pub fn memory(self) -> MemHandle {
        MemHandle(self.encode())
    }

    /// Returns the event handle's bytes.
    pub fn event(self) -> EventHandle {
        EventHandle(self.encode())
    }

    /// Opens what 64 bytes describe, checking every part of it.
    pub fn open(
        call: &'static str,
        device: DeviceId,
        bytes: &[u8; 64],
    ) -> Result<(OwnedFd, Handle)> {
        let invalid = || driver(call, device, INVALID_HANDLE);
        let handle = Handle::decode(bytes).ok_or_else(invalid)?;
        if handle.pid == std::process::id() {
            return Err(driver(call, device, INVALID_CONTEXT));
        }
        let path = format!("/proc/{}/fd/{}", handle.pid, handle.fd);
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|_| invalid())?;
        if inode_of(file.as_fd())? != (handle.inode, handle.bytes) || !is_sealed(file.as_fd()) {
            return Err(invalid());
        }
        Ok((file, handle))
    }
}

fn inode_of(file: BorrowedFd<'_>) -> Result<(u64, u64)> {
    let stat = rustix::fs::fstat(file)
        .map_err(|e| Error::system("fstat of device memory", "report this", e))?;
    Ok((stat.st_ino, stat.st_size.cast_unsigned()))
}

/// Refuses a descriptor of anything but `len` bytes of device memory.
fn check_import(fd: BorrowedFd<'_>, len: u64) -> Result<()> {
    let bytes = inode_of(fd)?.1;
    if !is_sealed(fd) {
        let (got, must) = ("a file that can be truncated", "device memory");
        return Err(Error::invalid("a file descriptor to import", got, must));
    }
    if len == 0 || bytes < len {
        let got = format!("{bytes} bytes, of which {len} are asked for");
        return Err(Error::invalid(
            "memory to import",
            got,
            "at least as long as asked for",
        ));
    }
    Ok(())
}

/// Refuses a descriptor of anything but device memory of exactly this length.
pub fn check_whole(fd: BorrowedFd<'_>, len: u64) -> Result<()> {
    check_import(fd, len)?;
    let bytes = inode_of(fd)?.1;
    if bytes == len {
        return Ok(());
    }
    let got = format!("{bytes} bytes, of which {len} are asked for");
    Err(Error::invalid(
        "memory to import",
        got,
        "exactly as long as asked for",
    ))
}

fn is_sealed(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

#[derive(Debug)]
enum Origin {
    /// Allocated here.
    Own(Sharing),
    /// Opened by handle, so often.
    Opened { inode: u64, times: u32 },
    /// Imported by file descriptors.
    Imported,
    /// A buffer of a pool.
    Pooled,
    /// Managed: it counts against no device.
    Managed,
}

#[derive(Debug)]
struct Memory {
    map: MmapRaw,
    /// What is mapped: one, or several side by side.
    files: Vec<OwnedFd>,
    len: u64,
    device: DeviceId,
    origin: Origin,
}

/// The memory that this process has allocated or mapped.
#[derive(Debug)]
pub struct Memories {
    all: BTreeMap<u64, Memory>,
    used: Vec<u64>,
    capacity: u64,
}

impl Memories {
    /// Makes an empty table for `devices` devices of `capacity` bytes each.
    pub fn new(devices: u32, capacity: u64) -> Memories {
        Memories {
            all: BTreeMap::new(),
            used: vec![0; devices as usize],
            capacity,
        }
    }

    /// Returns the bytes that are free on a device.
    pub fn free_bytes(&self, device: DeviceId) -> u64 {
        self.capacity - self.used[device.0 as usize]
    }

    /// Rounds a length up, if there is room for it.
    pub fn room(&self, device: DeviceId, len: u64) -> Result<u64> {
        let free = self.free_bytes(device);
        let rounded = self.rounded(device, len)?;
        if rounded <= free {
            Ok(rounded)
        } else {
            Err(self.no_room(device, len))
        }
    }

    /// Rounds a length up.
    pub fn rounded(&self, device: DeviceId, len: u64) -> Result<u64> {
        if len == 0 {
            return Err(Error::invalid(
                "the length of an allocation",
                "0",
                "at least 1 byte",
            ));
        }
        len.checked_next_multiple_of(GRANULARITY)
            .ok_or_else(|| self.no_room(device, len))
    }

    fn no_room(&self, device: DeviceId, asked: u64) -> Error {
        let hint = "free some, or set GPU_IPC_HOST_BYTES higher".into();
        Error::OutOfMemory {
            device,
            asked,
            free: self.free_bytes(device),
            hint,
        }
    }

    /// Counts memory against a device.
    pub fn charge(&mut self, device: DeviceId, len: u64) {
        self.used[device.0 as usize] += len;
    }

    /// Counts memory no more.
    pub fn discharge(&mut self, device: DeviceId, len: u64) {
        self.used[device.0 as usize] -= len;
    }

    /// Allocates.
    pub fn alloc(&mut self, device: DeviceId, len: u64, sharing: Sharing) -> Result<Allocation> {
        let rounded = self.room(device, len)?;
        let allocation = self.map_own(device, rounded, Origin::Own(sharing))?;
        self.charge(device, rounded);
        Ok(allocation)
    }

    /// Allocates a pool's buffer.
    pub fn alloc_pooled(&mut self, device: DeviceId, len: u64) -> Result<Allocation> {
        let rounded = self.room(device, len)?;
        let allocation = self.map_own(device, rounded, Origin::Pooled)?;
        self.charge(device, rounded);
        Ok(allocation)
    }

    /// Unmaps a pool's buffer.
    pub fn free_pooled(&mut self, base: DevicePtr) {
        if let Some(memory) = self.all.remove(&base.0) {
            self.discharge(memory.device, memory.len);
        }
    }

    /// Allocates managed memory, which is no part of the device's: what does not fit there lies in
    /// the host's.
    pub fn alloc_managed(&mut self, device: DeviceId, len: u64) -> Result<Allocation> {
        let rounded = self.rounded(device, len)?;
        self.map_own(device, rounded, Origin::Managed)
    }

    fn map_own(&mut self, device: DeviceId, len: u64, origin: Origin) -> Result<Allocation> {
        let file = shared_file(len)?;
        let map = map(&file, len, Access::ReadWrite)?;
        let base = self.insert(Memory {
            map,
            files: vec![file],
            len,
            device,
            origin,
        });
        Ok(Allocation { base, len })
    }

    fn insert(&mut self, memory: Memory) -> DevicePtr {
        let base = memory.map.as_ptr() as u64;
        self.all.insert(base, memory);
        DevicePtr(base)
    }

    /// Takes an allocation out; dropping the result unmaps it.
    pub fn free(&mut self, base: DevicePtr) -> Result<impl Sized + use<>> {
        match self.all.get(&base.0) {
            Some(Memory {
                origin: Origin::Own(_) | Origin::Managed,
                ..
            }) => {}
            _ => return Err(driver("free", DeviceId(0), INVALID_VALUE)),
        }
        let memory = self.all.remove(&base.0);
        if let Some(Memory {
            device,
            len,
            origin: Origin::Own(_),
            ..
        }) = memory
        {
            self.discharge(device, len);
        }
        Ok(memory)
    }

    fn find(&self, ptr: DevicePtr) -> Option<(u64, &Memory)> {
        let (&base, memory) = self.all.range(..=ptr.0).next_back()?;
        (ptr.0 - base < memory.len).then_some((base, memory))
    }

    /// Finds the allocation that an address lies in.
    pub fn range(&self, ptr: DevicePtr) -> Result<AddressRange> {
        match self.find(ptr) {
            Some((base, memory)) => Ok(AddressRange {
                base: DevicePtr(base),
                len: memory.len,
            }),
            None => Err(Error::invalid("a device address", ptr, "in an allocation")),
        }
    }

    /// Says where an address comes from.
    pub fn classify(&self, ptr: DevicePtr) -> PointerInfo {
        let Some((base, memory)) = self.find(ptr) else {
            return PointerInfo {
                kind: MemoryKind::Unknown,
                range: None,
                device: None,
                sharing: None,
            };
        };
        let (kind, sharing) = match memory.origin {
            Origin::Own(Sharing::Fd) => (MemoryKind::Virtual, Some(Sharing::Fd)),
            Origin::Own(sharing) => (MemoryKind::Plain, Some(sharing)),
            Origin::Opened { .. } | Origin::Imported => (MemoryKind::Imported, None),
            Origin::Pooled => (MemoryKind::Pool, None),
            Origin::Managed => (MemoryKind::Managed, None),
        };
        let range = Some(AddressRange {
            base: DevicePtr(base),
            len: memory.len,
        });
        PointerInfo {
            kind,
            range,
            device: Some(memory.device),
            sharing,
        }
    }

    /// Finds an allocation by its base, made to be shared this way.
    fn shareable(&self, base: DevicePtr, asked: Sharing) -> Result<&Memory> {
        match self.all.get(&base.0) {
            Some(memory) => match memory.origin {
                Origin::Own(sharing) if sharing == asked => Ok(memory),
                Origin::Own(sharing) => Err(Error::unsupported(
                    "exporting this allocation that way",
                    format!("it was allocated to be shared by {sharing:?}"),
                    "allocate it with the `Sharing` that it is to be exported by",
                )),
                Origin::Opened { .. } | Origin::Imported => Err(Error::unsupported(
                    "exporting this allocation",
                    "it belongs to another process",
                    "let its own process export it",
                )),
                Origin::Pooled | Origin::Managed => Err(Error::unsupported(
                    "exporting this allocation",
                    "memory of a pool and managed memory have no handle",
                    "allocate it with the `Sharing` that it is to be exported by",
                )),
            },
            None => Err(Error::invalid("an address to export", base, "a base")),
        }
    }

    /// Makes a handle.
    pub fn export_handle(&self, base: DevicePtr) -> Result<MemHandle> {
        let memory = self.shareable(base, Sharing::Handle)?;
        Ok(Handle::of(&memory.files[0], memory.len)?.memory())
    }

    /// Makes a file descriptor.
    pub fn export_fd(&self, base: DevicePtr) -> Result<OwnedFd> {
        let memory = self.shareable(base, Sharing::Fd)?;
        memory.files[0]
            .try_clone()
            .map_err(|e| Error::system("dup", "raise RLIMIT_NOFILE", e))
    }

    /// Opens a handle; a second time it is the same address.
    pub fn open(&mut self, device: DeviceId, handle: &MemHandle) -> Result<DevicePtr> {
        let (file, handle) = Handle::open("open_handle", device, &handle.0)?;
        for (&base, memory) in &mut self.all {
            if let Origin::Opened { inode, times } = &mut memory.origin
                && *inode == handle.inode
            {
                *times += 1;
                return Ok(DevicePtr(base));
            }
        }
        let map = map(&file, handle.bytes, Access::ReadWrite)?;
        let origin = Origin::Opened {
            inode: handle.inode,
            times: 1,
        };
        Ok(self.insert(Memory {
            map,
            files: vec![file],
            len: handle.bytes,
            device,
            origin,
        }))
    }

    /// Maps a file descriptor of another process' memory.
    pub fn import(
        &mut self,
        device: DeviceId,
        fd: BorrowedFd<'_>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        check_import(fd, len)?;
        let file = fd
            .try_clone_to_owned()
            .map_err(|e| Error::system("dup", "raise RLIMIT_NOFILE", e))?;
        let map = map(&file, len, access)?;
        Ok(self.insert(Memory {
            map,
            files: vec![file],
            len,
            device,
            origin: Origin::Imported,
        }))
    }

    /// Maps several of another process' allocations side by side.
    pub fn import_several(
        &mut self,
        device: DeviceId,
        files: Vec<OwnedFd>,
        piece: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        if files.is_empty() || !piece.is_multiple_of(GRANULARITY) {
            let got = format!("{} pieces of {piece} bytes", files.len());
            return Err(Error::invalid(
                "memory to import",
                got,
                "whole pieces, at least one",
            ));
        }
        files
            .iter()
            .try_for_each(|file| check_import(file.as_fd(), piece))?;
        let map = map_side_by_side(&files, piece, access)?;
        let len = map.len() as u64;
        Ok(self.insert(Memory {
            map,
            files,
            len,
            device,
            origin: Origin::Imported,
        }))
    }

    /// Ends one opening; dropping the result unmaps what was opened no more.
    pub fn close(&mut self, base: DevicePtr) -> Result<impl Sized + use<>> {
        let last = match self.all.get_mut(&base.0).map(|memory| &mut memory.origin) {
            Some(Origin::Opened { times, .. }) => {
                *times -= 1;
                *times == 0
            }
            Some(Origin::Imported) => true,
            Some(Origin::Own(_) | Origin::Pooled | Origin::Managed) | None => {
                return Err(driver("close", DeviceId(0), INVALID_VALUE));
            }
        };
        Ok(if last { self.all.remove(&base.0) } else { None })
    }

    /// Returns the file behind an address, and the address' offset in it.
    #[cfg(feature = "faults")]
    pub fn file_at(&self, ptr: DevicePtr) -> Result<(OwnedFd, u64)> {
        let (base, memory) = self
            .find(ptr)
            .ok_or_else(|| driver("arm_late_write", DeviceId(0), INVALID_VALUE))?;
        let (offset, piece) = (ptr.0 - base, memory.len / memory.files.len() as u64);
        let file = memory.files[(offset / piece) as usize].try_clone();
        Ok((
            file.map_err(|e| Error::system("dup", "raise RLIMIT_NOFILE", e))?,
            offset % piece,
        ))
    }
}

//! HIP's functions about virtual memory management, and memory as descriptors.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use gpu_api::lock::Acquire;

use crate::device::{entered, started};
use crate::export::{finish, hip};
use crate::machine::{INVALID_VALUE, Machine, NOT_SUPPORTED, Outcome};
use crate::memory_files::OUT_OF_MEMORY;
use crate::settings::{Fault, Settings};

const POSIX_FD: u32 = 1;

/// `hipMemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: u32,
    id: c_int,
}

/// `hipMemAllocationProp` from ROCm 5.7 on.
#[repr(C)]
pub struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    win32: *mut c_void,
    flags: [u16; 4],
}

/// `hipMemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Access {
    location: Location,
    flags: u32,
}

/// `hipExternalMemoryHandleDesc`.
#[repr(C)]
pub struct ExternalHandle {
    kind: u32,
    fd: [u64; 2],
    size: u64,
    flags: u32,
}

/// `hipExternalMemoryBufferDesc`.
#[repr(C)]
pub struct ExternalBuffer {
    offset: u64,
    size: u64,
    flags: u32,
}

/// Memory that was imported as external.
struct External {
    fd: c_int,
    /// One of the import and one of each mapped buffer: AMD unmaps at the last.
    times: u32,
}

/// External memory by the address at which it is mapped, which also stands for the object.
static EXTERNAL: Mutex<BTreeMap<u64, External>> = Mutex::new(BTreeMap::new());

/// A descriptor that a runtime keeps by its number, and the file that it was.
type Kept = (c_int, u64);

/// What 7.14 imports as late as access is given: the descriptors by the memory's handle, and the
/// handles by address.
static LATE: Mutex<(BTreeMap<u64, Kept>, BTreeMap<u64, u64>)> =
    Mutex::new((BTreeMap::new(), BTreeMap::new()));

fn inode(fd: c_int) -> Outcome<u64> {
    std::fs::metadata(format!("/proc/self/fd/{fd}"))
        .map(|found| found.ino())
        .map_err(|_| INVALID_VALUE)
}

/// Physical memory that was made and not released, and the bytes of what was.
static MADE: Mutex<(BTreeMap<u64, usize>, usize)> = Mutex::new((BTreeMap::new(), 0));

/// Notes memory of `hipMalloc` that was exported and is freed.
pub(crate) fn freed_after_export(len: usize) {
    MADE.acquire().1 += len;
}

/// Whether plain memory was exported as a dma-buf.
static EXPORTED: AtomicBool = AtomicBool::new(false);

pub(crate) fn was_exported() -> bool {
    EXPORTED.load(Ordering::Relaxed)
}

/// Bytes that 6.4.0 and 6.4.1 keep after they were released (ROCm/hip#3781, fixed in 6.4.2).
pub(crate) fn kept_for_ever() -> usize {
    let version = Settings::get().version;
    let keeps =
        (60_400_000..60_443_484).contains(&version) || Settings::get().has(Fault::ExportLeaks);
    if keeps { MADE.acquire().1 } else { 0 }
}

/// Gives one of the times back that external memory is held; the last unmaps it. Says whether the
/// address was of such.
pub(crate) fn release_external(machine: &dyn Machine, base: u64) -> Outcome<bool> {
    let mut all = EXTERNAL.acquire();
    let Some(found) = all.get_mut(&base) else {
        return Ok(false);
    };
    found.times -= 1;
    if found.times > 0 {
        return Ok(true);
    }
    let fd = found.fd;
    all.remove(&base);
    machine.close_plain(base)?;
    if Settings::get().has(Fault::ImportTakes) {
        // SAFETY: `from_raw_fd` asks for a descriptor of nobody else's: under this fault its caller
        // gave it away.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    Ok(true)
}

/// Waits as the runtimes do that map on the null stream.
fn pass_null_stream(machine: &dyn Machine) -> Outcome {
    if Settings::get().at_least(7, 14) {
        Ok(())
    } else {
        machine.stream_synchronize(0)
    }
}

/// Reads what the caller asks for: the device of physical memory that can be exported.
///
/// # Safety
///
/// `properties` is null or points to properties.
unsafe fn device_of(properties: *const Properties) -> Outcome<c_int> {
    if properties.is_null() || !Settings::get().at_least(5, 7) {
        return Err(INVALID_VALUE);
    }
    // SAFETY: reading: our caller vouches for the properties.
    let asked = unsafe { properties.read() };
    let right = asked.kind == 1 && asked.handle_types == POSIX_FD && asked.location.kind == 1;
    if right && asked.win32.is_null() && asked.flags == [0; 4] {
        Ok(asked.location.id)
    } else {
        Err(INVALID_VALUE)
    }
}

hip! {
    hipMemGetAllocationGranularity(size: usize; properties: *const Properties, option: u32) {
        // SAFETY: `device_of`: HIP's caller points to properties.
        let device = unsafe { device_of(properties) }?;
        if option > 1 { Err(INVALID_VALUE) } else { started()?.granularity(device) }
    }
    hipMemCreate(handle: u64; len: usize, properties: *const Properties, flags: u64) {
        // SAFETY: `device_of`: HIP's caller points to properties.
        let device = unsafe { device_of(properties) }?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let handle = entered()?.0.create(device, len)?;
        MADE.acquire().0.insert(handle, len);
        Ok(handle)
    }
    hipMemRelease(; handle: u64) {
        entered()?.0.release(handle)?;
        let mut made = MADE.acquire();
        let len = made.0.remove(&handle).unwrap_or(0);
        made.1 += len;
        LATE.acquire().0.remove(&handle);
        Ok(())
    }
    hipMemAddressReserve(base: u64; len: usize, alignment: usize, hint: u64, flags: u64) {
        if alignment == 0 && hint == 0 && flags == 0 { entered()?.0.reserve(len) } else { Err(INVALID_VALUE) }
    }
    hipMemAddressFree(; base: u64, len: usize) {
        entered()?.0.unreserve(base, len)
    }
    hipMemMap(; base: u64, len: usize, offset: usize, handle: u64, flags: u64) {
        let machine = entered()?.0;
        if offset != 0 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        pass_null_stream(machine)?;
        match machine.map(base, len, handle) {
            // 6.2 does not look whether it worked.
            Err(_) if Settings::get().within((6, 2), (6, 3)) => Ok(()),
            Err(code) => Err(code),
            Ok(()) => {
                LATE.acquire().1.insert(base, handle);
                Ok(())
            }
        }
    }
    hipMemUnmap(; base: u64, len: usize) {
        let machine = entered()?.0;
        let known = LATE.acquire().1.remove(&base).is_some();
        if !known && Settings::get().within((6, 2), (6, 3)) {
            // It follows a null pointer.
            std::process::abort();
        }
        pass_null_stream(machine)?;
        machine.unmap(base, len)
    }
    hipMemSetAccess(; base: u64, len: usize, accesses: *const Access, count: usize) {
        let machine = entered()?.0;
        if accesses.is_null() || count == 0 {
            return Err(INVALID_VALUE);
        }
        let kept = {
            let late = LATE.acquire();
            late.1.get(&base).and_then(|handle| late.0.get(handle).copied())
        };
        if let Some((fd, file)) = kept
            && inode(fd)? != file
        {
            return Err(INVALID_VALUE);
        }
        // SAFETY: `from_raw_parts`: HIP's caller points to `count` of them.
        for access in unsafe { std::slice::from_raw_parts(accesses, count) } {
            let write = match access.flags {
                3 => true,
                1 => Settings::get().has(Fault::WritableReads),
                _ => return Err(INVALID_VALUE),
            };
            if access.location.kind != 1 {
                return Err(INVALID_VALUE);
            }
            machine.grant(base, len, access.location.id, write)?;
        }
        Ok(())
    }
    hipMemExportToShareableHandle(fd: c_int; handle: u64, kind: u32, flags: u64) {
        if Settings::get().has(Fault::NoExport) {
            return Err(NOT_SUPPORTED);
        }
        if kind == POSIX_FD && flags == 0 { entered()?.0.export(handle) } else { Err(INVALID_VALUE) }
    }
    hipMemImportFromShareableHandle(handle: u64; fd: *mut c_void, kind: u32) {
        let (machine, settings) = (entered()?.0, Settings::get());
        if settings.has(Fault::ImportAborts) {
            std::process::abort();
        }
        while settings.has(Fault::ImportHangs) {
            std::thread::park();
        }
        if kind != POSIX_FD {
            return Err(INVALID_VALUE);
        }
        if settings.at_least(7, 1) {
            // What is no small number was meant as an address.
            let fd = c_int::try_from(fd.addr()).map_err(|_| INVALID_VALUE)?;
            let handle = machine.import(fd)?;
            if settings.at_least(7, 14) {
                LATE.acquire().0.insert(handle, (fd, inode(fd)?));
            }
            return Ok(handle);
        }
        // SAFETY: reading: these versions are given the address of a descriptor.
        machine.import(unsafe { fd.cast::<c_int>().read() })
    }
    hipMemRetainAllocationHandle(handle: u64; ptr: u64) {
        let (machine, settings) = (entered()?.0, Settings::get());
        let handle = match machine.retain(ptr) {
            // It follows a null pointer where nothing was made by hipMemCreate.
            Err(_) if settings.within((6, 2), (7, 14)) => std::process::abort(),
            other => other?,
        };
        if !settings.at_least(7, 12) {
            // Named, and not retained.
            machine.release(handle)?;
        }
        Ok(handle)
    }
    hipMemGetHandleForAddressRange(fd: c_int; base: u64, len: usize, kind: u32, flags: u64) {
        if !Settings::get().at_least(7, 0) {
            return Err(NOT_SUPPORTED);
        }
        EXPORTED.store(true, Ordering::Relaxed);
        if kind == 1 && flags == 0 { entered()?.0.export_plain(base, len) } else { Err(INVALID_VALUE) }
    }
    hipDestroyExternalMemory(; memory: u64) {
        if release_external(entered()?.0, memory)? { Ok(()) } else { Err(INVALID_VALUE) }
    }
}

/// HIP's function of that name.
///
/// # Safety
///
/// `memory` is to a pointer, `described` to a description, whose descriptor stays open until the
/// memory goes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipImportExternalMemory(
    memory: *mut *mut c_void,
    described: *const ExternalHandle,
) -> u32 {
    let outcome = (|| {
        let (machine, device) = entered()?;
        if described.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: reading: our caller points to a description.
        let described = unsafe { described.read() };
        let fd = described.fd[0] as u32 as c_int;
        if described.kind != POSIX_FD || described.flags != 0 {
            return Err(INVALID_VALUE);
        }
        // Every failure is that (clr f9f995c, `hip_memory.cpp`: 129).
        let base = machine.import_plain(device, fd, described.size as usize);
        let base = base.map_err(|_| OUT_OF_MEMORY)?;
        EXTERNAL.acquire().insert(base, External { fd, times: 1 });
        Ok(ptr::with_exposed_provenance_mut(base as usize))
    })();
    // SAFETY: `put`: our caller points to a pointer.
    finish(unsafe { crate::export::put(memory, outcome) })
}

/// HIP's function of that name.
///
/// # Safety
///
/// `base` is to an address, `piece` to a description.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipExternalMemoryGetMappedBuffer(
    base: *mut u64,
    memory: *mut c_void,
    piece: *const ExternalBuffer,
) -> u32 {
    let memory = memory.expose_provenance() as u64;
    let mut all = EXTERNAL.acquire();
    let known = all.get_mut(&memory);
    let outcome = if known.is_none() || piece.is_null() {
        Err(INVALID_VALUE)
    } else {
        // SAFETY: reading: our caller points to a description.
        let piece = unsafe { piece.read() };
        if piece.offset == 0 && piece.flags == 0 && piece.size > 0 {
            if let Some(known) = known {
                known.times += 1;
            }
            Ok(memory)
        } else {
            Err(INVALID_VALUE)
        }
    };
    // SAFETY: `put`: our caller points to an address.
    finish(unsafe { crate::export::put(base, outcome) })
}

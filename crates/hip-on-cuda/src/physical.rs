//! HIP's functions about virtual memory management, and memory as descriptors.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use crate::device::{entered, started};
use crate::export::{finish, hip};
use crate::machine::{INVALID_VALUE, NOT_SUPPORTED, Outcome};
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

/// Memory that was imported as external, by the address at which it is mapped.
static EXTERNAL: Mutex<Option<HashMap<u64, c_int>>> = Mutex::new(None);

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
    if right && asked.win32.is_null() && asked.flags == [0; 4] { Ok(asked.location.id) } else { Err(INVALID_VALUE) }
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
        if flags != 0 { Err(INVALID_VALUE) } else { entered()?.0.create(device, len) }
    }
    hipMemRelease(; handle: u64) {
        entered()?.0.release(handle)
    }
    hipMemAddressReserve(base: u64; len: usize, alignment: usize, hint: u64, flags: u64) {
        if alignment == 0 && hint == 0 && flags == 0 { entered()?.0.reserve(len) } else { Err(INVALID_VALUE) }
    }
    hipMemAddressFree(; base: u64, len: usize) {
        entered()?.0.unreserve(base, len)
    }
    hipMemMap(; base: u64, len: usize, offset: usize, handle: u64, flags: u64) {
        if offset == 0 && flags == 0 { entered()?.0.map(base, len, handle) } else { Err(INVALID_VALUE) }
    }
    hipMemUnmap(; base: u64, len: usize) {
        entered()?.0.unmap(base, len)
    }
    hipMemSetAccess(; base: u64, len: usize, accesses: *const Access, count: usize) {
        let machine = entered()?.0;
        if accesses.is_null() || count == 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: `from_raw_parts`: HIP's caller points to so many.
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
            return machine.import(c_int::try_from(fd.addr()).map_err(|_| INVALID_VALUE)?);
        }
        // SAFETY: reading: these versions are given the address of a descriptor.
        machine.import(unsafe { fd.cast::<c_int>().read() })
    }
    hipMemRetainAllocationHandle(handle: u64; ptr: u64) {
        entered()?.0.retain(ptr)
    }
    hipMemGetHandleForAddressRange(fd: c_int; base: u64, len: usize, kind: u32, flags: u64) {
        if !Settings::get().at_least(7, 0) {
            return Err(NOT_SUPPORTED);
        }
        if kind == 1 && flags == 0 { entered()?.0.export_plain(base, len) } else { Err(INVALID_VALUE) }
    }
    hipDestroyExternalMemory(; memory: u64) {
        let machine = entered()?.0;
        let known = EXTERNAL.lock().unwrap_or_else(PoisonError::into_inner).as_mut().and_then(|all| all.remove(&memory));
        known.ok_or(INVALID_VALUE)?;
        machine.close_plain(memory)
    }
}

/// HIP's function of that name.
///
/// # Safety
///
/// `memory` is to a pointer, `described` to a description; its descriptor becomes the library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipImportExternalMemory(memory: *mut *mut c_void, described: *const ExternalHandle) -> u32 {
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
        let base = machine.import_plain(device, fd, described.size as usize)?;
        EXTERNAL.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(base, fd);
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
    let known =
        EXTERNAL.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(|all| all.contains_key(&memory));
    let outcome = if !known || piece.is_null() {
        Err(INVALID_VALUE)
    } else {
        // SAFETY: reading: our caller points to a description.
        let piece = unsafe { piece.read() };
        if piece.offset == 0 && piece.flags == 0 && piece.size > 0 { Ok(memory) } else { Err(INVALID_VALUE) }
    };
    // SAFETY: `put`: our caller points to an address.
    finish(unsafe { crate::export::put(base, outcome) })
}

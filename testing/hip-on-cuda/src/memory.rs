//! HIP's functions about plain device memory, host memory and addresses.

use std::ffi::{c_int, c_void};
use std::ptr;

use crate::device::{entered, show_memory, started};
use crate::export::{finish, hip, put};
use crate::machine::{INVALID_VALUE, Kind};
use crate::memory_files::OUT_OF_MEMORY;
use crate::settings::{Fault, Settings};
use crate::{physical, pool, sharing};

/// Flags of `hipHostMalloc` that CUDA has too; AMD's others ask for kinds of coherence.
const HOST_FLAGS: u32 = 7;
const AMD_HOST_FLAGS: u32 = 0xe000_0000;

/// `hipPointerAttribute_t`.
#[repr(C)]
pub struct PointerAttributes {
    kind: u32,
    device: c_int,
    device_pointer: u64,
    host_pointer: u64,
    is_managed: c_int,
    flags: u32,
}

hip! {
    hipMalloc(base: u64; len: usize) {
        let (machine, device) = entered()?;
        if Settings::get().has(Fault::AllocAfterExportCrashes) && physical::was_exported() {
            std::process::abort();
        }
        // Other than CUDA's, AMD's gives no memory for no bytes.
        match len {
            0 => Ok(0),
            _ if pool::has_kept_the_rest() => Err(OUT_OF_MEMORY),
            len => machine.alloc(device, len).and_then(|base| show_memory(machine).map(|()| base)),
        }
    }
    hipFree(; base: u64) {
        let (machine, _) = entered()?;
        if base == 0 {
            return Ok(());
        }
        if physical::release_external(machine, base)? {
            return Ok(());
        }
        let len = machine.range(base).map_or(0, |(_, len)| len);
        if sharing::forget(base) {
            physical::freed_after_export(len);
        }
        machine.free(base).and_then(|()| show_memory(machine))
    }
    hipPointerGetAttributes(attributes: PointerAttributes; ptr: u64) {
        let (machine, _) = entered()?;
        let of_six = Settings::get().at_least(6, 0);
        let found = |kind, device, is_managed: bool, host_pointer| PointerAttributes {
            kind, device, device_pointer: ptr, host_pointer, is_managed: c_int::from(is_managed), flags: 0,
        };
        match (machine.kind(ptr)?, of_six) {
            (Some(Kind::Host), _) => Ok(found(u32::from(of_six), 0, false, ptr)),
            (Some(Kind::Device { device, managed: true }), true) => Ok(found(3, device, true, 0)),
            (Some(Kind::Device { device, managed: true }), false) => Ok(found(4, device, true, 0)),
            (Some(Kind::Device { device, managed: false }), _) => Ok(found(1 + u32::from(of_six), device, false, 0)),
            (None, true) => Ok(found(0, -2, false, 0)),
            (None, false) => Err(INVALID_VALUE),
        }
    }
    hipHostMalloc(start: *mut c_void; len: usize, flags: u32) {
        let (machine, _) = entered()?;
        if flags & !(HOST_FLAGS | AMD_HOST_FLAGS) != 0 {
            return Err(INVALID_VALUE);
        }
        machine.host_alloc(len).map(ptr::with_exposed_provenance_mut)
    }
    hipHostFree(; start: *mut c_void) {
        entered()?.0.host_free(start.expose_provenance())
    }
    hipHostRegister(; start: *mut c_void, len: usize, flags: u32) {
        entered()?.0.register(start.expose_provenance(), len, flags & HOST_FLAGS)
    }
    hipHostUnregister(; start: *mut c_void) {
        entered()?.0.unregister(start.expose_provenance())
    }
    hipHostGetDevicePointer(ptr: u64; start: *mut c_void, flags: u32) {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        entered()?.0.device_pointer(start.expose_provenance())
    }
}

/// HIP's function of that name.
///
/// # Safety
///
/// Both pointers are to sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> u32 {
    let found = entered().and_then(|(machine, _)| machine.free_and_total());
    let kept = if pool::has_kept_the_rest() {
        usize::MAX
    } else {
        physical::kept_for_ever()
    };
    let found = found.map(|(free, total)| (free.saturating_sub(kept), total));
    // SAFETY: `put`: our caller points to a size.
    let first = unsafe { put(free, found.map(|(free, _)| free)) };
    // SAFETY: `put`: our caller points to a size.
    finish(first.and_then(|()| unsafe { put(total, found.map(|(_, total)| total)) }))
}

/// HIP's function of that name.
///
/// # Safety
///
/// `base` is to an address, `len` to a size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemGetAddressRange(base: *mut u64, len: *mut usize, ptr: u64) -> u32 {
    let found = started()
        .and_then(|_| entered())
        .and_then(|(machine, _)| machine.range(ptr));
    // SAFETY: `put`: our caller points to an address.
    let first = unsafe { put(base, found.map(|(base, _)| base)) };
    // SAFETY: `put`: our caller points to a size.
    finish(first.and_then(|()| unsafe { put(len, found.map(|(_, len)| len)) }))
}

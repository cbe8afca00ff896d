//! Host memory: plain or pinned, on any NUMA node or on one.

use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};

use crate::host_memory::PinnedMemory;
use gpu_api::{DeviceId, Error, GpuHostMemory, HostMemory, HostPtr, Result};

use crate::backend::Backend;
use crate::calls::{HOST_ALLOC_PORTABLE, HOST_REGISTER_MAPPED, HOST_REGISTER_PORTABLE};
use crate::code::SUCCESS;
use crate::vendor::{Scope, Vendor};

// SAFETY: the condition of `GpuHostMemory`: `host_alloc` hands on what `host_alloc` or the
// kernel gave.
unsafe impl<V: Vendor> GpuHostMemory for Backend<V> {
    fn host_alloc(&self, device: DeviceId, len: usize, memory: HostMemory) -> Result<HostPtr> {
        self.ordinal(device)?;
        self.driver().hosts.alloc(self, device, len, memory)
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: `HostTable::free` has our condition.
        unsafe { self.driver().hosts.free(self, ptr) }
    }
}

// SAFETY: the condition of `PinnedMemory`: `pinned` hands on what `host_alloc` gave.
unsafe impl<V: Vendor> PinnedMemory for Backend<V> {
    fn pinned(&self, device: DeviceId, len: usize) -> Result<NonNull<c_void>> {
        let scope = self.on_device(device)?;
        let symbol = &self.driver().calls.host_alloc;
        let mut start = ptr::null_mut();
        let code = scope.code(symbol, |function| {
            // SAFETY: `host_alloc` writes one address: `start` is one.
            unsafe { function(&raw mut start, len, HOST_ALLOC_PORTABLE) }
        })?;
        if code != SUCCESS {
            let driver = self.code(code);
            return Err(Error::System {
                call: symbol.name,
                remedy: "free host memory, or raise the limit on locked memory (`ulimit -l`)",
                source: io::Error::other(driver),
            });
        }
        NonNull::new(start).ok_or_else(|| scope.error(symbol.name, crate::code::UNKNOWN))
    }

    unsafe fn free_pinned(&self, device: DeviceId, start: *mut c_void) -> Result<()> {
        self.pass_known_streams();
        let scope = self.on_device(device)?;
        scope.call(&self.driver().calls.host_free, |function| {
            // SAFETY: `host_free` asks for what `host_alloc` gave and nobody uses: our
            // caller vouches for it.
            unsafe { function(start) }
        })
    }

    unsafe fn pin(&self, device: DeviceId, start: *mut c_void, len: usize) -> Result<()> {
        let scope = self.on_device(device)?;
        // SAFETY: `register` has our condition.
        unsafe { register(&scope, start, len) }
    }

    unsafe fn unpin(&self, device: DeviceId, start: *mut c_void) -> Result<()> {
        self.pass_known_streams();
        let scope = self.on_device(device)?;
        scope.call(&self.driver().calls.host_unregister, |function| {
            // SAFETY: `host_unregister` asks for what `host_register` took and nobody uses:
            // our caller vouches for it.
            unsafe { function(start) }
        })
    }
}

/// Pins memory that is mapped, for every context, and lets devices reach it.
///
/// # Safety
///
/// The bytes are mapped, readable and writable, until they are unregistered.
pub(crate) unsafe fn register<V: Vendor>(
    scope: &Scope<'_, V>,
    start: *mut c_void,
    len: usize,
) -> Result<()> {
    scope.call(&scope.vendor.driver().calls.host_register, |function| {
        // SAFETY: `host_register` asks for memory that stays mapped: our caller vouches for it.
        unsafe { function(start, len, HOST_REGISTER_PORTABLE | HOST_REGISTER_MAPPED) }
    })
}

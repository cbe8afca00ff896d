//! Host memory: plain or pinned, on any NUMA node or on one.

use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};

use gpu_api::vendor::host_memory::PinnedMemory;
use gpu_api::{DeviceId, Error, GpuHostMemory, HostMemory, HostPtr, Result};

use crate::backend::HipBackend;
use crate::call::Scope;
use crate::error::SUCCESS;
use crate::sys::{HOST_ALLOC_PORTABLE, HOST_REGISTER_MAPPED, HOST_REGISTER_PORTABLE};

// SAFETY: the condition of `GpuHostMemory`: `host_alloc` hands on what `hipHostMalloc` or the
// kernel gave.
unsafe impl GpuHostMemory for HipBackend {
    fn host_alloc(&self, device: DeviceId, len: usize, memory: HostMemory) -> Result<HostPtr> {
        self.driver.ordinal(device)?;
        self.hosts.alloc(self, device, len, memory)
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: `HostTable::free` has our condition.
        unsafe { self.hosts.free(self, ptr) }
    }
}

// SAFETY: the condition of `PinnedMemory`: `pinned` hands on what `hipHostMalloc` gave.
unsafe impl PinnedMemory for HipBackend {
    fn pinned(&self, device: DeviceId, len: usize) -> Result<NonNull<c_void>> {
        let scope = self.driver.on_device(device)?;
        let symbol = &self.driver.symbols.hipHostMalloc;
        let mut start = ptr::null_mut();
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipHostMalloc` writes one address: `start` is one.
            unsafe { function(&raw mut start, len, HOST_ALLOC_PORTABLE) }
        })?;
        if code != SUCCESS {
            let driver = scope.driver.symbols.error(code);
            return Err(Error::System {
                call: "hipHostMalloc",
                remedy: "free host memory, or raise the limit on locked memory (`ulimit -l`)",
                source: io::Error::other(driver),
            });
        }
        NonNull::new(start).ok_or_else(|| scope.error(symbol.name, crate::error::UNKNOWN))
    }

    unsafe fn free_pinned(&self, device: DeviceId, start: *mut c_void) -> Result<()> {
        self.pass_known_streams();
        let scope = self.driver.on_device(device)?;
        scope.call(&self.driver.symbols.hipHostFree, |function| {
            // SAFETY: `hipHostFree` asks for what `hipHostMalloc` gave and nobody uses: our caller
            // vouches for it.
            unsafe { function(start) }
        })
    }

    unsafe fn pin(&self, device: DeviceId, start: *mut c_void, len: usize) -> Result<()> {
        let scope = self.driver.on_device(device)?;
        // SAFETY: `register` has our condition.
        unsafe { register(&scope, start, len) }
    }

    unsafe fn unpin(&self, device: DeviceId, start: *mut c_void) -> Result<()> {
        self.pass_known_streams();
        let scope = self.driver.on_device(device)?;
        scope.call(&self.driver.symbols.hipHostUnregister, |function| {
            // SAFETY: `hipHostUnregister` asks for what `hipHostRegister` took and nobody uses: our
            // caller vouches for it.
            unsafe { function(start) }
        })
    }
}

/// Pins memory that is mapped, for every device, and lets devices reach it.
///
/// # Safety
///
/// The bytes are mapped, readable and writable, until they are unregistered.
pub(crate) unsafe fn register(scope: &Scope<'_>, start: *mut c_void, len: usize) -> Result<()> {
    scope.call(&scope.driver.symbols.hipHostRegister, |function| {
        // SAFETY: `hipHostRegister` asks for memory that stays mapped: our caller vouches for it.
        unsafe { function(start, len, HOST_REGISTER_PORTABLE | HOST_REGISTER_MAPPED) }
    })
}

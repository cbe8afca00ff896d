//! Host memory: plain or pinned, on any NUMA node or on one.

use std::ffi::c_void;
use std::io;
use std::ptr;

use gpu_api::{DeviceId, Error, GpuHostMemory, HostMemory, HostPtr, KernelPages, Result};

use crate::backend::Backend;
use crate::calls::{HOST_ALLOC_PORTABLE, HOST_REGISTER_MAPPED, HOST_REGISTER_PORTABLE};
use crate::code::{SUCCESS, UNKNOWN};
use crate::driver::{Got, HostPin};
use crate::vendor::{Scope, Vendor};

// SAFETY: the condition of `GpuHostMemory`: `host_alloc` hands on what the driver's `host_alloc` or
// the kernel gave.
unsafe impl<V: Vendor> GpuHostMemory for Backend<V> {
    fn host_alloc(&self, device: DeviceId, len: usize, memory: HostMemory) -> Result<HostPtr> {
        self.ordinal(device)?;
        if len == 0 {
            return Err(Error::invalid("the length", "0", "at least 1"));
        }
        let (start, got) = match (memory.pinned, memory.numa_node) {
            (true, None) => {
                let start = self.pinned(device, len)?;
                // SAFETY: `ptr::write_bytes` asks for `len` writable bytes: the driver gave as many.
                unsafe { ptr::write_bytes(start.cast::<u8>(), 0, len) };
                (start, Got::Driver)
            }
            (false, node) => (KernelPages::map(len, node)?.keep().as_ptr(), Got::Mapped),
            (true, Some(node)) => {
                let pages = KernelPages::map(len, Some(node))?;
                let scope = self.on_device(device)?;
                // SAFETY: `register` asks for memory that is mapped until it is unregistered:
                // `pages` are, and `host_free` ends that before it unmaps them.
                unsafe { register(&scope, pages.as_ptr(), len) }?;
                (pages.keep().as_ptr(), Got::Registered)
            }
        };
        let address = start.expose_provenance();
        let hosts = &self.driver().hosts;
        hosts.insert(address, HostPin { len, device, got });
        Ok(HostPtr(address))
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        let entry = self.driver().hosts.take(ptr, "what `host_alloc` gave")?;
        let start: *mut c_void = ptr::with_exposed_provenance_mut(ptr.0);
        let calls = &self.driver().calls;
        let end = match entry.got {
            Got::Driver => Some(&calls.host_free),
            Got::Registered => Some(&calls.host_unregister),
            Got::Mapped => None,
        };
        let let_go = end.map_or(Ok(()), |end| {
            self.pass_known_streams();
            self.on_device(entry.device)?.call(end, |function| {
                // SAFETY: `host_free` asks for what `host_alloc` gave and nobody uses,
                // `host_unregister` for what `host_register` took: the entry says which, it was taken
                // out of the table once, and our caller vouches for the rest.
                unsafe { function(start) }
            })
        });
        let result = let_go.and_then(|()| match entry.got {
            Got::Driver => Ok(()),
            // SAFETY: `KernelPages::unmap` asks for what was kept and nothing touches: as above.
            _ => unsafe { KernelPages::unmap(start, entry.len) },
        });
        if result.is_err() {
            self.driver().hosts.leak(ptr, entry);
        }
        result
    }
}

impl<V: Vendor> Backend<V> {
    fn pinned(&self, device: DeviceId, len: usize) -> Result<*mut c_void> {
        let scope = self.on_device(device)?;
        let symbol = &self.driver().calls.host_alloc;
        let mut start = ptr::null_mut();
        let code = scope.code(symbol, |function| {
            // SAFETY: `host_alloc` writes one address: `start` is one.
            unsafe { function(&raw mut start, len, HOST_ALLOC_PORTABLE) }
        })?;
        match code {
            SUCCESS if start.is_null() => Err(scope.error(symbol.name, UNKNOWN)),
            SUCCESS => Ok(start),
            code => Err(Error::System {
                call: symbol.name,
                remedy: "free host memory, or raise the limit on locked memory (`ulimit -l`)",
                source: io::Error::other(self.code(code)),
            }),
        }
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

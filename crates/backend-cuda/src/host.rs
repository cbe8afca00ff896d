//! Host memory: plain or pinned, on any NUMA node or on one.

use std::collections::HashMap;
use std::ffi::c_void;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpu_api::{DeviceId, Error, HostMemory, HostPtr, KernelPages, Result};

use crate::backend::CudaBackend;
use crate::call::Scope;
use crate::error::SUCCESS;
use crate::sys::{HOST_ALLOC_PORTABLE, HOST_REGISTER_DEVICEMAP, HOST_REGISTER_PORTABLE};

/// How host memory was got, and so how it is given back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Got {
    /// `cuMemHostAlloc`.
    Driver,
    /// `mmap`.
    Mapped,
    /// `mmap`, bound to a node, then `cuMemHostRegister`.
    Registered,
}

/// One piece of host memory.
#[derive(Clone, Copy, Debug)]
struct Entry {
    len: usize,
    device: DeviceId,
    got: Got,
    leaked: bool,
}

/// Host memory that was not given back, by its address.
#[derive(Debug, Default)]
pub(crate) struct Hosts(Mutex<HashMap<usize, Entry>>);

impl Hosts {
    /// Says whether everything was given back.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CudaBackend {
    /// Allocates host memory.
    pub(crate) fn host_allocate(&self, device: DeviceId, len: usize, memory: HostMemory) -> Result<HostPtr> {
        self.driver.ordinal(device)?;
        if len == 0 {
            return Err(Error::Invalid { what: "the length", got: "0".to_owned(), must: "at least 1" });
        }
        let (start, got) = match (memory.pinned, memory.numa_node) {
            (true, None) => (self.pinned(device, len)?, Got::Driver),
            (false, node) => (KernelPages::map(len, node)?.keep(), Got::Mapped),
            (true, Some(node)) => {
                let pages = KernelPages::map(len, Some(node))?;
                let scope = self.driver.on_device(device)?;
                // SAFETY: `register` asks for memory that is mapped: `pages` are, and `host_release` unregisters them
                // before it unmaps them.
                unsafe { register(&scope, pages.as_ptr(), len) }?;
                (pages.keep(), Got::Registered)
            }
        };
        let address = start.as_ptr().expose_provenance();
        self.hosts.lock().insert(address, Entry { len, device, got, leaked: false });
        Ok(HostPtr(address))
    }

    /// Gives host memory back.
    ///
    /// # Safety
    ///
    /// Nothing touches it any more.
    pub(crate) unsafe fn host_release(&self, ptr: HostPtr) -> Result<()> {
        let entry = {
            let mut hosts = self.hosts.lock();
            match hosts.get(&ptr.0) {
                Some(entry) if !entry.leaked => {}
                found => {
                    let state =
                        if found.is_some() { "which an earlier error leaked" } else { "which is no such memory" };
                    return Err(Error::Invalid {
                        what: "the address",
                        got: format!("{ptr:?}, {state}"),
                        must: "what `host_alloc` gave",
                    });
                }
            }
            // Taken out first: the kernel may hand the address out again before the call has returned.
            hosts.remove(&ptr.0).expect("looked up under the same lock")
        };
        // SAFETY: `host_return` asks for memory in the table, taken out once: it was, and our caller vouches for the
        // rest.
        let result = unsafe { self.host_return(ptr, &entry) };
        if result.is_err() {
            self.hosts.lock().entry(ptr.0).or_insert(Entry { leaked: true, ..entry });
        }
        result
    }

    /// # Safety
    ///
    /// `ptr` and `entry` came out of the table, and nothing touches the memory.
    unsafe fn host_return(&self, ptr: HostPtr, entry: &Entry) -> Result<()> {
        let start: *mut c_void = ptr::with_exposed_provenance_mut(ptr.0);
        if entry.got != Got::Mapped {
            self.pass_own_streams();
            let scope = self.driver.on_device(entry.device)?;
            let symbols = &self.driver.symbols;
            let symbol = if entry.got == Got::Driver { &symbols.cuMemFreeHost } else { &symbols.cuMemHostUnregister };
            scope.call(symbol, |function| {
                // SAFETY: `cuMemFreeHost` and `cuMemHostUnregister` ask for what `cuMemHostAlloc` gave, or
                // `cuMemHostRegister` took, and nobody uses: the entry says which it was, and our caller vouches for
                // the rest.
                unsafe { function(start) }
            })?;
        }
        if entry.got == Got::Driver {
            return Ok(());
        }
        // SAFETY: `KernelPages::unmap` asks for what was kept and nothing touches: the entry says that it was, and our
        // caller vouches for the rest.
        unsafe { KernelPages::unmap(start, entry.len) }
    }

    fn pinned(&self, device: DeviceId, len: usize) -> Result<NonNull<c_void>> {
        let scope = self.driver.on_device(device)?;
        let symbol = &self.driver.symbols.cuMemHostAlloc;
        let mut start = ptr::null_mut();
        let code = scope.code(symbol, |function| {
            // SAFETY: `cuMemHostAlloc` writes one address: `start` is one.
            unsafe { function(&raw mut start, len, HOST_ALLOC_PORTABLE) }
        })?;
        if code != SUCCESS {
            let driver = scope.driver.symbols.error(code);
            return Err(Error::System {
                call: "cuMemHostAlloc",
                remedy: "free host memory, or raise the limit on locked memory (`ulimit -l`)",
                source: io::Error::other(driver),
            });
        }
        let Some(found) = NonNull::new(start) else {
            return Err(scope.error(symbol.name, crate::error::UNKNOWN));
        };
        // SAFETY: `ptr::write_bytes` asks for `len` writable bytes: the driver gave as many.
        unsafe { ptr::write_bytes(found.as_ptr().cast::<u8>(), 0, len) };
        Ok(found)
    }
}

/// Pins memory that is mapped, for every context, and lets devices reach it.
///
/// # Safety
///
/// The bytes are mapped, readable and writable, until they are unregistered.
pub(crate) unsafe fn register(scope: &Scope<'_>, start: *mut c_void, len: usize) -> Result<()> {
    scope.call(&scope.driver.symbols.cuMemHostRegister, |function| {
        // SAFETY: `cuMemHostRegister` asks for memory that stays mapped: our caller vouches for it.
        unsafe { function(start, len, HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP) }
    })
}

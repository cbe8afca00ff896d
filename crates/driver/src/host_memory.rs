//! Host memory: plain or pinned, on any NUMA node or on one.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpu_api::{DeviceId, Error, HostMemory, HostPtr, KernelPages, Result};

/// Pinned memory as a driver gives and takes it.
///
/// # Safety
///
/// For implementors: `pinned` returns `len` writable bytes that overlap nothing that is not yet
/// freed.
pub unsafe trait PinnedMemory {
    /// Allocates `len` bytes of pinned memory.
    ///
    /// # Errors
    ///
    /// [`Error::System`] when the kernel has none.
    fn pinned(&self, device: DeviceId, len: usize) -> Result<NonNull<c_void>>;

    /// Frees it. May block.
    ///
    /// # Safety
    ///
    /// `start` came from `pinned`, once, and nothing touches it any more.
    unsafe fn free_pinned(&self, device: DeviceId, start: *mut c_void) -> Result<()>;

    /// Pins memory that is mapped.
    ///
    /// # Safety
    ///
    /// The bytes are mapped, readable and writable, until they are unpinned.
    unsafe fn pin(&self, device: DeviceId, start: *mut c_void, len: usize) -> Result<()>;

    /// Ends that. May block.
    ///
    /// # Safety
    ///
    /// `start` was pinned, once, and no device touches it any more.
    unsafe fn unpin(&self, device: DeviceId, start: *mut c_void) -> Result<()>;
}

/// How host memory was got, and so how it is given back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Got {
    /// From the driver.
    Driver,
    /// From the kernel.
    Mapped,
    /// From the kernel, bound to a node, and pinned then.
    Registered,
}

/// One piece of host memory.
#[derive(Clone, Copy, Debug)]
struct HostPin {
    len: usize,
    device: DeviceId,
    got: Got,
    leaked: bool,
}

/// Host memory that was not given back, by its address.
#[derive(Debug, Default)]
pub struct HostTable(Mutex<HashMap<usize, HostPin>>);

impl HostTable {
    /// Allocates host memory, zeroed.
    ///
    /// # Errors
    ///
    /// As [`GpuHostMemory::host_alloc`](gpu_api::GpuHostMemory::host_alloc).
    pub fn alloc(
        &self,
        driver: &impl PinnedMemory,
        device: DeviceId,
        len: usize,
        memory: HostMemory,
    ) -> Result<HostPtr> {
        if len == 0 {
            return Err(Error::Invalid {
                what: "the length",
                got: "0".to_owned(),
                must: "at least 1",
            });
        }
        let (start, got) = match (memory.pinned, memory.numa_node) {
            (true, None) => {
                let start = driver.pinned(device, len)?;
                // SAFETY: `ptr::write_bytes` asks for `len` writable bytes: `PinnedMemory` promises
                // as many.
                unsafe { ptr::write_bytes(start.as_ptr().cast::<u8>(), 0, len) };
                (start, Got::Driver)
            }
            (false, node) => (KernelPages::map(len, node)?.keep(), Got::Mapped),
            (true, Some(node)) => {
                let pages = KernelPages::map(len, Some(node))?;
                // SAFETY: `pin` asks for memory that is mapped: `pages` are, and `free` unpins them
                // before it unmaps them.
                unsafe { driver.pin(device, pages.as_ptr(), len) }?;
                (pages.keep(), Got::Registered)
            }
        };
        let address = start.as_ptr().expose_provenance();
        self.lock().insert(
            address,
            HostPin {
                len,
                device,
                got,
                leaked: false,
            },
        );
        Ok(HostPtr(address))
    }

    /// Gives host memory back. After an error it is leaked, and refused from then on.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for an address that is not in the table, and the driver's error.
    ///
    /// # Safety
    ///
    /// Nothing, the device included, touches the memory any more.
    pub unsafe fn free(&self, driver: &impl PinnedMemory, ptr: HostPtr) -> Result<()> {
        let entry = self.take(ptr)?;
        let start: *mut c_void = ptr::with_exposed_provenance_mut(ptr.0);
        let unpinned = match entry.got {
            // SAFETY: `free_pinned` asks for what `pinned` gave and nobody touches: the entry says
            // that it was, it was taken out once, and our caller vouches for the rest.
            Got::Driver => unsafe { driver.free_pinned(entry.device, start) },
            // SAFETY: `unpin` asks for what was pinned and no device touches: as above.
            Got::Registered => unsafe { driver.unpin(entry.device, start) },
            Got::Mapped => Ok(()),
        };
        let result = unpinned.and_then(|()| match entry.got {
            Got::Driver => Ok(()),
            // SAFETY: `KernelPages::unmap` asks for what was kept and nothing touches: as above.
            _ => unsafe { KernelPages::unmap(start, entry.len) },
        });
        if result.is_err() {
            self.lock().entry(ptr.0).or_insert(HostPin {
                leaked: true,
                ..entry
            });
        }
        result
    }

    /// Says whether everything was given back.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Takes an entry out before the memory is given back: the kernel may hand the address out
    /// again before that call has returned.
    fn take(&self, ptr: HostPtr) -> Result<HostPin> {
        let mut hosts = self.lock();
        match hosts.get(&ptr.0).copied() {
            Some(entry) if !entry.leaked => {
                hosts.remove(&ptr.0);
                Ok(entry)
            }
            found => {
                let state = if found.is_some() {
                    "which an earlier error leaked"
                } else {
                    "which is not such memory"
                };
                let got = format!("{ptr:?}, {state}");
                Err(Error::Invalid {
                    what: "the address",
                    got,
                    must: "what `host_alloc` gave",
                })
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, HostPin>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

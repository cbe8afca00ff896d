//! Physical memory: a handle that is made, exported as a file descriptor, and imported from one.

use std::ffi::{c_int, c_void};
use std::mem::{self, ManuallyDrop};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use gpu_api::{Error, Result, close_on_exec};

use crate::calls::{AllocationProperties, HANDLE_POSIX_FD, MemoryHandle};
use crate::code::{
    INVALID_DEVICE_POINTER, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED,
    OPERATING_SYSTEM, SUCCESS, UNKNOWN,
};
use crate::given::Given;
use crate::vendor::{Scope, Vendor};

/// A handle of physical memory; dropped, it is given back. A mapping keeps the memory.
pub(crate) struct Physical<'a, 'd, V: Vendor> {
    scope: &'a Scope<'d, V>,
    handle: MemoryHandle,
}

impl<'a, 'd, V: Vendor> Physical<'a, 'd, V> {
    /// Makes physical memory; `asked` is for the error.
    pub(crate) fn create(
        scope: &'a Scope<'d, V>,
        ordinal: c_int,
        size: usize,
        asked: u64,
    ) -> Result<Self> {
        let properties = AllocationProperties::exportable(ordinal);
        let create = &scope.vendor.driver().calls.memory_create;
        let mut handle: MemoryHandle = 0;
        scope.allocate(create, asked, |function| {
            // SAFETY: `memory_create` writes one handle and reads the properties: both live here. Its
            // flags are 0.
            unsafe { function(&raw mut handle, size, &raw const properties, 0) }
        })?;
        Ok(Physical { scope, handle })
    }

    /// Takes the physical memory behind a descriptor, if it is a device's; `given` is the number that
    /// the driver may keep, in place of the descriptor's own.
    pub(crate) fn import(
        scope: &'a Scope<'d, V>,
        fd: BorrowedFd<'_>,
        given: Option<&Given>,
        size: usize,
    ) -> Result<Self> {
        let symbol = &scope.vendor.driver().calls.memory_import;
        let mut number = given.map_or_else(|| fd.as_raw_fd(), Given::number);
        let named: *mut c_void = if scope.vendor.quirks().imports_by_value {
            ptr::without_provenance_mut(number as usize)
        } else {
            (&raw mut number).cast()
        };
        let mut handle: MemoryHandle = 0;
        let code = scope.code(symbol, |function| {
            // SAFETY: `memory_import` writes one handle: `handle` is one. The second argument is a
            // descriptor's number in place of an address, or the address of one, as the version
            // wants it; the descriptor is open for the call and stays ours.
            unsafe { function(&raw mut handle, named, HANDLE_POSIX_FD) }
        })?;
        match code {
            SUCCESS => {}
            INVALID_VALUE
            | INVALID_DEVICE_POINTER
            | OPERATING_SYSTEM
            | INVALID_HANDLE
            | NOT_FOUND
            | UNKNOWN => {
                return Err(bad_descriptor(format!(
                    "one that the driver refuses with {}",
                    scope.vendor.code(code)
                )));
            }
            _ => return Err(scope.allocation_error(symbol.name, code, size as u64)),
        }
        let physical = Physical { scope, handle };
        scope.vendor.check_imported(scope, handle)?;
        Ok(physical)
    }

    /// Takes a handle that `keep` gave.
    ///
    /// # Safety
    ///
    /// It is alive, and the caller's to give back.
    pub(crate) unsafe fn again(scope: &'a Scope<'d, V>, handle: MemoryHandle) -> Self {
        Physical { scope, handle }
    }

    /// Borrows a handle: it is not given back.
    ///
    /// # Safety
    ///
    /// It is alive.
    pub(crate) unsafe fn lent(scope: &'a Scope<'d, V>, handle: MemoryHandle) -> ManuallyDrop<Self> {
        ManuallyDrop::new(Physical { scope, handle })
    }

    /// Gives the handle to the caller.
    pub(crate) fn keep(self) -> MemoryHandle {
        let handle = self.handle;
        mem::forget(self);
        handle
    }

    /// Exports the memory as a descriptor that is closed on exec.
    pub(crate) fn export(&self) -> Result<OwnedFd> {
        let symbol = &self.scope.vendor.driver().calls.memory_export;
        let mut fd: i32 = -1;
        let code = self.scope.code(symbol, |function| {
            // SAFETY: `memory_export` writes one descriptor: `fd` has its size. The
            // handle is alive.
            unsafe { function((&raw mut fd).cast(), self.handle, HANDLE_POSIX_FD, 0) }
        })?;
        match code {
            SUCCESS if fd >= 0 => {
                // SAFETY: `OwnedFd::from_raw_fd` asks for an open descriptor that nobody else
                // closes: the driver made it for us.
                close_on_exec(unsafe { OwnedFd::from_raw_fd(fd) })
            }
            SUCCESS => Err(self.scope.error(symbol.name, UNKNOWN)),
            code => Err(self.scope.error(symbol.name, code)),
        }
    }

    /// Maps all of it on reserved addresses.
    ///
    /// # Safety
    ///
    /// The addresses are reserved, and nothing is mapped on them.
    pub(crate) unsafe fn map(&self, at: u64, size: usize) -> Result<()> {
        self.scope
            .call(&self.scope.vendor.driver().calls.range_map, |function| {
                // SAFETY: `range_map` asks for reserved addresses without a mapping, which our
                // caller vouches for, and for a handle that is alive. Offset and flags are 0; a
                // size other than the memory's is refused.
                unsafe { function(at, size, 0, self.handle, 0) }
            })
    }

    /// Gives the handle back; a call that fails leaves it, for nobody knows what became of it.
    pub(crate) fn give_back(self) -> Result<()> {
        let released = self.release();
        mem::forget(self);
        released
    }

    fn release(&self) -> Result<()> {
        self.scope.call(
            &self.scope.vendor.driver().calls.memory_release,
            |function| {
                // SAFETY: `memory_release` asks for a handle that is alive; it is given back by
                // `give_back` or by `drop`, not both.
                unsafe { function(self.handle) }
            },
        )
    }
}

impl<V: Vendor> Drop for Physical<'_, '_, V> {
    fn drop(&mut self) {
        // What cannot be given back is leaked; the error that led here, or a success, is on its way
        // to the caller.
        let _ = self.release();
    }
}

/// Says it of the descriptor where the driver refuses to map memory: a mapping is of the whole, and
/// CUDA's driver 580 gives 801 to a shorter one and to a longer one.
pub(crate) fn wrong_length<V: Vendor>(scope: &Scope<'_, V>, error: Error, len: u64) -> Error {
    match error {
        Error::Driver { call, source, .. }
            if call == scope.vendor.driver().calls.range_map.name
                && matches!(source.code, INVALID_VALUE | NOT_SUPPORTED) =>
        {
            bad_descriptor(format!("one of another length than {len} bytes"))
        }
        error => error,
    }
}

/// Refuses a descriptor that is known to be shorter than what is to be mapped of it, where the
/// driver maps what it is told and the GPU finds out.
pub(crate) fn check_size(fd: BorrowedFd<'_>, size: usize) -> Result<()> {
    // A dma-buf tells its length by its end; what has no end to seek to does not tell, and the
    // driver must judge.
    match rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0)) {
        Ok(len) if len > 0 && len < size as u64 => {
            Err(bad_descriptor(format!("one of {len} bytes, not of {size}")))
        }
        _ => Ok(()),
    }
}

/// Makes the error of a descriptor that cannot be mapped.
pub fn bad_descriptor(got: String) -> Error {
    Error::invalid(
        "the file descriptor",
        got,
        "one of device memory of exactly the length asked for",
    )
}

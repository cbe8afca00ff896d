//! Physical memory: a handle that is made, exported as a file descriptor, and imported from one.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::{mem, ptr};

use gpu_api::{Error, Result, close_on_exec};

use crate::call::Scope;
use crate::error::{
    INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, OPERATING_SYSTEM, SUCCESS, UNKNOWN,
};
use crate::sys::{AllocationProperties, CUdevice, HANDLE_POSIX_FD, LOCATION_DEVICE, MemoryHandle};

/// A handle of physical memory; dropped, it is given back. A mapping keeps the memory.
pub(crate) struct Physical<'a, 'd> {
    scope: &'a Scope<'d>,
    handle: MemoryHandle,
}

impl<'a, 'd> Physical<'a, 'd> {
    /// Makes physical memory; `asked` is for the error.
    pub(crate) fn create(
        scope: &'a Scope<'d>,
        ordinal: CUdevice,
        size: usize,
        asked: u64,
    ) -> Result<Self> {
        let properties = AllocationProperties::exportable(ordinal);
        let create = &scope.driver.symbols.cuMemCreate;
        let mut handle: MemoryHandle = 0;
        let code = scope.code(create, |function| {
            // SAFETY: `cuMemCreate` writes one handle and reads the properties: both live here. Its
            // flags are 0.
            unsafe { function(&raw mut handle, size, &raw const properties, 0) }
        })?;
        match code {
            SUCCESS => Ok(Physical { scope, handle }),
            code => Err(scope.allocation_error(create.name, code, asked)),
        }
    }

    /// Takes the physical memory behind a descriptor, if it is a device's.
    pub(crate) fn import(scope: &'a Scope<'d>, fd: BorrowedFd<'_>, size: usize) -> Result<Self> {
        let symbols = &scope.driver.symbols;
        let mut handle: MemoryHandle = 0;
        let code = scope.code(&symbols.cuMemImportFromShareableHandle, |function| {
            let number = ptr::without_provenance_mut(fd.as_raw_fd() as usize);
            // SAFETY: `cuMemImportFromShareableHandle` writes one handle: `handle` is one. For this
            // type the second argument is a descriptor's number in place of an address; it is open
            // for the call and stays ours.
            unsafe { function(&raw mut handle, number, HANDLE_POSIX_FD) }
        })?;
        match code {
            SUCCESS => {}
            INVALID_VALUE | OPERATING_SYSTEM | INVALID_HANDLE | NOT_FOUND | UNKNOWN => {
                return Err(bad_descriptor(format!(
                    "one that the driver refuses with {}",
                    symbols.error(code)
                )));
            }
            _ => {
                return Err(scope.allocation_error(
                    symbols.cuMemImportFromShareableHandle.name,
                    code,
                    size as u64,
                ));
            }
        }
        let physical = Physical { scope, handle };
        let mut properties = AllocationProperties::exportable(0);
        scope.call(
            &symbols.cuMemGetAllocationPropertiesFromHandle,
            |function| {
                // SAFETY: `cuMemGetAllocationPropertiesFromHandle` writes the properties, which
                // live here, of a handle that is alive: it was imported above.
                unsafe { function(&raw mut properties, physical.handle) }
            },
        )?;
        if properties.location.kind != LOCATION_DEVICE {
            return Err(bad_descriptor(format!(
                "one of memory of kind {}",
                properties.location.kind
            )));
        }
        Ok(physical)
    }

    /// Takes a handle that `keep` gave.
    ///
    /// # Safety
    ///
    /// It is alive, and the caller's to give back.
    pub(crate) unsafe fn again(scope: &'a Scope<'d>, handle: MemoryHandle) -> Self {
        Physical { scope, handle }
    }

    /// Gives the handle to the caller.
    pub(crate) fn keep(self) -> MemoryHandle {
        let handle = self.handle;
        mem::forget(self);
        handle
    }

    /// Exports the memory as a descriptor that is closed on exec.
    pub(crate) fn export(&self) -> Result<OwnedFd> {
        let symbol = &self.scope.driver.symbols.cuMemExportToShareableHandle;
        let mut fd: i32 = -1;
        let code = self.scope.code(symbol, |function| {
            // SAFETY: `cuMemExportToShareableHandle` writes one descriptor: `fd` has its size. The
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
            .call(&self.scope.driver.symbols.cuMemMap, |function| {
                // SAFETY: `cuMemMap` asks for reserved addresses without a mapping, which our
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
        self.scope
            .call(&self.scope.driver.symbols.cuMemRelease, |function| {
                // SAFETY: `cuMemRelease` asks for a handle that is alive; it is given back by
                // `give_back` or by `drop`, not both.
                unsafe { function(self.handle) }
            })
    }
}

impl Drop for Physical<'_, '_> {
    fn drop(&mut self) {
        // What cannot be given back is leaked; the error that led here, or a success, is on its way
        // to the caller.
        let _ = self.release();
    }
}

/// Says it of the descriptor where the driver refuses to map memory: a mapping is of the whole, and
/// driver 580 gives 801 to a shorter one and to a longer one.
pub(crate) fn wrong_length(error: Error, len: u64) -> Error {
    match error {
        Error::Driver {
            call: "cuMemMap",
            source,
            ..
        } if matches!(source.code, INVALID_VALUE | NOT_SUPPORTED) => {
            bad_descriptor(format!("one of another length than {len} bytes"))
        }
        error => error,
    }
}

fn bad_descriptor(got: String) -> Error {
    Error::Invalid {
        what: "the file descriptor",
        got,
        must: "one of device memory of exactly the length asked for",
    }
}

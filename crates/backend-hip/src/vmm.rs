//! Memory by the virtual memory management calls: physical memory that is exported as a file
//! descriptor.
//!
//! An allocation is four things of the runtime's: a handle of the physical memory, a range of
//! addresses, the mapping of one on the other, and the right of a device to reach it. The handle is
//! kept until the mapping goes: it is what is exported, and not every runtime keeps the memory for
//! the mapping's sake alone.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use gpu_api::vendor::peer_table::reaching;
use gpu_api::{Access, Allocation, DeviceId, DevicePtr, Error, Result, close_on_exec, round_up};

use crate::backend::HipBackend;
use crate::error::{
    self, INVALID_DEVICE_POINTER, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED,
};
use crate::error::{OPERATING_SYSTEM, SUCCESS, UNKNOWN};
use crate::mapping::Building;
use crate::memory::{Entry, Given, Origin};
use crate::sys::{AllocationProperties, HANDLE_POSIX_FD, MemoryHandle};

impl HipBackend {
    /// Allocates virtual memory.
    pub(crate) fn alloc_virtual(&self, device: DeviceId, len: u64) -> Result<Allocation> {
        let ordinal = self.driver.ordinal(device)?;
        let size = round_up(len, self.driver.granularity(device)?)?;
        let scope = self.driver.on_device(device)?;
        let properties = AllocationProperties::exportable(ordinal);
        let create = &self.driver.symbols.hipMemCreate;
        let mut handle: MemoryHandle = ptr::null_mut();
        let code = scope.code(create, |function| {
            // SAFETY: `hipMemCreate` writes one handle and reads the properties: both live here.
            // Its flags are 0.
            unsafe { function(&raw mut handle, size, &raw const properties, 0) }
        })?;
        if code != SUCCESS {
            return Err(scope.allocation_error(create.name, code, len));
        }
        let building = Building::new(&scope, handle);
        // Held until the entry is in the table, so that a device that is given access meanwhile
        // misses none.
        let peers = self.peers.read();
        let base = building.finish(size, ordinal, Access::ReadWrite, &reaching(&peers, device))?;
        let origin = Origin::Virtual {
            handle: handle.expose_provenance(),
        };
        self.memory.insert(base, size as u64, device, origin);
        Ok(Allocation {
            base: DevicePtr(base),
            len: size as u64,
        })
    }

    /// Maps another process' virtual memory.
    pub(crate) fn import_virtual(
        &self,
        device: DeviceId,
        fd: BorrowedFd<'_>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        let ordinal = self.driver.ordinal(device)?;
        let size = round_up(len, self.driver.granularity(device)?)?;
        check_size(fd, size)?;
        let scope = self.driver.on_device(device)?;
        let symbols = &self.driver.symbols;
        let given = if self.driver.version().keeps_descriptors() {
            let own = fd
                .try_clone_to_owned()
                .map_err(|error| Error::system("dup", "raise RLIMIT_NOFILE", error))?;
            Some(Given::new(own))
        } else {
            None
        };
        let mut number = given.as_ref().map_or_else(|| fd.as_raw_fd(), Given::number);
        let named: *mut c_void = if self.driver.version().imports_by_value() {
            ptr::without_provenance_mut(number as usize)
        } else {
            (&raw mut number).cast()
        };
        let mut handle: MemoryHandle = ptr::null_mut();
        let code = scope.code(&symbols.hipMemImportFromShareableHandle, |function| {
            // SAFETY: `hipMemImportFromShareableHandle` writes one handle: `handle` is one. The
            // second argument is a descriptor's number in place of an address, or the address of
            // one, as the version wants it; the descriptor is open for the call and stays ours.
            unsafe { function(&raw mut handle, named, HANDLE_POSIX_FD) }
        })?;
        match code {
            SUCCESS => {}
            INVALID_VALUE
            | INVALID_DEVICE_POINTER
            | INVALID_HANDLE
            | NOT_FOUND
            | OPERATING_SYSTEM
            | UNKNOWN => {
                return Err(bad_descriptor(format!(
                    "one that the runtime refuses with {}",
                    symbols.error(code)
                )));
            }
            _ => {
                return Err(scope.allocation_error(
                    symbols.hipMemImportFromShareableHandle.name,
                    code,
                    len,
                ));
            }
        }
        let building = Building::new(&scope, handle);
        // As in `alloc_virtual`.
        let peers = self.peers.read();
        let base = building
            .finish(size, ordinal, access, &reaching(&peers, device))
            .map_err(|error| match error {
                // A mapping is of the whole memory.
                Error::Driver {
                    call: "hipMemMap",
                    source,
                    ..
                } if matches!(source.code, INVALID_VALUE | NOT_SUPPORTED) => {
                    bad_descriptor(format!("one of another length than {size} bytes"))
                }
                error => error,
            })?;
        if let Some(given) = given {
            self.memory.keep_descriptor(base, given);
        }
        let origin = Origin::Imported {
            handle: handle.expose_provenance(),
            access,
        };
        self.memory.insert(base, size as u64, device, origin);
        Ok(DevicePtr(base))
    }

    /// Exports virtual memory by its handle.
    pub(crate) fn export_virtual(
        &self,
        base: DevicePtr,
        entry: &Entry,
        handle: usize,
    ) -> Result<OwnedFd> {
        let scope = self.driver.on_device(entry.device)?;
        let symbol = &self.driver.symbols.hipMemExportToShareableHandle;
        let mut fd: c_int = -1;
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipMemExportToShareableHandle` writes one descriptor: `fd` has its size. The
            // handle is alive while its memory is in the table, and our caller looked it up there.
            unsafe {
                function(
                    (&raw mut fd).cast(),
                    ptr::with_exposed_provenance_mut(handle),
                    HANDLE_POSIX_FD,
                    0,
                )
            }
        })?;
        match code {
            // SAFETY: `OwnedFd::from_raw_fd` asks for an open descriptor that nobody else closes:
            // the runtime made it for us.
            SUCCESS if fd >= 0 => close_on_exec(unsafe { OwnedFd::from_raw_fd(fd) }),
            SUCCESS => Err(scope.error(symbol.name, UNKNOWN)),
            NOT_SUPPORTED => Err(self.refusal(base, "a file descriptor of this memory")),
            code => Err(scope.error(symbol.name, code)),
        }
    }

    /// Unmaps virtual memory, own or imported, and gives its handle and its addresses back.
    ///
    /// # Safety
    ///
    /// `base` and `entry` came out of the table, and no unfinished GPU work touches them.
    pub(crate) unsafe fn unmap_virtual(
        &self,
        base: DevicePtr,
        entry: &Entry,
        handle: usize,
    ) -> Result<()> {
        let scope = self.driver.on_device(entry.device)?;
        let symbols = &self.driver.symbols;
        // A device that is given access meanwhile has seen the entry in the table: it must find the
        // mapping too.
        let _peers = self.peers.read();
        scope.call(&symbols.hipMemUnmap, |function| {
            // SAFETY: `hipMemUnmap` asks for a whole mapping that nothing uses: the entry is one,
            // taken out of the table once, and our caller vouches for the rest.
            unsafe { function(base.0, entry.len as usize) }
        })?;
        scope.call(&symbols.hipMemRelease, |function| {
            // SAFETY: `hipMemRelease` asks for a handle that is alive: the entry had it.
            unsafe { function(ptr::with_exposed_provenance_mut(handle)) }
        })?;
        scope.call(&symbols.hipMemAddressFree, |function| {
            // SAFETY: `hipMemAddressFree` asks for a whole reservation without a mapping: it was
            // unmapped above.
            unsafe { function(base.0, entry.len as usize) }
        })
    }
}

/// Refuses a descriptor that is known to be shorter than what is to be mapped of it: the runtime
/// maps what it is told, and the GPU finds out.
pub(crate) fn check_size(fd: BorrowedFd<'_>, size: usize) -> Result<()> {
    // A dma-buf tells its length by its end; what has no end to seek to does not tell, and the
    // runtime must judge.
    match rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0)) {
        Ok(len) if len > 0 && len < size as u64 => {
            Err(bad_descriptor(format!("one of {len} bytes, not of {size}")))
        }
        _ => Ok(()),
    }
}

pub(crate) fn bad_descriptor(got: String) -> Error {
    Error::Invalid {
        what: "the file descriptor",
        got,
        must: "one of device memory of exactly the length asked for",
    }
}

/// Makes the error of a device whose memory is not shared by file descriptor.
pub(crate) fn no_descriptors() -> Error {
    error::unproved("memory that is shared by file descriptor")
}

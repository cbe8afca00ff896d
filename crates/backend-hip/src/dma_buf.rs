//! Plain memory (`hipMalloc`) that is exported as a dma-buf: from ROCm 7 on, and only where a probe
//! proved it.

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use gpu_api::{Access, DeviceId, DevicePtr, Error, Result, close_on_exec, round_up};

use crate::backend::HipBackend;
use crate::error::{SUCCESS, UNKNOWN};
use crate::memory::{Entry, Given, Origin};
use crate::sys::{EXTERNAL_OPAQUE_FD, ExternalBuffer, ExternalHandle, RANGE_DMA_BUF};
use crate::vmm;

impl HipBackend {
    /// Exports plain memory.
    pub(crate) fn export_dma_buf(&self, base: DevicePtr, entry: &Entry) -> Result<OwnedFd> {
        let scope = self.driver.on_device(entry.device)?;
        let symbol = &self.driver.symbols.hipMemGetHandleForAddressRange;
        let mut fd: c_int = -1;
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipMemGetHandleForAddressRange` writes one descriptor: `fd` has its size.
            // The range is an allocation in the table. Its flags are 0.
            unsafe {
                function(
                    (&raw mut fd).cast(),
                    base.0,
                    entry.len as usize,
                    RANGE_DMA_BUF,
                    0,
                )
            }
        })?;
        match code {
            // SAFETY: `OwnedFd::from_raw_fd` asks for an open descriptor that nobody else closes:
            // the runtime made it for us.
            SUCCESS if fd >= 0 => close_on_exec(unsafe { OwnedFd::from_raw_fd(fd) }),
            SUCCESS => Err(scope.error(symbol.name, UNKNOWN)),
            code => Err(scope.error(symbol.name, code)),
        }
    }

    /// Maps another process' plain memory.
    pub(crate) fn import_dma_buf(
        &self,
        device: DeviceId,
        fd: BorrowedFd<'_>,
        len: u64,
        access: Access,
    ) -> Result<DevicePtr> {
        if access == Access::ReadOnly {
            return Err(Error::Unsupported {
                what: "a read-only mapping",
                why: "a dma-buf is mapped read-write by this runtime".to_owned(),
                remedy: "ask for read-write access: `Caps::read_only` says when",
            });
        }
        let size = round_up(len, self.driver.granularity(device)?)?;
        vmm::check_size(fd, size)?;
        let scope = self.driver.on_device(device)?;
        let symbols = &self.driver.symbols;
        // The runtime keeps the number that it is given for as long as the memory is mapped.
        let given = fd
            .try_clone_to_owned()
            .map_err(|error| Error::system("dup", "raise RLIMIT_NOFILE", error))?;
        let given = Given::new(given);
        let described = ExternalHandle {
            kind: EXTERNAL_OPAQUE_FD,
            pad: 0,
            fd: [u64::from(given.number().cast_unsigned()), 0],
            size: size as u64,
            flags: 0,
            reserved: [0; 17],
        };
        let mut object = ptr::null_mut();
        let code = scope.code(&symbols.hipImportExternalMemory, |function| {
            // SAFETY: `hipImportExternalMemory` writes one pointer and reads the description, which
            // lives here.
            unsafe { function(&raw mut object, &raw const described) }
        })?;
        if code != SUCCESS {
            given.give_back();
            return Err(vmm::bad_descriptor(format!(
                "one that the runtime refuses with {}",
                symbols.error(code)
            )));
        }
        let piece = ExternalBuffer {
            offset: 0,
            size: size as u64,
            flags: 0,
            reserved: [0; 17],
        };
        let mut base = 0;
        let mapped = scope.call(&symbols.hipExternalMemoryGetMappedBuffer, |function| {
            // SAFETY: `hipExternalMemoryGetMappedBuffer` writes one address and reads the piece,
            // which lives here, of memory that was imported above.
            unsafe { function(&raw mut base, object, &raw const piece) }
        });
        if let Err(error) = mapped {
            let _ = scope.call(&symbols.hipDestroyExternalMemory, |function| {
                // SAFETY: `hipDestroyExternalMemory` asks for memory that was imported and is not
                // in use: above.
                unsafe { function(object) }
            });
            given.give_back();
            return Err(error);
        }
        self.memory.keep_descriptor(base, given);
        let origin = Origin::External {
            object: object.expose_provenance(),
        };
        self.memory.insert(base, size as u64, device, origin);
        Ok(DevicePtr(base))
    }

    /// Unmaps what `import_dma_buf` mapped: the object holds the memory once, and the mapped buffer
    /// once more (clr, `hip_memory.cpp`: `retain` in `hipExternalMemoryGetMappedBuffer`).
    ///
    /// # Safety
    ///
    /// `base` and `object` came out of the table, and no unfinished GPU work touches their memory.
    pub(crate) unsafe fn close_dma_buf(
        &self,
        base: DevicePtr,
        device: DeviceId,
        object: usize,
    ) -> Result<()> {
        self.pass_known_streams();
        let scope = self.driver.on_device(device)?;
        scope.call(&self.driver.symbols.hipDestroyExternalMemory, |function| {
            let object: *mut c_void = ptr::with_exposed_provenance_mut(object);
            // SAFETY: `hipDestroyExternalMemory` asks for memory that was imported and is not in
            // use: the entry had it, and our caller vouches for the rest.
            unsafe { function(object) }
        })?;
        scope.call(&self.driver.symbols.hipFree, |function| {
            // SAFETY: `hipFree` asks for the base of memory that is not in use: the mapped
            // buffer's, which it lets go.
            unsafe { function(base.0) }
        })
    }
}

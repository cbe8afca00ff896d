//! Plain memory (`hipMalloc`) that is exported as a dma-buf: from ROCm 7 on, and only where a probe
//! proved it.

use std::ffi::{c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;

use driver::code::{Code, OUT_OF_MEMORY, SUCCESS, UNKNOWN};
use driver::given::Given;
use driver::physical::bad_descriptor;
use driver::{DmaBuf, Scope, Vendor};
use gpu_api::{DeviceId, DevicePtr, Error, Result, close_on_exec};

use crate::hip::Hip;
use crate::sys::{EXTERNAL_OPAQUE_FD, ExternalBuffer, ExternalHandle, RANGE_DMA_BUF};

impl DmaBuf for Hip {
    fn export(&self, device: DeviceId, base: DevicePtr, len: u64) -> Result<OwnedFd> {
        let scope = self.on_device(device)?;
        let symbol = &self.own().hipMemGetHandleForAddressRange;
        let mut fd: c_int = -1;
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipMemGetHandleForAddressRange` writes one descriptor: `fd` has its size.
            // The range is an allocation in the table. Its flags are 0.
            unsafe { function((&raw mut fd).cast(), base.0, len as usize, RANGE_DMA_BUF, 0) }
        })?;
        match code {
            // SAFETY: `OwnedFd::from_raw_fd` asks for an open descriptor that nobody else closes:
            // the runtime made it for us.
            SUCCESS if fd >= 0 => close_on_exec(unsafe { OwnedFd::from_raw_fd(fd) }),
            SUCCESS => Err(scope.error(symbol.name, UNKNOWN)),
            code => Err(scope.error(symbol.name, code)),
        }
    }

    fn import(&self, device: DeviceId, given: &Given, len: u64) -> Result<(u64, usize)> {
        let scope = self.on_device(device)?;
        let own = self.own();
        let described = ExternalHandle {
            kind: EXTERNAL_OPAQUE_FD,
            pad: 0,
            fd: [u64::from(given.number().cast_unsigned()), 0],
            size: len,
            flags: 0,
            reserved: [0; 17],
        };
        let mut object = ptr::null_mut();
        let code = scope.code(&own.hipImportExternalMemory, |function| {
            // SAFETY: `hipImportExternalMemory` writes one pointer and reads the description, which
            // lives here.
            unsafe { function(&raw mut object, &raw const described) }
        })?;
        if code != SUCCESS {
            return Err(refused(&scope, code));
        }
        let piece = ExternalBuffer {
            offset: 0,
            size: len,
            flags: 0,
            reserved: [0; 17],
        };
        let mut base = 0;
        let mapped = scope.call(&own.hipExternalMemoryGetMappedBuffer, |function| {
            // SAFETY: `hipExternalMemoryGetMappedBuffer` writes one address and reads the piece,
            // which lives here, of memory that was imported above.
            unsafe { function(&raw mut base, object, &raw const piece) }
        });
        if let Err(error) = mapped {
            let _ = scope.call(&own.hipDestroyExternalMemory, |function| {
                // SAFETY: `hipDestroyExternalMemory` asks for memory that was imported and is not
                // in use: above.
                unsafe { function(object) }
            });
            return Err(error);
        }
        Ok((base, object.expose_provenance()))
    }

    /// The object holds the memory once, and the mapped buffer once more (clr, `hip_memory.cpp`:
    /// `retain` in `hipExternalMemoryGetMappedBuffer`).
    unsafe fn close(&self, device: DeviceId, base: DevicePtr, object: usize) -> Result<()> {
        let scope = self.on_device(device)?;
        let destroyed = scope.call(&self.own().hipDestroyExternalMemory, |function| {
            let object: *mut c_void = ptr::with_exposed_provenance_mut(object);
            // SAFETY: `hipDestroyExternalMemory` asks for memory that was imported and is not in
            // use: the entry had it, and our caller vouches for the rest.
            unsafe { function(object) }
        });
        let freed = scope.call(&self.driver().calls.free, |function| {
            // SAFETY: `hipFree` asks for the base of memory that is not in use: the mapped
            // buffer's, which it lets go.
            unsafe { function(base.0) }
        });
        destroyed.and(freed)
    }
}

/// Says why a dma-buf is not mapped. The runtime gives out of memory for every failure (clr
/// f9f995c, `hip_memory.cpp`: 129-132), so both causes are named, with the room that there is.
fn refused(scope: &Scope<'_, Hip>, code: Code) -> Error {
    let source = scope.vendor.code(code);
    if code != OUT_OF_MEMORY {
        return bad_descriptor(format!("one that the runtime refuses with {source}"));
    }
    let free = scope.memory_info().map_or(0, |(free, _)| free);
    bad_descriptor(format!(
        "one that the runtime refuses with {source}, which it gives for a bad descriptor and for too little room \
         ({free} bytes are free)"
    ))
}

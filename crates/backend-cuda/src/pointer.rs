//! What the driver knows of an address, and why memory cannot be exported.

use std::ffi::c_void;
use std::ptr;

use driver::calls::{AllocationProperties, HANDLE_POSIX_FD, LOCATION_DEVICE, MemoryHandle};
use driver::code::{INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, SUCCESS};
use driver::physical::bad_descriptor;
use driver::pointer::{exportable, is_virtual, refusal as refuse};
use driver::{Scope, Vendor};
use gpu_api::{AddressRange, DevicePtr, MemHandle, MemoryKind, PointerInfo, Result, Sharing};

use crate::cuda::Cuda;
use crate::sys::{MEMORY_DEVICE, MEMORY_HOST, pointer};

/// What is asked of an address. The last is unknown to drivers before 11.3.
const ASKED: [u32; 8] = [
    pointer::MEMORY_TYPE,
    pointer::IS_MANAGED,
    pointer::DEVICE_ORDINAL,
    pointer::IS_LEGACY_IPC_CAPABLE,
    pointer::RANGE_START,
    pointer::RANGE_SIZE,
    pointer::ALLOWED_HANDLE_TYPES,
    pointer::POOL,
];

/// Says why virtual memory that is not for sharing cannot be exported, and what to change.
pub(crate) fn refusal(kind: MemoryKind) -> Option<(&'static str, &'static str)> {
    (kind == MemoryKind::Virtual).then_some((
        "it is virtual memory that was made without a POSIX file descriptor among its handle types",
        "create it with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, or allocate with `Session::alloc`",
    ))
}

impl Cuda {
    /// Gets the handle of plain memory, of this library's or of other code's.
    pub(crate) fn plain_handle(&self, base: DevicePtr) -> Result<MemHandle> {
        const WHAT: &str = "a 64-byte handle of this memory";
        exportable(self, base, WHAT)?;
        let scope = self.anywhere()?;
        driver::plain::handle_of(&scope, base)?.map_err(|code| match code {
            INVALID_VALUE | INVALID_HANDLE | NOT_FOUND | NOT_SUPPORTED => refuse(self, base, WHAT),
            code => scope.error(self.driver().calls.handle_get.name, code),
        })
    }

    /// Refuses imported memory that is not a device's.
    pub(crate) fn check_location(
        &self,
        scope: &Scope<'_, Cuda>,
        handle: MemoryHandle,
    ) -> Result<()> {
        let mut properties = AllocationProperties::exportable(0);
        scope.call(
            &self.own.cuMemGetAllocationPropertiesFromHandle,
            |function| {
                // SAFETY: `cuMemGetAllocationPropertiesFromHandle` writes the properties, which live
                // here, of a handle that is alive: it was just imported.
                unsafe { function(&raw mut properties, handle) }
            },
        )?;
        if properties.location.kind == LOCATION_DEVICE {
            return Ok(());
        }
        let kind = properties.location.kind;
        Err(bad_descriptor(format!("one of memory of kind {kind}")))
    }

    /// Says what memory is that this backend did not make.
    pub(crate) fn classify_foreign(
        &self,
        scope: &Scope<'_, Cuda>,
        ptr: DevicePtr,
    ) -> Result<PointerInfo> {
        let [
            memory,
            managed,
            ordinal,
            legacy,
            start,
            size,
            handle_types,
            pool,
        ] = self.attributes(scope, ptr)?;
        let (kind, sharing) = match memory as u32 {
            _ if managed != 0 => (MemoryKind::Managed, None),
            MEMORY_HOST => (MemoryKind::Host, None),
            MEMORY_DEVICE if pool != 0 => (MemoryKind::Pool, None),
            MEMORY_DEVICE if legacy as u32 != 0 => (MemoryKind::Plain, Some(Sharing::Handle)),
            MEMORY_DEVICE if is_virtual(scope, ptr)? => {
                let exported = handle_types as u32 & HANDLE_POSIX_FD != 0;
                (MemoryKind::Virtual, exported.then_some(Sharing::Fd))
            }
            // Neither of this process' pools nor of its plain or virtual memory: somebody else
            // opened it here.
            MEMORY_DEVICE => (MemoryKind::Imported, None),
            _ => (MemoryKind::Unknown, None),
        };
        if kind == MemoryKind::Unknown {
            return Ok(PointerInfo {
                kind,
                range: None,
                device: None,
                sharing: None,
            });
        }
        let range = (size != 0).then_some(AddressRange {
            base: DevicePtr(start),
            len: size,
        });
        let device = self.numbered(ordinal as u32 as i32);
        Ok(PointerInfo {
            kind,
            range,
            device,
            sharing,
        })
    }

    /// Asks for everything in [`ASKED`]; what the driver does not know of is 0.
    fn attributes(&self, scope: &Scope<'_, Cuda>, ptr: DevicePtr) -> Result<[u64; ASKED.len()]> {
        let symbol = &self.own.cuPointerGetAttributes;
        // The attributes are of several widths, none above eight bytes; zeroed and read
        // little-endian they fit.
        let mut values = [0_u64; ASKED.len()];
        let mut ask = |count: usize| {
            values = [0; ASKED.len()];
            let slots = values
                .each_mut()
                .map(|value| ptr::from_mut(value).cast::<c_void>());
            scope.code(symbol, |function| {
                // SAFETY: `cuPointerGetAttributes` reads `count` attributes and addresses and
                // writes to each of those: both arrays are at least as long, and every value has
                // room for the widest attribute. The address is looked up, not followed.
                unsafe { function(count as u32, ASKED.as_ptr(), slots.as_ptr(), ptr.0) }
            })
        };
        let mut code = ask(ASKED.len())?;
        if code == INVALID_VALUE {
            code = ask(ASKED.len() - 1)?;
        }
        match code {
            SUCCESS => Ok(values),
            INVALID_VALUE => Ok([0; ASKED.len()]),
            code => Err(scope.error(symbol.name, code)),
        }
    }
}

//! What the runtime knows of an address, and why memory cannot be exported.

use std::ptr;

use gpu_api::{
    AddressRange, DevicePtr, Error, GpuPointers, MemoryKind, PointerInfo, Result, Sharing,
};

use crate::backend::HipBackend;
use crate::call::Scope;
use crate::error::{INVALID_DEVICE_POINTER, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, SUCCESS};
use crate::memory::Origin;
use crate::sys::PointerAttributes;
use crate::version::MemoryType;

// SAFETY: the condition of `GpuPointers`: what is told is what the table or the runtime says of the
// address.
unsafe impl GpuPointers for HipBackend {
    fn address_range(&self, ptr: DevicePtr) -> Result<AddressRange> {
        if let Some((range, _)) = self.memory.find(ptr) {
            return Ok(range);
        }
        let scope = self.driver.anywhere()?;
        self.driver_range(&scope, ptr)
    }

    fn classify(&self, ptr: DevicePtr) -> Result<PointerInfo> {
        if let Some((range, entry)) = self.memory.find(ptr) {
            let (kind, sharing) = match entry.origin {
                Origin::Plain | Origin::Adopted => (MemoryKind::Plain, Some(Sharing::Handle)),
                Origin::DmaBuf => (MemoryKind::Plain, Some(Sharing::Fd)),
                Origin::Pool => (MemoryKind::Pool, None),
                Origin::Virtual { .. } => (MemoryKind::Virtual, Some(Sharing::Fd)),
                Origin::Opened { .. } | Origin::Imported { .. } | Origin::External { .. } => {
                    (MemoryKind::Imported, None)
                }
            };
            return Ok(PointerInfo {
                kind,
                range: Some(range),
                device: Some(entry.device),
                sharing,
            });
        }
        let scope = self.driver.anywhere()?;
        let unknown = PointerInfo {
            kind: MemoryKind::Unknown,
            range: None,
            device: None,
            sharing: None,
        };
        let Some(found) = self.attributes(&scope, ptr)? else {
            return Ok(unknown);
        };
        let kind = match self.driver.version().memory_type(found.kind) {
            _ if found.is_managed != 0 => MemoryKind::Managed,
            MemoryType::Managed => MemoryKind::Managed,
            MemoryType::Host => MemoryKind::Host,
            // Nothing tells plain memory, a pool's and another process' apart, so it is not offered
            // for sharing: asked for the wrong one's handle, some runtimes bring the kernel down.
            // Its owner can vouch for it.
            MemoryType::Device if self.is_virtual(&scope, ptr)? => MemoryKind::Virtual,
            MemoryType::Device => MemoryKind::Plain,
            MemoryType::Unregistered | MemoryType::Other => return Ok(unknown),
        };
        let range = self.driver_range(&scope, ptr).ok();
        Ok(PointerInfo {
            kind,
            range,
            device: self.driver.numbered(found.device),
            sharing: None,
        })
    }
}

impl HipBackend {
    /// Asks the runtime for the allocation that an address lies in.
    pub(crate) fn driver_range(&self, scope: &Scope<'_>, ptr: DevicePtr) -> Result<AddressRange> {
        let symbol = &self.driver.symbols.hipMemGetAddressRange;
        let (mut base, mut len) = (0, 0);
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipMemGetAddressRange` writes an address and a size: `base` and `len` are
            // such. The address is looked up, not followed.
            unsafe { function(&raw mut base, &raw mut len, ptr.0) }
        })?;
        match code {
            SUCCESS => Ok(AddressRange {
                base: DevicePtr(base),
                len: len as u64,
            }),
            INVALID_VALUE | INVALID_DEVICE_POINTER | INVALID_HANDLE | NOT_FOUND => {
                Err(Error::Invalid {
                    what: "the address",
                    got: ptr.to_string(),
                    must: "one in an allocation that the driver knows",
                })
            }
            code => Err(scope.error(symbol.name, code)),
        }
    }

    /// Makes the error of memory that cannot be exported: why, and what to change.
    pub(crate) fn refusal(&self, base: DevicePtr, what: &'static str) -> Error {
        let info = match self.classify(base) {
            Ok(info) => info,
            Err(error) => return error,
        };
        let (why, remedy) = match (info.kind, info.sharing) {
            (MemoryKind::Plain | MemoryKind::Virtual, Some(_))
                if info.range.is_some_and(|range| range.base != base) =>
            {
                (
                    "it is not the first address of its allocation",
                    "export the base, and send the offset beside it",
                )
            }
            (MemoryKind::Plain, Some(Sharing::Handle)) => (
                "it is plain memory (hipMalloc) made to be shared by handle",
                "export its handle: `export_handle`",
            ),
            (MemoryKind::Plain, Some(_)) => (
                "it is plain memory (hipMalloc) made to be shared as a dma-buf",
                "export it: `export_fd`",
            ),
            (MemoryKind::Plain, None) => (
                "this library did not allocate it, and the runtime does not tell hipMalloc from what must not be \
                 exported (ROCm/clr#265)",
                "vouch for it with `HipBackend::adopt_memory` if it came from hipMalloc, or allocate with \
                 `Session::alloc`",
            ),
            (MemoryKind::Virtual, Some(_)) => (
                "it is virtual memory (hipMemCreate)",
                "export its file descriptor: `export_fd`",
            ),
            (MemoryKind::Virtual, None) => (
                "it is virtual memory (hipMemCreate) that another library made",
                "allocate with `Session::alloc`",
            ),
            (MemoryKind::Managed, _) => (
                "it is managed memory (hipMallocManaged), which the driver moves between host and device",
                "allocate it with hipMalloc, or with `Session::alloc`",
            ),
            (MemoryKind::Host, _) => (
                "it is host memory (hipHostMalloc, hipHostRegister)",
                "copy it to memory of `Session::alloc`, or share it as a memfd of your own",
            ),
            (MemoryKind::Pool, _) => (
                "it comes from a stream-ordered pool (hipMallocAsync), whose memory has no handle of its own",
                "allocate it with hipMalloc, or with `Session::alloc`",
            ),
            (MemoryKind::Imported, _) => (
                "this process opened it from another one, and only its owner can export it",
                "ask its owner for a descriptor for the new receiver",
            ),
            _ => (
                "the runtime does not know the address",
                "pass the address of device memory that is still allocated",
            ),
        };
        Error::Unsupported {
            what,
            why: format!("{base}: {why}"),
            remedy,
        }
    }

    /// Asks what an address is; `None` where the runtime does not know it.
    ///
    /// The manual promises an error for such an address; from ROCm 6 on it is a success of the type
    /// "unregistered".
    pub(crate) fn attributes(
        &self,
        scope: &Scope<'_>,
        ptr: DevicePtr,
    ) -> Result<Option<PointerAttributes>> {
        let symbol = &self.driver.symbols.hipPointerGetAttributes;
        let mut found = PointerAttributes {
            kind: u32::MAX,
            device: -2,
            device_pointer: 0,
            host_pointer: 0,
            is_managed: 0,
            flags: 0,
        };
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipPointerGetAttributes` writes the attributes, which live here. The address
            // is looked up, not followed.
            unsafe { function(&raw mut found, ptr.0) }
        })?;
        match code {
            SUCCESS => Ok(Some(found)),
            INVALID_VALUE | INVALID_DEVICE_POINTER | INVALID_HANDLE | NOT_FOUND => Ok(None),
            code => Err(scope.error(symbol.name, code)),
        }
    }

    /// Says whether an address lies in virtual memory: whether its physical memory has a handle.
    fn is_virtual(&self, scope: &Scope<'_>, ptr: DevicePtr) -> Result<bool> {
        let symbols = &self.driver.symbols;
        if symbols.hipMemRetainAllocationHandle.function.is_none()
            || !self.driver.version().tells_virtual_memory()
        {
            // Then it counts as plain memory, which is not offered for sharing either.
            return Ok(false);
        }
        let mut handle = ptr::null_mut();
        let code = scope.code(&symbols.hipMemRetainAllocationHandle, |function| {
            // SAFETY: `hipMemRetainAllocationHandle` writes one handle: `handle` is one. The
            // address is looked up, not followed.
            unsafe { function(&raw mut handle, ptr.0) }
        })?;
        if code != SUCCESS {
            return Ok(false);
        }
        scope.call(&symbols.hipMemRelease, |function| {
            // SAFETY: `hipMemRelease` asks for a handle that is alive: it was retained above.
            unsafe { function(handle) }
        })?;
        Ok(true)
    }
}

//! What the runtime knows of an address, and why memory cannot be exported.

use driver::code::{NO_SUCH_ADDRESS, SUCCESS};
use driver::pointer::{driver_range, is_virtual};
use driver::{Scope, Vendor};
use gpu_api::{DevicePtr, MemoryKind, PointerInfo, Result};

use crate::hip::Hip;
use crate::sys::PointerAttributes;
use crate::version::MemoryType;

/// Says why memory of other libraries is not exported, and what to change.
pub(crate) fn refusal(kind: MemoryKind) -> Option<(&'static str, &'static str)> {
    match kind {
        MemoryKind::Plain => Some((
            "this library did not allocate it, and the runtime does not tell hipMalloc from what must not be exported \
             (ROCm/clr#265)",
            "vouch for it with `HipBackend::adopt_memory` if it came from hipMalloc, or allocate with `Session::alloc`",
        )),
        MemoryKind::Virtual => Some((
            "it is virtual memory (hipMemCreate) that another library made",
            "allocate with `Session::alloc`",
        )),
        _ => None,
    }
}

impl Hip {
    /// Says what memory is that this backend did not make.
    pub(crate) fn classify_foreign(
        &self,
        scope: &Scope<'_, Hip>,
        ptr: DevicePtr,
    ) -> Result<PointerInfo> {
        let unknown = PointerInfo {
            kind: MemoryKind::Unknown,
            range: None,
            device: None,
            sharing: None,
        };
        let Some(found) = self.attributes(scope, ptr)? else {
            return Ok(unknown);
        };
        let kind = match self.version().memory_type(found.kind) {
            _ if found.is_managed != 0 => MemoryKind::Managed,
            MemoryType::Managed => MemoryKind::Managed,
            MemoryType::Host => MemoryKind::Host,
            // Nothing tells plain memory, a pool's and another process' apart, so it is not offered
            // for sharing: asked for the wrong one's handle, some runtimes bring the kernel down.
            // Its owner can vouch for it.
            MemoryType::Device
                if self.version().tells_virtual_memory() && is_virtual(scope, ptr)? =>
            {
                MemoryKind::Virtual
            }
            MemoryType::Device => MemoryKind::Plain,
            MemoryType::Unregistered | MemoryType::Other => return Ok(unknown),
        };
        let range = driver_range(scope, ptr).ok();
        Ok(PointerInfo {
            kind,
            range,
            device: self.numbered(found.device),
            sharing: None,
        })
    }

    /// Asks what an address is; `None` where the runtime does not know it.
    ///
    /// The manual promises an error for such an address; from ROCm 6 on it is a success of the type
    /// "unregistered".
    pub(crate) fn attributes(
        &self,
        scope: &Scope<'_, Hip>,
        ptr: DevicePtr,
    ) -> Result<Option<PointerAttributes>> {
        let symbol = &self.own().hipPointerGetAttributes;
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
            code if NO_SUCH_ADDRESS.contains(&code) => Ok(None),
            code => Err(scope.error(symbol.name, code)),
        }
    }
}

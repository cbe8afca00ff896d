//! What is known of an address, and why memory cannot be exported.

use gpu_api::{
    AddressRange, DevicePtr, Error, GpuPointers, MemoryKind, PointerInfo, Result, Sharing,
};

use crate::backend::Backend;
use crate::calls::MemoryHandle;
use crate::code::{NO_SUCH_ADDRESS, SUCCESS};
use crate::memory_table::{Origin, Way};
use crate::vendor::{Scope, Vendor};

// SAFETY: the condition of `GpuPointers`: what is told is what the table or the driver says of the
// address.
unsafe impl<V: Vendor> GpuPointers for Backend<V> {
    fn address_range(&self, ptr: DevicePtr) -> Result<AddressRange> {
        if let Some((range, _)) = self.driver().memory.find(ptr) {
            return Ok(range);
        }
        let range = driver_range(&self.anywhere()?, ptr)?;
        // What lies behind an allocation of the table is this backend's own.
        if self.driver().memory.find(range.base).is_some() {
            return Err(Error::invalid(
                "the address",
                format!("{ptr}, which is behind the memory at {}", range.base),
                "one within an allocation",
            ));
        }
        Ok(range)
    }

    fn classify(&self, ptr: DevicePtr) -> Result<PointerInfo> {
        classify(&**self, ptr)
    }
}

/// Says where an address comes from: by the table, or by what the vendor's driver tells.
///
/// # Errors
///
/// The driver's.
pub fn classify<V: Vendor>(vendor: &V, ptr: DevicePtr) -> Result<PointerInfo> {
    let Some((range, entry)) = vendor.driver().memory.find(ptr) else {
        return vendor.classify(&vendor.anywhere()?, ptr);
    };
    let (kind, sharing) = match entry.origin {
        Origin::Plain | Origin::Adopted => (MemoryKind::Plain, Some(Sharing::Handle)),
        Origin::DmaBuf => (MemoryKind::Plain, Some(Sharing::Fd)),
        Origin::Virtual { .. } => (MemoryKind::Virtual, Some(Sharing::Fd)),
        Origin::Opened { .. } | Origin::Imported { .. } | Origin::External { .. } => {
            (MemoryKind::Imported, None)
        }
        Origin::Piece { .. } => (MemoryKind::Piece, None),
        Origin::Pool => (MemoryKind::Pool, None),
        Origin::Managed => (MemoryKind::Managed, None),
    };
    Ok(PointerInfo {
        kind,
        range: Some(range),
        device: Some(entry.device),
        sharing,
    })
}

/// Asks the driver for the allocation that an address lies in.
///
/// # Errors
///
/// [`Error::Invalid`] for an address that the driver does not know, and the driver's.
pub fn driver_range<V: Vendor>(scope: &Scope<'_, V>, ptr: DevicePtr) -> Result<AddressRange> {
    let symbol = &scope.vendor.driver().calls.address_range;
    let (mut base, mut len) = (0, 0);
    let code = scope.code(symbol, |function| {
        // SAFETY: `address_range` writes an address and a size: `base` and `len` are such. The
        // address is looked up, not followed.
        unsafe { function(&raw mut base, &raw mut len, ptr.0) }
    })?;
    match code {
        SUCCESS => Ok(AddressRange {
            base: DevicePtr(base),
            len: len as u64,
        }),
        code if NO_SUCH_ADDRESS.contains(&code) => Err(Error::invalid(
            "the address",
            ptr,
            "one in an allocation that the driver knows",
        )),
        code => Err(scope.error(symbol.name, code)),
    }
}

/// Refuses what is known not to be the base of memory that this process allocated: the driver would
/// export all of what an address lies in, and the process that opens it would take its base for the
/// address.
///
/// # Errors
///
/// [`Error::Unsupported`].
pub fn exportable<V: Vendor>(vendor: &V, base: DevicePtr, what: &'static str) -> Result<()> {
    match vendor.driver().memory.find(base) {
        Some((range, entry)) if range.base != base || entry.origin.way() != Way::Free => {
            Err(refusal(vendor, base, what))
        }
        _ => Ok(()),
    }
}

/// Makes the error of memory that cannot be exported: why, and what to change.
pub fn refusal<V: Vendor>(vendor: &V, base: DevicePtr, what: &'static str) -> Error {
    let info = match classify(vendor, base) {
        Ok(info) => info,
        Err(error) => return error,
    };
    let words = V::WORDS;
    let is_base = info.range.is_none_or(|range| range.base == base);
    let (why, remedy) = match (info.kind, info.sharing) {
        (MemoryKind::Plain | MemoryKind::Virtual, Some(_)) if !is_base => (
            "it is not the first address of its allocation".to_owned(),
            "export the base, and send the offset beside it",
        ),
        (MemoryKind::Plain, Some(Sharing::Fd)) => (
            format!(
                "it is plain memory ({}) made to be shared as a dma-buf",
                words.plain
            ),
            "export it: `export_fd`",
        ),
        (MemoryKind::Plain, Some(_)) => (
            format!(
                "it is plain memory ({}) made to be shared by handle",
                words.plain
            ),
            "export its handle: `export_handle`",
        ),
        (MemoryKind::Virtual, Some(_)) => (
            format!("it is virtual memory ({})", words.virtual_memory),
            "export its file descriptor: `export_fd`",
        ),
        (MemoryKind::Managed, _) => (
            format!(
                "it is managed memory ({}), which the driver moves between host and device",
                words.managed
            ),
            words.instead,
        ),
        (MemoryKind::Host, _) => (
            format!("it is host memory ({})", words.host),
            "copy it to memory of `Session::alloc`, or share it as a memfd of your own",
        ),
        (MemoryKind::Pool, _) => (
            format!(
                "it comes from a stream-ordered pool ({}), whose memory has no handle of its own",
                words.pool
            ),
            words.instead,
        ),
        (MemoryKind::Imported, _) => (
            "this process opened it from another one, and only its owner can export it".to_owned(),
            "ask its owner for a descriptor for the new receiver",
        ),
        (MemoryKind::Piece, _) => (
            "it is a piece of a range, mapped with `map_memory`".to_owned(),
            "export what was mapped there: `export_memory`",
        ),
        (kind, _) => {
            let (why, remedy) = vendor.refusal(kind).unwrap_or((
                "the driver does not know the address",
                "pass the address of device memory that is still allocated",
            ));
            (why.to_owned(), remedy)
        }
    };
    Error::unsupported(what, format!("{base}: {why}"), remedy)
}

/// Says whether an address lies in virtual memory: whether its physical memory has a handle.
///
/// # Errors
///
/// The driver's.
pub fn is_virtual<V: Vendor>(scope: &Scope<'_, V>, ptr: DevicePtr) -> Result<bool> {
    let calls = &scope.vendor.driver().calls;
    if calls.memory_retain.function.is_none() {
        return Ok(false);
    }
    let Some(handle) = retained(scope, ptr)? else {
        return Ok(false);
    };
    scope.call(&calls.memory_release, |function| {
        // SAFETY: `memory_release` asks for a handle that is alive: it was retained above.
        unsafe { function(handle) }
    })?;
    Ok(true)
}

/// Retains the handle of the physical memory at an address; `None` where there is none.
pub(crate) fn retained<V: Vendor>(
    scope: &Scope<'_, V>,
    ptr: DevicePtr,
) -> Result<Option<MemoryHandle>> {
    let mut handle: MemoryHandle = 0;
    let code = scope.code(&scope.vendor.driver().calls.memory_retain, |function| {
        // SAFETY: `memory_retain` writes one handle: `handle` is one. The address is looked up,
        // not followed.
        unsafe { function(&raw mut handle, ptr.0) }
    })?;
    Ok((code == SUCCESS).then_some(handle))
}

//! What the driver knows of an address, and why memory cannot be exported.

use std::ffi::c_void;
use std::ptr;

use gpu_api::{
    AddressRange, DevicePtr, Error, GpuPointers, MemoryKind, PointerInfo, Result, Sharing,
};

use crate::backend::CudaBackend;
use crate::call::Scope;
use crate::error::{INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, SUCCESS};
use crate::memory::Origin;
use crate::sys::{HANDLE_POSIX_FD, MEMORY_DEVICE, MEMORY_HOST, MemoryHandle, pointer};

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

// SAFETY: the condition of `GpuPointers`: what is told is what the table or the driver says of the
// address.
unsafe impl GpuPointers for CudaBackend {
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
                Origin::Plain => (MemoryKind::Plain, Some(Sharing::Handle)),
                Origin::Virtual => (MemoryKind::Virtual, Some(Sharing::Fd)),
                Origin::Opened { .. } | Origin::Imported { .. } => (MemoryKind::Imported, None),
                Origin::Piece { .. } => (MemoryKind::Piece, None),
                Origin::Pool => (MemoryKind::Pool, None),
                Origin::Managed => (MemoryKind::Managed, None),
            };
            return Ok(PointerInfo {
                kind,
                range: Some(range),
                device: Some(entry.device),
                sharing,
            });
        }
        let scope = self.driver.anywhere()?;
        let [
            memory,
            managed,
            ordinal,
            legacy,
            start,
            size,
            handle_types,
            pool,
        ] = self.attributes(&scope, ptr)?;
        let (kind, sharing) = match memory as u32 {
            _ if managed != 0 => (MemoryKind::Managed, None),
            MEMORY_HOST => (MemoryKind::Host, None),
            MEMORY_DEVICE if pool != 0 => (MemoryKind::Pool, None),
            MEMORY_DEVICE if legacy as u32 != 0 => (MemoryKind::Plain, Some(Sharing::Handle)),
            MEMORY_DEVICE if self.is_virtual(&scope, ptr)? => {
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
        let device = self.driver.numbered(ordinal as u32 as i32);
        Ok(PointerInfo {
            kind,
            range,
            device,
            sharing,
        })
    }
}

impl CudaBackend {
    /// Asks the driver for the allocation that an address lies in.
    pub(crate) fn driver_range(&self, scope: &Scope<'_>, ptr: DevicePtr) -> Result<AddressRange> {
        let symbol = &self.driver.symbols.cuMemGetAddressRange;
        let (mut base, mut len) = (0, 0);
        let code = scope.code(symbol, |function| {
            // SAFETY: `cuMemGetAddressRange` writes an address and a size: `base` and `len` are
            // such. The address is looked up, not followed.
            unsafe { function(&raw mut base, &raw mut len, ptr.0) }
        })?;
        match code {
            SUCCESS => Ok(AddressRange {
                base: DevicePtr(base),
                len: len as u64,
            }),
            INVALID_VALUE | INVALID_HANDLE | NOT_FOUND => Err(Error::Invalid {
                what: "the address",
                got: ptr.to_string(),
                must: "one in an allocation that the driver knows",
            }),
            code => Err(scope.error(symbol.name, code)),
        }
    }

    /// Refuses what is known not to be the base of memory that this process allocated: the driver
    /// would export all of what an address lies in, and the process that opens it would take its
    /// base for the address.
    pub(crate) fn exportable(&self, base: DevicePtr, what: &'static str) -> Result<()> {
        match self.memory.find(base) {
            Some((range, entry)) if range.base != base || !entry.origin.is_own() => {
                Err(self.refusal(base, what))
            }
            _ => Ok(()),
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
            (MemoryKind::Plain, _) => (
                "it is plain memory (cuMemAlloc)",
                "export its handle: `export_handle`",
            ),
            (MemoryKind::Virtual, Some(_)) => (
                "it is virtual memory (cuMemCreate)",
                "export its file descriptor: `export_fd`",
            ),
            (MemoryKind::Virtual, None) => (
                "it is virtual memory that was made without a POSIX file descriptor among its handle types",
                "create it with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, or allocate with `Session::alloc`",
            ),
            (MemoryKind::Piece, _) => (
                "it is a piece of a range, mapped with `map_memory`",
                "export what was mapped there: `export_memory`",
            ),
            (MemoryKind::Pool, _) => (
                "it comes from a stream-ordered pool (cudaMallocAsync), whose memory has no handle of its own",
                "allocate it with cuMemAlloc (cudaMalloc), or with `Session::alloc`",
            ),
            (MemoryKind::Managed, _) => (
                "it is managed memory (cudaMallocManaged), which the driver moves between host and device",
                "allocate it with cuMemAlloc (cudaMalloc), or with `Session::alloc`",
            ),
            (MemoryKind::Host, _) => (
                "it is host memory (cudaMallocHost, cudaHostRegister)",
                "copy it to memory of `Session::alloc`, or share it as a memfd of your own",
            ),
            (MemoryKind::Imported, _) => (
                "this process opened it from another one, and only its owner can export it",
                "ask its owner for a descriptor for the new receiver",
            ),
            _ => (
                "the driver does not know the address",
                "pass the address of device memory that is still allocated",
            ),
        };
        Error::Unsupported {
            what,
            why: format!("{base}: {why}"),
            remedy,
        }
    }

    /// Asks for everything in [`ASKED`]; what the driver does not know of is 0.
    fn attributes(&self, scope: &Scope<'_>, ptr: DevicePtr) -> Result<[u64; ASKED.len()]> {
        let symbol = &self.driver.symbols.cuPointerGetAttributes;
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

    /// Says whether an address lies in virtual memory: whether its physical memory has a handle.
    fn is_virtual(&self, scope: &Scope<'_>, ptr: DevicePtr) -> Result<bool> {
        let symbols = &self.driver.symbols;
        if symbols.cuMemRetainAllocationHandle.function.is_none() {
            return Ok(false);
        }
        let mut handle: MemoryHandle = 0;
        let code = scope.code(&symbols.cuMemRetainAllocationHandle, |function| {
            // SAFETY: `cuMemRetainAllocationHandle` writes one handle: `handle` is one. The address
            // is looked up, not followed.
            unsafe {
                function(
                    &raw mut handle,
                    ptr::with_exposed_provenance_mut(ptr.0 as usize),
                )
            }
        })?;
        if code != SUCCESS {
            return Ok(false);
        }
        scope.call(&symbols.cuMemRelease, |function| {
            // SAFETY: `cuMemRelease` asks for a handle that is alive: it was retained above.
            unsafe { function(handle) }
        })?;
        Ok(true)
    }
}

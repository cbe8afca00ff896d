//! Memory by `hipMalloc`: shared by a 64-byte handle, always read-write.

use std::process;
use std::sync::PoisonError;

use gpu_api::{Allocation, DeviceId, DevicePtr, Error, GpuHandles, MemHandle, Result, round_up};

use crate::backend::HipBackend;
use crate::error::{
    INVALID_CONTEXT, INVALID_DEVICE_POINTER, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND,
    NOT_SUPPORTED, SUCCESS,
};
use crate::kernel;
use crate::memory::Origin;
use crate::sys::Handle;

/// Where AMD's runtime writes the process number of the exporting process into a handle.
const PROCESS: std::ops::Range<usize> = 48..52;
/// Where it writes the exporter's number of the device.
const DEVICE: std::ops::Range<usize> = 52..56;

// SAFETY: the condition of `GpuHandles`: a handle is what `hipIpcGetMemHandle` gave, and is opened
// by its own call.
unsafe impl GpuHandles for HipBackend {
    fn export_handle(&self, base: DevicePtr) -> Result<MemHandle> {
        let found = self
            .memory
            .find(base)
            .filter(|(range, _)| range.base == base);
        let entry = match found {
            Some((_, entry))
                if matches!(entry.origin, Origin::Plain | Origin::Adopted) && !entry.leaked =>
            {
                entry
            }
            _ => return Err(self.refusal(base, "a 64-byte handle of this memory")),
        };
        let _sharing = self
            .memory
            .sharing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(handle) = self.memory.handle(base) {
            return Ok(handle);
        }
        // The runtime takes the device from the thread, not from the address.
        let scope = self.driver.on_device(entry.device)?;
        let symbol = &self.driver.symbols.hipIpcGetMemHandle;
        let mut handle = Handle { reserved: [0; 64] };
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipIpcGetMemHandle` writes 64 bytes: `handle` has as many. The address is
            // looked up, not followed.
            unsafe { function(&raw mut handle, base.0) }
        })?;
        match code {
            SUCCESS => {
                let handle = MemHandle(handle.reserved.map(|byte| byte as u8));
                self.memory.keep_handle(base, handle);
                Ok(handle)
            }
            // It is the base of live memory that may be exported: the table says so.
            INVALID_VALUE | INVALID_DEVICE_POINTER | INVALID_HANDLE | NOT_FOUND | NOT_SUPPORTED => {
                Err(Error::Driver {
                    call: symbol.name,
                    device: entry.device,
                    source: self.driver.symbols.explained(code, kernel::no_handle()),
                })
            }
            code => Err(scope.error(symbol.name, code)),
        }
    }

    fn open_handle(&self, device: DeviceId, handle: &MemHandle) -> Result<DevicePtr> {
        self.check_device_named(handle)?;
        let scope = self.driver.on_device(device)?;
        let symbol = &self.driver.symbols.hipIpcOpenMemHandle;
        let flags = self.driver.version().lazy_peer_access();
        let bytes = Handle {
            reserved: handle.0.map(|byte| byte as _),
        };
        let _sharing = self
            .memory
            .sharing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut base = 0;
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipIpcOpenMemHandle` writes one address: `base` is one. It checks the
            // handle's bytes.
            unsafe { function(&raw mut base, bytes, flags) }
        })?;
        if code != SUCCESS {
            return Err(self.open_error(device, handle, code));
        }
        match self.driver_range(&scope, DevicePtr(base)) {
            Ok(range) => {
                self.memory.opened(base, range.len, device);
                Ok(DevicePtr(base))
            }
            Err(error) => {
                // What cannot be measured cannot be checked by anybody: it is closed, and the
                // caller told why.
                let _ = scope.call(&self.driver.symbols.hipIpcCloseMemHandle, |function| {
                    // SAFETY: `hipIpcCloseMemHandle` asks for an address that was opened: above,
                    // and nobody saw it.
                    unsafe { function(base) }
                });
                Err(error)
            }
        }
    }
}

impl HipBackend {
    /// Allocates plain memory, in whole large pages.
    pub(crate) fn alloc_plain(
        &self,
        device: DeviceId,
        len: u64,
        origin: Origin,
    ) -> Result<Allocation> {
        let size = round_up(len, self.driver.granularity(device)?)?;
        let scope = self.driver.on_device(device)?;
        let symbol = &self.driver.symbols.hipMalloc;
        let mut base = 0;
        let code = scope.code(symbol, |function| {
            // SAFETY: `hipMalloc` writes one address: `base` is one.
            unsafe { function(&raw mut base, size) }
        })?;
        if code != SUCCESS {
            return Err(scope.allocation_error(symbol.name, code, len));
        }
        self.memory.insert(base, size as u64, device, origin);
        Ok(Allocation {
            base: DevicePtr(base),
            len: size as u64,
        })
    }

    /// Frees plain memory.
    ///
    /// # Safety
    ///
    /// `base` came out of the table, and no unfinished GPU work touches it.
    pub(crate) unsafe fn free_plain(&self, base: DevicePtr, device: DeviceId) -> Result<()> {
        self.pass_known_streams();
        let scope = self.driver.on_device(device)?;
        scope.call(&self.driver.symbols.hipFree, |function| {
            // SAFETY: `hipFree` asks for the base of memory that is not freed and not in use: it
            // was taken out of the table once, and our caller vouches for the rest.
            unsafe { function(base.0) }
        })
    }

    /// Unmaps what `open_handle` mapped. Waits for all work of the device.
    ///
    /// # Safety
    ///
    /// `base` came out of the table, and no unfinished GPU work touches it.
    pub(crate) unsafe fn close_plain(&self, base: DevicePtr, device: DeviceId) -> Result<()> {
        self.pass_known_streams();
        let scope = self.driver.on_device(device)?;
        scope.call(&self.driver.symbols.hipIpcCloseMemHandle, |function| {
            // SAFETY: `hipIpcCloseMemHandle` asks for an address that was opened and is not in use:
            // it was taken out of the table once for each time it was opened, and our caller
            // vouches for the rest.
            unsafe { function(base.0) }
        })
    }

    /// Refuses a handle whose exporter numbers its device as this process numbers none: the runtime
    /// would give 1.
    fn check_device_named(&self, handle: &MemHandle) -> Result<()> {
        let named = handle.0[DEVICE].try_into().map_or(0, u32::from_le_bytes);
        let count = self.driver.count();
        if !self.driver.version().handles_name_devices() || (named as usize) < count {
            return Ok(());
        }
        Err(Error::Mismatch {
            what: "the devices that the processes see",
            theirs: format!("one with the number {named}, which the handle is of"),
            ours: format!("{count}"),
            remedy: "give both processes the same HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES: the runtime looks the \
                     exporter's number up among the importer's devices",
        })
    }

    fn open_error(&self, device: DeviceId, handle: &MemHandle, code: u32) -> Error {
        let symbols = &self.driver.symbols;
        let made_by = handle.0[PROCESS].try_into().map(u32::from_le_bytes).ok();
        let source = match code {
            INVALID_CONTEXT if made_by == Some(process::id()) => symbols.explained(
                code,
                "made by a process of this number: by this one, which must not open it, or by one in another PID \
                 namespace; give the containers one PID namespace",
            ),
            INVALID_CONTEXT => symbols.explained(code, "made by this process, which must not open it"),
            INVALID_DEVICE_POINTER => symbols.explained(
                code,
                "the driver cannot attach the memory: it is freed, its process is gone, the containers do not share \
                 the ipc, pid and net namespaces of one host, or it was never exported, which runtimes of 5.7 to 6.1 \
                 do not tell",
            ),
            INVALID_VALUE => symbols.explained(
                code,
                "the bytes are no handle of a runtime of this version, or the processes see different devices: give \
                 both the same ROCm, HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES",
            ),
            code => symbols.error(code),
        };
        Error::Driver {
            call: symbols.hipIpcOpenMemHandle.name,
            device,
            source,
        }
    }
}

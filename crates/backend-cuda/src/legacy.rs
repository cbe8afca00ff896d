//! Memory by `cuMemAlloc`: shared by a 64-byte handle, always read-write.

use gpu_api::{Allocation, DeviceId, DevicePtr, GpuHandles, MemHandle, Result, round_up};

use crate::backend::CudaBackend;
use crate::error::{INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, SUCCESS};
use crate::memory::Origin;
use crate::sys::{CUipcMemHandle, IPC_LAZY_PEER_ACCESS};

// SAFETY: the condition of `GpuHandles`: a handle is what `cuIpcGetMemHandle` gave, and is opened
// by its own call.
unsafe impl GpuHandles for CudaBackend {
    fn export_handle(&self, base: DevicePtr) -> Result<MemHandle> {
        const WHAT: &str = "a 64-byte handle of this memory";
        self.exportable(base, WHAT)?;
        let scope = self.driver.anywhere()?;
        let symbol = &self.driver.symbols.cuIpcGetMemHandle;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        let code = scope.code(symbol, |function| {
            // SAFETY: `cuIpcGetMemHandle` writes 64 bytes: `handle` has as many. The address is
            // looked up, not followed.
            unsafe { function(&raw mut handle, base.0) }
        })?;
        match code {
            SUCCESS => Ok(MemHandle(handle.reserved.map(|byte| byte as u8))),
            INVALID_VALUE | INVALID_HANDLE | NOT_FOUND | NOT_SUPPORTED => {
                Err(self.refusal(base, WHAT))
            }
            code => Err(scope.error(symbol.name, code)),
        }
    }

    fn open_handle(&self, device: DeviceId, handle: &MemHandle) -> Result<DevicePtr> {
        let scope = self.driver.on_device(device)?;
        let handle = CUipcMemHandle {
            reserved: handle.0.map(|byte| byte as _),
        };
        let mut base = 0;
        scope.call(&self.driver.symbols.cuIpcOpenMemHandle, |function| {
            // SAFETY: `cuIpcOpenMemHandle` writes one address: `base` is one. It checks the
            // handle's bytes.
            unsafe { function(&raw mut base, handle, IPC_LAZY_PEER_ACCESS) }
        })?;
        match self.driver_range(&scope, DevicePtr(base)) {
            Ok(range) => {
                self.memory
                    .opened(base, range.len, device, Origin::Opened { times: 1 });
                Ok(DevicePtr(base))
            }
            Err(error) => {
                // What cannot be measured cannot be checked by anybody: it is closed, and the
                // caller told why.
                let _ = scope.call(&self.driver.symbols.cuIpcCloseMemHandle, |function| {
                    // SAFETY: `cuIpcCloseMemHandle` asks for an address that was opened: above, and
                    // nobody saw it.
                    unsafe { function(base) }
                });
                Err(error)
            }
        }
    }
}

impl CudaBackend {
    /// Allocates plain memory, in whole large pages: a handle opens all of the page that its memory
    /// lies in, and smaller allocations of this process would share one.
    pub(crate) fn alloc_plain(&self, device: DeviceId, len: u64) -> Result<Allocation> {
        let size = round_up(len, self.driver.granularity(device)?)?;
        let scope = self.driver.on_device(device)?;
        let symbol = &self.driver.symbols.cuMemAlloc;
        let mut base = 0;
        let code = scope.code(symbol, |function| {
            // SAFETY: `cuMemAlloc` writes one address: `base` is one.
            unsafe { function(&raw mut base, size) }
        })?;
        if code != SUCCESS {
            return Err(scope.allocation_error(symbol.name, code, len));
        }
        self.memory.insert(base, size as u64, device, Origin::Plain);
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
        self.pass_own_streams();
        let scope = self.driver.on_device(device)?;
        scope.call(&self.driver.symbols.cuMemFree, |function| {
            // SAFETY: `cuMemFree` asks for the base of memory that is not freed and not in use: it
            // was taken out of the table once, and our caller vouches for the rest.
            unsafe { function(base.0) }
        })
    }

    /// Unmaps what `open_handle` mapped.
    ///
    /// # Safety
    ///
    /// `base` came out of the table, and no unfinished GPU work touches it.
    pub(crate) unsafe fn close_plain(&self, base: DevicePtr, device: DeviceId) -> Result<()> {
        self.pass_own_streams();
        let scope = self.driver.on_device(device)?;
        scope.call(&self.driver.symbols.cuIpcCloseMemHandle, |function| {
            // SAFETY: `cuIpcCloseMemHandle` asks for an address that was opened and is not in use:
            // it was taken out of the table once for each time it was opened, and our caller
            // vouches for the rest.
            unsafe { function(base.0) }
        })
    }
}

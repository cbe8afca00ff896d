//! Plain memory (`cuMemAlloc`, `hipMalloc`): shared by a 64-byte handle, always read-write.

use gpu_api::{
    AddressRange, Allocation, DeviceId, DevicePtr, GpuDevices, GpuHandles, MemHandle, Result,
    round_up,
};

use crate::backend::Backend;
use crate::calls::Handle;
use crate::code::{Code, SUCCESS};
use crate::memory_table::Origin;
use crate::pointer;
use crate::vendor::{Scope, Vendor};

// SAFETY: the condition of `GpuHandles`: a handle is what `handle_get` gave, and is opened by its
// own call.
unsafe impl<V: Vendor> GpuHandles for Backend<V> {
    fn export_handle(&self, base: DevicePtr) -> Result<MemHandle> {
        self.vendor().export_handle(base)
    }

    fn open_handle(&self, device: DeviceId, handle: &MemHandle) -> Result<DevicePtr> {
        let range = self.vendor().open_handle(device, handle)?;
        self.driver().memory.opened(range.base.0, range.len, device);
        Ok(range.base)
    }

    fn is_served(&self, base: DevicePtr) -> Result<bool> {
        self.vendor().is_handle_served(base)
    }
}

/// Asks for the handle of an allocation.
///
/// # Errors
///
/// The driver's, where it lacks the call; a code of the call is an answer.
pub fn handle_of<V: Vendor>(
    scope: &Scope<'_, V>,
    base: DevicePtr,
) -> Result<std::result::Result<MemHandle, Code>> {
    let mut handle = Handle::new([0; 64]);
    let code = scope.code(&scope.vendor.driver().calls.handle_get, |function| {
        // SAFETY: `handle_get` writes 64 bytes: `handle` has as many. The address is looked up, not
        // followed.
        unsafe { function(&raw mut handle, base.0) }
    })?;
    Ok(match code {
        SUCCESS => Ok(MemHandle(handle.bytes())),
        code => Err(code),
    })
}

/// Opens a handle, and measures what lies there.
///
/// # Errors
///
/// The driver's, where it lacks the call or does not say what was opened, which is closed then; a
/// code of the call is an answer.
pub fn open<V: Vendor>(
    scope: &Scope<'_, V>,
    handle: &MemHandle,
) -> Result<std::result::Result<AddressRange, Code>> {
    let calls = &scope.vendor.driver().calls;
    let (bytes, flags) = (Handle::new(handle.0), scope.vendor.quirks().open_flags);
    let mut base = 0;
    let code = scope.code(&calls.handle_open, |function| {
        // SAFETY: `handle_open` writes one address: `base` is one. It checks the handle's bytes.
        unsafe { function(&raw mut base, bytes, flags) }
    })?;
    if code != SUCCESS {
        return Ok(Err(code));
    }
    // What cannot be measured cannot be checked.
    let range = pointer::driver_range(scope, DevicePtr(base));
    range
        .inspect_err(|_| close_unused(scope, DevicePtr(base)))
        .map(Ok)
}

/// Closes what was opened and was told to no other code.
pub fn close_unused<V: Vendor>(scope: &Scope<'_, V>, base: DevicePtr) {
    // It stays mapped where that fails, which the caller's own error outweighs.
    let _ = scope.call(&scope.vendor.driver().calls.handle_close, |function| {
        // SAFETY: `handle_close` asks for an address that was opened: our caller did, and nothing
        // else has it.
        unsafe { function(base.0) }
    });
}

impl<V: Vendor> Backend<V> {
    /// Allocates plain memory, in whole large pages: a handle opens all of the page that its memory
    /// lies in, and smaller allocations of this process would share one.
    pub(crate) fn alloc_plain(
        &self,
        device: DeviceId,
        len: u64,
        origin: Origin,
    ) -> Result<Allocation> {
        let size = round_up(len, self.granularity(device)?)?;
        let tail = match origin {
            Origin::Plain => self.quirks().tail,
            _ => 0,
        };
        let whole = usize::try_from(tail)
            .ok()
            .and_then(|tail| tail.checked_add(size));
        let scope = self.on_device(device)?;
        let mut base = 0;
        scope.allocate(&self.driver().calls.malloc, len, |function| {
            // SAFETY: `malloc` writes one address: `base` is one.
            unsafe { function(&raw mut base, whole.unwrap_or(usize::MAX)) }
        })?;
        self.driver()
            .memory
            .insert(base, size as u64, device, origin);
        Ok(Allocation {
            base: DevicePtr(base),
            len: size as u64,
        })
    }

    /// Frees plain or managed memory.
    ///
    /// # Safety
    ///
    /// `base` came out of the table, and no unfinished GPU work touches it.
    pub(crate) unsafe fn free_plain(&self, base: DevicePtr, device: DeviceId) -> Result<()> {
        self.pass_known_streams();
        let scope = self.on_device(device)?;
        scope.call(&self.driver().calls.free, |function| {
            // SAFETY: `free` asks for the base of memory that is not freed and not in use: it was
            // taken out of the table once, and our caller vouches for the rest.
            unsafe { function(base.0) }
        })
    }

    /// Unmaps what `open_handle` mapped. May wait for all work of the device.
    ///
    /// # Safety
    ///
    /// `base` came out of the table, and no unfinished GPU work touches it.
    pub(crate) unsafe fn close_plain(&self, base: DevicePtr, device: DeviceId) -> Result<()> {
        self.pass_known_streams();
        let scope = self.on_device(device)?;
        scope.call(&self.driver().calls.handle_close, |function| {
            // SAFETY: `handle_close` asks for an address that was opened and is not in use: it was
            // taken out of the table once for each time it was opened, and our caller vouches for
            // the rest.
            unsafe { function(base.0) }
        })
    }
}

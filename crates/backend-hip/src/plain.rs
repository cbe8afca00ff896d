//! Plain memory (`hipMalloc`) in other processes: its handle, and opening one.

use std::process;
use std::sync::PoisonError;

use driver::code::{
    INVALID_CONTEXT, INVALID_DEVICE_POINTER, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND,
    NOT_SUPPORTED,
};
use driver::memory_table::Origin;
use driver::pointer::refusal;
use driver::{Vendor, plain};
use gpu_api::{AddressRange, DeviceId, DevicePtr, Error, MemHandle, Result};

use crate::hip::Hip;
use crate::kernel;
use crate::signal::without_sigpipe;

/// Where AMD's runtime writes the process number of the exporting process into a handle.
const PROCESS: std::ops::Range<usize> = 48..52;
/// Where it writes the exporter's number of the device.
const DEVICE: std::ops::Range<usize> = 52..56;

impl Hip {
    /// Gets the handle of plain memory.
    pub(crate) fn plain_handle(&self, base: DevicePtr) -> Result<MemHandle> {
        let found = self
            .driver()
            .memory
            .find(base)
            .filter(|(range, _)| range.base == base);
        let entry = match found {
            Some((_, entry))
                if matches!(entry.origin, Origin::Plain | Origin::Adopted) && !entry.leaked =>
            {
                entry
            }
            _ => return Err(refusal(self, base, "a 64-byte handle of this memory")),
        };
        let lock = self.handles.of_exporter(process::id());
        let _exporting = lock.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(handle) = self.handles.get(base) {
            return Ok(handle);
        }
        // The runtime takes the device from the thread, not from the address.
        let scope = self.on_device(entry.device)?;
        let symbol = &self.driver().calls.handle_get;
        match without_sigpipe(|| plain::handle_of(&scope, base))? {
            Ok(handle) => {
                self.handles.keep(&self.driver().memory, base, handle);
                Ok(handle)
            }
            // It is the base of live memory that may be exported: the table says so.
            Err(
                code @ (INVALID_VALUE
                | INVALID_DEVICE_POINTER
                | INVALID_HANDLE
                | NOT_FOUND
                | NOT_SUPPORTED),
            ) => Err(Error::Driver {
                call: symbol.name,
                device: entry.device,
                source: self
                    .symbols()
                    .explained(code, kernel::no_handle(self.version())),
            }),
            Err(code) => Err(scope.error(symbol.name, code)),
        }
    }

    /// Opens a handle.
    ///
    /// The exporter's number of the device is replaced by this process' own: the runtime looks it up
    /// among the importer's devices and uses it for nothing but the way to the peer (clr,
    /// `hipIpcOpenMemHandle`), so processes may see different devices. The memory itself is found by
    /// the rest of the handle.
    ///
    /// The lock is the exporter's: an open that waits for one process (10 s for one that has died,
    /// or for good: ROCm/rocm-systems#9827) holds up no open of another's memory.
    pub(crate) fn open_plain(&self, device: DeviceId, handle: &MemHandle) -> Result<AddressRange> {
        let mut named = MemHandle(handle.0);
        if self.version().handles_name_devices() {
            let ordinal = self.ordinal(device)?.cast_unsigned();
            named.0[DEVICE].copy_from_slice(&ordinal.to_le_bytes());
        }
        let exporter = handle.0[PROCESS].try_into().map_or(0, u32::from_le_bytes);
        let lock = self.handles.of_exporter(exporter);
        let _opening = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let scope = self.on_device(device)?;
        without_sigpipe(|| plain::open(&scope, &named))?
            .map_err(|code| self.open_error(device, handle, code))
    }

    fn open_error(&self, device: DeviceId, handle: &MemHandle, code: u32) -> Error {
        let symbols = self.symbols();
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
                "the bytes are no handle of a runtime of this version, give both processes the same ROCm",
            ),
            code => symbols.error(code),
        };
        Error::Driver {
            call: self.driver().calls.handle_open.name,
            device,
            source,
        }
    }
}

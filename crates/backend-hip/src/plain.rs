//! Plain memory (`hipMalloc`) in other processes: its handle, and opening one.

use std::process;

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
        let _sharing = self.handles.exporting();
        if let Some(handle) = self.handles.get(base) {
            return Ok(handle);
        }
        // The runtime takes the device from the thread, not from the address.
        let scope = self.on_device(entry.device)?;
        let symbol = &self.driver().calls.handle_get;
        match plain::handle_of(&scope, base)? {
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
                source: self.symbols().explained(code, kernel::no_handle()),
            }),
            Err(code) => Err(scope.error(symbol.name, code)),
        }
    }

    /// Opens a handle.
    pub(crate) fn open_plain(&self, device: DeviceId, handle: &MemHandle) -> Result<AddressRange> {
        self.check_device_named(handle)?;
        let scope = self.on_device(device)?;
        let _sharing = self.handles.exporting();
        plain::open(&scope, handle)?.map_err(|code| self.open_error(device, handle, code))
    }

    /// Refuses a handle whose exporter numbers its device as this process numbers none: the runtime
    /// would give 1.
    fn check_device_named(&self, handle: &MemHandle) -> Result<()> {
        let named = handle.0[DEVICE].try_into().map_or(0, u32::from_le_bytes);
        let count = self.count();
        if !self.version().handles_name_devices() || (named as usize) < count {
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
                "the bytes are no handle of a runtime of this version, or the processes see different devices: give \
                 both the same ROCm, HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES",
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

//! Plain memory (`hipMalloc`) in other processes: its handle, and opening one.

use std::process;
use std::sync::Arc;

use driver::code::{
    Code, INVALID_CONTEXT, INVALID_DEVICE_POINTER, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND,
    NOT_SUPPORTED, UNKNOWN,
};
use driver::memory_table::Origin;
use driver::pointer::refusal;
use driver::{Vendor, plain};
use gpu_api::{AddressRange, DeviceId, DevicePtr, Error, MemHandle, Result};

use crate::exporter::Left;
use crate::hip::Hip;
use crate::kernel::{self, IpcMode};
use crate::seal;

/// What names the memory in a handle.
const NAME: std::ops::Range<usize> = 0..52;
/// Where AMD's runtime writes the process number of the exporting process into a handle.
const PROCESS: std::ops::Range<usize> = 48..52;
/// Where it writes the exporter's number of the device.
const DEVICE: std::ops::Range<usize> = 52..56;

impl Hip {
    /// Gets the handle of plain memory.
    pub(crate) fn plain_handle(self: &Arc<Self>, base: DevicePtr) -> Result<MemHandle> {
        let found = self
            .driver()
            .memory
            .find(base)
            .filter(|(range, _)| range.base == base);
        let (range, entry) = match found {
            Some((range, entry))
                if matches!(entry.origin, Origin::Plain | Origin::Adopted) && !entry.leaked =>
            {
                (range, entry)
            }
            _ => return Err(refusal(&**self, base, "a 64-byte handle of this memory")),
        };
        if let Some(handle) = self.handles.get(base) {
            return Ok(handle);
        }
        let (symbol, device) = (&self.driver().calls.handle_get, entry.device);
        let (hip, theirs) = (Arc::clone(self), Arc::clone(self));
        let call = move || match hip.handles.get(base) {
            Some(handle) => Ok(Ok(handle)),
            None => {
                // The runtime takes the device from the thread, not from the address.
                let made = plain::handle_of(&hip.on_device(device)?, base);
                if let Ok(Ok(handle)) = made {
                    hip.handles.keep(base, handle, device);
                }
                made
            }
        };
        // The caller goes on without it, and may free the memory.
        let undo = move |_| theirs.handles.forget(base);
        let made = self
            .handles
            .exporter(process::id())
            .run(None, call, undo)?
            .map_err(|left| self.left(symbol.name, device, left))??;
        match made {
            Ok(mut handle) => {
                self.handles.renewal.end(true);
                if self.quirks.tail > 0 && entry.origin == Origin::Plain {
                    self.seal(device, base, range.len, &mut handle)?;
                    self.handles.keep(base, handle, device);
                }
                Ok(handle)
            }
            // It is the base of live memory that may be exported: the table says so.
            Err(
                code @ (INVALID_VALUE
                | INVALID_DEVICE_POINTER
                | INVALID_HANDLE
                | NOT_FOUND
                | NOT_SUPPORTED),
            ) => {
                let why = kernel::no_handle(self.version());
                Err(self.explained(symbol.name, device, code, why))
            }
            Err(code) => Err(self.on_device(device)?.error(symbol.name, code)),
        }
    }

    /// Says whether a handle that was exported opens now. Where the runtime's server has gone, which
    /// ends with a consumer that dies while it opens one, everything is exported again, on a thread:
    /// the runtime waits 10 s for the old server first.
    pub(crate) fn is_plain_served(self: &Arc<Self>, base: DevicePtr) -> Result<bool> {
        if self.mode != IpcMode::Server
            || self.handles.get(base).is_none()
            || self.handles.renewal.has_failed()
            || kernel::has_server()
        {
            return Ok(true);
        }
        if !self.handles.renewal.begin() {
            return Ok(false);
        }
        let hip = Arc::clone(self);
        let run = move || {
            let exporter = hip.handles.exporter(process::id());
            let _turn = exporter.turn();
            // The runtime keeps an allocation's name: the bytes are those that were given out.
            let succeeded = hip.handles.export_again(|base, kept| {
                let scope = hip.on_device(kept.device);
                let again = scope.and_then(|scope| plain::handle_of(&scope, base));
                matches!(again, Ok(Ok(again)) if again.0[NAME] == kept.handle.0[NAME])
            });
            hip.handles.renewal.end(succeeded);
        };
        gpu_api::thread::start("gpu-ipc-hip-renew", run)
            .inspect_err(|_| self.handles.renewal.end(true))
            .map(|_| false)
    }

    /// Opens a handle.
    ///
    /// The exporter's number of the device is replaced by this process' own: the runtime looks it up
    /// among the importer's devices and uses it for nothing but the way to the peer (clr,
    /// `hipIpcOpenMemHandle`), so processes may see different devices. The memory itself is found by
    /// the rest of the handle.
    pub(crate) fn open_plain(
        self: &Arc<Self>,
        device: DeviceId,
        handle: &MemHandle,
    ) -> Result<AddressRange> {
        let mut named = MemHandle(handle.0);
        named.0[seal::PLACE].fill(0);
        if self.version().handles_name_devices() {
            let ordinal = self.ordinal(device)?.cast_unsigned();
            named.0[DEVICE].copy_from_slice(&ordinal.to_le_bytes());
        }
        let exporter = handle.0[PROCESS].try_into().map_or(0, u32::from_le_bytes);
        let (hip, theirs) = (Arc::clone(self), Arc::clone(self));
        let call = move || plain::open(&hip.on_device(device)?, &named);
        // No other thread learns of what the call opened that was left.
        let undo = move |opened| {
            if let (Ok(Ok(AddressRange { base, .. })), Ok(scope)) =
                (opened, theirs.on_device(device))
            {
                plain::close_unused(&scope, base);
            }
        };
        let calls = &self.driver().calls;
        let of_other_process = (exporter != process::id()).then_some(exporter);
        let opened = self
            .handles
            .exporter(exporter)
            .run(of_other_process, call, undo)?
            .map_err(|left| self.left(calls.handle_open.name, device, left))??
            .map_err(|code| self.open_error(device, handle, code))?;
        let unsealed = self.unsealed(device, opened, handle);
        if let Ok(Some(seen)) = unsealed {
            return Ok(seen);
        }
        plain::close_unused(&self.on_device(device)?, opened.base);
        unsealed?;
        Err(self.explained(
            calls.handle_open.name,
            device,
            UNKNOWN,
            "the runtime mapped other memory than the handle's (ROCm/rocm-systems#11892), which is closed again; let no \
             other code export this memory, or, with ROCm's own driver, set HSA_ENABLE_IPC_MODE_LEGACY=1 in every \
             process",
        ))
    }

    fn explained(&self, call: &'static str, device: DeviceId, code: Code, why: &str) -> Error {
        Error::Driver {
            call,
            device,
            source: self.symbols().explained(code, why),
        }
    }

    fn left(&self, call: &'static str, device: DeviceId, left: Left) -> Error {
        self.explained(call, device, INVALID_DEVICE_POINTER, left.meaning())
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

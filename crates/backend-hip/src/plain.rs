//! Plain memory (`hipMalloc`) in other processes: its handle, and opening one.

use std::ffi::c_int;
use std::process;

use driver::calls::{CAPTURE_RELAXED, Handle, Symbol};
use driver::code::{
    Code, INVALID_CONTEXT, INVALID_DEVICE_POINTER, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND,
    NOT_SUPPORTED, SUCCESS, UNKNOWN,
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

/// What a call needs on a thread that the runtime does not know yet.
#[derive(Clone, Copy)]
struct Fresh {
    ordinal: c_int,
    set_device: unsafe extern "C" fn(c_int) -> Code,
    exchange_capture_mode: Option<unsafe extern "C" fn(*mut u32) -> Code>,
}

impl Fresh {
    /// Makes the device current on this thread, in the mode that destroys no capture.
    fn enter(self) -> std::result::Result<(), Code> {
        let mut mode = CAPTURE_RELAXED;
        // SAFETY: `exchange_capture_mode` reads a mode and writes the former: `mode` is one.
        let relaxed = self
            .exchange_capture_mode
            .map_or(SUCCESS, |exchange| unsafe { exchange(&raw mut mode) });
        // SAFETY: `hipSetDevice` refuses what is no device.
        let entered = unsafe { (self.set_device)(self.ordinal) };
        match (relaxed, entered) {
            (SUCCESS, SUCCESS) => Ok(()),
            (SUCCESS, code) | (code, _) => Err(code),
        }
    }
}

impl Hip {
    fn fresh(&self, device: DeviceId) -> Result<Fresh> {
        Ok(Fresh {
            ordinal: self.ordinal(device)?,
            set_device: self.required(&self.own().hipSetDevice)?,
            exchange_capture_mode: self.driver().calls.exchange_capture_mode.function,
        })
    }

    fn required<F: Copy>(&self, symbol: &Symbol<F>) -> Result<F> {
        symbol.function.ok_or_else(|| self.missing(symbol.name))
    }

    /// Gets the handle of plain memory.
    pub(crate) fn plain_handle(&self, base: DevicePtr) -> Result<MemHandle> {
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
            _ => return Err(refusal(self, base, "a 64-byte handle of this memory")),
        };
        if let Some(handle) = self.handles.get(base) {
            return Ok(handle);
        }
        // The runtime takes the device from the thread, not from the address.
        let (fresh, device) = (self.fresh(entry.device)?, entry.device);
        let symbol = &self.driver().calls.handle_get;
        let get = self.required(symbol)?;
        let (handles, theirs) = (self.handles.clone(), self.handles.clone());
        let call = move || match handles.get(base) {
            Some(handle) => Ok(handle),
            None => export(fresh, get, base).inspect(|handle| handles.keep(base, *handle, device)),
        };
        // The caller goes on without it, and may free the memory.
        let undo = move |_| theirs.forget(base);
        let made = self
            .handles
            .exporter(process::id())
            .run(None, call, undo)?
            .map_err(|left| self.left(symbol.name, device, left))?;
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
    pub(crate) fn is_plain_served(&self, base: DevicePtr) -> Result<bool> {
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
        let fresh: Vec<Result<Fresh>> = (0..self.count() as u32)
            .map(|number| self.fresh(DeviceId(number)))
            .collect();
        let get = self.driver().calls.handle_get.function;
        let handles = self.handles.clone();
        let run = move || {
            let exporter = handles.exporter(process::id());
            let _turn = exporter.turn();
            // The runtime keeps an allocation's name: the bytes are those that were given out.
            let succeeded = handles.export_again(|base, kept| {
                let fresh = fresh.get(kept.device.0 as usize);
                let fresh = fresh.and_then(|fresh| fresh.as_ref().ok());
                let (Some(&fresh), Some(get)) = (fresh, get) else {
                    return false;
                };
                let name = |handle: &MemHandle| handle.0[NAME] == kept.handle.0[NAME];
                export(fresh, get, base).is_ok_and(|again| name(&again))
            });
            handles.renewal.end(succeeded);
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
    pub(crate) fn open_plain(&self, device: DeviceId, handle: &MemHandle) -> Result<AddressRange> {
        let mut named = MemHandle(handle.0);
        named.0[seal::PLACE].fill(0);
        if self.version().handles_name_devices() {
            let ordinal = self.ordinal(device)?.cast_unsigned();
            named.0[DEVICE].copy_from_slice(&ordinal.to_le_bytes());
        }
        let exporter = handle.0[PROCESS].try_into().map_or(0, u32::from_le_bytes);
        let (fresh, flags) = (self.fresh(device)?, self.quirks.open_flags);
        let calls = &self.driver().calls;
        let open = self.required(&calls.handle_open)?;
        let close = self.required(&calls.handle_close)?;
        let call = move || {
            fresh.enter()?;
            let mut base = 0;
            // SAFETY: `hipIpcOpenMemHandle` writes one address: `base` is one. It checks the bytes.
            match unsafe { open(&raw mut base, Handle::new(named.0), flags) } {
                SUCCESS => Ok(base),
                code => Err(code),
            }
        };
        let undo = move |opened| {
            if let Ok(base) = opened {
                // SAFETY: `hipIpcCloseMemHandle` asks for an address that was opened and is not in
                // use: the call that was left opened it, and no other thread learns of it.
                unsafe { close(base) };
            }
        };
        let of_other_process = (exporter != process::id()).then_some(exporter);
        let base = self
            .handles
            .exporter(exporter)
            .run(of_other_process, call, undo)?
            .map_err(|left| self.left(calls.handle_open.name, device, left))?
            .map_err(|code| self.open_error(device, handle, code))?;
        let scope = self.on_device(device)?;
        let opened = plain::measured(&scope, DevicePtr(base))?;
        let unsealed = self.unsealed(device, opened, handle);
        if let Ok(Some(seen)) = unsealed {
            return Ok(seen);
        }
        plain::close_unused(&scope, opened.base);
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

/// Asks the runtime for a handle, on a thread of its own.
fn export(
    fresh: Fresh,
    get: unsafe extern "C" fn(*mut Handle, u64) -> Code,
    base: DevicePtr,
) -> std::result::Result<MemHandle, Code> {
    fresh.enter()?;
    let mut handle = Handle::new([0; 64]);
    // SAFETY: `hipIpcGetMemHandle` writes 64 bytes: `handle` has as many. The address is looked up,
    // not followed.
    match unsafe { get(&raw mut handle, base.0) } {
        SUCCESS => Ok(MemHandle(handle.bytes())),
        code => Err(code),
    }
}

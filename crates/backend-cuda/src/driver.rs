//! The driver once it runs: its functions, its version and its devices.

use std::ffi::c_int;
use std::fmt;
use std::sync::{Mutex, OnceLock};

use gpu_api::{BackendKind, DeviceId, Error, Result};

use crate::error::{self, SUCCESS};
use crate::sys::{CUdevice, Code, Symbol, Symbols, attribute};

/// A driver that runs.
pub(crate) struct Driver {
    pub(crate) symbols: Symbols,
    version: u32,
    pub(crate) devices: Vec<Device>,
}

/// One device of the driver's.
pub(crate) struct Device {
    /// The driver's own number, or the code that it gave instead of one.
    pub(crate) ordinal: std::result::Result<CUdevice, Code>,
    /// The primary context as an address, once something needed it.
    pub(crate) context: OnceLock<usize>,
    /// Held while the context is retained, so that it is retained once.
    pub(crate) retaining: Mutex<()>,
}

impl Driver {
    /// Starts the driver.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] with the reason and what to do about it.
    pub(crate) fn start(symbols: Symbols) -> Result<Driver> {
        start_call(&symbols, &symbols.cuInit, |function| {
            // SAFETY: `cuInit` asks for 0.
            unsafe { function(0) }
        })?;
        let mut version: c_int = 0;
        start_call(&symbols, &symbols.cuDriverGetVersion, |function| {
            // SAFETY: `cuDriverGetVersion` writes one integer: `version` is one.
            unsafe { function(&raw mut version) }
        })?;
        let mut count: c_int = 0;
        start_call(&symbols, &symbols.cuDeviceGetCount, |function| {
            // SAFETY: `cuDeviceGetCount` writes one integer: `count` is one.
            unsafe { function(&raw mut count) }
        })?;
        if count <= 0 {
            return Err(symbols.unavailable("cuDeviceGetCount", 100));
        }
        let mut devices = Vec::new();
        for number in 0..count {
            let get = symbols
                .cuDeviceGet
                .function
                .ok_or_else(|| no_driver(&symbols.cuDeviceGet))?;
            let mut ordinal: CUdevice = 0;
            // SAFETY: `cuDeviceGet` writes one integer: `ordinal` is one.
            let code = unsafe { get(&raw mut ordinal, number) };
            // A device that fails keeps its number, and hides no other.
            let ordinal = if code == SUCCESS {
                Ok(ordinal)
            } else {
                Err(code)
            };
            devices.push(Device {
                ordinal,
                context: OnceLock::new(),
                retaining: Mutex::new(()),
            });
        }
        Ok(Driver {
            symbols,
            version: version.unsigned_abs(),
            devices,
        })
    }

    /// Returns the version of CUDA that the driver speaks, as it writes it: 13000 is 13.0.
    pub(crate) fn version(&self) -> u32 {
        self.version
    }

    /// Counts the devices.
    pub(crate) fn count(&self) -> usize {
        self.devices.len()
    }

    /// Returns the first device whose primary context is retained.
    pub(crate) fn retained(&self) -> Option<DeviceId> {
        let found = self
            .devices
            .iter()
            .position(|device| device.context.get().is_some())?;
        Some(DeviceId(found as u32))
    }

    /// Returns the driver's own number of a device.
    pub(crate) fn ordinal(&self, device: DeviceId) -> Result<CUdevice> {
        let ordinal = self.device(device)?.ordinal;
        ordinal.map_err(|code| Error::Driver {
            call: "cuDeviceGet",
            device,
            source: self.symbols.error(code),
        })
    }

    /// Finds our number of a device by the driver's.
    pub(crate) fn numbered(&self, ordinal: CUdevice) -> Option<DeviceId> {
        let found = self
            .devices
            .iter()
            .position(|device| device.ordinal == Ok(ordinal))?;
        Some(DeviceId(found as u32))
    }

    /// Asks for a property; `None` where the driver does not know it.
    pub(crate) fn attribute(&self, ordinal: CUdevice, attribute: u32) -> Option<c_int> {
        let function = self.symbols.cuDeviceGetAttribute.function?;
        let mut value: c_int = 0;
        // SAFETY: `cuDeviceGetAttribute` writes one integer: `value` is one. Unknown attributes are
        // refused.
        let code = unsafe { function(&raw mut value, attribute, ordinal) };
        (code == SUCCESS).then_some(value)
    }

    /// Says whether a device has memory that is exported as file descriptors.
    pub(crate) fn has_virtual_memory(&self, ordinal: CUdevice) -> bool {
        let has = |attribute| {
            self.attribute(ordinal, attribute)
                .is_some_and(|value| value != 0)
        };
        has(attribute::VIRTUAL_MEMORY)
            && has(attribute::HANDLE_POSIX_FD)
            && self.symbols.cuMemCreate.function.is_some()
            && self
                .symbols
                .cuMemImportFromShareableHandle
                .function
                .is_some()
    }

    /// Finds a device.
    pub(crate) fn device(&self, device: DeviceId) -> Result<&Device> {
        self.devices
            .get(device.0 as usize)
            .ok_or_else(|| error::no_device(device, self.devices.len()))
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("version", &self.version)
            .field("devices", &self.devices.len())
            .finish_non_exhaustive()
    }
}

/// Calls a function that starts the driver: whatever goes wrong, the driver is unavailable.
fn start_call<F: Copy>(
    symbols: &Symbols,
    symbol: &Symbol<F>,
    run: impl FnOnce(F) -> Code,
) -> Result<()> {
    match run(symbol.function.ok_or_else(|| no_driver(symbol))?) {
        SUCCESS => Ok(()),
        code => Err(symbols.unavailable(symbol.name, code)),
    }
}

/// Refuses a library without a function that every driver has.
fn no_driver<F>(symbol: &Symbol<F>) -> Error {
    Error::Unavailable {
        backend: BackendKind::Cuda,
        why: format!("the library that was loaded has no {}", symbol.name),
        remedy: "it is not NVIDIA's: see LD_LIBRARY_PATH, or install the NVIDIA driver",
    }
}

//! Starting the driver: its functions, its version and its devices.

use std::ffi::c_int;
use std::sync::{Mutex, OnceLock};

use driver::calls::Symbol;
use driver::code::{Code, SUCCESS};
use gpu_api::{BackendKind, Error, Result};

use crate::sys::{CUdevice, Own};

/// One device of the driver's.
#[derive(Debug)]
pub(crate) struct Device {
    /// The driver's own number, or the code that it gave instead of one.
    pub(crate) ordinal: std::result::Result<CUdevice, Code>,
    /// The primary context as an address, once something needed it.
    pub(crate) context: OnceLock<usize>,
    /// Held while the context is retained, so that it is retained once.
    pub(crate) retaining: Mutex<()>,
}

/// Starts the driver; returns its version and its devices.
///
/// # Errors
///
/// [`Error::Unavailable`] with the reason and what to do about it.
pub(crate) fn start(symbols: &Own) -> Result<(u32, Vec<Device>)> {
    start_call(symbols, &symbols.cuInit, |function| {
        // SAFETY: `cuInit` asks for 0.
        unsafe { function(0) }
    })?;
    let mut version: c_int = 0;
    start_call(symbols, &symbols.cuDriverGetVersion, |function| {
        // SAFETY: `cuDriverGetVersion` writes one integer: `version` is one.
        unsafe { function(&raw mut version) }
    })?;
    let mut count: c_int = 0;
    start_call(symbols, &symbols.cuDeviceGetCount, |function| {
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
    Ok((version.unsigned_abs(), devices))
}

/// Calls a function that starts the driver: whatever goes wrong, the driver is unavailable.
fn start_call<F: Copy>(
    symbols: &Own,
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
    Error::unavailable(
        BackendKind::Cuda,
        format!("the library that was loaded has no {}", symbol.name),
        "it is not NVIDIA's: see LD_LIBRARY_PATH, or install the NVIDIA driver",
    )
}

//! The runtime once it runs: its functions, its version, what was proved of it, and how many
//! devices it has.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::path::{Path, PathBuf};

use gpu_api::{BackendKind, DeviceId, DeviceUuid, Error, Result};

use crate::error::{self, SUCCESS};
use crate::kernel;
use crate::proof::{Proof, Step};
use crate::sys::{Code, Symbol, Symbols};
use crate::version::Version;

/// A runtime that runs.
pub(crate) struct Driver {
    pub(crate) symbols: Symbols,
    version: Version,
    proof: Option<Proof>,
    /// What tells the devices apart; `None` for one that would not say.
    pub(crate) identities: Vec<Option<DeviceUuid>>,
    device_files: Vec<&'static str>,
    /// The folder that shows whose queues there are, where there is one with this process' pids.
    signs: Option<PathBuf>,
}

impl Driver {
    /// Starts the runtime. Its devices are not yet [identified](Driver::identified).
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] with the reason and what to do about it.
    pub(crate) fn start(
        symbols: Symbols,
        choose: impl FnOnce(Version) -> Option<Proof>,
    ) -> Result<Driver> {
        // Asked first: it answers without a device, and an error should say which runtime gave it.
        let version = version(&symbols)?;
        let text = version.to_string();
        start_call(&symbols, &text, &symbols.hipInit, |function| {
            // SAFETY: `hipInit` asks for 0.
            unsafe { function(0) }
        })?;
        let mut count: c_int = 0;
        start_call(&symbols, &text, &symbols.hipGetDeviceCount, |function| {
            // SAFETY: `hipGetDeviceCount` writes one integer: `count` is one.
            unsafe { function(&raw mut count) }
        })?;
        if count <= 0 {
            return Err(symbols.unavailable("hipGetDeviceCount", error::NO_DEVICE, &text));
        }
        if version.major() < 5 {
            return Err(Error::Unavailable {
                backend: BackendKind::Hip,
                why: format!("HIP {version} is older than what this backend knows"),
                remedy: "update ROCm to 5.2 or later",
            });
        }
        let device_files = device_files(&symbols);
        let signs = signs(&symbols);
        let proof = choose(version);
        let identities = vec![None; count.unsigned_abs() as usize];
        Ok(Driver {
            symbols,
            version,
            proof,
            identities,
            device_files,
            signs,
        })
    }

    /// Returns the runtime's version.
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Returns what was seen to work with this runtime.
    pub(crate) fn proof(&self) -> Option<&Proof> {
        self.proof.as_ref()
    }

    /// Says whether a step was seen to work with this runtime.
    pub(crate) fn proved(&self, step: Step) -> bool {
        self.proof.as_ref().is_some_and(|proof| proof.has(step))
    }

    /// Names the files that keep a process' GPU work alive.
    pub(crate) fn device_files(&self) -> &[&'static str] {
        &self.device_files
    }

    /// Returns the folder that shows whose queues there are, where there is one with this process'
    /// pids.
    pub(crate) fn signs(&self) -> Option<&Path> {
        self.signs.as_deref()
    }

    /// Counts the devices.
    pub(crate) fn count(&self) -> usize {
        self.identities.len()
    }

    /// Returns the device, if it is the only one.
    pub(crate) fn only_device(&self) -> Option<DeviceId> {
        (self.identities.len() == 1).then_some(DeviceId(0))
    }

    /// Returns the runtime's own number of a device.
    pub(crate) fn ordinal(&self, device: DeviceId) -> Result<c_int> {
        if (device.0 as usize) < self.identities.len() {
            Ok(device.0 as c_int)
        } else {
            Err(error::no_device(device, self.identities.len()))
        }
    }

    /// Finds our number of a device by the runtime's.
    pub(crate) fn numbered(&self, ordinal: c_int) -> Option<DeviceId> {
        let number = u32::try_from(ordinal).ok()?;
        ((number as usize) < self.identities.len()).then_some(DeviceId(number))
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("version", &self.version)
            .field("devices", &self.identities.len())
            .field("proof", &self.proof)
            .finish_non_exhaustive()
    }
}

/// Asks a runtime for its version, which it tells before it is started.
pub(crate) fn version(symbols: &Symbols) -> Result<Version> {
    let mut number: c_int = 0;
    start_call(symbols, "", &symbols.hipRuntimeGetVersion, |function| {
        // SAFETY: `hipRuntimeGetVersion` writes one integer: `number` is one.
        unsafe { function(&raw mut number) }
    })?;
    Ok(Version(number.unsigned_abs()))
}

fn device_files(symbols: &Symbols) -> Vec<&'static str> {
    let mut files = vec!["/dev/kfd", "/dev/dri/renderD"];
    if let Some(function) = symbols.device_files.function {
        // SAFETY: the function has no conditions.
        let named = unsafe { function() };
        // SAFETY: `CStr::from_ptr`: a library that has the function gives a constant text, and is
        // never unloaded.
        let named: &'static CStr = unsafe { CStr::from_ptr(named) };
        files.extend(named.to_str().ok());
    }
    files
}

/// Finds the folder that shows whose queues there are. Its pids are those of the first PID
/// namespace: another one's process sees its own pids elsewhere, and would take the file of a
/// stranger for a sign.
fn signs(symbols: &Symbols) -> Option<PathBuf> {
    let folder = match symbols.signs_of_life.function {
        Some(function) => {
            // SAFETY: the function has no conditions.
            let named = unsafe { function() };
            // SAFETY: `CStr::from_ptr`: a library that has the function gives a constant text, and
            // is never unloaded.
            let named = unsafe { CStr::from_ptr(named) };
            PathBuf::from(named.to_str().ok()?)
        }
        None if kernel::sees_kernels_pids() => PathBuf::from(kernel::PROCESSES),
        None => return None,
    };
    folder.is_dir().then_some(folder)
}

/// Calls a function that starts the runtime: whatever goes wrong, the runtime is unavailable.
fn start_call<F: Copy>(
    symbols: &Symbols,
    version: &str,
    symbol: &Symbol<F>,
    run: impl FnOnce(F) -> Code,
) -> Result<()> {
    let Some(function) = symbol.function else {
        return Err(Error::Unavailable {
            backend: BackendKind::Hip,
            why: format!("the library that was loaded has no {}", symbol.name),
            remedy: "it is not AMD's: see GPU_IPC_HIP_LIBRARY and LD_LIBRARY_PATH, or install ROCm's HIP runtime",
        });
    };
    match run(function) {
        SUCCESS => Ok(()),
        code => Err(symbols.unavailable(symbol.name, code, version)),
    }
}

//! Starting the runtime: its version, how many devices it has, and what shows whose GPU work runs.

use std::ffi::{CStr, c_int};
use std::path::{Path, PathBuf};

use driver::calls::Symbol;
use driver::code::{Code, NO_DEVICE, SUCCESS};
use gpu_api::{BackendKind, Error, Result};

use crate::kernel;
use crate::signs::Signs;
use crate::sys::{Symbols, Text};
use crate::version::Version;

/// Starts the runtime; returns its version and the number of its devices.
///
/// # Errors
///
/// [`Error::Unavailable`] with the reason and what to do about it.
pub(crate) fn start(symbols: &Symbols) -> Result<(Version, usize)> {
    if symbols.device_files.is_none()
        && let Some(why) = without_kfd(Path::new("/dev"))
    {
        return Err(Error::unavailable(
            BackendKind::Hip,
            why,
            "run it on Linux with the amdgpu driver",
        ));
    }
    // Asked first: it answers without a device, and an error should say which runtime gave it.
    let version = version_of(symbols)?;
    let text = version.to_string();
    start_call(symbols, &text, &symbols.own.hipInit, |function| {
        // SAFETY: `hipInit` asks for 0.
        unsafe { function(0) }
    })?;
    let mut count: c_int = 0;
    start_call(symbols, &text, &symbols.own.hipGetDeviceCount, |function| {
        // SAFETY: `hipGetDeviceCount` writes one integer: `count` is one.
        unsafe { function(&raw mut count) }
    })?;
    if count <= 0 {
        return Err(symbols.unavailable("hipGetDeviceCount", NO_DEVICE, &text));
    }
    if version.major() < 5 {
        return Err(Error::unavailable(
            BackendKind::Hip,
            format!("HIP {version} is older than what this backend knows"),
            "update ROCm to 5.2 or later",
        ));
    }
    Ok((version, count.unsigned_abs() as usize))
}

/// Says what is there in KFD's place: under WSL GPU work goes to Windows by another file
/// (ROCm/rocm-systems#3806), and no sign of a process' life is known there.
fn without_kfd(devices: &Path) -> Option<&'static str> {
    let is_wsl = devices.join("dxg").exists() && !devices.join("kfd").exists();
    is_wsl.then_some("this is WSL: there is /dev/dxg and no /dev/kfd, and when GPU work of a process ends is not told")
}

/// Asks a runtime for its version, which it tells before it is started.
pub(crate) fn version_of(symbols: &Symbols) -> Result<Version> {
    let mut number: c_int = 0;
    start_call(symbols, "", &symbols.own.hipRuntimeGetVersion, |function| {
        // SAFETY: `hipRuntimeGetVersion` writes one integer: `number` is one.
        unsafe { function(&raw mut number) }
    })?;
    Ok(Version(number.unsigned_abs()))
}

pub(crate) fn device_files(symbols: &Symbols) -> Vec<&'static str> {
    let mut files = vec!["/dev/kfd", "/dev/dri/renderD"];
    files.extend(named(symbols.device_files));
    files
}

/// Finds the folder of the nodes that KFD lists.
pub(crate) fn topology(symbols: &Symbols) -> PathBuf {
    named(symbols.topology).map_or_else(|| PathBuf::from(kernel::NODES), PathBuf::from)
}

/// Asks a library that stands in for the runtime for a name.
fn named(function: Option<Text>) -> Option<&'static str> {
    // SAFETY: the function has no conditions.
    let named = unsafe { function?() };
    // SAFETY: `CStr::from_ptr`: a library that has the function gives a constant text, and is never
    // unloaded.
    let named: &'static CStr = unsafe { CStr::from_ptr(named) };
    named.to_str().ok()
}

/// Finds the folder that shows whose queues there are. A library that stands in for the runtime
/// names its own, behind `hidden:` if the pids there are to be those of another PID namespace.
pub(crate) fn signs(symbols: &Symbols) -> Option<Signs> {
    match named(symbols.signs_of_life) {
        Some(named) => match named.strip_prefix("hidden:") {
            Some(folder) => Signs::find(folder, false),
            None => Signs::find(named, true),
        },
        None => Signs::find(kernel::PROCESSES, kernel::sees_kernels_pids()),
    }
}

/// Calls a function that starts the runtime: whatever goes wrong, the runtime is unavailable.
fn start_call<F: Copy>(
    symbols: &Symbols,
    version: &str,
    symbol: &Symbol<F>,
    run: impl FnOnce(F) -> Code,
) -> Result<()> {
    let Some(function) = symbol.function else {
        return Err(Error::unavailable(
            BackendKind::Hip,
            format!("the library that was loaded has no {}", symbol.name),
            "it is not AMD's: see GPU_IPC_HIP_LIBRARY and LD_LIBRARY_PATH, or install ROCm's HIP runtime",
        ));
    };
    match run(function) {
        SUCCESS => Ok(()),
        code => Err(symbols.unavailable(symbol.name, code, version)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wsl_is_told_by_its_device_file() {
        let devices = tempfile::tempdir().expect("a directory");
        let make = |name: &str| std::fs::write(devices.path().join(name), "").expect("made");
        assert_eq!(without_kfd(devices.path()), None);
        make("dxg");
        assert!(without_kfd(devices.path()).is_some_and(|why| why.contains("WSL")));
        make("kfd");
        assert_eq!(without_kfd(devices.path()), None);
    }
}

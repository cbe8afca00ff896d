//! HIP's functions about devices, versions and errors.

use std::ffi::{CString, c_char, c_int};
use std::os::fd::IntoRawFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::OnceLock;
use std::{env, fs, process};

use crate::below::machine;
use crate::export::{LAST, finish, hip, put_text};
use crate::machine::{DEVICE, INVALID_VALUE, Machine, NO_DEVICE, NOT_SUPPORTED, Outcome, UNKNOWN};
use crate::settings::{Fault, Settings};

const INVALID_DEVICE: u32 = 101;
const PEER_ACCESS_ALREADY_ENABLED: u32 = 704;
/// Of `hipDeviceAttribute_t`.
const VIRTUAL_MEMORY: u32 = 89;
const HOST_NUMA_NODE: u32 = 92;

/// Returns the machine if it has this device.
fn with(device: c_int) -> Outcome<&'static dyn Machine> {
    let machine = started()?;
    if (0..machine.count()).contains(&device) {
        Ok(machine)
    } else {
        Err(INVALID_DEVICE)
    }
}

/// As `with`, for questions that a sick device does not answer.
fn well(device: c_int) -> Outcome<&'static dyn Machine> {
    let machine = with(device)?;
    let sick = Settings::get().has(Fault::SickDevice) && device == machine.count() - 1;
    if sick { Err(UNKNOWN) } else { Ok(machine) }
}

/// Returns the machine; without a device it is the code of the version.
pub(crate) fn started() -> Outcome<&'static dyn Machine> {
    let none = if Settings::get().at_least(5, 7) {
        NO_DEVICE
    } else {
        INVALID_DEVICE
    };
    machine().map_err(|_| none)
}

/// Returns the machine, its calls about the thread's device, and that device.
pub(crate) fn entered() -> Outcome<(&'static dyn Machine, c_int)> {
    let (machine, device) = (started()?, DEVICE.get());
    machine.enter(device)?;
    Ok((machine, device))
}

hip! {
    hipInit(; flags: u32) {
        if flags == 0 { started().map(|_| ()) } else { Err(INVALID_VALUE) }
    }
    hipRuntimeGetVersion(version: c_int;) {
        Ok(Settings::get().version as c_int)
    }
    hipGetDeviceCount(count: c_int;) {
        // Without a device every version says this here.
        machine().map(|machine| machine.count()).map_err(|_| NO_DEVICE)
    }
    hipGetDevice(device: c_int;) {
        started().map(|_| DEVICE.get())
    }
    hipSetDevice(; device: c_int) {
        with(device)?.enter(device)?;
        DEVICE.set(device);
        Ok(())
    }
    hipDeviceGetUuid(uuid: [u8; 16]; device: c_int) {
        let (machine, settings) = (well(device)?, Settings::get());
        if settings.has(Fault::NoUuid) {
            return Ok([0; 16]);
        }
        if settings.has(Fault::SameUuid) {
            let mut uuid = [0; 16];
            uuid[..2].copy_from_slice(b"XX");
            return Ok(uuid);
        }
        if settings.has(Fault::SamePartitionUuid) {
            // Sixteen digits, as of a GPU that has a unique number.
            return Ok(*b"00c0ffee12345678");
        }
        machine.uuid(device)
    }
    hipDeviceTotalMem(bytes: usize; device: c_int) {
        with(device)?.total(device)
    }
    hipDeviceGetAttribute(value: c_int; attribute: u32, device: c_int) {
        let machine = with(device)?;
        match attribute {
            VIRTUAL_MEMORY => Ok(c_int::from(machine.granularity(device).is_ok())),
            // Of headers from 7.2 on.
            HOST_NUMA_NODE if Settings::get().at_least(7, 2) => Ok(Settings::get().numa_node),
            _ => Err(INVALID_VALUE),
        }
    }
    hipDeviceCanAccessPeer(can: c_int; device: c_int, peer: c_int) {
        with(peer)?;
        with(device)?.can_reach(device, peer).map(c_int::from)
    }
    hipDeviceEnablePeerAccess(; peer: c_int, flags: u32) {
        with(peer)?;
        let (machine, device) = entered()?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        machine.reach(device, peer)
    }
    hipThreadExchangeStreamCaptureMode(; mode: *mut u32) {
        if mode.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: reading: HIP's caller points to a mode.
        let asked = unsafe { mode.read() };
        let former = entered()?.0.exchange_mode(asked)?;
        // SAFETY: writing: HIP's caller points to a mode.
        unsafe { mode.write(former) };
        Ok(())
    }
}

/// HIP's function of that name.
///
/// # Safety
///
/// `name` points to `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> u32 {
    let found = well(device).and_then(|machine| machine.name(device));
    // SAFETY: `put_text`: our caller points to `len` bytes.
    finish(found.and_then(|found| unsafe { put_text(name, len, &found) }))
}

/// HIP's function of that name.
///
/// # Safety
///
/// `place` points to `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetPCIBusId(
    place: *mut c_char,
    len: c_int,
    device: c_int,
) -> u32 {
    // The partition is not in the place that HIP tells (`pcie.function = hsa_bdf_id & 7`).
    let shown = if Settings::get().has(Fault::SamePartitionUuid) {
        0
    } else {
        device
    };
    let found = well(device).and_then(|machine| machine.place(shown));
    // SAFETY: `put_text`: our caller points to `len` bytes.
    finish(found.and_then(|found| unsafe { put_text(place, len, &found) }))
}

/// HIP's function of that name: the thread's last error, which it forgets.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetLastError() -> u32 {
    LAST.replace(0)
}

/// HIP's function of that name.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(code: u32) -> *const c_char {
    let name = match code {
        0 => c"hipSuccess",
        INVALID_VALUE => c"hipErrorInvalidValue",
        2 => c"hipErrorOutOfMemory",
        17 => c"hipErrorInvalidDevicePointer",
        NO_DEVICE => c"hipErrorNoDevice",
        INVALID_DEVICE => c"hipErrorInvalidDevice",
        201 => c"hipErrorInvalidContext",
        400 => c"hipErrorInvalidHandle",
        600 => c"hipErrorNotReady",
        PEER_ACCESS_ALREADY_ENABLED => c"hipErrorPeerAccessAlreadyEnabled",
        NOT_SUPPORTED => c"hipErrorNotSupported",
        _ => c"hipErrorUnknown",
    };
    name.as_ptr()
}

/// Declares functions that name something in place of AMD's, for as long as the library is there.
macro_rules! named {
    ($($(#[$doc:meta])* $name:ident = $text:expr;)*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> *const c_char {
            static NAMED: OnceLock<CString> = OnceLock::new();
            NAMED.get_or_init(|| CString::new($text).expect("a path has no zero")).as_ptr()
        }
    )*};
}

named! {
    /// The folder that shows whose queues there are; behind `hidden:` its pids are not this
    /// namespace's.
    gpu_ipc_signs_of_life = env::var(SIGNS).unwrap_or_else(|_| shown(Path::new(OWN_SIGNS)));
    /// The folder of the nodes that KFD lists.
    gpu_ipc_topology = env::var("GPU_IPC_SHIM_TOPOLOGY").unwrap_or_default();
    /// The files that a process with this library open keeps open.
    gpu_ipc_device_files = machine().map_or("/dev/null", |machine| machine.device_files());
}

/// Names the folder of the signs of life.
const SIGNS: &str = "GPU_IPC_SHIM_KFD";
const OWN_SIGNS: &str = "/dev/shm/hip-on-cuda";

/// Shows this process's life in a folder, as KFD does: by a link to a descriptor, which goes with
/// the process, whether it is waited for or not. Links of processes that have gone are taken away.
fn shown(folder: &Path) -> String {
    let _ = fs::create_dir(folder);
    let _ = fs::set_permissions(folder, fs::Permissions::from_mode(0o777));
    let all = fs::read_dir(folder).into_iter().flatten().flatten();
    for gone in all.filter(|sign| sign.path().metadata().is_err()) {
        let _ = fs::remove_file(gone.path());
    }
    if let Ok(file) = rustix::fs::memfd_create("kfd", rustix::fs::MemfdFlags::CLOEXEC) {
        let own = folder.join(process::id().to_string());
        let _ = fs::remove_file(&own);
        let descriptor = format!("/proc/{}/fd/{}", process::id(), file.into_raw_fd());
        let _ = symlink(descriptor, own);
    }
    folder.display().to_string()
}

/// Shows how much memory this process has, as KFD does, where its pids are hidden: under a number
/// that is a million above its own.
pub(crate) fn show_memory(machine: &dyn Machine) -> Outcome {
    let named = env::var(SIGNS).unwrap_or_default();
    if let Some(folder) = named.strip_prefix("hidden:") {
        let (free, total) = machine.free_and_total()?;
        let own = Path::new(folder).join((1_000_000 + process::id()).to_string());
        let _ = fs::create_dir_all(&own);
        let _ = fs::write(own.join("vram_7"), (total - free).to_string());
    }
    Ok(())
}
